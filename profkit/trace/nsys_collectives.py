"""What NCCL says of its collectives in NVTX payloads: communicator, size and peers, where an nsys export holds them.

NCCL opens an NVTX range around each call, with a binary payload that the export's NVTX_PAYLOAD_SCHEMA_ENTRIES describe.
nsys writes payloads with ``nsys export --include-blobs=true`` (seen in 2025.3.1; NCCL 2.28): four 64-bit numbers
(domain, schema, size, offset of the data), then the data. NCCL gives no type, and of some collectives each rank's part.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np

from profkit.names import kind_of_collective
from profkit.trace.columns import NO_LAUNCH, CollectiveCall, Ints, Work
from profkit.trace.nsys_rows import POSITIVE, TABLE, Names
from profkit.trace.sqlite import SqliteFile

ENTRIES = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
COMMUNICATOR = "communicator "
"""What the name of a group begins with that is known by NCCL's number of the communicator alone."""

_COLUMNS = {"start", "globalTid", "textId", "domainId", "binaryData"}
_ID, _SIZE, _RANKS, _PEER = "NCCL communicator ID", "Message size [bytes]", "No. of ranks", "Peer rank"
ENTRIES_READ = (_ID, _SIZE, _RANKS, _PEER)
_HEADER = struct.Struct("<QQQQ")
# nvtx3/nvToolsExtPayload.h: NVTX_PAYLOAD_ENTRY_TYPE_INT, _UINT64, _SIZE.
_FORMATS = {5: "<i", 18: "<Q", 22: "<Q"}
_MOST = 1 << 62
_MOST_RANKS = 1 << 17

_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""The kinds of which NCCL says the part of one rank; their size, as nccl-tests counts it, is that of all parts."""

_KERNEL = "nccl"
_TYPE = re.compile(r"_(?:Sum|Prod|Min|Max|MinMax|PreMulSum|SumPostDiv)_([a-z]{1,2}\d{1,2}(?:e\dm\d)?)_")
_TYPES = {
    **{"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"},
    **{"i8": "int8", "u8": "uint8", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64"},
    **{"f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"},
}


@dataclass(frozen=True)
class _Call:
    """One call of NCCL: when and on which thread it began, its name, and the numbers of its payload."""

    start_ns: int
    thread: int
    name: str
    numbers: Mapping[str, int]


def read_collectives(
    file: SqliteFile, tables: Mapping[str, frozenset[str]], work: Work, names: Names
) -> tuple[Ints | None, tuple[CollectiveCall, ...]]:
    """Return for each piece of work the index of its collective or -1, and the collectives; None without payloads.

    A kernel of NCCL belongs to the calls that began on its launching thread since the last such kernel was launched
    there. Several calls that became one kernel count as one if they are alike; where several became several kernels,
    which is which is unknown.
    """
    if ENTRIES not in tables or not tables.get(TABLE, frozenset()) >= _COLUMNS:
        return None, ()
    calls = list(_read_calls(file, names))
    if not calls:
        return None, ()
    users = _count_users(calls)
    part_of = _count_ranks(calls, users)
    index = np.full(len(work.name), -1, dtype=np.int64)
    collectives: list[CollectiveCall] = []
    for some, rows in _blocks([call for call in calls if _SIZE in call.numbers], work, names):
        said = _describe(some, len(rows), part_of, users)
        if said is None:
            continue
        for row in rows:
            dtype = _TYPE.search(names.strings[int(work.name[row])])
            index[row] = len(collectives)
            collectives.append(said if dtype is None else replace(said, dtype=_TYPES.get(dtype[1])))
    return (index, tuple(collectives)) if collectives else (None, ())


def _read_calls(file: SqliteFile, names: Names) -> Iterator[_Call]:
    """Yield NCCL's calls that have a payload, in order of time."""
    schemas = read_schemas(file)
    if not schemas:
        return
    rows = file.rows(
        f"SELECT start, globalTid, textId, binaryData FROM {TABLE} WHERE typeof(binaryData) = 'blob' AND"
        " typeof(start) = 'integer' AND typeof(globalTid) = 'integer' AND typeof(textId) = 'integer' ORDER BY start"
    )
    known = names.values(list({text for _, _, text, _ in rows}))
    for start, thread, text, payload in rows:
        numbers = _decode(payload, schemas)
        if _ID in numbers:
            yield _Call(start, thread & POSITIVE, known.get(text, ""), numbers)


Schemas = dict[tuple[int, int], dict[str, tuple[str, int]]]
"""Domain and schema → the wanted numbers of such a payload, each with its form and where it stands."""


def read_schemas(file: SqliteFile) -> Schemas:
    """Return how NCCL's payloads are laid out."""
    schemas: Schemas = {}
    for domain, schema, kind, name, offset in file.rows(
        f"SELECT domainId, schemaId, type, name, offset FROM {ENTRIES}"
    ):
        if name in ENTRIES_READ and kind in _FORMATS and isinstance(offset or 0, int):
            schemas.setdefault((domain, schema), {})[name] = _FORMATS[kind], offset or 0
    return schemas


def keep_wanted(payload: bytes, schemas: Schemas) -> bytes | None:
    """Return a payload with the wanted numbers where they were and zeros elsewhere; None if it has none."""
    numbers = _decode(payload, schemas)
    if not numbers:
        return None
    domain, schema, *_ = _HEADER.unpack_from(payload)
    places = [(*schemas[domain, schema][name], number) for name, number in numbers.items()]
    data = bytearray(max(offset + struct.calcsize(form) for form, offset, _ in places))
    for form, offset, number in places:
        struct.pack_into(form, data, offset, number)
    return _HEADER.pack(domain, schema, len(data), _HEADER.size) + data


def _decode(payload: bytes, schemas: Schemas) -> dict[str, int]:
    """Return the wanted numbers of a payload; none if it is of another schema or cut short."""
    if len(payload) < _HEADER.size:
        return {}
    domain, schema, size, begin = _HEADER.unpack_from(payload)
    data = payload[begin : begin + size]
    numbers = {}
    for name, (form, offset) in schemas.get((domain, schema), {}).items():
        if 0 <= offset <= len(data) - struct.calcsize(form):
            numbers[name] = int(struct.unpack_from(form, data, offset)[0])
    return numbers


def _count_users(calls: Sequence[_Call]) -> dict[int, int]:
    """Return communicator → how many processes of this report use it."""
    return Counter(communicator for communicator, _ in {(call.numbers[_ID], call.thread >> 24) for call in calls})


def _count_ranks(calls: Sequence[_Call], users: Mapping[int, int]) -> dict[int, int]:
    """Return communicator → its number of ranks, where that is known.

    NCCL says it when a communicator is made. Of one that was split off, it is the number of processes that use it, if
    this report holds all ranks of another communicator, and so of the job.
    """
    said = {call.numbers[_ID]: call.numbers[_RANKS] for call in calls if 0 < call.numbers.get(_RANKS, 0) < _MOST_RANKS}
    is_whole = any(users[number] == ranks for number, ranks in said.items())
    return (dict(users) if is_whole else {}) | said


def _blocks(calls: Sequence[_Call], work: Work, names: Names) -> Iterator[tuple[list[_Call], list[int]]]:
    """Yield calls in a row on one thread and the kernels that were launched there before the next call."""
    is_nccl = np.array([name.startswith(_KERNEL) for name in names.strings], dtype=np.bool_)
    rows = np.flatnonzero(is_nccl[work.name] & (work.launch_thread != NO_LAUNCH) & ~work.is_graph)
    events: dict[int, list[tuple[int, bool, int]]] = {}
    for at, call in enumerate(calls):
        events.setdefault(call.thread, []).append((call.start_ns, False, at))
    for row, launch_ns, thread in zip(
        rows.tolist(), work.launch_ns[rows].tolist(), work.launch_thread[rows].tolist(), strict=True
    ):
        if thread in events:
            events[thread].append((launch_ns, True, row))
    for of_thread in events.values():
        runs = [list(run) for _, run in groupby(sorted(of_thread), key=itemgetter(1))]
        # What was launched before the first call belongs to none.
        first = int(runs[0][0][1])
        for some, launched in zip(runs[first::2], runs[first + 1 :: 2], strict=False):
            yield [calls[at] for *_, at in some], [row for *_, row in launched]


def _describe(
    calls: Sequence[_Call], kernels: int, ranks_of: Mapping[int, int], users: Mapping[int, int]
) -> CollectiveCall | None:
    """Return what one kernel, or each of several, that these calls became is; None if they tell nothing of it."""
    kinds = {kind_of_collective(call.name) for call in calls}
    communicators = {call.numbers[_ID] for call in calls}
    if None in kinds or len(communicators) != 1 or (kinds != {"send", "recv"} and len(kinds) != 1):
        return None
    (communicator,), kind = communicators, "send" if len(kinds) > 1 else str(next(iter(kinds)))
    group = f"{COMMUNICATOR}{communicator:016x}"
    ranks = ranks_of.get(communicator)
    by_kind = {name: [call.numbers for call in calls if kind_of_collective(call.name) == name] for name in kinds}
    sums = {name: sum(numbers[_SIZE] for numbers in some) for name, some in by_kind.items()}
    peers = {name: {numbers.get(_PEER, -1) for numbers in some} for name, some in by_kind.items()}
    is_p2p = kinds == {"send", "recv"}
    if is_p2p and peers["send"] == peers["recv"] and len(peers["send"]) == (ranks or users[communicator]) > 1:
        # With as many as there are ranks, and so with itself too: torch's all-to-all of uneven parts. Its size is the
        # larger side's.
        kind, total = "all_to_all", max(sums.values())
    elif is_p2p:
        total = _MOST  # what it sends is not what takes its time: it waits for what it receives
    else:
        parts = ranks if kind in _PARTS else 1
        total = sums[kind] * parts if parts is not None else _MOST
    return CollectiveCall(kind, group, byte_count=total if total < _MOST and kernels == 1 else None)
