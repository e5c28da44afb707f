"""What autograd saved for backward, read from the graph: all of it, nothing else, and without changing anything."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame, checkpoint

from profkit.capture import owners
from profkit.capture.hooks.backward_nodes import watch_recompute
from profkit.capture.owners import is_cast_of_parameter, read_saved, tensors_at_hand

needs_content = pytest.mark.skipif(not owners._SHOWS_CONTENT, reason="this torch does not show what is packed")

Loss = Callable[[], Tensor]


class Keeps(torch.autograd.Function):
    """Saves one tensor as it should, and one on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.extra = x * 2
        return y + ctx.extra

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[0] + 2)


class Block(nn.Module):
    """Attention, a normalisation, dropout and an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = F.dropout(self.out(F.scaled_dot_product_attention(q, k, v)), 0.5)
        y += x
        return torch.relu_(y)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 4))


def _plain() -> Tensor:
    return _model()(torch.ones(2, 8, 16)).logsumexp(-1).mean()


def _autocast() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _plain()


def _function() -> Tensor:
    return Keeps.apply(_model()(torch.ones(2, 8, 16))).sum()  # type: ignore[no-any-return]


def _second_derivative() -> Tensor:
    x = torch.ones(2, 8, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(_model()(x).exp().sum(), x, create_graph=True)
    return gradient.square().sum()


def _found(loss: Tensor) -> tuple[dict[int, tuple[int, float]], int]:
    """Return each saved storage's size and content, by its address."""
    found: dict[int, tuple[int, float]] = {}

    def note(tensor: Tensor) -> None:
        found[tensor.untyped_storage().data_ptr()] = _content(tensor)

    return found, read_saved((loss,), note)


def _content(tensor: Tensor) -> tuple[int, float]:
    storage = tensor.untyped_storage()
    return storage.nbytes(), sum(storage.tolist())


def _packed(make: Loss) -> Counter[tuple[int, float]]:
    """Return the size and content of each storage that a hook is given, but for parameters."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = make()
    del loss
    return Counter(_content(one) for one in kept.values())


@pytest.mark.parametrize("make", [_plain, _autocast])
def test_the_graph_holds_what_a_hook_would_have_packed(make: Loss) -> None:
    found, unread = _found(make())
    assert unread == 0
    assert Counter(found.values()) == _packed(make)


def test_a_second_derivative_keeps_part_of_what_both_passes_saved() -> None:
    found, unread = _found(_second_derivative())
    assert unread == 0
    assert found
    assert Counter(found.values()) <= _packed(_second_derivative)


def test_what_a_function_keeps_on_its_context_is_found() -> None:
    loss = _function()
    context = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    found, _ = _found(loss)
    assert context.extra.untyped_storage().data_ptr() in found  # type: ignore[union-attr]
    assert context.saved_tensors[0].untyped_storage().data_ptr() in found  # type: ignore[union-attr]


@needs_content
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_not_computed_again_and_its_inputs_are_found(reentrant: bool) -> None:
    model, calls = _model(), Counter[str]()
    model[1].register_forward_pre_hook(lambda *_: calls.update(["run"]))
    inner = model[0](torch.ones(2, 8, 16))
    loss = checkpoint(model[1], inner, use_reentrant=reentrant).sum()
    found, unread = _found(loss)
    assert calls["run"] == 1
    assert unread == 0
    assert inner.untyped_storage().data_ptr() in found
    loss.backward()
    assert calls["run"] == 2


class Kept:
    """Notes what checkpoints keep of what they computed again."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, float]] = {}

    def call_to_recompute(self) -> None:
        """No call is known."""

    def recompute_begins(self, key: object, call: Any) -> None:
        """Nothing is kept yet."""

    def recompute_ends(self, key: object, kept: Callable[[], list[Tensor]]) -> None:
        """Note what is kept now."""
        self.found |= {one.untyped_storage().data_ptr(): _content(one) for one in kept()}


def test_what_a_checkpoint_computed_again_is_what_forward_would_have_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_CheckpointFrame, "__init__", _CheckpointFrame.__init__)
    monkeypatch.setattr(CheckpointFunction, "forward", CheckpointFunction.forward)
    listener = Kept()
    watch_recompute(listener)
    x = torch.rand(2, 8, 16, requires_grad=True)
    block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1))
    wanted, _ = _found(block(x).sum())
    checkpoint(block, x, use_reentrant=False).sum().backward()
    weights = {one.data_ptr() for one in block.parameters()}
    assert {at: one for at, one in listener.found.items() if at not in weights | {x.data_ptr()}}
    found = Counter(one for at, one in listener.found.items() if at not in weights)
    assert found == Counter(wanted.values())


@needs_content
def test_what_a_hook_moved_elsewhere_is_found_where_it_is_now() -> None:
    moved: list[int] = []

    def pack(tensor: Tensor) -> list[Tensor]:
        copy = tensor.clone()
        moved.append(copy.data_ptr())
        return [copy]

    def unpack(_: Any) -> Tensor:
        raise AssertionError("unpacked")

    x = torch.ones(4, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        loss = x.exp().sum()
    found, _ = _found(loss)
    assert list(found) == moved
    with save_on_cpu():
        loss = x.exp().sum()
    assert len(_found(loss)[0]) == 1


@needs_content
def test_what_lies_in_an_object_of_a_hooks_own_is_counted() -> None:
    x = torch.ones(4, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: {"kept": tensor}, lambda packed: packed["kept"]):
        loss = x.exp().sum()
    assert _found(loss) == ({}, 1)


def test_nothing_is_unpacked_where_torch_does_not_show_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_SHOWS_CONTENT", False)
    monkeypatch.setattr(owners._hooks, "were_used", False)
    autograd = torch._C._autograd
    monkeypatch.setattr(autograd, "_push_saved_tensors_default_hooks", autograd._push_saved_tensors_default_hooks)
    owners.watch_hooks()
    loss = _function()
    before, unread = _found(loss)
    assert unread == 0
    monkeypatch.setattr(owners, "_SHOWS_CONTENT", True)
    assert before == _found(loss)[0]
    monkeypatch.setattr(owners, "_SHOWS_CONTENT", False)
    inner = nn.Linear(4, 4)
    loss = checkpoint(inner, torch.ones(4, requires_grad=True), use_reentrant=False).exp().sum()
    inner.register_forward_pre_hook(lambda *_: pytest.fail("computed again"))
    found, unread = _found(loss)
    assert not found
    assert unread > 0


def test_tensors_changed_in_place_freed_or_released_do_no_harm() -> None:
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    loss = y.sum()
    y.detach().add_(1)
    _found(loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = x.exp().sum()
    loss.backward()
    assert not _found(loss)[0]
    assert _found(torch.ones(1)) == ({}, 0)


def test_reading_holds_nothing_and_changes_no_gradient() -> None:
    def train(*, read: bool) -> tuple[list[str], list[weakref.ref[Any]]]:
        model, seen = _model(), []
        loss = model(torch.ones(2, 8, 16)).logsumexp(-1).mean()
        if read:
            read_saved((loss,), lambda tensor: seen.append(weakref.ref(tensor)))
        loss.backward()
        return [loss.item().hex(), *(one.grad.sum().item().hex() for one in model.parameters())], seen

    plain, _ = train(read=False)
    read, seen = train(read=True)
    gc.collect()
    assert read == plain
    assert seen
    assert not [one for one in seen if one() is not None]


def test_autocasts_copies_of_parameters_are_told_from_activations() -> None:
    casts: list[Tensor] = []
    loss = _autocast()
    read_saved((loss,), lambda tensor: casts.append(tensor) if is_cast_of_parameter(tensor) else None)
    shapes = {tuple((one if one._base is None else one._base).shape) for one in casts}
    assert shapes == {(48, 16), (16, 16), (4, 16)}


def test_a_graph_of_very_many_nodes_is_cut_off_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_MOST_NODES", 5)
    x = torch.ones(1, requires_grad=True)
    for _ in range(9):
        x = x.exp()
    found, unread = _found(x)
    assert len(found) == 5
    assert unread == 1


def test_compiled_code_shows_what_it_saved() -> None:
    compiled = torch.compile(_model(), backend="aot_eager")
    found, unread = _found(compiled(torch.ones(2, 8, 16)).sum())
    assert found
    assert unread == 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no way to read a function's variables that makes no copy")
def test_what_forward_has_saved_so_far_is_found_from_what_its_functions_hold() -> None:
    wanted: set[int] = set()
    found: set[int] = set()

    def fail(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        read_saved(args, lambda tensor: wanted.add(tensor.untyped_storage().data_ptr()))
        del args
        read_saved(tensors_at_hand(), lambda tensor: found.add(tensor.untyped_storage().data_ptr()))

    model = _model()
    model[2].register_forward_pre_hook(fail)
    model(torch.ones(2, 8, 16))
    assert wanted
    assert wanted <= found
