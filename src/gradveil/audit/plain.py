"""Dataclasses from plain JSON data, checked field by field, and what JSON cannot hold made plain.

The field types are the schema. A number that is not finite is `null` in JSON and NaN in a field of type float.
"""

import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError

T = TypeVar("T")


def finite(value: Any) -> Any:
    """Return plain data with None for every number that is not finite, as JSON wants it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read(kind: type[T], data: Any, where: str) -> T:
    """Return `data` as the dataclass `kind`: unknown or missing keys and wrong types are refused by name."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be a table, got {type(data).__name__}")
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(data.keys() - set(names))
    if unknown:
        raise ConfigError(f"{where} has an unknown key {unknown[0]!r}")
    values = {name: _value(hints[name], data[name], f"{where}.{name}") for name in names if name in data}
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{where} is incomplete: {error}") from error


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return read(hint, data, where)  # type: ignore[arg-type]
    if hint is Any:
        return data
    if origin in (Union, types.UnionType):
        inner = next(a for a in args if a is not type(None))
        return None if data is None else _value(inner, data, where)
    if origin is Literal and data in args:
        return data
    if origin is list and isinstance(data, list):
        return [_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {key: _value(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if hint is float and data is None:
        return math.nan
    if hint is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    if hint in (int, str, bool) and type(data) is hint:
        return data
    raise ConfigError(f"{where} is {data!r:.60}, which is not {getattr(hint, '__name__', hint)}")
