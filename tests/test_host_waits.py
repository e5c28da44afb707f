"""The line on ranges that wait much for the host though that is not what bounds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.report.host_waits import host_wait_lines
from tests.nsys_builder import NsysBuilder

SAID = "bound by the largest part of its time; waiting for the host too: "


def _measure(folder: Path, range: str | None = None, *, numbered: bool = False) -> EfficiencyResult:
    """Two steps of 10 ms: in layer 0 the GPU is idle while the host launches, in the optimizer outside CUDA."""
    builder = NsysBuilder()
    for step in (0, 1):
        at = 100_000_000 * step
        builder.range(f"step {step}", at, at + 10_000_000)
        builder.range("forward", at, at + 6_000_000)
        builder.range("layer 0", at, at + 3_000_000)
        builder.call(at, name="cudaMalloc_v3020", duration=1_150_000 + 50_000 * step)
        builder.kernel(at + 1_210_000 + 50_000 * step, 1_700_000, start=at + 1_300_000)
        builder.range("layer 1", at + 3_000_000, at + 6_000_000)
        builder.kernel(at + 3_010_000, 2_950_000, start=at + 3_020_000)
        builder.range("optimizer", at + 6_000_000, at + 10_000_000)
        builder.kernel(at + 6_010_000, 2_200_000, start=at + 6_020_000)
        builder.kernel(at + 9_900_000, 90_000, start=at + 9_910_000)
    trace = builder.write(folder / f"{range}.sqlite")
    return read_trace(trace).efficiency(range, numbered=numbered)


def test_the_longest_wait_stands_first_and_what_lies_within_a_named_range_is_left_out(tmp_path: Path) -> None:
    result = _measure(tmp_path)
    shares = {row.name: (row.launching_share, row.host_share) for row in result.ranges}
    assert shares["layer *"][0] == pytest.approx(0.206, abs=0.001), "told by forward, which lies around it"
    assert host_wait_lines(result) == [f"{SAID}optimizer 42.7% (host), forward 20.6% (launch)"]


def test_ranges_of_one_name_are_told_apart_by_the_shortest_path_that_can(tmp_path: Path) -> None:
    (line,) = host_wait_lines(_measure(tmp_path, "layer 0", numbered=True))
    assert line == f"{SAID}step 1/forward/layer 0 42.0% (launch), step 0/forward/layer 0 40.3% (launch)"
    (line,) = host_wait_lines(_measure(tmp_path, "step 1", numbered=True))
    assert line == f"{SAID}optimizer 42.7% (host), forward 21.0% (launch)"


def test_nothing_is_said_where_nothing_waits(tmp_path: Path) -> None:
    assert host_wait_lines(_measure(tmp_path, "layer 1")) == []
