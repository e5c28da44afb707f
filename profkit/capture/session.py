"""profkit inside the target's process: counts its steps, times them, and records those that were asked for.

Up to the first recorded step the hooks only count and time. The device is waited for once a step, at its end, and
before and after the recording. Whatever fails in here ends what profkit does, and never the target.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed

from profkit.annotation import observe_ranges
from profkit.capture import describe_error, find_failure, say
from profkit.capture.compilations import CompilationRecorder
from profkit.capture.compiled.watch import CompiledCode
from profkit.capture.flight_recorder import several_ranks
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.range_log import MOST_ENTRIES
from profkit.capture.light import LightRecorder
from profkit.capture.memory_history import MemoryRecording
from profkit.capture.patches import restore_all
from profkit.capture.recorder import StepsRecorder
from profkit.capture.steps.after import StepsAfter
from profkit.capture.steps.conditions import count_compiled_graphs, read_conditions
from profkit.capture.steps.data_loading import QueueDrain, is_loader_worker
from profkit.capture.steps.policy import OwnSteps
from profkit.capture.steps.times import StepCollector
from profkit.run.compiled_code import CapturedGraph, append_records
from profkit.run.directory import COMPILED, KINETO_TRACE, name_of_rank
from profkit.run.job import RankChoice, local_rank_number, rank_of_command
from profkit.run.manifest import Process
from profkit.run.range_log import RangeLogError, finish_trace, log_beside
from profkit.run.recording import (
    COMMAND_WARMUP,
    COMPLETE,
    CUT_SHORT,
    NOT_REACHED,
    Order,
    StepKind,
    claim_recording,
    leave_attached,
    leave_ended,
    leave_failure,
    leave_process,
    leave_unsaved,
)

if TYPE_CHECKING:
    from profkit.capture.changes.trial import Trial

_MEETS = (
    "the script's own torch.profiler ran in the steps to record, and a process has only one: record other steps "
    "(--warmup), or with --nsys"
)

_FULL_LOG = (
    f"the log of ranges was full after {MOST_ENTRIES:,} entries, and the recording ended there: record fewer steps "
    "(--steps) or fewer ranges (--depth)"
)

_UNTIMED, _ENOUGH_TIMED = 3, 10
"""How many steps pass before the timed ones where at least so many of these are left; else one."""

_LAST_COMPILING = 12
"""The last step that timing begins anew after because it compiled code: Dynamo makes eight versions of a function."""

_ENOUGH_ITERATIONS = 5
"""Of iterations, which hold several steps each, this many are timed; one passes before the recorded ones."""


def attach() -> None:
    """Start in this process what the environment asks for; OSError if the run's directory cannot be written to."""
    order = Order.from_environment(os.environ)
    if order.trial is None:
        session: Session | Trial = Session(order)
    else:
        from profkit.capture.changes.trial import Trial  # a recording does without the changes

        session = Trial(order)
    leave_attached(session.run, os.getpid())
    session.begin()
    atexit.register(session.leave)
    # A forked child, such as a data loader's worker, is not the process that trains.
    os.register_at_fork(after_in_child=session.abandon)


class Session:
    """Starts and stops the recording where steps begin and end, and leaves what it knows for the launcher."""

    def __init__(self, order: Order, done: Callable[[], None] = lambda: None) -> None:
        self.order = order
        self._done = done
        self.run = Path(order.run)
        self._records_memory = order.recorder == "memory"
        self._rank = rank_of_command(os.environ, sys.orig_argv)
        self._is_chosen = True
        """Whether this rank is recorded in full."""
        if order.ranks is not None:
            self._is_chosen = RankChoice.parse(order.ranks).includes(self._rank, local_rank_number(os.environ))
        self.memory = None
        if order.memory is not None and self._is_chosen:
            self.memory = MemoryRecording(self.run, order.memory, notes_steps=self._records_memory)
        self.hooks = Hooks(
            self,
            order.depth,
            order.step_on,
            self.memory,
            counts_steps=not order.own_steps,
            keep_graph=self._keep_graph if order.annotate and order.recorder in ("nsys", "kineto") else None,
            counts_work=order.flops == "any" and not self._rank,
        )
        self.context: int | None = None
        """The context length of the steps that run now, in a target that has several."""
        self._pid = os.getpid()
        self._name = f"{self._pid}" if self._rank is None else f"rank{self._rank}"
        self._records = self.run / name_of_rank(COMPILED, self._rank or 0)
        self._compiled = CompiledCode(self.hooks, self._records)
        is_command = not (order.within or order.own_steps)
        self._is_usual = is_command and order.warmup_steps == COMMAND_WARMUP
        """Whether nobody said which steps are recorded."""
        times_first = order.recorder in ("none", "kineto", "nsys")
        may_wait = is_command and order.warmup_steps >= COMMAND_WARMUP
        self.hooks.steps.finds_iterations = may_wait and times_first
        self._may_time_anew = self._is_usual and times_first
        self._graphs = count_compiled_graphs()
        """How many graphs had been compiled when the last step ended."""
        self._plan_steps()
        self._begun = -1
        self._start_ns = 0
        self._samples = StepCollector(self.hooks.clock)
        self._memory_lead = 0
        """How many steps were counted before counting began anew: the allocator's history has them too."""
        self._drain = QueueDrain(None if order.within else self.run, self.hooks.loading)
        self._recorder = StepsRecorder(order, self.hooks, records_memory=self.memory is not None)
        self._light: LightRecorder | None = None
        if order.recorder in ("none", "kineto", "nsys") and not order.within:
            self._light = LightRecorder(self.run, order.warmup_steps if order.own_steps else 0)
            self.hooks.times_waits = True
        self._compilations: CompilationRecorder | None = None
        if order.recorder in ("kineto", "nsys"):
            self._compilations = CompilationRecorder(self._records, lambda: self.hooks.is_recording)
        self._failure: str | None = None
        self._after = StepsAfter(order, self.hooks)
        self._process: Process | None = None
        # Steps do not matter, and counting them would wait for the device at each.
        self._is_over = order.recorder == "oom"

    def _plan_steps(self) -> None:
        """Choose the first timed step, the first recorded one and the one after the last."""
        # The first steps build what later ones have: kernels, optimizer state, the allocator's pool.
        untimed, self._first, self._enough = _UNTIMED, self.order.warmup_steps, _ENOUGH_TIMED
        if self.hooks.steps.times > 1 and self._is_usual:
            untimed, self._first, self._enough = 1, 1 + _ENOUGH_ITERATIONS + 1, _ENOUGH_ITERATIONS
        self._first_timed = max(1, min(untimed, self._first - self._enough))
        self._end = None if self.order.steps is None else self._first + self.order.steps

    def begin(self) -> None:
        self.hooks.install()
        if self._light is not None:
            self._light.begin()
        if self.order.recorder in ("nsys", "kineto", "memory"):
            self._compiled.install()
        if self.order.own_steps:
            observe_ranges(OwnSteps(self))
        if self._is_chosen:
            self._after.prepare()
        if self.memory is not None:
            self.memory.wait_for_cuda()
        if self._records_memory:
            if self.order.annotate:
                self.hooks.start()
        elif not self._is_over:
            self.hooks.clock.start()
        if self.order.step_on == StepKind.WHOLE.word:
            # What runs before the first use of the GPU is no work of the GPU's.
            if torch.cuda.is_available():
                torch.cuda._lazy_call(self.hooks.begin_whole)
            else:
                self.hooks.begin_whole()

    def boundary(self, number: int) -> None:
        if self._begun < 0 and is_loader_worker():
            self.abandon()
        if self._is_over:
            self._pass_after(number)
        else:
            self._note_step()
            self._pass(number)
            self._begin_light_step(number)
            self._samples.step_begins()
        is_complete = self._process is not None and self._process.state == COMPLETE
        if self.order.stop and is_complete and self.is_done:
            raise SystemExit(0)
        if self.is_done:
            self._done()

    def _pass_after(self, number: int) -> None:
        spans = self.hooks.clock.take()
        self._after.step_ended(spans)
        self._leave_why_uncounted()
        if self.is_done:
            self._remove_hooks()
        if self._light is not None:
            self._light.step_ended(spans)
            self._begin_light_step(number)

    def _begin_light_step(self, number: int) -> None:
        is_recorded = not self._is_over and number >= self._first
        is_left_out = self._after.is_on or self._recorder.is_warming_up
        wants_phases = self._light is not None and self._light.step_begins(
            number, is_recorded=is_recorded, is_left_out=is_left_out
        )
        if not self.is_done:
            return
        if wants_phases:
            self.hooks.clock.start()
        else:
            self.hooks.clock.stop()

    def _pass(self, number: int) -> None:
        if number <= self._begun:  # the script has shown what its steps are, and counting begins anew
            self._plan_steps()
            self._samples = StepCollector(self.hooks.clock)
            self.hooks.loading.forget_steps()
            self._memory_lead += self._begun + 1 - number
        self._begun = number
        self._time_anew(number)
        if number == self._first - 1 and self.hooks.steps.may_iterate:
            self._put_off()
        if number in (self._first_timed, self._first) and not self._records_memory:
            self.hooks.clock.start()  # the thread that trains need not be the one that attached
        if self.memory is not None:
            self._note_in_memory(number)
        if self._compilations is not None:
            is_recorded = number >= self._first and number != self._end
            self._compilations.step_begins(self._number_in_range(number), is_recorded=is_recorded)
        if number == self._end:
            self._finish(COMPLETE)
            self._after.begin(self._rank, shows_lines=self._is_chosen)
            self._leave_why_uncounted()
            if self.is_done:
                self._remove_hooks()
        elif number == self._first and self._recorder.meets_the_scripts:
            self._wait_a_step()
        elif number == self._first:
            self._samples.begin("profiled")
            self._drain.look()
            self._begin_recording()
            if self._recorder.is_on or not (self._is_chosen or self._is_over):
                self._leave_out_first_steps()
        elif number == self._first_timed and not self.order.own_steps:
            self._samples.begin("attached")
        if number == self._first - 1:
            self._warm_up_profiler()

    def _time_anew(self, number: int) -> None:
        """Have the timed steps begin here if code was compiled in one of them: a step that goes on compiles nothing."""
        before, self._graphs = self._graphs, count_compiled_graphs()
        late = number - self._first_timed
        has_compiled = self._graphs > before and late > 0 and number < min(self._first, _LAST_COMPILING + 1)
        if not has_compiled or not self._may_time_anew or several_ranks():
            return
        self._samples = StepCollector(self.hooks.clock)
        self._first_timed, self._first = number, self._first + late
        if self._end is not None:
            self._end += late

    def _keep_graph(self, graph: CapturedGraph) -> None:
        append_records(self._records, [graph])

    def own_boundary(self) -> None:
        self.boundary(self._begun + 1)

    @property
    def is_in_last_step(self) -> bool:
        """Whether the end of the step that runs now ends the recording."""
        return self._end is not None and self._begun == self._end - 1

    def own_begin(self) -> None:
        """The target opens a range of its own: the first of them begins the first step."""
        if self._begun < 0:
            self.boundary(0)

    def hooks_failed(self, error: Exception) -> None:
        self._failure = f"profkit's hooks failed ({type(error).__name__}: {error})"
        self._after.end()

    def leave(self) -> None:
        """End with the process; whatever fails is said in a line."""
        if self._pid != os.getpid():
            return
        try:
            self.end()
            self._finish_trace()
            leave_ended(self.run, self._pid)
        except Exception as error:
            say(f"{self.run}: the recording could not be saved: {describe_error(error)}")

    def end(self) -> None:
        """At the process's end: keep what was recorded, if it was cut short, and say what ended the process."""
        failure = find_failure(self._rank)
        if failure is not None:
            with suppress(OSError):  # a full disk may be the very reason
                leave_failure(self.run, self._name, failure)
        self._end_steps()

    def detach(self) -> None:
        """End in a program that goes on: keep what was recorded, and take everything out of the process again."""
        try:
            self._end_steps()
            self._finish_trace()
        except Exception as error:  # a full disk, say: the program must not end with it
            say(f"{self.run}: the recording could not be saved: {describe_error(error)}")
        finally:
            self.hooks.clock.stop()
            self.hooks.stop()
            self.hooks.remove()
            self._compiled.remove()
            if self._compilations is not None:
                self._compilations.stop()
            restore_all()

    @property
    def is_done(self) -> bool:
        return self._is_over and not self._after.is_on

    def _end_steps(self) -> None:
        self._after.end()
        if self._light is not None:
            self._light.end()
        if not self._is_over:
            self._end_early()
        elif self._process is not None:
            self._note_later_steps(self._process)
        if self.memory is not None:
            self.memory.close()
            found = self.memory.result()
            if found is not None and (self._process is None or self._process.memory != found):
                state = COMPLETE if self.order.recorder == "oom" else NOT_REACHED
                self._leave(replace(self._process or self._describe(state), memory=found))

    def _note_later_steps(self, process: Process) -> None:
        """Keep what later steps showed: training steps if the recording has none, evaluation, and waits for data."""
        conditions, without = process.conditions, self.hooks.has_evaluated_without_autocast
        if conditions is not None and without:
            conditions = replace(conditions, evaluates_without_autocast=True)
        later = replace(
            process,
            step_changed_to=self.hooks.steps.changed_to,
            conditions=conditions,
            loading=self._drain.describe_later(process.loading, self._after.steps),
            loaders=self.hooks.loading.loaders,
        )
        if later != process:
            self._leave(later)

    def _finish_trace(self) -> None:
        path = self.run / name_of_rank(KINETO_TRACE, self._rank or 0)
        if self._process is None or not log_beside(path).exists():
            return
        try:
            finish_trace(path)
        except RangeLogError as error:
            self._leave(replace(self._process, failure=f"torch.profiler's trace was refused: {error}"))

    def _end_early(self) -> None:
        used_cuda = self._records_memory and self.memory is not None and self.memory.owners is not None
        if self._begun < 0 and not used_cuda and self.order.own_steps:
            return
        if self._begun < self._first:
            self._finish(NOT_REACHED)
        elif self._end is None:
            self._finish(COMPLETE)
        elif self.is_in_last_step and self.hooks.steps.ends_with_script and not self.order.own_steps:
            self._note_step()
            if self.memory is not None:
                self._note_in_memory(self._end)
            self._finish(COMPLETE)
        else:
            self._finish(CUT_SHORT)

    def abandon(self) -> None:
        """Do nothing more: this process is a forked copy."""
        self._is_over = True
        self._after.forget()
        self._recorder.forget()
        self._process = None
        if self._light is not None:
            self._light.stop()
        if self.memory is not None:
            self.memory.forget()
            self.memory = None
        self.hooks.stop()
        self.hooks.clock.stop()

    def begin_counting(self) -> None:
        self._samples.end()
        self._after.counted.begin(self._rank)

    def end_counting(self) -> None:
        self._after.counted.end(keeps_ranges=self._recorder.is_on)
        self._leave_why_uncounted()

    def _leave_why_uncounted(self) -> None:
        reason = self._after.counted.why_not
        if self._process is not None and self._process.uncounted != reason:
            self._leave(replace(self._process, uncounted=reason))

    def _note_step(self) -> None:
        if self._begun < 0:
            return
        spans = self._samples.step_ended({} if self.context is None else {"context": self.context})
        self.hooks.loading.step_ended()
        if self._light is not None:
            if self._light.is_kept:
                self._samples.read()  # the light record has events that it has read recorded anew
            self._light.step_ended(spans)

    def _note_in_memory(self, number: int) -> None:
        assert self.memory is not None
        shown = self._number_in_range(number)
        if shown is not None:
            self.memory.boundary(shown + self._memory_lead)

    def _number_in_range(self, number: int) -> int | None:
        first = self._first if self.order.own_steps else 0
        return number - first if number >= first else None

    def _begin_recording(self) -> None:
        self.hooks.steps.settle()
        if self._rank is None and several_ranks():
            self._learn_rank()
        if self.order.recorder == "none" or not self._is_chosen:
            return
        shares_files = self.order.recorder == "kineto" and self._rank is None and not self.order.within
        if shares_files and not claim_recording(self.run):
            self._is_chosen = False
            self._finish(NOT_REACHED)
            return
        self._recorder.start(self._rank, self._make_way)
        if self.order.recorder == "kineto":
            self._failure = None

    def _warm_up_profiler(self) -> None:
        """Have torch.profiler trace in the step before the recorded ones, if enough steps were timed without it."""
        is_spare = self.order.own_steps or self._first - 1 - self._first_timed >= self._enough
        if is_spare and self._recorder.may_warm_up():
            self._samples.end()
            self.hooks.steps.keep_to_thread()
            self._recorder.warm_up()

    def _learn_rank(self) -> None:
        """Ask torch.distributed which rank this is: what torch.multiprocessing.spawn starts has no RANK."""
        self._rank = distributed.get_rank()
        if self.order.ranks is not None:
            local = torch.cuda.current_device() if torch.cuda.is_initialized() else self._rank
            self._is_chosen = RankChoice.parse(self.order.ranks).includes(self._rank, local)

    def _leave_out_first_steps(self) -> None:
        """Record some steps more than were asked for, if a data loader's queue is not as usual at first."""
        if self.order.own_steps:
            return
        steps = self._drain.plan(self._first, self._samples.steps["attached"], self.order.steps)
        if self._end is not None:
            self._end += steps

    def _wait_a_step(self) -> None:
        """Begin to record a step later: the script's own torch.profiler runs, and a process has only one."""
        self._samples.end()
        self._failure = _MEETS
        self._put_off()

    def _put_off(self) -> None:
        self._first += 1
        if self._end is not None:
            self._end += 1

    def _make_way(self) -> None:
        self._failure = _MEETS
        self._finish(CUT_SHORT)

    def log_is_full(self) -> None:
        """End the recording: profkit's log of ranges may grow no more."""
        self._failure = _FULL_LOG
        self._finish(CUT_SHORT)

    def _finish(self, state: str) -> None:
        self._is_over = True
        if self._compilations is not None:
            self._compilations.recording_ends()
        self._samples.end()
        if state == CUT_SHORT:
            self.hooks.mark_unfinished()
        self.hooks.stop()
        self.hooks.clock.stop()
        self._failure = self._recorder.stop() or self._failure
        if self.memory is not None:
            self.memory.steps_end()
        self._leave(self._describe(state))
        if state != COMPLETE:
            self._after.end()
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        if self.memory is None and self.hooks.steps.is_final and not several_ranks():
            self.hooks.remove()

    def _leave(self, process: Process) -> None:
        self._process = process
        try:
            leave_process(self.run, process)
        except OSError as error:
            say(f"{self.run}: the recording could not be saved: {self._failure or error}")
            with suppress(OSError):  # said before, or the directory is gone
                leave_unsaved(self.run, self._pid, error)

    def _describe(self, state: str) -> Process:
        on_gpu = torch.cuda.is_initialized()
        step, names = self.hooks.steps.what_counts() or (None, ())
        remembered = None if self.memory is None else self.memory.result()
        loading = self._drain.describe(len(self._samples.steps["profiled"]))
        profiled = self._samples.steps["profiled"][0 if loading is None else loading.drained_steps :]
        if state == CUT_SHORT and self.order.steps is not None and len(profiled) >= self.order.steps:
            state = COMPLETE  # the script ended among the steps that a data loader made it record beyond those
        # What a rank starts has its RANK too: a process without a step must not take the place of the rank's own word.
        is_rank = self._begun >= 0 or self._rank is None or remembered is not None
        return Process(
            process=self._name if is_rank else f"{self._pid}",
            pid=os.getpid(),
            rank=self._rank,
            state=state,
            is_recorded=self._is_chosen,
            failure=self._failure,
            steps_seen=self._begun,
            step=step,
            step_names=names,
            step_times=self.hooks.steps.times,
            seen=dict(self.hooks.steps.seen),
            step_changed_to=self.hooks.steps.changed_to,
            device="cuda" if on_gpu else "cpu",
            # Asking for the name would initialise CUDA for a target that trains on the CPU.
            gpu=torch.cuda.get_device_name() if on_gpu else None,
            torch=torch.__version__,
            cuda=torch.version.cuda,
            conditions=read_conditions(
                self.hooks.autocast_dtypes,
                self.hooks.optimizers.described,
                anomaly_detection=self.hooks.has_detected_anomalies,
                evaluates_without_autocast=self.hooks.has_evaluated_without_autocast,
            ),
            attached=tuple(self._samples.steps["attached"]),
            profiled=tuple(profiled),
            during=self._samples.during,
            memory=remembered,
            loading=loading,
            loaders=self.hooks.loading.loaders,
            left_out=self.hooks.names.left_out,
            compiled_failure=self._compiled.failure,
            uncounted=self._after.counted.why_not,
        )
