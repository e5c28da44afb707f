"""What a script calls its optimizers and models, read from the line that uses them, and variables of its functions."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import profkit
from profkit.capture.steps.variable_names import VariableNames, tell_apart, variable_of, variables_at_hand

# Runs as a hook of profkit's own would: its frame is none of the script's.
HOOK: Callable[..., None] = eval(
    compile("lambda name_of, one, *_: name_of(one) and None", str(Path(profkit.__file__).with_name("hook.py")), "eval")
)


@pytest.fixture
def names() -> VariableNames:
    return VariableNames()


def _optimizer(names: VariableNames) -> torch.optim.Optimizer:
    made = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    made.register_step_pre_hook(partial(HOOK, names.of_optimizer))
    return made


def _model(names: VariableNames) -> nn.Module:
    made = nn.Linear(1, 1)
    made.register_forward_pre_hook(partial(HOOK, names.of_model))
    return made


class Scaler:
    """Makes an optimizer's step in a file of torch's, as ``GradScaler.step`` does."""

    step = eval(compile("lambda self, one: one.step()", str(Path(torch.__file__).with_name("scaler.py")), "eval"))


def test_an_optimizer_is_called_by_its_attribute_also_through_a_scaler(names: VariableNames) -> None:
    class Trainer:
        opt_g = _optimizer(names)

    trainer: Any = Trainer()
    Scaler().step(
        trainer.opt_g,
    )
    assert names.known(trainer.opt_g) == "opt_g"


def test_the_closure_that_a_step_takes_is_no_name(names: VariableNames) -> None:
    lbfgs = _optimizer(names)
    my_closure = torch.enable_grad()(lambda: torch.zeros(()))
    lbfgs.step(my_closure)
    assert names.known(lbfgs) == "lbfgs"


def test_a_model_is_called_by_its_variable_and_by_nothing_where_torch_calls_it(names: VariableNames) -> None:
    encoder, other = _model(names), _model(names)
    encoder(torch.ones(1, 1))
    torch.func.functional_call(other, {}, (torch.ones(1, 1),))
    assert names.known(encoder) == "encoder"
    assert names.known(other) is None


def test_a_model_that_a_function_is_given_is_called_by_what_its_caller_passes(names: VariableNames) -> None:
    """Else a policy and the reference beside it would both be the ``model`` of the function that scores them."""

    def score(x: Any, model: nn.Module) -> Any:
        return model(x)

    def score_by_keyword(model: nn.Module, *, x: Any) -> Any:
        return score(x, model=model)

    class Judge:
        def score(self, judged: nn.Module) -> Any:
            return judged(torch.ones(1, 1))

    policy, reference, rewards, unknown = (_model(names) for _ in range(4))
    score(torch.ones(1, 1), policy)
    score_by_keyword(reference, x=torch.ones(1, 1))
    Judge().score(rewards)
    score(*(torch.ones(1, 1), unknown))
    found = [names.known(model) for model in (policy, reference, rewards, unknown)]
    assert found == ["policy", "reference", "rewards", "model"]


def test_names_that_do_not_tell_apart_give_way_to_numbers(names: VariableNames) -> None:
    optimizers = [_optimizer(names) for _ in range(2)]
    for one in optimizers:
        one.step()
    assert [tell_apart(one, optimizers, names.known) for one in optimizers] == ["SGD 0", "SGD 1"]


def test_one_alone_needs_no_name_and_classes_tell_apart(names: VariableNames) -> None:
    first, second = _optimizer(names), torch.optim.Adam(nn.Linear(1, 1).parameters())
    assert tell_apart(first, [first], names.known) is None
    assert tell_apart(first, [first, second], names.known) == "SGD"


class Thing:
    """Something that a weak reference can follow."""


MODULES = Thing()


def test_nothing_stays_alive_for_having_been_read() -> None:
    thing = Thing()
    alive = weakref.ref(thing)
    for value in variables_at_hand():
        del value
    del thing
    assert alive() is None


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no way to read a function's variables that makes no copy")
def test_variables_of_the_caller_and_its_callers_are_found() -> None:
    thing, captured = Thing(), Thing()

    def inner() -> list[object]:
        own = captured
        found = [one for one in variables_at_hand() if one is own or one is thing]
        return list({id(one): one for one in found}.values())

    assert inner() == [captured, thing]


def test_variables_of_a_module_are_found() -> None:
    code = compile("found = any(one is thing for one in variables_at_hand())", "module", "exec")
    namespace = {"thing": MODULES, "variables_at_hand": variables_at_hand}
    exec(code, namespace)
    assert namespace["found"] is True


def test_a_variable_of_a_running_function_is_found_by_its_name() -> None:
    def running(number: int) -> tuple[Any, Any]:
        frame = sys._getframe()
        return variable_of(frame, "number"), variable_of(frame, "missing")

    assert running(54321) == (54321, None)
