"""Mutants by structure: times that touch or turn around, a handful of rows, links, shared objects, files of ranks."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from profkit.run.compiled_code import CapturedGraph, CompiledGraph, Launch, NodeRun, append_records
from profkit.run.light_record import Collectives, Group, LightRecord, Source, StepRecord, write_light_record
from tests.fuzz.values import damage, mutate
from tests.kineto_builder import row

_TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS")


def export_times(random: Random, path: Path) -> None:
    """Let rows of an export take no time, end before they start, begin together, or leave few others."""
    with closing(sqlite3.connect(path)) as database:
        there = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        for _ in range(random.choice([1, 2, 4])):
            table = random.choice([name for name in (*_TABLES, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE") if name in there])
            where = random.choice(["", " WHERE rowid % 2", f" WHERE rowid <= {random.randrange(1, 6)}"])
            change = random.choice(
                [
                    "SET end = start",
                    f"SET end = start - {random.choice([1, 500, 10**6])}",
                    "SET start = end, end = start",
                    "SET start = 0, end = 0",
                    f"SET start = {random.randrange(200_000)}",
                    f"SET end = {random.randrange(200_000)}",
                    f"SET start = start + {2**40}, end = end + {2**40}",
                ]
            )
            database.execute(f"UPDATE OR IGNORE {table} {change}{where}")
            if random.random() < 0.3:
                database.execute(f"DELETE FROM {table} WHERE rowid % {random.choice([2, 3])}")
            if table.endswith("RUNTIME") and random.random() < 0.5:
                database.execute(f"UPDATE {table} SET correlationId = {random.choice(['0', '1', 'correlationId / 2'])}")
        database.commit()


def few_events(random: Random, trace: dict[str, Any]) -> dict[str, Any]:
    """Return a torch.profiler trace of some of its events, with steps, and times and threads that meet."""
    events = random.sample(trace["traceEvents"], random.choice([1, 2, 3, 6, 10, 20]))
    for step in range(random.choice([0, 1, 2, 3])):
        begin = random.choice([0, 1000 * step, 990, 2500])
        events.append(row("user_annotation", f"ProfilerStep#{step + 5}", begin, random.choice([0, 10, 1000, 10**7])))
    changes: list[dict[str, Any]] = [{"dur": 0}, {"dur": -1}, {"ts": 1000}, {"ts": 0, "dur": 0}, {"dur": 10**9}]
    changes += [{"tid": 100}, {"tid": 117}]
    for event in random.sample(events, random.randrange(len(events))):
        event.update(random.choice(changes))
    return {**trace, "traceEvents": events}


def share_objects(random: Random, snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot in which containers hold themselves, each other, or one many times."""
    data = copy.deepcopy(snapshot)
    inner: Any = random.choice([[], {}, ["x"], [{"name": "f", "filename": "a.py", "line": 1}]])
    for _ in range(random.choice([1, 3, 40, 90])):
        inner = random.choice([[inner, inner], {"a": inner, "b": inner}, [inner]])
    loop: list[Any] = [inner]
    loop.append(random.choice([loop, data, data["segments"], data["device_traces"]]))
    events, segment = data["device_traces"][0], data["segments"][0]
    records = [data, segment, segment["blocks"][0], *random.sample(events, 3)]
    for _ in range(random.choice([1, 2, 5])):
        record = random.choice(records)
        key = random.choice([*record, "frames", "forward_frames", "user_metadata", "history", "more"])
        record[key] = random.choice([loop, inner, data, record, events, {"x": loop}, (loop,)])
    return data


def insert_opcodes(random: Random, content: bytes) -> bytes:
    """Return a pickle with instructions of the pickle machine put in anywhere."""
    changed = bytearray(content)
    for _ in range(random.choice([1, 2, 5, 20])):
        at = random.randrange(len(changed))
        changed[at:at] = bytes(
            [random.choice(b"rjq\x94hJ\x8a\x8b\x8c\x8d\x8e\x96\x97\x98obR\x81\x92\x85\x86\x87\x90c(tdl]}es.2")]
        )
        changed[at + 1 : at + 1] = random.randbytes(random.choice([0, 1, 4, 8]))
    return bytes(changed)


def _light_record(rank: int, source: Source) -> LightRecord:
    calls = Collectives(
        group=[0, 0], sequence=[1, 2], kind=["all_reduce", "broadcast"], dtype=["float32", None], bytes=[4096, None],
        called_ns=[100, 300], start_ns=[200, 350], end_ns=[280, None], hidden_ns=[10, None], exposed_ns=[None, 5],
    )  # fmt: skip
    steps = tuple(
        StepRecord(
            f"step {number}", 1000 * number, 1000 * (number + 1), launch_wait_ns=3,
            phases=(("data", 0, 90), ("forward", 100, 400 + rank)), peak_bytes=2**20, collectives=calls,
        )
        for number in range(4)
    )  # fmt: skip
    return LightRecord(rank, 2, source=source, groups=(Group(0, "0", (0, 1), "dp", "nccl"),), steps=steps)


def write_light_records(random: Random, run: Path) -> None:
    source: Source = random.choice(["light", "kineto"])
    for rank in (0, 1):
        write_light_record(run / f"light{'.rank1' if rank else ''}.jsonl", _light_record(rank, source))
    _change_lines(random, run / random.choice(["light.jsonl", "light.rank1.jsonl"]))


def write_compiled_code(random: Random, run: Path) -> None:
    launch = Launch(12, "triton_poi_fused_gelu_3", False, ("h.0.mlp",), ("model.py:87 forward",), ("aten.gelu",), (11,))
    graph = CompiledGraph("3f9a1c22e0", "cxyz", "2.11.0", "Model.forward model.py:20", False, (launch,))
    captured = CapturedGraph.of([NodeRun(3, "kernel", ("forward", "model"))])
    append_records(run / "compiled.jsonl", [graph, captured])
    _change_lines(random, run / "compiled.jsonl")


def _change_lines(random: Random, path: Path) -> None:
    lines = path.read_text().splitlines()
    for at in random.sample(range(len(lines)), min(len(lines), random.choice([1, 1, 2, 4]))):
        changes: list[Callable[[str], str]] = [
            lambda line: json.dumps(mutate(random, json.loads(line))),
            lambda line: line.replace("00", random.choice(["-1", "999999999999", "?"]), 1),
            lambda line: line.replace('"', '"\\x', 1),
            lambda line: line[: random.randrange(len(line))],
        ]
        lines[at] = random.choice(changes)(lines[at])
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    path.write_bytes(damage(random, text) if random.random() < 0.2 else text)


def put_links(random: Random, run: Path) -> None:
    names = [path.name for path in run.iterdir()]
    more = ["trace.rank1.sqlite", "light.rank3.jsonl", "snapshot.rank2.pickle", "x.rank9.json", "node0", "zero"]
    for _ in range(random.choice([1, 2, 4])):
        place = run / random.choice([*names, *more])
        if place.is_symlink() or place.exists():
            place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
        puts: list[Callable[[], Any]] = [
            lambda place=place: place.symlink_to(random.choice([".", place.name, "/dev/zero", "..", "no", *names])),
            lambda place=place: os.mkfifo(place),
            place.mkdir,
        ]
        random.choices(puts, [4, 1, 1])[0]()


def shared_pickle(random: Random, snapshot: dict[str, Any]) -> bytes:
    if random.random() < 0.5:
        return pickle.dumps(share_objects(random, snapshot), random.choice([2, 4]))
    return insert_opcodes(random, pickle.dumps(snapshot, random.choice([0, 2, 4])))
