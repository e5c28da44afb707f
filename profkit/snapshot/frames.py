"""The frames of a snapshot's stacks, within the limits in which they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MOST_FRAMES = 2000
"""Twice as deep as Python calls itself."""

_MOST_LINES = 2**31
# Linux has no longer paths.
_LONGEST_TEXT = 4096
_LONGEST_TRACE = 2**16
_LONGEST_NUMBER = 10


def read_frame(frame: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield (function, file, line) of a frame, then of what FX generated its code from, innermost first."""
    yield _text(frame.get("name")), _text(frame.get("filename")), _line(frame.get("line"))
    for line in reversed(_text(frame.get("fx_original_trace"), _LONGEST_TRACE).splitlines()):
        place, _, name = line.partition(", in ")
        file, is_there, number = place.strip().removeprefix('File "').partition('", line ')
        if is_there:
            yield name, file, int(number) if number.isdecimal() and len(number) < _LONGEST_NUMBER else 0


def write_frame(lines: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return the frame of which `read_frame` yields these lines."""
    name, file, line = lines[0]
    frame: dict[str, Any] = {"name": name, "filename": file, "line": line}
    if len(lines) > 1:
        made_from = (f'File "{file}", line {line}, in {name}' for name, file, line in reversed(lines[1:]))
        frame["fx_original_trace"] = "\n".join(made_from)
    return frame


def _text(value: Any, longest: int = _LONGEST_TEXT) -> str:
    return value[:longest] if isinstance(value, str) else "?"


def _line(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < _MOST_LINES else 0
