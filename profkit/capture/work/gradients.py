"""Which gradients of a step nobody reads: those of parameters that no optimizer steps, and tables' rows of zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from profkit.capture.work import Instance
from profkit.capture.work.operator_work import Buffers, OperatorWork, storage_of
from profkit.names import FORWARD, kind_of
from profkit.run.work import UnreadGradients

RangeOf = Callable[[nn.Module], str | None]
"""The name of a module's range, None if it has none."""


class GradientFlow:
    """Follows in the forward pass which memory depends on some parameters: backward goes through what made it.

    What `detach` cuts off counts as if it were not.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._kept: Buffers = {}
        self.weights: set[Hashable] = {storage_of(one, self._kept) for one in parameters}
        """Their memory, and that of their casts."""
        self._made: dict[Hashable, Instance] = {}
        """Other memory that depends on them, and what made it."""
        self.instances: list[Instance] = []
        self.depending: set[Instance] = set()
        """Ranges in which some operator depends on them."""
        self.fed: set[Instance] = set()
        """Ranges of which what comes in depends on them."""

    def opened(self, instance: Instance) -> None:
        if instance.path[0] == FORWARD and len(instance.path) > 1:
            self.instances.append(instance)

    def did(self, innermost: Instance, work: OperatorWork) -> None:
        """An operator ran within an instance and those around it."""
        if innermost.path[:1] != (FORWARD,):
            return
        read = [access.buffer for access in work.reads]
        makers = [self._made[buffer] for buffer in read if buffer in self._made]
        if not makers and self.weights.isdisjoint(read):
            return
        if not makers and self.weights.issuperset(read):
            self.weights.update(access.buffer for access in work.writes)
            return
        around = innermost.chain()
        self.depending.update(around)
        inside = [set(maker.chain()) for maker in makers]
        self.fed.update(one for one in around if any(one not in chain for chain in inside))
        self._made.update((access.buffer, innermost) for access in work.writes)


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

    def find_unread(
        self, stepped: Collection[int], computed: GradientFlow, needed: GradientFlow
    ) -> list[UnreadGradients]:
        """Return what has gradients that no optimizer reads.

        Nothing where optimizers step none of these parameters: theirs may be copies.

        Args:
            stepped: the ids of the parameters of all optimizers.
            computed: what depends on the parameters that have gradients.
            needed: what depends on those that are stepped.
        """
        got = {
            name: [one for one in own if one.requires_grad and one.grad is not None] for name, own in self._own.items()
        }
        unread = {name: [one for one in own if id(one) not in stepped] for name, own in got.items()}
        if not any(unread.values()) or all(len(unread[name]) == len(own) for name, own in got.items()):
            return []
        early = computed.depending - needed.depending
        first = (computed.fed - needed.fed) & needed.depending
        kinds: dict[str, dict[str, None]] = {}
        for instance in computed.instances:
            kinds.setdefault(kind_of(instance.path[-1]), {})[instance.path[-1]] = None
        names = [{one.path[-1] for one in some if one.path} for some in (early, first)]
        return [*_by_kind(kinds, unread, *names)]


def _by_kind(
    kinds: Mapping[str, Collection[str]],
    unread: Mapping[str, Sequence[nn.Parameter]],
    early: Collection[str],
    first: Collection[str],
) -> Iterator[UnreadGradients]:
    for kind, names in kinds.items():
        parameters = [one for name in names for one in unread.get(name, ())]
        counts = [sum(name in some for name in names) for some in (early, first)]
        if parameters or any(counts):
            yield UnreadGradients(
                kind,
                parameters=len(parameters),
                bytes=sum(one.numel() * one.element_size() for one in parameters),
                instances=len(names),
                unread=sum(bool(unread.get(name)) for name in names),
                early=counts[0],
                first=counts[1],
            )
