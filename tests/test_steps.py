"""What a step is, for scripts of every style, and where it begins among ranges of the script's own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from profkit.capture.steps import policy as steps_module
from profkit.capture.steps import variable_names
from profkit.capture.steps.policy import MANY_CALLS, MOST_IN_ITERATION, Boundaries, StepPolicy, is_in_training
from profkit.run.recording import StepChoice, describe_step


class Graph:
    """Stands for a ``torch.cuda.CUDAGraph``."""


class Script:
    """Does what scripts do, and keeps the numbers of the steps that the policy makes of it."""

    def __init__(self, policy: StepPolicy) -> None:
        self.policy = policy
        self.made: list[int] = []
        self.has_optimizer = False
        self._things: dict[str, Any] = {}

    def play(self, program: str, times: int = 1) -> None:
        """Do what each word says, ``WHAT:NAME``; what stands between ``WHAT:NAME<`` and ``>WHAT:NAME`` is within it."""
        for word in program.split() * times:
            what, _, name = word.strip("<>").partition(":")
            given = [name] if what == "function" else [self.thing(name)] if name else []
            if not word.startswith(">"):
                self._note(getattr(self.policy, f"{what}_begins")(*given))
            if what == "optimizer":
                self.policy.optimizer_left()
            if not word.endswith("<"):
                self._note(getattr(self.policy, f"{what}_ends")(*given[: what != "capture"]))

    def roll_out(self, calls: int = 2) -> None:
        """Ask the model in training mode without gradients."""
        for _ in range(calls):
            self.play("call:Linear<")
            self.policy.note_inference()
            self.play(">call:Linear")

    def _note(self, number: int | None) -> None:
        if number is not None:
            self.made.append(number)

    def thing(self, name: str) -> Any:
        """Return the model, optimizer or graph of this name, which begins with its class."""
        kind = name.partition(".")[0]
        if name not in self._things:
            if kind == "Graph":
                self._things[name] = Graph()
            elif hasattr(nn, kind):
                self._things[name] = getattr(nn, kind)(*{"Linear": (1, 1), "Bilinear": (1, 1, 1)}.get(kind, ()))
            else:
                self._things[name] = getattr(torch.optim, kind)(nn.Linear(1, 1).parameters(), lr=0.1)
        return self._things[name]

    def forget(self, *names: str) -> None:
        """Let things go, as a script does that makes others in their place."""
        for name in names:
            del self._things[name]


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """A script that has made no optimizer so far, whatever other tests have."""
    script = Script(StepPolicy(None))
    monkeypatch.setattr(steps_module, "has_optimizer", lambda: script.has_optimizer)
    monkeypatch.setattr(variable_names, "_name_of_called", lambda: None)
    return script


TRAIN = "call:Linear backward optimizer:SGD"
REPLAYED = "replay:Graph replay:Graph optimizer:SGD"


@pytest.mark.parametrize(
    ("program", "times", "made", "counts"),
    [
        (TRAIN, 3, 3, ("optimizer", ("SGD",))),
        ("call:Linear backward call:Linear backward call:Linear backward optimizer:SGD", 2, 2, ("optimizer", ("SGD",))),
        # Two optimizers end one step, the second one also if it makes a step now and then.
        ("call:Linear backward optimizer:SGD optimizer:AdamW", 4, 4, ("optimizer", ("SGD", "AdamW"))),
        ("optimizer:SGD optimizer:SGD optimizer:SGD optimizer:SGD.seldom", 2, 6, ("optimizer", ("SGD",))),
        # A validation between steps is none.
        (f"{TRAIN} {TRAIN} call:Linear call:Linear call:Linear {TRAIN}", 1, 3, ("optimizer", ("SGD",))),
        # Captured gradients leave the step to the optimizer.
        (f"capture:Graph< call:Linear backward >capture:Graph {REPLAYED} {REPLAYED}", 1, 2, ("optimizer", ("SGD",))),
        # Without an optimizer a step ends with the backward pass, but with none within a module.
        ("backward", 3, 3, ("backward", ())),
        ("call:Linear< backward >call:Linear", 3, 3, ("call", ("Linear",))),
        # Models that take turns make one step; one that is called once is no part of any.
        ("call:Linear call:Bilinear", 3, 3, ("call", ("Linear", "Bilinear"))),
        ("call:Bilinear call:Linear call:Linear call:Linear", 1, 3, ("call", ("Linear",))),
        ("function:load function:solve", 3, 3, ("call", ("load", "solve"))),
        ("generate:Linear< call:Linear call:Linear >generate:Linear", 3, 3, ("generate", ("Linear",))),
        # Replays that take turns are one step, and one within a call is none.
        ("replay:Graph call:Linear< replay:Graph.inner >call:Linear replay:Graph.other", 3, 3, None),
    ],
)
def test_what_counts_as_a_step(script: Script, program: str, times: int, made: int, counts: object) -> None:
    script.has_optimizer = "optimizer" in program
    script.play(program, times)
    assert script.made == list(range(made + 1))
    assert counts is None or script.policy.what_counts() == counts


def test_calls_are_counted_on_where_the_optimizer_ends_the_steps(script: Script) -> None:
    script.has_optimizer = True
    script.play(TRAIN, 3)
    script.play("call:MSELoss call:MSELoss.other call:ReLU")
    script.forget("Linear")
    script.play(TRAIN, 3)
    script.play("capture:Graph< call:ReLU >capture:Graph")
    assert dict(script.policy.seen) == {"call:Linear": 6, "call:ReLU": 1, "backward": 6, "optimizer:SGD": 6}
    assert script.made == list(range(7))


def test_modules_without_parameters_begin_no_step_where_there_is_a_model(script: Script) -> None:
    script.play("call:Identity call:Identity call:Linear", 3)
    assert script.policy.what_counts() == ("call", ("Linear",))
    assert script.made[-3:] == [1, 2, 3]


def test_after_the_first_round_a_step_ends_with_the_last_optimizer(script: Script) -> None:
    ends = []
    for optimizer in ("SGD", "SGD.second") * 3:
        before = len(script.made)
        script.play(f"optimizer:{optimizer}")
        ends.append(len(script.made) > before)
    assert ends == [True, False, False, True, False, True]


def test_an_epochs_new_optimizers_take_the_place_of_the_old_ones(script: Script) -> None:
    for epoch in range(2):
        script.play(f"optimizer:SGD.{epoch} optimizer:AdamW.{epoch}", 3)
    assert script.made == [0, 1, 2, 3, 4, 5]
    script.forget("SGD.0", "AdamW.0", "SGD.1", "AdamW.1")
    script.play("optimizer:SGD optimizer:SGD")
    assert script.made[-2:] == [6, 7], "the old ones are gone: the first new one counts at once"


def test_optimizers_that_are_repeated_in_turn_make_one_step(script: Script) -> None:
    critic, actor = "optimizer:SGD", "optimizer:Adam optimizer:AdamW"
    script.play(f"{critic} {critic} {actor} {actor}", 3)
    assert script.policy.what_counts() == ("optimizer", ("SGD", "Adam", "AdamW"))
    learned = len(script.made)
    for _ in range(3):
        script.play(critic)
        learned += 1
        assert len(script.made) == learned, "the critic's first step ends what began with its last one"
        script.play(f"{critic} {actor} {actor}")
        assert len(script.made) == learned
    script.forget("SGD", "Adam", "AdamW")
    script.play("optimizer:RMSprop optimizer:RMSprop optimizer:RMSprop")
    assert len(script.made) == learned + 3


def test_epochs_of_optimizers_that_take_turns_have_steps_of_their_own(script: Script) -> None:
    script.play(f"{'optimizer:SGD ' * 20} {'optimizer:Adam ' * 20}", 2)
    assert len(script.made) == 80 - 3 + 1, "what takes another's place is known by its second step"


def test_optimizers_that_step_in_a_backward_pass_end_the_step_with_it(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        monkeypatch.setattr(steps_module, "running_graph", lambda: -1)
        script.play("backward<")
        monkeypatch.setattr(steps_module, "running_graph", lambda number=number: number)
        script.play("optimizer:SGD optimizer:SGD.second optimizer:SGD.third")
        assert script.made == [*range(number + 1)], "the backward pass still runs"
        monkeypatch.setattr(steps_module, "running_graph", lambda: -1)
        script.play(">backward")
    assert script.made == [0, 1, 2, 3]


def test_counting_begins_anew_when_an_evaluated_model_is_trained(script: Script) -> None:
    script.play("call:Linear", 3)
    assert script.made == [0, 1, 2, 3]
    script.has_optimizer = True
    script.play(TRAIN, 3)
    assert script.made[4:] == [1, 2, 3]


@pytest.mark.parametrize(
    ("before", "made", "changed_to"), [("call:Linear " * 3, [0, 1, 2, 3, 4, 5], "optimizer"), ("", [0, 1, 2], None)]
)
def test_a_recording_that_has_begun_goes_on_and_says_that_steps_changed(
    script: Script, before: str, made: list[int], changed_to: str | None
) -> None:
    script.play(before)
    script.policy.settle()
    script.has_optimizer = True
    script.play(TRAIN, 2)
    assert script.made == made
    assert script.policy.changed_to == changed_to


def test_a_captured_step_gives_one_step_per_replay(script: Script) -> None:
    script.has_optimizer = True
    script.play(TRAIN, 3)
    made = len(script.made)
    script.play(f"capture:Graph< {TRAIN} >capture:Graph")
    assert len(script.made) == made, "what is captured does not run"
    script.play("replay:Graph", 3)
    assert script.made[made:] == [1, 2, 3], "counting begins anew: a replay is not a step by single calls"
    assert script.policy.what_counts() == ("replay", ())


@pytest.mark.parametrize(
    ("policy", "made"),
    [
        *((StepPolicy(step_on), [0, 1, 2]) for step_on in ("optimizer:AdamW", "AdamW", "call:Bilinear", "optimizer")),
        (StepPolicy("backward"), [0, 1, 2, 3, 4]),
        (StepPolicy("replay"), [0]),
        (StepPolicy(counts=False), []),  # somebody else knows the steps
    ],
)
def test_a_person_may_say_what_a_step_is(policy: StepPolicy, made: list[int]) -> None:
    chosen = Script(policy)
    chosen.play("call:Linear call:Bilinear backward optimizer:SGD backward optimizer:AdamW", 2)
    assert chosen.made == made


def test_code_that_a_compiler_made_and_calls_is_no_model(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.fx.symbolic_trace(nn.Linear(1, 1))
    assert script.policy.is_compilers(made), "no line of the script calls it"
    monkeypatch.setattr(variable_names, "_name_of_called", lambda: "exported")
    own = torch.fx.symbolic_trace(nn.Linear(1, 1))
    assert not script.policy.is_compilers(own)
    assert not script.policy.is_compilers(nn.Linear(1, 1))


@pytest.fixture
def trained(script: Script) -> Script:
    """A script with an optimizer, of which iterations are looked for."""
    script.has_optimizer = script.policy.finds_iterations = True
    return script


def _iterate(script: Script, *lengths: int, program: str = TRAIN) -> list[int]:
    """Play an iteration of each length, which begins with a rollout, and return the numbers of the steps."""
    before = len(script.made)
    for length in lengths:
        script.roll_out()
        script.play(program, length)
    return script.made[before:]


@pytest.mark.parametrize("length", [2, 4, MOST_IN_ITERATION])
def test_an_iteration_is_the_step_from_the_third_rollout_on(trained: Script, length: int) -> None:
    assert _iterate(trained, length, length) == list(range(2 * length + 1))
    assert (trained.policy.times, trained.policy.may_iterate) == (1, True)
    assert _iterate(trained, length - 1) == [], "the iteration that began with the rollout is not over"
    trained.play(TRAIN)
    assert trained.made.pop() == 1, "counting begins anew"
    assert (trained.policy.times, trained.policy.may_iterate) == (length, False)
    # An iteration that is found stays one, whatever it holds.
    assert _iterate(trained, length - 1, length + 1, *[2 * length] * 4) == list(range(2, 12))
    assert trained.policy.times == length


@pytest.mark.parametrize(
    "lengths",
    [
        (1,) * 20,  # each step asks, as one does of a teacher
        (MOST_IN_ITERATION + 1,) * 4,
        (4, 3, 4, 5),
        (5,),  # evaluated twice
    ],
)
def test_rollouts_in_each_step_or_now_and_then_make_no_iteration(trained: Script, lengths: tuple[int, ...]) -> None:
    assert _iterate(trained, *lengths, 20) == list(range(sum(lengths) + 21))
    assert trained.policy.times == 1


def test_an_iteration_may_come_until_the_next_rollout_is_missed(trained: Script) -> None:
    _iterate(trained, 4)
    assert not trained.policy.may_iterate, "one rollout shows no length"
    _iterate(trained, 4)
    assert trained.policy.may_iterate
    trained.play(TRAIN)
    assert not trained.policy.may_iterate


@pytest.mark.parametrize("calls", [MANY_CALLS - 1, MANY_CALLS])
def test_after_one_long_rollout_another_may_come(trained: Script, calls: int) -> None:
    trained.play(TRAIN)
    trained.roll_out(calls)
    trained.play(TRAIN, MOST_IN_ITERATION)
    assert trained.policy.may_iterate == (calls == MANY_CALLS)
    trained.play(TRAIN)
    assert not trained.policy.may_iterate


def test_nobody_waits_for_late_iterations(trained: Script) -> None:
    _iterate(trained, 23, 6, 3)
    assert trained.policy.may_iterate
    trained.play(TRAIN)
    assert not trained.policy.may_iterate


@pytest.mark.parametrize("keeps", ["finds_iterations", "settle", "thread", "choice"])
def test_no_iteration_is_looked_for_where(trained: Script, keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants it, the recording has begun, another thread asks the model, or a person chose."""
    if keeps == "finds_iterations":
        trained.policy.finds_iterations = False
    elif keeps == "settle":
        trained.policy.settle()
    elif keeps == "choice":
        trained.policy = StepPolicy("optimizer")
        trained.policy.finds_iterations = True
    else:
        of_policy = trained.policy.note_inference
        monkeypatch.setattr(trained.policy, "note_inference", lambda: _in_thread(of_policy))
    trained.play(TRAIN)
    assert _iterate(trained, 4, 4, 4, 4) == list(range(2, 18))
    assert trained.policy.times == 1


def _in_thread(call: Any) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_another_kind_of_steps_has_no_iterations_until_it_shows_its_own(script: Script) -> None:
    script.policy.finds_iterations = True
    _iterate(script, 2, 2, 2, 2, program="backward")
    assert (script.policy.times, script.policy.what_counts()) == (2, ("backward", ()))
    script.has_optimizer = True
    assert _iterate(script, 3, 3) == [1, 2, 3, 4, 5, 6]
    assert script.policy.times == 1
    _iterate(script, 3, 3)
    assert script.policy.times == 3


def test_each_of_several_optimizers_counts_once_in_a_round_of_an_iteration(trained: Script) -> None:
    _iterate(trained, 4, 4, 4, program=f"{TRAIN} optimizer:AdamW")
    assert trained.policy.times == 4
    assert trained.policy.what_counts() == ("optimizer", ("SGD", "AdamW"))


@pytest.mark.parametrize("kind", ["optimizer*4", "optimizer:SGD*4", "SGD*4", "backward*8"])
def test_several_of_what_a_person_chose_are_one_step_from_the_start(kind: str) -> None:
    chosen = Script(StepPolicy(kind))
    chosen.play("call:Linear backward backward optimizer:SGD", 15)
    assert chosen.made == [0, 1, 2, 3]
    assert chosen.policy.times == int(kind.rpartition("*")[2])


def test_a_choice_of_several_is_read_and_refused_where_it_says_nothing() -> None:
    assert StepChoice.parse("optimizer*4") == StepChoice("optimizer", None, 4)
    assert StepChoice.parse("call:Encoder*2") == StepChoice("call", "Encoder", 2)
    assert StepChoice.parse("AdamW*12") == StepChoice("optimizer", "AdamW", 12)
    assert StepChoice.parse("backward*1") == StepChoice("backward")
    for wrong in (
        "optimizer*0",
        "optimizer*",
        "optimizer*-1",
        "optimizer*x",
        "optimizer*2*2",
        "*4",
        "whole*2",
        "call:*2",
    ):
        with pytest.raises(ValueError, match=r"write one of .*; optimizer\*4 makes a step of four"):
            StepChoice.parse(wrong)


@pytest.mark.parametrize(
    ("step", "names", "said"),
    [
        ("optimizer", ("Adam",), "4 steps of the optimizer Adam"),
        ("optimizer", ("actor", "critic"), "4 steps each of the optimizers actor and critic"),
        ("backward", (), "4 backward passes"),
        ("replay", (), "4 replays of a CUDA graph"),
        ("generate", ("Llama",), "4 calls of Llama.generate"),
        ("call", ("encoder",), "4 calls of encoder"),
        ("call", (), "4 calls"),
    ],
)
def test_a_step_of_several_reads_as_plain_english(step: str, names: tuple[str, ...], said: str) -> None:
    assert describe_step(step, names, 4) == said


def test_a_model_is_in_training_as_its_own_mode_says() -> None:
    model = nn.Linear(1, 1)
    wrapped = nn.DataParallel(model)
    assert is_in_training(model)
    assert is_in_training(wrapped)
    model.eval()
    assert not is_in_training(wrapped), "the wrapper was not told"
    assert not is_in_training(nn.ReLU()), "it has nothing to train"


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


@pytest.mark.parametrize("ranges", [0, 1, 2])
def test_a_step_begins_where_it_is_due_after_the_ranges_around_the_one_before_it(ranges: int, loop: Loop) -> None:
    _train(loop, 0, 3, ranges=ranges)
    assert loop.begun == [(0, ranges), (1, 0), (2, 0), (3, 0)]


def test_a_range_that_opens_with_a_step_and_closes_with_it_holds_that_step_alone(loop: Loop) -> None:
    """As the range around the step whose work is counted, which the recording opens and closes at its boundaries."""
    loop.with_range = 1
    _train(loop, 0, 3, ranges=1)
    assert loop.begun == [(0, 1), (1, 0), (2, 0), (3, 0)]


def test_a_range_around_the_loop_holds_its_steps_and_costs_one_boundary_at_most() -> None:
    whole, epoch = Loop(), Loop()
    whole.open()
    _train(whole, 0, 3)
    whole.work()
    assert whole.begun == [(0, 1), (1, 1), (2, 1), (3, 1)]
    _train(epoch, 0, 2)
    epoch.open()
    _train(epoch, 2, 5)
    assert epoch.begun == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)], "its first two steps are one"


def test_counting_anew_forgets_what_waited(loop: Loop) -> None:
    loop.boundaries.due(0)
    loop.open()
    loop.boundaries.due(1)
    loop.boundaries.due(1)
    loop.close()
    assert loop.begun == [(0, 0), (1, 0)]
