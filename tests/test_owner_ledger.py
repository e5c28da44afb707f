"""What the memory recording writes down: the owners of tensors, and the text of the allocator's events."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from profkit.capture import memory_history as recording
from profkit.capture.hooks.module_names import ModuleNames, Roots
from profkit.capture.owners import OwnerLedger
from profkit.run.owners import Owned, read_owners


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
