"""The events of a Chrome trace: decompressed within bounds, parsed as JSON, sorted by kind, their fields as integers.

Decimal numbers stay text. A timestamp such as ``1700000000000000.123`` µs has more digits than a double can hold, so
it is converted exactly when it is asked for (`parse_microseconds`).
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import Bools, Diagnostic, Ints

SIZE_LIMIT_BYTES = 8 * 2**30
"""The largest size of a decompressed trace: more would take the whole memory of a machine."""

_CHUNK_BYTES = 16 * 2**20
_GZIP_MAGIC = b"\x1f\x8b"
TIME_LIMIT_NS = 2**62
"""Larger times are damaged values: this is 146 years, and sums of two would overflow."""

# Kineto has printed C++'s words inf and nan (a bandwidth over a duration of zero).
_BARE_NON_NUMBER = re.compile(r"(?<=[:,\[\s])-?(?:inf|nan)(?=\s*[,}\]])")

Event = dict[str, Any]
Kind = Literal["kernel", "memcpy", "memset", "call", "operator", "annotation", "flow", "metadata"]

_KINDS: dict[str, Kind] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "runtime": "call",
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "annotation",
    "fwdbwd": "flow",
    "forward_backward": "flow",
}
_CALL_SUFFIXES = ("_runtime", "_driver")  # cuda_runtime, cuda_driver, xpu_runtime, privateuse1_driver, …
_INTEGER_LIMIT = 2**62
_ID_LIMIT = 2**64


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


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows of host threads, sorted by start; ``events`` are the rows themselves, in the same order.

    ``is_open`` marks those in which the profiler stopped.
    """

    events: list[Event]
    name: Ints
    start_ns: Ints
    end_ns: Ints
    process: Ints
    thread: Ints
    is_open: Bools


@dataclass
class Reading:
    """What is collected while one file is read."""

    names: list[str] = field(default_factory=list)
    _indices: dict[str, int] = field(default_factory=dict)
    threads: dict[tuple[int, int | str], int] = field(default_factory=dict)
    """(pid, tid) → the trace's own number of the thread, counted from 0."""
    diagnostics: list[Diagnostic] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def intern(self, text: str) -> int:
        """Return the index of a name."""
        printable = text.encode("utf-8", "replace").decode()  # replaces a lone surrogate
        if printable not in self._indices:
            self._indices[printable] = len(self.names)
            self.names.append(printable)
        return self._indices[printable]

    def thread_of(self, event: Event) -> tuple[int, int] | None:
        """Return the process and the thread of a host row, or ``None`` for a row of no process ('Spans')."""
        key = _thread_key(event)
        return None if key is None else (key[0], self.threads.setdefault(key, len(self.threads)))

    def known_thread_of(self, event: Event) -> tuple[int, int] | None:
        """Return the same, if that thread has rows."""
        key = _thread_key(event)
        return (key[0], self.threads[key]) if key in self.threads else None

    def processes(self) -> list[int]:
        return sorted({pid for pid, _ in self.threads})

    def report_impossible(self, what: str, rows: list[Event]) -> None:
        """Record that rows of work with impossible times were left out."""
        if rows:
            count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
            text = f"{count} of {what} with impossible times left out, the first named {name_of(rows[0])[:80]!r}"
            self.diagnostics.append(Diagnostic("error", text))

    def host_rows(self, events: list[Event], *, work: str = "") -> HostRows:
        """Return rows of host threads as columns; those that cannot be placed are impossible if they are ``work``."""
        kept: list[tuple[int, int, int, int, bool]] = []
        rows: list[Event] = []
        impossible: list[Event] = []
        for event in events:
            times = parse_interval(event)
            start = parse_microseconds(event.get("ts"))
            if times is None and start is not None and not work:
                times = (start, start)
            place = self.thread_of(event) if times else None
            if times is None or place is None:
                impossible.append(event)
                continue
            kept.append((*times, *place, _is_unfinished(event)))
            rows.append(event)
        if work:
            self.report_impossible(work, impossible)
        order = sorted(range(len(kept)), key=lambda index: kept[index][0])
        start_ns, end_ns, process, thread, is_open = (integers([kept[i][column] for i in order]) for column in range(5))
        rows = [rows[index] for index in order]
        name = integers([self.intern(name_of(event)) for event in rows])
        return HostRows(rows, name, start_ns, end_ns, process, thread, is_open.astype(np.bool_))


def sort_events(events: list[Any]) -> defaultdict[Kind, list[Event]]:
    """Return the events that matter by kind: intervals, the ends of forward–backward flows, and metadata."""
    rows: defaultdict[Kind, list[Event]] = defaultdict(list)
    for event in events:
        if not isinstance(event, dict):
            continue
        phase = event.get("ph")
        if phase == "M":
            rows["metadata"].append(event)
            continue
        category = event.get("cat")
        if not isinstance(category, str) or phase not in ("X", "s", "f"):
            continue
        category = category.lower()
        kind = _KINDS.get(category) or ("call" if category.endswith(_CALL_SUFFIXES) else None)
        if kind and (kind == "flow") == (phase != "X"):
            rows[kind].append(event)
    return rows


def name_of(event: Event) -> str:
    """Return the name of a row."""
    name = event.get("name")
    return name if isinstance(name, str) and name else "(unnamed)"


def parse_interval(event: Event) -> tuple[int, int] | None:
    """Return start and end in ns, or ``None`` if the row has no possible times."""
    start, duration = parse_microseconds(event.get("ts")), parse_microseconds(event.get("dur"))
    if start is None or duration is None or duration < 0 or start + duration >= TIME_LIMIT_NS:
        return None
    # A GPU row that CUPTI never filled in says 0 for both.
    return None if start == 0 and duration == 0 else (start, start + duration)


def _thread_key(event: Event) -> tuple[int, int | str] | None:
    pid, tid = parse_integer(event.get("pid")), parse_integer(event.get("tid"))
    return None if pid is None else (pid, str(event.get("tid")) if tid is None else tid)


def _is_unfinished(event: Event) -> bool:
    """Whether the profiler stopped inside: some versions give it the duration -1 or none, later ones say so."""
    arguments = event.get("args")
    return parse_interval(event) is None or (isinstance(arguments, dict) and arguments.get("finished") is False)


def parse_integer(value: object) -> int | None:
    """Return an integer given as such or as text (old traces write ``"tid": "3239786240"``), else ``None``."""
    if isinstance(value, str) and len(value) < 20:
        try:
            value = int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and abs(value) < _INTEGER_LIMIT else None


def parse_argument(event: Event, name: str) -> int | None:
    """Return an integer from the event's ``args``, else ``None``."""
    arguments = event.get("args")
    return parse_integer(arguments.get(name)) if isinstance(arguments, dict) else None


def parse_id(event: Event, name: str) -> int:
    """Return a 64-bit id from the event's ``args``, written with or without a sign; 0, which is CUPTI's none, without.

    Ids from 2⁶³ on come out negative, so that a signed column holds them.
    """
    arguments = event.get("args")
    value = arguments.get(name) if isinstance(arguments, dict) else None
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        value = int(value)
    if not isinstance(value, int) or not -_ID_LIMIT // 2 <= value < _ID_LIMIT:
        return 0
    return value - _ID_LIMIT if value >= _ID_LIMIT // 2 else value


def integers(values: list[int]) -> Ints:
    """Return a column."""
    return np.array(values, dtype=np.int64)
