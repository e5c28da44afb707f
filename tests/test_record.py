"""`profkit.record` in a program: what a block yields, how it ends, and that nothing of it stays in the process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import profkit
from profkit.errors import RunError, TraceError, UsageError
from profkit.run.directory import Run

pytest.importorskip("torch")

from tests.forked_scripts import Forks
from tests.recorded_programs import times_by_step

LOOP = """
import gc
import json
import os
import sys
import warnings
import weakref

import torch
import torch._dynamo
from torch import nn

import profkit
from profkit.capture import patches, within

model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)


def step():
    model(torch.ones(8, 32)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def loop(steps):
    for _ in range(steps):
        step()


def places():
    functions = {target: getattr(*patches._owner_of(target), None) for target in patches.REASONS}
    others = {
        "step of the class": torch.optim.AdamW.step,
        "step of the optimizer": optimizer.step,
        "worker": torch.utils.data._utils.worker._worker_loop,
        "shown warnings": warnings._showwarnmsg,
        "finders": tuple(map(id, sys.meta_path)),
        "switch interval": sys.getswitchinterval(),
        "variables": [name for name in os.environ if name.startswith("PROFKIT_")],
        "callbacks of Dynamo": len(torch._dynamo.callback.callback_handler.start_callbacks),
        "observers": len(profkit.annotation._observers) + len(profkit.annotation._others),
    }
    return {**functions, **others}


import profkit.annotation

loop(1)
before = places()


def changed():
    after = places()
    # What the block was the first to import cannot have been there before.
    return [name for name, value in before.items() if value is not None and after[name] not in (value, None)]


def tell(**found):
    patched = [name for name in patches.REASONS if patches.is_patched(name)]
    print(json.dumps({**found, "changed": changed(), "patched": patched, "running": len(within._running)}))
"""


def run_block(forks: Forks, place: Path, code: str) -> tuple[dict[str, object], str]:
    """Run a script that ends by telling what it found; return that, and what profkit said."""
    (place / "train.py").write_text(LOOP + code)
    done = forks.check([sys.executable, "train.py"], place)
    said = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("USDT:")]  # torch's own
    return json.loads(done.stdout.splitlines()[-1]), "".join(said)


NOTHING_LEFT: dict[str, object] = {"changed": [], "patched": [], "running": 0}


def test_a_block_is_recorded_and_answers_every_question(forks: Forks, tmp_path: Path) -> None:
    code = """
with profkit.record(steps=2, warmup=6, path="run") as run:
    loop(12)
tell(
    same=str(run.summary()) == str(profkit.open("run").summary()),
    held=run.check(max_step_ms=10_000).held,
    broken=run.check(max_step_ms=1e-6).held,
    backward=run.kernels("backward").instances,
    steps=[row.name for row in run.ranges().ranges if row.name.startswith("step ")],
    page="A step takes" in run.report("page.html").read_text(),
    predicted=run.whatif(["gpu:×2"]).time is not None,
    timed=run.step_times().find("step", None).clean.count,
)
"""
    found, said = run_block(forks, tmp_path, code)
    assert found.pop("steps") == ["step 6", "step 7"]
    assert found == NOTHING_LEFT | {
        "same": True,
        "held": True,
        "broken": False,
        "backward": 2,
        "page": True,
        "predicted": True,
        "timed": 5,
    }
    assert said == ""
    manifest = Run(tmp_path / "run").manifest
    assert (manifest.status, manifest.kind, manifest.target) == ("complete", "block", "train.py")


def test_a_block_has_the_same_steps_and_ranges_as_a_command(forks: Forks, tmp_path: Path) -> None:
    run_block(forks, tmp_path, "with profkit.record(2, warmup=4, path='block'):\n    loop(12)\ntell()\n")
    (tmp_path / "plain.py").write_text(LOOP.replace("loop(1)\n", "") + "loop(12)\n")
    words = [sys.executable, "plain.py"]
    forks.check_profkit("run", "--warmup", "4", "--steps", "2", "-o", "command", "--", *words, cwd=tmp_path)
    paths = [
        [(row.path, row.instances) for row in profkit.open(tmp_path / name).ranges().ranges if "#" not in row.path]
        for name in ("block", "command")
    ]
    assert paths[0] == paths[1]


def test_an_optimizer_with_a_closure_and_a_scheduler_from_before_the_block_is_seen(
    forks: Forks, tmp_path: Path
) -> None:
    code = """
chosen = torch.optim.LBFGS(model.parameters(), max_iter=2, line_search_fn=None)
torch.optim.lr_scheduler.StepLR(chosen, 1000)
own = chosen.step

def closure():
    chosen.zero_grad()
    loss = model(torch.ones(8, 32)).pow(2).mean()
    loss.backward()
    return loss

with profkit.record(steps=2, warmup=2, lines=False, path="run"):
    for _ in range(4):
        chosen.step(closure)
tell(own=chosen.step is own, hooks=len(chosen._optimizer_step_post_hooks))
"""
    assert run_block(forks, tmp_path, code) == (NOTHING_LEFT | {"own": True, "hooks": 0}, "")
    opened = profkit.read_trace(tmp_path / "run")
    assert not opened.self_check.failed
    for times in times_by_step(opened):
        del times[""]
        assert {path: count for path, count in times.items() if "/" not in path} == {
            "forward": 2,
            "backward": 2,
            "optimizer": 2,
        }


def test_a_second_block_and_a_decorated_function_are_recorded_as_the_first(forks: Forks, tmp_path: Path) -> None:
    code = """
@profkit.record(steps=1, warmup=2)
def train(steps):
    "Trains."
    loop(steps)
    return steps

never = train.run
returned = train(3), train(5)
with profkit.record(steps=1, warmup=2, lines=False) as second:
    loop(3)
tell(
    never=never,
    returned=returned,
    doc=train.__doc__,
    kernels=[run.kernels("optimizer").instances for run in (train.run, second)],
)
"""
    found, said = run_block(forks, tmp_path, code)
    assert found == NOTHING_LEFT | {"never": None, "returned": [3, 5], "doc": "Trains.", "kernels": [1, 1]}
    assert said.count("no lines of source are known") == 1, said
    assert len(list((tmp_path / "runs").iterdir())) == 3


@pytest.mark.parametrize(
    ("steps", "lacks"),
    [
        (0, "nothing was recorded: the block ran no model, no backward pass and no optimizer"),
        (
            3,
            "nothing was recorded: the block ended after 3 steps; 2 were timed, and the recording begins after 4: make "
            "more steps, or lower warmup=",
        ),
        (5, "the block ended while it was recorded: 1 of 2 steps are complete"),
        (6, "no lines of source are known: they are looked for in the steps after the recorded ones"),
        (8, None),
    ],
)
def test_a_shorter_loop_yields_what_it_has_and_says_so(
    forks: Forks, tmp_path: Path, steps: int, lacks: str | None
) -> None:
    code = f"with profkit.record(steps=2, warmup=4, path='run'):\n    loop({steps})\ntell()\n"
    found, said = run_block(forks, tmp_path, code)
    assert found == NOTHING_LEFT
    assert said == ("" if lacks is None else f"profkit: {lacks}\n")
    run = profkit.open(tmp_path / "run")
    if steps < 5:
        with pytest.raises(TraceError, match="this run holds no trace: it failed"):
            run.kernels()
    else:
        assert run.kernels("optimizer").instances == steps - 4 if steps < 6 else 2
        # Not from what is printed: a screen has room for one warning, and which one depends on how even the steps were.
        assert lacks is None or lacks in {finding.message for finding in run.summary().document.findings}
    assert (run.step_times() is None) == (steps == 0)
    assert ("A step takes " in str(run.summary())) == (steps != 0)


def test_an_exception_goes_on_to_the_program_and_what_was_recorded_is_kept(forks: Forks, tmp_path: Path) -> None:
    code = """
caught = []
for name, kind, number in (("before", ValueError, 1), ("in", KeyboardInterrupt, 5), ("in forward", ValueError, 5)):
    handle = None
    try:
        with profkit.record(steps=3, warmup=4, path=name) as run:
            loop(number)
            if name == "in forward":
                def fail(*_):
                    raise kind("bad data")
                handle = model[1].register_forward_pre_hook(fail)
                loop(1)
            raise kind("bad data")
    except kind as error:
        caught.append(str(error))
    if handle:
        handle.remove()
tell(caught=caught, kept=run.kernels("optimizer").instances)
"""
    found, _ = run_block(forks, tmp_path, code)
    assert found == NOTHING_LEFT | {"caught": ["bad data"] * 3, "kept": 1}
    manifests = {name: Run(tmp_path / name).manifest for name in ("before", "in", "in forward")}
    assert {manifest.status for manifest in manifests.values()} == {"failed"}
    assert [manifest.reason for manifest in manifests.values()] == [
        "ValueError: bad data",
        "interrupted",
        "ValueError: bad data",
    ]
    assert "FAILED" in str(profkit.open(tmp_path / "in").summary())


def test_a_fork_that_leaves_the_block_too_leaves_the_recording_alone(forks: Forks, tmp_path: Path) -> None:
    code = """
import os
with profkit.record(steps=2, warmup=4, lines=False, path="run") as run:
    loop(5)
    child = os.fork()
    loop(3)
if not child:
    os._exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
tell(status=status, steps=run.kernels("optimizer").instances)
"""
    assert run_block(forks, tmp_path, code) == (NOTHING_LEFT | {"status": 7, "steps": 2}, "")


def test_what_forbids_a_recording_is_said_before_anything_is_made(forks: Forks, tmp_path: Path) -> None:
    code = """
import os
refusals = []

def refused(enter):
    try:
        enter()
    except profkit.errors.UsageError as error:
        refusals.append(str(error))

import profkit.errors
with torch.profiler.profile():
    refused(profkit.record().__enter__)
with profkit.record(steps=2, warmup=4, lines=False, path="run") as run:
    loop(3)
    refused(profkit.record().__enter__)
    loop(3)
refused(run.__enter__)
tell(refusals=refusals, steps=run.kernels("optimizer").instances)
"""
    found, said = run_block(forks, tmp_path, code)
    assert said == ""
    assert found == NOTHING_LEFT | {
        "steps": 2,
        "refusals": [
            "a torch.profiler already runs, and a process has only one: end it before profkit.record begins",
            "profkit.record already records in this process: leave its block before another one begins",
            "a recording is made once: call profkit.record() for another one",
        ],
    }
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]


def test_each_of_several_ranks_has_a_run_in_one_directory_and_none_waits_for_another(
    forks: Forks, tmp_path: Path
) -> None:
    code = """
from torch import distributed

plain = model
model = lambda inputs: plain(inputs)
with profkit.record(steps=2, warmup=4, lines=False, path="before") as early:
    loop(6)
distributed.init_process_group("gloo")
plain = nn.parallel.DistributedDataParallel(plain)
with profkit.record(steps=2, warmup=4, lines=False) as run:
    loop(8)
rank = distributed.get_rank()
if rank == 0:
    with profkit.record(steps=2, warmup=4, lines=False, path="alone"):
        loop(8)
else:
    loop(8)
steps = [recording.kernels("optimizer").instances for recording in (early, run)]
assert "A step takes " in str(run.summary())
with open(f"told{rank}", "w") as told:
    paths = [str(early.path), str(run.path)]
    patched = [name for name in patches.REASONS if patches.is_patched(name)]
    told.write(json.dumps({"paths": paths, "steps": steps, "patched": patched, "running": len(within._running)}))
"""
    (tmp_path / "train.py").write_text(LOOP + code)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = forks.check(words, tmp_path)
    assert "profkit:" not in done.stderr
    (shared,) = (tmp_path / "runs").iterdir()
    for rank in (0, 1):
        told = json.loads((tmp_path / f"told{rank}").read_text())
        paths = [f"before/rank{rank}", f"runs/{shared.name}/rank{rank}"]
        assert told == {"paths": paths, "steps": [2, 2], "patched": [], "running": 0}
        (process,) = Run(shared / f"rank{rank}").manifest.processes
        assert process.rank == rank
    assert [record.rank for record in profkit.open(shared).ranks().ranks] == [0, 1]
    assert not list(tmp_path.rglob("partial.*"))
    assert [path.name for path in (tmp_path / "alone").iterdir() if path.is_dir()] == ["rank0"]


def test_a_program_that_is_recorded_from_outside_does_not_record_itself(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP + "with profkit.record():\n    loop(3)\n")
    done = forks.run_profkit("run", "-o", "run", "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "UsageError: `profkit run` already records this program: leave one of the two out" in done.stderr


def test_a_profiler_that_the_block_starts_has_its_events_and_ends_the_recording(forks: Forks, tmp_path: Path) -> None:
    code = """
with profkit.record(steps=3, warmup=4, path="run") as run:
    loop(5)
    with torch.profiler.profile() as theirs:
        loop(2)
    loop(2)
tell(theirs=any(event.name == "aten::addmm" for event in theirs.events()), ours=run.kernels("optimizer").instances)
"""
    found, said = run_block(forks, tmp_path, code)
    assert found == NOTHING_LEFT | {"theirs": True, "ours": 1}
    assert said.startswith("profkit: the recording is not whole: the script's own torch.profiler ran in the steps to ")


def test_a_block_without_a_step_says_what_it_did_and_what_would_help(forks: Forks, tmp_path: Path) -> None:
    code = """
with profkit.record(warmup=1, path="calls"):
    for _ in range(5):
        with torch.no_grad():
            model(torch.ones(8, 32))
with profkit.record(step_on="call:Sequential", steps=2, warmup=1, lines=False, path="chosen") as chosen:
    for _ in range(5):
        model(torch.ones(8, 32))
with profkit.record(step_on="whole", path="whole") as whole:
    torch.ones(8).sum()
tell(calls=chosen.kernels("forward").instances, whole=whole.kernels().instances)
"""
    found, said = run_block(forks, tmp_path, code)
    assert found == NOTHING_LEFT | {"calls": 2, "whole": None}
    assert said == (
        "profkit: nothing was recorded: no step ended in the block, which made call:Sequential; step_on= says which "
        "ends one\n"
    )


@pytest.mark.gpu
def test_memory_is_recorded_in_further_steps_and_the_programs_own_history_goes_on(forks: Forks, tmp_path: Path) -> None:
    code = """
model.cuda()
optimizer.state.clear()
def step():
    model(torch.ones(8, 32, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

loop(20)
torch.cuda.reset_peak_memory_stats()
with profkit.record(steps=2, warmup=4, memory=True, path="run") as run:
    loop(100)
memory = run.memory()
torch.cuda.memory._record_memory_history()
with profkit.record(steps=2, warmup=2, lines=False, memory=True, path="theirs"):
    loop(8)
tell(
    peak=memory.peak - torch.cuda.max_memory_allocated(),
    exact=memory.totals.exact,
    waits=torch.cuda.get_sync_debug_mode(),
    theirs=torch._C._cuda_isHistoryEnabled(),
)
"""
    found, said = run_block(forks, tmp_path, code)
    assert found == NOTHING_LEFT | {"peak": 0, "exact": True, "waits": 0, "theirs": True}
    assert said == "profkit: no memory was recorded: the program records the allocator's history itself\n"


def test_a_run_directory_that_is_taken_is_refused_and_stays(forks: Forks, tmp_path: Path) -> None:
    code = """
import os
os.mkdir("run")
open("run/mine", "w").close()
try:
    profkit.record(path="run").__enter__()
except profkit.errors.RunError as error:
    tell(said=str(error))
"""
    found, _ = run_block(forks, tmp_path, "import profkit.errors\n" + code)
    assert found == NOTHING_LEFT | {
        "said": "run: exists and is not empty; name a new directory with path=, or remove this one"
    }
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_disk_that_is_full_ends_no_program(forks: Forks, tmp_path: Path) -> None:
    code = """
import errno
import profkit.recording
from profkit.capture.steps import after
from profkit.errors import RunError

def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")

said = []

def note_error(call):
    try:
        call()
    except RunError as error:
        said.append(str(error))

with profkit.record(steps=2, warmup=4, path="later") as run:
    loop(5)
    write, profkit.recording.write_manifest = profkit.recording.write_manifest, full
    loop(3)
note_error(run.summary)
profkit.recording.write_manifest = write
after.WorkerLines = full
note_error(profkit.record(path="at once").__enter__)
tell(said=said)
"""
    found, said = run_block(forks, tmp_path, code)
    assert found == NOTHING_LEFT | {
        "said": [
            "later: the recording could not be saved: No space left on device",
            "at once: No space left on device; free some space, or name another directory",
        ]
    }
    assert said == "profkit: the recording could not be saved: No space left on device\n"


def test_a_compiled_model_is_recorded_and_goes_on_afterwards(forks: Forks, tmp_path: Path) -> None:
    code = """
compiled = torch.compile(model, backend="aot_eager")

def train(steps):
    for _ in range(steps):
        compiled(torch.ones(8, 32)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

train(2)
with profkit.record(steps=2, warmup=4, path="run") as run:
    train(10)
train(2)
tell(steps=run.kernels("forward").instances)
"""
    assert run_block(forks, tmp_path, code) == (NOTHING_LEFT | {"steps": 2}, "")


def test_nothing_of_a_recording_is_kept_alive(forks: Forks, tmp_path: Path) -> None:
    code = """
with profkit.record(steps=2, warmup=4) as run:
    alive = weakref.ref(run._stages.session), weakref.ref(run._stages.session.hooks)
    loop(10)
gc.collect()
tell(alive=[thing() is not None for thing in alive])
"""
    found, _ = run_block(forks, tmp_path, code)
    assert found == NOTHING_LEFT | {"alive": [False, False]}


def test_arguments_that_are_off_are_refused() -> None:
    for arguments, said in (
        ({"steps": 0}, "steps must be 1 or more"),
        ({"warmup": -1}, "warmup 0 or more"),
        ({"step_on": "sometimes:x"}, "step_on='sometimes:x': sometimes:x: write one of"),
        ({"step_on": "whole", "memory": True}, "there is only one"),
        ({"steps": print}, "with parentheses"),
    ):
        with pytest.raises(UsageError, match=said):
            profkit.record(**arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="runs after it has returned"):
        profkit.record()(yield_one)


def yield_one():  # type: ignore[no-untyped-def]
    """A generator: its body does not run in the call."""
    yield 1


def test_nothing_can_be_asked_before_the_block_has_ended() -> None:
    with pytest.raises(RunError, match="enter the block first"):
        profkit.record().summary()
