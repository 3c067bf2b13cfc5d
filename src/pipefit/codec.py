"""Strict conversion of frozen dataclasses to JSON and back: every unknown, missing or wrong field is a FormatError.

Supported types: dataclasses, tuples, mappings with string keys, optionals, unions of plain types, `Literal`, int,
float, str, bool. Loading dumped text gives an equal object.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pipefit.errors import FormatError, PipefitError, suggest_name

T = TypeVar("T")

_LATER, _ENCODE, _DECODE = "added later", "encode", "decode"


def to_data(value: Any) -> Any:
    """Return plain JSON data of a dataclass, nested values included. Fields with default values are kept, except those
    of `added_later`."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if dataclasses.is_dataclass(kind):
        data = {}
        for name, encode, later, default in _written_fields(kind):
            item = getattr(value, name)
            if not (later and item == default):
                data[name] = to_data(encode(item) if encode else item)
        return data
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    return value


@cache
def _written_fields(kind: type) -> tuple[tuple[str, Callable[[Any], Any] | None, bool, Any], ...]:
    """Return (name, encoder or None, whether it was added later, default) of every field of a dataclass."""
    fields = dataclasses.fields(kind)
    return tuple(
        (field.name, field.metadata.get(_ENCODE), bool(field.metadata.get(_LATER)), field.default) for field in fields
    )


def added_later(default: T) -> T:
    """Return a dataclass field that JSON data lack while it has its default.

    Data written before the field existed load, and keep their hash.
    """
    return dataclasses.field(default=default, metadata={_LATER: True})


def translated(encode: Callable[[T], T], decode: Callable[[T], T]) -> Mapping[str, Any]:
    """Return the metadata of a dataclass field whose JSON data are `encode` of its value: an older form that files and
    hashes keep."""
    return {_ENCODE: encode, _DECODE: decode}


def from_data(kind: type[T], data: Any, where: str) -> T:
    """Build an object of dataclass `kind` from JSON data. `where` names the file in error messages.

    Raises FormatError with the path of the wrong field, the value seen and the values allowed.
    """
    return typing.cast(T, _build_value(kind, data, where))


def dump_text(value: Any) -> str:
    """Return JSON text with short arrays on one line, readable in an editor and in a diff."""
    return _format_json(to_data(value), 0) + "\n"


def load_text(kind: type[T], text: str, where: str) -> T:
    """Parse the output of `dump_text`. Raises FormatError with line and column for text that is not JSON."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(
            "The file is not valid JSON; it may have been cut short.",
            where=f"{where}, line {error.lineno}, column {error.colno}",
            seen=error.msg,
            next_step="restore the file, or make it again with the command that wrote it",
        ) from None
    return from_data(kind, data, where)


def load_file(kind: type[T], path: Path) -> T:
    """Load a file with `load_text`. Raises FormatError if the file is absent or unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError("The file cannot be read.", where=str(path), seen=error) from None
    return load_text(kind, text, str(path))


def make_folder(path: Path, what: str, error: type[PipefitError] = PipefitError) -> None:
    """Create the parent folder of the file `path`. Raises `error`, naming `what`, if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "Is a folder", str(path))
    except OSError as reason:
        raise _write_error(path, what, error, reason) from None


def write_file(path: str | Path, text: str, what: str, error: type[PipefitError] = PipefitError) -> None:
    """Write a text file and create its parent folders. Raises `error`, naming `what` ("plan"), if that fails."""
    path = Path(path)
    make_folder(path, what, error)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as reason:
        raise _write_error(path, what, error, reason) from None


def _write_error(path: Path, what: str, error: type[PipefitError], reason: OSError) -> PipefitError:
    return error(
        f"The {what} cannot be written.",
        where=str(path),
        seen=reason.strerror or reason,
        next_step="give a file in a folder that you may write to",
    )


def content_digest(value: Any) -> str:
    """Return a short stable hash (16 hex digits of SHA-256) of the JSON form of `value`."""
    canonical = json.dumps(to_data(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _unchanged(value: Any) -> Any:
    return value


def _build_value(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, data, where)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is typing.Literal:
        if data not in arguments:
            raise _wrong_value("The value is not one of the choices.", where, data, ", ".join(map(repr, arguments)))
        return data
    if origin in (types.UnionType, typing.Union):
        return _build_union(arguments, data, where)
    if origin is tuple:
        return _build_tuple(arguments, data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise _wrong_value("An object is needed here.", where, data, "{...}")
        return {key: _build_value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    return _build_plain(kind, data, where)


def _build_dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong_value("An object is needed here.", where, data, f"the fields of {kind.__name__}")
    hints = _field_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in data:
        if name not in fields:
            hint = suggest_name(name, fields)
            raise FormatError(
                f"Unknown field {name!r}.", where=where, seen=name, allowed=", ".join(fields), next_step=hint
            )
    values = {}
    for name, field in fields.items():
        if name in data:
            inner = f"{where}: {name}" if ":" not in where else f"{where}.{name}"
            values[name] = field.metadata.get(_DECODE, _unchanged)(_build_value(hints[name], data[name], inner))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise FormatError(f"The field {name!r} is missing.", where=where, allowed=", ".join(fields))
    return kind(**values)


def _build_union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    errors = []
    for argument in arguments:
        if argument is type(None):
            continue
        try:
            return _build_value(argument, data, where)
        except FormatError as error:
            errors.append(error)
    raise errors[-1]


def _build_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, (list, tuple)):
        raise _wrong_value("A list is needed here.", where, data, "[...]")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_build_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(arguments) != len(data):
        raise _wrong_value("The list has a wrong length.", where, data, f"{len(arguments)} entries")
    return tuple(
        _build_value(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(arguments, data, strict=True))
    )


def _build_plain(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(data, bool) and kind is not bool:
        raise _wrong_value("The value has a wrong type.", where, data, kind.__name__)
    if not isinstance(data, kind):
        raise _wrong_value("The value has a wrong type.", where, data, kind.__name__)
    return data


@lru_cache(maxsize=256)
def _field_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _wrong_value(what: str, where: str, data: Any, allowed: str) -> FormatError:
    shown = json.dumps(data, default=str)
    return FormatError(what, where=where, seen=shown if len(shown) < 80 else shown[:77] + "...", allowed=allowed)


def _format_json(data: Any, depth: int) -> str:
    flat = json.dumps(data)
    if not isinstance(data, (dict, list)) or len(flat) + 2 * depth <= 100:
        return flat
    pad = "  " * (depth + 1)
    end = "  " * depth
    if isinstance(data, dict):
        body = ",\n".join(f"{pad}{json.dumps(key)}: {_format_json(item, depth + 1)}" for key, item in data.items())
        return f"{{\n{body}\n{end}}}"
    return "[\n" + ",\n".join(pad + _format_json(item, depth + 1) for item in data) + f"\n{end}]"
