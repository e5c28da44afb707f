"""What the hooks are told of: calls of modules, ranges of the script, and what checkpoints compute again."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import nvtx
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils import checkpoint

from profkit.annotation import RangeObserver
from profkit.capture.hooks import Call, NoCall, backward_nodes, module_calls
from profkit.capture.hooks.backward_nodes import (
    Carrier,
    OutsideNodes,
    is_first_pass,
    is_marked,
    is_recomputing,
    watch_recompute,
)
from profkit.capture.hooks.module_names import reach_by_tree
from profkit.capture.hooks.open_ranges import OpenOnThread, OpenRanges
from profkit.capture.hooks.range_log import watch_script_ranges
from profkit.capture.patches import restore, restore_all


class Observer:
    """Notes the modules that it is shown, outermost ones as the roots that they are."""

    def __init__(self) -> None:
        self.is_recording = False
        self.on_thread = OpenOnThread(RangeObserver(), None)
        self.entered: list[nn.Module] = []
        self.left: list[Any] = []

    def enter(self, opened: OpenRanges, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self.entered.append(module)
        call = NoCall(None)  # type: ignore[arg-type]
        opened.root = opened.root or call
        return call

    def leave(self, opened: OpenRanges, call: Call, module: nn.Module, output: Any, kwargs: dict[str, Any]) -> None:
        self.left.append(output)
        if opened.root is call:
            opened.root = None


@pytest.fixture
def observer() -> Iterator[Observer]:
    observer = Observer()
    module_calls.observe_module_calls(observer)
    yield observer
    restore_all()  # the wrapper would show it the calls of other tests too


class Failing(nn.Module):
    def forward(self, _x: Any) -> None:
        raise ValueError("the script's own")


@pytest.mark.parametrize("is_recording", [False, True])
def test_calls_within_another_are_shown_while_recording_alone(observer: Observer, is_recording: bool) -> None:
    inner = nn.Sequential(nn.Identity())
    model = nn.Sequential(inner, nn.Identity())
    observer.is_recording = is_recording
    x = torch.ones(1)
    assert model(x) is x
    assert observer.entered == ([model, inner, inner[0], model[1]] if is_recording else [model])
    assert observer.left == [x] * len(observer.entered)


@pytest.mark.parametrize("is_recording", [False, True])
def test_a_traceback_shows_profkit_once_at_most(observer: Observer, is_recording: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(Failing())))
    observer.is_recording = is_recording
    with pytest.raises(ValueError, match="the script's own") as failed:
        model(torch.ones(1))
    frames = [frame.filename for frame in traceback.extract_tb(failed.value.__traceback__)]
    assert frames.count(module_calls.__file__) == 1
    assert sum(file.endswith("container.py") for file in frames) == 3
    assert frames[-1] == __file__
    assert observer.left == [None] * len(observer.entered)


class Calls(nn.Module):
    """A module with parts that somebody calls."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self) -> None:
        """Never called here."""


class Block(Calls):
    """A transformer's layer: its attention is four levels deep."""

    def __init__(self) -> None:
        inner = Calls(heads=Calls(rotary=nn.Identity()))
        super().__init__(
            ln_1=nn.LayerNorm(4), attn=Calls(c_attn=nn.Linear(4, 4), inner=inner), mlp=Calls(fc=nn.Linear(4, 4))
        )


def _layer_of_experts() -> nn.Module:
    experts = nn.ModuleList(Calls(up=nn.Linear(1, 1)) for _ in range(100))
    return Calls(attn=Calls(q=nn.Linear(1, 1)), mlp=Calls(gate=nn.Linear(1, 1), experts=experts))


def _blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


STAGES = {f"layer{number}": nn.Sequential(Block(), Block()) for number in range(1, 5)}
TRANSFORMER = nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": _blocks(3)})


@pytest.mark.parametrize(
    ("model", "reached", "left_out"),
    [
        (
            Calls(transformer=TRANSFORMER, lm_head=nn.Linear(4, 4)),  # containers are never called, and no level
            "transformer.wte lm_head transformer.h.2.attn transformer.h.2.attn.inner transformer.h.2.mlp.fc",
            "transformer.h.2.attn.inner.heads",
        ),
        (
            Calls(model=Calls(decoder=Calls(layers=_blocks(2)))),
            "model.decoder.layers.1.attn.inner",
            "model.decoder.layers.1.attn.inner.heads",
        ),
        (Calls(conv1=nn.Conv2d(3, 4, 1), **STAGES), "layer4.1.attn", "layer4.1.attn.c_attn"),
        (Calls(a=Calls(b=Calls(c=Calls(d=nn.Identity())))), "a a.b a.b.c", "a.b.c.d"),
        (
            Calls(layers=nn.ModuleList(_layer_of_experts() for _ in range(12))),
            "layers.11.attn layers.11.mlp",
            "layers.11.attn.q layers.0.mlp.experts.0",
        ),
    ],
    ids=["blocks in containers", "blocks further below", "numbered stages", "a small model", "too many modules"],
)
def test_ranges_reach_as_deep_as_the_parts_of_blocks(model: nn.Module, reached: str, left_out: str) -> None:
    paths, without = reach_by_tree(model)
    assert set(reached.split()) <= paths
    assert not set(left_out.split()) & paths
    is_cut = "experts" in left_out
    assert (without and (without.modules, without.depth)) == ((12 * 102, 5) if is_cut else None)


class ScriptListener:
    """Notes each call."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.names: list[str] = []

    def script_opening(self, name: Callable[[], str]) -> None:
        self.heard.append("opening")
        self.names.append(name())

    def closing(self) -> None:
        self.heard.append("closing")

    def script_closed(self) -> None:
        self.heard.append("closed")


@pytest.fixture
def script_listener() -> Iterator[ScriptListener]:
    script_listener = ScriptListener()
    watch_script_ranges(script_listener.script_opening, script_listener.closing, script_listener.script_closed)
    yield script_listener
    restore()


def test_the_hooks_hear_of_a_range_of_the_script_even_if_code_in_it_fails(script_listener: ScriptListener) -> None:
    with record_function("epoch"):
        assert script_listener.heard == ["opening"]
    with pytest.raises(ZeroDivisionError), record_function("epoch"):
        raise ZeroDivisionError
    assert script_listener.heard == ["opening", "closing", "closed"] * 2


def test_the_hooks_do_not_hear_of_ranges_that_torch_opens_around_an_optimizer(script_listener: ScriptListener) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile() as recorded:
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= {one.key for one in recorded.events()}
    assert script_listener.heard == []


def test_the_hooks_learn_what_the_script_calls_its_ranges(script_listener: ScriptListener) -> None:
    with record_function("recorded"), nvtx.annotate("marked", domain="own"):
        nvtx.push_range("pushed")
        nvtx.push_range(message="named", color="red")
        nvtx.pop_range()
        nvtx.pop_range()

    @nvtx.annotate("decorated")
    def work() -> None:
        return None

    work()
    assert script_listener.names == ["recorded", "marked", "pushed", "named", "decorated"]
    assert script_listener.heard.count("closed") == 5


CALL = NoCall(None)  # type: ignore[arg-type]


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def call_to_recompute(self) -> Call:
        return CALL

    def recompute_begins(self, key: object, call: Call | None) -> None:
        self.told.append(("begins", key, call))

    def recompute_ends(self, key: object, kept: Any) -> None:
        self.told.append(("ends", key))


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    monkeypatch.setattr(checkpoint._CheckpointFrame, "__init__", checkpoint._CheckpointFrame.__init__)
    monkeypatch.setattr(checkpoint.CheckpointFunction, "forward", staticmethod(checkpoint.CheckpointFunction.forward))
    one = Listener()
    watch_recompute(one)
    return one


class Probe(nn.Module):
    """Notes in which pass it is called."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.passes: list[tuple[bool, bool]] = []
        self.fails = fails

    def forward(self, x: Any) -> Any:
        self.passes.append((is_first_pass(), is_recomputing()))
        if self.fails and is_recomputing():
            raise ValueError("a bad batch")
        return x.exp().exp()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_what_runs_again_is_told_once_with_the_call_around_the_checkpoint(
    listener: Listener, reentrant: bool, fails: bool
) -> None:
    probe, x = Probe(fails), torch.ones(3, requires_grad=True)
    y = checkpoint.checkpoint(probe, x, use_reentrant=reentrant).sum()
    assert listener.told == []
    if fails:
        with pytest.raises(ValueError, match="a bad batch"):
            y.backward()
    else:
        y.backward()
    (begins, key, call), ends = listener.told
    assert (begins, call, ends) == ("begins", CALL, ("ends", key))
    assert probe.passes == [(reentrant, False), (False, True)]
    assert not is_recomputing()
    assert not is_first_pass()


@pytest.mark.parametrize("reentrant", [True, False])
def test_inference_through_a_checkpoint_is_no_first_pass_of_training(listener: Listener, reentrant: bool) -> None:
    probe = Probe()
    with torch.no_grad():
        checkpoint.checkpoint(probe, torch.ones(3), use_reentrant=reentrant)
    assert probe.passes == [(False, False)]
    assert listener.told == []


def _here(_gradient: Any) -> None:
    """Stands for the call that runs."""


def _graph(tensor: Any) -> list[Any]:
    """Return the nodes behind a tensor, without its leaves'."""
    found, waiting = [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and "AccumulateGrad" not in node.name():
            found.append(node)
            waiting += [behind for behind, _ in node.next_functions]
    return found


def test_nodes_of_a_second_derivative_are_marked_whatever_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU another thread makes and numbers them: the numbers may be those of a call's."""
    outside, carrier = OutsideNodes(), Carrier()
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    x = torch.randn(2, 4, requires_grad=True)
    carrier.call_begins()
    y = model(x).sum()
    first = _graph(y)
    monkeypatch.setattr(backward_nodes, "is_creating_graph", lambda: True)
    outside.backward_begins("key", ((y,),), carrier, _here)
    gradients = torch.autograd.grad(y, x, create_graph=True)
    carrier.call_ended()  # so that the call's numbers hold those of the second derivative
    outside.backward_ended("key", gradients, carrier, _here)
    second = [node for node in _graph(gradients[0]) if node not in first]
    assert second
    assert all(map(is_marked, second))
    assert not any(map(is_marked, first))


def test_gradients_that_were_asked_for_without_a_graph_mark_nothing() -> None:
    outside, carrier = OutsideNodes(), Carrier()
    x = torch.randn(2, 4, requires_grad=True)
    carrier.call_begins()
    y = nn.Linear(4, 4)(x)
    carrier.call_ended()
    outside.backward_begins("key", (y.sum(),), carrier, _here)
    outside.backward_ended("key", torch.autograd.grad(y.sum(), x, retain_graph=True), carrier, _here)
    assert not any(map(is_marked, _graph(y)))
