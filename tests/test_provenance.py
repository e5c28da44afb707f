"""The differences in origin of two captures: each is named, disturbing ones first, and unknown facts stay unknown."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from profkit.analysis.compare.provenance import Provenance, compare_provenance
from profkit.reading import open_capture
from profkit.run.directory import MANIFEST, NSYS_EXPORT, SNAPSHOT
from tests.conftest import ROOT
from tests.in_process import run_command
from tests.kineto_builder import kernel, launch, row, written
from tests.memory_captures import Training
from tests.nsys_builder import NsysBuilder
from tests.step_builder import ADD, SGEMM, add_steps, write_steps

pytestmark = pytest.mark.usefixtures("read_once")

STEP = {"forward": [(SGEMM, 100), (ADD, 20)]}

MANIFEST_OF_A_RUN: dict[str, Any] = {
    "status": "complete",
    "target": "model.small",
    "workload": {
        **{"preset_name": "small", "batch": 4, "context": 256, "steps": 2, "warmup_steps": 0},
        **{"dtype": "fp32", "compile_mode": "none", "passes": "train", "seed": 0},
    },
    "profiler": "nsys",
    "versions": {"profkit": "1", "python": "3.12", "torch": "2.11", "cuda": "13.0"},
    "driver": "580.1",
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "float32_matmul_precision": "highest",
    "git_revision": "abc",
    "clean": {"steps": [{"forward_ns": 90, "step_ns": 100}, {"forward_ns": 91, "step_ns": 102}]},
}


def make_run(folder: Path, changes: dict[str, Any] | None = None, *, trace: bool = True) -> Path:
    """Make a run directory whose manifest says something else at these dotted keys; None takes a key out."""
    manifest = copy.deepcopy(MANIFEST_OF_A_RUN)
    for key, value in (changes or {}).items():
        *above, last = key.split(".")
        part = manifest
        for name in above:
            part = part[name]
        part[last] = value
        if value is None:
            del part[last]
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    if trace:
        write_steps(folder / NSYS_EXPORT, [STEP, STEP])
    return folder


def compared(before: Path, after: Path) -> Provenance:
    return compare_provenance(open_capture(before), open_capture(after))


def test_runs_made_alike_have_no_differences(tmp_path: Path) -> None:
    assert compared(make_run(tmp_path / "a"), make_run(tmp_path / "b")) == Provenance((), (), (), ())


@pytest.mark.parametrize(
    ("key", "value", "fact", "disturbs"),
    [
        ("gpu", "NVIDIA A100", "GPU", True),
        ("driver", "590.2", "driver", True),
        ("versions.torch", "2.12", "torch", True),
        ("versions.cuda", "12.8", "CUDA", True),
        ("target", "model.xl", "workload", True),
        ("workload.batch", 8, "batch", True),
        ("workload.context", 512, "context", True),
        ("workload.passes", "forward", "passes", True),
        ("workload.dtype", "bf16", "precision (autocast)", True),
        ("float32_matmul_precision", "high", "float32 matmul precision (tf32)", True),
        ("workload.compile_mode", "default", "torch.compile", False),
        ("workload.seed", 1, "seed", False),
        ("git_revision", "def", "revision of the code", False),
        ("status", "failed", "state of the run", False),
    ],
)
def test_a_difference_is_named(tmp_path: Path, key: str, value: object, fact: str, disturbs: bool) -> None:
    found = compared(make_run(tmp_path / "a"), make_run(tmp_path / "b", {key: value}))
    (difference,) = found.differences
    assert (difference.fact, difference.disturbs, difference.after) == (fact, disturbs, str(value))
    assert found.disturbances == [difference] * disturbs


def test_a_scripts_arguments_are_stated_and_another_script_disturbs(tmp_path: Path) -> None:
    commands = ("python train.py --lr 1", "python train.py --lr 2", "python eval.py --lr 1")
    runs = [make_run(tmp_path / str(n), {"target": one, "argv": one.split()}) for n, one in enumerate(commands)]
    (arguments,) = compared(runs[0], runs[1]).differences
    assert (arguments.fact, arguments.disturbs) == ("command", False)
    assert (arguments.before, arguments.after) == ("python train.py --lr 1", "python train.py --lr 2")
    assert [(one.fact, one.disturbs) for one in compared(runs[0], runs[2]).differences] == [
        ("workload", True),
        ("command", False),
    ]
    module = make_run(tmp_path / "d", {"target": "python -m train.py", "argv": ["python", "-m", "train"]})
    assert compared(module, module).differences == ()


def test_disturbing_differences_come_first_and_where_steps_were_timed_is_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    changes = {"workload.compile_mode": "default", "workload.dtype": "bf16", "gpu": "NVIDIA A100"}
    found = compared(run, make_run(tmp_path / "b", changes))
    assert [one.fact for one in found.differences] == ["GPU", "precision (autocast)", "torch.compile"]
    steps = {"label": "attached, not recording", "steps": MANIFEST_OF_A_RUN["clean"]["steps"]}
    (timed,) = compared(run, make_run(tmp_path / "c", {"clean": None, "attached": steps})).differences
    assert (timed.fact, timed.after, timed.disturbs) == ("unprofiled steps", "same process", True)


def test_a_fact_that_one_side_lacks_is_unknown(tmp_path: Path) -> None:
    run, bare = make_run(tmp_path / "a", {"driver": None}), write_steps(tmp_path / "t.sqlite", [STEP, STEP])
    found = compared(run, bare)
    assert found.differences == ()
    assert found.unknown_both == ("driver",)
    assert found.unknown_before == ()
    matmul = "float32 matmul precision (tf32)"
    assert found.unknown_after == ("GPU", "torch", "CUDA", "workload", "precision (autocast)", matmul)


def test_a_run_on_a_cpu_lacks_no_facts_about_gpus(tmp_path: Path) -> None:
    changes = {"device": "cpu", "gpu": None, "driver": None, "versions.cuda": None}
    assert compared(make_run(tmp_path / "a", changes), make_run(tmp_path / "b", changes)) == Provenance((), (), (), ())
    operators = ROOT / "traces" / "tiny-train-cpu.kineto.json.gz"
    assert not {"GPU", "driver", "CUDA"} & {*compared(operators, operators).unknown_both}


def test_facts_come_from_the_traces_themselves(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.rows["META_DATA_EXPORT"][1]["value"] = "2025.3.2.0"
    add_steps(builder, [STEP, STEP], pid=100)
    add_steps(builder, [STEP, STEP], pid=200)
    builder.add("TARGET_INFO_GPU", id=0, name="NVIDIA A100")
    builder.graph(None, 150, 160)
    one, other = write_steps(tmp_path / "a.sqlite", [STEP, STEP]), builder.write(tmp_path / "b.sqlite")
    found = {one.fact: (one.before, one.after) for one in compared(one, other).disturbances}
    assert found["profiler"] == ("Nsight Systems 2023.4.4.54", "Nsight Systems 2025.3.2.0")
    assert found["CUDA graphs"] == ("traced by kernel, if any", "traced whole")
    assert found["GPUs at work"][0] == "1"
    assert "GPU" not in found  # of the first it is unknown


def test_a_failed_self_check_on_either_side_disturbs(captures: Path) -> None:
    whole, lossy = captures / "small.nsys2023.sqlite", captures / "lossy.nsys2023.sqlite"
    for pair in ((whole, lossy), (lossy, whole), (lossy, lossy)):
        (check,) = [one for one in compared(*pair).disturbances if one.fact == "self-check"]
        for side, said in zip(pair, (check.before, check.after), strict=True):
            assert ("kernels are missing" in said) == (side is lossy)
            assert (said == "passed") == (side is whole)


def test_nsys_and_kineto_are_different_profilers() -> None:
    traces = ROOT / "traces"
    found = compared(traces / "small-train.nsys2025.sqlite", traces / "small-train.kineto.json.gz")
    assert [one.fact for one in found.differences] == ["profiler"]


def test_files_of_a_run_keep_its_manifest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    Training().write(run, SNAPSHOT)
    for path in (run, run / NSYS_EXPORT, run / SNAPSHOT):
        opened = open_capture(path)
        assert opened.run.manifest.driver == "580.1"
        assert (opened.trace is not None, opened.snapshot is not None) == (
            path.name != SNAPSHOT,
            path != run / NSYS_EXPORT,
        )
    elsewhere = write_steps(run / "other.sqlite", [STEP])
    assert open_capture(elsewhere).run is None


def test_a_recording_without_operators_is_compared_with_one_that_has_them(tmp_path: Path) -> None:
    lean = [launch(12, 1), kernel("gemm", 20, 5, 1)]
    full = [row("cpu_op", "aten::mm", 10, 8), *lean]
    captures = [written(tmp_path, full, "full.json"), written(tmp_path, lean, "lean.json")]
    provenance = compared(*captures)
    assert [change.fact for change in provenance.differences] == ["CPU operators"]
    assert provenance.disturbances == []
    said = provenance.recorder_effect
    assert said.startswith("only the first capture has CPU operators")
    shown = run_command("compare", *map(str, captures)).stdout
    assert said in " ".join(shown.split())
    assert compared(captures[1], captures[1]).recorder_effect is None
