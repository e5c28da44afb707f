"""Work of a counted step that nobody needs: gradients that nobody reads, calls made one by one, what masks hide."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from profkit.capture.line_samples import Place, describe
from profkit.capture.work import Instance
from profkit.capture.work.operator_work import Buffers, OperatorWork, storage_of
from profkit.names import BACKWARD, FORWARD, kind_of, name_in_list
from profkit.run.work import (
    GivenMask,
    IndependentCalls,
    IndependentTurns,
    Padding,
    RepeatedCalls,
    ScoredPositions,
    UnreadGradients,
)

_RANDOM = ("dropout", "bernoulli", "rand", "normal_", "uniform", "exponential", "multinomial")
"""Parts of the names of operators that draw random numbers."""
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


MANY, MANY_OF_MODEL = 8, 2
"""Calls in one pass, of a module or of the whole model, from which on one call for all of them is worth a thought."""

_MANY_SMALL = 24
"""Turns of a loop that multiplies nothing."""
_MOST_APART = 0.7
"""A loop whose turns need no other one has so many of its operators without such a need; some add up."""

_OF_MODEL = (FORWARD, "model")
"""A path as long as that of an outermost call."""


def _is_within(path: tuple[str, ...], others: Collection[tuple[str, ...]]) -> bool:
    """Return whether a module's call lies in that of one of some others."""
    return any(path[:depth] in others for depth in range(len(_OF_MODEL), len(path)))


class CallsApart:
    """Follows in which memory the results of modules' calls lie.

    What is made of ``weights`` alone is no result: of their memory, to which that of their casts is added. A pass ends
    where backward begins. What the first call of a part of the model made is not followed: of more than two calls that
    need one another, the third needs the second.
    """

    def __init__(self, weights: Collection[Hashable]) -> None:
        self._calls: Counter[str] = Counter()
        self._number: dict[Instance, tuple[str, int]] = {}
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
            name = name_in_list(path[-1])
            path = *path[:-1], name
            self._number[instance] = name, self._calls[name]
            self._calls[name] += 1
            self._found[path] = max(self._found.get(path, 0), self._calls[name])

    def convolves(self, innermost: Instance, size: tuple[int, ...]) -> None:
        """Images of a size are convolved within an instance and those around it: no call takes several sizes."""
        for instance in innermost.chain() if len(size) > 1 else ():
            if instance in self._number and instance not in self._convolve:
                self._convolve.add(instance)
                self._sizes.setdefault(self._number[instance][0], set()).add(size)

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
            name, number = self._number.get(instance, ("", 0))
            if number or (name and len(instance.path) == len(_OF_MODEL)):
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
            if not _is_within(path, wanted):
                kind = kind_of(path[-1])
                kinds[kind] = max(kinds.get(kind, 0), self._found[path])
                sizes[kind] = max(sizes.get(kind, 1), self._count_sizes(path))
        depend = set(map(kind_of, self._depend))
        yield from (IndependentCalls(kind, calls, sizes[kind]) for kind, calls in kinds.items() if kind not in depend)

    def _count_sizes(self, path: tuple[str, ...]) -> int:
        return max(1, len(self._sizes.get(path[-1], ())))


class TurnsApart:
    """Finds loops in a module's own code of which no turn needs what another one made.

    A line's operator is followed within one call of the module: does it compute with what it made before? What a line
    adds up over all turns does. A loop is told by how often its operators run: fewer are enough where they multiply.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Place, str], int] = {}
        """A number for each line and operator: to look up a place takes far longer."""
        self._counts: defaultdict[Instance, Counter[int]] = defaultdict(Counter)
        self._made: dict[Hashable, dict[tuple[Instance, int], int]] = {}
        """By memory, the latest run of each operator of a call that is still open which went into it."""
        self._depend: set[tuple[Instance, int]] = set()
        self._multiply: set[int] = set()

    def did(self, innermost: Instance, work: OperatorWork, place: Place) -> None:
        """An operator ran for a line of the user's own within an instance and those around it."""
        if innermost.path[:1] != (FORWARD,) or len(innermost.path) < len(_OF_MODEL):
            return
        written = {access.buffer for access in work.writes}
        read = {access.buffer for access in work.reads} - written
        around, made = set(innermost.chain()), dict[tuple[Instance, int], int]()
        for buffer in read:
            for run, number in self._made.get(buffer, {}).items():
                if run[0] in around:
                    made[run] = max(number, made.get(run, 0))
        own = innermost, self._numbers.setdefault((place, work.name), len(self._numbers))
        number = self._counts[innermost][own[1]]
        self._counts[innermost][own[1]] += 1
        if own in made:
            self._depend.add(own)
        if work.products.flops:
            self._multiply.add(own[1])
        made[own] = number
        for buffer in written:
            self._made[buffer] = self._made.get(buffer, {}) | made

    def describe(self) -> Iterator[IndependentTurns]:
        """Yield one loop a kind of module: that of most turns, at the line that multiplies first, if one does."""
        found: dict[str, IndependentTurns] = {}
        places = [place for place, _ in self._numbers]
        for instance, counts in self._counts.items():
            loop = [run for run, count in counts.items() if count >= MANY]
            apart = [run for run in loop if (instance, run) not in self._depend]
            small = [run for run in apart if counts[run] >= _MANY_SMALL]
            products = [run for run in apart if run in self._multiply]
            first = next(iter(products or small), None)
            turns = 0 if first is None else counts[first]
            line = None if first is None else describe(places[first])
            if line is None or line.file is None or len(apart) < _MOST_APART * len(loop):
                continue
            kind = kind_of(instance.path[-1])
            if kind not in found or turns > found[kind].turns:
                found[kind] = IndependentTurns(kind, turns, line.file, line.line, line.function)
        yield from found.values()


class SameInputs:
    """Finds modules that a pass calls again on what they were given before.

    What is read of ``weights`` alone, what was made inside of the call, and what an operator changes, such as a batch
    norm's statistics, is nothing that it was given. A call that draws random numbers may have another result.
    """

    def __init__(self, weights: Set[Hashable]) -> None:
        self._weights = weights
        self._changes: Counter[Hashable] = Counter()
        self._given: dict[Instance, dict[Hashable, int]] = {}
        self._made: dict[Instance, set[Hashable]] = {}
        self._random: set[str] = set()
        self._found: dict[tuple[str, ...], int] = {}

    def opened(self, instance: Instance) -> None:
        """A range opens: that of a module's call, if it lies in a forward pass."""
        path = instance.path
        if path[0] == BACKWARD:
            self._end_pass()
        elif path[0] == FORWARD and len(path) > 1:
            self._given[instance], self._made[instance] = {}, set()

    def did(self, innermost: Instance, work: OperatorWork) -> None:
        """An operator ran within an instance and those around it."""
        written = {access.buffer for access in work.writes}
        own = written | (self._weights & {access.buffer for access in work.reads})
        read = {(access.buffer, access.part) for access in work.reads if access.buffer not in own}
        for instance in innermost.chain() if self._given else ():
            if instance in self._given:
                made = self._made[instance]
                for buffer, part in read:
                    if buffer not in made:
                        self._given[instance].setdefault((buffer, part), self._changes[buffer])
                made.update(written)
                if any(name in work.name for name in _RANDOM):
                    self._random.add(instance.path[-1])
        self._changes.update(written)

    def _end_pass(self) -> None:
        calls: defaultdict[tuple[str, ...], list[dict[Hashable, int]]] = defaultdict(list)
        for instance, given in self._given.items():
            calls[instance.path].append(given)
        for path, inputs in calls.items():
            if len(inputs) > 1 and inputs[0] and all(given == inputs[0] for given in inputs):
                self._found[path] = max(self._found.get(path, 0), len(inputs))
        self._given.clear()
        self._made.clear()

    def describe(self) -> Iterator[RepeatedCalls]:
        """Yield the outermost of these modules."""
        self._end_pass()
        for path, calls in self._found.items():
            if not _is_within(path, self._found) and path[-1] not in self._random:
                yield RepeatedCalls(path[-1], calls)


_HIDDEN = -1e4
"""What is added to the scores of hidden keys is this or less: the least number of a type, or an older model's."""
_LARGEST = 1 << 26
"""Looking at more numbers takes memory that a program may lack; such a mask counts as one that hides more."""


class Masks:
    """Takes masks while a step is counted; `padding` and `given` say what they hid."""

    def __init__(self) -> None:
        self._padding: list[tuple[int, torch.Tensor]] = []
        self._tokens: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        """The same by the tokens of a vocabulary of so many."""
        self._given: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self._targets: defaultdict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)

    def add_samples(self, mask: torch.Tensor) -> None:
        """Take a model's mask of (samples, positions): those up to the longest sample's end, and the used ones."""
        used = mask.detach() != 0
        self._padding.append((mask.numel(), torch.stack([used.any(0).sum() * len(mask), used.sum()])))

    def add_lengths(self, positions: int, lengths: Any) -> None:
        """Take the same of a batch of samples of so many positions, whose lengths are known."""
        own = torch.as_tensor(lengths).detach()
        self._padding.append((positions * len(own), torch.stack([own.max() * len(own), own.sum()])))

    def add_tokens(self, tokens: torch.Tensor, vocabulary: int) -> None:
        """Take the tokens of (samples, positions) that an embedding is given: what all samples end with is padding.

        The first of these may be a sample's own end. Tokens that are all one say nothing.
        """
        last = tokens.detach()[:, -1:]
        ends = (tokens.detach() == last).flip(1).cumprod(1).sum(1) - 1
        ends = ends * (ends.min() < tokens.shape[1] - 1)
        shared = ends.min() * (last == last[0]).all()
        longest = tokens.numel() - shared * len(tokens)
        self._tokens[vocabulary].append((tokens.numel(), torch.stack([longest, tokens.numel() - ends.sum()])))

    def add_attention(self, module: str, mask: torch.Tensor) -> None:
        """Take the mask of (…, queries, keys) that a module's fused attention is given, as numbers or what is seen."""
        mask = mask.detach()
        for axis, stride in enumerate(mask.stride()):
            mask = mask.narrow(axis, 0, 1) if stride == 0 and axis < mask.dim() - 2 else mask
        if mask.numel() > _LARGEST:
            self._given[module].append(torch.zeros(2, dtype=torch.bool, device=mask.device))
            return
        is_seen = mask if mask.dtype is torch.bool else mask == 0
        is_hidden = ~mask if mask.dtype is torch.bool else mask <= _HIDDEN
        causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
        is_causal = (is_seen == causal).all() & (is_hidden != causal).all()
        self._given[module].append(torch.stack([is_causal, is_seen.all()]))

    def add_targets(self, module: str, targets: torch.Tensor, ignored: int) -> None:
        """Take the classes that a loss is given for the positions that a module scored; one number is none."""
        self._targets[module].append((targets.numel(), (targets.detach() != ignored).sum()))

    def padding(self) -> Padding | None:
        given = self._padding or self._tokens[max(self._tokens, default=0)]
        counts = [(positions, *used.tolist()) for positions, used in given]
        return Padding(*map(sum, zip(*counts, strict=True))) if counts else None

    def given(self) -> Iterator[GivenMask]:
        for module, masks in self._given.items():
            causal, empty = torch.stack(masks).sum(0).tolist()
            yield GivenMask(module, len(masks), causal, empty)

    def scored(self) -> Iterator[ScoredPositions]:
        for module, targets in self._targets.items():
            yield ScoredPositions(module, sum(count for count, _ in targets), sum(int(own) for _, own in targets))
