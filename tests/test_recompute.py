"""What torch's checkpoints show of themselves: their first pass, and what they compute again."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils import checkpoint  # noqa: E402

from profkit.capture.hooks.open_ranges import Call, NoCall  # noqa: E402
from profkit.capture.hooks.recompute import is_first_pass, is_recomputing, watch_recompute  # noqa: E402

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
