"""The wrapper around every call of a module: whom it shows a call, what a script sees, and how deep ranges reach."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from profkit.annotation import RangeObserver
from profkit.capture.hooks import module_calls
from profkit.capture.hooks.module_names import reach_by_tree
from profkit.capture.hooks.open_ranges import Call, NoCall, OpenOnThread, OpenRanges
from profkit.capture.patches import restore


class Observer:
    """Notes the modules that it is shown, outermost ones as the roots that they are."""

    def __init__(self) -> None:
        self.is_recording = self.is_resting = False
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
    restore()
    observer.is_resting = True  # the wrapper stays, and would show it the calls of other tests too


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


def test_no_call_is_shown_that_begins_at_rest_and_the_end_of_each_that_began_before(observer: Observer) -> None:
    class Sleeper(nn.Module):
        def forward(self, x: Any) -> Any:
            observer.is_resting = True
            return x

    x = torch.ones(1)
    model = nn.Sequential(Sleeper(), nn.Identity())
    assert model(x) is x
    assert model(x) is x
    assert (observer.entered, len(observer.left)) == ([model], 1)


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
    reach = reach_by_tree(model)
    assert set(reached.split()) <= reach.paths
    assert not set(left_out.split()) & reach.paths
    is_cut = "experts" in left_out
    assert (reach.left_out and (reach.left_out.modules, reach.left_out.depth)) == ((12 * 102, 5) if is_cut else None)
