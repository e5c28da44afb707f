"""``profkit run`` by real processes: the run directory, the manifest, wrong inputs, Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.models import PRESETS, forward_flops
from profkit.run.work import read_work
from tests.doubts import without_doubts
from tests.forked_scripts import Forks
from tests.in_process import manifest_of, names_in, range_names, run_command, run_profkit
from tests.launched import NEEDS_PROC, started, wait_until

pytest.importorskip("torch")

FAST = ("model.tiny", "--batch", "2", "--context", "32", "--device", "cpu")


def _profkit(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_profkit("run", *arguments, cwd=cwd, **variables)


@pytest.fixture(scope="module")
def kineto_run(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> tuple[Path, subprocess.CompletedProcess[str]]:
    where = tmp_path_factory.mktemp("kineto")
    arguments = (*FAST, "-o", "my run", "--steps", "2", "--warmup", "1")
    done = forks.check_profkit("run", *arguments, cwd=where, SECRET="hunter2", OMP_NUM_THREADS="2")
    return where / "my run", done


def test_a_run_holds_trace_work_and_manifest_and_no_more(kineto_run: tuple[Path, Any]) -> None:
    run, _ = kineto_run
    assert names_in(run) == ["manifest.json", "trace.json.gz", "work.json"]
    work = read_work(run / "work.json")
    assert (work.source, work.missing) == ("counted", ())
    ffn = work.find(("forward", "layer 1", "ffn"))
    assert ffn is not None
    assert ffn.flops_by_dtype == {"fp32": 6 * 2 * 32 * 128 * 512}
    names = range_names(run / "trace.json.gz")
    assert {"step 0", "step 1", "forward", "loss", "backward", "optimizer", "layer 1", "final matmul"} <= set(names)
    assert names.count("layer 1") == 4, "twice forward, twice backward"


def test_the_manifest_says_what_was_run_and_how_long_it_took(kineto_run: tuple[Path, Any]) -> None:
    manifest = manifest_of(kineto_run[0])
    assert (manifest["status"], manifest["exit_status"], manifest["device"]) == ("complete", 0, "cpu")
    assert manifest["target"] == "model.tiny"
    assert manifest["command"][:3] == ["profkit", "run", "model.tiny"]
    assert manifest["workload"]["context"] == 32
    assert set(manifest["versions"]) == {"profkit", "python", "nvtx", "nsys", "torch", "cuda"}
    assert manifest["conditions"]["float32_matmul_precision"] == "highest"
    assert manifest["conditions"]["cpu_threads"] > 0
    assert manifest["conditions"]["autocast_dtypes"] == []
    assert len(manifest["clean"]["steps"]) in {2, 4, 6, 8, 10}, "whole rounds, as many as fit into five seconds"
    assert len(manifest["profiled"]["steps"]) == 2
    for twin in ("clean", "profiled"):
        assert set(manifest[twin]["during"].values()) == {0}
        for step in manifest[twin]["steps"]:
            assert list(step) == ["forward_ns", "loss_ns", "backward_ns", "optimizer_ns", "step_ns"]
            assert all(isinstance(time_ns, int) and time_ns > 0 for time_ns in step.values())
    assert manifest["clean"]["steps"] != manifest["profiled"]["steps"]


def test_only_harmless_environment_variables_are_recorded(kineto_run: tuple[Path, Any]) -> None:
    text = (kineto_run[0] / "manifest.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["environment"]["OMP_NUM_THREADS"] == "2"


IN_FULL = ["A", "STEP", "WORK", "MODULE", "Closed"]


def test_the_end_says_what_limits_a_step_and_the_next_commands(kineto_run: tuple[Path, Any]) -> None:
    run, done = kineto_run
    assert without_doubts(done.stderr) == ""
    # How much of the summary a screen has room for depends on how the step's time is shared out.
    for text, words in ((done.stdout, ["A", "STEP"]), (run_command("summary", run, "--all").stdout, IN_FULL)):
        labels = [line.split()[0] for line in text.splitlines() if line and line[0].isupper()]
        assert list(dict.fromkeys(label for label in labels if label in words)) == words
    assert "───" not in done.stdout, "tables come with the commands that it names"
    assert "\n  profkit report 'my run'\n" in done.stdout
    tables = run_command("kernels", run).stdout
    for phase in ("forward", "loss", "backward", "optimizer"):
        assert tables.count(f"\n{phase} ") == 2, "its operators, and its unprofiled time"
    assert done.stdout.endswith("  profkit kernels 'my run' --range forward\n  profkit ranges 'my run'\n")


@pytest.fixture(scope="module")
def contexts_run(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> tuple[Path, str]:
    where = tmp_path_factory.mktemp("contexts")
    arguments = ("model.tiny", "--batch", "2", "--context", "8,32", "--steps", "2", "--warmup", "1", "-o", "run")
    done = forks.run_profkit("run", *arguments, "--device", "cpu", cwd=where)
    assert (done.returncode, without_doubts(done.stderr)) == (0, "")
    return where / "run", done.stdout


def test_a_path_chooses_the_phases_of_one_context(contexts_run: tuple[Path, str]) -> None:
    opened = read_trace(contexts_run[0])
    for phase in ("forward", "backward"):
        every, short, long = (
            opened.kernels(request) for request in (phase, f"context 8/step */{phase}", f"context 32/step */{phase}")
        )
        assert (every.instances, short.instances, long.instances) == (4, 2, 2)
        assert every.total_ns == short.total_ns + long.total_ns
    assert opened.kernels("context 32/step 1/forward/layer 0").instances == 1
    assert opened.kernels("context *").instances == 2
    assert opened.self_check.findings == ()


def test_the_manifest_and_the_work_of_several_contexts_keep_them_apart(contexts_run: tuple[Path, str]) -> None:
    where, said = contexts_run
    tables, summary = run_command("kernels", where).stdout, run_command("summary", where, "--all").stdout
    for context in (8, 32):
        assert f"context {context}: " in summary, "the step time"
        assert f"context {context}, per step" in tables, "the phases"
        assert f"\ncontext {context}\n" in tables, "the times without a profiler"
    assert "  profkit kernels run --range 'context 32/step */forward'\n" in said
    manifest = manifest_of(where)
    assert (manifest["workload"]["context"], manifest["workload"]["contexts"]) == (32, [8, 32])
    assert [step["context"] for step in manifest["profiled"]["steps"]] == [8, 8, 32, 32]
    assert [step["context"] for step in manifest["clean"]["steps"][:4]] == [8, 8, 32, 32]
    work = read_work(where / "work.json")
    for context in (8, 32):
        forward = work.find((f"context {context}", "forward"))
        assert forward is not None
        assert forward.flops == forward_flops(PRESETS["tiny"], 2, context)
        assert work.find((f"context {context}", "backward", "layer 0")) is not None


def test_torch_is_never_imported_by_the_launcher() -> None:
    code = (
        "import sys\nsys.path.insert(0, '.')\nimport profkit.cli.run\nfrom profkit.launch import record as module\n"
        "module.require_torch()\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_torch_is_one_line_and_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profkit.launch.record.find_spec", lambda _name: None)
    done = _profkit("model.tiny", "-o", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("profkit: torch is not installed here: pip install 'profkit[cpu]'")
    assert list(tmp_path.iterdir()) == []


REFUSED: list[tuple[list[str], int, str]] = [
    (["model.smal"], 2, "model.smal: no such model; did you mean model.small?"),
    (["train.py"], 2, "train.py: no such file"),
    (["--", "train.py"], 2, "put python before it, or leave out --: profkit run -- python train.py"),
    ([*FAST, "--nsys", "-o", "run"], 1, "$NSYS is /no/nsys, which cannot be run"),
    (["--context", "8,x", "model.tiny"], 2, "'8,x' is not one number of tokens or several"),
    (["--context", "8,0", "model.tiny"], 2, "'8,0' is not one number of tokens"),
    (["--context", "8,8", "model.tiny"], 2, "none twice"),
    (["--context", "8,16", "--memory", "model.tiny"], 2, "--memory takes one --context"),
    (["--context", "1,2,3,4,5,6,7,8,9", "--compile", "default", "model.tiny"], 2, "takes 8 values of"),
    (["--memory", "--device", "cpu", "model.tiny"], 2, "--device cpu uses none"),
    (["--batch", "2", "--", "python", "x.py"], 2, "--batch is for the built-in models; leave it out"),
    (["--memory-only", "model.tiny"], 2, "--memory-only is for commands"),
    (["--memory-only", "--kineto", "--", "python", "x.py"], 2, "--kineto records a trace and --memory-only none"),
    (["--depth", "2", "model.tiny"], 2, "--depth is for commands"),
    (["--stop", "model.tiny"], 2, "--stop is for commands (-- python train.py); leave it out"),
    (["--flops", "model.tiny"], 2, "--flops is for commands"),
    (["--no-keep-report", "model.tiny"], 2, "--no-keep-report goes with --nsys"),
    (["model.tiny", "extra"], 2, "extra: a built-in model takes options only"),
    (["--step-on", "backwards:twice", "--", "python", "x.py"], 2, "write one of optimizer:NAME, call:NAME, backward"),
    (["--nproc-per-node", "2", "--", "torchrun", "x.py"], 2, "torchrun starts its processes itself"),
    (["--nproc-per-node", "2", "--context", "8,16", "model.tiny"], 2, "takes one --context"),
    *(
        (["--ranks", ranks, "--", "python", "x.py"], 2, "name ranks (0,7,8-15), or first-per-node")
        for ranks in ("", "a", "3-1", "1,", "-1", "fastest")
    ),
]


@pytest.mark.parametrize(("arguments", "status", "said"), REFUSED)
def test_wrong_inputs_are_named_and_write_nothing(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    done = _profkit(*arguments, cwd=tmp_path, NSYS="/no/nsys")
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_nsys_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profkit.cli.run_options.find_nsys", lambda _environment: None)
    done = _profkit("--nsys", "model.tiny", "-o", "run", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "install it (nsight-systems-cli), put nsys on PATH or name it in $NSYS; or leave --nsys out" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_targets_own_failure_is_the_runs_status_and_stands_in_the_manifest(tmp_path: Path, forks: Forks) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = forks.run_profkit("run", "model.tiny", "--device", "cuda", "-o", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "sees no CUDA GPU" in done.stderr
    assert "failed with exit status 2; nothing was recorded; see run" in done.stderr
    manifest = manifest_of(tmp_path / "run")
    assert (manifest["status"], manifest["exit_status"]) == ("failed", 2)
    assert "sees no CUDA GPU" in manifest["reason"]
    assert names_in(tmp_path / "run") == ["manifest.json"]


def _commands_with(marker: str, variable: str = "") -> list[str]:
    """Return the running commands with ``marker`` in words or environment, of these those that have ``variable``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry.parent / "environ").read_bytes()
        except OSError:
            continue
        is_marked = marker in command or marker.encode() in environment
        if is_marked and (not variable or variable.encode() in environment.split(b"\0")):
            found.append(command)
    return found


def _interrupt_once_it_runs(run: Path, awaited: str, *options: str) -> None:
    """Start ``profkit run`` into ``run``, press Ctrl-C once a command with ``awaited`` runs, and look around."""
    # A shell that runs tests in the background has SIGINT ignored, and children inherit that.
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom profkit.cli import main; main()"
    )
    arguments = ["run", *FAST, *options, "-o", str(run)]
    words = [sys.executable, "-c", start, *arguments]
    with started(words, stdout=None) as process:
        wait_until(lambda: any(awaited in command for command in _commands_with(str(run))))
        assert manifest_of(run)["status"] == "incomplete"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.strip() == f"profkit: interrupted; {run} is marked failed and keeps no capture"
    assert not [path.name for path in run.iterdir() if path.name.startswith(("trace", "partial", "attached"))]
    assert _commands_with(str(run)) == []
    assert (manifest_of(run)["status"], manifest_of(run)["reason"]) == ("failed", "interrupted")


@NEEDS_PROC
def test_ctrl_c_ends_the_children_and_marks_the_run(tmp_path: Path) -> None:
    _interrupt_once_it_runs(tmp_path / "run", "profkit.models", "--steps", "100000000")


@pytest.fixture(scope="module")
def nsys_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    assert shutil.which("nsys") or "NSYS" in os.environ, "the marker promises an nsys"
    where = tmp_path_factory.mktemp("nsys")
    done = _profkit("--nsys", *FAST, "--steps", "2", "--warmup", "1", "-o", "run", cwd=where)
    assert done.returncode == 0, done.stderr
    return where / "run", done


@pytest.mark.nsys
class TestNsys:
    def test_a_run_holds_report_export_and_log_and_its_manifest_names_the_version(
        self, nsys_run: tuple[Path, Any]
    ) -> None:
        run = nsys_run[0]
        assert names_in(run) == ["log.txt", "manifest.json", "trace.nsys-rep", "trace.sqlite", "work.json"]
        manifest = manifest_of(run)
        assert (manifest["profiler"], manifest["status"]) == ("nsys", "complete")
        assert manifest["versions"]["nsys"][0].isdigit()

    def test_the_export_has_the_ranges_with_their_payloads(self, nsys_run: tuple[Path, Any]) -> None:
        run = nsys_run[0]
        with closing(sqlite3.connect(f"file:{run / 'trace.sqlite'}?mode=ro", uri=True)) as database:
            rows = database.execute(
                "select coalesce(text, value), int64Value, count(*) from NVTX_EVENTS left join StringIds on id = textId"
                " where eventType = 59 group by 1, 2"
            ).fetchall()
        work = read_work(run / "work.json")
        flops = {"/".join(one.path): one.flops for one in work.ranges}
        layer = flops["forward/layer 0"]
        seen = {(name, payload): count for name, payload, count in rows}
        assert seen["forward", flops["forward"]] == seen["backward", flops["backward"]] == 3
        assert seen["layer 0", layer] == seen["layer 1", layer] == 3
        # The ranges of the recorded steps' backward passes (2 steps, 2 layers) carry no payload; nor does the softmax.
        assert (seen["layer 0", None], seen["final matmul", None], seen["computing softmax", None]) == (2, 4, 10)
        names = {name for name, _ in seen}
        assert {"warmup", "step 0", "step 1", "loss", "optimizer", "attention", "ffn"} <= names
        assert "step 2" not in names

    def test_what_nsys_says_goes_only_to_the_log_and_what_the_run_has_is_said(self, nsys_run: tuple[Path, Any]) -> None:
        run, done = nsys_run
        assert "Generat" in (run / "log.txt").read_text()
        assert "Generat" not in done.stdout + done.stderr
        assert without_doubts(done.stderr) == ""
        said = " ".join(done.stdout.split())
        assert "no GPU work was recorded (no GPU, or no CUDA), so there are no kernel times" in said
        assert "trace.nsys-rep holds the environment, secrets included, and cannot be scrubbed" in said
        assert done.stdout.endswith("\n  profkit ranges run\n")
        assert "profkit kernels" not in done.stdout

    @NEEDS_PROC
    def test_ctrl_c_ends_nsys_and_its_agent(self, tmp_path: Path) -> None:
        # Another test may run nsys at the same time. pytest names the test in the environment that children inherit.
        mine = f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}"
        _interrupt_once_it_runs(tmp_path / "run", "nsys profile", "--nsys", "--steps", "3")
        assert _commands_with("--start-agent", mine) == []
