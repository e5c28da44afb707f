"""The evidence behind a verdict: the gaps and kernels that it names are in the capture."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from profkit import read_trace
from profkit.analysis.efficiency.limits import find_evidence
from tests.efficiency_runs import SMALL
from tests.nsys_builder import NsysBuilder


def test_the_longest_gaps_say_what_the_host_did_meanwhile(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("a", 0, 3_000_000)
    builder.kernel(10, 90, start=100, name="first")
    builder.call(400, duration=50, name="cudaMalloc_v3020")
    builder.call(500, duration=250, name="cudaDeviceSynchronize_v3020")
    builder.kernel(2_000_000, 10, start=2_000_020, name="second")
    trace = read_trace(builder.write(tmp_path / "t.sqlite"))
    (evidence,) = find_evidence(trace.attribution).values()
    longest, last, lead = evidence.gaps
    assert (longest.start_ns, longest.end_ns) == (190, 2_000_020)
    # From the first call on the way to the synchronisation; later the launch of the second kernel, a nanosecond.
    assert longest.launching_ns == 500 - 190 + 1
    assert (longest.synchronising_ns, longest.outside_cuda_ns) == (250, 2_000_000 - 750 + 19)
    assert (longest.call, longest.call_ns) == ("cudaDeviceSynchronize_v3020", 250)
    assert (longest.ended_by, longest.launch_ns) == ("second", 2_000_000)
    assert (last.start_ns, last.end_ns, last.ended_by) == (2_000_030, 3_000_000, None)
    assert (lead.start_ns, lead.end_ns, lead.ended_by) == (0, 100, "first")
    assert [(kernel.name, kernel.count, kernel.total_ns, kernel.first_ns) for kernel in evidence.kernels] == [
        ("first", 1, 90, 100),
        ("second", 1, 10, 2_000_020),
    ]


def test_a_real_gap_is_empty_and_ends_with_the_kernel_that_it_names() -> None:
    evidence = find_evidence(read_trace(SMALL).attribution, "forward")
    connection = sqlite3.connect(f"file:{SMALL}?mode=ro", uri=True)
    tables = ("KERNEL", "MEMCPY", "MEMSET")
    for gap in evidence["step */forward"].gaps:
        for table in tables:
            sql = f'SELECT count(*) FROM CUPTI_ACTIVITY_KIND_{table} WHERE start < ? AND "end" > ?'
            assert connection.execute(sql, (gap.end_ns, gap.start_ns)).fetchone() == (0,)
        sql = """
            SELECT w.name, r.start FROM (
                SELECT k.start, k.correlationId, s.value AS name FROM CUPTI_ACTIVITY_KIND_KERNEL k
                JOIN StringIds s ON s.id = k.demangledName
                UNION ALL SELECT start, correlationId, 'a memory copy' FROM CUPTI_ACTIVITY_KIND_MEMCPY
                UNION ALL SELECT start, correlationId, 'a memory fill' FROM CUPTI_ACTIVITY_KIND_MEMSET
            ) w JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = w.correlationId WHERE w.start = ?
        """
        assert connection.execute(sql, (gap.end_ns,)).fetchone() == (gap.ended_by, gap.launch_ns)
        parts = gap.launching_ns + gap.synchronising_ns + gap.outside_cuda_ns
        assert parts == gap.end_ns - gap.start_ns
    for kernel in evidence["step */forward/layer */ffn"].kernels:
        sql = """
            SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName
            WHERE s.value = ? AND k.start = ?
        """
        assert connection.execute(sql, (kernel.name, kernel.first_ns)).fetchone() == (1,)
    connection.close()


def test_the_longest_gap_equals_that_between_raw_rows() -> None:
    opened = read_trace(SMALL)
    work, copies = opened.trace.work, opened.trace.copies
    start = np.concatenate([work.start_ns, copies.start_ns])
    end = np.concatenate([work.end_ns, copies.end_ns])
    order = np.argsort(start)
    between = start[order][1:] - np.maximum.accumulate(end[order])[:-1]
    steps = opened.attribution.trace.ranges
    first_step_ends = int(steps.end_ns[[i for i, n in enumerate(steps.name) if opened.trace.names[n] == "step 0"]][0])
    inside = between[start[order][1:] < first_step_ends]
    (gap, *_) = find_evidence(opened.attribution, "step 0")["step *"].gaps
    assert gap.end_ns - gap.start_ns == inside.max()
