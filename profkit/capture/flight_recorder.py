"""What PyTorch's flight recorder knows of this process's collectives: group, sequence, sizes, when called, how long.

It is a ring of the last collectives, which torch fills anyway or with one variable set before the process groups are
made. Nothing here waits for the GPU. With TORCH_NCCL_ENABLE_TIMING=1 NCCL's collectives have a duration once torch's
watchdog, which looks ten times a second, has seen their end; gloo's have none.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from time import time_ns
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import distributed

from profkit.capture.patches import Function, patch
from profkit.files import collector_off
from profkit.names import C10_DTYPES, kind_of_collective, name_dtype
from profkit.run.light_record import Group
from profkit.run.range_log import LoggedCollective

RING = 2000
"""How many collectives the flight recorder keeps."""

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The ring's size: the newer name, since torch 2.9, and the older one, of which newer versions warn."""

_RENAMED = (2, 9)

_TORCHS_NAMES = {plain: name for name, plain in C10_DTYPES.items()}
_COUNT = "In msg nelems", "Out msg nelems"

_LARGER_OUTPUT = ("all_gather", "gather")
_MESH = "mesh_"
_UNNAMED = ("default", "dim_0", "dim_1", "dim_2", "dim_3")


def turn_on() -> None:
    """Have the flight recorder keep collectives, unless somebody has said how many.

    It is not asked for their durations: under DDP on 2 x H200 steps of 36.6 ms took 37.8 with them.
    """
    if not any(name in os.environ for name in _SIZES):
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        os.environ[_SIZES[version < _RENAMED]] = str(RING)


def several_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Collective(NamedTuple):
    """One collective of this rank: ``called_ns`` since the epoch; ``duration_ns`` on the GPU, None if not known.

    ``is_settled``: what is not known by now will not be.
    """

    number: int
    group: str
    sequence: int
    kind: str
    dtype: str | None
    bytes: int | None
    called_ns: int
    duration_ns: int | None
    is_settled: bool


class FlightRecorder:
    """The flight recorder of this process: of NCCL's collectives if there is one, else of gloo's."""

    def __init__(self) -> None:
        self._meshes: WeakSet[Any] = WeakSet()
        self._described: dict[str, str] = {}
        self._backends: dict[str, str] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._known: list[Collective] = []
        self._ring = ""
        self._next = 0
        self._called_ns = 0
        self._dropped: list[tuple[int, int]] = []
        """Spans of time in which collectives were called that it no longer held when it was read."""

    def watch_meshes(self) -> None:
        """Note each device mesh that is made: it names groups by their dimension."""
        meshes = self._meshes

        def wrap(made: Function) -> Function:
            def noted(mesh: Any, *args: Any, **kwargs: Any) -> None:
                made(mesh, *args, **kwargs)
                with suppress(Exception):
                    meshes.add(mesh)

            return noted

        patch("torch.distributed.device_mesh.DeviceMesh.__init__", wrap, stays=True)

    def look(self) -> None:
        unsettled = next(
            (at for at, collective in enumerate(self._known) if not collective.is_settled), len(self._known)
        )
        first = self._known[unsettled].number if unsettled < len(self._known) else self._next
        with collector_off():  # some 20,000 objects come and go, and none is in a cycle
            self._read(first)

    def _read(self, first: int) -> None:
        found_in = ((ring, dump) for ring, dump in _dumps() if dump.get("entries"))
        ring, dump = next(found_in, (self._ring, cast("Mapping[str, Any]", {})))
        if ring != self._ring:  # NCCL's, which numbers anew, where gloo's was read so far
            self._ring, self._known, self._next, first = ring, [], 0, 0
        held = dump.get("entries", ())
        if held and held[0]["record_id"] > self._next:
            self._dropped.append((self._called_ns, held[0]["time_created_ns"]))
        news = list(self._entries(dump, first))
        if held:
            self._next, self._called_ns = held[-1]["record_id"] + 1, held[-1]["time_created_ns"]
        changed = {collective.number for collective in news}
        self._known = [collective for collective in self._known if collective.number not in changed] + news
        self._known.sort(key=_called)

    def between(self, start_ns: int, end_ns: int) -> list[Collective]:
        """Return those called in a span of time since the epoch; none where some of them were dropped."""
        if any(first < end_ns and start_ns < last for first, last in self._dropped):
            return []
        return self._known[
            bisect_left(self._known, start_ns, key=_called) : bisect_left(self._known, end_ns, key=_called)
        ]

    @property
    def is_settled(self) -> bool:
        return all(collective.is_settled for collective in self._known)

    def forget_before(self, time_ns: int) -> None:
        self._known = self._known[bisect_left(self._known, time_ns, key=_called) :]
        self._dropped = [(first, last) for first, last in self._dropped if last >= time_ns]

    def group(self, name: str, number: int) -> Group:
        self.note_groups()
        ranks = self._ranks.get(name) or tuple(range(distributed.get_world_size() if several_ranks() else 0))
        said = self._described.get(name, "")
        said = said.removeprefix(_MESH) if said.startswith(_MESH) else ""
        dimension = self._dimensions().get(name) or (said if said not in _UNNAMED else "")
        return Group(number, name, ranks, dimension or None, self._backends.get(name))

    def note_groups(self) -> None:
        """Note which ranks each group has, while torch knows: it forgets a group that is destroyed."""
        world = getattr(distributed.distributed_c10d, "_world", None)
        for group, name in list(getattr(world, "pg_names", {}).items()):
            self._ranks[name] = tuple(sorted(world.pg_group_ranks.get(group, ()))) if world is not None else ()

    def _entries(self, dump: Mapping[str, Any], first: int) -> Iterator[Collective]:
        for name, group in dump.get("pg_config", {}).items():
            if name not in self._ranks and isinstance(group.get("ranks"), str):
                self._ranks[name] = tuple(json.loads(group["ranks"]))
        held = dump.get("entries", ())
        for entry in held[max(0, first - held[0]["record_id"]) if held else 0 :]:  # they are numbered in a row
            kind = kind_of_collective(entry["profiling_name"])
            if kind is None:  # the frame around a batch whose parts have entries of their own
                continue
            name, *said = entry["process_group"]
            self._described.setdefault(name, said[0] if said else "")
            self._backends.setdefault(name, entry["profiling_name"].partition(":")[0])
            duration_ms = entry.get("duration_ms")
            is_p2p = entry.get("is_p2p", False)
            side = "output" if kind in _LARGER_OUTPUT else "input"
            dtypes = entry.get(f"{side}_dtypes") or ()
            sizes = [_count_bytes(entry.get(f"{side}_sizes") or (), dtypes)]
            if kind == "all_to_all":  # of uneven parts, the larger side counts
                sizes.append(_count_bytes(entry.get("output_sizes") or (), entry.get("output_dtypes") or ()))
            yield Collective(
                number=entry["record_id"],
                group=name,
                sequence=entry["p2p_seq_id" if is_p2p else "collective_seq_id"],
                kind=kind,
                dtype=name_dtype(dtypes[0]) if dtypes else None,
                bytes=None if None in sizes else max(filter(None, sizes), default=0),
                called_ns=entry["time_created_ns"],
                duration_ns=None if duration_ms is None else round(duration_ms * 1_000_000),
                is_settled=bool(entry.get("retired")),
            )

    def _dimensions(self) -> dict[str, str]:
        dimensions: dict[str, str] = {}
        for mesh in list(self._meshes):
            for dimension in getattr(mesh, "mesh_dim_names", None) or ():
                with suppress(Exception):  # a mesh without groups, or of another world
                    dimensions.setdefault(mesh.get_group(dimension).group_name, dimension)
        return dimensions


_called = attrgetter("called_ns")


def _dumps() -> Iterator[tuple[str, Mapping[str, Any]]]:
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            content = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
        except TypeError:  # torch 2.4 knows fewer options
            content = dump()
        yield name, cast("Mapping[str, Any]", pickle.loads(content))


@functools.cache
def _item_bytes(name: str) -> int | None:
    dtype = getattr(torch, name_dtype(name), None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else None


def _count_bytes(sizes: Any, dtypes: Any) -> int | None:
    total = 0
    for size, name in zip(sizes, dtypes, strict=False):
        item = _item_bytes(name)
        if item is None:
            return None
        total += math.prod(size) * item
    return total


def knows_collectives() -> bool:
    return any(dump.get("entries") for _, dump in _dumps())


def logged_collectives(start_ns: int) -> list[LoggedCollective]:
    """Return what was called since ``start_ns`` (since the epoch); nothing if the ring no longer holds all of it."""
    flight = FlightRecorder()
    flight.look()
    return [_log_collective(call, flight.group(call.group, 0)) for call in flight.between(start_ns, time_ns())]


def _log_collective(call: Collective, group: Group) -> LoggedCollective:
    item_bytes = None if call.dtype is None else _item_bytes(call.dtype)
    known = {
        "Collective name": call.kind,
        "dtype": _TORCHS_NAMES.get(call.dtype or "", call.dtype),
        "Process Group Name": group.name,
        "Process Group Description": group.dimension and _MESH + group.dimension,
        "Process Group Ranks": str(list(group.ranks)),
        "Seq": call.sequence,
        _COUNT[call.kind in _LARGER_OUTPUT]: call.bytes // item_bytes
        if item_bytes and call.bytes is not None
        else None,
    }
    arguments = {key: value for key, value in known.items() if value is not None}
    return LoggedCollective(call.called_ns, call.kind, call.group, arguments)
