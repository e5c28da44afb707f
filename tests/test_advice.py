"""Each rule fires where it must, with an effect that follows from the capture's figures, and not where it must not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from profkit.analysis.advice import RULES, Advice, find_advice
from profkit.analysis.memory.places import PartRow
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import MemoryUse, StepUse, Summary
from profkit.analysis.tree.modules import ModuleTime
from profkit.reading import open_capture
from tests.captures import capture
from tests.efficiency_runs import SMALL
from tests.memory_captures import Training
from tests.nsys_builder import NsysBuilder
from tests.step_builder import ADD, FUSED, NVJET, SGEMM

MS = 1_000_000
GIB = 2**30
SOFTMAX = "void softmax_warp_forward<float, float, float, 9, false, false>(float *, const float *, int, int, int)"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)"
FOREACH = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpListAlphaFunctor<float>>(T1)"
FUSED_ADAM = "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float>>(T1)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)"

Kernels = Sequence[tuple[str, int]]


ADAMW = {"name": "AdamW", "is_torchs": True, "parameter_bytes": 10**6, "state_bytes": 2 * 10**6}


def _write(
    folder: Path,
    phases: Mapping[str, Kernels],
    *,
    launch_ns: int = 10_000,
    data_ns: int = 0,
    synchronise: bool = False,
    conditions: Mapping[str, object] | None = None,
    **timed: Mapping[str, int],
) -> Summary:
    """Two steps on an H200: each kernel is launched ``launch_ns`` after the one before ended, so that the GPU waits.

    With ``conditions`` the trace lies in a run that recorded them.
    """
    builder, now = NsysBuilder(), 0
    builder.add("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
    for step in range(2):
        began = now
        if data_ns:
            builder.range("data", now + 1_000, now + data_ns)
            now += data_ns
        for path, kernels in phases.items():
            names, opened = path.split("/"), now + 1_000
            now += 2_000
            for name, duration in kernels:
                now += launch_ns
                builder.kernel(now - 5_000, duration, start=now, name=name)
                now += duration
            for depth, name in enumerate(names):
                builder.range(name, opened + depth, now + 100 - depth)
            now += 1_000
        if synchronise:
            builder.range("loss", now, now + 3 * MS)
            builder.call(now + 1_000, duration=2_000, name="cudaStreamSynchronize_v3020")
            now += 3 * MS
        builder.range(f"step {step}", began, now)
    trace = builder.write(folder / "trace.sqlite")
    if conditions is None and not timed:
        return summarize_capture(open_capture(trace))
    manifest = {part: {"steps": [dict(times)] * 4} for part, times in timed.items()} | {"conditions": conditions}
    (folder / "manifest.json").write_text(json.dumps({"status": "complete", "device": "cuda", **manifest}))
    return summarize_capture(open_capture(folder))


def _codes(summary: Summary) -> dict[str, Advice]:
    return {one.code: one for one in find_advice(summary)}


def _memory(**changes: object) -> MemoryUse:
    """Return 10 GiB at the peak in backward, of them 6 GiB activations in four blocks."""
    block = PartRow("h.*", ("model", "h.*"), 6 * GIB, 0.6, 4, 0, {"activations": 6 * GIB}, {}, number=4)
    use = MemoryUse(
        device=0,
        peak_bytes=10 * GIB,
        exact=True,
        phase="backward",
        by_category={"activations": 6 * GIB, "gradients": GIB, "parameters": GIB, "optimizer state": 2 * GIB},
        reserved_peak_bytes=12 * GIB,
        capacity_bytes=140 * GIB,
        expandable_reserved_bytes=None,
        modules=(block,),
        failure=None,
        failed_request_bytes=None,
        agrees=None,
        recording_cost=None,
    )
    return replace(use, **changes)  # type: ignore[arg-type]


def _training(**changes: object) -> Summary:
    """Return a step of 100 ms whose blocks take 8 ms forward, and the memory of `_memory`."""
    modules = (ModuleTime("model", None, 1, 10 * MS, 20 * MS, 0), ModuleTime("h.*", "model", 4, 8 * MS, 16 * MS, 0))
    return replace(Summary("run", modules=modules, memory=_memory(), passes=1.0), **changes)  # type: ignore[arg-type]


def test_small_kernels_and_the_wait_for_launches_are_the_most_that_compiling_saves(tmp_path: Path) -> None:
    summary = _write(tmp_path, {"forward": [(NVJET, 5 * MS), *[(ADD, MS)] * 3], "optimizer": [(ADD, MS)]})
    advice = _codes(summary)["compile"]
    assert summary.gpu is not None
    launching_ns = summary.idle_causes_ns["launching_ns"]
    assert launching_ns > 0
    assert advice.saves_ns == 3 * MS + launching_ns, "without the optimizer's"
    assert (advice.is_bound, advice.action) == (True, "torch.compile(model)")
    assert "reduce-overhead" in _codes(summarize_capture(open_capture(SMALL)))["compile"].action


def test_what_is_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    assert "compile" not in _codes(_write(tmp_path, {"forward": [(NVJET, MS), *[(FUSED, MS)] * 3]}))
    assert "compile" not in _codes(summarize_capture(open_capture(capture("graph_nodes.nsys2023.sqlite"))))


def test_a_compiled_run_that_waits_for_launches_is_to_replay_graphs(tmp_path: Path) -> None:
    slow = _write(tmp_path, {"forward": [(FUSED, 20_000)] * 20}, launch_ns=30_000)
    advice = _codes(slow)["cuda-graphs"]
    assert slow.gpu is not None
    assert advice.saves_ns == slow.idle_causes_ns["launching_ns"]
    (tmp_path / "quick").mkdir()
    assert "cuda-graphs" not in _codes(_write(tmp_path / "quick", {"forward": [(FUSED, MS)] * 20}))
    assert "cuda-graphs" not in _codes(summarize_capture(open_capture(capture("graph_nodes.nsys2023.sqlite"))))
    (tmp_path / "eager").mkdir()
    eager = _write(tmp_path / "eager", {"forward": [(ADD, 20_000)] * 20}, launch_ns=30_000)
    assert "cuda-graphs" not in _codes(eager), "compiling comes first"


def test_fp32_products_are_scaled_by_the_ratio_of_the_peaks(tmp_path: Path) -> None:
    advice = _codes(_write(tmp_path, {"forward": [(SGEMM, 4 * MS), (ADD, MS)]}))["tf32"]
    assert advice.saves_ns == pytest.approx(4 * MS * (1 - 67 / 494.5), rel=1e-3)
    assert not advice.is_bound
    (tmp_path / "low").mkdir()
    low = _codes(_write(tmp_path / "low", {"forward": [(NVJET, 4 * MS), (ADD, MS)]}))
    assert {"tf32", "bf16"}.isdisjoint(low)
    tf32 = SGEMM.replace("f32f32_f32f32_f32", "f32f32_tf32f32_f32")
    (tmp_path / "tf32").mkdir()
    assert _codes(_write(tmp_path / "tf32", {"forward": [(tf32, 4 * MS)]}))["bf16"].saves_ns == pytest.approx(
        2 * MS, rel=1e-2
    )


@pytest.mark.parametrize("kernel", [FOREACH, ADD])
def test_an_optimizer_of_many_launches_is_to_be_fused(tmp_path: Path, kernel: str) -> None:
    phases = {"forward": [(NVJET, MS)], "optimizer": [(kernel, 50_000)] * 20}
    summary = _write(tmp_path, phases, conditions={"optimizers": [ADAMW]})
    assert summary.optimizer is not None
    advice = _codes(summary)["fused-optimizer"]
    least_ns = (3 * 10**6 + 4 * 10**6) / 4.8e12 * 1e9
    assert advice.action == "AdamW with fused=True"
    assert advice.saves_ns == pytest.approx(summary.per_step(summary.optimizer.span_ns) - least_ns, rel=1e-9)
    assert advice.figures["launches"] == 20
    timed = replace(summary, optimizer=replace(summary.optimizer, unprofiled_ns=300_000.0))
    assert _codes(timed)["fused-optimizer"].saves_ns == pytest.approx(300_000 - least_ns), "a profiler slows launches"
    peak = replace(summary, memory=_memory(phase="optimizer", by_category={"temporaries": 3 * GIB}))
    assert _codes(peak)["fused-optimizer"].saves_bytes == 3 * GIB


def test_a_fused_step_takes_at_least_what_its_bytes_take(tmp_path: Path) -> None:
    """1.2 ms of a step, of which the bytes of parameters and state alone take 1.17: no line is worth the rest."""
    large = ADAMW | {"parameter_bytes": 800 * 10**6, "state_bytes": 1_600 * 10**6}
    phases = {"forward": [(NVJET, MS)], "optimizer": [(FOREACH, 50_000)] * 20}
    assert "fused-optimizer" not in _codes(_write(tmp_path, phases, conditions={"optimizers": [large]}))


@pytest.mark.parametrize(
    ("optimizers", "autocast"),
    [
        (None, ()),
        ([], ()),
        ([{"name": "LBFGS", "is_torchs": True}], ()),
        ([{"name": "Muon", "is_torchs": True}], ()),
        ([{"name": "AdamW", "is_torchs": False}], ()),
        ([ADAMW | {"fused": True}], ()),
        ([ADAMW | {"fused": False}], ()),
        ([ADAMW | {"foreach": True}], ()),
        ([ADAMW | {"differentiable": True}], ()),
        ([ADAMW, {"name": "Muon", "is_torchs": True}], ()),
        ([ADAMW], ("float16",)),
    ],
)
def test_an_optimizer_that_torch_cannot_fuse_or_that_chose_otherwise_is_left_alone(
    tmp_path: Path, optimizers: list[dict[str, object]] | None, autocast: tuple[str, ...]
) -> None:
    conditions = {"optimizers": optimizers, "autocast_dtypes": autocast}
    phases = {"forward": [(NVJET, MS)], "optimizer": [(FOREACH, 50_000)] * 20}
    assert "fused-optimizer" not in _codes(_write(tmp_path, phases, conditions=conditions))


@pytest.mark.parametrize("kernel", [FUSED_ADAM, FUSED, FOREACH])
def test_an_optimizer_of_one_launch_or_that_is_compiled_is_left_alone(tmp_path: Path, kernel: str) -> None:
    phases = {"forward": [(NVJET, MS)], "optimizer": [(kernel, MS)]}
    assert "fused-optimizer" not in _codes(_write(tmp_path, phases, conditions={"optimizers": [ADAMW]}))


def test_attention_that_is_written_out_costs_its_kernels_without_products(tmp_path: Path) -> None:
    inside = [(NVJET, MS), (ADD, MS), (SOFTMAX, 2 * MS)]
    summary = _write(tmp_path, {"forward/model/h.0.attn": inside, "forward/model/h.0.mlp": [(ADD, 3 * MS)]})
    advice = _codes(summary)["sdpa"]
    assert (advice.saves_ns, advice.is_bound, advice.saves_bytes) == (3 * MS, False, None)
    kept = PartRow("h.*.attn", ("model", "h.*", "attn"), 2 * GIB, 0.2, 4, GIB, {"activations": 2 * GIB}, {}, number=4)
    holding = _codes(replace(summary, memory=_memory(modules=(kept,))))["sdpa"]
    assert (holding.saves_bytes, holding.is_bytes_bound) == (GIB, True), "a part of it the fused kernel keeps too"
    (tmp_path / "fused").mkdir()
    fused = _write(tmp_path / "fused", {"forward/model/h.0.attn": [(FLASH, MS), (ADD, MS), (SOFTMAX, MS)]})
    assert "sdpa" not in _codes(fused)
    (tmp_path / "loss").mkdir()
    loss = _write(tmp_path / "loss", {"forward/model/h.0.attn": [(NVJET, MS), (ADD, MS)], "loss": [(SOFTMAX, MS)]})
    assert "sdpa" not in _codes(loss), "a softmax elsewhere is none of attention's"
    built_in = summarize_capture(open_capture(SMALL)).work
    assert built_in is not None
    assert built_in.attention is not None
    assert "computing softmax" in built_in.attention.ranges


def test_the_wait_for_data_is_the_most_that_workers_save(tmp_path: Path) -> None:
    summary = _write(tmp_path, {"forward": [(NVJET, 5 * MS)]}, data_ns=4 * MS)
    advice = _codes(summary)["data-workers"]
    assert summary.gpu is not None
    assert advice.saves_ns == summary.idle_causes_ns["data_ns"]
    assert 3.9 * MS < advice.saves_ns < 4.1 * MS
    (tmp_path / "ready").mkdir()
    assert "data-workers" not in _codes(_write(tmp_path / "ready", {"forward": [(NVJET, 5 * MS)]}, data_ns=10_000))


def test_the_wait_for_data_is_as_long_as_it_was_timed_without_a_profiler(tmp_path: Path) -> None:
    """A profiler slows everything else, and so hides waits: of 15 ms idle 9 are waits, the others share the rest."""
    attached, profiled = ({"data_ns": wait * MS, "step_ns": 20 * MS} for wait in (9, 4))
    phases = {"forward": [(NVJET, 5 * MS)]}
    summary = _write(tmp_path, phases, data_ns=4 * MS, attached=attached, profiled=profiled)
    assert summary.idle_ns == 15 * MS
    assert summary.idle_causes_ns["data_ns"] == pytest.approx(9 * MS, rel=1e-3), "1,000 ns of launching were recorded"
    assert sum(summary.idle_causes_ns.values()) == summary.idle_ns
    assert _codes(summary)["data-workers"].saves_ns == summary.idle_causes_ns["data_ns"]


def test_a_wait_for_the_gpu_costs_the_gap_after_it_and_names_its_range(tmp_path: Path) -> None:
    advice = _codes(_write(tmp_path, {"forward": [(NVJET, 5 * MS)]}, synchronise=True))["synchronising"]
    assert 1.4 * MS < (advice.saves_ns or 0) < 1.6 * MS, "of the two gaps the one with work after it, over two steps"
    assert advice.reason.endswith("most of it after cudaStreamSynchronize_v3020 in step */loss")
    (tmp_path / "none").mkdir()
    assert "synchronising" not in _codes(_write(tmp_path / "none", {"forward": [(NVJET, 5 * MS)]}))


def test_the_gap_after_a_wait_is_scaled_to_the_unprofiled_step(tmp_path: Path) -> None:
    """Recorded 3.0 ms idle a step, unprofiled half of it: of gaps of 1.5 ms a step one half is left."""
    phases = {"forward": [(NVJET, 5 * MS)]}
    (tmp_path / "timed").mkdir()
    recorded = _write(tmp_path, phases, synchronise=True)
    assert recorded.gpu is not None
    idle_ns = recorded.gpu.parts.idle_ns // 2
    timed = _write(tmp_path / "timed", phases, synchronise=True, attached={"step_ns": 5 * MS + idle_ns // 2})
    whole, half = (_codes(one)["synchronising"].saves_ns or 0 for one in (recorded, timed))
    assert half == pytest.approx(whole / 2, rel=1e-6)


def test_checkpoints_keep_one_block_and_repeat_the_forward_pass_of_all() -> None:
    advice = _codes(_training())["checkpoint"]
    assert advice.saves_bytes == 6 * GIB - 6 * GIB // 4
    assert advice.figures["forward_ns"] == 8 * MS
    assert advice.share == pytest.approx(0.45)
    assert "checkpoint" not in _codes(_training(recomputes=True)), "it has some"
    assert "checkpoint" not in _codes(_training(memory=_memory(phase="optimizer"))), "activations are gone by then"
    assert "checkpoint" not in _codes(_training(modules=())), "what it costs is unknown"


def test_gradients_at_the_peak_of_a_forward_pass_are_freed_first() -> None:
    advice = _codes(_training(memory=_memory(phase="forward")))["zero-grad"]
    assert (advice.saves_bytes, advice.is_bound) == (GIB, True)
    assert "zero-grad" not in _codes(_training()), "in backward they are needed"
    assert "zero-grad" not in _codes(_training(memory=_memory(phase="forward"), passes=2.0)), "they accumulate"


def test_expandable_segments_are_simulated(tmp_path: Path) -> None:
    advice = _codes(_training(memory=_memory(expandable_reserved_bytes=11 * GIB)))["expandable-segments"]
    assert (advice.saves_bytes, advice.proof) == (GIB, "profkit whatif RUN --allocator expandable_segments:True")
    assert "expandable-segments" not in _codes(_training()), "nothing was simulated"
    summary = summarize_capture(open_capture(Training().write(tmp_path)))
    assert summary.memory is not None
    assert summary.memory.expandable_reserved_bytes is not None
    on = summarize_capture(open_capture(capture("expandable.pickle")))
    assert on.memory is not None
    assert on.memory.expandable_reserved_bytes is None
    assert "expandable-segments" not in _codes(on)


def test_no_share_is_above_one(tmp_path: Path) -> None:
    """Reserved memory can be several times the allocated peak, and a recorded step longer than an unprofiled one."""
    torn = _codes(_training(memory=_memory(reserved_peak_bytes=30 * GIB, expandable_reserved_bytes=10 * GIB)))
    assert torn["expandable-segments"].share == pytest.approx(20 / 30)
    recorded = _write(tmp_path, {"forward": [(NVJET, 5 * MS)]}, data_ns=40 * MS)
    quick = _codes(replace(recorded, steps=(StepUse(None, 8 * MS, 4, 8 * MS, 8 * MS, 46 * MS),)))
    assert (quick["data-workers"].saves_ns, quick["data-workers"].share) == (8 * MS, 1.0)


def test_communication_that_is_not_hidden_is_waiting_or_begins_late() -> None:
    waiting = summarize_capture(open_capture(capture("ddp.nsys2025.sqlite")))
    assert waiting.gpu is not None
    advice = _codes(waiting)["communication"]
    assert waiting.compared is not None
    assert advice.saves_ns == max(costs.exposed_communication_ns for costs in waiting.gpus)
    assert advice.saves_ns > waiting.per_step(waiting.gpu.parts.exposed_communication_ns), "a mean is no bound"
    assert advice.action == "equal work for all ranks"
    assert "bucket" in _codes(replace(waiting, compared=None))["communication"].action
    hidden = tuple(replace(costs, exposed_communication_ns=0) for costs in waiting.gpus)
    assert "communication" not in _codes(replace(waiting, gpus=hidden))


def test_saved_memory_counts_half_until_it_is_short() -> None:
    both = _training(memory=_memory(phase="forward", expandable_reserved_bytes=11 * GIB))
    slow = replace(summarize_capture(open_capture(SMALL)), memory=both.memory)
    codes = list(_codes(slow))
    assert codes.index("synchronising") > codes.index("expandable-segments"), "0.036 against half of 0.1"
    assert both.memory is not None
    full = replace(both.memory, capacity_bytes=13 * GIB, expandable_reserved_bytes=3 * GIB)
    assert next(iter(_codes(replace(slow, memory=full)))) == "expandable-segments"


def test_no_rule_fires_without_figures() -> None:
    assert [rule(Summary("run")) for rule in RULES] == [None] * len(RULES)
