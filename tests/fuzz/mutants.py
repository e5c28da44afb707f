"""The classes of mutants: each makes one damaged file or run directory from a seed, and names what to ask of it."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.allocator_reference import ReferenceAllocator
from tests.fuzz import families
from tests.fuzz.values import TEXTS, damage, mutate, odd
from tests.kineto_builder import flow, kernel, launch, row, thread_name
from tests.nsys_builder import NsysBuilder

OUTPUT = "out.html"
"""What commands that write a file write, whatever its ending says."""


@dataclass(frozen=True)
class Mutant:
    """A file, and the commands that read it."""

    path: Path
    commands: list[list[str]]


Maker = Callable[[Random, Path], Path]


def make(kind: str, seed: int, folder: Path) -> Mutant:
    """Return the mutant of a class and a seed, written into ``folder``, with a command of each sort that reads it."""
    random = Random(f"{kind} {seed}")
    maker, fixed, others = CLASSES[kind]
    path = maker(random, folder)
    commands = [fixed, random.choice(others)]
    output = folder / OUTPUT
    if output.is_dir():
        shutil.rmtree(output)
    output.unlink(missing_ok=True)
    places = {"FILE": str(path), "OUT": str(output)}
    return Mutant(path, [[places.get(part, part) for part in command] for command in commands])


# -- exports of Nsight Systems ----------------------------------------------------------------------------------


def _export(names: Callable[[str], str] = str) -> NsysBuilder:
    """Return two steps with layers, a backward thread, a graph, copies, a second process and a domain."""
    builder = NsysBuilder()
    builder.add("TARGET_INFO_GPU", id=0, name=names("NVIDIA H200"))
    builder.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=100)
    builder.add("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text=names("some events were dropped"), globalPid=-1)
    builder.name_thread("main", 100)
    builder.name_thread("pt_autograd_0", 101)
    builder.domain(3, names("NCCL"))
    for step in (0, 1):
        at = 100_000 * step
        builder.range(names(f"step {step}"), at, at + 90_000, int64Value=3_000)
        builder.range(names("forward"), at + 100, at + 40_000)
        for layer in (0, 1):
            begin = at + 1_000 + 10_000 * layer
            builder.range(names(f"layer {layer}"), begin, begin + 9_000, registered=True, int64Value=1_000)
            builder.kernel(begin + 100, 2_000, name=names("sm80_xmma_gemm_f32f32"))
            builder.kernel(begin + 4_000, 1_000, name=names("void at::native::reduce_kernel<4>(int)"))
        builder.range(names("backward"), at + 41_000, at + 80_000)
        builder.call(at + 41_100, name="cudaStreamSynchronize_v3020", duration=30_000)
        builder.kernel(at + 50_000, 3_000, tid=101, name=names("elementwise_kernel"))
        builder.kernel(at + 52_000, 700, pid=200, tid=200, device=1, name=names("ncclDevKernel_AllReduce"))
        builder.range(names("all_reduce"), at + 51_000, at + 60_000, domain=3)
        builder.copy(at + 62_000, 500, start=at + 62_100)
        builder.add(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=at + 70_000, end=at + 71_000, deviceId=0, streamId=7,
            correlationId=builder.call(at + 69_000, name="cudaGraphLaunch_v10000"), globalPid=(1 << 48) | 100 << 24,
            graphId=4, graphExecId=5,
        )  # fmt: skip
    builder.range(names("never closed"), 190_000, None)
    return builder


@cache
def _export_bytes(folder: Path) -> bytes:
    path = folder / "good.sqlite"
    path.unlink(missing_ok=True)
    return _export().write(path).read_bytes()


def export_values(random: Random, folder: Path) -> Path:
    path = folder / "mutant.sqlite"
    path.write_bytes(_export_bytes(folder))
    with closing(sqlite3.connect(path)) as database:
        for _ in range(random.choice([1, 1, 2, 3, 6])):
            with suppress(sqlite3.Error, OverflowError, UnicodeEncodeError):
                _change_export(random, database)
        database.commit()
        if random.random() < 0.3:
            database.execute("VACUUM")
    if random.random() < 0.2:
        path.write_bytes(damage(random, path.read_bytes()))
    return path


def _change_export(random: Random, database: sqlite3.Connection) -> None:
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    table = random.choice(tables)
    columns = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
    column, other = random.choice(columns), random.choice(columns)
    where = random.choice(["", "", f" WHERE rowid = {random.randrange(1, 12)}", " WHERE rowid % 2"])
    value = odd(random)
    if isinstance(value, list | dict) or random.random() < 0.1:
        value = random.randbytes(random.choice([0, 1, 8, 300]))
    statements: list[tuple[str, tuple[Any, ...]]] = [
        (f"UPDATE {table} SET {column} = ?{where}", (value,)),
        (f"UPDATE {table} SET {column} = {other}{where}", ()),
        (f"UPDATE {table} SET {column} = -{column}{where}", ()),
        (f"UPDATE {table} SET {column} = {column} * 1000000007{where}", ()),
        (f"UPDATE {table} SET {column} = {column} + {column} / 2{where}", ()),
        (f"UPDATE {table} SET {column} = NULL{where}", ()),
        (f"DELETE FROM {table}{where}", ()),
        (f"INSERT INTO {table} SELECT * FROM {table}{where}", ()),
        (f"ALTER TABLE {table} DROP COLUMN {column}", ()),
        (f"ALTER TABLE {table} RENAME TO {random.choice(tables)}_", ()),
        (f"DROP TABLE {table}", ()),
        (f"CREATE VIEW v{random.randrange(9)} AS SELECT * FROM {table}", ()),
    ]
    weights = [12, 3, 3, 2, 2, 3, 2, 2, 1, 1, 1, 1]
    statement, values = random.choices(statements, weights)[0]
    if statement.startswith(("UPDATE", "INSERT")) and random.random() < 0.7:
        # Nothing but the table's own words on its columns would refuse NULL or text.
        database.execute("PRAGMA writable_schema = ON")
        database.execute("UPDATE sqlite_master SET sql = replace(replace(sql, ' NOT NULL', ''), ' PRIMARY KEY', '')")
        database.execute("PRAGMA writable_schema = RESET")
    database.execute(statement, values)


def export_times(random: Random, folder: Path) -> Path:
    path = folder / "mutant.sqlite"
    path.write_bytes(_export_bytes(folder))
    families.export_times(random, path)
    return path


def export_bytes(random: Random, folder: Path) -> Path:
    path = folder / "mutant.sqlite"
    path.write_bytes(damage(random, _export_bytes(folder)))
    return path


def export_names(random: Random, folder: Path) -> Path:
    path = folder / "mutant.sqlite"
    path.unlink(missing_ok=True)
    odds = random.choice([0.2, 1.0])
    return _export(lambda name: _odd_name(random) if random.random() < odds else name).write(path)


def _odd_name(random: Random) -> str:
    return "".join(random.choice(TEXTS) for _ in range(random.choice([1, 1, 2, 3])))


# -- traces of torch.profiler ----------------------------------------------------------------------------------


def _chrome(names: Callable[[str], str] = str) -> dict[str, Any]:
    events = [thread_name(100, "thread 100 (python)"), thread_name(117, "thread 117 (pt_autograd_0)")]
    for step in (0, 1):
        at = 1_000 * step
        events += [
            row("user_annotation", names(f"step {step}"), at, 900),
            row("user_annotation", names("forward"), at + 5, 300),
            row("cpu_op", names("aten::linear"), at + 10, 80, **{"Sequence number": 7}),
            row("cpu_op", names("aten::mm"), at + 20, 30),
            launch(at + 25, 10 + step),
            kernel(names("ampere_sgemm_128x64_tn"), at + 40, 25.5, 10 + step),
            flow("s", 3 + step, at + 10, 100),
            row("user_annotation", names("backward"), at + 400, 300),
            row("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 420, 60, 117),
            row("cpu_op", names("MmBackward0"), at + 425, 50, 117),
            flow("f", 3 + step, at + 425, 117),
            launch(at + 430, 20 + step, 117),
            kernel(names("void reduce_kernel<4>(int)"), at + 450, 40, 20 + step),
            row("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at + 600, 5, 7, pid=0, device=0, stream=7, bytes=64),
            row("cuda_runtime", "cudaDeviceSynchronize", at + 700, 100, correlation=99),
        ]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": names("NVIDIA H200")}],
        "cuda_runtime_version": 12060,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "distributedInfo": {"rank": 0, "world_size": 1, "backend": "nccl"},
        "traceEvents": events,
    }


def _write_chrome(random: Random, folder: Path, data: Any) -> Path:
    path = folder / "mutant.json"
    content = json.dumps(data).encode("utf-8", "surrogatepass")
    if random.random() < 0.2:
        content = damage(random, content)
    path.write_bytes(gzip.compress(content, 1) if random.random() < 0.3 else content)
    return path


def chrome_values(random: Random, folder: Path) -> Path:
    data: Any = _chrome()
    if random.random() < 0.2:
        data["traceEvents"] = [event for event in data["traceEvents"] if event.get("cat") != "kernel"]
    for _ in range(random.choice([1, 2, 4, 16])):
        if random.random() < 0.75 and isinstance(data, dict) and isinstance(data.get("traceEvents"), list):
            data["traceEvents"] = mutate(random, data["traceEvents"])
        else:
            data = mutate(random, data)
    return _write_chrome(random, folder, data)


def chrome_few(random: Random, folder: Path) -> Path:
    """Keep few events of a torch.profiler trace, some of which begin or end together."""
    return _write_chrome(Random(0), folder, families.few_events(random, _chrome()))


def chrome_names(random: Random, folder: Path) -> Path:
    odds = random.choice([0.2, 1.0])
    data = _chrome(lambda name: _odd_name(random) if random.random() < odds else name)
    return _write_chrome(Random(0), folder, data)


# -- snapshots of memory ----------------------------------------------------------------------------------------------


@cache
def _snapshots() -> tuple[dict[str, Any], ...]:
    """Return what the reference allocator left: of plain and of expandable segments, whole and begun in the middle."""
    found = []
    for is_expandable in (False, True):
        for is_late in (False, True):
            allocator = ReferenceAllocator(expandable=is_expandable)
            early = [allocator.malloc(size) for size in (700, 3 << 20, 12 << 20)] if is_late else []
            allocator.record()
            held = [allocator.malloc(size) for size in (100, 5 << 20, 700, 2 << 20, 30 << 20)]
            for address in (*early[:2], held[1], held[3]):
                allocator.free(address)
            allocator.malloc(4 << 20)
            found.append(allocator.snapshot())
    for data in found:
        for number, event in enumerate(data["device_traces"][0]):
            event["frames"] = [{"name": "f", "filename": "train.py", "line": number % 3}]
        data["external_annotations"] = [
            {"stage": stage, "name": name, "device": 0, "time_us": data["device_traces"][0][at]["time_us"]}
            for stage, name, at in (("START", "step 0", 0), ("START", "forward", 1), ("END", "forward", 3))
        ]
    return tuple(found)


def snapshot_values(random: Random, folder: Path) -> Path:
    data: Any = copy.deepcopy(random.choice(_snapshots()))
    for _ in range(random.choice([1, 1, 2, 4, 12])):
        data = mutate(random, data)
    return _write_snapshot(random, folder, data)


def snapshot_order(random: Random, folder: Path) -> Path:
    """Move, drop and repeat the events of a snapshot, which stay whole each."""
    data = copy.deepcopy(random.choice(_snapshots()))
    events = data["device_traces"][0]
    for _ in range(random.choice([1, 2, 5])):
        at, to = random.randrange(len(events)), random.randrange(len(events))
        action = random.choice(["swap", "drop", "repeat", "turn", "action"])
        if action == "swap":
            events[at], events[to] = events[to], events[at]
        elif action == "drop" and len(events) > 1:
            del events[at]
        elif action == "repeat":
            events.insert(to, dict(events[at]))
        elif action == "turn":
            events[min(at, to) : max(at, to)] = events[min(at, to) : max(at, to)][::-1]
        else:
            events[at]["action"] = events[to]["action"]
    if random.random() < 0.5:  # as the allocator would have written them
        for event, time_us in zip(events, sorted(event["time_us"] for event in events), strict=True):
            event["time_us"] = time_us
    path = folder / "mutant.pickle"
    path.write_bytes(pickle.dumps(data, 4))
    return path


def snapshot_bytes(random: Random, folder: Path) -> Path:
    path = folder / "mutant.pickle"
    path.write_bytes(damage(random, pickle.dumps(random.choice(_snapshots()), random.choice([0, 2, 4]))))
    return path


def snapshot_names(random: Random, folder: Path) -> Path:
    data = copy.deepcopy(random.choice(_snapshots()))
    for event in data["device_traces"][0]:
        event["frames"] = [{"name": _odd_name(random), "filename": _odd_name(random), "line": 1} for _ in range(3)]
        event["user_metadata"] = _odd_name(random)
    for mark in data["external_annotations"]:
        mark["name"] = _odd_name(random)
    return _write_snapshot(Random(0), folder, data)


def snapshot_objects(random: Random, folder: Path) -> Path:
    """Let the objects of a snapshot hold each other, or change the program that its pickle is."""
    path = folder / "mutant.pickle"
    path.write_bytes(families.shared_pickle(random, random.choice(_snapshots())))
    return path


def _write_snapshot(random: Random, folder: Path, data: Any) -> Path:
    content = pickle.dumps(data, random.choice([2, 4]))
    if random.random() < 0.15:
        content = damage(random, content)
    path = folder / "mutant.pickle"
    path.write_bytes(gzip.compress(content, 1) if random.random() < 0.2 else content)
    return path


# -- run directories ----------------------------------------------------------------------------------------------


def _run_files() -> dict[str, Any]:
    steps = [{"step_ns": 90_000 + n, "forward_ns": 40_000, "backward_ns": 39_000} for n in range(5)]
    process = {"process": "main", "pid": 100, "rank": 0, "steps_seen": 5, "memory": {"snapshot": "snapshot.pickle"}}
    size = {"m": 8, "n": 8, "k": 8}
    begin = _snapshots()[0]["device_traces"][0][0]["time_us"]
    owned = {"kind": "owned", "time_us": begin + 2, "device": 0, "address": 1, "bytes": 512, "role": "parameter"}
    bytes_of = ("allocated", "allocated_peak", "requested", "requested_peak", "reserved", "reserved_peak")
    return {
        "manifest.json": {
            "status": "complete", "target": "train.py", "argv": ["python", "train.py"], "gpu": "NVIDIA H200",
            "device": "cuda", "workload": {"dtype": "fp32", "warmup_steps": 1}, "exit_status": 0,
            "clean": {"steps": steps, "during": {"retries": 0}, "losses": [1.5]}, "profiled": {"steps": steps},
            "processes": [process], "memory": {"steps": steps, "processes": [process]}, "versions": {"torch": "2.13.0"},
            "warnings": ["one"],
        },
        "work.json": {
            "version": 1, "source": "counted", "dtype": "fp32", "model_flops": 300, "missing": [],
            "ranges": [{"path": ["forward", "layer 0"], "flops": 100, "needed_flops": 60, "least_bytes": 400}],
        },
        "ceilings.json": {
            "version": 1, "device": {"name": "NVIDIA H200", "uuid": None, "clock_mhz": 1, "clock_max_mhz": 2},
            "torch": "2.13", "driver": None, "measured_utc": "2026-01-01T00:00:00+00:00",
            "gemm": [{"dtype": "fp32", **size, "best_flops_per_s": 5e13, "median_flops_per_s": 5e13}],
            "copy": {"bytes": 8, "best_bytes_per_s": 4e12, "median_bytes_per_s": 4e12},
        },
        "ledger.jsonl": [
            {"kind": "header", "version": 1, "torch": "2.13.0", "peaks_reset_us": begin - 1},
            {"kind": "step", "name": "step 0", "start_us": begin, "end_us": begin + 9, "time_us": begin + 9},
            {**owned, "offset_bytes": 0, "own_bytes": 512, "name": "head.weight", "step": 0},
            {"kind": "figures", "time_us": begin + 9, "device": 0, "moment": "dump", "capacity_bytes": 2**37,
             **{f"{name}_bytes": 2**20 for name in bytes_of}},
        ],
        "log.txt": "Generating report\n",
    }  # fmt: skip


def _text_of(content: Any) -> bytes:
    if isinstance(content, list):
        return "".join(json.dumps(line) + "\n" for line in content).encode("utf-8", "surrogatepass")
    return content.encode() if isinstance(content, str) else json.dumps(content).encode("utf-8", "surrogatepass")


def run_directory(random: Random, folder: Path) -> Path:
    """Change a value in a file of a run, or put in a file's place something else."""
    path = folder / "run"
    path.mkdir(exist_ok=True)
    for old in path.iterdir():
        old.unlink() if old.is_symlink() or not old.is_dir() else old.rmdir()
    files = _run_files()
    changed = random.choice([*files, "manifest.json", "work.json", "ceilings.json", "ledger.jsonl"])
    for name, content in files.items():
        if name != changed:
            (path / name).write_bytes(_text_of(content))
    (path / "trace.sqlite").write_bytes(_export_bytes(folder))
    (path / "snapshot.pickle").write_bytes(pickle.dumps(_snapshots()[0]))
    place = path / changed
    if random.random() < 0.75:
        content = files[changed]
        for _ in range(random.choice([1, 1, 2, 4])):
            content = mutate(random, content)
        text = _text_of(content)
        place.write_bytes(damage(random, text) if random.random() < 0.1 else text)
    else:
        _put_something_else(random, place, files)
    return path


def _whole_run(folder: Path) -> Path:
    path = folder / "run"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, content in _run_files().items():
        (path / name).write_bytes(_text_of(content))
    (path / "trace.sqlite").write_bytes(_export_bytes(folder))
    (path / "snapshot.pickle").write_bytes(pickle.dumps(_snapshots()[0]))
    return path


def run_links(random: Random, folder: Path) -> Path:
    path = _whole_run(folder)
    families.put_links(random, path)
    return path


def run_ranks(random: Random, folder: Path) -> Path:
    path = _whole_run(folder)
    families.write_light_records(random, path)
    return path


def run_compiled(random: Random, folder: Path) -> Path:
    path = _whole_run(folder)
    families.write_compiled_code(random, path)
    return path


def _put_something_else(random: Random, place: Path, files: dict[str, Any]) -> None:
    what = random.choice(["pipe", "zero", "loop", "folder", "other", "bytes", "empty", "nothing", "number", "deep"])
    if what == "pipe":
        os.mkfifo(place)
    elif what in ("zero", "loop"):
        place.symlink_to("/dev/zero" if what == "zero" else place.name)
    elif what == "folder":
        place.mkdir()
    elif what == "other":
        place.write_bytes(_text_of(files[random.choice(list(files))]))
    elif what != "nothing":
        contents = {"bytes": random.randbytes(500), "empty": b"", "number": b"9" * 5000, "deep": b"[" * 100_000}
        place.write_bytes(contents[what])


_TIME = [
    "kernels FILE --by category --format json", "kernels FILE --range forward", "kernels FILE --format csv --explain",
    "ranges FILE --format json", "ranges FILE", "efficiency FILE --format json", "efficiency FILE", "check FILE",
    "compare FILE FILE", "kernels FILE --format markdown --full-names", "efficiency FILE --format latex",
]  # fmt: skip
_MEMORY = [
    "memory FILE --capacity 80GiB",
    "memory FILE", "memory FILE --by module --format csv", "memory FILE --by stack", "memory FILE --min-size 1KiB",
    "memory FILE --stack f --format json", "memory FILE --leaks --format json", "compare FILE FILE",
    "memory FILE --at 1s", "memory FILE --format latex", "memory FILE --format markdown",
]  # fmt: skip
_MORE = ["summary FILE --format json", "scrub FILE -o OUT", "report FILE -o OUT"]
_RANKS = [
    "ranks FILE",
    "ranks FILE --format json",
    "summary FILE --format json",
    "scrub FILE -o OUT",
    "gather FILE -o OUT",
]
_RUN = ["compare FILE FILE", "check FILE", "memory FILE --format json", "kernels FILE --format json", *_TIME[:7]]


def _split(commands: list[str]) -> list[list[str]]:
    return [command.split() for command in commands]


CLASSES: dict[str, tuple[Maker, list[str], list[list[str]]]] = {
    "export values": (export_values, ["kernels", "FILE", "--format", "json"], _split(_TIME + _MORE)),
    "export bytes": (export_bytes, ["kernels", "FILE", "--format", "json"], _split(_TIME + _MORE)),
    "export names": (export_names, ["kernels", "FILE"], _split(_TIME + _MORE)),
    "chrome values": (chrome_values, ["kernels", "FILE", "--format", "json"], _split(_TIME + _MORE)),
    "chrome names": (chrome_names, ["kernels", "FILE"], _split(_TIME + _MORE)),
    "snapshot values": (snapshot_values, ["memory", "FILE", "--format", "json"], _split(_MEMORY + _MORE)),
    "snapshot order": (snapshot_order, ["memory", "FILE", "--format", "json"], _split(_MEMORY + _MORE)),
    "snapshot bytes": (snapshot_bytes, ["memory", "FILE", "--format", "json"], _split(_MEMORY + _MORE)),
    "snapshot names": (snapshot_names, ["memory", "FILE"], _split(_MEMORY + _MORE)),
    "export times": (export_times, ["kernels", "FILE", "--format", "json"], _split(_TIME + _MORE)),
    "chrome few": (chrome_few, ["kernels", "FILE", "--format", "json"], _split(_TIME + _MORE)),
    "snapshot objects": (snapshot_objects, ["memory", "FILE", "--format", "json"], _split(_MEMORY + _MORE)),
    "run links": (run_links, ["summary", "FILE", "--format", "json"], _split(_RUN + _MORE + _RANKS)),
    "run ranks": (run_ranks, ["ranks", "FILE", "--format", "json"], _split(_RANKS + _MORE)),
    "run compiled": (run_compiled, ["kernels", "FILE", "--format", "json"], _split(_RUN + _MORE)),
    "run directory": (run_directory, ["efficiency", "FILE", "--format", "json"], _split(_RUN + _MORE)),
}
"""Class → how a mutant is made, the command that always reads it, and those of which one does."""
