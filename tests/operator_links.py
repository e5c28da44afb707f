"""A slow second method for the backward time of modules: torch.profiler's own operator links, from the trace's JSON.

Each backward operator carries the sequence number of the forward operator that made its node, and a number for the
thread that ran it: each thread counts for itself, and with a GPU a checkpointed forward runs again on autograd's
thread. It belongs to the module in whose range that forward operator began. What carries no number (an AccumulateGrad)
belongs to the operator before. Nothing of profkit's reading is used, only the names of its ranges.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from profkit.names import BACKWARD, FORWARD, LOSS, MODEL, RECOMPUTE

ENGINE = "autograd::engine::evaluate_function: "
Event = dict[str, Any]


def backward_ns_by_forward_path(trace: Path) -> dict[str, int]:
    """Return the time of backward work by the path, below its phase, of the module that ran the forward operator.

    Work is kernels, or operators where there are none; of those the engine's own time around an operator counts
    nowhere, since it begins before the module's range can.
    """
    events = _read_events(trace)
    operators = sorted((event for event in events if event["cat"] == "cpu_op"), key=lambda event: event["start"])
    ranges = [event for event in events if event["cat"] == "user_annotation" and "#" not in event["name"]]
    engine = [event for event in operators if event["name"].startswith(ENGINE)]
    makers = {
        (event["tid"], event["args"]["Sequence number"]): event
        for event in operators
        if event["args"].get("Fwd thread id") == 0 and not event["name"].startswith(ENGINE)
    }
    paths: dict[int, str] = {}
    last: dict[Any, str] = {}
    nodes = [
        next((one for one in operators if _holds(call, one) and call["name"] == ENGINE + one["name"]), None)
        for call in engine
    ]
    threads = _threads_by_number([node for node in nodes if node is not None], makers)
    for call, node in zip(engine, nodes, strict=True):
        maker = makers.get(_maker_of(node, threads)) if node is not None else None
        if maker is not None and not call["name"].endswith("AccumulateGrad"):
            last[call["tid"]] = _forward_path([one["name"] for one in ranges if _holds(one, maker)])
        paths[id(call)] = last.get(call["tid"], "")
    found: dict[str, int] = defaultdict(int)
    for launch, ns in _launches(events) or _own_times(operators):
        around = [one["name"] for one in ranges if _holds(one, launch)]
        calls = [one for one in engine if _holds(one, launch)]
        if RECOMPUTE in around:
            found["/".join(around[around.index(RECOMPUTE) :])] += ns
        elif calls or BACKWARD in around:
            found[paths[id(calls[-1])] if calls else ""] += ns
    return {path: ns for path, ns in found.items() if ns}


def _maker_of(node: Event, threads: dict[int, Any]) -> tuple[Any, int | None]:
    return threads.get(node["args"].get("Fwd thread id", 0)), node["args"].get("Sequence number")


def _threads_by_number(nodes: list[Event], makers: dict[tuple[Any, int], Event]) -> dict[int, Any]:
    """Return which thread each "Fwd thread id" means: the one whose operators most of its nodes are named after."""
    fits: dict[int, Counter[Any]] = defaultdict(Counter)
    for node in nodes:
        for thread in {thread for thread, _ in makers}:
            maker = makers.get((thread, node["args"].get("Sequence number", -1)))
            named = maker is not None and node["name"].lower().startswith(maker["name"].removeprefix("aten::").lower())
            fits[node["args"].get("Fwd thread id", 0)][thread] += named
    return {number: found.most_common(1)[0][0] for number, found in fits.items() if found}


def _read_events(trace: Path) -> list[Event]:
    """Return the trace's events with their ``start`` and ``end`` in whole nanoseconds."""
    events = [event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if "dur" in event]
    for event in events:
        event["start"] = round(Fraction(str(event["ts"])) * 1000)
        event["end"] = event["start"] + round(Fraction(str(event["dur"])) * 1000)
    return events


def _launches(events: list[Event]) -> list[tuple[Event, int]]:
    """Return the call that launched each kernel, and how long the kernel ran."""
    calls = {event["args"]["correlation"]: event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")}
    return [(calls[one["args"]["correlation"]], one["end"] - one["start"]) for one in events if one["cat"] == "kernel"]


def _own_times(operators: list[Event]) -> list[tuple[Event, int]]:
    """Return operators, sorted by time, and how long each ran without those directly in it; the engine's own not."""
    own = {id(one): one["end"] - one["start"] for one in operators}
    open_ones: list[Event] = []
    for one in operators:
        while open_ones and not _holds(open_ones[-1], one):
            open_ones.pop()
        if open_ones:
            own[id(open_ones[-1])] -= one["end"] - one["start"]
        open_ones.append(one)
    return [(one, own[id(one)]) for one in operators if not one["name"].startswith(ENGINE)]


def _holds(outer: Event, inner: Event) -> bool:
    return outer["start"] <= inner["start"] and inner["end"] <= outer["end"] and outer["tid"] == inner["tid"]


def _forward_path(names: list[str]) -> str:
    """Return where a forward operator ran: the ranges' names, outermost first as the trace lists them, below its phase.

    What a checkpoint computes again has the path that it had at first, below the model.
    """
    phases = [at for at, name in enumerate(names) if name in (FORWARD, LOSS, RECOMPUTE)]
    if not phases:
        return ""
    return "/".join([MODEL] * (names[phases[-1]] == RECOMPUTE) + names[phases[-1] + 1 :])
