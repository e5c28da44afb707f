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

from profkit.models.work import Path, Work


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
        """Return this instance and all around it."""
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
        """Return a new instance of the range ``name``."""
        self.instances.append(Instance(name, around))
        return self.instances[-1]

    def add(self, innermost: Instance, *, flops: int, dtype: str, masked_flops: int, other_flops: int) -> None:
        """Add an operator's FLOPs to the ranges that it ran in."""
        for instance in innermost.chain():
            work = instance.work
            if flops:
                work.flops[dtype] = work.flops.get(dtype, 0) + flops
            work.masked_flops += masked_flops
            work.other_flops += other_flops

    def move(self, innermost: Instance, reads: Iterable[Access], writes: Iterable[Access]) -> None:
        """Add what an operator reads, then what it writes."""
        chain = innermost.chain()
        for access in reads:
            self._read(access, chain)
        for access in writes:
            self._write(access, chain)

    def by_path(self, is_alive: Callable[[Hashable], bool]) -> dict[Path, list[Work]]:
        """Return the instances' work by path, in the order in which they were opened first; called once, at the end.

        Args:
            is_alive: whether a buffer is still there.
        """
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
