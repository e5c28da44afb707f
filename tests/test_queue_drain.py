"""A data loader's queue that fills while the recorder starts: which steps are left out, and how a run is read then."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402
from torch.utils.data import dataloader as torchs  # noqa: E402

from profkit import read_trace  # noqa: E402
from profkit.capture.patches import restore_all  # noqa: E402
from profkit.capture.session import Session  # noqa: E402
from profkit.capture.steps.data_loading import (  # noqa: E402
    LONGEST_BURST,
    LONGEST_DRAIN,
    DataLoading,
    Epoch,
    Queue,
    QueueDrain,
    count_batches,
    count_steps_to_drain,
    queue_of,
)
from profkit.launch.manifest import warn_of_full_queue, warn_of_gain  # noqa: E402
from profkit.run.manifest import Loading  # noqa: E402
from profkit.run.recording import Order, take_processes  # noqa: E402
from profkit.trace.parts import begin_at  # noqa: E402
from tests.forked_scripts import Forks  # noqa: E402
from tests.in_process import manifest_of, run_command  # noqa: E402
from tests.nsys_builder import NsysBuilder  # noqa: E402

# Each batch is made when it is asked for, and as many as the queue holds while the recorder starts.
SLOW_START = """
import sys
import time
import torch
from torch import nn
from torch.profiler import profile
from torch.utils.data import DataLoader, Dataset


class Asked(Dataset):
    count = torch.multiprocessing.Value("i")

    def __len__(self):
        return 40

    def __getitem__(self, index):
        while index >= self.count.value:
            time.sleep(0.001)
        return torch.full((8,), float(index)), torch.ones(1)


class Batches:
    def __iter__(self):
        self.own = iter(DataLoader(Asked(), batch_size=1, num_workers=2))
        while True:
            Asked.count.value += 1
            yield next(self.own)


batches = Batches()
start = profile.start_trace


def start_slowly(self):
    start(self)
    Asked.count.value += 4
    deadline = time.monotonic() + 60
    while ready() < 4 and time.monotonic() < deadline:
        time.sleep(0.001)


def ready():
    held = sum(len(task) > 1 for task in batches.own._task_info.values())  # those that came before their turn
    return held + batches.own._worker_result_queue.qsize()


profile.start_trace = start_slowly
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
for number, (inputs, targets) in enumerate(batches):
    if number == int(sys.argv[1]):
        Asked.count.value = 40  # the workers end when they have made theirs
        break
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
"""

EMPTY, FULL = Queue(2, 4, 0), Queue(2, 4, 4)


@pytest.mark.parametrize(
    ("before", "after", "per_step", "waits", "steps"),
    [
        (EMPTY, FULL, 1, True, 4),
        (EMPTY, FULL, 3, True, 2),
        (EMPTY, FULL, 0.5, True, 8),
        (EMPTY, FULL, 1, False, 4),  # too few steps to have waited yet, but the loader hardly keeps up
        (Queue(2, 4, 3), FULL, 1, False, 0),  # data are ready anyway
        (Queue(8, 8, 6), Queue(8, 8, 8), 1, True, 8),  # just after a burst
        (EMPTY, Queue(2, 4, 1), 1, True, 0),  # the recorder started at once
        (Queue(2, 4, None), Queue(2, 4, None), 1, True, 4),
        (Queue(2, 4, None), Queue(2, 4, None), 1, False, 0),
        (EMPTY, FULL, 0, True, 0),  # the steps take no batches of it
        (Queue(), Queue(), 1, True, 0),  # no workers
    ],
)
def test_only_a_queue_that_filled_during_the_start_must_drain(
    before: Queue, after: Queue, per_step: float, waits: bool, steps: int
) -> None:
    assert count_steps_to_drain(before, after, per_step, usually_waits=waits, keeps_full=False) == steps


@pytest.mark.parametrize(
    ("keeps_full", "waits", "steps"),
    [
        (False, False, 16),  # a burst came lately; the batches of the first step's time are still there
        (True, False, 0),
        (True, True, 16),
    ],
)
def test_a_queue_that_filled_during_the_first_step_must_drain_too(keeps_full: bool, waits: bool, steps: int) -> None:
    before, after = Queue(8, 16, 11, is_young=True), Queue(8, 16, 11, is_young=True)
    assert count_steps_to_drain(before, after, 1, usually_waits=waits, keeps_full=keeps_full) == steps


@pytest.mark.parametrize(("ready", "keeps_full"), [([8, 7, 6, 8], True), ([8, 5, 8, 8], False), ([None, None], True)])
def test_whether_the_queue_kept_full_is_seen_at_every_step(
    monkeypatch: pytest.MonkeyPatch, ready: list[int | None], keeps_full: bool
) -> None:
    loading = DataLoading(lambda: None, lambda: None)
    for one in ready:
        monkeypatch.setattr(loading, "look", lambda one=one: Queue(4, 8, one))
        loading.step_ended()
    assert loading.keeps_full == keeps_full


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def test_the_queue_of_a_loader_in_use_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torchs.DataLoader, "__iter__"), (torchs._BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    loading = DataLoading(lambda: None, lambda: None)
    loading.install()
    list(DataLoader(Numbers(), batch_size=None))
    assert loading.look() == Queue(), "without workers nothing runs ahead"
    assert loading.epoch == Epoch(), "nor is anything started"
    batches = iter(DataLoader(Numbers(), batch_size=None, num_workers=1, prefetch_factor=3))
    next(batches)
    loading.step_ended()
    deadline = time.monotonic() + 60
    while loading.look().ready != 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert loading.look() == Queue(1, 3, 3, is_young=True)
    assert loading.batches_per_step == 1
    assert loading.epoch.batches == 8
    assert loading.epoch.start_ns > 0
    list(DataLoader(Numbers(), batch_size=4, num_workers=1))
    assert loading.epoch.batches == 8, "a shorter loader, as for evaluation"
    list(batches)
    assert loading.look() == Queue(), "all batches are given out"
    before_ns = loading._ended_ns
    assert before_ns > 0, "its workers' end belongs to the next epoch's beginning"
    list(DataLoader(Numbers(), batch_size=None, num_workers=1))
    assert loading.epoch.start_ns > before_ns
    assert count_batches(DataLoader(Numbers())) == 0


def test_an_epoch_of_workers_that_stay_is_known_from_the_second_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torchs.DataLoader, "__iter__"), (torchs._BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    loading = DataLoading(lambda: None, lambda: None)
    loading.install()
    stays = DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True)
    list(stays)
    assert loading.epoch == Epoch(4, 0, starts_workers=False), "that its workers start is no part of later ones"
    list(stays)
    assert (loading.epoch.batches, loading.epoch.starts_workers) == (4, False)
    assert loading.epoch.start_ns > 0
    list(DataLoader(Numbers(), batch_size=4, num_workers=1))
    assert loading.epoch.batches == 4, "that of an evaluation begins in other steps"
    list(DataLoader(Numbers(), num_workers=1))
    assert (loading.epoch.batches, loading.epoch.starts_workers) == (8, True)


def test_how_long_later_steps_wait_is_known_once_the_queue_is_empty_again() -> None:
    usual, waiting, evaluating = ((60, 0), (160, 100), (900, 500))
    times = [usual] * 4 + [usual, usual, usual, waiting] * 2 + [evaluating]
    steps = [{"step_ns": step_ns, "data_ns": data_ns} for step_ns, data_ns in times]
    drain = QueueDrain(None, Filled())  # type: ignore[arg-type]
    before = Loading(workers=2, queue_batches=4, batches_per_step=1.0, epoch_batches=7)
    found = drain.describe_later(before, steps)
    assert found is not None
    assert (found.later_wait_ns, found.epoch_batches, found.workers) == (25, 0, 2)
    few = drain.describe_later(before, steps[:5])
    assert few is not None
    assert few.later_wait_ns is None, "the workers deliver for two steps at once"
    assert drain.describe_later(None, steps) is None


def test_workers_stay_if_those_of_all_loaders_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torchs.DataLoader, "__iter__"), (torchs._BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    loading = DataLoading(lambda: None, lambda: None)
    loading.install()
    for workers, stay, keeps in ((0, False, False), (1, True, True), (1, False, False)):
        list(DataLoader(Numbers(), batch_size=4, num_workers=workers, persistent_workers=stay))
        assert loading.keeps_workers is keeps


def test_batches_that_came_before_their_turn_and_those_to_be_pinned_are_ready_too() -> None:
    """Of 4 batches one is held back, one lies in the workers' queue, one is pinned; the last is on its way."""
    came, pinned = SimpleNamespace(qsize=lambda: 1), SimpleNamespace(qsize=lambda: 1)
    tasks = {5: (0,), 6: (1, "data")}
    parts = {"_num_workers": 2, "_prefetch_factor": 2, "_tasks_outstanding": 3, "_task_info": tasks, "_rcvd_idx": 6}
    assert queue_of(SimpleNamespace(**parts, _data_queue=pinned, _worker_result_queue=came)) == Queue(2, 4, 3)
    assert queue_of(SimpleNamespace(**parts, _data_queue=came, _worker_result_queue=came)) == Queue(2, 4, 2)


@pytest.mark.parametrize(
    ("ready", "falls_behind"),
    [
        ([8, 7, 6, 5], True),  # nothing new came
        ([8, 7, 7, 6], True),  # one batch for three
        ([8, 7, 8, 7], False),  # the workers keep up
        ([8, 8, 8, 8], False),
        ([8, 7], False),  # too few steps to tell
        ([8, None, None, None], False),
    ],
)
def test_workers_that_are_slower_than_the_steps_are_found_before_the_queue_is_empty(
    monkeypatch: pytest.MonkeyPatch, ready: list[int | None], falls_behind: bool
) -> None:
    """The first step took long, so that the queue was full; every step takes a batch."""
    loading = DataLoading(lambda: None, lambda: None)
    for one in ready:
        monkeypatch.setattr(loading, "look", lambda one=one: Queue(4, 8, one))
        loading._taken = 1
        loading.step_ended()
    assert loading.falls_behind == falls_behind
    loading.forget_steps()
    assert not loading.falls_behind
    assert loading.batches_per_step == 0


class Filled:
    """Stands for the data loaders: a queue that is empty at the first look and full at the next."""

    batches_per_step = 1.0
    falls_behind = keeps_full = keeps_workers = False
    epoch, loaders = Epoch(), ()

    def __init__(self, capacity: int = 4, workers: int = 2) -> None:
        self._queues = iter((Queue(workers, capacity, 0), Queue(workers, capacity, capacity)))

    def look(self) -> Queue:
        return next(self._queues)

    def step_ended(self) -> None:
        pass


def _drained(folder: Path, loading: Any, step_ns: int, steps: int | None = 3) -> int:
    drain = QueueDrain(folder, loading)
    drain.look()
    return drain.plan(5, [{"step_ns": step_ns, "data_ns": step_ns // 2}], steps)


def test_a_drain_is_bounded_by_steps_and_by_time(tmp_path: Path) -> None:
    assert _drained(tmp_path, Filled(), 1_000) == 4
    assert _drained(tmp_path, Filled(1_000), 1_000) == LONGEST_DRAIN
    assert _drained(tmp_path, Filled(1_000), 10_000_000_000) == 3


def test_steps_are_recorded_for_a_delivery_of_all_workers(tmp_path: Path) -> None:
    assert _drained(tmp_path, Filled(workers=12), 1_000) == 4 + 9
    assert _drained(tmp_path, Filled(workers=12), 1_000, steps=12) == 4
    assert _drained(tmp_path, Filled(workers=12), 1_000, steps=None) == 4
    assert _drained(tmp_path, Filled(workers=100), 1_000) == 4 + LONGEST_BURST - 3
    assert _drained(tmp_path, Filled(0, workers=12), 1_000) == 0


@pytest.mark.parametrize(
    ("made", "counted", "state"),
    [(9, 3, "complete"), (7, 1, "cut short"), (6, 4, "complete"), (5, 3, "complete"), (4, 2, "cut short")],
)
def test_a_session_records_so_many_steps_more(tmp_path: Path, made: int, counted: int, state: str) -> None:
    """Two warm-up steps, four that drain the queue, three that count. A script that ends sooner keeps what it made."""
    session = Session(Order(str(tmp_path), "kineto", 2, 3, annotate=False))
    session.hooks.loading = Filled()  # type: ignore[assignment]
    session._drain = QueueDrain(tmp_path, session.hooks.loading)
    for number in range(made + 1):
        session.boundary(number)
    session.end()
    (process,) = take_processes(tmp_path)
    assert (process.state, len(process.profiled)) == (state, counted)
    assert process.loading is not None
    assert process.loading.drained_steps == (4 if made > 6 else 0)
    assert process.loading.first_step == 6
    assert (process.loading.needed_steps, process.loading.queue_batches) == (4, 4)


def test_one_process_reads_the_times_of_its_steps_when_a_part_ends_and_waits_for_no_gpu_before(tmp_path: Path) -> None:
    session = Session(Order(str(tmp_path), "kineto", 5, 2, annotate=False))
    for number in range(5):
        session.boundary(number)
    assert session._samples.steps == {"attached": [], "profiled": []}
    for number in range(5, 8):
        session.boundary(number)
    session.end()
    (process,) = take_processes(tmp_path)
    assert process.attached
    assert len(process.profiled) == 2


def test_a_trace_begins_where_the_first_counted_step_does(tmp_path: Path) -> None:
    builder = NsysBuilder(("epoch", 0, 500))
    for number in range(4):
        at = 100 * number
        builder.range(f"step {number}", at, at + 100, int64Value=number)
        builder.kernel(at + 10, 30, name=f"k{number}")
        builder.copy(at + 50, 10, start=at + 60)
    builder.kernel(None, 5, name="early", start=150)
    builder.kernel(310, 5, tid=200, pid=200, name="another process")
    trace = begin_at(read_trace(builder.write(tmp_path / "t.sqlite")).trace, "step 2")
    names = [trace.names[i] for i in trace.ranges.name]
    spans = sorted(zip(names, trace.ranges.start_ns.tolist(), trace.ranges.end_ns.tolist(), strict=True))
    assert spans == [("epoch", 200, 500), ("step 2", 200, 300), ("step 3", 300, 400)]
    assert {names[at]: number for at, number in trace.ranges.payload.items()} == {"step 2": 2, "step 3": 3}
    assert sorted(trace.names[i] for i in trace.work.name) == ["another process", "k2", "k3"]
    assert (trace.copies.start_ns.tolist(), len(trace.calls)) == ([260, 360], 5)
    assert begin_at(trace, "step 9") is trace


@pytest.mark.parametrize(("length", "counted"), [(30, 3), (9, 4)])
def test_a_run_says_which_steps_it_leaves_out(tmp_path: Path, forks: Forks, length: int, counted: int) -> None:
    """Of 30 steps 5 warm up, 4 empty the queue, 3 count; of 9 the 4 that would empty it are all that was recorded."""
    (tmp_path / "train.py").write_text(SLOW_START)
    words = ("--warmup", "5", "--steps", "3", "--", sys.executable, "train.py", str(length))
    done = forks.check_profkit("run", "-o", "run", *words, cwd=tmp_path)
    manifest = manifest_of(tmp_path / "run")
    loading = manifest["processes"][0]["loading"]
    assert (loading["workers"], loading["queue_batches"]) == (2, 4)
    is_drained = length == 30
    assert loading["drained_steps"] == (4 if is_drained else 0), (loading, manifest["attached"])
    assert len(manifest["profiled"]["steps"]) == counted
    opened = read_trace(tmp_path / "run")
    paths = opened.ranges().to_pandas()["path"]
    first, last = (9, 11) if is_drained else (5, 9)  # the script ends in a step that it does not finish
    assert {path for path in paths if path.startswith("step ") and "/" not in path} == {
        f"step {number}" for number in range(first, last + 1)
    }
    assert not opened.self_check.failed
    assert manifest["status"] == "complete"
    assert "ended while it was recorded" not in done.stderr
    said = " ".join(run_command("summary", tmp_path / "run", "--all").stdout.split())
    assert ("after 4 for a data loader's full queue" in said) == is_drained
    assert ("wait less for data than usual" in done.stderr) != is_drained


def test_a_queue_that_could_not_drain_is_said() -> None:
    assert warn_of_full_queue(None) == warn_of_full_queue(Loading(needed_steps=4, drained_steps=4)) == []
    (said,) = warn_of_full_queue(Loading(needed_steps=100, drained_steps=64, start_ns=1_200_000_000))
    assert "(1.2 s): the first 36 recorded steps" in said


def test_bursts_of_data_are_no_gain() -> None:
    """Every step takes 2 ms and waits now and then; recorded steps of which none waits are not faster."""
    waits = [80, 0, 0, 0, 0, 0, 80, 80]
    steps = [{"step_ns": (2 + wait) * 1_000_000, "data_ns": wait * 1_000_000} for wait in waits]
    quick = [{"step_ns": 2_000_000, "data_ns": 0}] * 3
    assert warn_of_gain(steps[-3:], quick) == []
    assert warn_of_gain([{"step_ns": 82_000_000}] * 3, quick) != []


# -- where it is written how a loader works --------------------------------------------------------------------------

LIBRARY = """
from torch.utils.data import DataLoader


class TrainingArguments:
    def __init__(self, **given):
        self.given = given


class Trainer:
    def __init__(self, args, data):
        self.args, self.data = args, data

    def train(self):
        return list(again(DataLoader(self.data, num_workers=self.args.given.get("dataloader_num_workers", 0))))


def create_loader(data, num_workers):
    return DataLoader(data, num_workers=num_workers)


def again(loader):
    return DataLoader(loader.dataset, num_workers=loader.num_workers)
"""
MAKES = {
    "an argument": "list(DataLoader(DATA,\n  num_workers=0))  # here",
    "an argument of a function of a library": "list(create_loader(DATA,\n  num_workers=0))  # here",
    "a variable": "workers = 1\nworkers = 0  # here\nlist(DataLoader(DATA, num_workers=workers))",
    "a variable elsewhere": """def other():
  workers = 0
workers = int()
list(DataLoader(DATA, num_workers=workers))  # here
workers = 0""",
    "no argument": "given = {}\nlist(DataLoader(DATA, **given))  # here",
    "a class of one's own": """class Mine(DataLoader):
  def __init__(self):
    super().__init__(DATA)
list(Mine())  # here""",
    "that calls its parent's constructor": """class Mine(DataLoader):
  def __init__(self):
    super().__init__(DATA, num_workers=0)  # here
list(Mine())""",
    "arguments of a trainer": """args = TrainingArguments(
  dataloader_num_workers=0)  # here
Trainer(args, DATA).train()""",
    "no arguments of a trainer": "args = TrainingArguments(bf16=True)  # here\nTrainer(args, DATA).train()",
    "made again by a library": "loader = DataLoader(DATA)  # here\nlist(again(loader))",
    "made anew for each epoch": "for _ in range(3):\n  list(DataLoader(DATA))  # here",
}


@pytest.mark.parametrize("made", MAKES)
def test_the_line_that_says_how_a_loader_works_is_noted(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, epochs = MAKES[made], 3 if "each epoch" in made else 1
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "loading_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(library)
    monkeypatch.delitem(sys.modules, "loading_library", raising=False)
    body = "from torch.utils.data import DataLoader\nfrom loading_library import *\nDATA = [1.0, 2.0]\n\n\n"
    script = tmp_path / f"train_{made.replace(' ', '_')}.py"
    script.write_text(body + "def main():\n" + "".join(f"    {line}\n" for line in text.split("\n")) + "\n\nmain()\n")
    loading = DataLoading(lambda: None, lambda: None)
    loading.install()
    try:
        runpy.run_path(str(script))
    finally:
        restore_all()
    (loader,) = loading.loaders
    lines = script.read_text().splitlines()
    assert "# here" in lines[loader.line - 1]
    assert (loader.file, loader.workers) == (str(script), 0)
    assert loader.function.startswith("main")
    assert (loader.epochs, loader.batches) == (epochs, 2 * epochs)
