"""The self-check: the verdicts that the captures' own README states, and each check on a capture made for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.self_check import KnownRun, SelfCheck, check_capture
from profkit.errors import TraceError
from tests.golden import check_text
from tests.nsys_builder import NsysBuilder, process_of


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


def test_lossy_captures_fail_and_what_they_hold_is_counted(captures: Path) -> None:
    lossy, whole = (read_trace(captures / f"{name}.nsys2023.sqlite") for name in ("lossy", "graph_whole"))
    assert _codes(lossy.self_check, "failed") == ["launch-without-kernel", "idle-instances"]
    assert "thin" in _codes(lossy.self_check, "warning")
    assert _codes(whole.self_check, "failed") == ["graph-launch-without-graph"]
    assert "244 of 244" in whole.self_check.of("failed")[0].message
    held = [(len(opened.trace.work), int(opened.trace.work.duration_ns.sum())) for opened in (lossy, whole)]
    assert held == [(22_326, 125_672_334), (1_220, 17_384_144)]


Row = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of the builder, and what it is given."""
LAUNCHES = (
    *("cudaLaunchKernel_v7000", "cudaLaunchKernelExC_v11060", "cuLaunchKernel", "cuLaunchKernelEx"),
    *("cuLaunchCooperativeKernel", "cudaLaunchCooperativeKernel_v9000", "cudaLaunchKernel_ptsz_v7000"),
)
OTHERS = ["cudaLaunchHostFunc_v10000", "cuKernelGetName", "cudaMemcpyAsync_v3020"]


def _call(start: int, name: str = "cudaLaunchKernel_v7000", **more: int) -> Row:
    return "call", (start,), {"name": name, **more}


def _range(name: str, start: int, end: int | None, **more: int) -> Row:
    return "range", (name, start, end), more


def _kernel(launch: int | None, duration: int, **more: int) -> Row:
    return "kernel", (launch, duration), more


def _diagnostic(severity: int, text: str, **more: int) -> Row:
    return "add", ("DIAGNOSTIC_EVENT",), {"timestamp": 0, "severity": severity, "text": text, **more}


def _parts(*steps: list[int]) -> list[Row]:
    """Return steps of several backward passes each, with these numbers of kernels."""
    rows = []
    for step, counts in enumerate(steps):
        rows.append(_range(f"step {step}", 1000 * step, 1000 * step + 900))
        for part, count in enumerate(counts):
            begin = 1000 * step + 100 * part + 10
            rows += [_range("backward", begin, begin + 90), _range("scale", begin + 1, begin + 80)]
            rows += [_kernel(begin + 5 + 5 * kernel, 2) for kernel in range(count)]
    return rows


def _twice(name: str, kernels: Sequence[Row]) -> list[Row]:
    return [_range(name, start, start + 900) for start in (0, 1000)] + list(kernels)


CONTEXTS = [_range("context 128", -1, 1950), _range("context 256", 1990, 3950)]
GRAPH = [_call(10, "cudaGraphLaunch_v10000"), _kernel(None, 5, correlation=1, start=20)]
FAILED = _call(500, "cuLaunchKernelEx", status=701)
CAPTURE = [
    _call(3000, "cudaStreamBeginCapture_v10000"),
    *(_call(3010), _call(3020, tid=101)),
    _call(3030, "cudaStreamEndCapture_v10000"),
]
# Neither another process nor what comes after is exempt.
BESIDE = [
    *(_call(3010, pid=200, tid=200), _call(3040)),
    *(_call(3050, "cudaStreamBeginCapture_v10000"), _call(3060)),
]
FFN = [
    row
    for pid in (100, 200)
    for row in (
        *(_range("ffn", start, start + 100, pid=pid, tid=pid) for start in (0, 200)),
        _kernel(10, 5, pid=pid, tid=pid),
    )
]
SAID = (
    (1, "Number of CUPTI events produced: 12"),
    (2, "Not all CUDA events might have been collected."),
    (2, "CPU clock is odd."),
    (2, "Some CUDA events were dropped."),
    (2, "Not all events might have been collected: CUPTI buffers overflowed."),
    (2, "3 IP samples were dropped."),
    (3, "CUPTI said CUPTI_ERROR_UNKNOWN."),
)
SILENT = "CUDA profiling might have not been started correctly."

CASES: dict[str, tuple[list[int], Sequence[Row]]] = {
    "equal steps": ([3, 3], ()),
    **{f"a lost {name}": ([2], [_call(500, name)]) for name in (*LAUNCHES, *OTHERS)},
    # A launch without its kernel fails unless the call itself failed.
    "a call that failed": ([3, 3], [FAILED]),
    "another one that did not": ([3, 3], [FAILED, _call(510, "cuLaunchKernelEx")]),
    # Graph launches need graph rows or kernels.
    "a graph": ([], GRAPH),
    "a graph without rows": ([], [*GRAPH, _call(40, "cudaGraphLaunch_v10000")]),
    "a kernel long before its launch": ([], [_kernel(5_000_000, 3, start=10)]),
    "a kernel that outlasts the capture": ([2], [_kernel(500, 10**14)]),
    # As a profiler that starts during work sees them, or all.
    "a kernel without its launch": ([2], [_kernel(None, 3, start=800)]),
    "kernels without their launches": ([], [_kernel(None, 3, start=10 * at) for at in range(10)]),
    "an open range": ([2], [_range("forward", 700, None)]),
    "an empty step": ([3, 0, 3], ()),
    # Warm-up steps do not count; steps of different contexts need not be equal.
    "unequal steps": ([9, 3, 3], ()),
    "the same in a warm-up": ([9, 3, 3], [_range("warmup", -1, 950)]),
    "two contexts": ([3, 3, 9, 9], CONTEXTS),
    "unequal steps of a context": ([3, 4, 9, 9], CONTEXTS),
    "what the profiler says": ([2], [_diagnostic(*one) for one in SAID]),
    # Inductor's compilers are processes too, and CUDA is not started in them.
    "a silent process": ([2], [_diagnostic(2, SILENT, globalPid=process_of(pid)) for pid in (100, 4711)]),
    "rows that end before they start": (
        [2],
        [_kernel(5_000_000, -3), _range("backwards", 50, 40), _range("kept", 60, 70, int64Value=7)],
    ),
    # Parts of a step are compared with the same parts of other steps; steps with other phases do other work.
    "equal parts": ([], _parts([3, 5, 0], [3, 5, 0])),
    "unequal parts": ([], _parts([3, 5], [3, 4], [3, 5])),
    "an empty part": ([], _parts([3, 5], [3, 0], [3, 5])),
    "a missing part": ([], _parts([3, 5], [3], [3, 5])),
    # Instances without any call, whatever another process calls.
    "idle instances": ([], [*FFN, _kernel(210, 5, pid=200, tid=200)]),
    # Launches inside a stream capture need no kernel.
    "a stream capture": ([3, 3], CAPTURE),
    "launches beside a stream capture": ([3, 3], [*CAPTURE, *BESIDE]),
    # Neither a skipped optimizer step nor one with work in no range is empty.
    "a skipped optimizer": ([], _twice("optimizer", [_kernel(1010, 5), _kernel(1011, 5)])),
    "a thread without ranges": ([], _twice("backward", [_kernel(10, 5), _kernel(1010, 5, tid=200)])),
    # A loader that collates on the GPU, or whose batches come out of turn, does more in one step than in another.
    **{
        f"work in {name} of one step": (
            [3, 3],
            [_range(name, 500, 600), _range(name, 1_500, 1_600), _kernel(510, 5)],
        )
        for name in ("data", "metrics")
    },
}


def test_each_capture_has_its_findings(tmp_path: Path) -> None:
    said = []
    for number, (name, (steps, rows)) in enumerate(CASES.items()):
        builder = NsysBuilder()
        _steps(builder, steps)
        for method, positional, named in rows:
            getattr(builder, method)(*positional, **named)
        opened = read_trace(builder.write(tmp_path / f"{number}.sqlite"))
        said += ["", f"# {name}", *_say(check_capture(opened.attribution))]
        if name == "a silent process":
            known = KnownRun(steps=1, layers=None, even=False)
            said += ["in a run that is known:", *_say(check_capture(opened.attribution, "", known))]
        if name == "equal steps":
            log = "Processing...\nErrors occurred while processing the raw events.\n"
            said += ["by the importer's log:", *_say(check_capture(opened.attribution, log))]
        if name == "rows that end before they start":
            trace = opened.trace
            assert (trace.work.end_ns >= trace.work.start_ns).all()
            names = {trace.names[trace.ranges.name[at]]: number for at, number in trace.ranges.payload.items()}
            assert names == {"kept": 7}
    check_text("self-check", "\n".join(said).lstrip() + "\n")


def _say(check: SelfCheck) -> list[str]:
    return [f"{finding.verdict} {finding.code}: {finding.message}" for finding in check.findings]


@pytest.mark.parametrize("duration", [2**61, 2**62])
def test_durations_with_a_sum_beyond_64_bits_are_refused(tmp_path: Path, duration: int) -> None:
    builder = NsysBuilder()
    _steps(builder, [2])
    for _ in range(4):
        builder.kernel(20, duration)
    with pytest.raises(TraceError, match="impossible times of kernels"):
        read_trace(builder.write(tmp_path / "t.sqlite"))
