"""The self-check: the verdicts that the captures' own README states, and each check on a capture made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.self_check import KnownRun, SelfCheck, check_capture
from profkit.errors import TraceError
from profkit.trace.nsys import read_nsys
from tests.nsys_builder import NsysBuilder, process_of


def _check(builder: NsysBuilder, tmp_path: Path, log: str = "") -> SelfCheck:
    return check_capture(read_trace(builder.write(tmp_path / "t.sqlite")).attribution, log)


def _codes(check: SelfCheck, verdict: str) -> list[str]:
    return [finding.code for finding in check.findings if finding.verdict == verdict]


def _steps(builder: NsysBuilder, counts: list[int]) -> None:
    for step, count in enumerate(counts):
        builder.range(f"step {step}", 1000 * step, 1000 * step + 900)
        for kernel in range(count):
            builder.kernel(1000 * step + 10 * kernel, 5)


@pytest.mark.parametrize(
    "capture", ["small.nsys2023", "small.nsys2025", "ddp.nsys2025", "graph_nodes.nsys2023", "hooks.nsys2025"]
)
def test_healthy_captures_pass(captures: Path, capture: str) -> None:
    check = read_trace(captures / f"{capture}.sqlite").self_check
    assert not check.failed, check.of("failed")


def test_lossy_captures_fail(captures: Path) -> None:
    check = read_trace(captures / "lossy.nsys2023.sqlite").self_check
    assert _codes(check, "failed") == ["launch-without-kernel", "idle-instances"]
    assert "thin" in _codes(check, "warning")
    check = read_trace(captures / "graph_whole.nsys2023.sqlite").self_check
    assert _codes(check, "failed") == ["graph-launch-without-graph"]
    assert "244 of 244" in check.of("failed")[0].message


Row = tuple[str, tuple[int | None, ...], dict[str, object]]
"""A method of the builder, and what it is given."""
LAUNCHES = (
    *("cudaLaunchKernel_v7000", "cudaLaunchKernelExC_v11060", "cuLaunchKernel", "cuLaunchKernelEx"),
    *("cuLaunchCooperativeKernel", "cudaLaunchCooperativeKernel_v9000", "cudaLaunchKernel_ptsz_v7000"),
)
OTHERS = ["cudaLaunchHostFunc_v10000", "cuKernelGetName", "cudaMemcpyAsync_v3020"]


def _call(start: int, name: str) -> Row:
    return "call", (start,), {"name": name}


@pytest.mark.parametrize(
    ("steps", "rows", "findings"),
    [
        ([3, 3], [], {}),
        *(([2], [_call(500, name)], {"launch-without-kernel": "failed"}) for name in LAUNCHES),
        *(([2], [_call(500, name)], {}) for name in OTHERS),
        # A kernel long before its launch, and one that outlasts the capture.
        ([], [("kernel", (5_000_000, 3), {"start": 10})], {"before-launch": "failed"}),
        ([2], [("kernel", (500, 10**14), {})], {"impossible-duration": "failed"}),
        # Few kernels without their launches, as a profiler that starts during work sees them, or all.
        ([2], [("kernel", (None, 3), {"start": 800})], {"kernel-without-launch": "note"}),
        ([], [("kernel", (None, 3), {"start": 10 * at}) for at in range(10)], {"kernel-without-launch": "failed"}),
        ([2], [("range", (700, None), {"name": "forward"})], {"open-range": "warning"}),
        ([3, 0, 3], [], {"empty-steps": "failed"}),
        # Warm-up steps do not count.
        ([9, 3, 3], [], {"unequal-steps": "warning"}),
        ([9, 3, 3], [("range", (-1, 950), {"name": "warmup"})], {}),
        # Steps of different contexts need not be equal.
        (
            [3, 3, 9, 9],
            [("range", (-1, 1950), {"name": "context 128"}), ("range", (1990, 3950), {"name": "context 256"})],
            {},
        ),
        (
            [3, 4, 9, 9],
            [("range", (-1, 1950), {"name": "context 128"}), ("range", (1990, 3950), {"name": "context 256"})],
            {"unequal-steps": "warning"},
        ),
    ],
)
def test_each_capture_has_its_findings(
    tmp_path: Path, steps: list[int], rows: list[Row], findings: dict[str, str]
) -> None:
    builder = NsysBuilder()
    _steps(builder, steps)
    for method, positional, named in rows:
        if method == "range":
            builder.range(str(named["name"]), *positional)  # type: ignore[arg-type]
        else:
            getattr(builder, method)(*positional, **named)
    check = _check(builder, tmp_path)
    assert {finding.code: finding.verdict for finding in check.findings} == findings


def test_a_launch_without_its_kernel_fails_unless_the_call_itself_failed(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _steps(builder, [3, 3])
    builder.call(500, name="cuLaunchKernelEx", status=701)
    assert not _check(builder, tmp_path).failed
    builder.call(510, name="cuLaunchKernelEx")
    (tmp_path / "t.sqlite").unlink()
    check = _check(builder, tmp_path)
    assert _codes(check, "failed") == ["launch-without-kernel"]
    assert "1 of 8" in check.of("failed")[0].message


def test_graph_launches_need_graph_rows_or_kernels(tmp_path: Path) -> None:
    builder = NsysBuilder()
    launch = builder.call(10, name="cudaGraphLaunch_v10000")
    builder.kernel(None, 5, correlation=launch, start=20)
    assert not _check(builder, tmp_path).failed
    builder.call(40, name="cudaGraphLaunch_v10000")
    (tmp_path / "t.sqlite").unlink()
    assert _codes(_check(builder, tmp_path), "failed") == ["graph-launch-without-graph"]


def test_a_diagnostic_fails_warns_or_is_a_note_by_its_text(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _steps(builder, [2])
    for severity, text in (
        (1, "Number of CUPTI events produced: 12"),
        (2, "Not all CUDA events might have been collected."),
        (2, "CPU clock is odd."),
        (2, "Some CUDA events were dropped."),
        (2, "Not all events might have been collected: CUPTI buffers overflowed."),
        (2, "3 IP samples were dropped."),
        (3, "CUPTI said CUPTI_ERROR_UNKNOWN."),
    ):
        builder.add("DIAGNOSTIC_EVENT", timestamp=0, severity=severity, text=text)
    check = _check(builder, tmp_path)
    assert [f.message.split(": ", 1)[1] for f in check.of("failed")] == [
        "CUPTI said CUPTI_ERROR_UNKNOWN.",
        "Some CUDA events were dropped.",
        "Not all events might have been collected: CUPTI buffers overflowed.",
    ]
    assert [f.message.split(": ", 1)[1] for f in check.of("warning")] == ["CPU clock is odd."]
    assert [f.message.split(": ", 1)[1] for f in check.of("note")] == [
        "Not all CUDA events might have been collected.",
        "3 IP samples were dropped.",
    ]


def test_a_diagnostic_about_a_silent_process_names_it(tmp_path: Path) -> None:
    """Inductor's compilers are processes too, and CUDA is not started in them."""
    builder = NsysBuilder()
    _steps(builder, [2])
    text = "CUDA profiling might have not been started correctly."
    for pid in (100, 4711):
        builder.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text=text, globalPid=process_of(pid))
    said = [(f.verdict, f.message) for f in _check(builder, tmp_path).findings if f.code == "diagnostic"]
    silent = f"the profiler says about process 4711, where nothing was recorded: {text}"
    assert said == [("warning", f"the profiler says: {text}"), ("warning", silent)]
    attribution = read_trace(tmp_path / "t.sqlite").attribution
    known = check_capture(attribution, "", KnownRun(steps=1, layers=None, even=False))
    assert [(f.verdict, f.message) for f in known.findings if f.code == "diagnostic"] == [said[0], ("note", silent)]


def test_a_loss_in_the_importers_log_fails(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _steps(builder, [2])
    check = _check(builder, tmp_path, "Processing...\nErrors occurred while processing the raw events.\n")
    assert _codes(check, "failed") == ["log"]


def test_rows_that_end_before_they_start_are_left_out_and_fail_the_check(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _steps(builder, [2])
    builder.kernel(5_000_000, -3)
    builder.range("backwards", 50, 40)
    builder.range("kept", 60, 70, int64Value=7)
    check = _check(builder, tmp_path)
    said = [finding.message for finding in check.of("failed")]
    assert any("1 row of kernels with impossible times left out" in message for message in said)
    assert any("1 row of ranges with impossible times left out, the first named 'backwards'" in text for text in said)
    trace = read_nsys(tmp_path / "t.sqlite")
    assert (trace.work.end_ns >= trace.work.start_ns).all()
    assert {trace.names[trace.ranges.name[at]]: number for at, number in trace.ranges.payload.items()} == {"kept": 7}


def _micro_steps(builder: NsysBuilder, steps: list[list[int]]) -> None:
    """Add steps of several backward passes each, with these numbers of kernels."""
    for step, counts in enumerate(steps):
        builder.range(f"step {step}", 1000 * step, 1000 * step + 900)
        for part, count in enumerate(counts):
            begin = 1000 * step + 100 * part + 10
            builder.range("backward", begin, begin + 90)
            builder.range("scale", begin + 1, begin + 80)
            for kernel in range(count):
                builder.kernel(begin + 5 + 5 * kernel, 2)


def test_parts_of_a_step_are_compared_with_the_same_parts_of_other_steps(tmp_path: Path) -> None:
    for number, (parts, failed, warned) in enumerate(
        (
            ([[3, 5, 0], [3, 5, 0]], [], []),
            ([[3, 5], [3, 4], [3, 5]], [], ["unequal-steps", "unequal-steps"]),
            ([[3, 5], [3, 0], [3, 5]], ["empty-steps"], ["idle-instances", "unequal-steps"]),
            ([[3, 5], [3], [3, 5]], [], []),  # steps with other phases do other work
        )
    ):
        builder = NsysBuilder()
        _micro_steps(builder, parts)
        check = check_capture(read_trace(builder.write(tmp_path / f"{number}.sqlite")).attribution)
        assert (_codes(check, "failed"), sorted(_codes(check, "warning"))) == (failed, warned)
        if parts == [[3, 5], [3, 4], [3, 5]]:
            assert [finding.message.split(" over")[0] for finding in check.of("warning")] == [
                "step: kernels per instance range from 7 to 8",
                "backward (number 2 in its step): kernels per instance range from 4 to 5",
            ]


def test_instances_without_any_call_warn_whatever_another_process_calls(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for pid in (100, 200):
        builder.range("ffn", 0, 100, pid=pid, tid=pid)
        builder.range("ffn", 200, 300, pid=pid, tid=pid)
        builder.kernel(10, 5, pid=pid, tid=pid)
    builder.kernel(210, 5, pid=200, tid=200)
    (finding,) = _check(builder, tmp_path).findings
    assert (finding.code, finding.verdict) == ("idle-instances", "warning")
    assert finding.message.startswith("1 of 4 instances of 'ffn'")


def test_launches_inside_a_stream_capture_need_no_kernel(tmp_path: Path) -> None:
    builder = NsysBuilder()
    _steps(builder, [3, 3])
    builder.call(3000, name="cudaStreamBeginCapture_v10000")
    builder.call(3010)
    builder.call(3020, tid=101)
    builder.call(3030, name="cudaStreamEndCapture_v10000")
    check = _check(builder, tmp_path)
    assert _codes(check, "failed") == []
    (note,) = check.of("note")
    assert note.code == "stream-capture"
    assert note.message.startswith("2 launches")
    # Neither another process nor what comes after is exempt.
    builder.call(3010, pid=200, tid=200)
    builder.call(3040)
    builder.call(3050, name="cudaStreamBeginCapture_v10000")
    builder.call(3060)
    (tmp_path / "t.sqlite").unlink()
    check = _check(builder, tmp_path)
    assert "3 of 11 kernel launches have no kernel" in check.of("failed")[0].message


def test_a_skipped_optimizer_step_and_a_step_with_work_in_no_range_are_not_empty(tmp_path: Path) -> None:
    skipped, elsewhere = NsysBuilder(), NsysBuilder()
    for start, count, tid in ((0, 0, 100), (1000, 2, 200)):
        skipped.range("optimizer", start, start + 900)
        for kernel in range(count):
            skipped.kernel(start + 10 + kernel, 5)
        elsewhere.range("backward", start, start + 900)
        elsewhere.kernel(start + 10, 5, tid=tid)
    for name, builder in (("a", skipped), ("b", elsewhere)):
        assert not read_trace(builder.write(tmp_path / name)).self_check.failed


@pytest.mark.parametrize("duration", [2**61, 2**62])
def test_durations_with_a_sum_beyond_64_bits_are_refused(tmp_path: Path, duration: int) -> None:
    builder = NsysBuilder()
    _steps(builder, [2])
    for _ in range(4):
        builder.kernel(20, duration)
    with pytest.raises(TraceError, match="impossible times of kernels"):
        read_trace(builder.write(tmp_path / "t.sqlite"))


def test_work_of_a_data_loader_may_differ_between_steps(tmp_path: Path) -> None:
    """A loader that collates on the GPU, or whose batches come out of turn, does more in one step than in another."""
    for name, codes in (("data", []), ("metrics", ["idle-instances", "unequal-steps"])):
        builder = NsysBuilder()
        _steps(builder, [3, 3])
        builder.range(name, 500, 600)
        builder.range(name, 1_500, 1_600)
        builder.kernel(510, 5)
        (tmp_path / name).mkdir()
        assert sorted(_codes(_check(builder, tmp_path / name), "warning")) == codes
