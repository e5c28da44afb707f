"""What came of each time that a command was run: whether to run it again, and what to say of what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profkit.models.attachment import CUT_SHORT, NOT_REACHED, Attachment
from profkit.run_directory import KINETO_TRACE, NSYS_EXPORT, holds_snapshot, rank_traces


@dataclass(frozen=True)
class Pass:
    """One time that the command was run.

    ``processes`` is what its processes left, the one that counts first; ``reason`` why nothing was recorded, or None.
    """

    wanted: Attachment
    exit_status: int
    processes: list[dict[str, Any]]
    reason: str | None

    @property
    def may_go_on(self) -> bool:
        """Whether running the command again can give what is still wanted: it did well, and made steps enough."""
        return self.exit_status == 0 and why_no_step(self.processes, self.wanted) is None


def why_nothing(run: Path, processes: list[dict[str, Any]], wanted: Attachment) -> str | None:
    """Return why a pass recorded nothing into ``run``, None if it did record."""
    if wanted.memory is not None:
        return None if holds_snapshot(run) else _why_no_snapshot(processes)
    has_trace = (
        bool(rank_traces(run)) or (run / (KINETO_TRACE if wanted.recorder == "kineto" else NSYS_EXPORT)).exists()
    )
    failure = processes[0].get("failure") if processes else None
    left = None if has_trace else f"nothing was recorded: {failure or 'the recorder left no trace'}"
    return why_no_step(processes, wanted) or left


def why_no_step(processes: list[dict[str, Any]], wanted: Attachment) -> str | None:
    """Return why the steps that were wanted were not reached, None if they were."""
    if not processes or processes[0]["steps_seen"] < 0:
        return (
            "nothing was recorded: no training step was seen (no optimizer's step, no call of a module) in a Python "
            "that has torch and profkit, or what was seen could not be kept"
        )
    if processes[0]["state"] != NOT_REACHED:
        return None
    if wanted.step_on is not None and processes[0]["steps_seen"] == 0:
        return (
            f"nothing was recorded: no optimizer of class {wanted.step_on} made a step; --step-on takes the bare name "
            "of the class whose steps count (AdamW)"
        )
    return (
        f"nothing was recorded: the script made {processes[0]['steps_seen']} steps, and recording was to begin after "
        f"{wanted.warmup_steps}; lower --warmup"
    )


def shortfalls(one: Pass, *, is_last: bool) -> list[str]:
    """Return what is to be said of a pass although it recorded something, or others did."""
    if one.wanted.memory is not None:
        return ([] if is_last or one.reason is None else [one.reason]) + _memory_shortfalls(one)
    if not one.processes:
        return []
    failure = one.processes[0].get("failure")
    unkept = [f"not all that was recorded could be kept: {failure}"] if failure and one.reason is None else []
    if one.processes[0]["state"] != CUT_SHORT:
        return unkept
    whole = len(one.processes[0]["profiled"])
    cut = f"the script ended while it was recorded: {whole} whole steps of the {one.wanted.steps} that were wanted"
    return [*unkept, cut]


def _why_no_snapshot(processes: list[dict[str, Any]]) -> str:
    failures = [memory["failure"] for one in processes if (memory := one["memory"]) and memory["failure"]]
    if failures:
        return f"nothing was recorded of the memory: {failures[0]}"
    return "nothing was recorded of the memory: the script used no CUDA GPU (by a torch that has profkit beside it)"


def _memory_shortfalls(one: Pass) -> list[str]:
    found = [(process["process"], memory) for process in one.processes if (memory := process["memory"])]
    if one.reason is not None:
        return []
    said = [f"the memory of {name} was recorded in part: {part['failure']}" for name, part in found if part["failure"]]
    if any(part["script_records"] for _, part in found):
        said.append("the script switches the allocator's recording itself: the snapshot holds what that has left of it")
    return said
