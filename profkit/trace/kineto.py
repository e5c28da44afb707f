"""Traces of torch.profiler (Kineto), as Chrome JSON, plain or gzipped, from profkit or from anyone's script.

What counts: rows of category ``kernel`` on a GPU, ``gpu_mem*`` beside them; without any kernel, the CPU's ``cpu_op``
rows by self time. Ranges are ``user_annotation`` rows, never ``gpu_user_annotation``, which is Kineto's own guess at
the same ranges on the GPU. PyTorch 1.8 to 1.11 wrote ``Kernel``, ``Memcpy``, ``Memset``, ``Runtime`` and ``Operator``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import Calls, Ints, Ranges, Trace, Work
from profkit.trace.kineto_file import load_chrome_trace
from profkit.trace.kineto_gpu import BACKWARD_NODE, GpuReader, find_origins
from profkit.trace.kineto_rows import Event, HostRows, Reading, parse_integer, parse_interval, sort_events
from profkit.trace.operators import OperatorForest

_ROUNDING_NS = 1000  # older versions wrote whole microseconds
_AUTOGRAD_THREAD = "pt_autograd"
_THREAD_NAME = re.compile(r"thread -?\d+ \((.*)\)\s*")


def read_kineto(path: Path) -> Trace:
    """Return a torch.profiler trace as columns; `Trace.measure` says whether it holds GPU or CPU work.

    Work with impossible times (missing, negative, or 0 for start and duration both) is left out and named in an error
    `Diagnostic`; other rows of unexpected shape are ignored.

    Raises:
        TraceError: the file cannot be read, or holds nothing that torch.profiler records.
    """
    header, events = load_chrome_trace(path)
    rows = sort_events(events)
    if not set(rows) - {"flow", "metadata"}:
        raise TraceError(f"{path}: a Chrome trace, but it holds no operator, kernel or annotation of torch.profiler")
    copied = bool(rows["memcpy"] or rows["memset"])
    has_kernels = any(parse_interval(event) is not None for event in rows["kernel"])
    on_gpu = has_kernels or bool(not rows["operator"] and (copied or rows["kernel"]))
    reading = Reading()
    operators = reading.host_rows(rows["operator"], work="" if on_gpu else "CPU operators")
    call_rows = reading.host_rows(rows["call"])
    ranges = _read_ranges(reading, reading.host_rows(rows["annotation"]), (operators, call_rows))
    forest = OperatorForest(operators.start_ns, operators.end_ns, operators.thread)
    gpu = GpuReader(reading, call_rows)
    work, copies = gpu.work(rows["kernel"]), gpu.copies(rows["memcpy"], rows["memset"])
    gpu.note_ambiguous()
    if on_gpu:
        launched_in = forest.innermost_at(work.launch_ns, work.launch_thread)
        sequence, origins = find_origins(reading, rows["flow"], operators, forest, launched_in)
        # One more entry, so that a launch outside every operator (-1) finds no name.
        work = replace(work, sequence=sequence, operator=np.append(operators.name, -1)[launched_in])
    else:
        work, origins = _cpu_work(operators, forest.self_ns), None
        _note_missing_gpu(reading, call_rows, len(copies))
    return Trace(
        path=str(path),
        source="kineto",
        product=_product(header),
        measure="gpu-kernel" if on_gpu else "cpu-operator",
        work=work,
        copies=copies,
        calls=_build_calls(call_rows, gpu),
        ranges=ranges,
        thread_names=_thread_names(rows["metadata"], reading, operators, forest.parent),
        process_ids={pid: pid for pid in sorted({*reading.processes(), *work.process.tolist()})},
        main_threads=frozenset(thread for (pid, tid), thread in reading.threads.items() if pid == tid),
        gpus=_gpus(header),
        diagnostics=tuple(reading.diagnostics),
        origins=origins,
        has_kernel_table=has_kernels or bool(operators.events),
        notes=tuple(reading.notes),
        names=reading.names,
        ranks=_ranks(header, reading),
        clock_base_ns=parse_integer(header.get("baseTimeNanoseconds")) or 0,
    )


def _read_ranges(reading: Reading, rows: HostRows, others: tuple[HostRows, ...]) -> Ranges:
    """Return the annotations; one in which the profiler stopped ends with the capture."""
    last = max((int(table.end_ns.max()) for table in (rows, *others) if table.events), default=0)
    end_ns = _ends_within_parents(rows.start_ns, np.where(rows.is_open, last, rows.end_ns), rows.thread)
    return Ranges(
        name=rows.name,
        domain=np.full(len(rows.events), reading.intern(""), dtype=np.int64),
        start_ns=rows.start_ns,
        end_ns=end_ns,
        process=rows.process,
        thread=rows.thread,
        end_thread=rows.thread,
        is_open=rows.is_open,
    )


def _ends_within_parents(start_ns: Ints, end_ns: Ints, thread: Ints) -> Ints:
    """Return the ends, those moved back that lie past the end of the range around them by no more than rounding."""
    ends: list[int] = end_ns.tolist()
    open_now: dict[int, list[int]] = {}
    for index in np.lexsort((-end_ns, start_ns)).tolist():
        around = open_now.setdefault(int(thread[index]), [])
        while around and ends[around[-1]] <= start_ns[index]:
            around.pop()
        if around and 0 < ends[index] - ends[around[-1]] <= _ROUNDING_NS:
            ends[index] = ends[around[-1]]
        around.append(index)
    return np.array(ends, dtype=np.int64)


def _build_calls(rows: HostRows, gpu: GpuReader) -> Calls:
    return Calls(
        name=rows.name,
        start_ns=rows.start_ns,
        end_ns=rows.end_ns,
        thread=rows.thread,
        process=rows.process,
        correlation=gpu.correlation,
        has_work=gpu.calls_with_work(),
        failed=np.zeros(len(rows.events), dtype=np.bool_),  # Kineto does not keep what a call returned
    )


def _cpu_work(operators: HostRows, self_ns: Ints) -> Work:
    """Return the CPU's operators as work that launches itself; their duration is their self time."""
    zeros = np.zeros(len(operators.events), dtype=np.int64)
    return Work(
        name=operators.name,
        start_ns=operators.start_ns,
        end_ns=operators.end_ns,
        duration_ns=self_ns,
        device=zeros,
        stream=zeros,
        process=operators.process,
        launch_ns=operators.start_ns,
        launch_thread=operators.thread,
        is_graph=zeros.astype(np.bool_),
    )


def _note_missing_gpu(reading: Reading, calls: HostRows, copy_count: int) -> None:
    launches = sum("Launch" in reading.names[name] for name in calls.name.tolist())
    if launches or copy_count:
        what = f"{copy_count} GPU copies but no kernel" if copy_count else f"{launches} launches but no GPU work"
        reading.notes.append(
            f"the trace holds {what}, so CPU operators are measured; record with ProfilerActivity.CUDA to measure"
            " kernels"
        )


def _thread_names(events: list[Event], reading: Reading, operators: HostRows, parent: Ints) -> dict[int, str]:
    """Return the threads' own names: ``pt_autograd_0`` of ``thread 1385 (pt_autograd_0)``.

    A thread may be named twice, the second time after its process; then the other name stands. Older traces know only
    the process's name: a thread that runs nothing but autograd nodes then gets the autograd engine's.
    """
    process_names: dict[int | None, str] = {}
    found: dict[int, str] = {}
    for event in events:
        arguments = event.get("args")
        name = arguments.get("name") if isinstance(arguments, dict) else None
        if isinstance(name, str) and event.get("name") == "process_name":
            process_names[parse_integer(event.get("pid"))] = name
        if isinstance(name, str) and event.get("name") == "thread_name":
            place = reading.known_thread_of(event)
            inner = _THREAD_NAME.fullmatch(name)
            own = inner.group(1) if inner else name.strip()
            if place is not None and found.get(place[1]) in (None, process_names.get(place[0])):
                found[place[1]] = own
    for thread in _threads_of_nodes_alone(reading, operators, parent):
        if not found.get(thread, "").startswith(_AUTOGRAD_THREAD):
            found[thread] = _AUTOGRAD_THREAD
    return found


def _threads_of_nodes_alone(reading: Reading, operators: HostRows, parent: Ints) -> set[int]:
    """Return the threads whose every outermost operator is a node of the autograd engine."""
    nodes, others = set[int](), set[int]()
    for index in np.flatnonzero(parent < 0).tolist():
        is_node = reading.names[operators.name[index]].startswith(BACKWARD_NODE)
        (nodes if is_node else others).add(int(operators.thread[index]))
    return nodes - others


def _gpus(header: dict[str, Any]) -> tuple[str, ...]:
    devices = header.get("deviceProperties")
    if not isinstance(devices, list):
        return ()
    return tuple(str(device.get("name", "unnamed GPU")) for device in devices if isinstance(device, dict))


def _ranks(header: dict[str, Any], reading: Reading) -> dict[int, int]:
    """Return the rank of the process, as torch.profiler writes it once torch.distributed is set up."""
    distributed, processes = header.get("distributedInfo"), reading.processes()
    rank = parse_integer(distributed.get("rank")) if isinstance(distributed, dict) else None
    return {processes[0]: rank} if rank is not None and len(processes) == 1 else {}


def _product(header: dict[str, Any]) -> str:
    """Return what wrote the trace and where: its schema, CUDA version and rank, as far as the file says so."""
    told = []
    schema, cuda = parse_integer(header.get("schemaVersion")), parse_integer(header.get("cuda_runtime_version"))
    if schema is not None:
        told.append(f"trace schema {schema}")
    if cuda:
        told.append(f"CUDA {cuda // 1000}.{cuda % 1000 // 10}")
    distributed = header.get("distributedInfo")
    if isinstance(distributed, dict):
        rank, size = parse_integer(distributed.get("rank")), parse_integer(distributed.get("world_size"))
        if rank is not None and size is not None:
            told.append(f"rank {rank} of {size}")
    return f"PyTorch Kineto ({', '.join(told)})" if told else "PyTorch Kineto"
