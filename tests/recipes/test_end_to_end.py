"""A whole training step: the grid, cells measured on the CPU, running out of memory, and the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional

from profkit import find_datasheet
from profkit.errors import UsageError
from recipes.end_to_end import choose_settings, main
from recipes.whole_model import measure, training
from recipes.whole_model.cells import FULL, of_product, work_of
from recipes.whole_model.measure import rates
from recipes.whole_model.report import remark


def _cell(**changed: Any) -> dict[str, Any]:
    setting = {"size": "tiny", "context": 16, "passes": "train", "dtype": "fp32", "mode": "eager", "warmup": 1}
    return {**setting, "batch": 2, "steps": 4, **changed}


def test_the_full_grid_varies_the_warmup_for_fp32_eager_alone() -> None:
    cells = of_product(FULL)
    assert len(set(cells)) == len(cells) == 5 * 4 * 3 * (3 * 2 + 2)
    assert {setting[3:5] for setting in cells if setting[5] != 5} == {("fp32", "eager")}
    assert {setting[5] for setting in cells[: 5 * 4 * 3 * 6]} == {5}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--warmup", "-1"), "not whole numbers from 0"),
        (("--size", "huge"), "huge: choose from"),
        (("--steps", "2"), "x>=3"),
    ],
)
def test_a_value_outside_the_grid_is_refused(given: tuple[str, str], said: str) -> None:
    done = CliRunner().invoke(main, [*given, "--device", "cpu"])
    assert done.exit_code == 2
    assert said in done.output


def test_settings_that_cannot_be_measured_are_refused() -> None:
    for grid, device, said in (("full", "cpu", "--dtype tf32: only CUDA"), ("reports", "cuda", "print no such cell")):
        with pytest.raises(UsageError, match=said):
            choose_settings(grid, device, {"dtype": ("tf32",)})  # type: ignore[arg-type]


def test_values_restrict_the_reports_and_replace_an_axis_of_the_product() -> None:
    given = {"size": ("small",), "context": (256,), "warmup": (0, 1, 5), "dtype": ("fp32",), "mode": ("eager",)}
    both = ("small", 256, "forward-backward", "fp32", "eager")
    kept = choose_settings("reports", "cuda", given)
    assert [setting[5] for setting in kept if setting[:5] == both] == [5, 0, 1]
    assert choose_settings("small", "cpu", {"context": (7,), **given, "passes": ("train",)})[0][0] == "small"
    assert "tf32" not in {setting[3] for setting in choose_settings("full", "cpu", {})}


def test_a_cell_on_the_cpu_has_times_of_every_phase() -> None:
    row: dict[str, Any] = measure.measure_cell(_cell(), "cpu")
    assert row["status"] == "ok"
    for part in ("forward", "loss", "backward", "optimizer", "forward_backward", "step"):
        samples = row[f"{part}_samples_ms"]
        assert len(samples) == 4
        assert 0 < row[f"{part}_min_ms"] == min(samples) <= row[f"{part}_ms"] <= max(samples)
        assert row[f"{part}_std_ms"] > 0
    parts = zip(*(row[f"{part}_samples_ms"] for part in ("forward", "loss", "backward")), strict=True)
    assert row["forward_backward_samples_ms"] == [sum(each) for each in parts]
    assert all(
        whole > both + optimizer
        for whole, both, optimizer in zip(
            *(row[f"{part}_samples_ms"] for part in ("step", "forward_backward", "optimizer")), strict=True
        )
    )
    assert row["tokens_per_s"] == pytest.approx(2 * 16 / (row["step_ms"] / 1e3))
    # By hand: 2 · 10,000 · 128 of the vocabulary, 2 layers of 4 · 128² + 3 · 128 · 512 + 2 · 128, the last gain.
    assert row["parameters"] == 2_560_000 + 2 * (65_536 + 196_608 + 256) + 128
    assert (row["mfu"], row["peak_MiB"], row["compiled_graphs"]) == (None, None, 0)
    said = "graphs were compiled in the timed steps in 1 of 2 rows: 2 at tiny 16 train fp32 eager, warm-up 1"
    rows = [{**_cell(), **row}] * 2
    assert said not in " ".join(remark(rows))
    assert said in " ".join(remark([rows[0], {**rows[1], "compiled_graphs": 2}]))


@pytest.mark.parametrize("passes", ["forward", "train"])
def test_each_phase_waits_for_the_device_before_its_time_ends(monkeypatch: pytest.MonkeyPatch, passes: str) -> None:
    run = training.Training(work_of(_cell(passes=passes)), "cpu")
    waits: list[str] = []
    monkeypatch.setattr(training, "synchronize", lambda _device: waits.append(run.phase))
    run.build()
    times = run.run()
    assert waits == [part for part in times if part not in ("step", "forward_backward")]
    assert waits == ["forward", "loss", "backward", "optimizer"][: len(waits)]


def test_mfu_is_of_the_dtype_and_the_whole_step() -> None:
    sheet = find_datasheet("NVIDIA H200")
    assert sheet is not None
    work = work_of(_cell(dtype="bf16"))
    assert rates(work, [9.0, 10.0, 30.0], "NVIDIA H200")["mfu"] == pytest.approx(work.flops / 0.01 / 989.5e12)
    assert rates(work, [10.0], "Nobody's GPU")["mfu"] is None


def _short(*_arguments: Any, **_named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")


@pytest.mark.parametrize(
    ("phase", "owner", "name"),
    [
        ("model", torch, "randint"),
        ("forward", functional, "embedding"),
        ("backward", torch.Tensor, "backward"),
        ("optimizer", torch.optim.AdamW, "step"),
    ],
)
def test_running_out_of_memory_names_the_phase(
    monkeypatch: pytest.MonkeyPatch, phase: str, owner: Any, name: str
) -> None:
    monkeypatch.setattr(owner, name, _short)
    row: dict[str, Any] = measure.measure_cell(_cell(), "cpu")
    assert (row["status"], row["requested_bytes"]) == (f"OOM({phase})", 2 << 30)
    assert "forward_ms" not in row
