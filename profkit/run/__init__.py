"""The run directory, where the two wings meet: where its files lie, and one typed reader and writer for each.

JSON becomes dataclasses here, and they JSON: nobody else handles raw objects.
"""

from __future__ import annotations

import json
import stat
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from profkit.errors import ProfkitError, RunError
from profkit.files import write_json

T = TypeVar("T")

Plain = str | int | float | bool | None
"""A value that JSON holds by itself."""

LARGEST_FILE_BYTES = 2**30
"""A ledger of owners of a long run takes some tens of MiB; everything else less."""

LARGEST_NUMBER = 2**63
"""Every number of a run is smaller, so that it fits where it is put, and sums of some stay finite."""

MOST_RECORDS = 2**16
"""No list of a run holds as many steps, processes or ranges."""

_SHOWN = 60


class WrongRecord(ValueError):
    """A value is not of its type; the message begins with the key that it stands under."""


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a file of a run: a regular file of at most `LARGEST_FILE_BYTES`.

    Raises:
        FileNotFoundError: there is none.
        RunError: it cannot be read, or is something else: a pipe, a device, a folder.
        UnicodeDecodeError: it is no UTF-8.
    """
    try:
        _check_file(path)
        return path.read_text(encoding="utf-8", errors=errors)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None


def _check_file(path: Path) -> None:
    status = path.stat()
    # A pipe would keep the reader waiting for its writer, and a device has no end.
    if not stat.S_ISREG(status.st_mode):
        raise RunError(f"{path}: not a regular file")
    if status.st_size > LARGEST_FILE_BYTES:
        raise RunError(f"{path}: larger than {LARGEST_FILE_BYTES >> 20} MiB, which no file of its kind is")


def read_lines(
    path: Path, take: Callable[[dict[str, Any]], None], what: str, error: type[ProfkitError] = RunError
) -> None:
    """Hand the JSON object on each line to ``take``; a last line that was cut off, or is damaged, is left out.

    ``what`` says in a message what a line is: "a line of a light record". ``take`` may raise what a wrong value leads
    to, best a `WrongRecord`.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: it cannot be read.
        error: it is not UTF-8 text, or a line other than the last is damaged.
    """
    try:
        _check_file(path)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    entry = json.loads(line.decode())
                    take(entry if isinstance(entry, dict) else _refuse("the line", entry, "an object"))
                except UnicodeDecodeError:
                    raise error(f"{path}: not UTF-8 text") from None
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
                    if not file.read(1):
                        return
                    why = f" ({failure})" if isinstance(failure, WrongRecord) else ""
                    raise error(f"{path}:{number}: not {what}{why}; was it edited?") from None
    except FileNotFoundError:
        raise
    except OSError as failure:
        raise RunError(f"{path}: {failure.strerror}") from None


def read_record(kind: type[T], path: Path, version: int | None = None) -> T:
    """Return the JSON object in a file as a dataclass; with ``version``, only one that says it is of that version.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: it cannot be read, is not JSON, is of another version, or holds a value of another type; the key is
            named.
    """
    try:
        content = json.loads(read_text(path), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise RunError(f"{path}: not JSON") from None
    stated = content.get("version") if isinstance(content, dict) else None
    if version is not None and stated != version:
        raise RunError(f"{path}: has version {stated}, and this profkit reads version {version}; record it again")
    try:
        record: T = decode(kind, content)
        return record
    except WrongRecord as error:
        raise RunError(f"{path}: {error}") from None


def write_record(path: Path, record: Any) -> None:
    """Write a dataclass as JSON, as `read_record` reads it; the file appears whole or not at all."""
    write_json(path, asdict(record))


def decode(kind: Any, value: object, where: str = "") -> Any:  # noqa: PLR0911  one return a kind
    """Return ``value``, as JSON has it, as ``kind``.

    A kind is a dataclass, a plain type, ``tuple[X, ...]``, ``tuple[X, Y]``, a mapping by text, a `Literal`, or a union
    of these with None. Keys that a dataclass does not know are passed over, those that it has a default for may be
    missing: files of other versions are read as far as they go. A whole number may stand for a float; nothing else is
    converted.

    Raises:
        WrongRecord: a value is not of its type, or a key is missing.
    """
    if kind is Any or kind is object:
        return value
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), value, where)
    if origin is Literal:
        return value if value in get_args(kind) else _refuse(where, value, " or ".join(map(repr, get_args(kind))))
    if is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin is tuple:
        return _decode_tuple(get_args(kind), value, where)
    if origin in (Mapping, dict):
        pairs = value if isinstance(value, dict) else _refuse(where, value, "an object")
        return {key: decode(get_args(kind)[1], item, _below(where, key)) for key, item in pairs.items()}
    if isinstance(value, int | float) and not abs(value) < LARGEST_NUMBER:
        _refuse(where, value, "a possible number")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and kind is not bool:
        _refuse(where, value, _NAMES.get(kind, "of its type"))
    return value if isinstance(value, kind) else _refuse(where, value, _NAMES.get(kind, "of its type"))


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "null"}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_dataclass(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        _refuse(where, value, "an object")
    arguments = {}
    for field in fields(kind):
        key = _below(where, field.name)
        if field.name in value:
            arguments[field.name] = decode(_hints(kind)[field.name], value[field.name], key)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise WrongRecord(f"{key} is missing")
    try:
        return kind(**arguments)
    except ValueError as error:  # a check of the dataclass's own
        raise WrongRecord(f"{where}: {error}" if where else str(error)) from None


def _decode_tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    items = value if isinstance(value, list) else _refuse(where, value, "a list")
    if kinds[-1] is not Ellipsis:
        if len(items) != len(kinds):
            _refuse(where, value, f"a list of {len(kinds)}")
        return tuple(
            decode(kind, item, f"{where}[{at}]") for at, (kind, item) in enumerate(zip(kinds, items, strict=True))
        )
    if is_dataclass(kinds[0]) and len(items) > MOST_RECORDS:
        raise WrongRecord(f"{where} holds {len(items):,} records; more than {MOST_RECORDS:,} are not read")
    return tuple(decode(kinds[0], item, f"{where}[{at}]") for at, item in enumerate(items))


def _decode_union(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    for kind in others[:-1]:
        try:
            return decode(kind, value, where)
        except WrongRecord:
            continue
    return decode(others[-1], value, where)


def _refuse(where: str, value: object, wanted: str) -> NoReturn:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    raise WrongRecord(f"{where or 'the file'} is {shown}, not {wanted}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
