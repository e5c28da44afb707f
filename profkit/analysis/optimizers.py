"""What a run recorded of its optimizers: whether torch could fuse their steps, and what those would move."""

from __future__ import annotations

from profkit.run.manifest import Manifest, UsedOptimizer, find_condition

_HAVE_FUSED_STEPS = ("Adam", "AdamW", "SGD")
"""Classes of torch.optim with a fused step on CUDA in every torch from 2.4 on (Adagrad's began on the CPU alone)."""
_HAVE_FOREACH_STEPS = (
    *_HAVE_FUSED_STEPS,
    *("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
)


def used_optimizers(manifest: Manifest) -> tuple[UsedOptimizer, ...]:
    """Return the optimizers that a run recorded."""
    used = find_condition(manifest, "optimizers")
    return used if isinstance(used, tuple) else ()


def can_all_be_fused(manifest: Manifest, used: tuple[UsedOptimizer, ...]) -> bool:
    """Return whether ``fused=True`` can be added to every optimizer: classes of torch itself, with no such choice made.

    In fp16 a GradScaler scales the loss, and Lightning refuses to clip the gradients of a fused optimizer then.
    """
    autocast = find_condition(manifest, "autocast_dtypes")
    if not used or (isinstance(autocast, tuple) and "float16" in autocast):
        return False
    return all(
        one.is_torchs
        and one.name in _HAVE_FUSED_STEPS
        and one.fused is None
        and not (one.foreach or one.differentiable)
        for one in used
    )


def can_all_be_foreach(used: tuple[UsedOptimizer, ...]) -> bool:
    """Return whether torch has a step in few kernels for every optimizer."""
    return bool(used) and all(
        one.is_torchs and one.name in _HAVE_FOREACH_STEPS and not one.differentiable for one in used
    )


def least_bytes(used: UsedOptimizer) -> int:
    """Return what a fused step moves: it reads parameters, gradients and state, and writes parameters and state."""
    return 3 * used.parameter_bytes + 2 * used.state_bytes


def count_fused_bytes(manifest: Manifest) -> int | None:
    """Return what the fused steps of all optimizers would move at least; None where torch cannot fuse them."""
    used = used_optimizers(manifest)
    return sum(map(least_bytes, used)) if can_all_be_fused(manifest, used) else None
