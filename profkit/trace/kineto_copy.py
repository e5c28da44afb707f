"""A copy of a torch.profiler trace to share: what profkit reads of it, written anew as Chrome JSON."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import IO, Any

from profkit.files import whole_file
from profkit.text_kinds import (
    GPU,
    GROUP,
    KERNEL,
    LEFT_OUT,
    OPERATOR,
    RANGE,
    THREAD,
    WORD,
    Keeper,
    Kind,
)
from profkit.trace.kineto import THREAD_NAME
from profkit.trace.kineto_events import (
    Event,
    RowKind,
    Rows,
    job_of,
    load_chrome_trace,
    objects_in,
    parse_integer,
    parse_microseconds,
)

# Kind of row → how it is written, and what its name is.
_ROWS: dict[RowKind, tuple[str, Kind]] = {
    "kernel": ("kernel", KERNEL),
    "memcpy": ("gpu_memcpy", KERNEL),
    "memset": ("gpu_memset", KERNEL),
    "call": ("cuda_runtime", WORD),
    "sync": ("cuda_sync", WORD),
    "operator": ("cpu_op", OPERATOR),
    "annotation": ("user_annotation", RANGE),
    "flow": ("fwdbwd", WORD),
}
ARGUMENTS: dict[str, Kind | None] = {
    **dict.fromkeys(("correlation", "stream", "device", "bytes", "graph node id", "finished"), None),
    **dict.fromkeys(("wait_on_stream", "wait_on_cuda_event_record_corr_id"), None),
    **dict.fromkeys(("In msg nelems", "Out msg nelems", "Seq"), None),
    **dict.fromkeys(("Collective name", "dtype", "Process Group Description"), WORD),
    "Process Group Name": GROUP,
    "Process Group Ranks": Kind("ranks", r"\[[\d, ]*\]"),
}
_STREAM = re.compile(r"stream \d{1,9}")
_DIGITS = re.compile(r"-?[0-9]{1,20}")
_FIRST_TRACK = 1 << 40
"""Numbers from here on stand for threads that have no number in the trace."""


def write_shared_kineto(path: Path, output: Path, keeper: Keeper) -> None:
    """Write what profkit reads of the trace ``path`` to ``output``, gzipped if its name says so.

    Raises:
        TraceError: it cannot be read, or is no Chrome trace.
        OSError: the copy cannot be written.
    """
    header, rows = load_chrome_trace(path)
    copy = _KinetoCopy(keeper)
    opened: Callable[..., IO[bytes]] = gzip.open if output.suffix == ".gz" else open  # type: ignore[assignment]
    with whole_file(output) as partial, opened(partial, "wb") as file:
        file.write(f'{json.dumps(copy.header(header))[:-1]}, "traceEvents": [\n'.encode())
        for number, row in enumerate(copy.rows(rows)):
            file.write(((",\n" if number else "") + row).encode())
        file.write(b"\n]}\n")


class _KinetoCopy:
    """Makes the parts of a copy from those that `load_chrome_trace` returns."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._tracks: dict[str, int] = {}

    def header(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the trace says of itself."""
        copy = _integers(header, "schemaVersion", "cuda_runtime_version", "baseTimeNanoseconds")
        devices = [
            self.keeper.text_or_none(GPU, device.get("name")) for device in objects_in(header.get("deviceProperties"))
        ]
        copy["deviceProperties"] = [{} if name is None else {"name": name} for name in devices]
        if job := job_of(header):
            groups = [self._group(group) for group in objects_in(job.get("pg_config"))]
            copy["distributedInfo"] = {**_integers(job, "rank", "world_size"), "pg_config": groups}
        return copy

    def rows(self, rows: Rows) -> Iterator[str]:
        """Yield the rows that are read, as JSON."""
        for kind, (category, name_kind) in _ROWS.items():
            for event in rows[kind]:
                name = self.keeper.text_or_none(name_kind, event.get("name"))
                yield self._row(event, {"ph": event["ph"], "cat": category, "bp": "e", "name": name})
        for event in rows["metadata"]:
            name = event.get("args", {}).get("name")
            if event.get("name") == "thread_name" and isinstance(name, str):
                inner = THREAD_NAME.match(name.strip())
                kept = self.keeper.text(THREAD, inner[1] if inner else name.strip())
                if kept != LEFT_OUT:
                    yield self._row(event, {"ph": "M", "name": "thread_name"}, {"name": kept})

    def _row(self, event: Event, begin: dict[str, Any], arguments: dict[str, Any] | None = None) -> str:
        row = {key: value for key, value in begin.items() if value is not None} | _integers(event, "pid", "id")
        row["tid"] = self._track(event.get("tid"))
        row["args"] = self._arguments(event.get("args", {})) if arguments is None else arguments
        times = {key: parse_microseconds(event.get(key)) for key in ("ts", "dur")}
        # Decimals as they are counted, in whole nanoseconds: more digits than a double can hold.
        written = (f', "{key}": {_decimal(time_ns)}' for key, time_ns in times.items() if time_ns is not None)
        return json.dumps(row)[:-1] + "".join(written) + "}"

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        kept = {key: self._argument(ARGUMENTS[key], value) for key, value in given.items() if key in ARGUMENTS}
        return {key: value for key, value in kept.items() if value is not None}

    def _argument(self, kind: Kind | None, value: object) -> object:
        if kind is None:
            return _number(value)
        return self.keeper.text_or_none(kind, str(value) if type(value) is int else value)

    def _track(self, track: object) -> object:
        """Return the thread or stream of a row; a number of the copy's own for a thread that has none."""
        number = parse_integer(track)
        if number is not None or track is None:
            return number
        text = str(track)
        return text if _STREAM.fullmatch(text) else self._tracks.setdefault(text, _FIRST_TRACK + len(self._tracks))

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        ranks = group.get("ranks")
        listed = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
        name = self.keeper.text(GROUP, str(group.get("pg_name")))
        return {"pg_name": name, "ranks": listed, **_integers(group, "pg_size")}


def _integers(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    numbers = {key: parse_integer(record.get(key)) for key in keys}
    return {key: number for key, number in numbers.items() if number is not None}


def _number(value: object) -> object:
    """Return a number, which may be written as text, or a truth; None for anything else."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    if isinstance(value, str):
        try:
            decimal = float(value)
        except ValueError:
            return None
        return decimal if isfinite(decimal) else None
    return value if isinstance(value, int) and abs(value) < 1 << 64 else None


def _decimal(time_ns: int) -> str:
    whole, part = divmod(abs(time_ns), 1000)
    return f"{'-' if time_ns < 0 else ''}{whole}.{part:03d}"
