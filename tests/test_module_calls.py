"""The wrapper around every call of a module: whom it shows a call, and what a script sees of it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from profkit.annotation import RangeObserver  # noqa: E402
from profkit.capture.hooks import module_calls  # noqa: E402
from profkit.capture.hooks.open_ranges import Call, NoCall, OpenOnThread, OpenRanges  # noqa: E402
from profkit.capture.patches import restore  # noqa: E402


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
