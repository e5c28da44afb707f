"""Rows of causes: memory that grows, that is torn, or that is held for nothing."""

from __future__ import annotations

from collections.abc import Iterator

from profkit.analysis.causes.evidence import Cause, Evidence, Interval
from profkit.analysis.memory.places import PartRow
from profkit.analysis.summary import EXPANDABLE

_FORWARDS = ("forward", "loss")


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
            cause=f"gradients stand at the peak in {memory.phase}, where nothing reads them",
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
        cause=f"activations of {kept.name} hold most of the peak, and the GPU's memory is nearly full",
        module=kept.name,
        change=f"torch.utils.checkpoint around {kept.name}",
        edit=f"checkpoint:{kept.name}",
        saves_bytes=Interval(saved // 2, saved, activations),
        costs=f"at least {forward_ns / 1e6:.3g} ms more a step: the forward pass again",
        evidence={"activation_bytes": activations, "forward_ns": forward_ns},
        proof=f"profkit whatif RUN --edit checkpoint:{kept.name}",
    )


MEMORY = (_expandable, _gradients_in_forward, _checkpoint)


def repeated_module(modules: tuple[PartRow, ...]) -> PartRow | None:
    """Return the row of repeated modules that holds the most activations: the blocks of the model, if it has any."""
    repeated = [row for row in modules if row.number > 1 and row.categories.get("activations")]
    return max(repeated, key=lambda row: (row.categories["activations"], -len(row.path)), default=None)
