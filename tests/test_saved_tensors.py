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

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame, checkpoint

from profkit.capture import memory_history as recording
from profkit.capture import owners
from profkit.capture.hooks.backward_nodes import watch_recompute
from profkit.capture.hooks.module_names import ModuleNames, Roots
from profkit.capture.owners import OwnerLedger, is_cast_of_parameter, read_saved, tensors_at_hand
from profkit.run.owners import Owned, read_owners

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


# -- what is written down of owners ----------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnerLedger:
    """A ledger that takes the CPU's tensors for those of GPU 0."""
    monkeypatch.setattr(OwnerLedger, "_is_ours", staticmethod(lambda _tensor: True))
    return OwnerLedger(tmp_path / "ledger.jsonl")


def _owned(ledger: OwnerLedger, folder: Path) -> tuple[Owned, ...]:
    ledger.close()
    return read_owners(folder / "ledger.jsonl").owned


def test_each_gradient_in_a_bucket_has_its_own_part_of_the_storage(ledger: OwnerLedger, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    bucket = torch.zeros(8)
    model.weight.grad, model.bias.grad = bucket[:6].view(2, 3), bucket[6:]
    ledger.note_gradients(model.named_parameters())
    found = {one.name: (one.size_bytes, one.offset_bytes, one.own_bytes) for one in _owned(ledger, tmp_path)}
    assert found == {"weight": (32, 0, 24), "bias": (32, 24, 8)}


def test_a_tied_weight_stands_under_both_names(ledger: OwnerLedger, tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    ledger.note_module(model)
    first, second = _owned(ledger, tmp_path)
    assert (first.name, second.name) == ("embed.weight", "head.weight")
    assert first.address == second.address


def test_figures_of_gpus_in_use_are_noted_and_later_those_with_a_higher_peak_alone(
    ledger: OwnerLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = [100, 0]
    statistics = ("allocated_bytes", "requested_bytes", "reserved_bytes")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(peaks))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 1000))
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda device: {f"{name}.all.peak": peaks[device] for name in statistics}
    )
    ledger.note_figures("step 0")
    ledger.note_figures("no higher", only_higher=True)
    peaks[0] = 200
    ledger.note_figures("higher", only_higher=True)
    ledger.close()
    figures = read_owners(tmp_path / "ledger.jsonl").figures
    noted = [(one.moment, one.device, one.allocated_peak_bytes, one.capacity_bytes) for one in figures]
    assert noted == [("step 0", 0, 100, 1000), ("higher", 0, 200, 1000)]
    assert ledger.allocated_peak_bytes == 200


def _owners(names: ModuleNames, model: nn.Module) -> list[str]:
    return [part.owner for one in model.modules() if (part := names.part(one)) is not None]


def test_the_memory_of_a_second_model_bears_its_name() -> None:
    first, second, loss = (nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)), nn.MSELoss())
    names, roots = ModuleNames(None), Roots()
    for model, name in ((first, "model"), (second, "netD"), (loss, "MSELoss")):
        names.name_root(model, name)
        roots.of(model)
        roots.name(model, name)
    assert _owners(names, first) == ["model", "0"]
    assert _owners(names, second) == ["netD/", "netD/0"]
    assert _owners(names, loss) == ["MSELoss"]
    assert list(roots.parameter_names().values()) == ["0.weight", "0.bias", "netD/0.weight", "netD/0.bias"]


def test_a_child_called_like_the_model_is_told_from_it() -> None:
    names = ModuleNames(None)
    outer = nn.ModuleDict({"model": nn.ModuleDict({"norm": nn.LayerNorm(2)}), "head": nn.Linear(2, 2)})
    names.name_root(outer)
    assert _owners(names, outer) == ["model/", "model/model", "model/model.norm", "model/head"]


def test_an_entry_says_how_large_an_element_is_and_where_a_view_lies_and_no_storage_without_bytes_has_one(
    ledger: OwnerLedger, tmp_path: Path
) -> None:
    half, whole, square = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(4, 4)
    views = [("column", square[:, 1]), ("empty part", whole[:0]), ("empty", torch.zeros(0))]
    ledger.note_inputs([("half", half), ("whole", whole), *views])
    found = {one.name: (one.element_bytes, one.offset_bytes, one.own_bytes) for one in _owned(ledger, tmp_path)}
    assert found == {"half": (2, 0, 6), "whole": (4, 0, 12), "column": (4, 4, 3 * 16 + 4), "empty part": (4, 0, 0)}


def test_a_wrapped_model_has_its_wrappers_name_and_only_the_wrapper_a_range() -> None:
    names, model = ModuleNames(9), nn.Sequential(nn.Linear(1, 1))
    names.name_root(model)  # called by itself, before it was wrapped
    wrapper = torch.compile(model, backend="eager")
    of_wrapper = names.name_root(wrapper)
    assert names.part(model) is names.part(wrapper) is of_wrapper
    assert id(model) not in names.parts
    assert names.parts[id(model[0])].range == "0"


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator of paper was told; the last is what it writes."""
    told = [""]
    monkeypatch.setattr(torch.cuda.memory, "_get_memory_metadata", lambda: told[-1])
    monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", told.append)
    return told


@pytest.mark.parametrize(
    ("phase", "module", "text"),
    [
        ("backward", "blocks.0", "profkit:backward:blocks.0"),
        ("loss", None, "profkit:loss:"),
        (None, "model", "profkit:forward:model"),
        (None, None, ""),
    ],
)
def test_the_text_names_phase_and_module(texts: list[str], phase: str | None, module: str | None, text: str) -> None:
    recording.write_text("forward", "before")
    recording.write_text(phase, module)
    assert texts[-1] == text
    texts.append("epoch 3")
    recording.write_text("forward", "model")
    recording.write_text(None, None)
    assert texts[-1] == "epoch 3", "a text of the script's own stays"
