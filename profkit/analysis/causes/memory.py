"""Rows of causes: memory that grows, that is torn, or that is held for nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from profkit.analysis.causes.changes import enlarge_batch, without_calls, without_copies
from profkit.analysis.causes.evidence import (
    Cause,
    Evidence,
    Interval,
    Operation,
    edits,
    find_line,
    name_ms,
    saves_on_cpu,
    source_line,
)
from profkit.analysis.memory.failures import check_leaks
from profkit.analysis.memory.places import PartRow
from profkit.analysis.step_replay.limits import OUTSIDE, Limit
from profkit.analysis.step_replay.steps import FROM_HOST, ReplayedStep
from profkit.analysis.summary import EXPANDABLE, WORTH
from profkit.names import BACKWARD

_FORWARDS = ("forward", "loss")
_HALF = 0.5
_FULL = 0.8
_LARGEST_BATCH = 8
_WORTH_TUNING = 0.05
"""For a smaller share of the step nobody tunes a training anew."""
_MANY_STEPS = 10_000
_LEAST_GROWTH = 2**20
"""Bytes a step from which on memory grows."""


def _expandable(evidence: Evidence) -> Iterator[Cause]:
    """Segments that grow in place: what is reserved and not allocated lies in gaps that no request fits."""
    memory = evidence.summary.memory
    if memory is None or memory.expandable_reserved_bytes is None:
        return
    saved = memory.reserved_peak_bytes - memory.expandable_reserved_bytes
    yield Cause(
        code="expandable-segments",
        cause="PyTorch holds memory from CUDA in pieces that no request fits",
        change=f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}",
        saves_bytes=Interval(saved, saved, saved),
        evidence={
            "reserved_bytes": memory.reserved_peak_bytes,
            "simulated_bytes": memory.expandable_reserved_bytes,
        },
        proof=f"profkit whatif RUN --allocator {EXPANDABLE}",
    )


def _gradients_in_forward(evidence: Evidence) -> Iterator[Cause]:
    """Gradients that live through the only forward pass of a step: nothing reads them there."""
    memory = evidence.summary.memory
    if memory is None or memory.phase not in _FORWARDS or evidence.summary.passes != 1:
        return
    held = memory.by_category.get("gradients", 0)
    if held:
        yield Cause(
            code="zero-grad-late",
            cause=f"gradients stand at the peak in {memory.phase}",
            detail=", where nothing reads them",
            change="optimizer.zero_grad(set_to_none=True) before the forward pass",
            saves_bytes=Interval(0, held, held),
            edit="zero-grad:none",
            evidence={"gradient_bytes": held},
        )


def _checkpoint(evidence: Evidence) -> Iterator[Cause]:
    """Where memory is short: activations of repeated blocks, of which one block at a time can be kept."""
    summary, memory = evidence.summary, evidence.summary.memory
    kept = None if memory is None or memory.phase == "optimizer" else repeated_module(memory.modules)
    if memory is None or kept is None or summary.recomputes or not evidence.is_tight:
        return
    again = next((module for module in summary.modules if module.module == kept.name), None)
    if again is None or not again.forward_ns or again.recompute_ns:
        return
    activations = kept.categories["activations"]
    saved = activations - activations // kept.number
    forward_ns = summary.per_step(again.forward_ns)
    yield Cause(
        code="checkpoint",
        cause=f"activations of {kept.name} hold most of the peak",
        detail=", and the GPU's memory is nearly full",
        module=kept.name,
        change=f"torch.utils.checkpoint around {kept.name}",
        edit=f"checkpoint:{kept.name}",
        saves_bytes=Interval(saved // 2, saved, activations),
        costs=f"at least {name_ms(forward_ns)} more a step: the forward pass again",
        evidence={"activation_bytes": activations, "forward_ns": forward_ns},
        proof=f"profkit whatif RUN --edit checkpoint:{kept.name}",
    )


def _needless_checkpoints(evidence: Evidence) -> Iterator[Cause]:
    """Activations are computed again although the GPU's memory would hold them."""
    step, capacity = evidence.step, evidence.condition("gpu_memory_bytes")
    held = evidence.condition("reserved_peak_bytes")
    if step is None or not step.recomputing or not isinstance(capacity, int) or not isinstance(held, int):
        return
    if held > _HALF * capacity:
        return
    blocks = _find_blocks({step.module[call] for call in step.recomputing})
    if not blocks:
        return
    texts = [f"no-checkpoint:{block.removesuffix('*')}*" for block in blocks]
    yield Cause(
        code="recompute",
        cause="checkpointed modules are computed again in backward",
        detail=f", and {1 - held / capacity:.0%} of the GPU's memory is free",
        module=", ".join(blocks),
        change=f"no torch.utils.checkpoint around {' and '.join(blocks)}",
        changes=edits(*texts),
        edit=texts[0] if len(texts) == 1 else None,
        costs="the memory of its activations",
        evidence={"reserved_peak_bytes": held, "gpu_memory_bytes": capacity},
        proof=" ".join(["profkit whatif RUN", *(f"--edit '{text}'" for text in texts)]),
    )


def _find_blocks(modules: Collection[str | None]) -> list[str]:
    found: list[str] = []
    for module in sorted(filter(None, modules), key=len):
        block = "".join(module.partition("*")[:2])  # blocks.* of blocks.*.mlp.up
        if not any(f"{block}.".startswith(f"{outer}.") for outer in found):
            found.append(block)
    return sorted(found)


def _growth(evidence: Evidence) -> Iterator[Cause]:
    """Memory that each step keeps: the line and the owner from a recorded history, else the allocator's own count."""
    suspects = check_leaks(evidence.capture.snapshot.device()).suspects if evidence.capture.snapshot else ()
    samples = evidence.manifest.unprofiled
    grown = sum(row.bytes // row.every for row in suspects)
    if not grown and samples is not None:
        grown = samples.during.get("allocated_bytes", 0) // len(samples.steps)
    if grown < _LEAST_GROWTH:
        return
    line = find_line(suspects[0].stack[0]) if suspects and suspects[0].stack else None
    step, left = evidence.step, _steps_left(evidence, grown)
    yield Cause(
        code="growth",
        cause=f"every step keeps {grown / 2**20:,.1f} MiB more"
        + (f": memory is full in {left:,} steps" if left is not None else ""),
        line=line,
        change="keep loss.item() or x.detach().cpu() of now and then, not tensors of every step",
        changes=[without_calls(lambda step: list(step.allocating))] if step is not None else (),
        saves_bytes=Interval(grown, grown, grown),
        evidence={"bytes": grown},
        proof="profkit memory RUN --leaks",
        ends_run=left is not None,
    )


def _small_batch(evidence: Evidence) -> Iterator[Cause]:
    """The GPU waits for Python, and its memory has room for a larger batch, even if all of it grew with the batch.

    A step of several passes has as many samples in fewer of them; any other trains on another batch.
    """
    step, limits, passes = evidence.step, evidence.limits, evidence.summary.passes
    capacity, held = evidence.condition("gpu_memory_bytes"), evidence.condition("reserved_peak_bytes")
    if step is None or limits is None or not passes or evidence.is_debugged:
        return
    if not isinstance(capacity, int) or not isinstance(held, int) or not held:
        return
    preparing_ns = sum(part.time_ns for part in limits.parts_of(Limit.PREPARING))
    busy_ns = sum(step.columns.duration_ns)
    if preparing_ns < _HALF * limits.step_ns or not busy_ns:
        return
    late, room = math.log2(evidence.now_ns / busy_ns), math.log2(min(_LARGEST_BATCH, _FULL * capacity / held))
    # Fewer passes are the same training: so few that Python is in time. A larger batch is no larger than it must be.
    factor = 2 ** max(0, min(math.ceil(late) if passes > 1 else int(late), int(room)))
    if passes > 1:
        factor = min(factor, int(passes) & -int(passes))
    fewer_passes = passes > 1 and passes % factor == 0
    if factor > 1 and (fewer_passes or passes == 1):
        yield Cause(
            code="batch",
            cause=f"the GPU waits for Python, and {1 - held / capacity:.0%} of its memory is free",
            change=f"passes of {factor} times the samples, and {factor} times fewer of them"
            if fewer_passes
            else f"as many samples in batches of {factor} times the size",
            changes=[enlarge_batch(factor, fewer_passes=fewer_passes)],
            edit=None if fewer_passes else f"batch:×{factor}",
            costs=None if fewer_passes else "a change of training: adjust the learning rate",
            worth=WORTH if fewer_passes else _WORTH_TUNING,
            evidence={"busy_ns": busy_ns, "reserved_peak_bytes": held, "gpu_memory_bytes": capacity},
        )


def _saved_on_cpu(evidence: Evidence) -> Iterator[Cause]:
    """What backward needs is copied to the CPU and back (save_on_cpu), although the GPU's memory would hold it."""
    step, lines = evidence.step, [line for line in evidence.lines if saves_on_cpu(line)]
    capacity, held = evidence.condition("gpu_memory_bytes"), evidence.condition("reserved_peak_bytes")
    if step is None or not lines or not isinstance(capacity, int) or not isinstance(held, int):
        return
    phases = {line.phase or OUTSIDE for line in lines}

    def find(step: ReplayedStep) -> list[Operation]:
        saving = [one for one in evidence.awaited_copies(step) if one.phase in phases and one.name != FROM_HOST]
        back = [one for one in evidence.operations(step) if one.phase == BACKWARD and one.name == FROM_HOST]
        return [*saving, *back]

    saved = sum(step.copied_bytes[int(step.columns.row[one.at])] for one in find(step) if one.phase != BACKWARD)
    if not saved or held + saved > _FULL * capacity:
        return
    yield Cause(
        code="saved-on-cpu",
        cause="save_on_cpu copies what backward needs to the CPU, and back",
        detail=f": {saved / 2**20:,.0f} MiB a step, and {1 - held / capacity:.0%} of the GPU's memory is free",
        line=source_line(max(lines, key=lambda line: line.waits)),
        change="no torch.autograd.graph.save_on_cpu around it",
        changes=[without_copies(lambda step: [one.call for one in find(step)])],
        costs="the memory of what is saved",
        evidence={"saved_bytes": saved, "reserved_peak_bytes": held, "gpu_memory_bytes": capacity},
    )


MEMORY = (
    _growth,
    _needless_checkpoints,
    _saved_on_cpu,
    _expandable,
    _gradients_in_forward,
    _checkpoint,
    _small_batch,
)


def _steps_left(evidence: Evidence, grown: int) -> int | None:
    capacity, held = evidence.condition("gpu_memory_bytes"), evidence.condition("reserved_peak_bytes")
    if not isinstance(capacity, int) or not isinstance(held, int):
        return None
    left = max(0, capacity - held) // grown
    return left if left < _MANY_STEPS else None


def repeated_module(modules: tuple[PartRow, ...]) -> PartRow | None:
    """Return the row of repeated modules that holds the most activations: the blocks of the model, if it has any."""
    repeated = [row for row in modules if row.number > 1 and row.categories.get("activations")]
    return max(repeated, key=lambda row: (row.categories["activations"], -len(row.path)), default=None)
