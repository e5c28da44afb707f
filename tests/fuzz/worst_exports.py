"""The worst exports of under 10 MB: whole and well-formed, but as much of one thing as such a file can hold.

A mutant is damaged somewhere; these are damaged nowhere. Each is the most that one analysis can be given: ranges within
ranges, launches from as many threads, names as long as they get. ``count`` scales them: 300 is soon read, 200,000 gives
about 10 MB. `tests.fuzz.worst_traces` and `tests.fuzz.worst_snapshots` hold those of the other formats.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.nsys_builder import NsysBuilder, process_of

Maker = Callable[[int], NsysBuilder]


def nested(count: int, *, depth: int = 2_400, name: str = "range {}", kernels: int = 1) -> NsysBuilder:
    """Return ranges nested as deep as is read, again and again, every one with a name of its own."""
    builder = NsysBuilder()
    at, depth = 0, min(depth, count)
    for first in range(0, count, depth):
        width = 2 * depth + kernels + 10
        for level in range(min(depth, count - first)):
            builder.range(name.format(first + level), at + level, at + width - level, registered=True)
        for number in range(kernels):
            builder.kernel(at + depth + number, 1)
        at += width
    return builder


def nested_alike(count: int) -> NsysBuilder:
    """Return the same nest of ranges again and again."""
    builder = nested(count)
    for one in builder.rows["NVTX_EVENTS"]:
        one["textId"] = builder.string("layer")
    return builder


def nested_kernels(count: int) -> NsysBuilder:
    """Return one nest of ranges around all kernels."""
    return nested(min(2_400, count), kernels=count // 2)


def nested_steps(count: int) -> NsysBuilder:
    """Return one nest in a step, around kernels of the autograd thread, for which the main thread waits."""
    builder = nested(min(2_400, count))
    builder.name_thread("pt_autograd_0", 101)
    builder.range("step 0", -10, 10 * count)
    for one in range(count // 2):
        builder.kernel(2_400 + one, 1, tid=101)
    for one in builder.rows["NVTX_EVENTS"]:
        one["end"] += 5 * count
    return builder


def long_nested(count: int) -> NsysBuilder:
    """Return nested ranges with long names."""
    return nested(min(2_400, count), name="{}" + "n" * (count // 80))


def long_repeated(count: int) -> NsysBuilder:
    """Return one name as long as the file, of many nested ranges."""
    builder = nested(count // 4)
    name = builder.string("n" * (count * 30))
    for one in builder.rows["NVTX_EVENTS"]:
        one["textId"] = name
    return builder


def long_kernels(count: int) -> NsysBuilder:
    """Return kernels with distinct names of 4 kB."""
    builder = NsysBuilder()
    for one in range(count // 100):
        builder.kernel(100 * one, 10, name=f"{one} " + "triton_red_fused_" + "_x<T>::" * 580)
    return builder


def long_kernel_parts(count: int) -> NsysBuilder:
    """Return kernels with distinct names of many words."""
    builder = NsysBuilder()
    for one in range(count // 100):
        builder.kernel(100 * one, 10, name=f"void k{one}<" + "a::b<(int)1, c>, " * 240 + ">(int)")
    return builder


def kernel_names(count: int) -> NsysBuilder:
    """Return kernels each with a short name of its own."""
    builder = NsysBuilder()
    for one in range(count // 3):
        builder.kernel(100 * one, 10, name=f"kernel_{one}")
    return builder


def threads(count: int) -> NsysBuilder:
    """Return threads that each open a range and launch a kernel."""
    builder = NsysBuilder()
    for one in range(count // 4):
        builder.range("forward", 100 * one, 100 * one + 90, tid=100 + one % 2**14)
        builder.kernel(100 * one + 5, 10, tid=100 + one % 2**14)
    return builder


def autograd_threads(count: int) -> NsysBuilder:
    """Return autograd threads that each launch one kernel while the main thread waits."""
    builder = NsysBuilder()
    builder.range("backward", 0, 1000 * count)
    for one in range(count // 4):
        builder.name_thread("pt_autograd_0", 101 + one % 2**13)
        builder.call(100 * one, name="cudaStreamSynchronize_v3020", duration=50)
        builder.kernel(100 * one + 5, 10, tid=101 + one % 2**13)
    return builder


def processes(count: int) -> NsysBuilder:
    """Return processes that each open a range and launch a kernel."""
    builder = NsysBuilder()
    for one in range(count // 4):
        builder.range("step 0", 100 * one, 100 * one + 90, pid=100 + one % 4096, tid=100 + one % 4096)
        builder.kernel(100 * one + 5, 10, pid=100 + one % 4096, tid=100 + one % 4096)
    return builder


def devices(count: int) -> NsysBuilder:
    """Return as many GPUs as are read, and ranges on one after the other."""
    builder = NsysBuilder()
    for one in range(count // 4):
        builder.range("step 0", 100 * one, 100 * one + 90)
        builder.kernel(100 * one + 5, 10, device=one % 256)
    return builder


def devices_in_ranges(count: int) -> NsysBuilder:
    """Return ranges that each work on many GPUs."""
    builder = nested(min(2_400, count))
    for one in builder.rows["NVTX_EVENTS"]:
        one["end"] += count * 10
    for one in range(count // 3):
        builder.kernel(5_000 + one, 1, device=one % 256)
    return builder


def steps(count: int) -> NsysBuilder:
    """Return steps of a forward, a backward and an optimizer range, with kernels here and there."""
    builder = NsysBuilder()
    for one in range(count // 5):
        at = 1000 * one
        builder.range(f"step {one}", at, at + 900, registered=True)
        builder.range("forward", at + 10, at + 300, registered=True)
        builder.range("backward", at + 310, at + 600, registered=True)
        if one % 3:
            builder.range("optimizer", at + 610, at + 700, registered=True)
            builder.kernel(at + 20, 10)
    return builder


def steps_of_names(count: int) -> NsysBuilder:
    """Return one step in which every phase and layer has a name of its own."""
    builder = NsysBuilder()
    builder.range("step 0", 0, 1000 * count)
    for one in range(count // 4):
        builder.range(f"layer{one}", 1000 * one, 1000 * one + 900, registered=True)
        builder.kernel(1000 * one + 20, 10)
    return builder


def contexts(count: int) -> NsysBuilder:
    """Return steps, each in a range of another name."""
    builder = NsysBuilder()
    for one in range(count // 5):
        at = 1000 * one
        builder.range(f"part{one}", at, at + 990, registered=True)
        builder.range("step 0", at + 1, at + 900, registered=True)
        builder.range("forward", at + 10, at + 300, registered=True)
        builder.kernel(at + 20, 10)
    return builder


def overlapping(count: int) -> NsysBuilder:
    """Return ranges of a server: each begins before the last ones have ended."""
    builder = NsysBuilder()
    for one in range(count // 3):
        builder.range(f"request {one % 5_000}", 10 * one, 10 * one + 24_000, end_tid=100)
        builder.kernel(10 * one + 5, 10)
    return builder


def closed_elsewhere(count: int) -> NsysBuilder:
    """Return ranges that another thread ends, and around all kernels."""
    builder = NsysBuilder()
    for one in range(min(count // 20, 2_000)):
        builder.range(f"request {one}", one, 10 * count - one, end_tid=101)
    for one in range(count // 3):
        builder.kernel(2_000 + one, 1, tid=100 + one % 2)
    return builder


def domains(count: int) -> NsysBuilder:
    """Return ranges, each in a domain of its own."""
    builder = NsysBuilder()
    for one in range(count // 4):
        builder.domain(one + 1, f"d{one}")
        builder.range("r", 100 * one, 100 * one + 90, domain=one + 1)
    builder.kernel(5, 10)
    return builder


def stream_captures(count: int) -> NsysBuilder:
    """Return stream captures within captures, and launches without kernels in them."""
    builder = NsysBuilder()
    for one in range(count // 5):
        builder.call(one, name="cudaStreamBeginCapture_v10000")
    for one in range(count // 5):
        builder.call(count + one)
    for one in range(count // 5):
        builder.call(3 * count + one, name="cudaStreamEndCapture_v10000")
    builder.kernel(9 * count, 10)
    return builder


def waits(count: int) -> NsysBuilder:
    """Return nested calls that synchronise, and kernels meanwhile."""
    builder = NsysBuilder()
    builder.range("step 0", 0, 100 * count)
    for one in range(count // 4):
        builder.call(one, name="cudaDeviceSynchronize_v3020", duration=20 * count - 2 * one)
        builder.kernel(2 * count + 20 * one, 10)
    return builder


def streams(count: int) -> NsysBuilder:
    """Return kernels that all overlap, each on a stream of its own."""
    builder = NsysBuilder()
    builder.range("step 0", 0, 100 * count)
    for one in range(count // 3):
        builder.kernel(one, 50 * count - 2 * one)
        builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["streamId"] = one
    return builder


def empty_phases(count: int) -> NsysBuilder:
    """Return phases without work among as many with it."""
    builder = NsysBuilder()
    for one in range(count // 6):
        at = 100 * one
        builder.range(f"step {one}", at, at + 99, registered=True)
        builder.range("forward", at + 1, at + 50, registered=True)
        if one % 2:
            builder.kernel(at + 10, 5)
    return builder


def communications(count: int) -> NsysBuilder:
    """Return ranks whose collectives overlap."""
    builder = NsysBuilder()
    for rank in range(8):
        builder.range("step 0", 0, 100 * count, pid=100 + rank, tid=100 + rank)
    for one in range(count // 3):
        rank = one % 8
        builder.kernel(10 * one, 500, name="ncclDevKernel_AllReduce", pid=100 + rank, tid=100 + rank, device=rank)
    return builder


def tables(count: int) -> NsysBuilder:
    """Return diagnostics, each of its own text and process."""
    builder = NsysBuilder()
    for one in range(count // 2):
        builder.add(
            "DIAGNOSTIC_EVENT", timestamp=1, severity=2, text=f"{one} events lost", globalPid=process_of(100 + one)
        )
    builder.kernel(5, 10)
    return builder


EXPORTS: dict[str, Maker] = {
    one.__name__.replace("_", " "): one
    for one in (
        nested, nested_alike, nested_kernels, nested_steps, long_nested, long_repeated, long_kernels, long_kernel_parts,
        kernel_names, threads, autograd_threads, processes, devices, devices_in_ranges, steps, steps_of_names, contexts,
        overlapping, closed_elsewhere, domains, stream_captures, waits, streams, empty_phases, communications, tables,
    )
}  # fmt: skip
