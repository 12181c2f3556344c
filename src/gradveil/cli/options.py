"""Command-line options made from a settings dataclass, so that each option is described in one place."""

import inspect
import operator
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer


def with_options(schema: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add one option per field of `schema` to a command that ends in `**flags`; flags not given arrive as None.

    A field's `metadata["help"]` is the option's help text.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(schema)
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = []
        for f in fields(schema):
            flag = f"--{f.name.replace('_', '-')}"
            names = [f"{flag}/--no-{flag[2:]}"] if hints[f.name] is bool else [flag]
            option = typer.Option(*names, help=_help(f), show_default=False)
            kind = operator.getitem(Annotated, (hints[f.name] | None, option))
            added.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))

        def wrapper(**values: Any) -> None:
            command(**values)

        wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _help(f: Field[Any]) -> str:
    text = str(f.metadata["help"])
    if f.default == "":
        return text
    shown = {True: "on", False: "off"}[f.default] if isinstance(f.default, bool) else f.default
    return f"{text} (default: {shown})"
