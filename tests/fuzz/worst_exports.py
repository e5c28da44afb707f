"""The worst exports of under 10 MB: whole and well-formed, but as much of one thing as such a file can hold.

A mutant is damaged somewhere; these are damaged nowhere. Each is the most that n analysis can be given: ranges within
ranges, launches from as many threads, names as long as they get. ``count`` scales them: 300 is soon read, 200,000 gives
about 10 MB. `tests.fuzz.worst_traces` and `tests.fuzz.worst_snapshots` hold those of the other formats.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.nsys_builder import NsysBuilder, process_of

EXPORTS: dict[str, Callable[[int], NsysBuilder]] = {}
"""What a family holds the most of → what makes one of it."""


def _family(fill: Callable[[NsysBuilder, int], None]) -> Callable[[int], NsysBuilder]:
    """Return what makes an export by filling a builder, and note it in `EXPORTS`."""

    def make(count: int) -> NsysBuilder:
        builder = NsysBuilder()
        fill(builder, count)
        return builder

    EXPORTS[fill.__name__.replace("_", " ")] = make
    return make


def nest(builder: NsysBuilder, count: int, *, depth: int = 2_400, name: str = "range {}", kernels: int = 1) -> None:
    """Add ranges nested as deep as is read, again and again, every one with a name of its own."""
    at, depth = 0, min(depth, count)
    for first in range(0, count, depth):
        width = 2 * depth + kernels + 10
        for level in range(min(depth, count - first)):
            builder.range(name.format(first + level), at + level, at + width - level, registered=True)
        for number in range(kernels):
            builder.kernel(at + depth + number, 1)
        at += width


@_family
def nested_steps(builder: NsysBuilder, count: int) -> None:
    """One nest in a step, around kernels of the autograd thread, for which the main thread waits."""
    nest(builder, min(2_400, count))
    builder.name_thread("pt_autograd_0", 101)
    builder.range("step 0", -10, 10 * count)
    for n in range(count // 2):
        builder.kernel(2_400 + n, 1, tid=101)
    for row in builder.rows["NVTX_EVENTS"]:
        row["end"] += 5 * count


@_family
def long_repeated(builder: NsysBuilder, count: int) -> None:
    """One name as long as the file, of many nested ranges."""
    nest(builder, count // 4, name="n" * (count * 30))


@_family
def long_kernels(builder: NsysBuilder, count: int) -> None:
    """Kernels with distinct names of 4 kB."""
    for n in range(count // 100):
        builder.kernel(100 * n, 10, name=f"{n} " + "triton_red_fused_" + "_x<T>::" * 580)


@_family
def autograd_threads(builder: NsysBuilder, count: int) -> None:
    """Autograd threads that each launch one kernel while the main thread waits."""
    builder.range("backward", 0, 1000 * count)
    for n in range(count // 4):
        builder.name_thread("pt_autograd_0", 101 + n % 2**13)
        builder.call(100 * n, name="cudaStreamSynchronize_v3020", duration=50)
        builder.kernel(100 * n + 5, 10, tid=101 + n % 2**13)


@_family
def processes(builder: NsysBuilder, count: int) -> None:
    for n in range(count // 4):
        builder.range("step 0", 100 * n, 100 * n + 90, pid=100 + n % 4096, tid=100 + n % 4096)
        builder.kernel(100 * n + 5, 10, pid=100 + n % 4096, tid=100 + n % 4096)


@_family
def steps(builder: NsysBuilder, count: int) -> None:
    for n in range(count // 5):
        at = 1000 * n
        builder.ranges((f"step {n}", at, at + 900), ("forward", at + 10, at + 300), registered=True)
        builder.range("backward", at + 310, at + 600, registered=True)
        if n % 3:
            builder.range("optimizer", at + 610, at + 700, registered=True)
            builder.kernel(at + 20, 10)


@_family
def contexts(builder: NsysBuilder, count: int) -> None:
    for n in range(count // 5):
        at = 1000 * n
        builder.ranges((f"part{n}", at, at + 990), ("step 0", at + 1, at + 900), registered=True)
        builder.range("forward", at + 10, at + 300, registered=True)
        builder.kernel(at + 20, 10)


@_family
def overlapping(builder: NsysBuilder, count: int) -> None:
    """Ranges of a server: each begins before the last ones have ended."""
    for n in range(count // 3):
        builder.range(f"request {n % 5_000}", 10 * n, 10 * n + 24_000, end_tid=100)
        builder.kernel(10 * n + 5, 10)


@_family
def closed_elsewhere(builder: NsysBuilder, count: int) -> None:
    """Ranges that another thread ends, and around all kernels."""
    for n in range(min(count // 20, 2_000)):
        builder.range(f"request {n}", n, 10 * count - n, end_tid=101)
    for n in range(count // 3):
        builder.kernel(2_000 + n, 1, tid=100 + n % 2)


@_family
def stream_captures(builder: NsysBuilder, count: int) -> None:
    """Stream captures within captures, and launches without kernels in them."""
    for n in range(count // 5):
        builder.call(n, name="cudaStreamBeginCapture_v10000")
    for n in range(count // 5):
        builder.call(count + n)
    for n in range(count // 5):
        builder.call(3 * count + n, name="cudaStreamEndCapture_v10000")
    builder.kernel(9 * count, 10)


@_family
def waits(builder: NsysBuilder, count: int) -> None:
    builder.range("step 0", 0, 100 * count)
    for n in range(count // 4):
        builder.call(n, name="cudaDeviceSynchronize_v3020", duration=20 * count - 2 * n)
        builder.kernel(2 * count + 20 * n, 10)


@_family
def communications(builder: NsysBuilder, count: int) -> None:
    for rank in range(8):
        builder.range("step 0", 0, 100 * count, pid=100 + rank, tid=100 + rank)
    for n in range(count // 3):
        rank = n % 8
        builder.kernel(10 * n, 500, name="ncclDevKernel_AllReduce", pid=100 + rank, tid=100 + rank, device=rank)


@_family
def tables(builder: NsysBuilder, count: int) -> None:
    for n in range(count // 2):
        builder.add("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text=f"{n} events lost", globalPid=process_of(100 + n))
    builder.kernel(5, 10)
