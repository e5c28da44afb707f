"""Of which ranges the hooks hear: of those that the script opens, not of torch's own."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import nvtx
import torch
from torch.autograd.profiler import record_function

from profkit.capture.hooks.script_ranges import watch_script_ranges


class Listener:
    """Notes each call."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def script_opening(self) -> None:
        self.heard.append("opening")

    def closing(self) -> None:
        self.heard.append("closing")

    def script_closed(self) -> None:
        self.heard.append("closed")


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    for owner, names in (
        (record_function, ("__enter__", "__exit__")),
        (nvtx.annotate, ("__enter__", "__exit__", "__call__")),
        (nvtx, ("push_range", "pop_range")),
        (torch.cuda.nvtx, ("range_push", "range_pop")),
    ):
        for name in names:  # what they are now comes back at the test's end
            monkeypatch.setattr(owner, name, vars(owner)[name])
    listener = Listener()
    watch_script_ranges(listener)
    return listener


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
