"""Plain data as frozen dataclasses, and back: TOML that people write, and JSON reports.

The field types are the schema; what does not fit is refused by name, an unknown key with the nearest known one.
"""

import difflib
import json
import math
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)
else:
    T = TypeVar("T")


def option(default: Any, text: str) -> Any:
    """Return a field of a settings dataclass, with the help text of its command-line option."""
    return field(default=default, metadata={"help": text})


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return a TOML file as plain data; `ConfigError` says where it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def from_mapping(values: Any, schema: type[T], where: str = "the configuration") -> T:
    """Return a `schema` built from plain data; keys, types and values are checked and named in the error.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Job:
    ...     users: int = 10
    ...     rates: tuple[float, ...] = ()
    >>> from_mapping({"rates": [1, 0.5]}, Job)
    Job(users=10, rates=(1.0, 0.5))
    >>> from_mapping({"user": 3}, Job, "job.toml")
    Traceback (most recent call last):
    ...
    gradveil.errors.ConfigError: job.toml: unknown key 'user'; did you mean users?
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a table, got {type(values).__name__}")
    hints = get_type_hints(schema)
    known = [f.name for f in fields(schema) if f.init]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            rest = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {rest}")
    lacking = [f.name for f in fields(schema) if f.default is f.default_factory is MISSING and f.name not in values]
    if lacking:
        raise ConfigError(f"{where} is incomplete: {', '.join(lacking)} not given")
    try:
        return schema(**{key: _fit(value, hints[key], key, where) for key, value in values.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def finite(value: Any) -> Any:
    """Return plain data with None for every number that is not finite, as JSON wants it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def dump_toml(settings: "DataclassInstance") -> str:
    """Return a flat dataclass as TOML text that `read_toml` reads back; `None` is left out."""
    lines = []
    for f in fields(settings):
        value = getattr(settings, f.name)
        if value is not None:
            lines.append(f"{f.name} = {_text(value)}\n")
    return "".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(k)} = {_text(v)}' for k, v in value.items())}}}"
    return json.dumps(value)  # strings, numbers and booleans are written the same way in both


def _fit(value: Any, kind: Any, key: str, where: str) -> Any:
    """Return `value` as `kind`: whole numbers pass as floats, None as NaN and lists as tuples, no more is converted."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and type(None) in args) or (origin is Literal and value in args):
        return value
    if is_dataclass(kind):
        return from_mapping(value, cast(Any, kind), f"{where}.{key}")
    if origin in (Union, types.UnionType):
        for option in args:
            try:
                return _fit(value, option, key, where)
            except TypeError:
                continue
    elif origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(_fit(item, args[0], f"{key}[{i}]", where) for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {name: _fit(item, args[1], f"{key}.{name}", where) for name, item in value.items()}
    elif kind is float and isinstance(value, int | float | None) and not isinstance(value, bool):
        return math.nan if value is None else float(value)
    elif isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    wanted = kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("typing.")
    raise TypeError(f"{key} must be {wanted}, got {value!r:.60}")
