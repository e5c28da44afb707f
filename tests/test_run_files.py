"""The files of a run: what is written comes back, what is damaged, or no file at all, is named in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profkit.errors import RunError
from profkit.run import decode, write_record
from profkit.run.directory import MANIFEST, Run, find_run
from profkit.run.manifest import Conditions, Manifest, Process, ProcessMemory, Samples, read_manifest, write_manifest
from profkit.run.work import (
    Ceilings,
    Copy,
    Gemm,
    RangeWork,
    RunWork,
    read_ceilings,
    read_work,
)
from tests.child import run_in_child
from tests.efficiency_runs import make_small_run
from tests.in_process import run_command
from tests.run_builder import start_run

WORK: dict[str, Any] = {
    "version": 1,
    "source": "counted",
    "dtype": "bf16",
    "ranges": [
        {
            "path": ["forward", "layer 0"],
            "flops": 100,
            "other_flops": 7,
            "needed_flops": 60,
            "least_bytes": 400,
            "flops_by_dtype": {"bf16": 90, "fp32": 10},
            "instances": 2,
            "varies": True,
            "recomputed_flops": 30,
        }
    ],
    "model_flops": 300,
    "missing": ["aten::made_up"],
}
ROW = WORK["ranges"][0]
CEILINGS: dict[str, Any] = {
    "version": 1,
    "device": {"name": "NVIDIA H200", "uuid": "GPU-0", "clock_mhz": 1755, "clock_max_mhz": 1980},
    "torch": "2.13.0",
    "driver": "580.159.03",
    "measured_utc": "2026-01-01T00:00:00+00:00",
    "gemm": [
        {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "best_flops_per_s": 8e14, "median_flops_per_s": 7.5e14}
    ],
    "copy": {"bytes": 2**30, "best_bytes_per_s": 4e12, "median_bytes_per_s": 3.9e12},
}


def _write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_work_that_is_written_comes_back(tmp_path: Path) -> None:
    work = read_work(_write(tmp_path / "work.json", WORK))
    assert (work.source, work.dtype, work.model_flops, work.missing) == ("counted", "bf16", 300, ("aten::made_up",))
    layer = RangeWork(
        ("forward", "layer 0"), 100, 7, 400, {"bf16": 90, "fp32": 10}, 2, True, recomputed_flops=30, needed_flops=60
    )
    assert work == RunWork(1, "counted", "bf16", (layer,), 300, ("aten::made_up",))
    assert (work.find(("forward", "layer 0")), work.find(("forward",))) == (layer, None)
    write_record(tmp_path / "again.json", work)
    assert read_work(tmp_path / "again.json") == work


OF_ALL_VERSIONS = ("path", "flops", "other_flops", "least_bytes", "flops_by_dtype")
"""The keys that a range of a ``work.json`` of version 1 has had since there was such a file."""


def test_a_file_without_keys_that_came_later_is_read_as_before(tmp_path: Path) -> None:
    row = {key: ROW[key] for key in OF_ALL_VERSIONS}
    (read,) = read_work(_write(tmp_path / "work.json", {**WORK, "ranges": [row]})).ranges
    assert (read.flops, read.recomputed_flops, read.needed_flops) == (100, 0, None)


def test_ceilings_that_are_written_come_back(tmp_path: Path) -> None:
    ceilings: Ceilings = decode(Ceilings, CEILINGS)
    write_record(tmp_path / "ceilings.json", ceilings)
    assert read_ceilings(tmp_path / "ceilings.json") == ceilings
    assert (ceilings.device.name, ceilings.device.uuid, ceilings.device.clock_mhz) == ("NVIDIA H200", "GPU-0", 1755)
    assert ceilings.gemm == (Gemm("bf16", 8192, 8192, 8192, 8e14, 7.5e14),)
    assert ceilings.copy == Copy(2**30, 4e12, 3.9e12)


READERS: dict[str, Callable[[Path], object]] = {
    "work.json": read_work,
    "ceilings.json": read_ceilings,
    MANIFEST: lambda path: Run(path.parent).manifest,
}
WHOLE: dict[str, dict[str, Any]] = {"work.json": WORK, "ceilings.json": CEILINGS, MANIFEST: {}}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("work.json", {"ranges": [{**ROW, "flops": -1}]}, r"ranges\[0\]: a negative count"),
        ("work.json", {"ranges": [{**ROW, "flops": 1.5}]}, r"ranges\[0\]\.flops is 1\.5, not a whole number"),
        ("work.json", {"ranges": [{**ROW, "least_bytes": None}]}, r"ranges\[0\]\.least_bytes is null"),
        ("work.json", {"ranges": [{**ROW, "flops_by_dtype": []}]}, r"flops_by_dtype is \[\], not an object"),
        ("work.json", {"ranges": [{**ROW, "other_flops": True}]}, r"other_flops is true, not a whole number"),
        ("work.json", {"source": "guessed"}, r"source is \"guessed\", not 'formula' or 'counted'"),
        ("work.json", {"version": 2}, "has version 2, and this profkit reads version 1"),
        ("work.json", {"version": "1"}, "version"),
        ("work.json", {"missing": "none"}, r"missing is \"none\", not a list"),
        *(("work.json", {key: ...}, f"{key} is missing") for key in WORK if key != "version"),
        *(
            ("ceilings.json", {"gemm": [{**CEILINGS["gemm"][0], "best_flops_per_s": rate}]}, "")
            for rate in (0, -1.0, "fast", None, 1e999)
        ),
        ("ceilings.json", {"gemm": [{}]}, r"gemm\[0\]\.dtype is missing"),
        (MANIFEST, [], "the file is"),
        (MANIFEST, {"status": 3}, "status is 3"),
        (MANIFEST, {"exit_status": 10**400}, "exit_status is 1000"),
        (
            MANIFEST,
            {"clean": {"steps": [{"step_ns": "1"}]}},
            r"clean\.steps\[0\]\.step_ns is \"1\", not a whole number",
        ),
        (MANIFEST, {"clean": {"steps": [{"step_ns": 2**63}]}}, r"clean\.steps\[0\]\.step_ns is 9223372036854775808"),
        (MANIFEST, {"clean": {"steps": [{"step_ns": -5}]}}, "clean: a step took a negative time"),
        (MANIFEST, {"clean": {"during": {"a": 1e400}}}, r"clean\.during\.a is Infinity, not a possible number"),
        (MANIFEST, {"versions": {"torch": 2.4}}, r"versions\.torch is 2\.4"),
    ],
)
def test_a_damaged_file_is_one_line_with_the_key(tmp_path: Path, name: str, change: Any, said: str) -> None:
    """``...`` stands for a key that is not there."""
    content = change
    if isinstance(change, dict):
        content = {key: value for key, value in {**WHOLE[name], **change}.items() if value is not ...}
    text = json.dumps(content).replace("Infinity", "1e400")
    with pytest.raises(RunError, match=rf"{name}: .*{said}") as caught:
        READERS[name](_write(tmp_path / name, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '{"version": NaN}', '{"version": Infinity}', "\ud800"])
def test_text_that_is_not_json_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "work.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(RunError, match=r"work\.json: not JSON"):
        read_work(path)


def test_ceilings_that_are_not_there_say_how_to_measure_them(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such file; measure with `profkit ceilings -o"):
        read_ceilings(tmp_path / "mine.json")


def test_a_manifest_that_is_written_comes_back(tmp_path: Path) -> None:
    manifest = Manifest(
        status="complete",
        target="model.tiny",
        versions={"torch": "2.13.0", "nsys": None},
        conditions=Conditions(float32_matmul_precision="highest", autocast_dtypes=("bfloat16",)),
        clean=Samples(({"step_ns": 5, "forward_event_ns": 2},), {"compiled_graphs": 0}),
        processes=(Process("rank1", pid=7, rank=1, memory=ProcessMemory("snapshot.rank1.pickle", 512)),),
    )
    write_manifest(tmp_path / MANIFEST, manifest)
    assert read_manifest(tmp_path / MANIFEST) == manifest
    assert Run(tmp_path).manifest.rank_of_pid == {7: 1}


def test_a_manifest_of_an_older_version_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    old = {
        "status": "complete",
        "target": "model.small",
        "workload": {"preset_name": "small", "steps": 3, "contexts": [], "device": "cuda", "unknown": {"a": 1}},
        "preset": {"name": "small", "num_layers": 12},
        "clean": {"steps": [{"forward_ns": 1, "step_ns": 3, "step_event_ns": 2}], "unbroken": [{"step_ns": 2}]},
    }
    manifest = Run(_write(tmp_path / MANIFEST, old).parent).manifest
    assert (manifest.workload.steps, manifest.workload.batch) == (3, None)
    assert manifest.unprofiled is not None
    assert manifest.unprofiled.times_ns("wall", None) == {"forward": [1], "step": [3]}
    assert manifest.unprofiled.times_ns("cuda-events", None) == {"step": [2]}


def test_a_trace_and_a_snapshot_know_their_run(tmp_path: Path) -> None:
    _write(tmp_path / MANIFEST, {"status": "complete"})
    for name in ("trace.sqlite", "trace.rank1.json.gz", "snapshot.rank2.pickle"):
        run = find_run(tmp_path / name)
        assert run is not None
        assert run.path == tmp_path
    assert find_run(tmp_path / "other.sqlite") is None


def test_samples_of_several_contexts_stay_apart() -> None:
    samples = Samples(({"context": 128, "step_ns": 1}, {"context": 256, "step_ns": 2}, {"context": 128, "step_ns": 3}))
    assert samples.contexts == [128, 256]
    assert (samples.step_ns(128), samples.step_ns(256), samples.step_ns()) == ([1, 3], [2], [])
    assert replace(samples, steps=()).contexts == []


FILES = ("manifest.json", "work.json", "ceilings.json", "log.txt")


PUT: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device without an end": lambda place: place.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to itself": lambda place: place.symlink_to(place.name),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_small_run(tmp_path_factory.mktemp("run"))
    (folder / "log.txt").write_text("Generating report\n")
    return folder


def answer(run: Path, *command: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        done = run_command(*(command or ("efficiency", run)))
        return done.returncode, done.stderr

    return run_in_child(ask, cpu_seconds=20, memory_bytes=2**31)


@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for what in PUT for name in FILES if name == MANIFEST or "link" not in what]
)
def test_a_file_that_is_no_file_is_refused_by_its_name(run: Path, tmp_path: Path, name: str, what: str) -> None:
    kept = tmp_path / "kept"
    (run / name).rename(kept)
    try:
        PUT[what](run / name)
        code, said = answer(run)
    finally:
        (run / name).rmdir() if (run / name).is_dir() else (run / name).unlink()
        kept.rename(run / name)
    assert code == 1
    assert len(said.strip().splitlines()) == 1 or "link" not in what
    assert f"profkit: {run}" in said.splitlines()[-1]
    assert said.endswith(f"{run / name}: not a regular file\n") or "link" in what


@pytest.mark.parametrize("command", ["report", "export", "scrub", "summary"])
def test_a_run_that_links_to_itself_is_read_without_its_links(tmp_path: Path, command: str) -> None:
    run = make_small_run(tmp_path / "run")
    for name, target in (("itself", "."), ("loop", "loop"), ("zero", "/dev/zero"), ("notes.rank1.txt",) * 2):
        (run / name).symlink_to(target)
    output = tmp_path / {"report": "a.html", "export": "a.json.gz", "scrub": "copy", "summary": "a.txt"}[command]
    code, said = answer(run, command, str(run), *([] if command == "summary" else ["-o", str(output)]))
    assert (code, "error" in said) == (0, False), said


@pytest.mark.parametrize("command", ["export", "report"])
def test_nothing_is_written_where_a_log_is_no_file(tmp_path: Path, command: str) -> None:
    run, output = make_small_run(tmp_path / "run"), tmp_path / {"export": "a.json", "report": "a.html"}[command]
    os.mkfifo(run / "log.txt")
    code, said = answer(run, command, str(run), "-o", str(output))
    assert (code, said.splitlines()[-1]) == (1, f"profkit: {run / 'log.txt'}: not a regular file")
    assert not output.exists()


@pytest.mark.parametrize("line", ['{"kind": "owned", "x": "\\x"}', '{"kind": "owned\\'])
@pytest.mark.parametrize("name", ["light.jsonl", "ledger.jsonl", "compiled.jsonl"])
def test_a_bad_escape_is_refused_by_file_and_line(tmp_path: Path, name: str, line: str) -> None:
    run = start_run(tmp_path / "run")
    (run / name).write_text(f'{{"kind": "header", "version": 1}}\n{line}\n{{"kind": "last"}}\n')
    code, said = answer(run, "scrub", str(run), "-o", str(tmp_path / "copy"))
    assert code == 1
    assert str(run / name) in said.splitlines()[-1]
    assert not (tmp_path / "copy").exists()
