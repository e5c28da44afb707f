"""`profkit efficiency --attention`: the parts of attention in time and FLOPs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.efficiency.attention import PARTS
from profkit.errors import TraceError, UsageError
from tests.efficiency_runs import SMALL, make_small_run
from tests.nsys_builder import NsysBuilder


def test_times_equal_those_from_sql() -> None:
    """The forward pass is launched by the main thread alone, so launch times inside the range are enough."""
    result = read_trace(SMALL).attention()
    connection = sqlite3.connect(f"file:{SMALL}?mode=ro", uri=True)
    sql = """
        SELECT count(DISTINCT n.start), sum(k.end - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k
        JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
        JOIN NVTX_EVENTS n ON r.start >= n.start AND r.start < n.end
        LEFT JOIN StringIds s ON s.id = n.textId WHERE coalesce(n.text, s.value) = ?
    """
    for part in result.parts[:3]:
        assert (part.instances, part.kernel_time_ns) == connection.execute(sql, (part.part,)).fetchone()
    connection.close()
    assert [part.layer for part in result.parts] == [None] * 3 + [n for n in range(12) for _ in range(3)]
    for name in PARTS:
        whole, *layers = [part for part in result.parts if part.part == name]
        assert whole.kernel_time_ns == sum(part.kernel_time_ns for part in layers)


def test_a_run_knows_the_operations_of_the_softmax(tmp_path: Path) -> None:
    scores, softmax, value = read_trace(make_small_run(tmp_path)).attention().parts[:3]
    rows = 24 * 4 * 12 * 256  # 24 instances, batch, heads, queries
    assert value.operations == rows * 256 * 64 * 2
    assert scores.operations is not None
    assert softmax.operations is not None
    assert scores.operations > value.operations  # the scores are scaled, too
    assert softmax.operations_ratio == softmax.operations / scores.operations
    assert softmax.operations_ratio == pytest.approx(1 / 25.8, rel=0.01)
    assert softmax.time_ratio == pytest.approx(1_168_652 / 549_464)


def test_a_trace_without_a_run_knows_only_the_products() -> None:
    result = read_trace(SMALL).attention()
    assert [part.operations for part in result.parts[:3]] == [9_663_676_416, None, 9_663_676_416]
    assert result.work_source == "payload"


def test_only_instances_within_the_range_count(tmp_path: Path) -> None:
    """Two contexts, each with its own ranges: neither gets the other's, and what is asked for exists."""
    builder = NsysBuilder()
    for at, context in ((0, 128), (1_000, 256)):
        builder.range(f"context {context}", at, at + 900)
        builder.range("forward", at + 10, at + 800)
        for number, part in enumerate(PARTS):
            begin = at + 100 * (number + 1)
            builder.range(part, begin, begin + 90)
            builder.kernel(begin + 10, context + number)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    for context in (128, 256):
        result = opened.attention(f"context {context}")
        assert [(part.instances, part.kernel_time_ns) for part in result.parts] == [
            (1, context),
            (1, context + 1),
            (1, context + 2),
        ]
        assert result.range == f"context {context}"
    assert [part.instances for part in opened.attention().parts] == [2, 2, 2]
    with pytest.raises(UsageError, match="no range 'context 512'; nearest"):
        opened.attention("context 512")
    builder.range("backward", 2_000, 2_900)
    with pytest.raises(TraceError, match="of the forward pass within 'backward'"):
        read_trace(builder.write(tmp_path / "more.sqlite")).attention("backward")


def test_warmup_and_backward_do_not_count(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for at, around in ((0, "warmup"), (1_000, "forward"), (2_000, "backward")):
        builder.range(around, at, at + 900)
        for number, part in enumerate(PARTS):
            begin = at + 100 * number
            builder.range(part, begin, begin + 90)
            builder.kernel(begin + 10, 10 * (number + 1))
    parts = read_trace(builder.write(tmp_path / "t.sqlite")).attention().parts
    assert [(part.layer, part.instances, part.kernel_time_ns) for part in parts] == [
        (None, 1, 10),
        (None, 1, 20),
        (None, 1, 30),
    ]


def test_a_trace_without_attention_ranges_is_refused(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("forward", 0, 10)
    builder.kernel(1, 5)
    with pytest.raises(TraceError, match="no ranges 'computing attention scores'"):
        read_trace(builder.write(tmp_path / "t.sqlite")).attention()
