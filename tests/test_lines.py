"""The lines behind a step's time: whose line a stack is in, what waits for the GPU, and what workers do."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from profkit.analysis.lines import RareSteps, choose_lines, find_lines, find_rare_steps
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.time_account.step_times import summarize_step_times
from profkit.capture import line_samples, lines
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.line_samples import (
    Place,
    StackSampler,
    Waits,
    describe,
    find_place,
    find_stack,
    is_own,
    is_profkits,
)
from profkit.capture.lines import FEWEST_STEPS, MOST_STEPS, LineRecorder, WorkerLines, _join
from profkit.capture.steps.data_loading import DataLoading
from profkit.errors import RunError
from profkit.reading import open_capture
from profkit.run.directory import Run
from profkit.run.lines import LineSteps, LineTime, RunLines, name_count, read_run_lines, split_lines, write_lines
from tests.forked_scripts import Forks
from tests.golden import check_transcript
from tests.in_process import check_profkit, manifest_of, run_command
from tests.test_step_times import manifest
from tests.training_scripts import training


def _here() -> int:
    return sys._getframe(1).f_lineno


def test_a_stack_in_a_library_belongs_to_the_users_line_above_it() -> None:
    places: list[Place | None] = []
    encoder = json.JSONEncoder(default=lambda _: places.append(find_place(sys._getframe(1))))
    encoder.encode(object())
    line = _here() - 1
    (place,) = places
    assert place is not None
    found = describe(place)
    assert (found.file, found.line, found.called) == (__file__, line, "encoder.encode")
    assert found.function == "test_a_stack_in_a_library_belongs_to_the_users_line_above_it"


def test_the_function_that_a_line_calls_is_named_by_its_source() -> None:
    values = [3, 1, 2]
    places: list[Place | None] = []

    def key(value: int) -> int:
        places.append(find_place(sys._getframe(1)))
        return value

    values[:] = sorted(
        values,
        key=key,
    )
    assert places[0] is not None
    assert describe(places[0]).called == "sorted"
    look = lambda: places.append(find_place(sys._getframe()))  # noqa: E731
    look()
    assert places[-1] is not None
    assert describe(places[-1]).function.endswith("<lambda>")
    values.copy().append(places.append(find_place(sys._getframe())))
    assert places[-1] is not None
    assert describe(places[-1]).called == "find_place"


def test_what_wraps_an_operator_has_no_name_of_its_own() -> None:
    places: list[Place | None] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object) -> int:
            places.append(find_place(sys._getframe(1)))
            return 0

    assert 1 - torch.ones(1).as_subclass(Watched) == 0
    assert places[0] is not None
    found = describe(places[0])
    assert (found.line, found.called) == (_here() - 3, None)


def test_what_a_line_calls_is_never_a_function_of_profkits(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = DataLoading(lambda: None, lambda: None)
    places: list[Place | None] = []
    waited = loading._around(lambda _: places.append(find_place(sys._getframe(1))), is_batch=True)
    for _ in map(waited, [None]):
        pass
    assert places[0] is not None
    assert describe(places[0]).called is None


def test_the_time_of_profkits_own_hooks_is_nobodys() -> None:
    frames: list[FrameType] = []

    class Failing(Hooks):
        def fail(self, error: Exception) -> None:
            frames.append(sys._getframe())

    hooks = Failing.__new__(Failing)
    hooks.is_over = False
    hooks.optimizer_ends(None, is_well=True)  # type: ignore[arg-type]
    assert not is_profkits(frames[0])  # this test's own class is the innermost
    assert is_profkits(frames[0].f_back)
    assert not is_profkits(sys._getframe())


@pytest.mark.parametrize(
    ("file", "owned"),
    [
        ("/home/me/train.py", True),
        ("<ipython-input-3-abc>", True),
        ("/tmp/ipykernel_77/1234.py", True),
        ("<string>", False),
        ("<frozen runpy>", False),
        (torch.__file__, False),
        (threading.__file__, False),
        ("/tmp/torchinductor_me/ab/cab.py", False),
        ("/tmp/chosen/ab/cab.py", False),
        (lines.__file__, False),
        (str(Path(lines.__file__).parents[1] / "models" / "__main__.py"), True),
    ],
)
def test_the_users_own_code_is_neither_installed_nor_generated(
    monkeypatch: pytest.MonkeyPatch, file: str, owned: bool
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/chosen")
    assert is_own(compile("pass", file, "exec")) is owned


def test_samples_are_weighed_by_the_time_since_the_last_one() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        leave.wait()

    line = work.__code__.co_firstlineno + 2
    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    phases = ["forward"]
    sampler = StackSampler(lambda: phases[0])
    assert thread.ident is not None
    sampler.watch(thread.ident, "main")
    try:
        while (found := find_place(sys._current_frames()[thread.ident])) and describe(found).line != line:
            time.sleep(0)
        sampler._look(3)
        sampler._look(4)
        sampler.step_ended()
        phases[0] = "backward"
        sampler._look(5)
        sampler.step_ended()
    finally:
        leave.set()
        thread.join()
    sampler._look(100)  # the thread has ended
    named = {
        (describe(stack[0]).line, phase, kind): times for (stack, phase, kind), times in sampler.times.items() if stack
    }
    assert named == {(line, "forward", "main"): [7], (line, "backward", "main"): [0, 5]}
    assert sorted(sampler.samples.values()) == [1, 2]


def test_a_sample_that_waited_for_pythons_lock_counts_for_the_line_that_held_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.0005)
    phases = ["held", "released", "released"]
    sampler = StackSampler(lambda: phases.pop(0))
    sampler.watch(threading.get_ident(), "main")
    for late_ns in (0, 400_000, 0):
        sampler._look(10, late_ns)
    sampler.step_ended()
    assert {phase: sum(times) for (_, phase, _), times in sampler.times.items()} == {"held": 20, "released": 10}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python looks for garbage between instructions alone")
@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_frames_of_other_threads_are_read(
    is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_samples, "is_own", lambda _: False)  # or only the innermost frames are read
    entered, leave, collections = threading.Event(), threading.Event(), []

    def work(depth: int = 300) -> None:
        if depth:
            work(depth - 1)
            return
        entered.set()
        leave.wait(60)

    def note(moment: str, _: dict[str, int]) -> None:
        collections.append(moment)

    def add(*args: Any, **kwargs: Any) -> None:
        collections.clear()
        StackSampler._add(sampler, *args, **kwargs)
        within.append(len(collections))

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    sampler, thresholds, within = StackSampler(lambda: None), gc.get_threshold(), []
    assert thread.ident is not None
    sampler.watch(thread.ident, "main")
    gc.set_threshold(50)
    try:
        if not is_on:
            gc.disable()
        gc.callbacks.append(note)
        monkeypatch.setattr(sampler, "_add", add)
        sampler._look(1)
        assert gc.isenabled() == is_on
        assert within == [0]
    finally:
        gc.callbacks.remove(note)
        gc.enable()
        gc.set_threshold(*thresholds)
        leave.set()
        thread.join()


def test_a_sampler_that_cannot_start_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = sys.getswitchinterval()
    sampler = StackSampler(lambda: None)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        sampler.start()
    sampler.stop()
    assert sys.getswitchinterval() == before


def test_a_thread_that_calls_backward_has_lines_without_a_phase() -> None:
    recorder = LineRecorder(lambda: "forward")
    recorder.start()
    leave = threading.Event()

    def work() -> None:
        recorder.backward_begins()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    while not any(kind == "backward" for _, _, kind in recorder._sampler.samples):
        time.sleep(0)
    recorder.step_ended({"step_ns": 1})
    leave.set()
    thread.join()
    found = recorder.stop()
    assert found is not None
    assert {(line.function.rpartition(".")[2], line.phase) for line in found.lines if line.thread == "backward"} == {
        ("work", None)
    }


SYNCHRONIZES = (
    "called a synchronizing CUDA operation (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:250.)"
)


@pytest.fixture
def sync_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Stand in for a GPU whose waits warn: `_wait` below does what torch does in C++."""
    mode = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda value: mode.__setitem__(0, value))
    yield mode
    assert mode == [0]


def _wait() -> None:
    warnings.warn(SYNCHRONIZES, UserWarning, stacklevel=2)


def test_waits_are_counted_by_line_and_phase_and_not_shown(sync_mode: list[int], recwarn: Any) -> None:
    phase = "forward"
    waits = Waits(lambda: (phase, "main"))
    waits.start()
    for _ in range(3):
        _wait()
    phase = "optimizer"
    _wait()
    warnings.warn("the script's own", UserWarning, stacklevel=1)
    waits.stop()
    counts = {(describe(stack[0]).function, phase): count for (stack, phase, _), count in waits.counts.items() if stack}
    assert counts == {("_wait", "forward"): 3, ("_wait", "optimizer"): 1}
    assert [str(warning.message) for warning in recwarn.list] == ["the script's own"]


def test_a_wait_raises_nothing_where_warnings_are_errors(sync_mode: list[int]) -> None:
    waits = Waits(lambda: (None, "main"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        waits.start()
        _wait()
        warnings.simplefilter("error")
        _wait()
        with warnings.catch_warnings(record=True) as shown:
            warnings.resetwarnings()
            warnings.filterwarnings("error")
            _wait()
        assert not shown
        with pytest.raises(UserWarning, match="own"):
            warnings.warn("own", UserWarning, stacklevel=1)
        waits.stop()
        assert sum(waits.counts.values()) == 3
        with pytest.raises(UserWarning, match="synchronizing"):
            _wait()


def test_a_context_of_warnings_may_end_while_waits_are_counted(sync_mode: list[int]) -> None:
    waits = Waits(lambda: (None, "main"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer = list(warnings.filters)
        with warnings.catch_warnings():
            waits.start()
        _wait()
        with warnings.catch_warnings():
            _wait()
            waits.stop()
        assert list(warnings.filters) == outer
    assert sum(waits.counts.values()) == 2


def test_a_forked_copy_has_python_as_it_was(sync_mode: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = (list(warnings.filters), warnings.showwarning, sys.getswitchinterval())
    recorder = LineRecorder(lambda: None)
    recorder.start()

    def refuse() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", refuse)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            recorder.forget()
            after = (list(warnings.filters), warnings.showwarning, sys.getswitchinterval())
            os._exit(0 if after == before else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: sync_mode[0])
    recorder.stop()


def test_filters_functions_and_registries_are_as_they_were(sync_mode: list[int], recwarn: Any) -> None:
    module: Any = warnings
    registry: dict[Any, Any] = {}
    warnings.simplefilter("default")
    warnings.warn_explicit("shown once", UserWarning, __file__, 1, registry=registry)
    before = (list(module.filters), module._showwarnmsg, module._filters_mutated)
    seen = dict(registry)
    waits = Waits(lambda: (None, "main"))
    waits.start()
    _wait()
    waits.stop()
    assert (list(module.filters), module._showwarnmsg, module._filters_mutated) == before
    warnings.warn_explicit("shown once", UserWarning, __file__, 1, registry=registry)
    assert registry == seen
    assert [str(warning.message) for warning in recwarn.list] == ["shown once"]


def test_the_scripts_own_mode_is_respected(sync_mode: list[int], recwarn: Any) -> None:
    sync_mode[0] = 2
    waits = Waits(lambda: (None, "main"))
    waits.start()
    waits.stop()
    assert sync_mode == [2]
    assert waits.unknown is not None
    sync_mode[0] = 1
    waits = Waits(lambda: (None, "main"))
    waits.start()
    _wait()
    waits.stop()
    assert sync_mode == [1]
    assert len(recwarn.list) == 1  # the script has asked for it
    assert sum(waits.counts.values()) == 1
    sync_mode[0] = 0


def test_lines_of_one_phase_and_thread_are_one_row_with_its_error() -> None:
    stack = (find_stack(sys._getframe())[0],)
    recorder = LineRecorder(lambda: "forward")
    sampler = recorder._sampler
    for time_ns in (100, 200, 300):
        sampler._add({}, "forward", time_ns)
        sampler._step[stack, "forward", "main"] = time_ns
        sampler.samples[stack, "forward", "main"] += 5
        recorder.step_ended({"step_ns": 1000})
    recorder._waits.counts[stack, "forward", "main"] = 6
    found = recorder.stop()
    assert found is not None
    (row,) = found.lines
    assert (row.samples, row.time_ns, row.waits) == (15, 200, 2.0)
    assert row.error_ns == 58  # a standard deviation of 100, of three steps
    assert len(found.steps.steps) == 3


def test_a_line_that_calls_a_library_waits_where_the_library_does() -> None:
    """A trainer's line runs the whole model; of its time only that of the calls that wait is waiting."""
    library: dict[str, Callable[[Callable[[], None], Callable[[], None]], None]] = {}
    file = str(Path(sysconfig.get_path("purelib"), "trainer.py"))
    exec(compile("def train(work, wait):\n    work()\n    wait()\n    work()\n", file, "exec"), library)
    recorder = LineRecorder(lambda: "forward")
    sampler, main = recorder._sampler, threading.get_ident()
    sampler.watch(main, "main")

    def work() -> None:
        sampler._add({main: sys._getframe(1)}, "forward", 400)

    def wait() -> None:
        sampler._add({main: sys._getframe(1)}, "forward", 100)
        recorder._waits.note(sys._getframe(1))  # torch warns when the call is over

    for _ in range(2):
        library["train"](work, wait)
        recorder.step_ended({"step_ns": 1000})
    found = recorder.stop()
    assert found is not None
    (row,) = found.lines
    assert (row.time_ns, row.waits, row.waiting_ns) == (900, 1.0, 100)


@pytest.mark.parametrize(
    ("late_ns", "waiting_ns"), [(400_000, 9_000_000), (900_000, 9_000_000), (8_000_000, 1_000_000)]
)
def test_a_call_that_holds_pythons_lock_does_not_wait_meanwhile(
    late_ns: int, waiting_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``torch.tensor`` on a GPU, which reads thousands of Python's numbers, and then waits for the copy."""
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.0005)
    recorder, main = LineRecorder(lambda: "forward"), threading.get_ident()
    recorder._sampler.watch(main, "main")

    def make_tensor() -> None:
        recorder._sampler._add({main: sys._getframe(1)}, "forward", 9_000_000, late_ns)
        recorder._waits.note(sys._getframe(1))

    for _ in range(2):
        make_tensor()
        recorder.step_ended({"step_ns": 10_000_000})
    found = recorder.stop()
    assert found is not None
    (row,) = found.lines
    assert (row.time_ns, row.waits, row.waiting_ns) == (9_000_000, 1.0, waiting_ns)


def test_a_line_that_calls_others_takes_what_they_take_and_waits_as_they_do() -> None:
    stacks = []

    def draw(again: bool) -> None:
        if again:
            draw(False)
        else:
            stacks.append(find_stack(sys._getframe()))

    draw(False)
    line = _here() - 1
    draw(True)
    recorder = LineRecorder(lambda: None)
    sampler = recorder._sampler
    for stack, time_ns in zip(stacks, (100, 400), strict=True):
        sampler._step[stack, None, "main"] = time_ns
        sampler._step_at[(stack, None, "main"), (0, len(stack))] = time_ns
        sampler.samples[stack, None, "main"] += 10
    recorder.step_ended({"step_ns": 1000})
    recorder._waits.counts[stacks[1], None, "main"] = 3
    recorder._waits.spots.add((0, len(stacks[1])))
    found = recorder.stop()
    assert found is not None
    (own,) = found.lines
    assert (own.function.rpartition(".")[2], own.time_ns, own.waits, own.waiting_ns) == ("draw", 500, 3, 400)
    here = {row.line: row for row in found.callers}
    assert [(here[at].called, here[at].time_ns, here[at].waits) for at in (line, line + 2)] == [
        ("draw", 100, 0),
        ("draw", 400, 3),
    ]
    assert here[line + 2].waiting_ns == 400
    (again,) = (row for row in found.callers if row.function.endswith("draw"))
    assert (again.time_ns, again.samples) == (400, 10)
    # Most of its time it had called itself.
    assert own.caller_place == again.place
    assert again.caller_place == (again.file, line + 2)
    assert again.caller is not None
    assert again.caller.endswith(" test_a_line_that_calls_others_takes_what_they_take_and_waits_as_they_do")


def test_what_a_line_calls_where_it_waits_is_known_beside_what_takes_its_time() -> None:
    stacks: list[Any] = []

    def convert() -> None:
        stacks.append(find_stack(sys._getframe()))

    def move() -> None:
        stacks.append(find_stack(sys._getframe()))

    line = _here() + 1
    _ = convert(), move()
    recorder = LineRecorder(lambda: None)
    recorder._sampler._step[stacks[0], None, "main"] = 400
    recorder._sampler.samples[stacks[0], None, "main"] = 40
    recorder.step_ended({"step_ns": 1000})
    recorder._waits.counts[stacks[1], None, "main"] = 2
    found = recorder.stop()
    assert found is not None
    (row,) = (row for row in found.callers if row.line == line)
    assert (row.called, row.waits_in, row.time_ns, row.waits) == ("convert", "move", 400, 2)


@pytest.mark.parametrize(
    ("took_ms", "needed"),
    [
        ([1000], FEWEST_STEPS),
        ([30], MOST_STEPS),
        ([50], 40),
        ([50] * 38 + [5000] + [50] * 10 + [5000, 50], 50),
        ([50] * 10 + [5000] + [50] * 60, MOST_STEPS),
        ([5000, 50], 40),
    ],
)
def test_lines_are_looked_for_until_steps_took_two_seconds_and_a_rare_one_came_twice(
    took_ms: list[int], needed: int
) -> None:
    recorder = LineRecorder(lambda: None)
    took_ms = took_ms + took_ms[-1:] * MOST_STEPS
    ended = [recorder.step_ended({"step_ns": time_ms * 10**6}) for time_ms in took_ms]
    assert ended.index(True) + 1 == needed


def _record(took_ms: list[int], **waits_ms: int) -> RunLines:
    """Return the lines of steps in which one line runs every time, and another one in long steps that may wait."""
    stacks = [find_stack(sys._getframe())]
    stacks += [find_stack(sys._getframe())]
    recorder = LineRecorder(lambda: None)
    for at, time_ms in enumerate(took_ms):
        for stack, share in zip(stacks, (50, time_ms - 50), strict=True):
            if share:
                recorder._sampler._step[stack, None, "main"] = share * 10**6
                recorder._sampler.samples[stack, None, "main"] += share
        recorder.step_ended({"step_ns": time_ms * 10**6, "data_ns": waits_ms.get(f"step_{at}", 0) * 10**6})
    found = recorder.stop()
    assert found is not None
    return found


def test_a_first_rare_step_that_took_far_longer_than_the_next_is_left_out() -> None:
    once = [*[50] * 7, 5000]
    found = _record([*once, *[50] * 9, 400, *[50] * 4])
    assert found.steps.is_after_rare
    assert [step["step_ns"] // 10**6 for step in found.steps.steps] == [*[50] * 9, 400, *[50] * 4]
    assert [(line.samples, line.time_ns) for line in found.lines] == [(14 * 50, 50 * 10**6), (350, 25 * 10**6)]
    rare = find_rare_steps(found)
    assert rare is not None
    assert (rare.every, rare.longer_ns, rare.lines_ns) == (10, 350 * 10**6, 350 * 10**6)
    # Without another one it stays, and so it does beside one that takes as long.
    assert not _record(once).steps.is_after_rare
    assert not _record([*once, *[50] * 9, 4000]).steps.is_after_rare
    # What waits for data is no rare step.
    assert not _record([*once, *[50] * 9, 400, *[50] * 4], step_7=4950).steps.is_after_rare


class _Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return _slowly(index)


def _slowly(index: int) -> torch.Tensor:
    total = 0
    for value in range(100_000):
        total += value
    return torch.tensor(total + index)


def test_a_workers_lines_are_those_of_a_mean_batch(tmp_path: Path) -> None:
    lines = WorkerLines(tmp_path)
    batches = iter(DataLoader(_Numbers(), batch_size=2, num_workers=1))
    next(batches)
    lines.start()
    done = 0
    while done < 60:  # batches that were made before the worker began to look come first
        next(batches)
        done += bool(list(tmp_path.glob("*-looking-*")))
    found = lines.stop()
    assert found.batches > 30
    assert found.batch_ns > 0
    slow = [line for line in found.lines if line.function == "_slowly"]
    assert sum(line.time_ns for line in slow) > found.batch_ns / 2
    assert {line.thread for line in found.lines} == {"worker"}
    assert sum(line.time_ns for line in found.lines if not line.is_caller) <= found.batch_ns + len(found.lines)
    assert {(line.function, line.called) for line in found.lines if line.is_caller} == {
        ("_Numbers.__getitem__", "_slowly")
    }
    assert not list(tmp_path.iterdir())
    del batches


def _start_looking(folder: Path, batches: Iterator[Any]) -> None:
    while not list(folder.glob("*-looking-*")):
        next(batches)


def test_a_worker_that_ends_while_it_looks_leaves_its_lines(tmp_path: Path) -> None:
    lines = WorkerLines(tmp_path)
    batches = iter(DataLoader(_Numbers(), batch_size=2, num_workers=2))
    lines.start()
    _start_looking(tmp_path, batches)
    for _ in range(20):
        next(batches)
    del batches
    gc.collect()
    assert not list(tmp_path.glob("*-looking-*"))
    assert lines.stop().batches > 0
    assert not list(tmp_path.iterdir())


def test_a_worker_in_a_folder_that_is_gone_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = WorkerLines(folder)
    batches = iter(DataLoader(_Numbers(), batch_size=2, num_workers=1))
    next(batches)
    shutil.rmtree(folder)
    lines.start()
    for _ in range(50):
        next(batches)
    assert lines.stop().batches == 0
    del batches
    assert capfd.readouterr().err == ""


GETS = ("data.py", 9, "__getitem__", "get")


def test_workers_time_without_a_line_of_the_users_is_no_others() -> None:
    content = {
        "batches": 2,
        "batch_ns": 2000,
        "batch_cpu_ns": 3000,
        "stacks": [
            ([(None, 0, "", None)], 30, 750, [("collate.default_collate", 500), ("fetch.fetch", 250)]),
            ([("data.py", 3, "get", "open"), GETS], 6, 150, [("Image.open", 125), (None, 25)]),
            ([("data.py", 3, "get", None), GETS], 4, 100, [(None, 100)]),
        ],
    }
    found = _join([content])
    assert (found.batch_ns, found.batch_cpu_ns) == (1000, 1500)
    nobodys, own, caller = found.lines
    assert (nobodys.file, nobodys.time_ns) == (None, 750)
    assert (own.called, own.samples, own.time_ns, own.error_ns) == ("open", 10, 250, 68)
    assert (nobodys.inside, own.inside) == ("collate.default_collate", None)
    assert (own.caller, caller.line, caller.called, caller.time_ns) == ("data.py:9 __getitem__", 9, "get", 250)
    assert (own.is_caller, caller.is_caller) == (False, True)


def test_a_file_of_lines_is_read_as_it_was_written(tmp_path: Path) -> None:
    line = LineTime("train.py", 30, "main", "torch.randn", "forward", "main", 40, 107_100_000, 900_000, 0.0)
    waiting = LineTime("train.py", 14, "main", "….item", None, "main", 0, 0, 0, 8.0)
    lines = RunLines(LineSteps(({"step_ns": 5, "forward_ns": 3},), no_waits="no GPU was used"), (line, waiting))
    path = tmp_path / "lines.jsonl"
    write_lines(path, lines)
    assert read_run_lines(path) == lines


@pytest.mark.parametrize("content", ["", '{"version": 2, "steps": []}\n', '{"steps": 3}\n{}\n'])
def test_a_damaged_file_of_lines_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(content)
    with pytest.raises(RunError, match=r"lines\.jsonl"):
        read_run_lines(path)


@pytest.fixture
def run_with_lines(tmp_path: Path) -> Path:
    """A run whose unprofiled steps take 0.8 of those in which lines were looked for in forward, backward alike."""
    folder = tmp_path / "run"
    folder.mkdir()
    unprofiled = [{"step_ns": 1_000_000, "forward_event_ns": 400_000, "backward_event_ns": 500_000}] * 3
    content = {**manifest([]), "clean": {"steps": unprofiled}}
    (folder / "manifest.json").write_text(json.dumps(content))
    looked = ({"step_ns": 1_300_000, "forward_event_ns": 500_000, "backward_event_ns": 500_000},) * 3
    lines = [
        LineTime("/me/train.py", 30, "main", "torch.randn", "forward", "main", 40, 100_000, 10_000, 0.0),
        LineTime("/me/train.py", 14, "main", "….item", "backward", "main", 3, 50_000, 9_000, 8.0, 40_000),
        LineTime("/me/train.py", 15, "main", None, "backward", "main", 9, 7_000, 9_000, 0.0),
        LineTime("/me/train.py", 16, "main", "gc.collect", "backward", "main", 9, 6_000, 500, 0.0),
        LineTime(None, 0, "", None, "backward", "main", 90, 20_000, 1_000, 0.0),
        LineTime("/me/data/train.py", 3, "Data.__getitem__", "f", None, "worker", 30, 300_000, 1_000, 0.0),
    ]
    write_lines(folder / "lines.jsonl", RunLines(LineSteps(looked, 5, 900_000), tuple(lines)))
    return folder


def test_the_step_of_lines_is_that_of_the_summary_where_batches_come_in_bursts(tmp_path: Path) -> None:
    """Nine steps of 2 ms, and one of 82 that waits for data: on average 10 ms, of which 8 are waits."""
    steps = [{"step_ns": 2_000_000, "data_ns": 0}] * 9 + [{"step_ns": 82_000_000, "data_ns": 80_000_000}]
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest([]), "clean": {"steps": steps}}))
    loop = LineTime("/me/train.py", 7, "main", "next", "data", "main", 40, 4_000_000, 10_000, 0.0)
    write_lines(tmp_path / "lines.jsonl", RunLines(LineSteps((steps[0], *steps[8:])), (loop,)))
    result = find_lines(Run(tmp_path))
    times = summarize_step_times(Run(tmp_path).manifest)
    assert times is not None
    step = times.find("step", None)
    assert step is not None
    assert result.step_ns == step.clean_ns == 10_000_000


def test_steps_that_are_rare_and_long_are_said_with_their_line(run_with_lines: Path) -> None:
    path, usual, long = run_with_lines / "lines.jsonl", {"step_ns": 5_000_000}, {"step_ns": 60_000_000, "data_ns": 0}
    every_step = LineTime("/me/train.py", 12, "main", "….backward", "backward", "main", 400, 4_000_000, 90_000, 0.0)
    saving = LineTime("/me/train.py", 50, "save", "torch.save", None, "main", 160, 2_800_000, 1_930_000, 0.0)

    def find(steps: Sequence[dict[str, int]]) -> RareSteps | None:
        write_lines(path, RunLines(LineSteps(tuple(steps)), (every_step, saving)))
        return summarize_capture(open_capture(run_with_lines)).rare_steps

    twice = ([usual] * 18 + [long] + [usual]) * 2
    found = find(twice)
    timed = 3
    assert found == RareSteps(2, 40 + timed, 55_000_000, 20, saving, 20 * saving.time_ns)
    text = " ".join(check_profkit("summary", str(run_with_lines), cwd=run_with_lines).stdout.split())
    assert "one step in 20 takes 55.00 ms longer, which is no part of this (train.py:50 save)" in " ".join(text.split())
    for steps in ([usual] * 10 + [long, long] + [usual] * 28, ([usual] * 4 + [long] + [usual]) * 2 + [usual] * 28):
        uneven = find(steps)
        assert uneven is not None
        assert (uneven.count, uneven.every) == (2, None), "others of these steps have none at this distance"
    assert find([usual] * 9 + [long]) is None  # of one in ten the line's error would be larger
    saving = replace(saving, error_ns=saving.time_ns)
    assert find([usual] * 9 + [long]) == RareSteps(1, 10 + timed, 55_000_000, None, saving, 10 * saving.time_ns)
    write_lines(path, RunLines(LineSteps((*[usual] * 9, long), is_after_rare=True), (every_step, saving)))
    text = " ".join(check_profkit("summary", str(run_with_lines), cwd=run_with_lines).stdout.split())
    assert "one step in 10 takes 55.00 ms longer, which is no part of this (28.00 ms of it at train.py:50 save)" in text
    assert "a first time may take longest" not in text, "it was left out"
    assert find([usual] * 4 + [long]) is None  # it would have taken longer
    # A line that explains several steps runs in more than one; in one alone it may be a pause, if it is no large part.
    thrice, saving = ([usual] * 9 + [long]) * 3, replace(saving, time_ns=1_500_000, error_ns=1_500_000)
    paused = find(thrice)
    assert paused is not None
    assert (paused.count, paused.line, paused.lines_ns) == (3, None, 0)
    for time_ns, error_ns, is_named in (
        (1_500_000, 1_000_000, True),
        (500_000, 300_000, False),
        (3_000_000, 3_000_000, True),
    ):
        saving = replace(saving, time_ns=time_ns, error_ns=error_ns)
        seen = find(thrice)
        assert seen is not None
        assert (seen.line == saving) == is_named
    waiting = {"step_ns": 60_000_000, "data_ns": 55_000_000}
    barely = [usual] * 400 + [{"step_ns": 11_000_000}]
    for steps in ([long] + [usual] * 9, [usual, long] * 5, [usual] * 9 + [waiting], barely):
        assert find(steps) is None


@pytest.mark.parametrize(("count", "said"), [(0.25, "0.25"), (64.0, "64"), (999.4, "999"), (2_667.0, "2,667")])
def test_how_often_a_line_waits_is_no_power_of_ten(count: float, said: str) -> None:
    assert name_count(count) == said


def test_lines_take_no_more_than_the_step_where_no_factor_is_known(run_with_lines: Path) -> None:
    """Looking for lines made the steps so much longer that the factors of phases cannot be right."""
    step_ns = find_lines(Run(run_with_lines)).step_ns
    waiting = LineTime("/me/train.py", 12, "main", "x.item", "forward", "main", 400, 3 * step_ns, step_ns, 9.0)
    steps = LineSteps(({"step_ns": 4 * step_ns, "forward_host_ns": 4 * step_ns},) * 3)
    write_lines(run_with_lines / "lines.jsonl", RunLines(steps, (waiting, replace(waiting, line=13, time_ns=step_ns))))
    found = find_lines(Run(run_with_lines))
    assert found.step_ns == step_ns
    assert sum(line.time_ns for line in found.lines) == pytest.approx(step_ns, rel=1e-6)


def test_two_pauses_have_no_distance_unless_a_line_explains_them() -> None:
    usual, long = {"step_ns": 5_000_000}, {"step_ns": 60_000_000}
    steps = LineSteps((*([usual] * 18 + [long] + [usual]) * 2,))
    saving = LineTime("/me/train.py", 50, "save", "torch.save", None, "main", 160, 2_700_000, 1_930_000, 0.0)
    found = [find_rare_steps(RunLines(steps, lines)) for lines in ((), (saving,))]
    assert [rare and (rare.count, rare.every) for rare in found] == [(2, None), (2, 20)]


@pytest.mark.parametrize(("samples", "is_named"), [(60, False), (200, True)])
def test_of_many_rare_steps_a_line_of_few_samples_may_be_one_of_all_steps(samples: int, is_named: bool) -> None:
    """Where one in three is rare chance alone gives a line of 28 samples the error of what they alone run."""
    usual = {"step_ns": 30_000_000, "forward_host_ns": 10_000_000}
    long = {"step_ns": 80_000_000, "forward_host_ns": 55_000_000, "inference_ns": 5_000_000}
    steps = [usual, usual, long] * 18
    line = LineTime("/me/model.py", 21, "f", "self.block", "forward", "main", samples, 6_000_000, 1_200_000, 0.0)
    found = find_rare_steps(RunLines(LineSteps(tuple(steps)), (line,)))
    assert found is not None
    assert (found.line is not None) == is_named


def test_a_line_of_rare_steps_has_no_more_than_these_add_to_its_phase() -> None:
    usual = {"step_ns": 50_000_000, "forward_host_ns": 20_000_000, "inference_host_ns": 1_000_000}
    long = {**usual, "step_ns": 130_000_000, "inference_host_ns": 71_000_000, "forward_host_ns": 30_000_000}
    steps = LineSteps((*([usual] * 9 + [long]) * 2,))
    place = "/me/model.py", 21, "f", "self.block"
    paused = LineTime(*place, "forward", "main", 400, 9_000_000, 8_000_000, 0.0)
    evaluating = LineTime("/me/train.py", 60, "f", "model", "inference", "main", 400, 7_000_000, 6_000_000, 0.0)
    found = find_rare_steps(RunLines(steps, (paused, evaluating)))
    assert found is not None
    assert found.line == evaluating


def test_the_line_of_rare_steps_is_the_one_that_runs_in_no_other(run_with_lines: Path) -> None:
    """A model that is evaluated runs its lines in every step: what calls it for that is the line; innermost first."""
    path, usual, long = run_with_lines / "lines.jsonl", {"step_ns": 5_000_000}, {"step_ns": 605_000_000}

    def line(number: int, phase: str | None, time_ns: int, error_ns: int, *, is_caller: bool = False) -> LineTime:
        place = ("/me/train.py", number, "main", "model", phase, "main")
        return LineTime(*place, 400, time_ns, error_ns, 0.0, is_caller=is_caller)

    def find_all(*lines: LineTime) -> RareSteps | None:
        found = tuple([line for line in lines if line.is_caller is called] for called in (False, True))
        write_lines(path, RunLines(LineSteps((usual,) * 19 + (long,)), *map(tuple, found)))
        return summarize_capture(open_capture(run_with_lines)).rare_steps

    def find(*lines: LineTime) -> LineTime | None:
        rare = find_all(*lines)
        return None if rare is None else rare.line

    model = line(7, "forward", 3_000_000, 90_000), line(7, "inference", 28_000_000, 28_000_000)
    callers = [
        line(number, "inference", time_ns, time_ns, is_caller=True)
        for number, time_ns in ((50, 29_000_000), (60, 29_500_000))
    ]
    loop = [
        line(90, phase, time_ns, error_ns, is_caller=True)
        for phase, time_ns, error_ns in (("forward", 3_000_000, 90_000), ("inference", 29_500_000, 29_500_000))
    ]
    assert find(*model, *callers, *loop) == callers[0]
    assert find(*model) == model[1]  # nothing else is known
    # Two lines that take half each explain a step together: what calls both is named, if it is known.
    halves = line(20, None, 14_000_000, 14_000_000), line(21, None, 15_000_000, 15_000_000)
    saving = line(50, None, 29_000_000, 29_000_000, is_caller=True)
    assert find(*halves, saving) == saving
    rare = find_all(*halves)
    assert rare is not None
    assert (rare.line, rare.lines_ns) == (halves[1], 20 * 29_000_000)
    # Of one call's lines that with most of it is the line, and what takes so long is the call.
    third = replace(line(22, None, 9_000_000, 9_000_000), caller="/me/train.py:50 main")
    most = replace(line(23, None, 20_000_000, 20_000_000), caller="/me/train.py:50 main")
    rare = find_all(third, most, saving)
    assert rare is not None
    assert (rare.line, rare.call, rare.lines_ns) == (most, saving, 20 * 29_000_000)
    rare = find_all(third, most, replace(most, phase="forward", error_ns=0), saving)
    assert rare is not None
    assert (rare.line, rare.call) == (saving, None)  # this line runs in every step, too
    assert find(halves[0]) is None  # a pause of the machine's may have been the rest
    # No other thread runs while it collects, so that few samples see it.
    collects = replace(line(30, None, 20_000_000, 20_000_000), samples=1)
    assert find(collects) == collects
    assert find(replace(collects, time_ns=400_000, error_ns=400_000)) is None


def test_of_a_trainers_line_what_it_does_in_rare_steps_is_told_by_its_error() -> None:
    """It runs in every step: training takes 3 ms of it, and an evaluation every ten steps 40 ms."""
    usual, long = {"step_ns": 5_000_000}, {"step_ns": 45_000_000}
    place = ("/me/train.py", 30, "main", "trainer.train")
    outside = LineTime(*place, None, "main", 400, 7_000_000, 1_920_000, 0.0)
    backward = LineTime(*place, "backward", "main", 400, 1_000_000, 20_000, 0.0)

    def find(*lines: LineTime) -> RareSteps:
        rare = find_rare_steps(RunLines(LineSteps((*[usual] * 9, long) * 4), lines))
        assert rare is not None
        return rare

    rare = find(outside, backward)
    assert rare.line is not None
    assert rare.line.place == ("/me/train.py", 30)
    assert rare.line.time_ns == pytest.approx(4_000_000, rel=0.02)
    assert rare.is_explained
    # Less than half of it is in rare steps, or no trainer runs: such a line calls what runs in every step.
    for others in ((replace(outside, error_ns=1_000_000), backward), (outside,)):
        rare = find(*others)
        assert (rare.line, rare.lines_ns) == (None, 0)


def test_what_rare_steps_do_in_several_phases_is_one_call(run_with_lines: Path) -> None:
    """Pictures are made by the model and written to files: the call that does both is the line, with all its time."""
    path, usual, long = run_with_lines / "lines.jsonl", {"step_ns": 5_000_000}, {"step_ns": 605_000_000}

    def line(number: int, called: str, phase: str | None, ms: int, caller: str | None = None) -> LineTime:
        ns, is_caller = ms * 1_000_000, called.startswith("log")
        place = ("/me/train.py", number, "main", called, phase, "main")
        return LineTime(*place, 400, ns, ns, 0.0, is_caller=is_caller, caller=caller)

    def find(*lines: LineTime) -> RareSteps:
        apart = [tuple(line for line in lines if line.is_caller is called) for called in (False, True)]
        write_lines(path, RunLines(LineSteps((usual,) * 19 + (long,)), *apart))
        rare = summarize_capture(open_capture(run_with_lines)).rare_steps
        assert rare is not None
        return rare

    in_call = "/me/train.py:50 main"
    making, writing = line(60, "model", "inference", 18, in_call), line(70, "image.save", None, 11, in_call)
    rare = find(making, writing, line(50, "log", "inference", 18), line(50, "log", None, 11))
    assert rare.line == making
    assert rare.call is not None
    assert (rare.call.line, rare.call.called, rare.lines_ns, rare.is_explained) == (50, "log", 20 * 29_000_000, True)
    assert not rare.evaluates  # files are written, too
    assert find(line(60, "model", "inference", 29)).evaluates
    text = check_profkit("summary", str(run_with_lines), cwd=run_with_lines).stdout
    assert "which is no part of this (train.py:60 main); a first time may take longest" in " ".join(text.split())
    # Of two calls that follow each other none is within the other, where it takes longer in a phase.
    first, second = line(50, "log", None, 18), line(55, "log", None, 8)
    leaves = [line(number, "model", None, 6) for number in (7, 27, 77)]
    rare = find(*leaves, first, second, line(55, "log", "inference", 7))
    assert (rare.line, rare.lines_ns, rare.is_explained) == (first, 20 * 18_000_000, False)
    text = check_profkit("summary", str(run_with_lines), cwd=run_with_lines).stdout
    assert "no part of this (360.0 ms of it at train.py:50 main)" in " ".join(text.split())
    # A short line that runs nowhere else says nothing of what a trainer does.
    trainer = line(90, "fit", None, 25)
    rare = find(line(60, "argmax", None, 4), trainer, replace(line(90, "fit", "backward", 3), error_ns=0))
    assert rare.line == trainer
    # A wait for data is part of what takes longer if no other step waits there: for the batches of an evaluation.
    waits = line(90, "DataLoader.__iter__", "data", 40)
    assert find(making, writing, waits).line == waits
    assert find(making, writing, waits, replace(waits, error_ns=0)).line == making


def test_what_a_rare_step_waits_longer_for_data_is_part_of_it() -> None:
    usual = {"step_ns": 60_000_000, "data_ns": 10_000_000}
    steps = (*[usual] * 19, {"step_ns": 1_000_000_000, "data_ns": 610_000_000})
    validating = LineTime("/me/train.py", 50, "main", "validate", None, "main", 400, 47_000_000, 47_000_000, 0.0)
    rare = find_rare_steps(RunLines(LineSteps(steps), (validating,)))
    assert rare is not None
    assert (rare.longer_ns, rare.lines_ns) == (940_000_000, 940_000_000)
    # A trainer's line waits for the batches, as in every step: the rest shows that this is no pause of the machine's.
    found = RunLines(LineSteps(steps), (replace(validating, time_ns=10_000_000, error_ns=10_000_000),))
    rare = find_rare_steps(found)
    assert rare is not None
    assert (rare.longer_ns, rare.lines_ns, rare.is_explained) == (940_000_000, 200_000_000, False)


USUAL = {"forward_ns": 4_000_000, "backward_ns": 5_000_000, "step_ns": 10_000_000}


def _write_run(
    folder: Path, unprofiled: Sequence[dict[str, int]], looked: Sequence[dict[str, int]], *lines: LineTime
) -> Path:
    content = {**manifest([]), "clean": None, "attached": {"steps": list(unprofiled)}}
    (folder / "manifest.json").write_text(json.dumps(content))
    write_lines(folder / "lines.jsonl", RunLines(LineSteps(tuple(looked)), lines))
    return folder


def _in_phase(number: int, called: str, phase: str | None, time_ns: int, error_ns: int = 20_000) -> LineTime:
    return LineTime("/me/train.py", number, "main", called, phase, "main", 200, time_ns, error_ns, 0.0)


def test_a_line_that_runs_in_rare_steps_alone_is_none_of_the_typical_steps(tmp_path: Path) -> None:
    """One step in ten sleeps for 50 ms, and waits: on average that line takes more than any other."""
    sleeping = {**USUAL, "step_ns": 60_000_000}
    saving = _in_phase(50, "time.sleep", None, 5_000_000, 2_400_000)
    rows = [_in_phase(30, "model", "forward", 4_000_000), _in_phase(31, "loss.backward", "backward", 5_000_000), saving]
    run = _write_run(tmp_path, [*[USUAL] * 9, sleeping], ([USUAL] * 9 + [sleeping]) * 4, *rows)
    result = find_lines(Run(run))
    assert result.step_ns == 10_000_000
    assert {line.line: line.time_ns for line in result.lines} == {30: 4_000_000, 31: 5_000_000}
    assert result.rare == (saving,), "as sampled"
    assert [line.line for line in choose_lines(result)] == [30]
    text = " ".join(run_command("efficiency", run, "--by", "line").stdout.split())
    assert "left out: train.py:50 main: time.sleep, which rare steps alone ran outside of phases; on average" in text


def test_a_pause_in_one_step_is_taken_from_the_lines_that_had_it(tmp_path: Path) -> None:
    """One of 11 steps has a pause of 44 ms within forward: the mean of its line is 4 ms longer, and so is its error."""
    paused = {**USUAL, "forward_ns": 48_000_000, "step_ns": 54_000_000}
    rows = [
        _in_phase(30, "model", "forward", 7_000_000, 4_000_000),
        _in_phase(32, "mask", "forward", 1_000_000, 0),
        _in_phase(31, "loss.backward", "backward", 5_000_000),
    ]
    result = find_lines(Run(_write_run(tmp_path, [USUAL] * 10, [*[USUAL] * 5, paused, *[USUAL] * 5], *rows)))
    assert {line.line: line.time_ns for line in result.lines} == {31: 5_000_000, 30: 3_000_000, 32: 1_000_000}
    assert next(line.error_ns for line in result.lines if line.line == 30) < 400_000
    assert result.rare == ()


def test_lines_sum_up_to_the_step_that_is_shown_though_its_times_vary(tmp_path: Path) -> None:
    """Medians of the phases are 40, 50 and 10 as in the unprofiled steps; the means, which lines have, are longer."""
    longer = {"forward_ns": 6_000_000, "backward_ns": 7_000_000, "step_ns": 14_500_000}
    rows = [
        _in_phase(30, "model", "forward", 4_800_000),
        _in_phase(31, "loss.backward", "backward", 5_800_000),
        _in_phase(33, "log", None, 1_200_000),
    ]
    result = find_lines(Run(_write_run(tmp_path, [USUAL] * 10, [*[USUAL] * 6, *[longer] * 4], *rows)))
    assert sum(line.time_ns for line in result.lines) == pytest.approx(10_000_000, rel=0.01)
    assert sum(line.time_ns for line in result.lines) <= result.step_ns
    assert result.unscaled == ()


def test_lines_and_what_has_none_are_no_longer_than_the_step(tmp_path: Path) -> None:
    """The step took 12 ms while lines were looked for and its phases were as long: Python waited for 4 of its 10."""
    rows = [_in_phase(30, "model", "forward", 4_000_000), _in_phase(31, "loss.backward", "backward", 2_000_000)]
    longer = {**USUAL, "step_ns": 12_000_000}
    result = find_lines(Run(_write_run(tmp_path, [USUAL] * 10, [longer] * 10, *rows)))
    assert result.ahead_ns == 4_000_000


def test_what_unprofiled_steps_take_longer_than_those_of_lines_is_said(tmp_path: Path) -> None:
    """As where the queue of a loader was full while lines were looked for: 2 ms of 10 were not seen."""
    shorter = {**USUAL, "step_ns": 8_000_000}
    rows = [_in_phase(30, "model", "forward", 4_000_000), _in_phase(31, "loss.backward", "backward", 4_000_000)]
    run = _write_run(tmp_path, [USUAL] * 10, [shorter] * 10, *rows)
    said = "2.000 ms a step in no line: the steps in which lines were looked for were shorter"
    assert said in " ".join(run_command("efficiency", run, "--by", "line").stdout.split())


def test_what_usual_steps_have_of_a_rare_line_has_no_name(tmp_path: Path) -> None:
    """A trainer evaluates for 50 ms in one step of ten, and runs its own Python for 0.4 ms in each."""
    evaluating = {**USUAL, "step_ns": 60_000_000}
    rows = [
        _in_phase(30, "model", "forward", 4_000_000),
        _in_phase(31, "loss.backward", "backward", 5_000_000),
        _in_phase(9, "trainer.fit", None, 5_400_000, 5_000_000),
    ]
    result = find_lines(Run(_write_run(tmp_path, [USUAL] * 10, [USUAL] * 9 + [evaluating], *rows)))
    assert [line.line for line in result.rare] == [9]
    assert result.unnamed_ns == pytest.approx(400_000, rel=0.01)
    assert result.ahead_ns == pytest.approx(600_000, rel=0.01)


def test_a_line_that_rare_steps_alone_call_is_none_of_the_typical_steps_however_short_it_is(tmp_path: Path) -> None:
    """Pictures are read from the GPU and saved in one step of ten: two samples of one step say little alone."""
    saving = {**USUAL, "step_ns": 60_000_000}
    calling = replace(_in_phase(60, "log", None, 5_000_000, 5_000_000), is_caller=True)
    reading = replace(_in_phase(70, "….cpu", None, 200_000, 200_000), samples=2, waits=1.0)

    def find(caller: str | None) -> list[int]:
        rows = [
            _in_phase(30, "model", "forward", 4_000_000),
            _in_phase(71, "image.save", None, 5_000_000, 5_000_000),
            replace(reading, caller=caller),
            calling,
        ]
        looked = LineSteps((USUAL,) * 9 + (saving,))
        run = Run(_write_run(tmp_path, [USUAL] * 10, [USUAL]))
        write_lines(tmp_path / "lines.jsonl", split_lines(looked, rows))
        return [line.line for line in find_lines(run).lines]

    assert find("/me/train.py:60 main") == [30]
    assert find(None) == [30, 70]


def test_a_phase_whose_factor_cannot_be_right_is_named(tmp_path: Path) -> None:
    """The backward pass took twice as long while lines were looked for; then the whole step, too."""
    slower = {**USUAL, "backward_ns": 10_000_000, "step_ns": 14_000_000}
    rows = [_in_phase(30, "model", "forward", 4_000_000), _in_phase(31, "loss.backward", "backward", 10_000_000)]
    run = _write_run(tmp_path, [USUAL] * 10, [slower] * 10, *rows)
    result = find_lines(Run(run))
    assert result.unscaled == ("backward",)
    assert sum(line.time_ns for line in result.lines) <= result.step_ns
    text = " ".join(run_command("efficiency", run, "--by", "line").stdout.split())
    assert "to the unprofiled steps (backward scaled as the whole step: too far from their times); ±" in text
    slower |= {"step_ns": 20_000_000}
    result = find_lines(Run(_write_run(tmp_path, [USUAL] * 10, [slower] * 10, *rows)))
    assert {line.line: line.time_ns for line in result.lines} == {30: 4_000_000, 31: 6_000_000}, "what is left"
    rows[1] = _in_phase(31, "loss.backward", "backward", 5_900_000)
    run = _write_run(tmp_path, [USUAL] * 10, [slower] * 10, *rows)
    text = " ".join(run_command("efficiency", run, "--by", "line").stdout.split())
    assert "(backward as sampled: too far from their times)" in text


def test_waits_for_data_are_those_of_the_unprofiled_steps(tmp_path: Path) -> None:
    """While lines were looked for the queue of the workers was empty, and every step waited for 20 ms instead of 1."""
    rows = [
        _in_phase(20, "next", "data", 20_000_000),
        _in_phase(30, "model", "forward", 4_000_000),
        _in_phase(31, "loss.backward", "backward", 5_000_000),
    ]
    timed, waiting = ({**USUAL, "data_ns": wait, "step_ns": 10_000_000 + wait} for wait in (1_000_000, 20_000_000))
    result = find_lines(Run(_write_run(tmp_path, [timed] * 10, [waiting] * 10, *rows)))
    assert {line.line: line.time_ns for line in result.lines} == {20: 1_000_000, 30: 4_000_000, 31: 5_000_000}
    assert result.unscaled == ()


def test_a_line_that_runs_a_trainer_is_none_of_the_summarys(run_with_lines: Path) -> None:
    path = run_with_lines / "lines.jsonl"
    found = read_run_lines(path)
    fit = [
        LineTime("/me/train.py", 40, "main", "trainer.fit", phase, "main", 40, time_ns, 9_000, 1.0)
        for phase, time_ns in ((None, 400_000), ("backward", 300_000))
    ]
    write_lines(path, replace(found, lines=(*found.lines, *fit)))
    result = find_lines(Run(run_with_lines))
    assert sum(line.line == 40 for line in result.lines) == 2
    assert [line.line for line in choose_lines(result)] == [14]


def test_what_is_said_of_lines(run_with_lines: Path, tmp_path: Path) -> None:
    """A line with under ten samples is named if all steps agree; and what few runs have."""
    without, far = (shutil.copytree(run_with_lines, tmp_path / name) for name in ("without", "far"))
    (without / "lines.jsonl").unlink()
    content = {**manifest_of(far), "clean": {"steps": [{"step_ns": 9_000_000}] * 3}}
    (far / "manifest.json").write_text(json.dumps(content))
    calls = [(run_with_lines, "--format", style) for style in ("table", "json", "csv")]
    asked = [("efficiency", run, "--by", "line", *words) for run, *words in (*calls, (without,), (far,))]
    check_transcript("lines", [*asked, ("summary", run_with_lines, "--all")])
    summary = json.loads(run_command("summary", run_with_lines, "--format", "json").stdout)
    assert [line["line"] for line in summary["lines"]] == [14]


LOOPING = training(
    9,
    before="""import time

def make_batch():
    total, until = 0, time.process_time() + 0.03
    while time.process_time() < until:
        total += 1
    return torch.ones(2, 4)
""",
    batch="make_batch()",
)
"""Its steps take so long that a look at the stack, every ms, finds its lines."""

COMMAND = ("run", "-o", "run", "--warmup", "3", "--steps", "1")
SCRIPT = ("--", sys.executable, "train.py")


@pytest.mark.parametrize(("option", "is_looked_for"), [("--lines", True), ("--no-lines", False)])
def test_a_script_that_ends_early_leaves_the_lines_of_its_last_steps_if_they_are_looked_for(
    tmp_path: Path, forks: Forks, option: str, is_looked_for: bool
) -> None:
    (tmp_path / "train.py").write_text(LOOPING)
    assert forks.run_profkit(*COMMAND, option, *SCRIPT, cwd=tmp_path).returncode == 0
    assert (tmp_path / "run" / "lines.jsonl").exists() == is_looked_for
    assert not is_looked_for or 1 <= find_lines(Run(tmp_path / "run")).steps <= 5


SPAWNING = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self):
        self.features = nn.Linear(8, 8)  # calls of modules may be steps

    def __len__(self):
        return 4000

    @torch.no_grad()
    def __getitem__(self, index):
        total = 0
        for value in range(50_000):
            total += value
        return self.features(torch.full((8,), float(index)))

if __name__ == "__main__":
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context="spawn")):
        model(batch).sum().backward()
        optimizer.step()
        if number == 100:
            os._exit(0)
"""


def test_spawned_workers_show_their_lines_train_nothing_and_leave_no_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNING)
    check_profkit(*COMMAND, *SCRIPT, cwd=tmp_path)
    lines = find_lines(Run(tmp_path / "run")).lines
    assert {line.function for line in lines if line.thread == "worker"} == {"Numbers.__getitem__"}
    (process,) = manifest_of(tmp_path / "run")["processes"]
    assert next(iter(process["profiled"][0])) == "data_ns", "a step begins with its wait for data"
    assert not list((tmp_path / "run").glob("partial.*"))


def test_lines_that_fail_leave_the_recording(tmp_path: Path, forks: Forks) -> None:
    failing = "import ast\ndef fail(_):\n    raise KeyError('no such place')\nast.unparse = fail\n"
    (tmp_path / "train.py").write_text(failing + LOOPING)
    done = forks.check_profkit(*COMMAND, *SCRIPT, cwd=tmp_path)
    assert "the lines could not be saved: KeyError" in done.stderr
    assert Run(tmp_path / "run").traces


def test_a_shared_copy_has_lines_only_if_frames_are_kept(run_with_lines: Path, tmp_path: Path) -> None:
    without, kept = (tmp_path / name for name in ("without", "kept"))
    assert run_command("scrub", run_with_lines, "-o", without).returncode == 0
    assert not (without / "lines.jsonl").exists()
    assert run_command("scrub", run_with_lines, "-o", kept, "--keep-frames").returncode == 0
    lines = find_lines(Run(kept)).lines
    assert {line.file for line in lines} == {"train.py"}
    assert [line.called for line in lines] == ["torch.randn", "….item", "gc.collect", "f"]
    assert "/me" not in (kept / "lines.jsonl").read_text()


# -- programs of which it is known which line takes the time, or waits for the GPU -----------------------------------

PROGRAM = Path(__file__).parent / "programs" / "known_lines.py"


def _marked(kind: str) -> int:
    """The line of the program that carries the mark of this kind."""
    marks = [line.rpartition("  # ")[2].split(", ") for line in PROGRAM.read_text().splitlines()]
    (number,) = (number for number, kinds in enumerate(marks, start=1) if kind in kinds)
    return number


def _lines(forks: Forks, place: Path, *words: str) -> tuple[LineTime, ...]:
    options = ("--warmup", "3", "--steps", "1", "-o", "run")
    forks.check_profkit("run", *options, "--", sys.executable, *words, cwd=place)
    return find_lines(Run(place / "run")).lines


@pytest.mark.parametrize("kind", ["loop", "dataset", "optimizer"])
def test_the_line_that_takes_the_time_is_the_largest(kind: str, forks: Forks, tmp_path: Path) -> None:
    longest = _lines(forks, tmp_path, str(PROGRAM), kind)[0]
    near = range(_marked(kind) - (kind != "optimizer"), _marked(kind) + 1)  # a loop's head takes a part of its time
    assert (Path(longest.file or "").name, longest.line in near) == (PROGRAM.name, True)
    assert longest.function == ("step" if kind == "optimizer" else "count_slowly")


def test_a_program_that_runs_as_a_module_of_a_package_has_its_lines(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    shutil.copy(PROGRAM, tmp_path / "package" / "train.py")
    longest = _lines(forks, tmp_path, "-m", "package.train", "loop")[0]
    assert (longest.file, longest.function) == (str(tmp_path / "package" / "train.py"), "count_slowly")


def test_a_line_of_a_notebooks_cell_is_the_users(forks: Forks, tmp_path: Path) -> None:
    longest = _lines(forks, tmp_path, str(PROGRAM), "cells")[0]
    assert (longest.file, longest.function) == ("<ipython-input-3-0123456789ab>", "waste")
    assert longest.line in (3, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "waits"), [("item", 4), ("clipping", 8), ("copy", 1)])
def test_the_line_that_waits_for_the_gpu_is_named_with_its_waits_a_step(
    kind: str, waits: int, forks: Forks, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    waiting = {
        (Path(line.file or "").name, line.line): line.waits for line in _lines(forks, tmp_path, str(PROGRAM), kind)
    }
    assert waiting[PROGRAM.name, _marked(kind)] == waits
