"""How long a step waits for data, and how long it would with other workers of its data loader.

A batch comes in time, or only every so often: then the step waits, and no edit of the rest makes it shorter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from profkit.analysis.step_replay import StepColumns
from profkit.analysis.step_replay.edits import CannotPredictError, Setting, slow_host
from profkit.analysis.step_replay.replay import run_steadily
from profkit.names import DATA

FETCH_NS = {"least": 50_000, "expected": 250_000, "most": 900_000}
"""What a batch takes to come from a worker that has it ready."""
_UNEVEN = {"least": 1.0, "expected": 1.0, "most": 1.2}
"""How much slower than their mean workers may make batches for as long as those that are ready last.

Where no worker's time for a batch is known, that is open by more.
"""
_WAITING_ROUNDS, _IN_TIME = 12, 0.01
_KEPT_WAITING = 0.1
"""A step that waits for data for more than this share has its workers at work all the time."""


def change_workers(columns: StepColumns, setting: Setting) -> StepColumns:
    """Batches are ready in time, or as soon as so many workers can make them; the step no longer makes them itself."""
    facts, workers = setting.facts, int(setting.argument)
    if not workers:
        raise CannotPredictError("what the program takes itself for a batch is not known; `profkit try` measures it")
    waits = _find_data_waits(columns, setting)
    batch_ns = facts.batch_in_worker(waits.whole_ns, setting.world)
    is_fewer = workers < facts.workers
    if batch_ns is None or not (waits.whole_ns or is_fewer):
        raise CannotPredictError("the step does not wait for data, or how long a worker takes for a batch is not known")
    step_ns = run_steadily(columns, setting.constants).step_ns
    if waits.whole_ns > _KEPT_WAITING * step_ns:
        batch_ns = max(batch_ns, facts.workers * step_ns)
    in_time_ns = run_steadily(waits.remove_from(columns), setting.constants).step_ns
    at_work = min(workers, batch_ns / max(in_time_ns, 1))
    before, after = (facts.slower_beside(count, setting.world) for count in (facts.workers, at_work))
    uneven = _UNEVEN[setting.world] if facts.workers else 1.0
    every_ns = round(uneven * batch_ns / facts.batches_at_once(workers, setting.world))
    most_ns = every_ns if is_fewer else None
    return have_batches_come(columns, setting, every_ns, most_ns=most_ns, slower=max(1.0, after / before))


class _DataWaits(NamedTuple):
    """A step's waits for data by the call before which they lie, and what one of many steps waits for the others."""

    of_calls: dict[int, int]
    late_ns: int

    @property
    def whole_ns(self) -> int:
        return sum(self.of_calls.values()) + self.late_ns

    def remove_from(self, columns: StepColumns) -> StepColumns:
        gap = list(columns.gap_ns)
        for call, wait_ns in self.of_calls.items():
            gap[call] -= wait_ns
        return replace(columns, gap_ns=gap, late_ns=columns.late_ns - self.late_ns)


def _find_data_waits(columns: StepColumns, setting: Setting) -> _DataWaits:
    waits = {
        call: min(phases[DATA], columns.gap_ns[call])
        for call, phases in enumerate(setting.step.gap_phases)
        if phases.get(DATA) and columns.gap_ns[call] > 0
    }
    is_late = not setting.facts.workers or _are_workers_slow(columns, setting)
    return _DataWaits(waits, columns.late_ns if is_late else 0)


def have_batches_come(
    columns: StepColumns, setting: Setting, every_ns: int, *, most_ns: int | None = None, slower: float = 1.0
) -> StepColumns:
    """Return the step for which a batch comes every so often: in time, or it waits, by no more than it does now.

    With ``most_ns`` it waits by no more than that. The host takes ``slower`` times as long beside the workers.
    """
    waits = _find_data_waits(columns, setting)
    first, fetch_ns = next(iter(waits.of_calls), 0), min(waits.whole_ns, FETCH_NS[setting.world])
    ready = _lengthen_gap(slow_host(waits.remove_from(columns), slower), first, fetch_ns)
    if waits.late_ns:
        left_ns = every_ns - run_steadily(ready, setting.constants).step_ns
        return replace(ready, late_ns=min(max(0, left_ns), waits.late_ns if most_ns is None else most_ns))
    most_ns = waits.whole_ns - fetch_ns if most_ns is None else most_ns
    return _wait_for_batches(ready, first, every_ns, most_ns, setting)


def keep_waiting(columns: StepColumns, before: StepColumns, setting: Setting) -> StepColumns:
    """Return a changed step that is no shorter than ``before`` if that waits for batches, which come no faster."""
    if not before.late_ns or not _are_workers_slow(before, setting):
        return columns
    before_ns, after_ns = (run_steadily(step, setting.constants).step_ns for step in (before, columns))
    return replace(columns, late_ns=columns.late_ns + max(0, before_ns - after_ns))


def _are_workers_slow(columns: StepColumns, setting: Setting) -> bool:
    """Return whether workers may take as long for a batch as the step without its longest waits.

    If not, these have another reason: workers that start anew, or a file that is late.
    """
    facts = setting.facts
    if not facts.workers or facts.batch_ns is None:
        return False
    in_time_ns = run_steadily(replace(columns, late_ns=0), setting.constants).step_ns
    return facts.batch_ns >= facts.batches_at_once(facts.workers, "most") * in_time_ns


def _wait_for_batches(columns: StepColumns, call: int, every_ns: int, most_ns: int, setting: Setting) -> StepColumns:
    """Return the step for which a batch comes only every so often: it waits before a call, by so much at most."""
    waited_ns, waiting = 0, columns
    for _ in range(_WAITING_ROUNDS):
        late_ns = every_ns - run_steadily(waiting, setting.constants).step_ns
        if late_ns <= _IN_TIME * every_ns or waited_ns == most_ns:
            break
        waited_ns = min(most_ns, waited_ns + late_ns)
        waiting = _lengthen_gap(columns, call, waited_ns)
    return waiting


def _lengthen_gap(columns: StepColumns, call: int, by_ns: int) -> StepColumns:
    gap = list(columns.gap_ns)
    gap[call] += by_ns
    return replace(columns, gap_ns=gap)
