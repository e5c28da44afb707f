"""What would make a run faster or smaller: rules on its own figures, each with its effect, its cost and its proof.

A rule is a function of a `Summary`, and stands in `RULES`. It returns None unless its condition holds on measured
figures and its effect follows from them, and it never proposes what the run already does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from profkit.analysis.memory.places import PartRow
from profkit.analysis.summary import EXPANDABLE, WORTH, Summary
from profkit.analysis.tree.modules import ModuleTime
from profkit.names import is_shared

_EXPANDABLE_CODE = "expandable-segments"
_LAUNCHES = 0.1
"""The share of a step from which preparing kernels is worth a change of the program."""
_TIGHT = 0.8
"""With more than this share of the GPU's memory reserved, saved bytes count as much as saved time, else half."""


@dataclass(frozen=True)
class Advice:
    """One proposal: what to do and why, what it saves, what it costs, and the command that proves it.

    ``saves_ns`` is per step, ``saves_bytes`` of the peak, or of what is reserved. ``is_bound`` says that no more can
    be saved, else the figures are estimates; ``is_bytes_bound`` the same of ``saves_bytes`` where that differs.
    ``share`` is of the step time or of that memory, whichever is larger. ``{name}`` in a text stands for one of the
    ``figures``; its name ends with its unit (``_ns``, ``_bytes``, else a plain number). In the proof ``RUN`` is this
    run and ``NEW`` one that was recorded with the change.
    """

    code: str
    action: str
    reason: str
    saves_ns: float | None = None
    saves_bytes: int | None = None
    is_bound: bool = True
    is_bytes_bound: bool | None = None
    cost: str | None = None
    proof: str = "profkit compare RUN NEW"
    figures: dict[str, float] = field(default_factory=dict)
    share: float = 0.0


Rule = Callable[[Summary], Advice | None]


def find_advice(summary: Summary) -> tuple[Advice, ...]:
    """Return all that the rules propose, the largest effect first; nothing where the figures are not to be trusted."""
    if summary.has_failed:
        return ()
    proposals = [_limit(summary, proposal) for rule in RULES if (proposal := rule(summary)) is not None]
    worth = [proposal for proposal in proposals if proposal.share >= WORTH]
    return tuple(sorted(worth, key=lambda proposal: -_weight(summary, proposal)))


def _limit(summary: Summary, proposal: Advice) -> Advice:
    """Return a proposal with its share, the larger of those of the step time and of the memory; 0 if both are unknown.

    Nothing saves more than the whole step: figures of recorded steps can be longer than the step without a profiler.
    """
    saves_ns, share = proposal.saves_ns, 0.0
    if saves_ns is not None and summary.step_ns:
        saves_ns = min(saves_ns, summary.step_ns)
        share = saves_ns / summary.step_ns
    if proposal.saves_bytes and summary.memory is not None:
        is_of_reserved = proposal.code == _EXPANDABLE_CODE
        whole = summary.memory.reserved_peak_bytes if is_of_reserved else summary.memory.peak_bytes
        share = max(share, proposal.saves_bytes / whole if whole else 0.0)
    return replace(proposal, saves_ns=saves_ns, share=share)


def _weight(summary: Summary, proposal: Advice) -> float:
    """Return what decides the order: the share, of memory that is not short the half."""
    memory = summary.memory
    is_tight = memory is not None and (
        memory.failure is not None
        or (memory.capacity_bytes is not None and memory.reserved_peak_bytes > _TIGHT * memory.capacity_bytes)
    )
    return proposal.share if proposal.saves_ns is not None or is_tight else proposal.share / 2


def _compile(summary: Summary) -> Advice | None:
    """Fusion: small kernels read and write memory between products; one compiled kernel does it once.

    Where the GPU waits for launches, a graph that is replayed takes their place.
    """
    if summary.work is None or summary.gpu is None or summary.head.is_compiled:
        return None
    costs = summary.find_costliest("small_ns", "launching_ns")
    if costs is None:
        return None
    small_ns, launching_ns = costs.small_ns, costs.launching_ns
    action, reason = "torch.compile(model)", "fuses much of {small_ns} of small kernels"
    if launching_ns > WORTH * (summary.step_ns or 0):
        reason += "; the GPU is also idle {launching_ns} while Python prepares kernels"
    if launching_ns > _LAUNCHES * (summary.step_ns or 0):
        action = 'torch.compile(model, mode="reduce-overhead")'
    return Advice(
        "compile",
        action,
        reason,
        saves_ns=small_ns + launching_ns,
        cost="compiling at the start",
        figures={"small_ns": small_ns, "launching_ns": launching_ns},
    )


def _cuda_graphs(summary: Summary) -> Advice | None:
    """Replay, for a run that is compiled: one launch of a graph takes the place of hundreds of launches."""
    if summary.gpu is None or summary.gpu.graph_launches or not summary.head.is_compiled:
        return None
    costs = summary.find_costliest("launching_ns")
    launching_ns = 0.0 if costs is None else costs.launching_ns
    if launching_ns < _LAUNCHES * (summary.step_ns or 0):
        return None
    return Advice(
        "cuda-graphs",
        'CUDA graphs: torch.compile(model, mode="reduce-overhead")',
        "the GPU is idle {launching_ns} while Python prepares kernels",
        saves_ns=launching_ns,
        cost="constant shapes, and memory of its own",
        figures={"launching_ns": launching_ns},
    )


def _precision(summary: Summary) -> Advice | None:
    """Tensor cores: fp32 products do not use them, TF32 products run at half the rate of bf16."""
    work = summary.work
    if work is None or work.peaks is None:
        return None
    peaks = work.peaks.flops_per_s
    for now, better, action, bits in (
        ("fp32", "tf32", 'torch.set_float32_matmul_precision("high")', 10),
        ("tf32", "bf16", "torch.autocast with bf16", 7),
    ):
        time_ns = summary.per_step(work.plain_product_ns.get(now, 0))
        if not time_ns or now not in peaks or peaks.get(better, 0.0) <= peaks[now]:
            continue
        source = "measured" if work.peaks.source == "measured" else "datasheet"
        return Advice(
            better,
            action,
            f"{now} products take {{product_ns}}, and the peak of {better} is {{gain}} times as high ({source})",
            saves_ns=time_ns * (1 - peaks[now] / peaks[better]),
            is_bound=False,
            cost=f"products keep {bits} bits of mantissa",
            figures={"product_ns": time_ns, "gain": peaks[better] / peaks[now]},
        )
    return None


def _optimizer(summary: Summary) -> Advice | None:
    """One kernel for the whole step of the optimizer: it reads and writes each state once, and keeps no temporaries.

    Only where torch has such a kernel for these optimizers, which nobody chose against, and more than one launch.
    """
    optimizer, memory, work = summary.optimizer, summary.memory, summary.work
    if optimizer is None or not optimizer.fusable or work is None or optimizer.kind not in ("foreach", "single tensor"):
        return None
    costs, launches = summary.find_costliest("optimizer_ns"), optimizer.launch_count / summary.program_steps
    if launches <= 1:
        return None
    span_ns = summary.per_step(optimizer.span_ns) if costs is None else costs.optimizer_ns
    if optimizer.unprofiled_ns is not None:
        span_ns = optimizer.unprofiled_ns
    least_ns = 0.0 if work.peaks is None else optimizer.least_bytes / work.peaks.bytes_per_s * 1e9
    temporary = 0
    if memory is not None and memory.phase == "optimizer":
        temporary = memory.by_category.get("temporaries", 0)
    reason = "{launches} launches take {span_ns} of a step"
    if least_ns:
        reason += ", its bytes {least_ns} at the GPU's peak"
    if temporary:
        reason += ", and temporaries of {temporary_bytes} stand at the peak of memory"
    return Advice(
        "fused-optimizer",
        f"{', '.join(optimizer.fusable)} with fused=True",
        reason,
        saves_ns=max(span_ns - least_ns, 0.0),
        saves_bytes=temporary or None,
        figures={"launches": launches, "span_ns": span_ns, "least_ns": least_ns, "temporary_bytes": temporary},
    )


def _attention(summary: Summary) -> Advice | None:
    """Fused attention never writes the matrix of scores to memory."""
    if summary.work is None or summary.work.attention is None:
        return None
    attention, held = summary.work.attention, 0
    if summary.memory is not None:
        names = {name.rpartition(".")[2] for name in attention.ranges}
        held = sum(
            row.own_bytes
            for row in summary.memory.modules
            if row.path[-1].rpartition(".")[2] in names and row.categories.get("activations")
        )
    time_ns = summary.per_step(attention.time_ns)
    return Advice(
        "sdpa",
        "F.scaled_dot_product_attention",
        "attention is written out: {time_ns} without its products" + (", and it keeps {held_bytes}" if held else ""),
        saves_ns=time_ns,
        # They keep queries, keys, values and the output as well, which the fused kernel keeps too.
        saves_bytes=held or None,
        is_bound=False,
        is_bytes_bound=True,
        figures={"time_ns": time_ns, "held_bytes": held},
    )


def _workers(summary: Summary) -> Advice | None:
    """Batches ready in time: the GPU is idle while the program waits for the next batch."""
    costs = summary.find_costliest("data_ns")
    if costs is None or not costs.data_ns:
        return None
    idle_ns = costs.data_ns
    return Advice(
        "data-workers",
        "more DataLoader workers (num_workers, prefetch_factor)",
        "the GPU is idle {idle_ns} while the program waits for data",
        saves_ns=idle_ns,
        cost="CPU cores and host memory",
        figures={"idle_ns": idle_ns},
    )


def _checkpoint(summary: Summary) -> Advice | None:
    """Activations of repeated blocks: keep those of one block at a time, and compute the others again in backward."""
    memory = summary.memory
    kept = None if memory is None or memory.phase == "optimizer" else repeated_module(memory.modules)
    if memory is None or kept is None or summary.recomputes:
        return None
    again = next((module for module in summary.modules if module.module == kept.name), None)
    if again is None or not again.forward_ns or again.recompute_ns:
        return None
    activations = kept.categories["activations"]
    return Advice(
        "checkpoint",
        f"torch.utils.checkpoint around {kept.name}",
        "their activations hold {activation_bytes} of {peak_bytes}",
        saves_bytes=activations - activations // kept.number,
        is_bound=False,
        cost="at least +{forward_ns} a step, the kernels of their forward pass again",
        figures={
            "activation_bytes": activations,
            "peak_bytes": memory.peak_bytes,
            "forward_ns": summary.per_step(again.forward_ns),
        },
    )


def _expandable(summary: Summary) -> Advice | None:
    """Segments that grow in place: what is reserved and not allocated lies in gaps that no request fits."""
    memory = summary.memory
    if memory is None or memory.expandable_reserved_bytes is None:
        return None
    return Advice(
        _EXPANDABLE_CODE,
        f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}",
        "would reserve {simulated_bytes} in place of {reserved_bytes} (simulated)",
        saves_bytes=memory.reserved_peak_bytes - memory.expandable_reserved_bytes,
        is_bound=False,
        proof=f"profkit whatif RUN --allocator {EXPANDABLE}",
        figures={"reserved_bytes": memory.reserved_peak_bytes, "simulated_bytes": memory.expandable_reserved_bytes},
    )


def _communication(summary: Summary) -> Advice | None:
    """Communication that computing does not hide: ranks that differ if most of it is waiting, else when it begins."""
    costs = summary.find_costliest("exposed_communication_ns")
    if costs is None or len(summary.ranks) < 2:
        return None
    exposed_ns = costs.exposed_communication_ns
    reason = "{exposed_ns} of communication are not hidden behind computing"
    action = "smaller buckets, so that communication begins sooner (DDP: bucket_cap_mb; FSDP: prefetching)"
    waiting_ns, talking_ns = (
        sum(getattr(rank, name) or 0 for rank in summary.ranks) for name in ("waiting_ns", "communication_ns")
    )
    if summary.compared is not None and 2 * waiting_ns > talking_ns:
        action = "equal work for all ranks"
        reason += f"; most communication is waiting for rank {summary.compared.waited_for}"
    return Advice("communication", action, reason, saves_ns=exposed_ns, figures={"exposed_ns": exposed_ns})


def _zero_grad(summary: Summary) -> Advice | None:
    """Gradients that live through the only forward pass of a step: nothing reads them there."""
    memory = summary.memory
    if memory is None or memory.phase not in ("forward", "loss") or summary.passes != 1:
        return None
    gradients = memory.by_category.get("gradients", 0)
    return Advice(
        "zero-grad",
        "optimizer.zero_grad(set_to_none=True) before the forward pass",
        f"gradients of {{gradient_bytes}} stand at the peak in {memory.phase}, where nothing reads them",
        saves_bytes=gradients,
        figures={"gradient_bytes": gradients},
    )


def _synchronising(summary: Summary) -> Advice | None:
    """Calls that wait: ``.item()``, ``print`` of a tensor and ``.cpu()`` leave the GPU without anything queued."""
    syncs = None if summary.gpu is None else summary.gpu.syncs
    costs = summary.find_costliest("sync_gap_ns")
    if syncs is None or costs is None:
        return None
    gap_ns = costs.sync_gap_ns
    where = f", most of it after {syncs.call}" + (f" in {syncs.path}" if syncs.path else "")
    return Advice(
        "synchronising",
        "fewer calls that wait for the GPU (.item(), .cpu(), print of a tensor)",
        "after {count} of them in a step the GPU has nothing to do for {gap_ns}" + where,
        saves_ns=gap_ns,
        figures={"count": syncs.count / summary.program_steps, "gap_ns": gap_ns},
    )


RULES: tuple[Rule, ...] = (
    _compile,
    _cuda_graphs,
    _precision,
    _optimizer,
    _attention,
    _workers,
    _checkpoint,
    _expandable,
    _communication,
    _zero_grad,
    _synchronising,
)


def repeated_module(modules: tuple[PartRow, ...]) -> PartRow | None:
    """Return the row of repeated modules that holds the most activations: the blocks of the model, if it has any."""
    repeated = [row for row in modules if row.number > 1 and row.categories.get("activations")]
    return max(repeated, key=lambda row: (row.categories["activations"], -len(row.path)), default=None)


def repeated_time(modules: tuple[ModuleTime, ...]) -> ModuleTime | None:
    """Return the outermost repeated module that took the most time: the blocks of the model, if it has any."""
    number = {row.module: row.number for row in modules}
    repeated = [
        row
        for row in modules
        if row.total_ns and row.number > 1 and number.get(row.parent or "", 1) == 1 and not is_shared(row.module)
    ]
    return max(repeated, key=lambda row: row.total_ns, default=None)
