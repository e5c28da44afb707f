"""Of which ranges the hooks hear: of those that the script opens, not of torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

import nvtx
import torch
from torch.autograd.profiler import record_function

from profkit.capture.hooks.script_ranges import watch_script_ranges
from profkit.capture.patches import restore


class Listener:
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
def listener() -> Iterator[Listener]:
    listener = Listener()
    watch_script_ranges(listener.script_opening, listener.closing, listener.script_closed)
    yield listener
    restore()


def test_the_hooks_hear_of_a_range_of_the_script_even_if_code_in_it_fails(listener: Listener) -> None:
    with record_function("epoch"):
        assert listener.heard == ["opening"]
    with pytest.raises(ZeroDivisionError), record_function("epoch"):
        raise ZeroDivisionError
    assert listener.heard == ["opening", "closing", "closed"] * 2


def test_the_hooks_do_not_hear_of_ranges_that_torch_opens_around_an_optimizer(listener: Listener) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile() as recorded:
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= {one.key for one in recorded.events()}
    assert listener.heard == []


def test_the_hooks_learn_what_the_script_calls_its_ranges(listener: Listener) -> None:
    with record_function("recorded"), nvtx.annotate("marked", domain="own"):
        nvtx.push_range("pushed")
        nvtx.push_range(message="named", color="red")
        nvtx.pop_range()
        nvtx.pop_range()

    @nvtx.annotate("decorated")
    def work() -> None:
        return None

    work()
    assert listener.names == ["recorded", "marked", "pushed", "named", "decorated"]
    assert listener.heard.count("closed") == 5
