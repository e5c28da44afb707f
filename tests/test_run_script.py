"""``profkit run -- COMMAND`` by real processes, on scripts that know nothing of profkit.

Where a process's start is not what a test is about, the script runs as a fork of one that has imported torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from profkit import read_trace
from profkit.run.work import read_work
from tests.doubts import without_doubts
from tests.forked_scripts import Forks
from tests.in_process import check_profkit, ended, manifest_of, names_in, printed, range_names, run_command, run_profkit
from tests.training_scripts import training

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent

TRAIN = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for number in range(int(sys.argv[2])):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(number, loss.item().hex(), flush=True)
    if sys.argv[3:] == ["raise", str(number)]:
        raise ValueError("the data are bad")
sys.stderr.write("the script's own last word\\n")
"""


TF32 = """
import torch
from torch import nn

if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch tells nothing by its older settings after this
model = nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
inputs = torch.ones(4, 8)


def closure():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.detect_anomaly(check_nan=False):
        loss = model(inputs).square().mean()
    loss.backward()
    return loss


for _ in range(4):
    optimizer.step(closure)
with torch.no_grad():
    model.eval()(inputs)
"""


COMPILED = """
import sys
import torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(7):
    if number == int(sys.argv[1]):
        model = torch.compile(model, backend="aot_eager")
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(number, loss.item().hex(), counters["stats"]["unique_graphs"], flush=True)
"""


FROM_INPUT = training(
    "int(sys.stdin.readline())", before="import sys", after='print("rest:", sys.stdin.read().strip(), flush=True)'
)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "profkit", "run", "-o", "run", *arguments]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(place: Path) -> Start:
    """Return a function that records a command that starts as a new process, and must end well."""

    def call(*arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        return ended(run_profkit("run", "-o", "run", *arguments, cwd=place, **variables), status)

    return call


@pytest.fixture
def run(place: Path, forks: Forks) -> Start:
    """Return a function that records a command as a fork of a process that has imported torch, and must end well."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return forks.check_profkit("run", "-o", "run", *arguments, cwd=place, **variables)

    return call


@pytest.mark.parametrize(
    ("compiles_at", "imports_dynamo_first"),
    [pytest.param("0", False, marks=pytest.mark.slow), ("2", True)],
)
def test_nothing_is_compiled_again_for_the_recording(
    place: Path, forks: Forks, start: Start, run: Start, compiles_at: str, imports_dynamo_first: bool
) -> None:
    """Dynamo guards on the hooks of all modules: with others than before it would compile anew, within the steps."""
    (place / "compiled.py").write_text(COMPILED)
    script = [sys.executable, "compiled.py", compiles_at]
    plain = forks.run(script, place)
    assert plain.stdout.split()[-1] == "1"
    done = (run if imports_dynamo_first else start)("--warmup", "3", "--steps", "2", "--", *script)
    assert done.stdout.startswith(plain.stdout), "one graph before, in and after the recording"
    assert manifest_of(place / "run")["processes"][0]["uncounted"] == "compiled code needs --flops"


@pytest.fixture(scope="module")
def unedited(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> tuple[Path, str]:
    """Seven steps of the script in a process of its own, after three of warm-up two recorded; and what it printed."""
    place = tmp_path_factory.mktemp("unedited")
    (place / "train.py").write_text(TRAIN)
    words = [sys.executable, "train.py", "0.1", "7"]
    plain = forks.run(words, place)
    recorder = ("run", "-o", "run", "--warmup", "3", "--steps", "2", "--", *words)
    done = check_profkit(*recorder, cwd=place)
    assert done.stdout.startswith(plain.stdout), "the script's output is untouched, its losses the same to the bit"
    assert without_doubts(done.stderr) == plain.stderr
    return place, done.stdout


def test_an_unedited_script_is_recorded_between_its_steps(unedited: tuple[Path, str]) -> None:
    place, said = unedited
    names = names_in(place / "run")
    assert names == ["lines.jsonl", "manifest.json", "trace.json.gz", "work.json"]
    ranges = range_names(place / "run" / "trace.json.gz")
    assert [name for name in ranges if name.startswith("step ")] == ["step 3", "step 4"]
    for name, count in {"forward": 2, "backward": 2, "optimizer": 2, "model": 4, "0": 4, "2": 4}.items():
        assert ranges.count(name) == count, name
    manifest = manifest_of(place / "run")
    assert (manifest["status"], manifest["exit_status"], manifest["device"]) == ("complete", 0, "cpu")
    assert manifest["argv"] == [sys.executable, "train.py", "0.1", "7"]
    assert len(manifest["attached"]["steps"]) == len(manifest["profiled"]["steps"]) == 2
    for part in ("attached", "profiled"):
        for step in manifest[part]["steps"]:
            assert list(step) == ["forward_ns", "loss_ns", "backward_ns", "optimizer_ns", "step_ns"]
            assert 0 < sum(step.values()) - step["step_ns"] < step["step_ns"]
        assert set(manifest[part]["during"].values()) == {0}
    assert "unprofiled (2 steps" in said
    table = run_command("kernels", place / "run").stdout.partition("time of")[2].splitlines()
    assert [line.split()[0] for line in table[2:6]] == ["forward", "loss", "backward", "optimizer"]


@pytest.mark.parametrize(("warmup", "timed"), [(5, 4), (12, 10), (16, 13)])
def test_the_first_three_of_many_warm_up_steps_are_not_timed(place: Path, run: Start, warmup: int, timed: int) -> None:
    run("--warmup", str(warmup), "--steps", "1", "--", sys.executable, "train.py", "0.1", "20")
    assert len(manifest_of(place / "run")["attached"]["steps"]) == timed


def test_a_run_with_the_defaults_is_judged_against_a_baseline(place: Path, run: Start) -> None:
    run("--", sys.executable, "train.py", "0.1", "17")
    manifest = manifest_of(place / "run")
    assert [len(manifest[part]["steps"]) for part in ("attached", "profiled")] == [11, 3]
    judged = run_command("check", place / "run", "--baseline", place / "run", "--format", "json")
    assert [line["judged"] for line in json.loads(judged.stdout)["lines"]] == [True]


def test_only_what_trains_is_evaluated_without_autocast(place: Path, run: Start) -> None:
    """A frozen encoder, or a teacher of another class, may compute as it likes."""
    (place / "frozen.py").write_text(TF32.replace("model.eval()(inputs)", "nn.Sequential(model).eval()(inputs)"))
    run("--warmup", "2", "--steps", "1", "--", sys.executable, "frozen.py")
    assert manifest_of(place / "run")["conditions"]["evaluates_without_autocast"] is False


def test_precision_autocast_and_a_backward_within_the_optimizer(place: Path, run: Start) -> None:
    (place / "tf32.py").write_text(TF32)
    run("--warmup", "2", "--steps", "1", "--", sys.executable, "tf32.py")
    manifest = manifest_of(place / "run")
    assert manifest["conditions"]["autocast_dtypes"] == ["bfloat16"]
    assert manifest["conditions"]["anomaly_detection"] is True, "it was on while the model ran"
    assert manifest["conditions"]["evaluates_without_autocast"] is True, "after the recorded step"
    assert manifest["conditions"]["cpu_count"] >= 1
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        assert manifest["conditions"]["cuda_matmul_fp32_precision"] == "tf32"
        assert manifest["conditions"]["float32_matmul_precision"] is None
    phases = {"forward_ns", "loss_ns", "backward_ns", "optimizer_ns", "step_ns"}
    assert [set(step) for step in manifest["attached"]["steps"]] == [phases], "also within the optimizer's closure"


GATED = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
        self.gate = torch.nn.Parameter(torch.ones(4, 5))

    def forward(self, x):
        x = self.first(x)
        gate = (x @ self.gate).sigmoid()
        return self.inner(x) * gate
"""


def test_what_a_module_computes_beside_its_part_is_not_the_parts_in_backward(place: Path, run: Start) -> None:
    """The gate's backward runs after that of ``inner``, and before that of ``first``, whose output both read."""
    (place / "gated.py").write_text(training(6, before=GATED, model="Model()", batch="torch.ones(3, 4)"))
    assert run("--warmup", "2", "--steps", "1", "--", sys.executable, "gated.py").returncode == 0
    work = read_work(place / "run" / "work.json")
    flops = {"/".join(one.path): one.flops for one in work.ranges if one.path[:1] == ("backward",)}
    first, product = 2 * 3 * 4 * 4, 2 * 3 * 4 * 5
    assert flops == {
        "backward": first + 4 * product,
        "backward/model": first + 4 * product,
        "backward/model/inner": 2 * product,
        "backward/model/first": first,
    }


ANNOTATED = """
import torch
from profkit import annotate

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    with annotate("forward"):
        loss = model(torch.ones(3, 4)).sum()
    with annotate("backward"):
        loss.backward()
    with annotate("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
"""


def test_one_step_is_counted_of_a_script_that_annotates_its_optimizer(place: Path, run: Start) -> None:
    (place / "annotated.py").write_text(ANNOTATED)
    run("--warmup", "2", "--steps", "2", "--", sys.executable, "annotated.py")
    assert len(manifest_of(place / "run")["profiled"]["steps"]) == 2
    ranges = printed("ranges", place / "run")["ranges"]
    steps = [(one["path"], one["instances"]) for one in ranges if "/" not in one["path"]]
    assert steps == [("step 2", 1), ("step 3", 1)]
    work = read_work(place / "run" / "work.json")
    assert work.model_flops == 2 * (2 * 3 * 4 * 2), "forward, and the weight's gradient"


def test_the_step_after_the_recorded_ones_is_counted(unedited: tuple[Path, str]) -> None:
    assert manifest_of(unedited[0] / "run")["processes"][0]["uncounted"] is None
    work = read_work(unedited[0] / "run" / "work.json")
    assert (work.source, work.dtype, work.missing) == ("counted", "fp32", ())
    first, last = 2 * 4 * 8 * 8, 2 * 4 * 8
    flops = {"/".join(one.path): one.flops for one in work.ranges}
    assert flops == {
        "": work.model_flops,
        "forward": first + last,
        "forward/model": first + last,
        "forward/model/0": first,
        "forward/model/1": 0,
        "forward/model/2": last,
        "backward": first + 2 * last,
        "backward/model": first + 2 * last,
        "backward/model/2": 2 * last,
        "backward/model/1": 0,
        "backward/model/0": first,  # nobody wants the gradient of the data
        "optimizer": 0,
    }
    assert work.model_flops == 2 * first + 3 * last
    optimizer = work.find(("optimizer",))
    assert optimizer is not None
    assert optimizer.least_bytes == 3 * 4 * (8 * 8 + 8 + 8 + 1), "parameters and gradients are read, parameters written"


def test_depth_and_no_annotate_leave_ranges_out(place: Path, run: Start) -> None:
    target = ("--warmup", "1", "--steps", "1", "--", sys.executable, "train.py", "0.1", "4")
    assert run("--depth", "0", *target).returncode == 0
    ranges = range_names(place / "run" / "trace.json.gz")
    assert ranges.count("model") == 2
    assert "0" not in ranges
    shutil.rmtree(place / "run")
    assert run("--no-annotate", *target).returncode == 0
    assert {name.partition("#")[0] for name in range_names(place / "run" / "trace.json.gz")} <= {
        "Optimizer.step",
        "Optimizer.zero_grad",
    }
    assert [one.path for one in read_work(place / "run" / "work.json").ranges] == [()], "the step is counted as a whole"


TRANSFORMED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Normalize(nn.Module):
    def forward(self, sample):
        return sample - 0.5

class Samples(Dataset):
    def __init__(self):
        self.normalize = Normalize()
    def __len__(self):
        return 80
    def __getitem__(self, index):
        return self.normalize(torch.ones(4))

model = nn.Linear(4, 2)
with torch.no_grad():
    for batch in DataLoader(Samples(), 10):
        model(batch)
"""


def test_a_module_that_makes_samples_is_no_model_whose_calls_are_steps(place: Path, run: Start) -> None:
    (place / "evaluate.py").write_text(TRANSFORMED)
    run("--warmup", "2", "--steps", "2", "--", sys.executable, "evaluate.py")
    process = manifest_of(place / "run")["processes"][0]
    assert (process["step_names"], process["seen"]) == (["Linear"], {"call:Linear": 4})
    assert not any("Normalize" in name for name in range_names(place / "run" / "trace.json.gz"))


THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch

model = torch.nn.Linear(4, 2)
def call(_):
    for _ in range(int(sys.argv[2])):
        with torch.no_grad():
            model(torch.ones(3, 4))

for _ in range(int(sys.argv[1])):
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(call, range(3)))
print("ended")
"""


def test_a_program_of_several_threads_ends_well_and_the_steps_of_one_are_recorded(place: Path, start: Start) -> None:
    (place / "threads.py").write_text(THREADS)
    done = start("--warmup", "2", "--steps", "2", "--", sys.executable, "threads.py", "1", "300")
    assert done.stdout.startswith("ended\n")
    assert not read_trace(place / "run").self_check.failed


def test_steps_of_another_thread_than_the_first_have_phases(place: Path, run: Start) -> None:
    train = "import threading\ndef train():\n" + indent(training(20), "    ")
    (place / "threaded.py").write_text(
        f"{train}\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()"
    )
    run("--warmup", "8", "--steps", "2", "--", sys.executable, "threaded.py")
    steps = manifest_of(place / "run")["attached"]["steps"]
    assert len(steps) == 7
    assert all({"forward_ns", "backward_ns", "optimizer_ns"} <= step.keys() for step in steps)


def test_a_thread_that_ends_while_it_is_recorded_ends_no_program(place: Path, start: Start) -> None:
    (place / "threads.py").write_text(THREADS.replace("ThreadPoolExecutor(3)", "ThreadPoolExecutor(1)"))
    done = start("--warmup", "4", "--steps", "9", "--", sys.executable, "threads.py", "3", "2")
    assert done.stdout.startswith("ended\n")
    assert "nothing was recorded: the thread that made the steps ended while they were recorded" in done.stderr
    assert "Leaked callback" not in done.stderr, "torch.profiler is stopped on its own thread"


SPAWNING = """
import torch
from torch import multiprocessing, nn

def train(steps):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    for steps in (8, 7):
        trainer = multiprocessing.get_context("spawn").Process(target=train, args=(steps,))
        trainer.start()
        trainer.join()
    model = nn.Linear(8, 8)
    for _ in range(9):
        model(torch.ones(8))
"""


def test_of_several_processes_without_a_rank_one_has_the_runs_files(place: Path, start: Start) -> None:
    (place / "spawning.py").write_text(SPAWNING)
    done = start("--warmup", "2", "--steps", "2", "--", sys.executable, "spawning.py")
    first, *others = ((one["step"], one["is_recorded"]) for one in manifest_of(place / "run")["processes"])
    assert (first, sorted(others)) == (("optimizer", True), [("call", False), ("optimizer", False)])
    assert "2 more processes made steps and were not recorded" in done.stderr
    assert not read_trace(place / "run").self_check.failed
    assert "optimizer" in range_names(place / "run" / "trace.json.gz")


def test_of_processes_with_too_few_steps_the_one_that_trains_says_how_many_there_are(place: Path, start: Start) -> None:
    (place / "spawning.py").write_text(SPAWNING.replace("(8, 7)", "(8,)"))
    done = start("--", sys.executable, "spawning.py")
    assert "it made 8 steps, too few for --warmup 14" in done.stderr
    assert manifest_of(place / "run")["processes"][0]["step"] == "optimizer"


def test_stop_ends_the_script_after_the_last_step(run: Start) -> None:
    done = run("--warmup", "1", "--steps", "1", "--stop", "--no-lines", "--", sys.executable, "train.py", "0.1", "500")
    assert "\n4 0x" not in done.stdout


def test_a_script_reads_our_standard_input_and_a_file_again_from_the_same_place(place: Path, forks: Forks) -> None:
    (place / "asks.py").write_text(FROM_INPUT)
    pipe, answers = place / "pipe", place / "answers"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=["4\nhello\n"])
    writer.start()
    words = _command("--warmup", "2", "--steps", "2", "--", sys.executable, "asks.py")
    assert ended(forks.run(words, place, reads=pipe)).stdout.startswith("rest: hello\n")
    writer.join()
    shutil.rmtree(place / "run")
    answers.write_text("skipped\n4\nhello\n")
    words = _command("--warmup", "9", "--steps", "2", "--", sys.executable, "asks.py")
    done = ended(forks.run(words, place, reads=answers, offset=len("skipped\n")))
    assert done.stdout.count("rest: hello\n") == 2


def test_the_end_names_what_the_self_check_warns_of(place: Path, run: Start) -> None:
    uneven = TRAIN.replace(
        "    loss.backward()", "    loss = loss + sum(loss * 0 for _ in range(number))\n    loss.backward()"
    )
    (place / "uneven.py").write_text(uneven)
    done = run("--warmup", "5", "--", sys.executable, "uneven.py", "0.1", "9")
    warned = [one.message for one in read_trace(place / "run").self_check.of("warning")]
    assert any("operators each time" in message for message in warned)
    # Which of all warnings has room on a screen depends on how even the steps were.
    assert "\nCare " in done.stdout or "warning" in done.stdout.partition("\nClosed ")[2]
    said = " ".join(run_command("summary", place / "run", "--all").stdout.split())
    assert all(message in said for message in warned)


def test_where_nothing_is_recorded_the_status_stays_the_scripts(place: Path, start: Start) -> None:
    (place / "no_torch.py").write_text("import sys\nprint(sorted(m for m in sys.modules if 'profkit' in m))")
    done = start("--", sys.executable, "no_torch.py")
    assert "profkit got into no Python process that imports torch" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert manifest_of(place / "run")["status"] == "failed"
    assert done.stdout == "[]\n", "a script without torch loads nothing of profkit's"


def test_another_sitecustomize_still_runs(place: Path, start: Start) -> None:
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.site_was_here = True\n")
    (place / "show.py").write_text(
        "import sys, sitecustomize\nprint(site_was_here, sitecustomize.__file__)\n"
        "print(any('capture/child' in entry for entry in sys.path))\n"
    )
    done = start("--", sys.executable, "show.py", PYTHONPATH=f"{place / 'site'}{os.pathsep}{ROOT}")
    assert done.stdout.splitlines() == [f"True {place / 'site' / 'sitecustomize.py'}", "False"]


@pytest.mark.nsys
def test_the_counted_step_is_not_among_the_recorded_ones_under_nsys(place: Path, start: Start) -> None:
    start("--nsys", "--warmup", "2", "--steps", "2", "--", sys.executable, "train.py", "0.1", "5")
    tree = read_trace(place / "run").ranges()
    steps = {row.path: row.instances for row in tree.ranges if row.name.startswith("step ")}
    assert steps == {"step 2": 1, "step 3": 1, "warmup/step 4": 1}


@pytest.mark.nsys
def test_under_nsys_a_failed_script_has_read_our_input_and_keeps_its_status_and_its_trace(place: Path) -> None:
    (place / "asks.py").write_text(f"{FROM_INPUT}\nraise ValueError('the data are bad')")
    done = subprocess.run(
        _command("--nsys", "--warmup", "1", "--steps", "9", "--", sys.executable, "asks.py"),
        input="4\nhello\n",
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("rest: hello\n")
    assert "ValueError: the data are bad" in done.stderr
    assert manifest_of(place / "run")["status"] == "failed"
    assert "step 2" in {row.name for row in read_trace(place / "run" / "trace.sqlite").ranges().ranges}
