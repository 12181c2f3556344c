"""TOML files as frozen dataclasses, and back. Unknown keys are refused with the nearest known one."""

import difflib
import json
import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)
else:
    T = TypeVar("T")


def load_toml(path: str | Path, schema: type[T]) -> T:
    """Return the settings in a TOML file as a `schema`; what the file leaves out keeps its default."""
    return from_mapping(read_toml(path), schema, str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return a TOML file as plain data; `ConfigError` says where it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def from_mapping(values: Mapping[str, Any], schema: type[T], where: str = "the configuration") -> T:
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
    hints = get_type_hints(schema)
    known = [f.name for f in fields(schema) if f.init]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            rest = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {rest}")
    try:
        return schema(**{key: _fit(value, hints[key], key) for key, value in values.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def dump_toml(settings: "DataclassInstance") -> str:
    """Return a flat dataclass as TOML text that `load_toml` reads back; `None` is left out."""
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


def _fit(value: Any, kind: Any, key: str) -> Any:
    """Return `value` as `kind`: whole numbers pass as floats and lists as tuples, nothing else is converted."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        for option in get_args(kind):
            try:
                return _fit(value, option, key)
            except TypeError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_fit(item, get_args(kind)[0], key) for item in value)
    elif origin is list and isinstance(value, list | tuple):
        return [_fit(item, get_args(kind)[0], key) for item in value]
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise TypeError(f"{key} must be {getattr(kind, '__name__', kind)}, got {value!r}")
