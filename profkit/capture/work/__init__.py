"""Adds up what operators do, for each range that was open, and which bytes each range must move.

A buffer is a tensor's memory; several tensors may view parts of it. Of a range instance counts

- what its operators read of a buffer before one of them has written to it: that comes from outside;
- what its operators wrote to a buffer, if an operator outside reads the buffer before it is overwritten as a whole, or
  if it is still there when counting ends.

Each part of a buffer counts once, and never more than the buffer has. So what is made and used up inside is free. And
what a range must move, one of the ranges or operators inside it must move: their sums are never less than its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from profkit.names import CONTEXT
from profkit.run.work import VERSION, RangeWork, RunWork

Path = tuple[str, ...]


@dataclass(frozen=True)
class Products:
    """The matrix products of an operator, of a graph's node or of a launch; parts of their FLOPs as in `Work`.

    ``dtype`` is the type in which they are done, None without products.
    """

    flops: int = 0
    dtype: str | None = None
    masked_flops: int = 0
    recomputed_flops: int = 0

    def __add__(self, other: Products) -> Products:
        return Products(
            self.flops + other.flops,
            self.dtype or other.dtype,
            self.masked_flops + other.masked_flops,
            self.recomputed_flops + other.recomputed_flops,
        )


@dataclass
class Work:
    """What one instance of a range does, the ranges inside it included; ``flops`` by the type in which they are done.

    ``masked_flops`` is the part of the FLOPs that goes into keys which a causal mask hides, ``recomputed_flops`` the
    part that repeats what the forward pass did.
    """

    flops: dict[str, int] = field(default_factory=dict)
    other_flops: int = 0
    masked_flops: int = 0
    least_bytes: int = 0
    recomputed_flops: int = 0


@dataclass(frozen=True)
class Access:
    """A part of a buffer that an operator touches: ``part`` is the same for the same elements."""

    buffer: Hashable
    part: Hashable
    bytes: int
    buffer_bytes: int


class Instance:
    """One instance of a range; ``around`` is the one that it opened in, None for the step."""

    __slots__ = ("around", "path", "work")

    def __init__(self, name: str | None, around: Instance | None) -> None:
        self.around = around
        self.path: Path = () if around is None or name is None else (*around.path, name)
        self.work = Work()

    def chain(self) -> list[Instance]:
        found: list[Instance] = [self]
        while (around := found[-1].around) is not None:
            found.append(around)
        return found


@dataclass(slots=True)
class _Use:
    """What one instance has done to one buffer."""

    read: dict[Hashable, int] = field(default_factory=dict)
    written: dict[Hashable, int] = field(default_factory=dict)
    is_current: bool = False  # what it wrote last has not been overwritten
    is_wanted: bool = False  # an operator outside has read what it wrote


@dataclass(slots=True)
class _Buffer:
    bytes: int
    uses: dict[Instance, _Use] = field(default_factory=dict)


class WorkAccount:
    """The account of one step; `step` is the instance around all."""

    def __init__(self) -> None:
        self.step = Instance(None, None)
        self.instances = [self.step]
        self._buffers: dict[Hashable, _Buffer] = {}

    def open(self, name: str, around: Instance) -> Instance:
        self.instances.append(Instance(name, around))
        return self.instances[-1]

    def add(self, innermost: Instance, products: Products, other_flops: int = 0) -> None:
        dtype = products.dtype or "unknown"
        for instance in innermost.chain():
            work = instance.work
            if products.flops:
                work.flops[dtype] = work.flops.get(dtype, 0) + products.flops
            work.masked_flops += products.masked_flops
            work.recomputed_flops += products.recomputed_flops
            work.other_flops += other_flops

    def move(self, innermost: Instance, reads: Iterable[Access], writes: Iterable[Access]) -> None:
        chain = innermost.chain()
        for access in reads:
            self._read(access, chain)
        for access in writes:
            self._write(access, chain)

    def by_path(self, is_alive: Callable[[Hashable], bool]) -> dict[Path, list[Work]]:
        """Return the instances' work by path, in the order in which they were opened first; called once, at the end."""
        for key, buffer in self._buffers.items():
            alive = is_alive(key)
            for instance, use in buffer.uses.items():
                moved = min(sum(use.read.values()), buffer.bytes)
                if use.is_wanted or (alive and use.is_current):
                    moved += min(sum(use.written.values()), buffer.bytes)
                instance.work.least_bytes += moved
        found: dict[Path, list[Work]] = {}
        for instance in self.instances:
            found.setdefault(instance.path, []).append(instance.work)
        return found

    def _read(self, access: Access, chain: list[Instance]) -> None:
        buffer = self._buffer(access)
        for instance, use in buffer.uses.items():
            if use.is_current and instance not in chain:
                use.is_wanted = True
        for instance in chain:
            use = buffer.uses.setdefault(instance, _Use())
            if not use.written:
                use.read[access.part] = access.bytes

    def _write(self, access: Access, chain: list[Instance]) -> None:
        buffer = self._buffer(access)
        if access.bytes >= buffer.bytes:
            for use in buffer.uses.values():
                use.is_current = False
        for instance in chain:
            use = buffer.uses.setdefault(instance, _Use())
            use.written[access.part] = access.bytes
            use.is_current = True

    def _buffer(self, access: Access) -> _Buffer:
        buffer = self._buffers.setdefault(access.buffer, _Buffer(access.buffer_bytes))
        buffer.bytes = max(buffer.bytes, access.buffer_bytes)
        return buffer


def summarize_work(by_path: dict[Path, list[Work]], model_flops: int, missing: Iterable[str]) -> RunWork:
    """Return the content of ``work.json`` from the work of each path's instances in one step.

    In a run over several context lengths the step's own row is left out: it would be that of all of them; the FLOPs of
    the model are those of the first one.
    """
    rows = [_summarize_range(path, instances) for path, instances in by_path.items()]
    contexts = [row for row in rows if row.path and row.path[0].startswith(f"{CONTEXT} ")]
    if contexts:
        rows, model_flops = contexts, contexts[0].flops - contexts[0].recomputed_flops
    outermost = min((len(row.path) for row in rows), default=0)
    whole = next((row.flops_by_dtype for row in rows if len(row.path) == outermost), {})
    dtype = max(whole, key=lambda dtype: whole[dtype], default=None)
    return RunWork(VERSION, "counted", dtype, tuple(rows), model_flops, tuple(sorted(missing)))


def _summarize_range(path: Path, instances: list[Work]) -> RangeWork:
    count = len(instances)
    dtypes = sorted({dtype for one in instances for dtype in one.flops})
    by_dtype = {dtype: sum(one.flops.get(dtype, 0) for one in instances) // count for dtype in dtypes}
    flops = sum(by_dtype.values())
    varies = any(one != instances[0] for one in instances)
    in_step = {dtype: sum(one.flops.get(dtype, 0) for one in instances) for dtype in dtypes} if varies else {}
    return RangeWork(
        path=path,
        flops=flops,
        other_flops=sum(one.other_flops for one in instances) // count,
        needed_flops=flops - sum(one.masked_flops for one in instances) // count,
        least_bytes=sum(one.least_bytes for one in instances) // count,
        flops_by_dtype=by_dtype,
        instances=count,
        varies=varies,
        recomputed_flops=sum(one.recomputed_flops for one in instances) // count,
        flops_in_step=in_step,
    )
