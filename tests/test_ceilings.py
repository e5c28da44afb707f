"""What was measured of a device, read back, and what its datasheet says."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import profkit.analysis.efficiency as datasheets
from profkit.analysis.efficiency import find_datasheet
from profkit.report.commands.machine import build_ceilings_document
from profkit.report.document import render
from profkit.run.work import read_ceilings
from tests.golden import check_text
from tests.in_process import run_profkit
from tests.test_run_files import CEILINGS

if TYPE_CHECKING:
    from tests.forked_scripts import Forks


@pytest.mark.parametrize(
    ("gpu", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.5e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A10", "tf32", 62.5e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
    ],
)
def test_the_datasheet_of_a_gpu_by_its_whole_name(gpu: str, dtype: str, peak: float) -> None:
    sheet = find_datasheet(gpu)
    assert sheet.flops_per_s[dtype] == pytest.approx(peak)


@pytest.mark.parametrize("gpu", [None, "", "NVIDIA", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100", "Radeon"])
def test_an_unknown_gpu_has_no_datasheet_and_a_known_one_only_the_types_that_it_has(gpu: str | None) -> None:
    assert find_datasheet(gpu) is None
    assert set(find_datasheet("Tesla T4").flops_per_s) == {"fp32", "fp16"}


def test_the_table_is_consistent() -> None:
    """Tensor cores at two bytes do at least twice what they do at four; no name stands twice."""
    rows = tomllib.loads(datasheets._TABLE.read_text())["gpu"]
    names = [name for row in rows for name in row["names"]]
    assert len(names) == len(set(names))
    for row in rows:
        peaks = row["tflops_per_s"]
        assert set(peaks) in ({"fp32", "fp16"}, {"fp32", "tf32", "bf16", "fp16"})
        assert peaks["fp16"] == peaks.get("bf16", peaks["fp16"])
        if "tf32" in peaks:
            assert peaks["bf16"] / peaks["tf32"] == pytest.approx(2, rel=0.03)
        assert 300 <= row["gigabytes_per_s"] <= 8000


def test_measured_and_datasheet_figures_stand_side_by_side(tmp_path: Path) -> None:
    """Of an unknown GPU there are no datasheet figures."""
    text = ""
    for gpu, style in (("NVIDIA H200", "table"), *(("NVIDIA Unheard Of", style) for style in ("table", "json", "csv"))):
        content = copy.deepcopy(CEILINGS)
        content["device"]["name"] = gpu
        (tmp_path / "ceilings.json").write_text(json.dumps(content))
        text += render(build_ceilings_document(read_ceilings(tmp_path / "ceilings.json")), style) + "\n"
    check_text("ceilings", text)


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_slow_product_runs_unmeasured_once_and_is_not_repeated_for_long(
    monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    pytest.importorskip("torch")
    from profkit.capture import ceilings

    seconds = 5.0 if is_slow else 0.001
    ran: list[None] = []
    monkeypatch.setattr(ceilings, "perf_counter", lambda: len(ran) * seconds)
    monkeypatch.setattr(ceilings, "_times_of", lambda _run: iter([seconds] * 99))
    measured = ceilings._time(lambda: ran.append(None))
    assert len(ran) == (1 if is_slow else ceilings._UNMEASURED)
    assert len(measured) == (1 if is_slow else ceilings._MOST_MEASURED)


def test_the_command_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {key: CEILINGS[key] for key in ("device", "torch", "gemm", "copy")}
    monkeypatch.setattr("profkit.launch.gpu_state._measure_in_a_process", lambda: measured)
    (tmp_path / "manifest.json").write_text("{}")
    done = run_profkit("ceilings", "-o", str(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ceilings = read_ceilings(tmp_path / "ceilings.json")
    assert (ceilings.torch, ceilings.gemm[0].best_flops_per_s) == ("2.13.0", 8e14)
    assert done.stdout == render(build_ceilings_document(ceilings), "table") + "\n"


def test_a_machine_without_a_gpu_and_a_directory_that_is_no_run(forks: Forks, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    done = forks.run_profkit("ceilings", "-o", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert "no profkit run" in done.stderr
    if not torch.cuda.is_available():
        done = forks.run_profkit("ceilings", cwd=tmp_path)
        assert done.returncode == 1
        assert "sees no CUDA GPU; nothing was measured" in done.stderr


@pytest.mark.gpu
def test_a_gpu_is_near_its_datasheet() -> None:
    pytest.importorskip("torch")
    from profkit.capture import ceilings

    measured = ceilings.measure()
    sheet = find_datasheet(measured["device"]["name"])
    rates = {one["dtype"]: one["best_flops_per_s"] for one in measured["gemm"]}
    assert rates["bf16"] > rates["tf32"] > rates["fp32"]
    assert measured["device"]["clock_mhz"] <= measured["device"]["clock_max_mhz"]
    if sheet is not None:
        assert all(0.3 < rate / sheet.flops_per_s[dtype] < 1.1 for dtype, rate in rates.items())
        assert 0.5 < measured["copy"]["best_bytes_per_s"] / sheet.bytes_per_s < 1.05
