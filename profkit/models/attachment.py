"""What profkit is to do inside a script's own processes: the launcher writes it, `profkit.capture.attach` reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from profkit.models.workload import MemoryOptions

VARIABLE = "PROFKIT_ATTACH"
"""The environment variable that carries an `Attachment` to every process that the script starts."""

RESULT_GLOB = "attached-*.json"
"""What the processes leave in the run directory for the launcher: one file each that made a step."""

FAILURE_GLOB = "failed-*.json"
"""What a rank leaves that an exception ended: ``{"rank", "error"}``."""

MEETING_GLOB = "partial.meeting-*"
"""What the ranks of a machine leave where they waited for each other."""

COMPLETE, CUT_SHORT, NOT_REACHED = "complete", "cut short", "not reached"
"""How a process's recording ended: after its last step, with the process, or before it began."""

AttachedRecorder = Literal["kineto", "nsys", "memory"]


@dataclass(frozen=True)
class Attachment:
    """Steps ``warmup_steps`` to ``warmup_steps + steps - 1`` of the script, counted from 0, are recorded into ``run``.

    ``depth`` of the modules' ranges; ``annotate`` False opens none; ``stop`` ends the script after the last one;
    ``step_on`` is the class of the optimizer that counts; ``flops`` counts what the step before the recorded ones does.
    The recorder ``memory`` begins with CUDA's first use instead of at a step, as ``memory`` says; the others record no
    allocator.
    """

    run: str
    recorder: AttachedRecorder
    warmup_steps: int
    steps: int
    depth: int = 3
    annotate: bool = True
    stop: bool = False
    step_on: str | None = None
    flops: bool = False
    memory: MemoryOptions | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Attachment:
        fields = json.loads(text)
        memory = None if fields["memory"] is None else MemoryOptions(**fields["memory"])
        return cls(**{**fields, "memory": memory})


def meeting_name(occasion: str, local_rank: int) -> str:
    """Return the name of the file that says that a rank has come."""
    return MEETING_GLOB.replace("*", f"{occasion}-{local_rank}")
