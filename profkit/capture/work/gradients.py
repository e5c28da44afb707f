"""Which gradients of a step nobody reads: those of parameters that no optimizer steps, and tables' rows of zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from profkit.capture.work import Instance
from profkit.capture.work.operator_work import Buffers, OperatorWork, storage_of
from profkit.names import FORWARD, kind_of
from profkit.run.work import UnreadGradients

_MOST_OPTIMIZERS = 4
"""With more of them, following each takes long."""

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
        self.places: dict[int, tuple[str, str]] = {}
        """By a parameter's id, the ranges of its model and of the innermost module around it."""
        for model in models:
            self._collect(model, "", range_of(model) or "")

    def _collect(self, module: nn.Module, around: str, model: str) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        name = self._range_of(module) or around
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        self._count.update(map(id, own))
        self._own.setdefault(name, []).extend(own)
        self.places.update((id(parameter), (model, name)) for parameter in own)
        for child in module.children():
            self._collect(child, name, model)

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


@dataclass
class _Part:
    """What runs between two optimizers' steps, of which ``optimizer`` makes the second.

    ``came`` has the gradients that it added to, by their parameters' ids, without the optimizer's own: where they lie.
    ``instances`` are the modules' calls in it. What is ``read`` was still there at its own optimizer's next step.
    """

    optimizer: int
    came: dict[int, Hashable]
    instances: list[Instance]
    read: dict[int, bool] = field(default_factory=dict)


class GradientsApart:
    """Finds the gradients that come in before one optimizer's step and are thrown away before their own one's.

    So it is with a generator's where what it made is not detached from the discriminator's loss, and with those of the
    discriminator that the generator's loss goes through. Which of them are read in the next step is not seen: it is
    taken to throw away what this one did, where it found gradients.

    Args:
        optimizers: the parameters of each, by its id.
    """

    def __init__(self, optimizers: Mapping[int, Sequence[Tensor]]) -> None:
        is_apart = 1 < len(optimizers) <= _MOST_OPTIMIZERS
        self._own = {key: {id(one): one for one in own} for key, own in optimizers.items()} if is_apart else {}
        self._flows = {key: GradientFlow(own.values()) for key, own in self._own.items()}
        self._memory: Buffers = {}
        self._notes = {at: self._look(one) for own in self._own.values() for at, one in own.items()}
        self._before = dict(self._notes)
        self._keeps: dict[int, bool] = {}
        """Parameters whose optimizer has stepped, and whether it read a gradient of the step before."""
        self._parts: list[_Part] = []
        self._places: dict[int, tuple[str, str]] = {}
        self._seen_instances = 0

    def _look(self, parameter: Tensor) -> tuple[Hashable, int] | None:
        """Return where a parameter's gradient lies, and how often it was changed there."""
        gradient = parameter.grad
        return None if gradient is None else (storage_of(gradient, self._memory), gradient._version)

    def did(self, innermost: Instance, work: OperatorWork) -> None:
        for flow in self._flows.values():
            flow.did(innermost, work)

    def stepped(self, optimizer: int, parameters: Parameters, computed: GradientFlow) -> None:
        """An optimizer's step has ended, with gradients still there."""
        if optimizer not in self._own:
            return
        self._places |= parameters.places
        came: dict[int, Hashable] = {}
        for key, own in self._own.items():
            for at, parameter in own.items():
                now = self._look(parameter)
                if now is not None and now != self._notes[at] and key != optimizer:
                    came[at] = now[0]
                self._notes[at] = now
        for at in self._own[optimizer]:
            place = self._place(self._notes[at])
            self._keeps.setdefault(at, place is not None and place == self._place(self._before[at]))
            for part in self._parts:
                if at in part.came:
                    part.read.setdefault(at, part.came[at] == place)
        self._parts.append(_Part(optimizer, came, computed.instances[self._seen_instances :]))
        self._seen_instances = len(computed.instances)

    @staticmethod
    def _place(note: tuple[Hashable, int] | None) -> Hashable | None:
        return None if note is None else note[0]

    @property
    def steps(self) -> int:
        """How many optimizers' steps there were."""
        return len(self._parts)

    def find(self, computed: GradientFlow) -> Iterator[UnreadGradients]:
        """Yield them by part and model, if none of a part's is read later."""
        parameters = {at: one for own in self._own.values() for at, one in own.items()}
        for before, part in enumerate(self._parts):
            # What its optimizer stepped before may be read in the next step.
            is_read = any(part.read.get(at, self._keeps.get(at, True)) for at in part.came)
            models: dict[str, dict[str, list[Tensor]]] = {}
            for at in part.came if not is_read else ():
                model, name = self._places.get(at, ("", ""))
                models.setdefault(model, {}).setdefault(name, []).append(parameters[at])
            yield from self._describe(before, part, computed, models)

    def _describe(
        self, before: int, part: _Part, computed: GradientFlow, models: Mapping[str, Mapping[str, Sequence[Tensor]]]
    ) -> Iterator[UnreadGradients]:
        flow, own = self._flows[part.optimizer], set(part.instances)
        early = {one for one in (computed.depending - flow.depending) & own if one.path[1] in models}
        # Only where backward goes on into what needs no gradient does it compute that of what comes in.
        first = (computed.fed - flow.fed) & flow.depending & own if early else set[Instance]()
        for model in {one.path[1]: None for one in computed.instances}:
            kinds: dict[str, dict[str, None]] = {}
            for one in computed.instances:
                if one.path[1] == model:
                    kinds.setdefault(kind_of(one.path[-1]), {})[one.path[-1]] = None
            names = [{one.path[-1] for one in some if one.path[1:2] == (model,)} for some in (early, first)]
            for found in _by_kind(kinds, models.get(model, {}), *names):
                yield replace(found, before=before, model=kind_of(model))


def _by_kind(
    kinds: Mapping[str, Collection[str]],
    unread: Mapping[str, Sequence[Tensor]],
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
