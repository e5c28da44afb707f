"""A slow second method for the backward time of modules: torch.profiler's own operator links, from the trace's JSON.

Each backward operator carries the sequence number of the forward operator that made its node. It belongs to the module
in whose range that forward operator began. What carries no number (an AccumulateGrad) belongs to the operator before.
Nothing of profkit's reading is used but the names of the ranges.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

ENGINE = "autograd::engine::evaluate_function: "
_PHASES = ("forward", "loss")
Event = dict[str, Any]


def backward_ns_by_forward_path(trace: Path) -> dict[str, int]:
    """Return the time of backward work by the path, below its phase, of the module that ran the forward operator.

    Work is kernels, or operators where there are none; of those the engine's own time around an operator counts
    nowhere, since it begins before the module's range can.
    """
    events = [event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if "dur" in event]
    operators = sorted((event for event in events if event["cat"] == "cpu_op"), key=lambda event: event["ts"])
    ranges = [event for event in events if event["cat"] == "user_annotation" and "#" not in event["name"]]
    engine = [event for event in operators if event["name"].startswith(ENGINE)]
    makers = {
        event["args"]["Sequence number"]: event
        for event in operators
        if event["args"].get("Fwd thread id") == 0 and not event["name"].startswith(ENGINE)
    }
    work = _launches(events) or [(one, one) for one in operators if not one["name"].startswith(ENGINE)]
    found: dict[str, int] = defaultdict(int)
    paths: dict[Any, str] = {}
    for call in engine:
        node = next((one for one in operators if _holds(call, one) and call["name"] == ENGINE + one["name"]), None)
        maker = makers.get(node["args"].get("Sequence number")) if node is not None else None
        path = paths.get(call["tid"], "")
        if maker is not None and not call["name"].endswith("AccumulateGrad"):
            path = paths[call["tid"]] = _path_below_phase([one["name"] for one in ranges if _holds(one, maker)])
        found[path] += _total_ns([pair for pair in work if _holds(call, pair[0])])
    backward = [one for one in ranges if one["name"] == "backward"]
    found[""] += _total_ns(
        [
            (launch, one)
            for launch, one in work
            if any(_holds(around, launch) for around in backward) and not any(_holds(call, launch) for call in engine)
        ]
    )
    return {path: ns for path, ns in found.items() if ns}


def _launches(events: list[Event]) -> list[tuple[Event, Event]]:
    """Return each kernel, and before it the call that launched it."""
    calls = {event["args"]["correlation"]: event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")}
    return [(calls[one["args"]["correlation"]], one) for one in events if one["cat"] == "kernel"]


def _total_ns(work: list[tuple[Event, Event]]) -> int:
    """Return how long the work ran, an operator within another counted once."""
    operators = [one for at, one in work if at is one]
    within = [one for one in operators if any(_holds(other, one) for other in operators if other is not one)]
    return sum(_ns(one["dur"]) for _, one in work if not any(one is other for other in within))


def _holds(outer: Event, inner: Event) -> bool:
    return (
        outer["tid"] == inner["tid"]
        and outer["ts"] <= inner["ts"]
        and _ns(inner["ts"]) + _ns(inner["dur"]) <= _ns(outer["ts"]) + _ns(outer["dur"])
    )


def _path_below_phase(names: list[str]) -> str:
    """Return the ranges' names, outermost first as the trace lists them, that come after the last phase among them."""
    phases = [at for at, name in enumerate(names) if name in _PHASES]
    return "/".join(names[phases[-1] + 1 :]) if phases else ""


def _ns(microseconds: float) -> int:
    return round(Fraction(str(microseconds)) * 1000)
