"""Plain data that rebuilds a frozen dataclass, and text such as `error_feedback(dual_prune(top=0.1))`."""

import ast
import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from .core import Named, Spec
from .errors import ConfigError, GradveilError

T = TypeVar("T")
Table = Mapping[str, Callable[..., T]]


def to_spec(value: Any) -> Any:
    """Return the plain data of a defense or attack, nested ones included.

    >>> from gradveil import DualPrune
    >>> to_spec(DualPrune(top=0.1))
    {'name': 'dual_prune', 'top': 0.1, 'bottom': 0.75, 'rounding': 'floor', 'excess': 'hold'}
    """
    if isinstance(value, Named) and is_dataclass(value):
        return {"name": value.key(), **{f.name: to_spec(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple | list):
        return [to_spec(item) for item in value]
    return value


def to_text(value: Any) -> str:
    """Return the short text of a defense or attack, leaving out what is at its default.

    >>> from gradveil import DualPrune, ErrorFeedback
    >>> to_text(ErrorFeedback(DualPrune(top=0.1)))
    'error_feedback(dual_prune(top=0.1))'
    """
    if not (isinstance(value, Named) and is_dataclass(value)):
        return repr(value)
    parts = []
    for f in fields(value):
        item = getattr(value, f.name)
        if isinstance(item, tuple) and item and all(isinstance(i, Named) for i in item):
            parts += [to_text(i) for i in item]
        elif isinstance(item, Named):
            parts.append(to_text(item))
        elif f.default is MISSING or item != f.default:
            parts.append(f"{f.name}={item!r}")
    return f"{value.key()}({', '.join(parts)})" if parts else value.key()


def lookup(table: Table[T], name: str, kind: str) -> Callable[..., T]:
    """Return the factory called `name`, or the object at `package.module:name`; else name the nearest known one."""
    if name in table:
        return table[name]
    if ":" in name:
        found: Callable[..., T] = import_object(name)
        return found
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"unknown {kind} {name!r}: {hint}Known: {', '.join(sorted(table))}")


def import_object(path: str) -> Any:
    """Return the object at `package.module:name`."""
    module, _, name = path.partition(":")
    try:
        with users_code(f"importing {path!r}", ImportError):
            found = importlib.import_module(module)
        return getattr(found, name)
    except (ImportError, AttributeError) as error:
        remedy = "write package.module:name; installed packages and the current folder are searched"
        raise ConfigError(f"cannot import {path!r}: {error} ({remedy})") from error


@contextmanager
def users_code(what: str, *expected: type[Exception]) -> Iterator[None]:
    """Turn anything the user's own code raises, but for what is `expected`, into one line that says what and where."""
    clear: tuple[type[Exception], ...] = (GradveilError, *expected)
    try:
        yield
    except clear:
        raise
    except Exception as error:
        theirs = [f for f in traceback.extract_tb(error.__traceback__) if _is_theirs(f.filename)]
        where = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
        said = " ".join(str(error).split())
        raise ConfigError(f"{what} failed with {type(error).__name__}: {said}{where}") from error


def _is_theirs(file: str) -> bool:
    libraries = (str(Path(__file__).parent), str(Path(traceback.__file__).parent), "<frozen")
    return "site-packages" not in file and not file.startswith(libraries)


def build(table: Table[T], source: Spec | str | T, kind: str) -> T:
    """Return the object described by plain data, by text, or by itself.

    >>> from gradveil.defenses import DEFENSES
    >>> build(DEFENSES, "error_feedback(dual_prune(top=0.1))", "defense")
    ErrorFeedback(inner=DualPrune(top=0.1, bottom=0.75, rounding='floor', excess='hold'))
    """
    if isinstance(source, str):
        return _from_text(table, source, kind)
    if not isinstance(source, dict):
        return source
    if "name" not in source:
        raise ConfigError(f"a {kind} needs a name; got {source}")
    values = {key: _nested(table, value, kind) for key, value in source.items() if key != "name"}
    return _call(lookup(table, source["name"], kind), source["name"], kind, [], values)


def _nested(table: Table[T], value: Any, kind: str) -> Any:
    if isinstance(value, dict) and "name" in value:
        return build(table, value, kind)
    if isinstance(value, list):
        return tuple(_nested(table, item, kind) for item in value)
    return value


def _call(factory: Callable[..., T], name: str, kind: str, args: list[Any], kwargs: dict[str, Any]) -> T:
    signature = inspect.signature(factory)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{kind} {name}: {error}; its options are {', '.join(signature.parameters)}") from error
    try:
        if ":" not in name:
            return factory(*args, **kwargs)
        with users_code(f"{kind} {name}", TypeError, ValueError):
            return factory(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name}: {error}") from error


def _from_text(table: Table[T], text: str, kind: str) -> T:
    if ":" in text and "(" not in text:
        return _call(lookup(table, text, kind), text, kind, [], {})
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"cannot read {kind} {text!r}: write it like dual_prune(top=0.1)") from error
    result: T = _from_node(table, node, text, kind)
    return result


def _from_node(table: Table[T], node: ast.expr, text: str, kind: str) -> Any:
    if isinstance(node, ast.Name):
        return _call(lookup(table, node.id, kind), node.id, kind, [], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        args = [_from_node(table, arg, text, kind) for arg in node.args]
        kwargs = {str(k.arg): _from_node(table, k.value, text, kind) for k in node.keywords}
        return _call(lookup(table, node.func.id, kind), node.func.id, kind, args, kwargs)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ConfigError(f"cannot read {kind} {text!r}: only names, numbers and strings are allowed") from error
