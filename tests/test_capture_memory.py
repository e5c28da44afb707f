"""Recording memory, as far as it can be tried without a GPU: the ledger's lines, and who runs in the backward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from profkit.capture import backward_owners as owners_module
from profkit.capture.backward_owners import PREFIX, backward_owners, name_loss
from profkit.capture.memory_observer import MemoryObserver
from profkit.capture.owners import OwnerLedger
from profkit.capture.step import TrainingStep
from profkit.models.workload import MemoryOrder, Order, Workload
from profkit.run.owners import ROLES, VERSION, read_owners


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names that are set while a backward pass runs, in order."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", said.append, raising=False)
    monkeypatch.setattr(owners_module, "knows_owners", lambda: True)
    return said


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": x + self.second(self.relu(self.first(x)))}


def test_modules_are_named_in_reverse_and_closed_by_their_inputs(named: list[str]) -> None:
    model = Block()
    x = torch.randn(2, 4, requires_grad=True) * 1
    with backward_owners(model, on=True):
        loss = model(x)["out"].sum()
        name_loss(loss)
        loss.backward()
    short = [name.removeprefix(PREFIX) for name in named]
    assert short[0] == "loss"
    order = [name for name in ("second", "relu", "first") if name in short]
    assert order == sorted(order, key=short.index)
    assert short.index("second") > 0
    # `x` was made by a node of its own: the block's backward ends there, outside every module.
    assert short[-1] == ""


def test_the_loss_and_gradients_are_the_same_with_hooks(named: list[str]) -> None:
    def gradients(on: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Block()
        with backward_owners(model, on=on):
            model(torch.randn(2, 4))["out"].sum().backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    for plain, hooked in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, hooked)
    assert named


def test_hooks_are_gone_afterwards(named: list[str]) -> None:
    model = Block()
    with backward_owners(model, on=True):
        pass
    model(torch.randn(2, 4))["out"].sum().backward()
    assert named == []


class _OnPaper(OwnerLedger):
    """A ledger that writes down storages of the CPU as if they were the GPU's."""

    _is_ours = staticmethod(lambda tensor: True)


def test_a_steps_owners_are_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": 7})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 80 << 30))
    path = tmp_path / "ledger.jsonl"
    ledger = _OnPaper(path, torch.device("cuda", 0), 1, {"allocated_bytes.all.peak": 3})
    step = TrainingStep(Workload("tiny", batch=1, context=16, warmup_steps=1, steps=2), torch.device("cpu"))
    step.observe(MemoryObserver(ledger, step, saved=True))
    step.run_warmup()
    step.run_measured()
    ledger.note_figures("dump")
    ledger.close()
    header = json.loads(path.read_text().splitlines()[0])
    assert (header["kind"], header["version"], header["peaks_reset_us"]) == ("header", VERSION, 1)
    read = read_owners(path)
    assert [one.name for one in read.steps] == ["warmup 0", "step 0", "step 1"]
    assert [one.moment for one in read.figures] == ["start", "warmup 0", "step 0", "step 1", "dump"]
    assert [one.allocated_peak_bytes for one in read.figures] == [3, 7, 7, 7, 7]
    assert {one.capacity_bytes for one in read.figures} == {80 << 30}
    by_role = {role: [one for one in read.owned if one.role == role] for role in ROLES}
    count = len(list(step.module.parameters()))
    assert len(by_role["parameter"]) == count
    assert len(by_role["gradient"]) == 3 * count
    assert len(by_role["optimizer_state"]) == 3 * count, "once, for they have their storage for good"
    assert {one.step for one in by_role["gradient"]} == {None, 0, 1}
    assert by_role["saved"]
    names = {one.name for one in by_role["optimizer_state"]}
    assert {"head.weight.exp_avg", "head.weight.exp_avg_sq", "head.weight.step"} <= names
    sizes = {one.name: one.size_bytes for one in by_role["parameter"]}
    assert sizes["head.weight"] == 10_000 * 128 * 4


def test_an_order_survives_its_json() -> None:
    order = Order(Workload("tiny"), "memory", "r", memory=MemoryOrder("s", "l", max_entries=5, saved=True))
    assert Order.from_json(order.to_json()) == order
    plain = Order(Workload("tiny"), "none", "r")
    assert Order.from_json(plain.to_json()) == plain
