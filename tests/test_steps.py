"""What a step is, for scripts of every style, and where it begins among ranges of the script's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from profkit.capture.steps.boundaries import Boundaries

pytest.importorskip("torch")

import torch
from torch import nn

from profkit.capture.steps import policy as steps_module
from profkit.capture.steps import variable_names
from profkit.capture.steps.policy import StepPolicy


class Script:
    """Does what scripts do, and keeps the numbers of the steps that the policy makes of it."""

    def __init__(self, step_on: str | None = None) -> None:
        self.policy = StepPolicy(step_on)
        self.made: list[int] = []
        self.has_optimizer = False

    def _note(self, number: int | None) -> None:
        if number is not None:
            self.made.append(number)

    def call(self, *modules: nn.Module) -> None:
        for module in modules:
            self._note(self.policy.call_begins(module))
            self._note(self.policy.call_ends(module))

    def function(self, name: str) -> None:
        self._note(self.policy.function_begins(name))
        self._note(self.policy.function_ends(name))

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[None]:
        self._note(self.policy.generate_begins(model))
        yield
        self._note(self.policy.generate_ends(model))

    def backward(self) -> None:
        self._note(self.policy.backward_begins())
        self._note(self.policy.backward_ends())

    def optimize(self, *optimizers: torch.optim.Optimizer) -> None:
        for one in optimizers:
            self._note(self.policy.optimizer_begins(one))
            self.policy.optimizer_left()
            self._note(self.policy.optimizer_ends(one))

    @contextmanager
    def capturing(self, graph: object) -> Iterator[None]:
        self.policy.capture_begins(graph)
        yield
        self.policy.capture_ends()

    def replay(self, *graphs: object) -> None:
        for graph in graphs:
            self._note(self.policy.replay_begins(graph))
            self._note(self.policy.replay_ends(graph))

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
        for _ in range(times):
            self.call(model)
            self.backward()
            self.optimize(optimizer)


class Graph:
    """Stands for a ``torch.cuda.CUDAGraph``."""


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """A script that has made no optimizer so far, whatever other tests have."""
    script = Script()
    monkeypatch.setattr(steps_module, "has_optimizer", lambda: script.has_optimizer)
    monkeypatch.setattr(variable_names, "_name_of_called", lambda: None)
    return script


def _optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    return kind(nn.Linear(1, 1).parameters(), lr=0.1)  # type: ignore[call-arg]


def test_a_step_ends_with_the_optimizers(script: Script) -> None:
    script.has_optimizer = True
    script.train(nn.Linear(1, 1), _optimizer(), times=3)
    assert script.made == [0, 1, 2, 3]
    assert script.policy.what_counts() == ("optimizer", ("SGD",))


def test_calls_are_counted_on_where_the_optimizer_ends_the_steps(script: Script) -> None:
    script.has_optimizer = True
    model, optimizer = nn.Linear(1, 1), _optimizer()
    script.train(model, optimizer, times=3)
    script.call(nn.MSELoss(), nn.MSELoss(), nn.ReLU())
    del model
    script.train(nn.Linear(1, 1), optimizer, times=3)
    with script.capturing(Graph()):
        script.call(nn.ReLU())
    assert dict(script.policy.seen) == {"call:Linear": 6, "call:ReLU": 1, "backward": 6, "optimizer:SGD": 6}
    assert script.made == list(range(7))


def test_accumulated_gradients_are_one_step(script: Script) -> None:
    script.has_optimizer = True
    model, optimizer = nn.Linear(1, 1), _optimizer()
    for _ in range(2):
        for _ in range(4):
            script.call(model)
            script.backward()
        script.optimize(optimizer)
    assert script.made == [0, 1, 2]


def test_without_an_optimizer_a_step_ends_with_the_backward_pass(script: Script) -> None:
    for _ in range(3):
        script.backward()
    assert script.made == [0, 1, 2, 3]
    assert script.policy.what_counts() == ("backward", ())


def test_a_backward_pass_within_a_module_ends_no_step(script: Script) -> None:
    model = nn.Linear(1, 1)
    for _ in range(3):
        script._note(script.policy.call_begins(model))
        script.backward()
        script._note(script.policy.call_ends(model))
    assert script.made == [0, 1, 2, 3]
    assert script.policy.what_counts() == ("call", ("Linear",))


def test_models_that_take_turns_make_one_step(script: Script) -> None:
    encoder, decoder = nn.Linear(1, 1), nn.Bilinear(1, 1, 1)
    for _ in range(3):
        script.call(encoder, decoder)
    assert script.made == [0, 1, 2, 3]
    assert script.policy.what_counts() == ("call", ("Linear", "Bilinear"))


def test_a_module_that_is_called_once_is_no_part_of_a_step(script: Script) -> None:
    encoder, decoder = nn.Linear(1, 1), nn.Linear(1, 1)
    script.call(encoder, decoder, decoder, decoder)
    assert script.made == [0, 1, 2, 3]


def test_modules_without_parameters_begin_no_step_where_there_is_a_model(script: Script) -> None:
    transform, model = nn.Identity(), nn.Linear(1, 1)
    for _ in range(3):
        script.call(transform, transform, model)
    assert script.policy.what_counts() == ("call", ("Linear",))
    assert script.made[-3:] == [1, 2, 3]


def test_decorated_functions_are_steps_where_no_module_is_called(script: Script) -> None:
    for _ in range(3):
        script.function("load")
        script.function("solve")
    assert script.made == [0, 1, 2, 3]
    assert script.policy.what_counts() == ("call", ("load", "solve"))


def test_generate_is_a_step_and_the_calls_in_it_are_none(script: Script) -> None:
    model = nn.Linear(1, 1)
    for _ in range(3):
        with script.generating(model):
            script.call(model, model)
    assert script.made == [0, 1, 2, 3]
    assert script.policy.what_counts() == ("generate", ("Linear",))


def test_two_optimizers_end_one_step(script: Script) -> None:
    script.has_optimizer = True
    model, muon, adam = nn.Linear(1, 1), _optimizer(), _optimizer(torch.optim.AdamW)
    for _ in range(4):
        script.call(model)
        script.backward()
        script.optimize(muon, adam)
    assert script.made == [0, 1, 2, 3, 4]
    assert script.policy.what_counts() == ("optimizer", ("SGD", "AdamW"))


def test_after_the_first_round_a_step_ends_with_the_last_optimizer(script: Script) -> None:
    first, second = _optimizer(), _optimizer()
    ends = []
    for _ in range(3):
        for one in (first, second):
            before = len(script.made)
            script.optimize(one)
            ends.append(len(script.made) > before)
    assert ends == [True, False, False, True, False, True]


def test_a_second_optimizer_that_steps_now_and_then_does_not_end_the_step(script: Script) -> None:
    often, seldom = _optimizer(), _optimizer()
    for number in range(6):
        script.optimize(often)
        if number % 3 == 2:
            script.optimize(seldom)
    assert script.made == [0, 1, 2, 3, 4, 5, 6]


def test_an_epochs_new_optimizers_take_the_place_of_the_old_ones(script: Script) -> None:
    kept = []
    for _ in range(2):
        first, second = _optimizer(), _optimizer()
        kept += [first, second]
        for _ in range(3):
            script.optimize(first, second)
    assert script.made == [0, 1, 2, 3, 4, 5]
    del first, second
    kept.clear()
    script.optimize(*[_optimizer()] * 2)
    assert script.made[-2:] == [6, 7], "the old ones are gone: the first new one counts at once"


def test_optimizers_that_step_in_a_backward_pass_end_the_step_with_it(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizers = [_optimizer() for _ in range(3)]
    for number in range(3):
        script._note(script.policy.backward_begins())
        monkeypatch.setattr(steps_module, "running_graph", lambda number=number: number)
        script.optimize(*optimizers)
        assert script.made == [*range(number + 1)], "the backward pass still runs"
        monkeypatch.setattr(steps_module, "running_graph", lambda: -1)
        script._note(script.policy.backward_ends())
    assert script.made == [0, 1, 2, 3]


def test_counting_begins_anew_when_an_evaluated_model_is_trained(script: Script) -> None:
    model = nn.Linear(1, 1)
    script.call(model, model, model)
    assert script.made == [0, 1, 2, 3]
    script.has_optimizer = True
    script.train(model, _optimizer(), times=3)
    assert script.made[4:] == [1, 2, 3]


def test_a_recording_that_has_begun_goes_on_and_says_that_steps_changed(script: Script) -> None:
    model = nn.Linear(1, 1)
    script.call(model, model, model)
    script.policy.settle()
    script.has_optimizer = True
    script.train(model, _optimizer(), times=2)
    assert script.made == [0, 1, 2, 3, 4, 5]
    assert script.policy.changed_to == "optimizer"


def test_without_any_warmup_the_first_step_still_ends_with_the_optimizers(script: Script) -> None:
    script.policy.settle()
    script.has_optimizer = True
    script.train(nn.Linear(1, 1), _optimizer(), times=2)
    assert script.made == [0, 1, 2]
    assert script.policy.changed_to is None


def test_a_validation_between_steps_is_none(script: Script) -> None:
    script.has_optimizer = True
    model, optimizer = nn.Linear(1, 1), _optimizer()
    script.train(model, optimizer, times=2)
    script.call(model, model, model)
    script.train(model, optimizer)
    assert script.made == [0, 1, 2, 3]


def test_a_captured_step_gives_one_step_per_replay(script: Script) -> None:
    script.has_optimizer = True
    model, optimizer, graph = nn.Linear(1, 1), _optimizer(), Graph()
    script.train(model, optimizer, times=3)
    made = len(script.made)
    with script.capturing(graph):
        script.train(model, optimizer)
    assert len(script.made) == made, "what is captured does not run"
    for _ in range(3):
        script.replay(graph)
    assert script.made[made:] == [1, 2, 3], "counting begins anew: a replay is not a step by single calls"
    assert script.policy.what_counts() == ("replay", ())


def test_captured_gradients_leave_the_step_to_the_optimizer(script: Script) -> None:
    script.has_optimizer = True
    model, optimizer, graph = nn.Linear(1, 1), _optimizer(), Graph()
    with script.capturing(graph):
        script.call(model)
        script.backward()
    for _ in range(2):
        script.replay(graph, graph)
        script.optimize(optimizer)
    assert script.made == [0, 1, 2]


def test_replays_that_take_turns_are_one_step_and_one_within_a_call_is_none(script: Script) -> None:
    first, second, inner, model = Graph(), Graph(), Graph(), nn.Linear(1, 1)
    for _ in range(3):
        script.replay(first)
        script._note(script.policy.call_begins(model))
        script.replay(inner)
        script._note(script.policy.call_ends(model))
        script.replay(second)
    assert script.made == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("step_on", "made"),
    [
        ("backward", [0, 1, 2, 3, 4]),
        ("optimizer:AdamW", [0, 1, 2]),
        ("AdamW", [0, 1, 2]),
        ("call:Bilinear", [0, 1, 2]),
        ("optimizer", [0, 1, 2]),
        ("replay", [0]),
    ],
)
def test_a_person_may_say_what_a_step_is(step_on: str, made: list[int], script: Script) -> None:
    chosen = Script(step_on)
    own = _optimizer(torch.optim.AdamW)
    other, first, second = _optimizer(), nn.Linear(1, 1), nn.Bilinear(1, 1, 1)
    for _ in range(2):
        chosen.call(first, second)
        chosen.backward()
        chosen.optimize(other)
        chosen.backward()
        chosen._note(chosen.policy.optimizer_begins(own))
        own.step()
        chosen.policy.optimizer_left()
        chosen._note(chosen.policy.optimizer_ends(own))
    assert chosen.made == made


def test_nothing_counts_where_somebody_else_knows_the_steps() -> None:
    script = Script()
    script.policy = StepPolicy(counts=False)
    script.train(nn.Linear(1, 1), _optimizer(), times=2)
    assert script.made == []


def test_code_that_a_compiler_made_and_calls_is_no_model(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.fx.symbolic_trace(nn.Linear(1, 1))
    assert script.policy.is_compilers(made), "no line of the script calls it"
    monkeypatch.setattr(variable_names, "_name_of_called", lambda: "exported")
    own = torch.fx.symbolic_trace(nn.Linear(1, 1))
    assert not script.policy.is_compilers(own)
    assert not script.policy.is_compilers(nn.Linear(1, 1))


class Loop:
    """A script's ranges as a number, and the steps that begin, each with how many ranges are open there."""

    def __init__(self) -> None:
        self.depth = 0
        self.begun: list[tuple[int, int]] = []
        self.with_range: int | None = None
        """The number of the step that a range opens with, and closes with."""
        self.boundaries = Boundaries(self._begin, lambda: self.depth)

    def _begin(self, number: int) -> None:
        if self.with_range is not None and number == self.with_range + 1:
            self.close()
        self.begun.append((number, self.depth))
        if number == self.with_range:
            self.open()

    def open(self) -> None:
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.boundaries.range_closed()

    def work(self) -> None:
        self.boundaries.work_begins()


@pytest.fixture
def loop() -> Loop:
    return Loop()


def _train(loop: Loop, first: int, last: int, *, ranges: int = 0) -> None:
    for number in range(first, last):
        for _ in range(ranges):
            loop.open()
        loop.work()
        if number == 0:
            loop.boundaries.due(0)
        loop.boundaries.due(number + 1)
        for _ in range(ranges):
            loop.close()


def test_without_ranges_a_step_begins_where_it_is_due(loop: Loop) -> None:
    _train(loop, 0, 3)
    assert loop.begun == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("ranges", [1, 2])
def test_a_step_begins_after_the_ranges_around_the_one_before_it(ranges: int, loop: Loop) -> None:
    _train(loop, 0, 3, ranges=ranges)
    assert loop.begun == [(0, ranges), (1, 0), (2, 0), (3, 0)]


def test_a_range_that_opens_with_a_step_and_closes_with_it_holds_that_step_alone(loop: Loop) -> None:
    """As the range around the step whose work is counted, which the recording opens and closes at its boundaries."""
    loop.with_range = 1
    _train(loop, 0, 3, ranges=1)
    assert loop.begun == [(0, 1), (1, 0), (2, 0), (3, 0)]


def test_a_range_around_the_whole_loop_holds_all_steps(loop: Loop) -> None:
    loop.open()
    _train(loop, 0, 3)
    loop.work()
    assert loop.begun == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_range_around_an_epoch_costs_one_boundary_and_no_more(loop: Loop) -> None:
    _train(loop, 0, 2)
    loop.open()
    _train(loop, 2, 5)
    assert loop.begun == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)], "its first two steps are one"


def test_counting_anew_forgets_what_waited(loop: Loop) -> None:
    loop.boundaries.due(0)
    loop.open()
    loop.boundaries.due(1)
    loop.boundaries.due(1)
    loop.close()
    assert loop.begun == [(0, 0), (1, 0)]
