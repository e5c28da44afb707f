"""Verdicts: what limits a range, from the parts of its time and from the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profkit import read_trace
from profkit.analysis.efficiency.limits import MOVERS, Roofline, Verdict, build_roofline, judge
from profkit.analysis.efficiency.summary import count_launches
from profkit.analysis.efficiency.work import Amount, Peaks
from profkit.analysis.kernels.categories import CATEGORIES
from profkit.analysis.time_account.account import recorded_idle, unprofiled_idle
from profkit.analysis.time_account.gpu_time import DataWait, GpuParts
from profkit.analysis.tree.range_tree import build_nodes
from tests.nsys_builder import NsysBuilder

PEAKS = Peaks("measured", "H200", {"fp32": 50e12, "bf16": 700e12}, 4e12)
KNOWN = Roofline(20.0, 10.0)
_MOVER = "void at::native::vectorized_elementwise_kernel<4, MulFunctor>(int)"


def _parts(**given: int) -> GpuParts:
    names = [name for name in GpuParts.__dataclass_fields__ if name != "span_ns"]
    parts = {name: given.get(name, 0) for name in names}
    return GpuParts(span_ns=sum(v for name, v in parts.items() if not name.startswith("overlapped")), **parts)


def _judge(parts: GpuParts | None, roofline: Roofline = KNOWN, *, factor: float | None = None, **more: Any) -> Verdict:
    idle = None if parts is None else recorded_idle(parts, DataWait())
    if parts is not None and factor is not None:
        idle = unprofiled_idle(parts, DataWait(), round(parts.idle_ns * factor))
    return judge(parts, idle, 100, roofline, **{"only_communicates": False, **more})


@pytest.mark.parametrize(
    ("parts", "roofline", "word"),
    [
        (_parts(computing_ns=40, launching_ns=60), KNOWN, "launch-bound"),
        (_parts(computing_ns=40, launching_ns=25, outside_cuda_ns=35), KNOWN, "compute-bound"),
        (_parts(computing_ns=40, outside_cuda_ns=30, synchronising_ns=30), KNOWN, "host-bound"),
        (_parts(computing_ns=40, exposed_communication_ns=60), KNOWN, "communication-bound"),
        (_parts(computing_ns=40, exposed_copy_ns=60), KNOWN, "memory-bound"),
        (_parts(computing_ns=100), Roofline(10.0, 20.0), "memory-bound"),
        (_parts(computing_ns=100), Roofline(50.0, None), "compute-bound"),
        (_parts(computing_ns=100), Roofline(49.0, None), None),
        (_parts(computing_ns=100), Roofline(None, 90.0), None),
        (_parts(), KNOWN, None),
        (None, KNOWN, None),
    ],
)
def test_the_largest_part_of_the_time_decides(parts: GpuParts | None, roofline: Roofline, word: str | None) -> None:
    assert _judge(parts, roofline).word == word


def test_idle_time_is_scaled_to_unprofiled_time_before_it_is_judged() -> None:
    parts = _parts(computing_ns=40, launching_ns=60)
    verdict = _judge(parts, factor=0.5)
    assert verdict.word == "compute-bound"
    assert "57.1%" in verdict.rule
    assert "30 ns for 60 ns recorded" in verdict.rule


@pytest.mark.parametrize(("share", "word"), [(0.5, "compute-bound"), (0.51, "memory-bound")])
def test_a_range_with_mostly_data_moving_kernels_is_memory_bound(share: float, word: str) -> None:
    parts = _parts(computing_ns=100)
    verdict = _judge(parts, mover_share=share)
    assert verdict.word == word
    assert ("51.0% of its kernel time" in verdict.rule) == (word == "memory-bound")
    unknown = Roofline(None, 90.0)
    assert _judge(parts, unknown, mover_share=share).word == (word if word == "memory-bound" else None)


def test_kernels_count_as_movers_by_their_names(tmp_path: Path) -> None:
    """Most FLOPs at the peak, and 60 of 100 ns in an elementwise kernel."""
    assert MOVERS.issubset(CATEGORIES)
    assert not MOVERS & {"gemm", "attention", "communication", "graph", "other"}
    builder = NsysBuilder()
    builder.range("a", 0, 1_000, int64Value=10**9)
    builder.kernel(10, 40, name="ampere_sgemm_64x32_nt", start=20)
    builder.kernel(11, 60, name=_MOVER, start=60)
    attribution = read_trace(builder.write(tmp_path / "t.sqlite")).attribution
    nodes = build_nodes(attribution, numbered=True)
    _, own_ns, moving_ns = count_launches(attribution, nodes, np.arange(1))
    assert (own_ns.tolist(), moving_ns.tolist()) == ([100], [60])


def test_a_range_with_only_communication_is_bound_by_it_even_if_others_compute() -> None:
    parts = _parts(computing_ns=80, exposed_communication_ns=20)
    assert _judge(parts, only_communicates=True).word == "communication-bound"


def test_other_operations_count_at_the_peak_of_fp32() -> None:
    amount = Amount(flops=1_400, other_flops=500, least_bytes=8_000, flops_by_dtype={"bf16": 1_400})
    assert build_roofline(amount, PEAKS) == Roofline(pytest.approx(1_400 / 700e3 + 500 / 50e3), pytest.approx(2.0))
    assert build_roofline(Amount(flops=1, flops_by_dtype={"fp8": 1}), PEAKS).compute_ns is None
    assert build_roofline(amount, None) == Roofline(None, None)
