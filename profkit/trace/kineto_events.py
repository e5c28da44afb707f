"""The events of a Chrome trace: decompressed within bounds, parsed as JSON, sorted by kind, their fields as integers.

The file is read piece by piece, so that a large list in it never stands in memory as a whole; Python's own decoder
parses the values. Decimal numbers and C++'s words for what is no number stay text: ``1700000000000000.123`` has more
digits than a double can hold. Times are converted exactly when they are asked for (`parse_microseconds`).
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from profkit.errors import TraceError
from profkit.files import GZIP_RATIO, bounded_memory, collector_off
from profkit.trace.columns import Bools, Diagnostic, Ints, NamesWithNew, report_left_out

SIZE_LIMIT_BYTES = 8 * 2**30
"""The largest size of a decompressed trace: more would take the whole memory of a machine."""

# Real traces take 2.3 bytes of memory for each of their JSON.
_MEMORY_PER_BYTE = 8
_LEAST_LIMIT_BYTES = 2**26
_GZIP_MAGIC = b"\x1f\x8b"
TIME_LIMIT_NS = 2**62
"""Larger times are damaged values: this is 146 years, and sums of two would overflow."""

Event = dict[str, Any]
RowKind = Literal["kernel", "memcpy", "memset", "call", "sync", "operator", "annotation", "flow", "metadata"]

_KINDS: dict[str, RowKind] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "cuda_sync": "sync",
    "cpu_op": "operator",
    "user_annotation": "annotation",
    "fwdbwd": "flow",
}
Rows = defaultdict[RowKind, list[Event]]
_EVENTS = "traceEvents"
# All that is ever asked of an event: most hold more that is not.
_KEYS = ("ph", "name", "pid", "tid", "ts", "dur", "id", "args")
# A dictionary of this many keys takes as much memory as one of six.
_FEW_KEYS = 10
_REPEATED = ("name", "pid", "tid")
_ARGUMENTS = frozenset(
    {
        *("name", "correlation", "stream", "device", "bytes", "finished", "graph node id"),
        *("wait_on_stream", "wait_on_cuda_event_record_corr_id"),
        # Of collectives (`profkit.trace.kineto`).
        *("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Seq"),
        *("Process Group Name", "Process Group Description", "Process Group Ranks"),
    }
)
_CALL_SUFFIXES = ("_runtime", "_driver")  # cuda_runtime, cuda_driver, xpu_runtime, privateuse1_driver, …
_INTEGER_LIMIT = 2**62
_ID_LIMIT = 2**64


def load_chrome_trace(path: Path) -> tuple[dict[str, Any], Rows]:
    """Return what a Chrome trace says of itself (its top-level keys), and its events that matter by kind.

    These are intervals, the ends of forward–backward flows, and metadata. The file is read piece by piece, and of each
    event only what is asked for later is kept.

    Raises:
        TraceError: the file is missing, unreadable, empty, cut off, no JSON, JSON that holds no list of events, or
            much larger than such a file can be once it is decompressed.
    """
    try:
        # Scanning a JSON document for garbage doubles the time.
        with collector_off(), _open(path) as (read, memory_bytes), bounded_memory(memory_bytes):
            return _read_document(path, JsonStream(read))
    except MemoryError:
        raise TraceError(f"{path}: damaged, or too large for this machine's memory") from None
    except CutOffError:
        raise TraceError(f"{path}: the JSON is cut off; copy or record the trace again") from None
    except JsonError as error:
        raise TraceError(f"{path}: not JSON ({error})") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: not a Chrome trace (its JSON cannot be parsed)") from None
    except EOFError:
        raise TraceError(f"{path}: the gzip file is cut off; copy or record the trace again") from None
    except (gzip.BadGzipFile, zlib.error):
        raise TraceError(f"{path}: the gzip file is damaged; copy or record the trace again") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _read_document(path: Path, stream: JsonStream) -> tuple[dict[str, Any], Rows]:
    begins_with = stream.next_character()
    if not begins_with:
        raise TraceError(f"{path}: an empty file; record the trace again")
    header: dict[str, Any] = {}
    rows: Rows | None = None
    if begins_with == "[":
        rows = _sort_events(stream.items())
    elif begins_with == "{":
        for key in stream.members():
            if key == _EVENTS and stream.next_character() == "[":
                rows = _sort_events(stream.items())
            else:
                header[key] = stream.value()
    else:
        stream.value()
    stream.end()
    if rows is None:
        raise TraceError(f"{path}: JSON, but no Chrome trace (it has no list {_EVENTS}); give a torch.profiler trace")
    return header, rows


@contextmanager
def _open(path: Path) -> Iterator[tuple[Callable[[int], bytes], int]]:
    with open(path, "rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
        size = file.seek(0, 2)
        file.seek(0)
        limit = min(max(3 * size * GZIP_RATIO, _LEAST_LIMIT_BYTES), SIZE_LIMIT_BYTES) if is_gzip else SIZE_LIMIT_BYTES
        left = limit
        with gzip.open(file) if is_gzip else file as stream:

            def read(count: int) -> bytes:
                nonlocal left
                content = stream.read(count)
                left -= len(content)
                if left < 0:
                    raise TraceError(f"{path}: more than {limit / 2**30:.3g} GiB of JSON; record fewer steps")
                return content

            yield read, _MEMORY_PER_BYTE * size * (GZIP_RATIO if is_gzip else 1)


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


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows of host threads and their ``events``, by start; ``is_open`` marks those in which the profiler stopped."""

    events: list[Event]
    name: Ints
    start_ns: Ints
    end_ns: Ints
    process: Ints
    thread: Ints
    is_open: Bools


@dataclass
class Reading:
    _names: NamesWithNew = field(default_factory=lambda: NamesWithNew(()))
    threads: dict[tuple[int, int | str], int] = field(default_factory=dict)
    """(pid, tid) → the trace's own number of the thread, counted from 0."""
    diagnostics: list[Diagnostic] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def intern(self, text: str) -> int:
        return self._names.intern(text.encode("utf-8", "replace").decode())  # replaces a lone surrogate

    @property
    def names(self) -> list[str]:
        return self._names.strings

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
        if rows:
            self.diagnostics.append(report_left_out(what, len(rows), name_of(rows[0])))

    def host_rows(self, events: list[Event], *, work: str = "") -> HostRows:
        """Return rows of host threads as columns; those that cannot be placed are impossible if they are ``work``."""
        kept: list[tuple[int, int, int, int, bool, Event]] = []
        impossible: list[Event] = []
        for event in events:
            times = parse_interval(event)
            start = parse_microseconds(event.get("ts"))
            if times is None and start is not None and not work:
                times = (start, start)
            place = self.thread_of(event) if times else None
            if times is None or place is None:
                impossible.append(event)
            else:
                kept.append((*times, *place, _is_unfinished(event), event))
        if work:
            self.report_impossible(work, impossible)
        kept.sort(key=itemgetter(0))
        *columns, rows = zip(*kept, strict=True) if kept else ((),) * 6
        start_ns, end_ns, process, thread, is_open = (np.array(column, dtype=np.int64) for column in columns)
        name = integers([self.intern(name_of(event)) for event in rows])
        return HostRows(list(rows), name, start_ns, end_ns, process, thread, is_open.astype(np.bool_))


def _sort_events(events: Iterable[Any]) -> Rows:
    rows: Rows = defaultdict(list)
    same: dict[str | int, str | int] = {}
    for event in events:
        kind = _kind_of(event) if isinstance(event, dict) else None
        if kind is not None:
            rows[kind].append(_kept(event, same))
    return rows


def _kind_of(event: Event) -> RowKind | None:
    phase = event.get("ph")
    if phase == "M":
        return "metadata"
    category = event.get("cat")
    if not isinstance(category, str) or phase not in ("X", "s", "f"):
        return None
    kind = _KINDS.get(category) or ("call" if category.endswith(_CALL_SUFFIXES) else None)
    return kind if kind and (kind == "flow") == (phase != "X") else None


def _kept(event: Event, same: dict[str | int, str | int]) -> Event:
    """Return what is asked of an event later; equal names, processes and threads become one object."""
    if len(event) > _FEW_KEYS:
        event = {key: event[key] for key in _KEYS if key in event}
    for key in _REPEATED:
        value = event.get(key)
        kind = type(value)
        if kind is str or kind is int:
            event[key] = same.setdefault(value, value)  # type: ignore[arg-type]
    arguments = event.pop("args", None)
    if isinstance(arguments, dict) and not _ARGUMENTS.isdisjoint(arguments):
        event["args"] = {key: arguments[key] for key in arguments if key in _ARGUMENTS}
    return event


def job_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trace says of its distributed job; nothing if it was none."""
    job = header.get("distributedInfo")
    return job if isinstance(job, dict) else {}


def objects_in(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def name_of(event: Event) -> str:
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
    return parse_interval(event) is None or event.get("args", {}).get("finished") is False


def parse_integer(value: object) -> int | None:
    """Return an integer given as such or as text (old traces write ``"tid": "3239786240"``), else ``None``."""
    if isinstance(value, str) and len(value) < 20:
        try:
            value = int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and abs(value) < _INTEGER_LIMIT else None


def parse_argument(event: Event, name: str) -> int | None:
    return parse_integer(event.get("args", {}).get(name))


def parse_correlation(event: Event) -> int:
    """Return the event's 64-bit correlation, written with or without a sign; 0, which is CUPTI's none, without.

    Ids from 2⁶³ on come out negative, so that a signed column holds them.
    """
    value = event.get("args", {}).get("correlation")
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        value = int(value)
    if not isinstance(value, int) or not -_ID_LIMIT // 2 <= value < _ID_LIMIT:
        return 0
    return value - _ID_LIMIT if value >= _ID_LIMIT // 2 else value


def integers(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


_PIECE_BYTES = 2**22
_SPACE = re.compile(r"[ \t\n\r]*+")
_BORDER = re.compile(r"\}[ \t\n\r]*+,[ \t\n\r]*+(?=\{)")
_LONGEST_TAIL = 2**16
"""The last border between two objects in a piece is looked for in so many characters."""
# Kineto has printed C++'s words inf and nan (a bandwidth over a duration of zero).
_BARE_NON_NUMBER = re.compile(r"(?<=[:,\[\s])-?(?:inf|nan)(?=\s*[,}\]])")
# A value that is reported at its first letter may only be cut off: `tru`, `-Infini`.
_LONGEST_WORD = len("-Infinity")


class JsonError(ValueError):
    """The text is no JSON; the message says where."""


class CutOffError(JsonError):
    """The text ends within a value."""


class JsonStream:
    """A cursor in JSON text; ``read(count)`` returns the next bytes of it, none at the end."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._scan = json.JSONDecoder(parse_float=str, parse_constant=str).scan_once  # type: ignore[attr-defined]
        self._text = ""
        self._at = 0
        self._is_whole = False
        """Whether the rest of the file is in ``_text``."""
        self._dropped = 0
        """How many characters before ``_text`` were taken and dropped."""
        self._is_new = True
        """Whether text was read since objects were last taken all at once."""

    def next_character(self) -> str:
        """Return the next character that is no space, without taking it; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._fill():
                return self._text[self._at : self._at + 1]

    def take(self, characters: str) -> str:
        """Take the next character; JsonError if it is none of these."""
        character = self.next_character()
        if not character or character not in characters:
            self._refuse(f"Expecting {' or '.join(map(repr, characters))}", self._at)
        self._at += 1
        return character

    def value(self) -> Any:
        """Take and return the next value; JsonError if there is none, RecursionError if it is nested too deep."""
        self.next_character()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except StopIteration as error:
                message, at = "Expecting value", error.value
            except json.JSONDecodeError as error:
                message, at = error.msg, error.pos
            else:
                # A number may go on behind the end of the text, or behind a point of which no digit is there yet.
                if self._text[end : end + 1] not in ("", ".", "e", "E") or not self._fill():
                    self._at = end
                    return value
                continue
            if self._may_go_on(message, at) and self._fill():
                continue
            if _BARE_NON_NUMBER.search(self._text, self._at):
                before = max(self._at - 1, 0)  # the word must stand behind a comma, a colon or a bracket
                self._dropped += before
                self._text, self._at = _BARE_NON_NUMBER.sub("null", self._text[before:]), self._at - before
                continue
            self._refuse(message, at)

    def members(self) -> Iterator[str]:
        """Yield the keys of an object, of which the caller takes each value before the next key."""
        self.take("{")
        if self.next_character() == "}":
            self.take("}")
            return
        while True:
            if self.next_character() != '"':
                self._refuse("Expecting property name enclosed in double quotes", self._at)
            key = self.value()
            self.take(":")
            yield key
            if self.take(",}") == "}":
                return

    def items(self) -> Iterator[Any]:
        self.take("[")
        if self.next_character() == "]":
            self.take("]")
            return
        while True:
            if self._is_new:
                self._is_new = False
                yield from self._whole_objects()
            yield self.value()
            if self.take(",]") == "]":
                return

    def _whole_objects(self) -> list[Any]:
        """Take the objects that stand whole in the text, all at once: twice as fast as one by one.

        Returns none if there are none, or if the text is not plainly so: then to read one by one finds out why.
        """
        borders = list(_BORDER.finditer(self._text, max(self._at, len(self._text) - _LONGEST_TAIL)))
        if not borders:
            return []
        border = borders[-1]
        whole = f"[{self._text[self._at : border.start() + 1]}]"
        try:
            values, end = self._scan(whole, 0)
        except (StopIteration, json.JSONDecodeError, RecursionError):
            return []
        if end < len(whole):  # the list ends before, and others follow
            return []
        self._at = border.end()
        objects: list[Any] = values
        return objects

    def end(self) -> None:
        """Check that nothing follows; JsonError if something does."""
        if self.next_character():
            self._refuse("Extra data", self._at)

    def _fill(self) -> bool:
        if self._is_whole:
            return False
        # The character before the value tells whether a bare word in it may stand there.
        taken = max(self._at - 1, 0)
        rest = self._text[taken:]
        piece = self._read(max(_PIECE_BYTES, len(rest)))
        self._is_whole, self._is_new = not piece, True
        self._text, self._at = rest + self._decoder.decode(piece, final=not piece), self._at - taken
        self._dropped += taken
        return len(self._text) > len(rest) or not self._is_whole

    def _may_go_on(self, message: str, at: int) -> bool:
        return message.startswith("Unterminated string") or at >= len(self._text.rstrip()) - _LONGEST_WORD

    def _refuse(self, message: str, at: int) -> NoReturn:
        if self._may_go_on(message, at) and not self._fill():
            raise CutOffError(message)
        raise JsonError(f"character {self._dropped + at + 1:,}: {message}")
