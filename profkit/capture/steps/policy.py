"""What a step is, and when the boundary between two steps is made.

`Hooks` reports what the script does (`StepPolicy`). A boundary that is due is not made within a range of the script's
own that belongs to one step (`Boundaries`). A built-in model says itself what its steps are, by ranges of its own
(`OwnSteps`).
"""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.loss import _Loss
from torch.optim.optimizer import Optimizer

from profkit.annotation import RangeObserver
from profkit.capture.hooks.backward_nodes import running_graph
from profkit.capture.hooks.module_names import ROOT, Roots, unwrap
from profkit.capture.hooks.optimizer_calls import optimizer_classes
from profkit.capture.steps.variable_names import VariableNames, tell_apart
from profkit.names import CONTEXT, COUNTED, STEP, WARMUP
from profkit.run.recording import StepChoice, StepKind


class StepPolicy:
    """Decides where steps begin and end, from what the script does.

    Of all kinds of steps (`StepKind`) the strongest that the script has shown counts, or the one that ``step_on``
    names. Counting begins anew when a stronger one appears, until `settle`. Where several optimizers, modules or graphs
    take turns, one round of them is a step. An optimizer that has been made keeps everything weaker from counting.
    Where the model in training is asked without gradients in every k-th step alone, as for the rollout of an iteration
    of PPO, the iteration is the step (``finds_iterations``).

    Each method that reports something returns the number of the step that begins there, counted from 0; None if none
    does. What is captured into a CUDA graph does not run, and ends nothing until it is replayed.

    Args:
        step_on: what a person says a step is (`StepChoice.parse`).
        counts: False where somebody else knows the steps: none ever begins then.
    """

    def __init__(self, step_on: str | None = None, *, counts: bool = True) -> None:
        self._choice = None if step_on is None else StepChoice.parse(step_on)
        self.times = 1 if self._choice is None else self._choice.times
        """How many of what makes a step are one together."""
        self._left = self.times
        self.finds_iterations = False
        self._iterations = Iterations()
        self._counts = counts
        self._kind: StepKind | None = None
        self._names: tuple[str, ...] = ()
        self._named: tuple[StepKind, int] | None = None
        """For which kind, and after how many changes of its round, the names were looked up."""
        self._number = -1
        self._is_settled = False
        self._thread: int | None = None
        """The one whose steps count, None for all."""
        self._thread_of_step: int | None = None
        """The one that ended the last step."""
        self._is_postponed = False
        self._rounds = [Round() for _ in StepKind]
        self._functions: dict[str, _Function] = {}
        self._captured: WeakKeyDictionary[Any, StepKind] = WeakKeyDictionary()
        self._capturing: Any = None
        self.has_captured = False
        """Whether anything was captured into a CUDA graph."""
        self._inside = _Inside()
        self._models = Roots()
        self._variables = VariableNames()
        self._called: WeakSet[Any] = WeakSet()
        """The models and optimizers whose names have been looked for."""
        self.seen: Counter[str] = Counter()
        """How often what may make a step has happened: ``backward``, ``optimizer:AdamW``, …"""
        self.changed_to: str | None = None
        """The kind of steps that appeared only after the recording had begun."""

    @property
    def ends_with_script(self) -> bool:
        """Whether nothing but the end of the script ends the last step."""
        return self._kind is None or self._kind is StepKind.WHOLE

    def is_compilers(self, module: nn.Module) -> bool:
        """Return whether an outermost module that is about to be called is code that a compiler made of a function."""
        return isinstance(module, GraphModule) and self._variables.of_model(module) is None

    def name_of(self, module: nn.Module) -> str:
        """Return what an outermost module is called in ranges: of several models each has a name of its own."""
        if not has_parameters(module):
            return type(module).__name__
        models = [model for model in self._models.list() if has_parameters(model)]
        return tell_apart(unwrap(module), models, self._variables.known) or ROOT

    def label(self, optimizer: Optimizer) -> str | None:
        """Return what tells this optimizer from the others of a step; None if it is the only one, or nothing does."""
        return tell_apart(optimizer, self._rounds[StepKind.OPTIMIZER].happening(), self._variables.known)

    def what_counts(self) -> tuple[str, tuple[str, ...]] | None:
        """Return the word for what a step is, and the names of what makes it; None before anything has."""
        return None if self._kind is None else (self._kind.word, self._names)

    @property
    def is_final(self) -> bool:
        """Whether what a step is cannot change any more, or is for somebody else to say."""
        is_known = self._choice is not None or (self._kind is not None and self._kind >= StepKind.OPTIMIZER)
        return is_known or not self._counts

    @property
    def models(self) -> list[nn.Module]:
        return self._models.list()

    def keep_to_thread(self) -> None:
        """From now on only this thread's steps count: torch.profiler can be stopped only where it was started."""
        self._thread = threading.get_ident()

    @property
    def may_iterate(self) -> bool:
        """Whether the next steps may show that several of them are one iteration."""
        return self.finds_iterations and self.times == 1 and self._iterations.may_come(self._number)

    def note_inference(self) -> None:
        """The model was called in training mode without gradients: from this step on, an iteration may be the step."""
        if not self.finds_iterations or self._choice is not None or self._is_settled or self.times > 1:
            return
        if self._thread_of_step not in (None, threading.get_ident()):
            return  # another thread asks it at its own pace, which says nothing of the steps
        self._iterations.note(self._number)
        if self._iterations.length is not None:
            self.times = self._left = self._iterations.length
            self._number = 0

    def settle(self) -> None:
        """The recording begins: its steps, all of this thread, are numbered on, whatever appears."""
        self._is_settled = True
        self.keep_to_thread()

    def begin_whole(self) -> int | None:
        return self._due(StepKind.WHOLE, is_boundary=True)

    def call_begins(self, module: nn.Module) -> int | None:
        self._inside.depth += 1
        if is_loss_module(module) or self._inside.depth > 1:
            return self._due(StepKind.CALL, is_boundary=False)
        model = unwrap(module)
        if model not in self._called:
            self._called.add(model)
            self._models.of(model)
            self._variables.of_model(model)
        return self._begins(_kind_of_call(model), model)

    def call_ends(self, module: nn.Module) -> int | None:
        self._inside.leave()
        if self._inside.depth:
            return None
        if is_loss_module(module):
            return None
        model = unwrap(module)
        return self._ends(_kind_of_call(model), model, *self._names_known(model))

    def function_begins(self, name: str) -> int | None:
        """A function that is decorated with ``annotate(name)`` is about to be called, within no other and no module."""
        if self._inside.depth:
            return None
        return self._begins(StepKind.FUNCTION, self._functions.setdefault(name, _Function(name)))

    def function_ends(self, name: str) -> int | None:
        if self._inside.depth or name not in self._functions:
            return None
        return self._ends(StepKind.FUNCTION, self._functions[name], name)

    def generate_begins(self, model: nn.Module) -> int | None:
        self._inside.depth += 1
        if self._inside.depth > 1:
            return None
        self._variables.of_model(model)
        return self._begins(StepKind.GENERATE, model)

    def generate_ends(self, model: nn.Module) -> int | None:
        self._inside.leave()
        if self._inside.depth:
            return None
        return self._ends(StepKind.GENERATE, model, *self._names_known(model))

    def backward_begins(self) -> int | None:
        self._inside.depth += 1
        return self._due(StepKind.BACKWARD, is_boundary=False)

    def backward_ends(self) -> int | None:
        self._inside.leave()
        if self._is_postponed:
            self._is_postponed = False
            return self._due(StepKind.OPTIMIZER, is_boundary=True)
        if self._inside.depth:
            return None
        return self._ends(StepKind.BACKWARD)

    def optimizer_begins(self, optimizer: Optimizer) -> int | None:
        self._inside.depth += 1
        if optimizer not in self._called:
            self._called.add(optimizer)
            self._variables.of_optimizer(optimizer)
        return self._begins(StepKind.OPTIMIZER, optimizer)

    def optimizer_left(self) -> None:
        self._inside.leave()

    def optimizer_ends(self, optimizer: Optimizer) -> int | None:
        names = self._names_known(optimizer)
        if running_graph() == -1:
            return self._ends(StepKind.OPTIMIZER, optimizer, *names)
        # A step of the script ends with the backward pass that this runs in.
        self._count(StepKind.OPTIMIZER, names[0])
        self._is_postponed = self._is_postponed or self._is_last(StepKind.OPTIMIZER, optimizer, *names)
        return None

    def capture_begins(self, graph: Any) -> None:
        self._capturing = graph
        self._captured[graph] = StepKind.REPLAY
        self.has_captured = True

    def capture_ends(self) -> None:
        self._capturing = None

    def replay_begins(self, graph: Any) -> int | None:
        kind = self._replayed(graph)
        return None if kind is None else self._begins(kind, graph)

    def replay_ends(self, graph: Any) -> int | None:
        kind = self._replayed(graph)
        return None if kind is None else self._ends(kind, graph)

    def _replayed(self, graph: Any) -> StepKind | None:
        if self._inside.depth or running_graph() != -1:
            return None
        return self._captured.get(graph, StepKind.REPLAY)

    def _begins(self, kind: StepKind, thing: Any) -> int | None:
        if self._is_weaker(kind):
            return None
        self._rounds[kind].note(thing)
        return self._due(kind, is_boundary=False)

    def _ends(self, kind: StepKind, thing: Any = None, *names: str | None) -> int | None:
        self._count(kind, names[0] if names else None)
        if self._is_weaker(kind):
            return None
        return self._due(kind, is_boundary=self._is_last(kind, thing, *names))

    def _is_weaker(self, kind: StepKind) -> bool:
        return self._choice is None and self._kind is not None and kind < self._kind

    def _is_last(self, kind: StepKind, thing: Any, *names: str | None) -> bool:
        if self._choice is not None and self._choice.name is not None:
            return self._choice.allows(kind, names)
        return thing is None or self._rounds[kind].ends_with(thing)

    def _names_known(self, thing: Any) -> tuple[str, str | None]:
        """Return what a person may call it: its class, and its variable where somebody chose a name."""
        return type(thing).__name__, None if self._choice is None else self._variables.known(thing)

    def _count(self, kind: StepKind, name: str | None) -> None:
        if self._capturing is None:
            self.seen[kind.word if name is None else f"{kind.word}:{name}"] += 1
        elif kind in _IN_CAPTURES:
            self._captured[self._capturing] = max(self._captured[self._capturing], _IN_CAPTURES[kind])

    def _due(self, kind: StepKind, *, is_boundary: bool) -> int | None:
        if not self._counts or self._capturing is not None:
            return None
        if is_boundary and self._may_count(kind):
            is_other = kind is not self._kind and not (self._is_settled and self._number > 0)
            if is_other and self._kind is not None and self._choice is None:
                self.times, self._left, self._iterations = 1, 1, Iterations()
            self._thread_of_step = threading.get_ident()
            self._left -= 1
            if self._left:
                return None
            self._left = self.times
            if is_other:
                self._number = 0 if kind is StepKind.WHOLE else 1
            else:
                self._number += 1
            self._kind = kind
            named = kind, self._rounds[kind].changes
            if named != self._named:
                self._named, self._names = named, self._names_of(kind)
            return self._number
        if self._number < 0 and (self._choice is None or self._choice.word != StepKind.WHOLE.word):
            self._number = 0
            return 0
        return None

    def _names_of(self, kind: StepKind) -> tuple[str, ...]:
        if kind in (StepKind.REPLAY, StepKind.STEP_REPLAY):
            return ()
        members = self._rounds[kind].members()
        return tuple(
            thing.name
            if isinstance(thing, _Function)
            else tell_apart(thing, members, self._variables.known) or type(thing).__name__
            for thing in members
        )

    def _may_count(self, kind: StepKind) -> bool:
        is_on_thread = self._thread in (None, threading.get_ident())
        if self._choice is not None:
            return is_on_thread and kind.word == self._choice.word
        if self._kind is not None and kind < self._kind:
            return False
        if kind < StepKind.OPTIMIZER and has_optimizer():
            return False
        if self._kind is not None and kind is not self._kind and self._is_settled and self._number > 0:
            self.changed_to = kind.word
        return is_on_thread


_IN_CAPTURES = {StepKind.BACKWARD: StepKind.BACKWARD, StepKind.OPTIMIZER: StepKind.STEP_REPLAY}
"""What a replay counts as, by what was captured."""


class _Inside(threading.local):
    """How many calls, backward passes and optimizers' steps are open on this thread."""

    def __init__(self) -> None:
        self.depth = 0

    def leave(self) -> None:
        self.depth = max(0, self.depth - 1)


class _Function:
    """A decorated function, known by its range's name."""

    def __init__(self, name: str) -> None:
        self.name = name


def _kind_of_call(model: nn.Module) -> StepKind:
    # What has no parameters transforms data, or is a function: a model counts more.
    return StepKind.CALL if has_parameters(model) else StepKind.FUNCTION


def is_loss_module(module: nn.Module) -> bool:
    """Return whether a module computes a loss: one of torch's, or one without parameters that is called so."""
    kind: Any = type(module)
    return _is_torchs_loss(kind) or (_is_called_loss(kind) and not has_parameters(module))


@functools.lru_cache
def _is_torchs_loss(kind: type[nn.Module]) -> bool:
    return issubclass(kind, _Loss)


@functools.lru_cache
def _is_called_loss(kind: type[nn.Module]) -> bool:
    name = kind.__name__.lower()
    return "loss" in name or "criterion" in name


def is_in_training(module: nn.Module) -> bool:
    """Return whether a module is a model in training mode; what wraps it need not know the mode."""
    return has_parameters(module) and unwrap(module).training


def has_parameters(module: nn.Module) -> bool:
    if module in _with_parameters:
        return True
    has_some = next(module.parameters(), None) is not None
    if has_some:
        _with_parameters.add(module)
    return has_some


_with_parameters: WeakSet[nn.Module] = WeakSet()
"""Modules that have parameters: they are asked for several times a step, and looking for one takes long."""


def has_optimizer() -> bool:
    """Return whether an optimizer has been made: torch marks the step of its class then."""
    return any(getattr(kind.step, "hooked", False) for kind in optimizer_classes())


_MOST_IN_TURN = 16
"""Longer blocks that take turns, as the epochs of two models do, are rounds of their own."""


class Round:
    """Learns from what happens which things belong to one round; it holds none of them alive.

    The first round ends where one of its things is about to happen again. What happens once between two rounds belongs
    to none; what happens twice there, without any of the round's things in between, takes the round's place, as the
    optimizers of a new epoch do. Where the earlier things soon take the place back, as a critic's optimizer does that
    steps twice after each two steps of an actor's, both make one round, which ends where the earlier ones begin again.
    """

    def __init__(self) -> None:
        self.changes = 0
        """How often what belongs to a round may have changed."""
        self._members: list[ref[Any]] = []
        self._others: list[ref[Any]] = []
        self._is_learned = False
        self._count, self._count_before = 0, 0
        """How often things have happened since the members took their place, and in the place of those before them."""
        self._before: list[ref[Any]] = []
        self._firsts: list[ref[Any]] = []
        """Of a round of things that are repeated in turn, those that begin it: the first ends the round before."""
        self._is_in_firsts = self._has_come_back = False

    def note(self, thing: Any) -> None:
        self._count += 1
        if self._firsts:
            self._firsts = _alive(self._firsts)
        if self._firsts:
            was_in_firsts, self._is_in_firsts = self._is_in_firsts, _index(self._firsts, thing) is not None
            self._has_come_back = self._is_in_firsts and not was_in_firsts
            return
        if self._is_learned and not self._others and len(self._members) == 1 and self._members[0]() is thing:
            return
        self.changes += 1
        self._members, self._others = _alive(self._members), _alive(self._others)
        at = _index(self._others, thing)
        if at is not None:
            self._replace(self._others[at:])
        elif not self._members:
            self._members, self._others, self._is_learned = [ref(thing)], [ref(thing)], False
        elif _index(self._members, thing) is None:
            self._others.append(ref(thing))
        elif self._is_learned:
            self._others = []

    def _replace(self, members: list[ref[Any]]) -> None:
        self._others, self._is_learned = [], True
        if members[0] in self._members:
            self._members = members
            return
        if members[0] in self._before and self._count_before + self._count <= _MOST_IN_TURN:
            self._firsts, self._is_in_firsts, self._has_come_back = members, True, False
            self._members = members + self._members
            return
        self._before, self._members = self._members, members
        self._count_before, self._count = self._count, 0

    def ends_with(self, thing: Any) -> bool:
        """Return whether ``thing`` is the last of a round; of the first round, the first that happened is."""
        if self._firsts:
            return self._has_come_back
        return bool(self._members) and self._members[-1]() is thing

    def happening(self) -> list[Any]:
        others = [thing for other in self._others if (thing := other()) is not None]
        members = self.members()
        return members + [thing for thing in others if all(thing is not member for member in members)]

    def members(self) -> list[Any]:
        return [thing for member in self._members if (thing := member()) is not None]


def _alive(refs: list[ref[Any]]) -> list[ref[Any]]:
    return [thing for thing in refs if thing() is not None]


def _index(refs: list[ref[Any]], thing: Any) -> int | None:
    return next((at for at, member in enumerate(refs) if member() is thing), None)


MOST_IN_ITERATION = 16
"""Longer iterations are not looked for: three of them would take too many steps to see."""
MANY_CALLS = 8
"""A rollout calls the model so often, or more; what tries a model out does so once or twice."""


class Iterations:
    """Learns how many steps an iteration has from those in which the model is asked, as for a rollout."""

    def __init__(self) -> None:
        self._begun: list[int] = []
        self._calls = 0
        """How often the model was asked in the last of these steps."""

    def note(self, step: int) -> None:
        if not self._begun or self._begun[-1] != step:
            self._begun.append(step)
            self._calls = 0
        self._calls += 1

    @property
    def length(self) -> int | None:
        """The distance of the last three, if it is one and an iteration's; else None."""
        first, second = self._distance(-3, -2), self._distance(-2, -1)
        return second if first == second and 1 < second <= MOST_IN_ITERATION else None

    def may_come(self, step: int) -> bool:
        """Return whether, as seen when ``step`` begins, it or the next ones may show the length.

        One rollout says that another may come, if it is long.
        """
        if len(self._begun) == 1:
            return self._calls >= MANY_CALLS and step <= self._begun[0] + MOST_IN_ITERATION
        distance = self._distance(-2, -1)
        is_long = 1 < distance <= MOST_IN_ITERATION and step <= 2 * MOST_IN_ITERATION
        return is_long and self.length is None and step <= self._begun[-1] + distance

    def _distance(self, one: int, other: int) -> int:
        return self._begun[other] - self._begun[one] if len(self._begun) >= -one else 0


class Boundaries:
    """Calls ``make(number)`` where step ``number`` begins: once it is due and the step's own ranges have closed.

    A script may open a range around a step, or around the optimizer's part of it. Those that were open at the last
    boundary already, as one around the whole loop, hold several steps.

    Args:
        make: ends the step that runs and begins this one.
        depth: returns how many of the script's ranges are open on the thread that asks.
    """

    def __init__(self, make: Callable[[int], None], depth: Callable[[], int]) -> None:
        self._make_boundary = make
        self._depth = depth
        self._thread = 0
        self._waiting: int | None = None
        self._last_due = -1
        self._lost = 0
        self._base = 0

    def due(self, number: int) -> None:
        """Step ``number`` begins as soon as it can; if the one before it could not yet, the two are one step."""
        if number <= self._last_due:  # counting has begun anew
            self._waiting, self._lost = None, 0
        self._last_due = number
        self._thread = threading.get_ident()
        if self._waiting is not None:
            # The ranges that it waited for hold several steps.
            self._lost += 1
            self._make(number - self._lost)
        elif number == 0 or self._depth() <= self._base:
            self._make(number - self._lost)
        else:
            self._waiting = number - self._lost

    def work_begins(self) -> None:
        """Work such as a call or a backward pass begins: if the first step has ended, this is the second one's."""
        if self._waiting == 1:
            self._make(1)

    def range_closed(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._waiting is not None and self._depth() <= self._base:
            self._make(self._waiting)
        # Where a boundary was made here, a range around the step that begins may have opened with it.
        self._base = min(self._base, self._depth())

    def _make(self, number: int) -> None:
        self._waiting = None
        self._make_boundary(number)
        # What was open when the first step began may be the step's own: nobody can tell yet.
        self._base = 0 if number == 0 else self._depth()


_OWN_STEP = re.compile(rf"{WARMUP}|{STEP} \d+")
_CONTEXT = re.compile(rf"{CONTEXT} (\d+)")


class OwnStepListener(Protocol):
    """Counts the steps that the target's own ranges show."""

    context: int | None

    @property
    def is_in_last_step(self) -> bool: ...

    def own_begin(self) -> None: ...

    def own_boundary(self) -> None: ...

    def begin_counting(self) -> None: ...

    def end_counting(self) -> None: ...


class OwnSteps(RangeObserver):
    """Takes the target's own ranges ``warmup``, ``step N``, ``context N`` and ``counted step`` on the thread that
    attached as what they are called.
    """

    def __init__(self, listener: OwnStepListener) -> None:
        self._listener = listener
        self._thread = threading.get_ident()
        self._open: list[str] = []

    def opening(self, name: str) -> None:
        if threading.get_ident() != self._thread:
            return
        self._listener.own_begin()
        self._open.append(name)
        context = _CONTEXT.fullmatch(name)
        if context:
            self._listener.context = int(context[1])
        if name == COUNTED:
            self._listener.begin_counting()

    def closed(self) -> None:
        if threading.get_ident() != self._thread or not self._open:
            return
        name = self._open.pop()
        if name == COUNTED:
            self._listener.end_counting()
        elif _CONTEXT.fullmatch(name) and self._listener.is_in_last_step:
            self._listener.own_boundary()
        elif _OWN_STEP.fullmatch(name):
            # The recording ends with the last step, but not before the range around it.
            is_enclosed = any(map(_CONTEXT.fullmatch, self._open))
            if not (is_enclosed and self._listener.is_in_last_step):
                self._listener.own_boundary()
