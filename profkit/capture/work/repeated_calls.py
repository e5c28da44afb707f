"""Modules that one pass calls again and again, though no call needs what another of them made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator

from profkit.capture.work import Instance
from profkit.capture.work.operator_work import OperatorWork
from profkit.names import BACKWARD, FORWARD, kind_of
from profkit.run.work import IndependentCalls

MANY, MANY_OF_MODEL = 8, 2
"""Calls in one pass, of a module or of the whole model, from which on one call for all of them is worth a thought."""

_OF_MODEL = (FORWARD, "model")
"""A path as long as that of an outermost call."""


class RepeatedCalls:
    """Follows in which memory the results of modules' calls lie.

    What is made of ``weights`` alone is no result: of their memory, to which that of their casts is added. A pass ends
    where backward begins. What the first call of a part of the model made is not followed: of more than two calls that
    need one another, the third needs the second.
    """

    def __init__(self, weights: Collection[Hashable]) -> None:
        self._calls: Counter[str] = Counter()
        self._number: dict[Instance, int] = {}
        self._made: dict[Hashable, dict[str, int]] = {}
        """By memory, the latest call of each module that went into it."""
        self._weights = weights
        self._depend: set[str] = set()
        self._sizes: dict[str, set[tuple[int, ...]]] = {}
        """Of each module, the sizes of images in the first convolutions of its calls."""
        self._convolve: set[Instance] = set()
        self._found: dict[tuple[str, ...], int] = {}

    def opened(self, instance: Instance) -> None:
        """A range opens: that of a module's call, if it lies in a forward pass."""
        path = instance.path
        if path[0] == BACKWARD:
            self._calls.clear()
            self._made.clear()
        elif path[0] == FORWARD and len(path) > 1:
            self._number[instance] = self._calls[path[-1]]
            self._calls[path[-1]] += 1
            self._found[path] = max(self._found.get(path, 0), self._calls[path[-1]])

    def convolves(self, innermost: Instance, size: tuple[int, ...]) -> None:
        """Images of a size are convolved within an instance and those around it: no call takes several sizes."""
        for instance in innermost.chain() if len(size) > 1 else ():
            if instance in self._number and instance not in self._convolve:
                self._convolve.add(instance)
                self._sizes.setdefault(instance.path[-1], set()).add(size)

    def did(self, innermost: Instance, work: OperatorWork) -> None:
        """An operator ran within an instance and those around it."""
        made: dict[str, int] = {}
        written = {access.buffer for access in work.writes}
        # What an operator changes, such as a batch norm's statistics, says nothing of its results.
        read = {access.buffer for access in work.reads} - written
        for buffer in read:
            for name, earlier in self._made.get(buffer, {}).items():
                made[name] = max(earlier, made.get(name, 0))
        is_result = not read.issubset(self._weights)
        for instance in innermost.chain() if is_result else ():
            number = self._number.get(instance)
            if number or (number is not None and len(instance.path) == len(_OF_MODEL)):
                name = instance.path[-1]
                if made.get(name, number) < number:
                    self._depend.add(name)
                made[name] = number
        for buffer in written if made else ():
            self._made[buffer] = self._made.get(buffer, {}) | made

    def describe(self) -> Iterator[IndependentCalls]:
        """Yield the outermost modules with many calls of which none needs another, those of one kind as one.

        Of images they have as many for each size.
        """
        wanted = {
            path
            for path, calls in self._found.items()
            if calls >= (MANY if len(path) > len(_OF_MODEL) else MANY_OF_MODEL) * self._count_sizes(path)
            and path[-1] not in self._depend
        }
        kinds: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for path in wanted:
            if not any(path[:depth] in wanted for depth in range(len(_OF_MODEL), len(path))):
                kind = kind_of(path[-1])
                kinds[kind] = max(kinds.get(kind, 0), self._found[path])
                sizes[kind] = max(sizes.get(kind, 1), self._count_sizes(path))
        depend = set(map(kind_of, self._depend))
        yield from (IndependentCalls(kind, calls, sizes[kind]) for kind, calls in kinds.items() if kind not in depend)

    def _count_sizes(self, path: tuple[str, ...]) -> int:
        return max(1, len(self._sizes.get(path[-1], ())))
