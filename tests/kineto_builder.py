"""Small torch.profiler traces: rows as Kineto writes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from profkit.trace.columns import Trace
from profkit.trace.kineto import read_kineto

PID = 100
TID = 100
AUTOGRAD = 117


def row(cat: str, name: str, ts: Any, dur: Any, tid: Any = TID, *, pid: Any = PID, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: Any, dur: Any, correlation: int, **more: Any) -> dict[str, Any]:
    return row("kernel", name, ts, dur, 7, pid=0, device=0, stream=7, correlation=correlation, **more)


def launch(ts: Any, correlation: int, tid: int = TID, name: str = "cudaLaunchKernel", pid: int = PID) -> dict[str, Any]:
    category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
    return row(category, name, ts, 1, tid, pid=pid, correlation=correlation)


def flow(phase: str, flow_id: int, ts: Any, tid: int) -> dict[str, Any]:
    return {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": flow_id, "pid": PID, "tid": tid, "ts": ts}


def thread_name(tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "ts": 0, "args": {"name": name}}


def written(folder: Path, events: list[Any], name: str = "trace.json", **header: Any) -> Path:
    path = folder / name
    content = json.dumps({"schemaVersion": 1, **header, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    return path


def read(folder: Path, events: list[Any], **header: Any) -> Trace:
    return read_kineto(written(folder, events, **header))


def work_names(trace: Trace) -> list[str]:
    return [trace.names[i] for i in trace.work.name]


def backward_events() -> list[dict[str, Any]]:
    node = "autograd::engine::evaluate_function: "
    return [
        row("cpu_op", "aten::mul", 10, 5),
        row("cpu_op", "aten::mm", 20, 5),
        flow("s", 1, 10, TID),
        flow("s", 2, 20, TID),
        row("cpu_op", node + "MmBackward0", 100, 20, AUTOGRAD),
        row("cpu_op", "MmBackward0", 102, 10, AUTOGRAD),
        flow("f", 2, 102, AUTOGRAD),
        row("cpu_op", "aten::mm", 103, 8, AUTOGRAD),
        launch(104, 1, AUTOGRAD),
        row("cpu_op", "aten::add_", 114, 4, AUTOGRAD),  # the engine sums gradients: in the node, not in the operator
        launch(115, 2, AUTOGRAD),
        row("cpu_op", node + "MulBackward0", 130, 20, AUTOGRAD),
        row("cpu_op", "MulBackward0", 131, 10, AUTOGRAD),
        flow("f", 1, 131, AUTOGRAD),
        launch(132, 3, AUTOGRAD),
        row("cpu_op", node + "torch::autograd::AccumulateGrad", 160, 20, AUTOGRAD),
        launch(165, 4, AUTOGRAD),
        launch(190, 5, AUTOGRAD),
        launch(21, 6),
        *(kernel(f"k{i}", 200 + 10 * i, 5, i) for i in range(1, 7)),
        flow("s", 9, 30, TID),  # a flow that ends nowhere
    ]
