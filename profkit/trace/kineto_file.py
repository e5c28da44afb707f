"""The bytes of a Chrome trace: decompressed within bounds, parsed as JSON, told apart from everything else.

Decimal numbers stay text. A timestamp such as ``1700000000000000.123`` µs has more digits than a double can hold, so
whoever wants a number converts it exactly (`parse_microseconds`).
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, BinaryIO

from profkit.errors import TraceError

SIZE_LIMIT_BYTES = 8 * 2**30
"""What a trace may grow to when decompressed: larger ones need a machine's whole memory, and a bomb all of it."""

_CHUNK_BYTES = 16 * 2**20
_GZIP_MAGIC = b"\x1f\x8b"
TIME_LIMIT_NS = 2**62
"""Times beyond are damaged values: 146 years, and sums of two would wrap."""

# Kineto has printed C++'s own words for numbers that are none (a bandwidth over a duration of zero).
_BARE_NON_NUMBER = re.compile(r"(?<=[:,\[\s])-?(?:inf|nan)(?=\s*[,}\]])")


def load_chrome_trace(path: Path, *, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> tuple[dict[str, Any], list[Any]]:
    """Return what a Chrome trace says of itself (its top-level keys) and its list of events.

    Raises:
        TraceError: the file is missing, unreadable, empty, cut off, no JSON, or JSON that holds no list of events.
    """
    content = _read_bytes(path, size_limit_bytes)
    if not content.strip():
        raise TraceError(f"{path}: an empty file; record the trace again")
    document = _parse(path, content.decode("utf-8-sig", errors="replace"))
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"{path}: JSON, but no Chrome trace (it has no list traceEvents); give a torch.profiler trace")
    events = document.pop("traceEvents")
    return document, events


def parse_microseconds(value: object) -> int | None:
    """Return a time in microseconds, an integer or decimal text, as integer nanoseconds; ``None`` if it is no time."""
    if isinstance(value, int):
        nanoseconds = value * 1000
    elif isinstance(value, str):
        whole, _, fraction = value.partition(".")
        if len(fraction) <= 3 and len(whole) < 18 and whole.isdecimal() and (not fraction or fraction.isdecimal()):
            return int(whole + fraction.ljust(3, "0"))
        try:
            exact = Decimal(value)
        except InvalidOperation:
            return None
        if not exact.is_finite() or not -TIME_LIMIT_NS < exact < TIME_LIMIT_NS:
            return None
        nanoseconds = round(exact * 1000)
    else:
        return None
    return nanoseconds if abs(nanoseconds) < TIME_LIMIT_NS else None


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            if file.read(2) == _GZIP_MAGIC:
                file.seek(0)
                with gzip.open(file) as stream:
                    return _read_within(path, stream, limit)  # type: ignore[arg-type]
            file.seek(0)
            return _read_within(path, file, limit)
    except EOFError:
        raise TraceError(f"{path}: the gzip file is cut off; copy or record the trace again") from None
    except (gzip.BadGzipFile, zlib.error):
        raise TraceError(f"{path}: the gzip file is damaged; copy or record the trace again") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _read_within(path: Path, stream: BinaryIO, limit: int) -> bytes:
    content = bytearray()
    while chunk := stream.read(_CHUNK_BYTES):
        content += chunk
        if len(content) > limit:
            raise TraceError(f"{path}: more than {limit / 2**30:.3g} GiB of JSON; record fewer steps")
    return bytes(content)


def _parse(path: Path, text: str) -> Any:
    collecting = gc.isenabled()
    gc.disable()  # nothing in a JSON document is garbage; scanning for it doubles the time
    try:
        try:
            return json.loads(text, parse_float=str, parse_constant=str)
        except json.JSONDecodeError as error:
            repaired, count = _BARE_NON_NUMBER.subn("null", text)
            if not count:
                raise error
            return json.loads(repaired, parse_float=str, parse_constant=str)
    except json.JSONDecodeError as error:
        if text.lstrip()[:1] in ("{", "[") and _ends_early(text, error):
            raise TraceError(f"{path}: the JSON is cut off; copy or record the trace again") from None
        raise TraceError(f"{path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: not a Chrome trace (its JSON cannot be parsed)") from None
    finally:
        if collecting:
            gc.enable()


def _ends_early(text: str, error: json.JSONDecodeError) -> bool:
    """Whether the parser ran out of text, rather than into something that is no JSON."""
    # Half a word or number at the end (`tru`, `12.`) is reported at its first letter.
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()) - len("-Infinity")
