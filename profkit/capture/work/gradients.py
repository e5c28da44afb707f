"""Which gradients of a step nobody reads: those of parameters that no optimizer steps, and tables' rows of zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch import nn

from profkit.capture.work import Instance
from profkit.names import FORWARD, kind_of
from profkit.run.work import UnreadGradients

RangeOf = Callable[[nn.Module], str | None]
"""The name of a module's range, None if it has none."""


class Parameters:
    """The parameters of some models by the innermost range that they lie under, as they stand before gradients go."""

    def __init__(self, models: Iterable[nn.Module], range_of: RangeOf) -> None:
        self._own: dict[str, list[nn.Parameter]] = {}
        self._count: Counter[int] = Counter()
        self._range_of = range_of
        self._seen: set[nn.Module] = set()
        for model in models:
            self._collect(model, "")

    def _collect(self, module: nn.Module, around: str) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        name = self._range_of(module) or around
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        self._count.update(map(id, own))
        self._own.setdefault(name, []).extend(own)
        for child in module.children():
            self._collect(child, name)

    def shapes_of_shared(self) -> set[tuple[int, ...]]:
        """Return the shapes of parameters that several modules have: a table's is another's matrix, with a gradient
        for every row.
        """
        every = (parameter for own in self._own.values() for parameter in own)
        return {tuple(parameter.shape) for parameter in every if self._count[id(parameter)] > 1}

    def find_unread(self, stepped: Collection[int], opened: Sequence[Instance]) -> list[UnreadGradients]:
        """Return what has gradients that no optimizer reads.

        Nothing where optimizers step none of these parameters: theirs may be copies.

        Args:
            stepped: the ids of the parameters of all optimizers.
            opened: the ranges of the step in the order in which they opened.
        """
        got = {
            name: [one for one in own if one.requires_grad and one.grad is not None] for name, own in self._own.items()
        }
        unread = {name: [one for one in own if id(one) not in stepped] for name, own in got.items()}
        read = {name for name, own in got.items() if len(own) > len(unread[name])}
        if not read or not any(unread.values()):
            return []
        forward = [one for one in opened if one.path[:1] == (FORWARD,)]
        first = next((at for at, one in enumerate(forward) if one.path[-1] in read), len(forward))
        around = {name for one in forward[first : first + 1] for name in one.path}
        early = {one.path[-1] for one in forward[:first]} - around
        names = dict.fromkeys(one.path[-1] for one in forward if len(one.path) > 1)
        return [*_by_kind(names, unread, early)]


def _by_kind(
    names: Iterable[str], unread: dict[str, list[nn.Parameter]], early: Collection[str]
) -> Iterator[UnreadGradients]:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    for kind, alike in kinds.items():
        parameters = [one for name in alike for one in unread.get(name, ())]
        whole = sum(name in early for name in alike)
        if parameters or whole:
            yield UnreadGradients(
                kind,
                parameters=len(parameters),
                bytes=sum(one.numel() * one.element_size() for one in parameters),
                instances=len(alike),
                unread=sum(bool(unread.get(name)) for name in alike),
                early=whole,
            )
