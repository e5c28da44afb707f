"""What was measured of a device, read back, and what its datasheet says."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import profkit.analysis.datasheet as datasheets
from profkit.analysis.ceilings import Copy, Gemm, read_ceilings
from profkit.analysis.datasheet import find_datasheet
from profkit.errors import RunError

CEILINGS: dict[str, Any] = {
    "version": 1,
    "device": {"name": "NVIDIA H200", "uuid": "GPU-0", "clock_mhz": 1755, "clock_max_mhz": 1980},
    "torch": "2.13.0",
    "driver": "580.159.03",
    "measured_utc": "2026-01-01T00:00:00+00:00",
    "gemm": [
        {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "best_flops_per_s": 8e14, "median_flops_per_s": 7.5e14}
    ],
    "copy": {"bytes": 2**30, "best_bytes_per_s": 4e12, "median_bytes_per_s": 3.9e12},
}


def _write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_every_field_comes_back_from_a_file_and_from_a_run(tmp_path: Path) -> None:
    file = _write(tmp_path / "ceilings.json", CEILINGS)
    ceilings = read_ceilings(file)
    assert ceilings is not None
    assert ceilings == read_ceilings(tmp_path)
    assert (ceilings.device.name, ceilings.device.uuid, ceilings.device.clock_mhz) == ("NVIDIA H200", "GPU-0", 1755)
    assert ceilings.find("bf16") == Gemm("bf16", 8192, 8192, 8192, 8e14, 7.5e14)
    assert ceilings.find("fp32") is None
    assert ceilings.copy == Copy(2**30, 4e12, 3.9e12)


def test_a_run_need_have_none_but_a_named_file_must_be_there(tmp_path: Path) -> None:
    assert read_ceilings(tmp_path) is None
    with pytest.raises(RunError, match="no such file; measure with `profkit ceilings -o"):
        read_ceilings(tmp_path / "mine.json")


@pytest.mark.parametrize("rate", [0, -1.0, "fast", None])
def test_a_rate_that_is_none_is_refused(tmp_path: Path, rate: Any) -> None:
    content = copy.deepcopy(CEILINGS)
    content["gemm"][0]["best_flops_per_s"] = rate
    with pytest.raises(RunError, match=r"damaged .*measure again"):
        read_ceilings(_write(tmp_path / "ceilings.json", content))


@pytest.mark.parametrize("content", ["", "[]", '{"version": 0}', "[" * 100_000])
def test_another_version_or_form_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(RunError, match="measure again"):
        read_ceilings(_write(tmp_path / "ceilings.json", content))


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
    assert sheet is not None
    assert sheet.flops_per_s[dtype] == pytest.approx(peak)


@pytest.mark.parametrize("gpu", [None, "", "NVIDIA", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100", "Radeon"])
def test_an_unknown_gpu_has_no_datasheet(gpu: str | None) -> None:
    assert find_datasheet(gpu) is None


def test_a_type_that_a_gpu_lacks_is_left_out() -> None:
    sheet = find_datasheet("Tesla T4")
    assert sheet is not None
    assert set(sheet.flops_per_s) == {"fp32", "fp16"}


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
