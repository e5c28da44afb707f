"""Which nodes of a graph belong to no module, and what checkpoints compute first and again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils import checkpoint

from profkit.capture.hooks import backward_nodes
from profkit.capture.hooks.backward_nodes import Carrier, OutsideNodes, is_marked, mark_node
from profkit.capture.hooks.open_ranges import Call, NoCall
from profkit.capture.hooks.recompute import is_first_pass, is_recomputing, watch_recompute

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


CARRIER = Carrier()


def _mark(node: Any, _call: Any) -> None:
    mark_node(node, lambda _: None, CARRIER)


def _graph(tensor: Any) -> list[Any]:
    """Return the nodes behind a tensor, without its leaves'."""
    found, waiting = [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and "AccumulateGrad" not in node.name():
            found.append(node)
            waiting += [behind for behind, _ in node.next_functions]
    return found


def _call(outside: OutsideNodes, module: nn.Module, x: Any) -> Any:
    outside.call_begins(CARRIER)
    result = module(x)
    outside.call_ended()
    return result


def test_nodes_of_a_second_derivative_are_marked_whatever_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU another thread makes and numbers them: the numbers may be those of a call's."""
    outside = OutsideNodes()
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    x = torch.randn(2, 4, requires_grad=True)
    outside.call_begins(CARRIER)
    y = model(x).sum()
    first = _graph(y)
    monkeypatch.setattr(backward_nodes, "is_creating_graph", lambda: True)
    outside.backward_begins("key", ((y,),), _mark)
    gradients = torch.autograd.grad(y, x, create_graph=True)
    outside.call_ended()  # so that the call's numbers hold those of the second derivative
    outside.backward_ended("key", gradients, _mark)
    second = [node for node in _graph(gradients[0]) if node not in first]
    assert second
    assert all(map(is_marked, second))
    assert not any(map(is_marked, first))


def test_gradients_that_were_asked_for_without_a_graph_mark_nothing() -> None:
    outside = OutsideNodes()
    x = torch.randn(2, 4, requires_grad=True)
    y = _call(outside, nn.Linear(4, 4), x)
    outside.backward_begins("key", (y.sum(),), _mark)
    outside.backward_ended("key", torch.autograd.grad(y.sum(), x, retain_graph=True), _mark)
    assert not any(map(is_marked, _graph(y)))
