"""Each row of the table of causes names what a capture has, and not what one that nearly has it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from profkit.analysis.causes.advice import MOST_TRIES, Advice, AdviceResult, _prove, _say_nothing, find_advice
from profkit.analysis.causes.evidence import Cause, Evidence, SourceLine
from profkit.analysis.causes.ranks import RANKS
from profkit.analysis.lines import find_rare_steps
from profkit.analysis.memory.places import PartRow
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.ranks.culprit import Culprit
from profkit.analysis.step_replay.calibrate import AS_RECORDED
from profkit.analysis.step_replay.kernel_edits import handles_fp32
from profkit.analysis.step_replay.limits import Limit, LimitPart, StepLimits
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import MemoryUse, StepPart, StepTree, Summary, WorkUse
from profkit.analysis.tree.modules import ModuleTime
from profkit.analysis.trials import Trial
from profkit.reading import open_capture
from profkit.report.commands.answer import describe_answer, describe_effects
from profkit.report.page.step import _figures
from profkit.run.compiled_code import Compilation, append_records
from profkit.run.directory import Run
from profkit.run.edits import parse_edits
from profkit.run.lines import LineSteps, LineTime, RunLines, split_lines, write_lines
from profkit.run.manifest import Manifest
from profkit.text_kinds import LEFT_OUT
from tests.allocator_reference import MIB, Block
from tests.captures import capture
from tests.conftest import ROOT
from tests.golden import check_text
from tests.memory_captures import Training
from tests.nsys_builder import NsysBuilder
from tests.rank_builder import NCCL, simulate, write_kineto_run
from tests.step_builder import ADD, MUL, NVJET, SGEMM, SUM

MS = 1_000_000
GIB = 2**30
TRITON = "triton_poi_fused_add_mul_3"
SOFTMAX = "void softmax_warp_forward<float, float, float, 9, false, false>(float *, const float *, int, int, int)"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)"
CUDNN_ATTENTION = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3x_64x128x128_cga1x1x1_kernel0_0"
CUDNN_ATTENTION_BACKWARD = "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(T1)"
TANH = ADD.replace("CUDAFunctor_add<float>", "tanh_kernel_cuda")
MISH = (ADD.replace("CUDAFunctor_add<float>", "direct_copy"), ADD.replace("CUDAFunctor_add", "softplus"), TANH, MUL)
SQRT = ADD.replace("CUDAFunctor_add<float>", "sqrt_kernel_cuda")
ZERO = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, ZeroFunctor<float>>(T1)"
CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_execute_kernel"
CONVERT = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, (bool)0, (bool)1>(cudnn::ops::nchw2nhwc_params_t)"
MISALIGNED = "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_128x64_32x6_nn_align1>(T1::Params)"
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(cutlass_80_simt_sgemm_64x64_8x5_tn_align1)"
ALIGNED = MISALIGNED.replace("align1", "align8")
RADIX_SORT = "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<>"
EQUAL_KEYS = "void (anonymous namespace)::randperm_handle_duplicate_keys_kernel<long>"
SINE_IN_FP64 = (
    "void at::native::vectorized_elementwise_kernel<2, at::native::sin_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda()#2}::operator()() const::{lambda()#1}::operator()() const::{lambda(double)#1}, std::array<char*, 2ul> >"
)
TF32 = SGEMM.replace("f32f32_f32f32", "f32f32_tf32f32")
LAYER_NORM = "void at::native::vectorized_layer_norm_kernel<float, float, false>(int, T2, const T1 *)"
SCATTER_GATHER = "void at::native::_scatter_gather_elementwise_kernel<128, 8, (anonymous namespace)::Func>(int, T3)"
SCATTER = "void at::native::indexFuncLargeIndex<float, long>(T1)"
ADAMW = {"name": "AdamW", "is_torchs": True, "parameter_bytes": 4 * 10**6, "state_bytes": 8 * 10**6}
STEPS = 3
BURST_NS = 20 * MS


class Program:
    """Steps of a program on a machine with one stream: the host launches, and the GPU follows."""

    def __init__(self, *steps: Sequence[Action], before: Sequence[Action] = ()) -> None:
        self.builder, self.now, self.free = NsysBuilder(), 1_000, 0
        self.builder.add("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
        self.lengths: list[int] = []
        for act in before:
            act(self)
        for number, actions in enumerate(steps):
            began = self.now
            for act in actions:
                act(self)
            self.now += 1_000
            self.builder.range(f"step {number}", began, self.now)
            self.lengths.append(self.now - began)

    def hold_host(self, until: int) -> None:
        """Let the latest call last until then."""
        self.builder.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["end"] = self.now = until

    def write(
        self,
        folder: Path,
        lines: Sequence[LineTime] = (),
        conditions: dict[str, Any] | None = None,
        loader: dict[str, int | None] | None = None,
        records: Sequence[Compilation] = (),
        work: dict[str, Any] | None = None,
        **more: Any,
    ) -> AdviceResult:
        """Write a run, and return what is advised; ``loader`` is what its workers took for a batch."""
        folder.mkdir(exist_ok=True)
        self.builder.write(folder / "trace.sqlite")
        steps = tuple({"step_ns": length} for length in self.lengths)
        manifest = {"status": "complete", "device": "cuda", "attached": {"steps": steps}, "conditions": conditions}
        (folder / "manifest.json").write_text(json.dumps(manifest | more))
        if lines or loader:
            write_lines(
                folder / "lines.jsonl",
                split_lines(LineSteps(steps, **(loader or {})), lines),  # type: ignore[arg-type]
            )
        if records:
            append_records(folder / "compiled.jsonl", records)
        if work:
            (folder / "work.json").write_text(json.dumps(work))
        opened = open_capture(folder)
        return find_advice(opened, summarize_capture(opened))


Action = Callable[[Program], None]


def equal_steps(*actions: Action, before: Sequence[Action] = ()) -> Program:
    return Program(*[actions] * STEPS, before=before)


def python(duration: int, name: str | None = None) -> Action:
    """The host runs Python, in a range if it has a name."""

    def act(program: Program) -> None:
        program.now += duration
        if name is not None:
            program.builder.range(name, program.now - duration, program.now)

    return act


def launch(name: str, duration: int, times: int = 1, *, blocks: bool = False) -> Action:
    """A launch takes 5 µs of Python and 3 µs in its call; a kernel begins 1.5 µs later, or 1 µs after the last one."""

    def act(program: Program) -> None:
        for _ in range(times):
            program.now += 5_000
            correlation = program.builder.call(program.now, duration=3_000)
            program.now += 3_000
            start = max(program.now + 1_500, program.free + 1_000)
            program.builder.kernel(None, duration, name=name, start=start, correlation=correlation)
            program.free = start + duration
            if blocks:
                program.hold_host(program.free + 4_000)

    return act


def wait(program: Program) -> None:
    program.now += 2_000
    ended = max(program.now + 2_000, program.free + 8_000)
    program.builder.call(program.now, duration=ended - program.now, name="cudaStreamSynchronize_v3020")
    program.now = ended


def copy(duration: int, kind: int = 1) -> Action:
    """Copy from pageable memory, or to it (2): the call holds the host until the copy has ended."""

    def act(program: Program) -> None:
        program.now += 5_000
        start = max(program.now + 5_000, program.free + 1_000)
        program.builder.copy(program.now, duration, kind=kind, start=start)
        program.free = start + duration
        program.builder.rows["CUPTI_ACTIVITY_KIND_MEMCPY"][-1]["bytes"] = 60 * duration
        program.hold_host(program.free + 3_000)

    return act


def move(program: Program) -> None:
    """Copy from one place on the GPU to another, for which nobody waits."""
    program.now += 5_000
    start = max(program.now + 5_000, program.free + 1_000)
    program.builder.copy(program.now, 1_000, kind=8, start=start)
    program.now += 3_000
    program.free = start + 1_000


def read(program: Program) -> None:
    """Copy a number to pinned memory, and wait for it."""
    program.now += 4_000
    program.free = max(program.now + 6_000, program.free + 1_000) + 2_000
    program.builder.copy(program.now, 2_000, kind=2, start=program.free - 2_000)
    program.now += 4_000
    wait(program)


def allocate(duration: int) -> Action:
    def act(program: Program) -> None:
        program.builder.call(program.now + 2_000, duration=duration, name="cudaMalloc_v3020")
        program.now += 2_000 + duration

    return act


def within(path: str, *actions: Action) -> Action:
    names = path.split("/")

    def act(program: Program) -> None:
        opened = program.now
        program.now += 10 * len(names)
        for inner in actions:
            inner(program)
        program.now += 10 * len(names)
        for depth, name in enumerate(names):
            program.builder.range(name, opened + depth, program.now - depth)

    return act


FORWARD = within("forward", launch(NVJET, 100_000, 20), wait)
FUSED_ADAM = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"
COUNTERS = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOpScalarFunctor<float, 1, 1, 0>>"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"


def line(time_ns: int, phase: str | None = None, called: str | None = None, **more: Any) -> LineTime:
    """Return what a line took of a step."""
    usual = LineTime("/code/train.py", 30, "main", called, phase, "main", 100, time_ns, time_ns // 50, 0)
    return replace(usual, **more)


def by_code(result: AdviceResult) -> dict[str, Advice]:
    return {advice.code: advice for advice in result.tries}


def after(advice: Advice) -> tuple[int, int, int]:
    assert advice.after_ns is not None
    return advice.after_ns.low, advice.after_ns.expected, advice.after_ns.high


# -- programs, and what else their runs hold -------------------------------------------------------------------------


def products(name: str) -> Program:
    """Steps with three matrix products in one module and one in another."""
    parts = [within(f"forward/model/{module}", launch(name, MS, times)) for module, times in (("head", 3), ("body", 1))]
    return equal_steps(*parts, wait)


def blocks(module: str, *kernels: tuple[str, int]) -> Program:
    """Steps of four blocks with a product each, beside a module with these kernels."""
    parts: list[Action] = []
    for block in range(4):
        parts.append(within(f"forward/model/h.{block}/h.{block}.{module}", *(launch(*kernel) for kernel in kernels)))
        parts.append(within(f"forward/model/h.{block}/h.{block}.mlp", launch(NVJET, 200_000)))
    return equal_steps(*parts, wait)


def works(*lines: tuple[str, str, int, int], **more: Any) -> dict[str, Any]:
    """Return a counted step: which operators which lines of model.py called, under which path, on how many bytes.

    An empty path is that of what lies outside of the model.
    """
    counts = {"dtype": "float32", "count": 4, "flops": 0, "function": "forward", "file": "/code/model.py"}
    return {
        "work": {
            **{"version": 1, "source": "counted", "dtype": None, "ranges": [], "model_flops": 0, "missing": []},
            "lines": [
                {
                    **counts,
                    "path": ["forward", "model", *path.split("/")] if path else [],
                    "operator": operator,
                    "line": at,
                    "bytes": size,
                }
                for path, operator, at, size in lines
            ],
            **more,
        }
    }


def masks(causal: int = 0, empty: int = 0) -> dict[str, Any]:
    """Return a counted step in which four calls of attention are given masks, so many of them without need."""
    given = {"module": "h.*.attn", "calls": 4, "causal": causal, "empty": empty}
    return works(("h.*/h.*.attn", "_scaled_dot_product_flash_attention", 50, MIB), given_masks=[given])


def scored(counted: int, positions: int = 100) -> tuple[Program, dict[str, Any]]:
    """Return a program of a model and a head, and that the loss counts so many of its positions."""
    head = within("lm_head", launch(MISH[0], 9_000), launch(NVJET, 600_000))
    forward = within("forward", within("h.0", launch(NVJET, 900_000)), head)
    backward = within("backward", launch(SOFTMAX, 400_000), head, within("h.0", launch(NVJET, 900_000)))
    given = {"module": "lm_head", "positions": positions, "counted": counted}
    return equal_steps(forward, launch(SOFTMAX, 400_000), backward, wait), works(scored_positions=[given])


def pageable_copy(kernels: int) -> Program:
    phases = [within(phase, launch(NVJET, 2_000, times)) for phase, times in (("forward", 100), ("backward", kernels))]
    return equal_steps(phases[0], copy(MS // 2), phases[1], wait)


def optimizer_loop() -> Program:
    phases = within("forward", launch(NVJET, 100_000, 10)), within("optimizer", launch(ADD, 2_000, 400))
    return equal_steps(*phases, wait)


def optimizer_calls(fused: int, others: int, *more: Action) -> Program:
    """Steps of which the optimizer launches a fused kernel and one for its counters this often, each for 2 µs."""
    kernels = launch(FUSED_ADAM, 2_000, fused), launch(COUNTERS, 2_000, others)
    return equal_steps(within("forward", launch(NVJET, 100_000, 10)), within("optimizer", *kernels, *more), wait)


def with_groups(groups: int, unlike: int, parameters: int = 160, name: str = "AdamW") -> dict[str, Any]:
    counts = {"groups": groups, "unlike_groups": unlike, "parameters": parameters}
    return {"conditions": {"optimizers": [{**ADAMW, "name": name, "fused": True, **counts}]}}


def written_optimizer(parameters: int, *kernels: Action) -> tuple[Program, dict[str, Any]]:
    """Steps of an optimizer that is not torch's, with 400 small kernels and more, for so many parameters."""
    phases = within("forward", launch(NVJET, 100_000, 10)), within("optimizer", launch(ADD, 2_000, 400), *kernels)
    own = {**ADAMW, "name": "Adafactor", "is_torchs": False, "parameters": parameters}
    lines = [line(3 * MS, "optimizer", "optimizer.step"), line(MS, "optimizer", "grad.pow", line=31)]
    return equal_steps(*phases, wait), {"conditions": {"optimizers": [own]}, "lines": lines}


def small_kernels(name: str) -> Program:
    return equal_steps(within("forward/model/layer", *[launch(NVJET, 50_000), launch(name, 100_000)] * 10), wait)


def backward_that_waits() -> Program:
    backward = within("backward", *[launch(NVJET, 20_000), python(50_000), wait] * 20)
    return equal_steps(within("forward", launch(NVJET, 20_000, 20)), backward)


def planned_attention(*pauses: int) -> Program:
    """Attention of so many layers, before each of which Python takes so long; its backward needs no plan but one."""
    layers = [act for pause in pauses for act in (launch(NVJET, 20_000), python(pause), launch(CUDNN_ATTENTION, 9_000))]
    backward = [launch(CUDNN_ATTENTION_BACKWARD, 9_000), launch(NVJET, 20_000)] * len(pauses)
    return equal_steps(within("forward", *layers), within("backward", python(max(pauses)), *backward), wait)


def searched_convolution(between: str = CONVERT) -> Program:
    """A convolution of 400 µs, of which five kernels are tried before, each for 600 µs: the host waits for each."""
    tried = [act for _ in range(5) for act in (wait, launch(CONVOLUTION, 600_000), launch(between, 9_000), wait)]
    layer = within("forward", within("conv", *tried, launch(CONVOLUTION, 400_000), launch(ADD, 9_000)))
    return equal_steps(layer, within("backward", launch(CONVOLUTION, 800_000)), wait)


def passes_of(duration: int, small: str = ADD, *, waits: bool = False) -> Program:
    kernels = [launch(name, duration) for name in (NVJET, small, NVJET, SUM)] * 40
    phases = [within(phase, *kernels, *[wait] * waits) for phase in ("forward", "backward")]
    return equal_steps(*phases, wait)


def short_passes(*launches: int) -> Program:
    """Steps of as many short kernels in each of both passes."""
    steps = [[within(phase, launch(NVJET, 3_000, count)) for phase in ("forward", "backward")] for count in launches]
    return Program(*([*step, wait] for step in steps))


def small_passes(passes: int, duration: int) -> Program:
    """Steps of passes of 50 kernels, for each of which the host takes 8 µs, and one kernel of the optimizer."""
    phases = [within(phase, launch(NVJET, duration, 50)) for phase in ("forward", "backward")]
    return equal_steps(*phases * passes, within("optimizer", launch(ADD, 2_000)), wait)


def made_in_python(*, work_before: bool = True) -> Program:
    """Half a millisecond of Python, and a copy to the GPU; without work before it the first of the steps is short."""
    kernels = within("forward", launch(NVJET, 200_000, 20))
    before = [launch(NVJET, 200_000, 20)] * work_before
    return equal_steps(python(MS // 2), copy(10_000), python(MS // 4), kernels, before=before)


def convolutions(conversion: str, zero: str, *before: Action) -> Program:
    module = within("forward/model/conv", launch(conversion, 200_000), launch(CONVOLUTION, 500_000))
    return equal_steps(*before, module, within("optimizer", launch(zero, 200_000)), wait)


EFFICIENT_IN_FP32 = "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>::Params)"
BF16_BY_ANOTHER_NAME = (
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align8>"
    "(cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align8::Params)"
)
LSTM_CELL = "void at::native::_GLOBAL__N__1c2f::kernel::lstm_cell_forward<float, float, int, 1>(float, float)"


def autocasts(*attention: tuple[str, int], product: str = TF32) -> tuple[Program, dict[str, Any]]:
    """Return steps of four blocks under autocast, whose attention is this and two products, and its mlp is another."""
    parts: list[Action] = []
    for block in range(4):
        inside = f"forward/model/h.{block}/h.{block}.attn"
        parts.append(within(f"{inside}/h.{block}.attn.qkv", launch(product, 100_000)))
        parts.append(within(inside, *(launch(*kernel) for kernel in attention)))
        parts.append(within(f"{inside}/h.{block}.attn.proj", launch(product, 50_000)))
        parts.append(within(f"forward/model/h.{block}/h.{block}.mlp", launch(NVJET, 300_000)))
    return equal_steps(*parts, wait), {"conditions": {"autocast_dtypes": ["bfloat16"]}}


def loop_of_cells(time_steps: int, *between: Action, cell: str = LSTM_CELL) -> Program:
    """Return steps of a loop over time in which two layers' cells follow one another, and of backward through it."""
    products, sums = launch(TF32, 9_000, 2), launch(ADD, 3_000, 2)
    layers = [f"model/rnn/rnn.cells.{layer}" for layer in range(2)]
    forward = [within(f"forward/{layer}", products, launch(cell, 4_000)) for layer in layers]
    backward = [within(f"backward/{layer}", launch(cell, 4_000), products, products, sums) for layer in layers[::-1]]
    return equal_steps(*[*forward, *between] * time_steps, *backward * time_steps, launch(NVJET, MS), wait)


SIGMOID = ADD.replace("CUDAFunctor_add<float>", "sigmoid_kernel_cuda")
WRITTEN_CELLS = {
    "LSTM": (TF32, TF32, ADD, SIGMOID, SIGMOID, TANH, SIGMOID, ADD, ADD, TANH, ADD),
    "GRU": (TF32, TF32, SIGMOID, SIGMOID, ADD, TANH, ADD, ADD),
    "RNN": (TF32, TF32, ADD, TANH),
    "none": (TF32, TANH, TF32, TANH),
}


def written_cells(*kernels: str, calls: int = 70, modules: int = 1, shapes: int = 1) -> Program:
    """Return steps in which a module, or several in turn, runs these kernels again and again, forward and backward."""
    forward = []
    for call in range(calls):
        names = [name.replace("tf32f32", f"tf32f32_{call % shapes}") for name in kernels]
        forward.append(within(f"forward/model/rnn.{call % modules}", *(launch(name, 5_000) for name in names)))
    backward = [within("backward/model/rnn.0", launch(TF32, 5_000, 4), launch(ADD, 3_000, len(kernels)))] * calls
    return equal_steps(*forward, *backward, launch(NVJET, MS), wait)


LAYOUT = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>>"
)
NHWC = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"


def undone_layouts(place: str, convolution: str = NHWC) -> Program:
    """Four blocks whose convolution makes channels-last again of what a copy in ``place`` undid, each in 200 µs."""
    parts: list[Action] = []
    for block in range(4):
        inside = f"forward/model/h.{block}"
        parts.append(within(inside + place.replace("*", str(block)), launch(LAYOUT, 200_000)))
        parts.append(within(f"{inside}/h.{block}.conv", launch(LAYOUT, 200_000), launch(convolution, MS)))
    return equal_steps(*parts, wait)


def norms_by_channel(statistics_ns: int, order: str = "") -> Program:
    """Batch norms whose statistics take this long for each channel, and whose output is written in 100 µs."""
    norm = "void at::native::batch_norm_{}" + order + "_kernel<at::native::InvStd, c10::BFloat16, float, int>()"
    forward = [
        launch(norm.format("collect_statistics"), statistics_ns),
        launch(norm.format("transform_input"), 100_000),
    ]
    backward = within("backward/model/norm", launch(norm.format("backward"), 2 * statistics_ns))
    return equal_steps(within("forward/model/norm", launch(NHWC, MS), *forward * 4), backward, wait)


def passes(*calls: int, read: int = 1) -> Program:
    """Calls of a model with these numbers of kernels of 500 µs, and backward passes through ``read`` of them."""
    forward = [within("forward/model", launch(NVJET, MS // 2, count)) for count in calls]
    return equal_steps(*forward, *[within("backward/model", launch(NVJET, MS, 4))] * read, wait)


def with_fills(count: int) -> Program:
    """Steps in which memory is filled this often, each time for 4 µs."""
    fills = [launch(FILL, 4_000), launch(NVJET, 10_000)] * count
    return equal_steps(within("forward", launch(NVJET, MS, 4), *fills), wait)


def zeroed_gradients(count: int, kind: str = "at::native::CUDAFunctor_add<float>") -> Program:
    """Gradients that are filled one by one; a sum moves three times the bytes of a fill, and goes with it."""
    sums = launch(f"void at::native::vectorized_elementwise_kernel<4, {kind}>", 300_000, count)
    backward = within("backward", launch(NVJET, MS), sums)
    return equal_steps(launch(FILL, 100_000, count), within("forward", launch(NVJET, MS)), backward, wait)


def blocking_launches(*, blocks: bool) -> Program:
    return equal_steps(within("forward", launch(NVJET, 10_000, 200, blocks=blocks)), wait)


def checkpointed(*blocks: str) -> Program:
    forward = [within(f"forward/model/{block}", launch(NVJET, MS // 2)) for block in blocks]
    backward = [
        within(f"backward/model/{block}", within(f"recompute/{block}", launch(NVJET, MS // 2)), launch(NVJET, MS))
        for block in blocks[::-1]
    ]
    return equal_steps(*forward, *backward, wait)


def two_passes(early: int, late: int) -> Program:
    """Steps of two passes with so many collectives at the end of each."""
    kernels = launch(NVJET, 100_000, 10)
    passes = [
        (within("forward", kernels), within("backward", kernels, launch(NCCL, 500_000, collectives)))
        for collectives in (early, late)
    ]
    return equal_steps(*passes[0], *passes[1], wait)


def zeroed(lengths: Sequence[float]) -> tuple[Program, dict[str, Any]]:
    """Return steps that zero gradients, and unprofiled ones of as many times their length."""
    program = equal_steps(within("forward", launch(NVJET, MS, 2)), within("optimizer", launch(ZERO, 150_000)), wait)
    steps = [{"step_ns": round(length * program.lengths[0])} for length in lengths]
    return program, {"attached": {"steps": steps}}


def pauses(
    name: str, counter: str, *, in_steps: int, counted: int, after_ns: int = 0, **given: Any
) -> tuple[Program, dict[str, Any]]:
    """Return steps in each of which the host pauses for 2 ms: in some of them in a range up to ``after_ns``."""
    kernels = launch(NVJET, 50_000, 10)
    ranges = [python(2 * MS - after_ns, name if number < in_steps else None) for number in range(STEPS)]
    program = Program(*([within("forward", kernels, pause, python(after_ns), kernels, wait)] for pause in ranges))
    lines = [line(2 * MS, "forward", "gc.collect", line=44, samples=9), line(2 * MS, "forward", "scale", line=50)]
    attached = {"steps": [{"step_ns": length} for length in program.lengths], "during": {counter: counted}}
    return program, {"lines": lines, "attached": attached, "processes": [{"pid": 7}], **given}


def collects(in_steps: int, counted: int) -> tuple[Program, dict[str, Any]]:
    return pauses("collecting garbage", "full_collections", in_steps=in_steps, counted=counted)


def compiles(*, is_again: bool) -> tuple[Program, dict[str, Any]]:
    reason = "name == 'step 1'              # return loss * 2  # loss.py:13 in scale"
    compiled = Compilation("7-1", 7, "forward", "loss.py:12 scale", 2, True, is_again, 2 * MS, reason=reason)
    counts = {"in_steps": STEPS, "counted": STEPS, "after_ns": MS // 2}
    return pauses("compiling scale", "compiled_graphs", **counts, records=[compiled])  # type: ignore[arg-type]


def gives_up(name: str, failure: str = "Dynamo recompile limit exceeded") -> tuple[Program, dict[str, Any]]:
    """Return steps whose criterion runs kernels of this name; Dynamo has compiled it for other steps."""
    reason = "self.step == 6              # w = self.ramp(self.step)  # mp/code/loss.py:13 in forward (HINT: none)"
    known = Compilation("7-1", 7, "forward", "loss.py:12 forward", 7, False, True, MS, reason=reason, failure=failure)
    model = within("forward/model", launch(TRITON, 100_000), launch(NVJET, 2 * MS))
    criterion = within("forward/criterion", *[launch(name, 500_000), launch(NVJET, 100_000)] * 4)
    return equal_steps(model, criterion, wait), {"records": [known], "processes": [{"pid": 7}]}


def loads(data_ns: int) -> tuple[Program, dict[str, Any]]:
    """Return steps that wait for a loader without workers, by a line of its dataset and one of the loop."""
    program = equal_steps(within("data", python(data_ns)), FORWARD)
    dataset = line(data_ns // 3, "data", "Image.open", file="/code/data.py", line=12, function="__getitem__")
    return program, {"lines": [dataset, line(2 * data_ns // 3, "data", "next", line=88)]}


def with_workers(
    data_ns: int, cpus: int, cpu_ns: int, *work: Action, workers: int = 4, batch_ns: int = 20 * MS
) -> tuple[Program, dict[str, Any]]:
    """Return steps that wait for workers, each of which takes so long for a batch, on one CPU or on several."""
    loading = {"pid": 7, "loading": {"workers": workers, "batches_per_step": 1.0}}
    loader = {"batches": 50, "batch_ns": batch_ns, "batch_cpu_ns": cpu_ns}
    given = {"conditions": {"cpu_count": cpus}, "processes": [loading], "loader": loader}
    return equal_steps(within("data", python(data_ns)), *(work or [FORWARD])), given


def slow_dataset(data_ns: int, line_ns: int, *work: Action, batch_ns: int = 20 * MS) -> tuple[Program, dict[str, Any]]:
    """Return steps that wait for four workers on four CPUs, of whose 20 ms for a batch a line takes so much."""
    program, given = with_workers(data_ns, 4, batch_ns, *work, batch_ns=batch_ns)
    parse = line(line_ns, None, "json.load", file="/code/data.py", line=12, function="__getitem__", thread="worker")
    return program, {**given, "lines": [parse]}


def statistics(*lines: int, large: bool = True) -> tuple[Program, dict[str, Any]]:
    """Return steps in which two lines of a hook compute values of 1 ms each, or small ones, and read them."""
    value = [launch(SUM, MS if large else 3_000), wait]
    program = equal_steps(within("forward/model/act", launch(NVJET, 2 * MS), *value, *value))
    read = [line(MS, "forward", "….item", line=number, waits=1.0, file="/code/model.py") for number in lines]
    counted = works(*(("act", "mean", number, 4 * GIB) for number in lines))
    return program, {**counted, "lines": read}


def stacks_samples(function: str) -> tuple[Program, dict[str, Any]]:
    """Return steps that wait for four workers, of whose 20 ms for a batch a function of a library's takes 17."""
    program, given = slow_dataset(4 * MS, MS, FORWARD)
    librarys = LineTime(None, 0, "", None, None, "worker", 900, 17 * MS, MS // 10, 0.0, inside=function)
    return program, {**given, "lines": [*given["lines"], librarys]}


def waits_in_bursts(
    batch_ns: int, *work: Action, workers: int = 4, every: int = 10, is_recorded: bool = False
) -> tuple[Program, dict[str, Any]]:
    """Return steps of which one of so many waits for the workers for them all; it is recorded, or none that does."""
    program, given = with_workers(50_000, 64, batch_ns, *work, workers=workers)
    step_ns, loader = program.lengths[1], {"batches": 50, "batch_ns": batch_ns, "batch_cpu_ns": batch_ns}
    if is_recorded:
        usual, late = ([within("data", python(time_ns)), *work] for time_ns in (50_000, BURST_NS + step_ns // 2))
        program = Program(usual, late, *[usual] * (STEPS - 2))
    timed = {"step_ns": step_ns, "data_ns": 50_000, "forward_event_ns": step_ns - 70_000, "forward_host_ns": step_ns}
    waiting = {**timed, "step_ns": step_ns + BURST_NS, "data_ns": BURST_NS + step_ns // 2}
    steps = [*[timed] * (every - 1), waiting] * (10 // every)
    return program, {**given, "loader": loader, "attached": {"steps": steps}}


def restarts(start_ns: int, batches: int = 10, *, stay: bool = False) -> tuple[Program, dict[str, Any]]:
    """Return steps whose workers make batches of 1 ms in time, and are started anew for every ten batches, or stay."""
    program, given = waits_in_bursts(MS, FORWARD)
    loading = {"workers": 4, "batches_per_step": 1.0, "epoch_batches": batches, "epoch_start_ns": start_ns}
    loading["starts_workers"] = not stay
    return program, {**given, "processes": [{"pid": 7, "loading": loading}]}


def padded(
    in_longest: int, used: int | None = None, phases: Sequence[str] = ("forward", "backward")
) -> tuple[Program, dict[str, Any]]:
    """Return steps of 8 ms of kernels a phase that depend on 1,000 positions, and of 1 ms of the optimizer's."""
    passes = [within(phase, launch(NVJET, MS, 8)) for phase in phases]
    program = equal_steps(*passes, within("optimizer", launch(NVJET, MS)), wait)
    return program, works(padding={"positions": 1000, "in_longest": in_longest, "used": used or in_longest})


def saved_on_cpu(held: int) -> tuple[Program, dict[str, Any]]:
    """What a pass keeps for backward is on the CPU meanwhile, where nothing computes with it."""
    saving = [within("forward", launch(NVJET, 200_000), copy(100_000, 2)), python(10_000)] * 10
    program = equal_steps(*saving, within("backward", copy(100_000), launch(NVJET, 400_000), wait))
    inside = "graph.save_on_cpu.__init__.pack_to_cpu"
    keeping = line(2 * MS, "forward", "self.mlp", waits=10, waiting_ns=MS, inside=inside)
    return program, {**with_memory(held), "lines": [keeping]}


def with_memory(held: int) -> dict[str, Any]:
    """Return the conditions of a process that held this much of a GPU's memory."""
    return {"conditions": {"reserved_peak_bytes": held, "gpu_memory_bytes": 140 * GIB}}


def grows(bytes_per_step: int) -> tuple[Program, dict[str, Any]]:
    program = equal_steps(within("forward", launch(NVJET, MS, 5)), wait)
    steps = [{"step_ns": length} for length in program.lengths]
    during = {"allocated_bytes": STEPS * bytes_per_step}
    return program, {**with_memory(30 * GIB), "attached": {"steps": steps, "during": during}}


def counted_products(neighbour: str, least_bytes: int) -> tuple[Program, dict[str, Any]]:
    """Return steps with padded products in the head, and what each range of their forward pass does."""
    flops = {"": 1_400e9, "head": 400e9, "body": 1_000e9}
    names = {path: ["forward", "model", *([path] if path else [])] for path in flops}
    usual = {"other_flops": 0, "needed_flops": 0, "instances": 1, "varies": False, "least_bytes": least_bytes}
    counts = {path: {"flops": round(count), "flops_by_dtype": {"bf16": round(count)}} for path, count in flops.items()}
    ranges = [{"path": names[path], **usual, **counts[path]} for path in flops]
    work = {"version": 1, "source": "counted", "dtype": "bf16", "ranges": ranges, "model_flops": 0, "missing": []}
    head = within("forward/model/head", launch(MISALIGNED, 2 * MS, 2))
    body = within("forward/model/body", launch(NVJET, MS), launch(neighbour, MS))
    return equal_steps(head, body, wait), {"work": work, "gpu": "NVIDIA H200"}


IMAGES = {"lines": [line(MS // 2, called="images.to", waits=1)], "processes": [{"loading": {"workers": 4}}]}
IN_MODEL_FILE = line(MS // 2, called="torch.eye.to", file="/code/model.py", waits=1)
EYE = {**IMAGES, "lines": [IN_MODEL_FILE], **works(("", "eye", 30, MIB), ("", "_to_copy", 30, MIB))}
BATCH = {"lines": [line(4 * MS, called="make_batch")]}
TRAINER = {"lines": [line(4 * MS, called="trainer.fit"), line(MS, "backward", "trainer.fit")]}
ITEM = line(8 * MS, None, "loss.item", line=62, waits=1, waiting_ns=8 * MS)
PACK = line(2 * MS, called="np.argsort", line=56)
READS = [line(MS, "forward", "y.max().item", waits=1), line(MS, "backward", "float", waits=1, line=40)]


def loss_by_hand(*kernels: str) -> tuple[Program, dict[str, Any]]:
    """Return steps with a loss in a module, and in one within it, of these kernels, forward and backward."""
    inner, outer = [launch(name, MS) for name in kernels[:2]], [launch(name, MS) for name in kernels[2:]]
    modules = ("loss/Smoothing", outer), ("loss/Smoothing/criterion", inner)
    forward = [within(place, *parts) for place, parts in modules]
    backward = within("backward/Smoothing", *inner, *outer)
    return equal_steps(within("forward/model", launch(NVJET, 4 * MS)), *forward, backward, wait), {}


def python_in_call(paused: float = 1.0) -> tuple[Program, dict[str, Any]]:
    """Return steps that call a function with Python of 4 ms in two lines, of which a share pauses, and its lines."""
    made = replace(
        line(round(2.5 * MS), called="pairs", line=20, file="/code/data.py"), caller="/code/train.py:99 main"
    )
    drawn = replace(made, line=60, called="choose", time_ns=round(1.5 * MS))
    call = replace(line(4 * MS, called="make_batch", line=99), is_caller=True, caller="/code/train.py:120 <module>")
    outermost = [replace(call, line=120, called="main", phase=phase, caller=None) for phase in (None, "backward")]
    whole, between = round(4 * MS * paused), round(4 * MS * (1 - paused) / 50)
    kernels = [part for _ in range(50) for part in (python(between), launch(ADD, 2_000))]
    return equal_steps(python(whole), *kernels, FORWARD), {"lines": [made, drawn, call, *outermost]}


def separate_calls(duration: int, *, is_independent: bool = True, passes: int = 1) -> tuple[Program, dict[str, Any]]:
    """Return steps that call an encoder for each of 32 samples, all in one pass or in several, with such kernels."""
    kernels = [launch(name, duration) for name in (NVJET, ADD, NVJET)]
    forward, backward = (within(f"{phase}/model/encoder", *kernels) for phase in ("forward", "backward"))
    calls = 32 // passes
    one_pass = (*[forward] * calls, launch(NVJET, MS // passes), *[backward] * calls)
    program = equal_steps(*one_pass * passes, wait)
    called = line(MS, "forward", "self.encoder", line=14, file="/code/model.py")
    counted = works(independent_calls=[{"module": "encoder", "calls": 32}] * is_independent)
    return program, {**counted, "lines": [called]}


def calls_trunk_again(calls: int) -> tuple[Program, dict[str, Any]]:
    """Return steps that call a trunk of 2 ms in each pass twice, as was counted or not."""
    forward, backward = (within(f"{phase}/model/trunk", launch(NVJET, 2 * MS)) for phase in ("forward", "backward"))
    one_pass = (*[forward] * 2, within("forward/model/head", launch(NVJET, MS)), *[backward] * 2)
    called = line(MS, "forward", "self.trunk", line=14, file="/code/model.py")
    counted = works(repeated_calls=[{"module": "trunk", "calls": calls}] * (calls > 1))
    return equal_steps(*one_pass * 2, wait), {**counted, "lines": [called]}


def mixture(own: int, parts: int) -> tuple[Program, dict[str, Any]]:
    """Return steps of a module that calls its activation, of ``parts`` kernels, in each of 32 turns of a loop.

    Each turn has so many kernels of the module's own, too, and waits for the rows that it finds.
    """
    kernels = [launch(name, 4_000) for name in (NVJET, ADD, MUL, SUM)[:own]]
    turn = *kernels, within("moe.act", launch(TANH, 4_000, parts)), wait
    program = equal_steps(within("forward/model/moe", *turn * 32), launch(NVJET, MS), wait)
    found = line(MS, "forward", "mask.nonzero", line=28, file="/code/model.py", waits=32, waiting_ns=MS // 2)
    called = line(MS, "forward", "self.act", line=30, file="/code/model.py")
    of_turns = ("moe", "mm", 29, MIB), ("moe", "nonzero", 28, MIB)
    counted = works(*of_turns, independent_calls=[{"module": "moe.act", "calls": 32}])
    return program, {**counted, "lines": [found, called]}


def turns_apart(turns: int) -> tuple[Program, dict[str, Any]]:
    """Return steps of a module that multiplies for each of 32 variables, as was counted or not."""
    kernels = [launch(name, 4_000) for name in (NVJET, ADD, NVJET, MUL)]
    passes = [within(f"{phase}/model/each", *kernels * 32) for phase in ("forward", "backward")]
    found = {"module": "each", "turns": turns, "file": "/code/model.py", "line": 61, "function": "Each.forward"}
    return equal_steps(*passes, launch(NVJET, MS), wait), works(independent_turns=[found] * bool(turns))


def loads_in_turns(turns: int) -> Program:
    """Return steps of a module with so many copies, each after the same small kernels, and with a norm of its own."""
    small = [launch(name, 3_000) for name in (ADD, MUL, ADD, TANH)]
    norm = [launch(name, 3_000) for name in (SUM, ADD, MUL, SQRT, MUL, ADD)]
    return equal_steps(within("forward/model/mask", *[*small, copy(1_000)] * turns, *norm), wait)


def takes_views(count: int, joins: int = 100) -> tuple[Program, dict[str, Any]]:
    """Return steps of a module that takes vectors one by one, and puts them together: backward adds up each one's."""
    slicing = within("forward/model/regulator", *[python(9_000), launch("CatArrayBatchedCopy", 1_000)] * joins)
    summing = within("backward/model/regulator", *[launch(SUM, 2_000)] * count)
    lines = [line(MS, "forward", "x.expand", line=69, file="/code/model.py", function="forward")]
    counted = works(("regulator", "cat", 70, MIB))
    return equal_steps(slicing, launch(NVJET, MS), summing, wait), {**counted, "lines": lines}


def calls_experts(module: str) -> tuple[Program, dict[str, Any]]:
    """Return steps that call each of 32 experts of a layer once."""
    kernels = [launch(name, 4_000) for name in (NVJET, ADD, NVJET)]
    passes = [
        [within(f"{phase}/model/experts.{at}", *kernels) for at in range(32)] for phase in ("forward", "backward")
    ]
    counted = works(independent_calls=[{"module": module, "calls": 32}])
    return equal_steps(*passes[0], launch(NVJET, MS), *passes[1], wait), counted


def looped_outside(
    called: str | None = None, *, computes: bool = False, is_librarys: bool = False
) -> tuple[Program, dict[str, Any]]:
    """Return steps of a loop outside of modules, each turn of which calls a function that waits for a value.

    The loop calls ``called`` in the phase inference, too, if that is given, and computes itself or in the function.
    """
    turn = python(20_000), launch(ADD, 3_000, 4), launch(MUL, 3_000, 2), wait
    program = equal_steps(within("forward", launch(NVJET, 100_000, 10)), *turn * 20, wait)
    loop = {"file": "/code/loss.py", "function": "total", "caller": "/code/train.py:99 main"}
    of_turn = {"file": "/code/model.py", "function": "forward", "caller": "/code/loss.py:20 total"}
    if computes:
        loop = of_turn = {**of_turn, "caller": "/code/train.py:99 main"}
    lines = [
        line(MS, called="x.max", line=60, waits=20, waiting_ns=MS // 2, **of_turn),
        line(MS, called="x.min", line=61, **of_turn),
        line(3 * MS // 2, called="torch.stack", line=21, **loop),
        replace(line(2 * MS, called="area", line=20, **loop), is_caller=True),
        replace(line(7 * MS // 2, called="total", line=99), is_caller=True),
    ]
    if called is not None:
        lines.append(replace(line(MS // 9, "inference", called, line=22, **loop), is_caller=not is_librarys))
    return program, {**works(("", "max", 60, MIB), ("", "min", 61, MIB)), "lines": lines}


def rolled_out_unseen(phase: str) -> Program:
    """Return steps of a loop outside of modules beside a pass in this phase, of which no line was seen."""
    turn = python(20_000), launch(ADD, 3_000, 4), launch(MUL, 3_000, 2), wait
    return equal_steps(within(phase, launch(NVJET, 100_000)), *turn * 20, within("forward", launch(NVJET, MS)), wait)


OUTER_SCAN = "void at::native::tensor_kernel_scan_outer_dim<long, unsigned int, std::plus<long> >(long*)"
INDEXING = (
    "void (anonymous namespace)::indexing_backward_kernel_stride_1<float>(long const*, long const*, float const*)"
)


def scanned(duration: int) -> Program:
    """Return steps whose router sums over an outer axis."""
    return equal_steps(within("forward/model/router", launch(OUTER_SCAN, duration)), FORWARD)


def sums_rows(kernel: str = INDEXING, model: str = "model") -> Program:
    return equal_steps(
        within("forward/model", launch(NVJET, MS)), within(f"backward/{model}", launch(kernel, 4 * MS)), wait
    )


def frozen(early: int, unread: int, first: int = 0) -> tuple[Program, dict[str, Any]]:
    """Return steps with two blocks and a head, of which so many blocks have gradients that no optimizer reads.

    In so many of these nothing of backward is needed, and of so many heads no gradient of what comes in.
    """
    backward = [within(f"backward/model/{module}", launch(NVJET, MS, 2)) for module in ("head", "blocks.1", "blocks.0")]
    program = equal_steps(within("forward/model", launch(NVJET, MS, 3)), *backward, wait)
    counts = {"instances": 2, "unread": unread, "early": early}
    blocks = {"module": "blocks.*", "parameters": unread, "bytes": unread * MIB, **counts}
    head = {"module": "head", "parameters": 0, "bytes": 0, "instances": 1, "unread": 0, "early": 0, "first": first}
    return program, works(unread_gradients=[blocks, head])


def of_two_models(*, is_detached: bool, steps: int = 2) -> tuple[Program, dict[str, Any]]:
    """Return steps of a generator and a discriminator, whose gradients before the other one's step are thrown away."""
    both = within("backward/judges/layer.0", launch(NVJET, 2 * MS, 2))
    makes = within("backward/makes/layer.0", launch(NVJET, MS, 2))
    step = within("optimizer", launch(ADD, 100_000))
    program = equal_steps(both, *[makes] * (not is_detached), step, both, makes, step, wait)
    usual = {"module": "layer.*", "parameters": 2, "bytes": MIB, "instances": 1, "unread": 1}
    judges = {**usual, "early": 0, "before": 1, "model": "judges"}
    maker = {**usual, "early": 1, "before": 0, "model": "makes"}
    return program, works(unread_gradients=[judges, *[maker] * (not is_detached)], optimizer_steps=steps)


def sliced(slices: int, *, are_copied: bool = True) -> Program:
    """Return steps whose backward fills a tensor for each slice, copies the gradient into it, and adds them up."""
    one = [launch(FILL, 100_000), *[launch(LAYOUT, 5_000)] * are_copied, launch(ADD, 300_000)]
    return equal_steps(
        within("forward/model/head", launch(NVJET, MS)), within("backward/model/head", *one * slices), wait
    )


def attends(*, projects: bool) -> Program:
    """Return steps of four blocks of attention that is written out, with a copy and a sum around it in each pass.

    With ``projects`` the module itself makes queries, keys and values of what it is given, and its output, too.
    """
    projection = [launch(NVJET, 100_000)] * projects
    product, copied, added = launch(NVJET, 100_000), launch(LAYOUT, 50_000), launch(ADD, 50_000)
    scores = [launch(name, 100_000) for name in (ADD, SOFTMAX, MUL)]
    forward = [*projection, added, product, *scores, product, copied, *projection]
    backward = [copied, *projection * 2, *[product] * 2, *scores[::-1], *[product] * 2, added, *projection * 2]
    steps = [
        within(f"{phase}/model/h.{block}/h.{block}.{module}", *kernels)
        for phase, attention in (("forward", forward), ("backward", backward))
        for block in range(4)
        for module, kernels in (("attn", attention), ("mlp", [launch(NVJET, 200_000)]))
    ]
    return equal_steps(*steps, wait)


def gated(layers: int) -> Program:
    """Return steps of layers with a small kernel each, and of one gate of eight."""
    layer = within("forward/model/layer", *[launch(NVJET, 50_000), launch(ADD, 100_000)] * layers)
    return equal_steps(layer, within("forward/model/gate", launch(ADD, 100_000, 8)), launch(NVJET, 50_000), wait)


def waits_together(*between: Action, python_ns: int) -> tuple[Program, dict[str, Any]]:
    """Return steps with a wait in each of two lines, and with Python after them."""
    inner = line(2 * MS, called="boxes.tolist", line=20, file="/code/boxes.py", waits=1, waiting_ns=2 * MS)
    inner = replace(inner, caller="/code/train.py:60 main")
    call = replace(line(2 * MS, called="match", line=60), is_caller=True)
    outer = line(python_ns, called="loss.item", line=50, waits=1, waiting_ns=python_ns)
    program = equal_steps(within("forward", launch(NVJET, 100_000, 20)), wait, *between, wait, python(python_ns))
    return program, {"lines": [inner, outer, call]}


def sigmoids(*backward: str, gate: int = 100_000) -> Program:
    """Return steps of blocks that multiply with a sigmoid, and of what these kernels do in backward."""
    forward = within("forward/model/act", launch(SIGMOID, gate), launch(MUL, 100_000))
    return equal_steps(
        *[forward, within("forward/model/fc", launch(NVJET, MS))] * 8,
        *[within("backward/model/act", *(launch(name, 100_000) for name in backward))] * 8,
        wait,
    )


def activates(*forward: str, backward: Sequence[str] = ()) -> Program:
    """Return steps of blocks that run these kernels after torch's own norm, in backward before it, in one module."""
    own = [launch(LAYER_NORM, 300_000)]
    after, before = ([launch(name, 100_000) for name in names] for names in (forward, backward))
    return equal_steps(
        *[within("forward/model/bn", *own, *after), within("forward/model/fc", launch(NVJET, MS))] * 8,
        *[within("backward/model/bn", *before, *own)] * 8,
        wait,
    )


def table(used: int, *, is_unread: bool = False) -> tuple[Program, dict[str, Any]]:
    """Return steps whose optimizer spends 4 ms, three quarters of it on a table of 1,000 rows."""
    fill = within("backward/model/table", launch(FILL, MS), launch(NVJET, MS // 10))
    program = equal_steps(
        within("forward/model", launch(NVJET, MS)), fill, within("optimizer", launch(ADD, 4 * MS)), wait
    )
    unread = {"module": "table", "parameters": 1, "bytes": 3 * MIB, "instances": 1, "unread": 1, "early": 0}
    counted = works(
        tables=[{"module": "table", "rows": 1_000, "used": used, "bytes": 3 * MIB}],
        unread_gradients=[unread] * is_unread,
    )
    return program, {**counted, "conditions": {"optimizers": [{**ADAMW, "fused": True, "parameter_bytes": 4 * MIB}]}}


IN_MODEL = equal_steps(
    within("forward", python(4 * MS), launch(NVJET, MS)), within("backward", launch(NVJET, MS)), wait
)
LATE = equal_steps(python(4 * MS), FORWARD)
CALLS_MODEL = {
    "lines": [
        line(MS),
        replace(line(4 * MS, "forward", "model"), is_caller=True),
        line(MS // 10, "backward", "loss.backward", line=31),
    ]
}
MOSTLY_HIDDEN = equal_steps(python(6 * MS), within("forward", launch(NVJET, 5 * MS)))
MADE_ON_CPU = equal_steps(python(4 * MS), copy(2 * MS), FORWARD)
LONG = within("forward", launch(NVJET, 100_000, 100))
MEAN = line(MS, "forward", "y.mean().item", waits=8, waiting_ns=MS)
NORMS = line(2 * MS, called="p.grad.norm().item", waits=40, waiting_ns=MS)
MOVED_PARTS = line(MS, called="part.to", waits=3, waiting_ns=MS)
ONE_BY_ONE = equal_steps(FORWARD, *[python(30_000), launch(SUM, 5_000), read] * 40, wait)
FAR_APART = equal_steps(FORWARD, *[python(30_000), launch(SUM, 5_000, 7), read] * 40, wait)
VOLUMES = works(("conv", "convolution3d", 7, MIB))
OF_IMAGES, OF_SIGNALS = (works(("conv", f"convolution{of}", 7, MIB)) for of in ("", "1d"))
NORMS_OF_IMAGES = works(("conv", "convolution", 7, MIB), ("norm", "instance_norm", 8, MIB))
A_CLASS = [python(30_000), launch(SUM, 5_000), read, launch(ADD, 5_000, 8), launch(SUM, 5_000, 4), read]
CLASSES = within("forward/model/dice", *A_CLASS * 12)
OF_CLASSES = within("backward/model/dice", *[python(20_000), launch(ADD, 5_000, 20), read] * 12)
CHECKED = line(2 * MS, "forward", "mask.any", waits=12, waiting_ns=MS)
AVERAGED = equal_steps(FORWARD, *[copy(50_000, 2), wait, python(80_000)] * 40)
AVERAGES = {"lines": [line(7 * MS, called="weight.to", waits=40, waiting_ns=4 * MS)]}
LOGITS = line(2 * MS, called="logits.to", waits=1, waiting_ns=2 * MS)
WAITS = [launch(NVJET, 60_000, 5), wait, python(60_000)] * 8
SCALED = equal_steps(launch(NVJET, 100_000, 2), within("optimizer", *WAITS))
SCALER = line(MS, "optimizer", "scaler.step", waits=8, inside="grad_scaler.GradScaler._maybe_opt_step")
IN_BF16 = {"autocast_dtypes": ["bfloat16"]}
IN_TF32 = within("forward/model/head", launch(TF32, MS, 8))
MEANWHILE = launch(NVJET, 5 * MS)
PACKED, COPIED = equal_steps(python(2 * MS), LONG, wait), equal_steps(python(2 * MS), copy(20_000), LONG, wait)
FETCHED = equal_steps(within("forward", python(MS)), LONG, copy(20_000, 2), python(2 * MS))
FETCH = line(8 * MS, None, "best.cpu", line=54, waits=1, waiting_ns=8 * MS)
SMALL_BATCH = small_passes(1, 3_000)
SMALL_LAYER = within("forward/model/layer", *[launch(NVJET, 50_000), launch(ADD, 40_000)] * 10)
SMALL_BESIDE_LOSS = equal_steps(SMALL_LAYER, within("backward", launch(SOFTMAX, 300_000)), wait)
SMALL_CHAIN = equal_steps(within("forward", launch(NVJET, 100_000), launch(ADD, 100_000, 8)), wait)
WRITTEN_OUT = [(NVJET, 100_000), (ADD, 100_000), (SOFTMAX, 100_000), (NVJET, 100_000)]
CHAINS = {
    "activation": [(ADD, 100_000)] * 6 + [(TANH, 100_000)],
    "loop": [(ADD, 3_000)] * 12,
    "long loop": [(ADD, 100_000)] * 48,
    "norm": [(SUM, 100_000), *[(ADD, 100_000)] * 3, (SQRT, 9_000)],
}
SUMS = [launch(name, 3_000) for name in (ADD, MUL, SUM)]
ONE_HOT = [launch(kernel, MS) for kernel in (ADD, SCATTER_GATHER, MUL, SUM)]
ONE_HOTS = works(("", "scatter", 116, 4 * GIB), ("", "mul", 178, 8 * GIB))
NO_CHAINS = [(TANH, 100_000)], [(ADD, 3_000)] * 3, [(LAYER_NORM, 100_000)]
DETERMINISTIC = {"deterministic_algorithms": True}
FILLED = {**DETERMINISTIC, "fills_uninitialized_memory": True}


def python_numbers(called: str) -> dict[str, Any]:
    return {
        "lines": [line(MS // 2, called=called, line=20), line(MS, called="ids.to", line=31, waits=1, waiting_ns=MS)]
    }


IN_FP32 = [within("forward/model/head", launch(SGEMM, MS, 5), wait)]
BURSTS = waits_in_bursts(20 * MS, *IN_FP32)
MOVE, BESIDE = line(2 * MS, called="images.to"), line(MS, called="draw", line=31)
MOVED = equal_steps(python(3 * MS), copy(MS // 2), LONG, wait)
RECURRENT = ("elemWiseRNNcell", "RNN_blockPersist_fp_GRU", "LSTM_elementWise_fp")
SMALL_BESIDE_RECURRENT = equal_steps(
    within("forward", *[launch(NVJET, 3_000), launch(RECURRENT[0], 3_000)] * 80),
    within("backward", *[launch(NVJET, 50_000), launch(ADD, 100_000)] * 10),
    wait,
)
EMPTIED = {"lines": [line(MS // 2, called="torch.cuda.empty_cache"), BESIDE]}

Case = tuple[str, Program, dict[str, Any]]

NEARLY: list[Case] = [
    # The line calls a trainer, the GPU hides it.
    ("python", equal_steps(python(4 * MS), within("backward", launch(NVJET, 100_000, 20), wait)), TRAINER),
    ("python", equal_steps(within("forward", launch(NVJET, 300_000, 20)), python(4 * MS), wait), BATCH),
    # The line calls a function that trains.
    ("python", LATE, {"lines": [*BATCH["lines"], line(MS, "backward", "learn", is_caller=True)]}),
    ("python", made_in_python(), python_numbers("make_batch")),
    # Three parts of a batch that come from the host.
    ("waits", equal_steps(*[copy(50_000), wait, python(80_000)] * 3, FORWARD), {"lines": [MOVED_PARTS]}),
    # Two lines wait, and without both of them the GPU takes as long.
    ("waits", *waits_together(python_ns=10_000)),
    # What an optimizer's own step waits for it needs.
    ("waits", SCALED, {"lines": [replace(SCALER, inside="adam._get_value")]}),
    # Nothing comes after the copy, and the program waits for it itself.
    # Nobody sums in another order; the line moves a batch, too.
    ("gather", sums_rows(), {"conditions": DETERMINISTIC}),
    ("made-on-cpu", pageable_copy(100), {**EYE, "lines": [replace(IN_MODEL_FILE, waits=0)]}),
    ("pageable-copy", pageable_copy(0), IMAGES | {"lines": [line(MS // 2, called="images.to")]}),
    ("loader", *loads(20_000)),
    # Workers make no batch sooner for it; those that are in time are late for another reason.
    ("tf32", *BURSTS),
    ("loader", *waits_in_bursts(MS, FORWARD, workers=1)),
    # Starting workers is a small part of the wait: something else is late.
    ("loader", *restarts(BURST_NS // 3)),
    ("loader", *restarts(BURST_NS // 3, stay=True)),
    # Each takes as long for its batches as four steps.
    ("loader", *with_workers(0, 64, 20 * MS, launch(NVJET, 5 * MS), wait)),
    ("activation", blocks("act", *[(ADD, 100_000)] * 6, (SIGMOID, 100_000)), {}),
    ("padding", *padded(950)),
    ("padding", *padded(950, 760)),
    ("unread-gradients", *frozen(0, 0)),
    ("scan", scanned(20_000), {}),
    # Few slices; and fills of what computes in full right after.
    ("slices", sliced(6), {}),
    ("slices", sliced(40, are_copied=False), {}),
    # A gate's two gradients are those of two tensors; one of few numbers is no activation of all.
    ("activation", sigmoids(MUL, MUL, SIGMOID), {}),
    # A gate of a norm's numbers sums them up; few kernels may be part of the norm.
    ("activation", activates(*MISH, SUM), {}),
    ("activation", activates(*MISH[1:]), {}),
    ("activation", sigmoids(MUL, MUL, SIGMOID, ADD, gate=3_000), {}),
    # Which pass is before which optimizer's step is not known.
    ("unread-gradients", *of_two_models(is_detached=True, steps=3)),
    # Whoever gathers by an index sums up its gradients, deterministic or not.
    ("deterministic", sums_rows(), {"conditions": {"deterministic_algorithms": False}}),
    ("deterministic", sums_rows(NVJET), {"conditions": DETERMINISTIC}),
    # All Python of a library's model lies behind the line that calls it.
    ("python", IN_MODEL, {"lines": [line(4 * MS, "forward", "model"), line(MS, "backward", "loss.backward", line=31)]}),
    # The GPU is busy, and the values are small.
    ("waits", *statistics(30, 31, large=False)),
    # What waits in backward is no line of the user's own, whatever calls it.
    ("waits", equal_steps(within("forward", *WAITS)), {"lines": [replace(MEAN, called="self.manual_backward")]}),
    # Torch's own loss needs few passes, and another loss has no classes.
    ("cross-entropy", *loss_by_hand(SOFTMAX, ADD, SUM)),
    ("cross-entropy", *loss_by_hand(ADD, MUL, SUM, ADD, MUL, SUM)),
    # Each call has work enough for the GPU, or needs the one before it.
    ("loop", *separate_calls(100_000)),
    ("loop", *turns_apart(0)),
    ("loop", *takes_views(20, joins=3)),
    ("loop", loads_in_turns(11), {}),
    ("loop", *separate_calls(4_000, is_independent=False)),
    # Each turn asks the model what the next one computes with, as a rollout does; also one without code of one's own.
    ("loop", *looped_outside("self.model")),
    ("loop", *looped_outside("self.model", is_librarys=True)),
    ("loop", rolled_out_unseen("inference"), {}),
    # What is outside of the phases in the line that calls the model goes with all of its launches.
    ("python", equal_steps(python(MS), within("forward", python(4 * MS), launch(NVJET, MS)), wait), CALLS_MODEL),
    ("repeated-call", *calls_trunk_again(1)),
    ("dense-gradients", *table(600)),
    ("dense-gradients", *table(10, is_unread=True)),
    ("padding", padded(0)[0], works(padding={"positions": 0, "in_longest": 0, "used": 0})),
    # The CPUs have no room for more workers.
    ("loader", *with_workers(3 * MS, 4, 20 * MS)),
    ("loader", *with_workers(3 * MS, 8, 40 * MS)),
    # No line takes much of a batch.
    ("loader", *slow_dataset(3 * MS, 4 * MS)),
    # They keep up: another loader is waited for.
    ("loader", *with_workers(3 * MS, 64, 4 * MS, batch_ns=4 * MS)),
    ("optimizer", optimizer_loop(), {"conditions": {"optimizers": [{**ADAMW, "name": "Muon"}]}}),
    # It has about as many operations as parameters, or nobody counted those, or it mostly multiplies matrices.
    ("optimizer", *written_optimizer(200)),
    ("optimizer", *written_optimizer(0)),
    ("optimizer", *written_optimizer(40, launch(NVJET, 4_000, 150))),
    # Two groups at most have the same options, or there are few, or some made no step; or somebody else wrote it.
    ("optimizer", optimizer_calls(160, 160), with_groups(160, 80)),
    ("optimizer", optimizer_calls(6, 6), with_groups(6, 1, 6)),
    ("optimizer", optimizer_calls(160, 160), with_groups(400, 2)),
    ("optimizer", optimizer_calls(160, 160, launch(NCCL, 2_000)), with_groups(160, 1)),
    ("optimizer", optimizer_calls(160, 160), with_groups(160, 1, name="Muon")),
    # Each call has as many parameters as a launch takes.
    ("optimizer", optimizer_calls(160, 160), with_groups(160, 1, 160 * 120)),
    # One call for many parameters launches fewer kernels for its counters, and groups by layer are fewer.
    ("optimizer", optimizer_calls(400, 140), with_groups(0, 0, 0)),
    ("optimizer", optimizer_calls(60, 60), with_groups(0, 0, 0)),
    # What torch writes out computes in fp32 inside, and so do recurrent layers on purpose; these are small, or in bf16.
    ("autocast", *autocasts((TF32, 100_000), (SOFTMAX, 50_000), (TF32, 100_000), product=NVJET)),
    ("autocast", *autocasts((TF32, 100_000), (LSTM_CELL, 50_000), product=NVJET)),
    ("autocast", *autocasts((FLASH, 100_000), product=BF16_BY_ANOTHER_NAME)),
    ("autocast", *autocasts((NVJET, 100_000), (TF32, 10_000), product=NVJET)),
    ("tf32", products(NVJET), {}),
    ("float64", products(SGEMM), {}),
    # Not every sort is a permutation's.
    ("sort", blocks("choice", *[(RADIX_SORT, 200_000)] * 4), {}),
    # TF32 is the change that keeps more of the numbers; these are outside of autocast on purpose.
    ("autocast", products(SGEMM), {}),
    ("autocast", products(TF32), {"conditions": {"autocast_dtypes": ["bfloat16"]}}),
    ("sizes", products(ALIGNED), {}),
    # Without tensor cores every size is aligned to one number.
    ("sizes", products(SIMT), {}),
    ("attention", blocks("attn", (NVJET, 100_000), (FLASH, 100_000)), {}),
    ("attention", blocks("gate", (NVJET, 100_000), (SOFTMAX, 100_000)), {}),
    # Some calls are given a mask that hides more.
    ("attention", blocks("attn", (FLASH, 500_000)), masks(causal=3)),
    # Python before all of it is no plan, and a short pause may be the machine's.
    ("attention-plans", planned_attention(6 * MS, 9_000, 9_000), {}),
    ("attention-plans", planned_attention(40 * MS, 40 * MS, 40 * MS), {}),
    (
        "attention-plans",
        equal_steps(within("forward", launch(FLASH, 9_000, 9), python(40 * MS), launch(FLASH, 9_000))),
        {},
    ),
    ("convolution-search", searched_convolution(), {"conditions": {"cudnn_benchmark": False}}),
    # The waits are the program's own.
    ("convolution-search", searched_convolution(ADD), {"conditions": {"cudnn_benchmark": True}}),
    ("ignored-positions", *scored(90)),
    ("ignored-positions", *scored(0, 0)),
    # Gathering and scattering take as long in compiled code.
    ("compile", small_kernels(SCATTER), {}),
    ("anomaly", backward_that_waits(), {"conditions": {"anomaly_detection": False}}),
    # No line is known that could wait less, or it is not known whose the wait is.
    ("launches", passes_of(3_000, waits=True), {}),
    ("launches", passes_of(3_000, waits=True), {"lines": [READS[0], replace(READS[1], called="super().compute_loss")]}),
    # A graph holds no step whose kernels change.
    ("launches", short_passes(160, 162, 160), {}),
    # Nor does it hold cuDNN's recurrent layers.
    *(("launches", passes_of(3_000, name), {}) for name in RECURRENT),
    # Steps that all differ hide what a change saves.
    ("zero-grad", *zeroed([0.6, 0.8, 1.0, 1.2, 1.4] * 2)),
    # No sums go with these fills, or they are few.
    ("zero-grad", zeroed_gradients(6, "gelu_kernel"), {}),
    ("zero-grad", zeroed_gradients(3), {}),
    ("deterministic", with_fills(100), {"conditions": {**DETERMINISTIC, "fills_uninitialized_memory": False}}),
    (
        "deterministic",
        with_fills(100),
        {"conditions": {"deterministic_algorithms": False, "fills_uninitialized_memory": True}},
    ),
    ("deterministic", with_fills(4), {"conditions": DETERMINISTIC}),
    ("garbage", *collects(1, STEPS)),
    ("garbage", *collects(STEPS, 1)),
    ("recompile", *compiles(is_again=False)),
    # Nothing of it runs as it was written, or that is for another reason.
    ("recompile", *gives_up(TRITON)),
    ("recompile", *gives_up(ADD, "a call that Dynamo cannot trace")),
    ("python", *compiles(is_again=False)),
    # Most of what compiling saves is in the layers, or in one chain.
    ("chain", gated(40), {}),
    ("compile", gated(2), {}),
    ("launch-blocking", blocking_launches(blocks=True), {"conditions": {"launch_blocking": False}}),
    ("launch-blocking", blocking_launches(blocks=False), {"conditions": {"launch_blocking": True}}),
    # The GPU is busy, memory is full, or three passes are no power of two.
    ("batch", small_passes(1, 20_000), with_memory(10 * GIB)),
    ("batch", small_passes(1, 3_000), with_memory(60 * GIB)),
    ("batch", small_passes(3, 3_000), with_memory(10 * GIB)),
    ("recompute", checkpointed("h.0", "h.1"), with_memory(120 * GIB)),
    ("saved-on-cpu", *saved_on_cpu(120 * GIB)),
    ("waits", *saved_on_cpu(120 * GIB)),
    ("growth", *grows(2**18)),
    # Both calls are read, or it is unknown which of two that differ is not.
    ("unread-graph", passes(4, 4, read=2), {}),
    ("unread-graph", passes(4, 8), {}),
    # A norm's copies are torch's own, a copy elsewhere is no convolution's, and these convolutions want no other order.
    # Norms that know one order alone stand between the convolutions.
    ("channels-last", convolutions(CONVERT, ADD), NORMS_OF_IMAGES),
    # Norms that have enough to do, or of signals, which have no such order, or that have it already.
    ("channels-last", norms_by_channel(120_000), OF_IMAGES),
    ("channels-last", norms_by_channel(440_000), OF_SIGNALS),
    ("channels-last", norms_by_channel(440_000, "_channels_last"), OF_IMAGES),
    ("channels-last", undone_layouts("/h.*.conv"), {}),
    ("channels-last", undone_layouts("/h.*.attn"), {}),
    ("channels-last", undone_layouts("", "implicit_convolve_sgemm"), {}),
    ("no-sync", two_passes(0, 1), {}),
    ("no-sync", two_passes(0, 2), {}),
    *((code, blocks("act", *kernels), {}) for code in (*CHAINS, "chain") for kernels in NO_CHAINS),
    # cuDNN's recurrent layers are one operation already.
    ("loop", blocks("act", *[("elemWiseRNNcell", 3_000)] * 12), {}),
    # Few time steps, more between them than cells, a value that is read, and a module that is called as often.
    ("loop", loop_of_cells(12), {}),
    ("loop", loop_of_cells(70, within("forward/model/attn", launch(NVJET, 9_000, 4))), {}),
    ("loop", loop_of_cells(70, wait), {}),
    ("loop", loop_of_cells(70, cell=SOFTMAX), {}),
    # Another network, many layers of their own weights, and other shapes each time.
    ("loop", written_cells(*WRITTEN_CELLS["none"]), {}),
    ("loop", written_cells(*WRITTEN_CELLS["RNN"], modules=70), {}),
    ("loop", written_cells(*WRITTEN_CELLS["RNN"], shapes=35), {}),
    # A loop has at least twelve kernels, and a norm both sums and takes a root.
    ("loop", blocks("act", *[(ADD, 3_000)] * 11), {}),
    # What is written one by one, and repeats nothing, is no loop.
    ("loop", blocks("act", *[(f"{ADD}_{kind}", 3_000) for kind in "abcdefgabijgba"]), {}),
    ("norm", blocks("act", (SUM, 100_000), *[(ADD, 100_000)] * 3), {}),
    # What is scattered and summed up by nothing is no loss.
    ("cross-entropy", equal_steps(FORWARD, *ONE_HOT[:3], launch(ADD, MS), wait), ONE_HOTS),
    ("norm", blocks("act", *[(ADD, 100_000)] * 3, (SQRT, 100_000)), {}),
    ("chain", SMALL_CHAIN, {"lines": [line(MS, "forward", "trainer.fit"), line(MS, "backward", "trainer.fit")]}),
]


@pytest.mark.parametrize(("code", "program", "given"), NEARLY)
def test_what_nearly_has_a_cause_does_not_have_it(
    tmp_path: Path, code: str, program: Program, given: dict[str, Any]
) -> None:
    assert code not in by_code(program.write(tmp_path, **given))


WORKERS = {"16 CPUs": (16, 20), "8 CPUs": (8, 20), "4 CPUs, and half of one busy": (4, 10)}
PADDED = {
    "as fast as their neighbour, at 500 TFLOP/s": (ALIGNED, 1_000),
    "at 0.8 of the H200's 4.8 TB/s": (ALIGNED, 4 * 10**9),
    "at 0.6 of the peak, for no neighbour shows a rate": (MISALIGNED, 1_000),
    "beside FLOPs that are not all products'": (FLASH, 1_000),
}

NAMED: dict[str, Case] = {
    "a line of the model's own code": (
        "python",
        IN_MODEL,
        {"lines": [line(4 * MS, "forward", "draw", function="call")]},
    ),
    "a line outside of the phases": ("python", LATE, {"lines": [*BATCH["lines"], line(MS // 100, line=31)]}),
    "a line that is quick in one of three steps": (
        "python",
        Program([python(6 * MS), FORWARD], [python(MS), FORWARD], [python(6 * MS), FORWARD]),
        {"lines": [line(6 * MS)]},
    ),
    "a line that the GPU's work mostly hides": ("python", MOSTLY_HIDDEN, {"lines": [line(6 * MS)]}),
    "rows of a memory on the CPU that a line moves": (
        "python",
        MADE_ON_CPU,
        {"lines": [line(4 * MS, called="memory[rows].to", waits=1.0)]},
    ),
    "a tensor made on the CPU": ("made-on-cpu", MADE_ON_CPU, {"lines": [line(4 * MS, called="torch.randn")]}),
    "a tensor of Python's numbers, whose move waits": ("python", made_in_python(), python_numbers("torch.tensor")),
    "the same after no work": ("python", made_in_python(work_before=False), python_numbers("torch.tensor")),
    "a copy from pageable memory": ("pageable-copy", pageable_copy(100), IMAGES),
    "a copy of what the host converts": (
        "pageable-copy",
        pageable_copy(100),
        IMAGES | {"lines": [replace(line(MS // 2, called="images.float"), waits=1.0, waits_in="….to")]},
    ),
    "a copy of what the line before converts": (
        "pageable-copy",
        equal_steps(python(MS), FORWARD, copy(MS // 2), wait),
        IMAGES | {"lines": [line(MS // 2, called="images.to", waits=1.0), line(MS, called="images.float", line=29)]},
    ),
    "a copy of what torch makes on the CPU in that line": ("made-on-cpu", pageable_copy(100), EYE),
    # What moving a worker's batch takes is its unpinned memory's; without workers, or pinned, it is Python's.
    "a line that moves a worker's batch, and one beside it": ("python", MOVED, {**IMAGES, "lines": [MOVE, BESIDE]}),
    "a line that moves the program's own batch": ("python", MOVED, {"lines": [MOVE]}),
    "a line that moves a worker's pinned batch": ("python", PACKED, {**IMAGES, "lines": [MOVE]}),
    "a loader without workers": ("loader", *loads(5 * MS)),
    # The GPU takes 5 ms for a step: 4 workers just keep up, in bursts 8 do, however much of the wait it hides.
    "a worker and 6 ms of waiting": (
        "loader",
        *with_workers(6 * MS, 64, 6 * MS, MEANWHILE, workers=1, batch_ns=6 * MS),
    ),
    "a worker and 17 ms of waiting": ("loader", *with_workers(17 * MS, 64, 20 * MS, MEANWHILE, workers=1)),
    **{
        f"four workers, {said}": ("loader", *with_workers(3 * MS, cpus, cpu_ms * MS))
        for said, (cpus, cpu_ms) in WORKERS.items()
    },
    # Four workers that take 20 ms for a batch are too slow for 5 ms; those that take 4 ms are late for another reason.
    "workers that are waited for in bursts": ("loader", *BURSTS),
    "workers that one recorded step waits for": ("loader", *waits_in_bursts(20 * MS, *IN_FP32, is_recorded=True)),
    "workers that every other step waits for": ("loader", *waits_in_bursts(20 * MS, *IN_FP32, every=2)),
    "workers that are started anew": ("loader", *restarts(BURST_NS)),
    "workers that stay, and make nothing ahead of an epoch": ("loader", *restarts(BURST_NS, stay=True)),
    "workers that a full queue hides": ("loader", *with_workers(0, 64, 20 * MS, launch(NVJET, 2 * MS), wait)),
    "a line of the dataset, and no CPUs for more workers": ("loader", *slow_dataset(3 * MS, 15 * MS)),
    "the same, and most of the step is the wait": ("loader", *slow_dataset(55 * MS, 190 * MS, batch_ns=220 * MS)),
    "the same, which a full queue hides": ("loader", *slow_dataset(0, 15 * MS, launch(NVJET, 2 * MS), wait)),
    "samples that are padded": ("padding", *padded(250)),
    "samples that are padded, and given to a reference": (
        "padding",
        *padded(250, phases=("inference", "forward", "backward")),
    ),
    "samples of unlike lengths": ("padding", *padded(1_000, 600)),
    "a loss in several modules": ("cross-entropy", *loss_by_hand(SOFTMAX, ADD, SUM, MUL, ADD, SUM)),
    "a loop with copies in it": ("loop", equal_steps(within("forward/model/act", *[*SUMS, move] * 20), wait), {}),
    "samples that torch puts together": ("loader", *stacks_samples("collate.default_collate")),
    "values that two lines compute and read": ("waits", *statistics(30, 31)),
    "waits that cost only together": ("waits", *waits_together(python_ns=MS)),
    "rows that are found": (
        "waits",
        equal_steps(within("forward", *WAITS)),
        {"lines": [replace(MEAN, called="mask.nonzero")]},
    ),
    "rows of an index that are added in order": ("gather", sums_rows(), works(("", "index", 70, MIB))),
    "rows of a few indices": (
        "gather",
        sums_rows(model="model/table"),
        works(("table", "index", 70, 48_000_000)) | {"gpu": "NVIDIA H200"},
    ),
    "rows of a mask that are added in order": (
        "gather",
        sums_rows(),
        {**works(("", "index", 30, MIB)), "lines": [replace(IN_MODEL_FILE, called=None)]},
    ),
    "gradients that are summed up in order": ("deterministic", sums_rows(), {"conditions": DETERMINISTIC}),
    "a GradScaler that bf16 does not need": ("waits", SCALED, {"lines": [SCALER], "conditions": IN_BF16}),
    "a GradScaler before an optimizer that is not fused": ("waits", SCALED, {"lines": [SCALER]}),
    "a wait in a library's code": (
        "waits",
        equal_steps(within("forward", *WAITS)),
        {"lines": [replace(MEAN, called="model", inside="clip.look")]},
    ),
    "a module that is called for each sample": ("loop", *separate_calls(4_000)),
    "a module that is called twice on one input": ("repeated-call", *calls_trunk_again(2)),
    "a loop around a module": ("loop", *mixture(3, 1)),
    "a loop in a module's own code": ("loop", *turns_apart(32)),
    "modules of a list": ("loop", *calls_experts("experts.*")),
    "a loop with a copy from the host in each turn": ("loop", loads_in_turns(16), {}),
    "vectors of a tensor": ("loop", *takes_views(400)),
    "a loop around a module that has most of its kernels": ("loop", *mixture(1, 3)),
    "a block whose backward pass nobody needs": ("unread-gradients", *frozen(1, 1)),
    "cumulative sums over an outer axis": ("scan", scanned(3 * MS), works(("router", "cumsum", 65, MIB))),
    "figures for a log in a library's function": (
        "waits",
        ONE_BY_ONE,
        {"lines": [replace(NORMS, called="log_norms", inside="grads.grad_norm")]},
    ),
    "slices of one tensor": ("slices", sliced(40), {}),
    "an activation beside torch's own norm": ("activation", activates(*MISH, backward=[MUL, MUL, TANH, ADD, ADD]), {}),
    "a product with its sigmoid": ("activation", sigmoids(MUL, MUL, SIGMOID, ADD), {}),
    "a discriminator's gradients before the generator's step": ("unread-gradients", *of_two_models(is_detached=True)),
    "blocks and what comes into the head": ("unread-gradients", *frozen(2, 2, 1)),
    "blocks whose own gradients nobody reads": ("unread-gradients", *frozen(0, 2)),
    "a table's gradient of zeros": ("dense-gradients", *table(100)),
    "products beside bursts that no worker is slow for": ("tf32", *waits_in_bursts(4 * MS, *IN_FP32)),
    "waits for which the GPU runs out of work": ("waits", equal_steps(within("forward", *WAITS)), {"lines": [MEAN]}),
    "tables that are moved to the GPU again and again": (
        "waits",
        equal_steps(*[copy(50_000), wait, python(80_000)] * 40, FORWARD),
        {"lines": [replace(MOVED_PARTS, waits=40.0)]},
    ),
    "a loss with a one-hot matrix": ("cross-entropy", equal_steps(FORWARD, *ONE_HOT, wait), ONE_HOTS),
    "a check of every module": (
        "waits",
        equal_steps(within("forward", *[item for _ in range(10) for item in (python(100_000), *WAITS)])),
        {"lines": [line(MS, "forward", "….all", waits=10, waiting_ns=MS // 4)]},
    ),
    "a loop that reads its numbers one by one": ("waits", ONE_BY_ONE, {"lines": [NORMS]}),
    # As averages that are kept there: what is computed with them on the host goes with the copies.
    "a loop that moves tensors to the host": ("waits", AVERAGED, AVERAGES),
    "a tensor that is moved to the host": (
        "waits",
        equal_steps(within("forward", launch(NVJET, 100_000, 20)), copy(20_000, 2), python(MS)),
        {"lines": [LOGITS]},
    ),
    "a loss of each class": ("waits", equal_steps(FORWARD, CLASSES, OF_CLASSES, wait), {"lines": [CHECKED]}),
    "numbers that are read far apart": ("waits", FAR_APART, {"lines": [NORMS]}),
    # Without the wait Python would pack while the GPU computes: either change saves as much.
    "Python for which a wait is long": ("python", PACKED, {"lines": [PACK, ITEM]}),
    "the same after the model": ("python", PACKED, {"lines": [PACK, ITEM, line(MS, "forward", "model", line=7)]}),
    "the same with a copy": ("python", COPIED, {"lines": [PACK, ITEM]}),
    "the same with what it has copied from the GPU": ("python", FETCHED, {"lines": [PACK, FETCH]}),
    # The copy comes first; without the last wait of the step, Python makes the next batch while the GPU computes.
    "the same, and no line is late": ("waits", COPIED, {"lines": [ITEM]}),
    "an optimizer in a loop": ("optimizer", optimizer_loop(), {"conditions": {"optimizers": [ADAMW]}}),
    "an optimizer that somebody wrote": ("optimizer", *written_optimizer(40)),
    "the same, which clips gradients in it": (
        "optimizer",
        *written_optimizer(40, *[launch(f"multi_tensor_apply_kernel<{ADD}>", 2_000)] * 40),
    ),
    "a group for each parameter": ("optimizer", optimizer_calls(160, 160), with_groups(160, 2)),
    "the same, and nobody counted the groups": ("optimizer", optimizer_calls(160, 160), with_groups(0, 0, 0)),
    "products in fp32": ("tf32", products(SGEMM), {}),
    "a permutation": ("sort", blocks("choice", *[(RADIX_SORT, 200_000)] * 4, (EQUAL_KEYS, 60_000)), {}),
    "sines in fp64": ("float64", blocks("encoding", *[(SINE_IN_FP64, 300_000)] * 3), {}),
    # It comes after the other Tries, whatever it saves.
    "products in TF32": ("autocast", equal_steps(python(2 * MS), IN_TF32, wait), {"lines": [PACK]}),
    "attention that is left out of autocast": ("autocast", *autocasts((EFFICIENT_IN_FP32, 400_000))),
    "products that are left out of autocast": ("autocast", *autocasts((FLASH, 50_000))),
    "products of odd sizes": ("sizes", products(MISALIGNED), {}),
    **{f"padded products {said}": ("sizes", *counted_products(*how)) for said, how in PADDED.items()},
    "attention that is written out": ("attention", blocks("attn", *WRITTEN_OUT), {}),
    "the same with sums and copies around it": ("attention", attends(projects=False), {}),
    "the same in a module that projects": ("attention", attends(projects=True), {}),
    "attention with a causal mask": ("attention", blocks("attn", (FLASH, 500_000)), masks(causal=4)),
    "attention with a mask that hides nothing": ("attention", blocks("attn", (FLASH, 500_000)), masks(empty=4)),
    "two long steps of ten hide no cause": ("zero-grad", *zeroed([1.0] * 8 + [1.6, 3.0])),
    **{
        f"a chain in a module: {kind}": (kind.split()[-1], blocks("act", *kernels), {})
        for kind, kernels in CHAINS.items()
    },
    # A generator stands at the line of the function that sums it up; the pause is the smaller part of both.
    "a loop in a generator": (
        "loop",
        equal_steps(within("forward", python(MS), launch(NVJET, 100_000), *[python(30_000), launch(ADD, 3_000)] * 60)),
        {"lines": [line(MS, "forward", "sum"), line(3 * MS // 2, "forward", "x.pow", function="main.<genexpr>")]},
    ),
    "a loop whose turns call a function": ("loop", *looped_outside()),
    "a loop of which no line was seen": ("loop", rolled_out_unseen("forward"), {}),
    "a loop that computes itself, and asks the model, too": ("loop", *looped_outside("self.model", computes=True)),
    "a loop of cells": ("loop", loop_of_cells(70), {}),
    **{
        f"a loop that is written as an {kind}": ("loop", written_cells(*kernels), {})
        for kind, kernels in WRITTEN_CELLS.items()
        if kind != "none"
    },
    "a chain outside of modules": ("chain", SMALL_CHAIN, {"lines": [line(MS, "forward", "x.add")]}),
    "the same, beside a line that waits": (
        "chain",
        SMALL_CHAIN,
        {"lines": [line(MS, "forward", "x.to", waiting_ns=MS), line(MS, "forward", "x.add", line=31)]},
    ),
    "conversions, zeroed gradients and allocations": ("channels-last", convolutions(CONVERT, ZERO, allocate(MS)), {}),
    "norms that read one channel at a time": ("channels-last", norms_by_channel(440_000), OF_IMAGES),
    "copies that undo the order of images": ("channels-last", undone_layouts(""), {}),
    "a pass that nobody reads": ("unread-graph", passes(4, 4), {}),
    "two passes that nobody reads": ("unread-graph", passes(4, 4, 4), {}),
    "a cache that a line empties": ("allocations", equal_steps(allocate(MS), FORWARD), EMPTIED),
    "attention that cuDNN plans": ("attention-plans", planned_attention(40 * MS, 9_000, 9_000), {}),
    "a search for convolutions": (
        "convolution-search",
        searched_convolution(),
        {"conditions": {"cudnn_benchmark": True}},
    ),
    "positions that the loss ignores": ("ignored-positions", *scored(20)),
    "memory that is filled": ("deterministic", with_fills(100), {"conditions": DETERMINISTIC}),
    "memory that is asked to be filled": ("deterministic", with_fills(100), {"conditions": FILLED}),
    "gradients that are filled one by one": ("zero-grad", zeroed_gradients(6), {}),
    "launches": ("launches", passes_of(3_000), {}),
    "launches and waits of lines": ("launches", passes_of(3_000, waits=True), {"lines": READS}),
    "launches of equal steps": ("launches", short_passes(160, 160, 160), {}),
    "small kernels": ("compile", passes_of(40_000), {}),
    "small kernels in a layer": ("compile", small_kernels(ADD), {}),
    "a chain that is much of what compiling saves": ("chain", gated(10), {}),
    "a chain that is nearly all that compiling saves": ("chain", gated(2), {}),
    # Graphs hold no recurrent layers; what stands beside them is fused.
    "small kernels beside late recurrent layers": ("compile", SMALL_BESIDE_RECURRENT, {}),
    # Compiling leaves the loss outside of the model as it is.
    "small kernels beside a loss": ("compile", SMALL_BESIDE_LOSS, {}),
    "anomaly detection": ("anomaly", backward_that_waits(), {"conditions": {"anomaly_detection": True}}),
    "garbage in every step": ("garbage", *collects(STEPS, STEPS)),
    "garbage in most steps": ("garbage", *collects(STEPS - 1, STEPS)),
    "a step that compiles every time": ("recompile", *compiles(is_again=True)),
    "a function that is compiled no more": ("recompile", *gives_up(ADD)),
    "launches that block": (
        "launch-blocking",
        blocking_launches(blocks=True),
        {"conditions": {"launch_blocking": True}},
    ),
    "a small batch": ("batch", SMALL_BATCH, with_memory(10 * GIB)),
    # It saves more than the Python before it, which costs no training.
    "a small batch beside Python": (
        "batch",
        equal_steps(python(MS // 2), within("forward", launch(RECURRENT[0], 3_000, 200)), wait),
        {**with_memory(10 * GIB), "lines": [line(MS // 2, called="draw")]},
    ),
    "small passes of one step": ("batch", small_passes(4, 3_000), with_memory(10 * GIB)),
    "saved on the CPU beside free memory": ("saved-on-cpu", *saved_on_cpu(30 * GIB)),
    "checkpoints beside free memory": ("recompute", checkpointed("h.0", "h.1"), with_memory(30 * GIB)),
    "checkpoints of two towers": (
        "recompute",
        checkpointed("image.h.0", "image.h.1", "text.h.0", "text.h.1"),
        with_memory(30 * GIB),
    ),
    "memory that grows": ("growth", *grows(100 * 2**20)),
    "gradients that are summed after each pass": ("no-sync", two_passes(2, 1), {}),
}
"""What the run has → the cause that it has, and the run."""

WITHOUT: dict[str, tuple[float, float | None]] = {
    "a line outside of the phases": (LATE.lengths[0] - 4 * MS, 0.1),
    "a line that the GPU's work mostly hides": (5 * MS, 0.01),
    "a tensor made on the CPU": (MADE_ON_CPU.lengths[0] - 6 * MS - 8_000, None),
    "a tensor of Python's numbers, whose move waits": (20 * 201_000, 0.02),
    "the same after no work": (20 * 201_000, 0.02),
    "a loader without workers": (loads(5 * MS)[0].lengths[0] - 5 * MS + 250_000, None),
    "workers that are waited for in bursts": (BURSTS[0].lengths[1] + 200_000, 0.01),
    "workers that one recorded step waits for": (BURSTS[0].lengths[1] + 200_000, 0.01),
    # An epoch's first batch is waited for with workers that stay, too.
    "workers that a full queue hides": (2 * MS + 14_000, 0.02),
    "samples that are padded": (5 * MS + 31_000, 0.02),
    "samples that are padded, and given to a reference": (7 * MS + 39_000, 0.02),
    "rows of a memory on the CPU that a line moves": (2 * MS + 37_000, 0.02),
    # 48 MB at 4.8 TB/s take 10 µs, of which adding rows takes 6 times as much.
    "rows of a few indices": (MS + 60_000, 0.02),
    "workers that are started anew": (restarts(BURST_NS)[0].lengths[1] + MS // 10, 0.02),
    "workers that stay, and make nothing ahead of an epoch": (restarts(BURST_NS)[0].lengths[1], 0.02),
    "products beside bursts that no worker is slow for": (5 * MS / 7.4 + BURST_NS // 10, None),
    "a loop that reads its numbers one by one": (equal_steps(FORWARD, wait).lengths[0] + 100_000, 0.1),
    "a loop that moves tensors to the host": (equal_steps(FORWARD).lengths[0] + 0.05 * 40 * 50_000, 0.1),
    "waits that cost only together": (20 * 101_000, 0.01),
    # The kernels of all turns are one of each kind; the GPU does not wait between them.
    "a loop around a module": (MS + 4 * 28_000, 0.02),
    # Of 32 turns a kernel each: 4 µs, and 0.4 of what the others take beyond a kernel's start.
    "a loop in a module's own code": (MS + 8 * (4_000 + 0.4 * 31 * 1_500), 0.05),
    "vectors of a tensor": (MS + 20_000, 0.05),
    "modules of a list": (MS + 6 * (4_000 + 0.4 * 31 * 1_500), 0.05),
    "a loop whose turns call a function": (10 * 101_000 + 20_000, 0.02),
    # Neither is waited for: only the GPU's 100 kernels are left.
    "the same with what it has copied from the GPU": (100 * 101_000, 0.02),
    "the same, and no line is late": (COPIED.lengths[0] - 2 * MS, 0.01),
    "a group for each parameter": (MS + 10 * 4_000, 0.1),
    "the same, and nobody counted the groups": (MS + 10 * 4_000, 0.1),
    "products in fp32": (4 * MS / 7.4, None),
    "padded products as fast as their neighbour, at 500 TFLOP/s": (2 * MS + 800_000, 0.02),
    "padded products at 0.8 of the H200's 4.8 TB/s": (2 * MS + 1_042_000, 0.02),
    "padded products at 0.6 of the peak, for no neighbour shows a rate": (1.45 * MS + 674_000, 0.02),
    "padded products beside FLOPs that are not all products'": (2 * MS + 674_000, 0.02),
    # Between the products of scores and of values nothing is left; fused attention takes 0.9 of these products.
    "the same with sums and copies around it": (
        attends(projects=False).lengths[0] - 4 * (6 * 101_000 + 4 * 51_000 + 0.1 * 6 * 100_000),
        0.01,
    ),
    # Of what lies around them 0.55 are left.
    "the same in a module that projects": (
        attends(projects=True).lengths[0] - 4 * (6 * 101_000 + 0.45 * 4 * 50_000 + 0.1 * 6 * 100_000),
        0.01,
    ),
    # It reads and writes 16-bit numbers, once.
    "a chain in a module: activation": (4 * (201_000 + 70_000), 0.02),
    "a chain that is much of what compiling saves": (gated(10).lengths[0] - 8 * 101_000 + 120_000, 0.02),
    "copies that undo the order of images": (4 * (MS + 1_000) + 13_000, 0.02),
    # In forward half of the products are large ones, in backward three of four; the others' layers run side by side.
    # The kernels of a cell's two passes, but for the sums, begin 1 µs after one another.
    "a loop of cells": (MS + 140 * 1_000 * (18 * (0.25 + 0.375) + 36 * (0.375 + 0.1875) + 2 * 3 + 8 + 2), 0.03),
    "a module that is called twice on one input": (10 * (MS + 1_000), 0.02),
    "a pass that nobody reads": (6 * (MS + 1_000), 0.02),
    "two passes that nobody reads": (6 * (MS + 1_000), 0.02),
    "memory that is filled": (with_fills(100).lengths[0] - 100 * 5_000, None),
    "memory that is asked to be filled": (with_fills(100).lengths[0] - 100 * 5_000, None),
    "gradients that are filled one by one": (zeroed_gradients(6).lengths[0] - 6 * 400_000, 0.05),
    "small kernels": (160 * 40_000 * 1.65, 0.05),
    "small kernels beside a loss": (SMALL_BESIDE_LOSS.lengths[0] - 0.42 * 10 * 40_000, 0.02),
    "garbage in every step": (20 * 51_000 + 20_000, 0.05),
    "garbage in most steps": (20 * 51_000 + 20_000, 0.05),
    "a step that compiles every time": (20 * 51_000 + 20_000, 0.05),
    "launches that block": (200 * 11_000 + 20_000, 0.15),
    "a small batch": (SMALL_BATCH.lengths[0] / 2, 0.2),
    "checkpoints beside free memory": (checkpointed("h.0", "h.1").lengths[0] - MS, 0.02),
    "checkpoints of two towers": (checkpointed(*"abcd").lengths[0] - 2 * MS, 0.02),
    "gradients that are summed after each pass": (two_passes(2, 1).lengths[0] - 2 * 501_000, 0.05),
}
"""What the run has → its true step without that, and how near to it the expected one lies; else within its interval."""


@cache
def advised(title: str) -> AdviceResult:
    _, program, given = NAMED[title]
    with TemporaryDirectory() as folder:
        return program.write(Path(folder), **given)


@pytest.mark.parametrize("title", WITHOUT)
def test_the_step_without_a_cause_is_the_predicted_one(title: str) -> None:
    truth_ns, rel = WITHOUT[title]
    low, expected, high = after(by_code(advised(title))[NAMED[title][0]])
    assert low <= truth_ns <= high
    assert rel is None or expected == pytest.approx(truth_ns, rel=rel)


def test_each_cause_is_named_and_said_as_it_was() -> None:
    """With its line or module, change, edit and evidence, and all other Tries of the run."""
    said = []
    for title, (code, *_) in NAMED.items():
        assert code in by_code(advised(title)), title
        result = advised(title).to_dict()
        said.append(f"\n# {title}")
        for advice in result.pop("advice"):
            said.append(f"{advice.pop('code')}: {advice.pop('cause')}")
            said += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in advice.items() if value]
        said += [f"{key}: {json.dumps(value)}" for key, value in result.items() if value]
    check_text("causes", "\n".join(said).lstrip() + "\n")


def test_a_wait_for_data_that_no_recorded_step_has_is_a_part_of_the_step(tmp_path: Path) -> None:
    BURSTS[0].write(tmp_path, **BURSTS[1])
    tree = summarize_capture(open_capture(tmp_path)).tree
    assert tree is not None
    waiting, computing = ([part.time_ns for part in tree.parts if part.kind == kind] for kind in ("data", "computing"))
    assert waiting == [pytest.approx(BURST_NS / 10, rel=0.05)]
    assert computing == [pytest.approx(5 * MS, rel=0.02)]


def test_of_a_step_of_more_samples_what_was_measured_says_nothing_of_the_effect() -> None:
    batch = by_code(advised("a small batch"))["batch"]
    assert batch.saves_ns is not None
    longer = Trial(("batch:×2",), processes=3, change_ns=0.5 * MS, batch_factor=2.0)
    assert replace(batch, measured=longer).effect_ns == batch.saves_ns.expected
    assert replace(batch, measured=replace(longer, batch_factor=1.0)).effect_ns == -0.5 * MS


def test_without_a_cause_there_is_no_try(tmp_path: Path) -> None:
    """A wait for which the GPU has work left is none."""
    program = equal_steps(within("forward", launch(NVJET, 300_000, 40), wait))
    last = program.write(tmp_path / "last", [line(MS, "forward", "loss.item", waits=1, waiting_ns=MS)])
    assert last.tries == ()
    assert last.nothing == "Nothing found that surely saves more than 2 %: the step is 100 % arithmetic."
    assert convolutions(NVJET, ADD).write(tmp_path / "none").tries == ()


def test_at_most_three_causes_are_tried_and_what_they_buy_together_is_no_sum(tmp_path: Path) -> None:
    """Python and CUDA's allocator hold the host, then products and zeros take the GPU's time."""
    phases = within("forward/model/head", launch(SGEMM, 2 * MS, 2)), within("optimizer", launch(ZERO, MS // 3))
    program = equal_steps(python(3 * MS), allocate(MS), *phases, wait)
    result = program.write(tmp_path, [line(3 * MS, called="make_batch")])
    assert len(result.tries) == MOST_TRIES
    assert [advice.code for advice in result.tries] == ["tf32", "python", "allocations"]
    assert result.together_ns is not None
    savings = [program.lengths[0] - after(advice)[1] for advice in result.tries]
    assert savings == sorted(savings, reverse=True)
    assert result.together_ns.expected < min(after(advice)[1] for advice in result.tries)
    for advice in result.tries:
        assert advice.edit is None or parse_edits([advice.edit])
        json.dumps(asdict(advice))


class Keeping(Training):
    """Leaves 4 MiB behind in every step."""

    def malloc(self, size: int, stack: str, owner: tuple[str, str] | None = None) -> Block:
        return super().malloc(4 * MIB if size == 700 else size, stack, owner)


def test_a_line_that_keeps_memory_is_named_where_its_history_was_recorded(tmp_path: Path) -> None:
    for training, line in ((Keeping(steps=6, leaks=True), ("train.py", 30, "remember")), (Training(steps=6), None)):
        opened = open_capture(training.write(tmp_path))
        advice = by_code(find_advice(opened, summarize_capture(opened)))
        assert ("growth" in advice) == (line is not None)
        assert line is None or advice["growth"].line == SourceLine(*line)


def _memory(**changes: Any) -> Summary:
    """Return 10 GiB at the peak, of them 6 GiB activations in four blocks whose forward pass takes 8 ms."""
    block = PartRow("h.*", ("model", "h.*"), 6 * GIB, 0.6, 4, 0, {"activations": 6 * GIB}, {}, number=4)
    unknown = ("expandable_reserved_bytes", "failure", "failed_request_bytes", "agrees", "recording_cost")
    usual: dict[str, Any] = {
        **dict.fromkeys(unknown),
        "device": 0,
        "peak_bytes": 10 * GIB,
        "exact": True,
        "phase": "backward",
        "by_category": {"activations": 6 * GIB, "gradients": GIB},
        "reserved_peak_bytes": 12 * GIB,
        "capacity_bytes": 13 * GIB,
        "modules": (block,),
    }
    modules = (ModuleTime("h.*", "model", 4, 8 * MS, 16 * MS, 0),)
    return Summary("run", memory=MemoryUse(**{**usual, **changes}), modules=modules, passes=1.0)


@pytest.mark.parametrize(
    ("changes", "code", "saved"),
    [
        ({}, "checkpoint", 6 * GIB - 6 * GIB // 4),
        ({"capacity_bytes": 140 * GIB}, None, 0),
        ({"phase": "forward", "capacity_bytes": 140 * GIB}, "zero-grad-late", GIB),
        ({"expandable_reserved_bytes": 11 * GIB, "capacity_bytes": 140 * GIB}, "expandable-segments", GIB),
    ],
)
def test_memory_is_saved_where_it_is_short_or_held_for_nothing(
    changes: dict[str, Any], code: str | None, saved: int
) -> None:
    advice = by_code(find_advice(open_capture(ROOT / "traces" / "tiny-train-cpu.nsys2023.sqlite"), _memory(**changes)))
    assert set(advice) == ({code} if code else set())
    if code:
        assert advice[code].after_ns is None
        assert advice[code].saves_bytes is not None
        assert advice[code].saves_bytes.expected == saved


def test_a_late_rank_is_named_with_the_step_of_all_ranks_without_it(captures: Path) -> None:
    """Rank 1 costs the other time in this recording; that rank 0 were on time would change nothing."""
    opened = open_capture(captures / "ddp.nsys2025.sqlite")
    summary = summarize_capture(opened)
    assert summary.compared is not None
    assert summary.limits is not None
    assert summary.limits.by_rank[1] > 0.9 * summary.limits.step_ns
    refused = replace(summary, limits=replace(summary.limits, refusal="several processes were recorded", by_rank={}))
    alone = replace(summary, limits=replace(summary.limits, by_rank={}))
    evidence, *others = (Evidence(opened, one) for one in (alone, refused, summary))
    assert evidence.limits is alone.limits
    assert [one.limits for one in others] == [None, None], "no row changes the steps of all ranks"
    nothing = "Nothing found that surely saves more than 2 %"
    assert [_say_nothing(one).partition(", as recorded")[0] for one in others] == [
        f"{nothing}.",
        f"{nothing}: the step is 94 % Python",
    ]
    assert "late-rank" not in by_code(find_advice(opened, summary)), "which may be the profiler's doing"
    times = {"late_ns": 3 * MS, "extra_ns": 4 * MS, "idle_ns": 4 * MS, "gain_ns": 3 * MS, "share": 0.9}
    place: dict[str, Any] = {"cause": "data", "phase": "data", "module": "", "group": None, "compared_with": 0}
    for rank in (0, 1):
        late = Culprit(rank=rank, **place, **times, late_steps=10, steps=10)  # type: ignore[arg-type]
        compared = replace(summary.compared, verdict=replace(summary.compared.verdict, culprit=late))
        advice = by_code(find_advice(opened, replace(summary, compared=compared)))
        assert ("late-rank" in advice) == (rank == 1)
    low, expected, _ = after(advice["late-rank"])
    assert advice["late-rank"].edit == "on-time:1"
    assert low < expected < 44_734_852
    saves = advice["late-rank"].saves_ns
    assert saves is not None
    assert saves.expected == 44_734_852 - expected


@pytest.mark.parametrize(
    ("kernels_ns", "changes", "does"),
    [
        ((30 * MS, 57 * MS, 32 * MS), {}, "computes 1.8 times what the others do: 57 ms of kernels for 31 ms"),
        ((30 * MS, 57 * MS, 32 * MS), {"late_steps": 3}, "computes 9.5 ms longer"),
        ((30 * MS, 57 * MS, 32 * MS), {"cause": "clock"}, "computes on a lower clock 9.5 ms longer"),
        ((30 * MS, 25 * MS, 32 * MS), {}, "computes 9.5 ms longer"),
    ],
)
def test_of_a_late_rank_that_computes_more_it_is_said_how_many_times_as_much(
    tmp_path: Path, kernels_ns: tuple[int, ...], changes: dict[str, Any], does: str
) -> None:
    opened = open_capture(write_kineto_run(tmp_path / "run", simulate(3, 3)))
    summary = summarize_capture(opened)
    assert summary.compared is not None
    ranks = tuple(
        replace(rank, parts={"kernels": time_ns})
        for rank, time_ns in zip(summary.compared.ranks, kernels_ns, strict=True)
    )
    times = {"late_ns": 9 * MS, "extra_ns": 9_500_000, "idle_ns": 9 * MS, "gain_ns": 9 * MS, "share": 0.9}
    place: dict[str, Any] = {"cause": "kernels", "phase": "backward", "module": "h.1", "group": None}
    place |= {"compared_with": 0, "late_steps": 10, "steps": 10}
    late = Culprit(rank=1, **times, **{**place, **changes})  # type: ignore[arg-type]
    verdict = replace(summary.compared.verdict, culprit=late)
    late_rank, *_ = RANKS
    (cause,) = late_rank(
        Evidence(opened, replace(summary, compared=replace(summary.compared, ranks=ranks, verdict=verdict)))
    )
    assert cause.cause == f"all ranks wait for rank 1, which {does}"
    assert (cause.module, cause.edit) == ("h.1", "on-time:1")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (ROOT / "tests" / "light_records" / "ddp-data", "Nothing is predicted: no trace was recorded."),
        (ROOT / "traces" / "tiny-train-cpu.nsys2023.sqlite", "Nothing is predicted: no work of a GPU was recorded."),
        (ROOT / "traces" / "tiny-train-cpu.kineto.json.gz", "Nothing is predicted: no unprofiled step was recorded."),
        (
            ROOT / "traces" / "nanogpt-default.snapshot.pickle.gz",
            "Nothing found that would save more than 2 % of the peak.",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_where_nothing_could_be_found_it_is_not_said_that_nothing_was(path: Path, said: str) -> None:
    opened = open_capture(path)
    assert find_advice(opened, summarize_capture(opened)).nothing == said


def test_nothing_found_says_how_much_of_the_step_is_communication() -> None:
    """In a tree of the GPU's time the products' share is that of kernels that compute."""
    communicating = LimitPart(Limit.COMMUNICATING, "communication", "backward", None, 30 * MS)
    limits = StepLimits(100 * MS, 100 * MS, None, AS_RECORDED)
    limits = replace(limits, parts=(communicating, communicating._replace(cause="python", time_ns=70 * MS)))
    opened = open_capture(ROOT / "traces" / "tiny-train-cpu.nsys2023.sqlite")
    summary = Summary("run", has_trace=True, limits=limits)
    nothing = "Nothing found that surely saves more than 2 %: the step is "
    assert _say_nothing(Evidence(opened, summary)) == f"{nothing}70 % Python and 30 % communication."
    parts = StepPart(Limit.COMPUTING, 80 * MS), StepPart(Limit.COMMUNICATING, 20 * MS)
    work = WorkUse("gpu-kernel", 400 * MS, {"gemm": 150 * MS, "communication": 200 * MS}, {}, None, None)
    summary = replace(summary, tree=StepTree(100 * MS, "gpu", parts), work=work)
    assert _say_nothing(Evidence(opened, summary)) == (
        f"{nothing}60 % arithmetic and 20 % communication and 20 % other kernels, copies and gaps."
    )


def test_nothing_found_says_of_the_step_what_its_tree_says(tmp_path: Path) -> None:
    """Steps half as long as the recorded ones are not what was replayed: the tree rests on the GPU's time."""
    program = equal_steps(within("forward", python(12 * MS), launch(NVJET, 300_000, 40), wait))
    result = program.write(tmp_path, attached={"steps": [{"step_ns": 12_100_000}] * 10})
    summary = summarize_capture(open_capture(tmp_path))
    assert summary.tree is not None
    assert summary.tree.basis == "gpu"
    assert result.nothing is not None
    assert result.nothing.endswith(f"the step is {100 * summary.tree.parts[0].time_ns / 12_100_000:.0f} % arithmetic.")


def _note(
    folder: Path,
    *,
    kernel: str = CONVOLUTION,
    sizes: Sequence[int] = (4, 4, 4),
    cpu_ns: int | None = None,
    **conditions: Any,
) -> str:
    """Return the notes on steps of so many convolutions each, and on four workers with batches of 10 ms."""
    program = Program(*([within("forward", launch(kernel, 500_000, size)), wait] for size in sizes))
    given: dict[str, Any] = {
        "conditions": {"cpu_count": 16, **conditions},
        "processes": [{"pid": 7, "loading": {"workers": 4}}],
        "loader": {"batches": 50, "batch_ns": 10 * MS, "batch_cpu_ns": cpu_ns},
    }
    return " ".join(program.write(folder, [line(MS)], **given).notes)


def test_what_slows_a_step_down_by_an_unknown_time_is_a_note_and_no_try(tmp_path: Path) -> None:
    assert _note(tmp_path / "none", cudnn_benchmark=True, deterministic_algorithms=False, cpu_ns=10 * MS) == ""
    assert "every recorded step runs the same 4 kernels of" in _note(tmp_path / "rules", cudnn_benchmark=False)
    assert _note(tmp_path / "sizes", sizes=(4, 5, 4), cudnn_benchmark=False) == ""
    attention = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
    assert _note(tmp_path / "attention", kernel=attention, cudnn_benchmark=False) == ""
    assert "slower kernels" in _note(tmp_path / "deterministic", deterministic_algorithms=True)
    crowded = _note(tmp_path / "threads", cpu_ns=50 * MS)
    assert crowded.startswith("each of 4 loader workers keeps 5.0 of 16 CPUs busy while it makes a batch: ")
    assert _note(tmp_path / "room", cpu_ns=35 * MS) == ""
    (unlike,) = passes(4, 8).write(tmp_path / "unlike").notes
    assert unlike.startswith(
        "model is called with gradients 2 times a step, and backward goes through it once a step: "
    )
    assert not passes(4, 4).write(tmp_path / "alike").notes


@pytest.mark.parametrize(("start_ms", "is_said"), [(800, True), (10, False)])
def test_workers_that_start_anew_in_none_of_the_timed_steps_make_the_mean_step_longer(
    tmp_path: Path, start_ms: int, is_said: bool
) -> None:
    anew = {"workers": 4, "batches_per_step": 1.0, "epoch_batches": 500, "epoch_start_ns": start_ms * MS}
    program = equal_steps(FORWARD, wait)
    result = program.write(tmp_path, [line(MS)], processes=[{"pid": 7, "loading": anew}])
    said = [advice for advice in result.tries if advice.code == "loader"]
    assert len(said) == is_said
    for advice in said:
        assert advice.cause.startswith(
            "the DataLoader starts its workers anew for every 500 batches, in steps that are"
        )
        assert advice.other_step_ns == pytest.approx(program.lengths[1] + 1.6 * MS, rel=0.01)


@pytest.mark.parametrize(("path", "own"), [("backward", 0), ("backward/model/h.0", 6)])
def test_what_backward_runs_outside_of_unknown_modules_is_no_single_places(tmp_path: Path, path: str, own: int) -> None:
    """A norm outside of all modules, whose backward pass of six kernels follows on the loss's own two."""
    norm = launch(SUM, 100_000), launch(ADD, 100_000, 3), launch(SQRT, 100_000)
    loss = launch(NVJET, 100_000), launch(ADD, 100_000), launch(SOFTMAX, 100_000), launch(ADD, 100_000, 2)
    blocks = within(path, *[launch(NVJET, 100_000), launch(ADD, 100_000, 6)] * 10)
    backward = within("backward", *loss, launch(NVJET, 100_000), launch(ADD, 100_000, 6)), blocks
    program = equal_steps(within("forward", *norm, launch(NVJET, 100_000)), *backward, wait)
    advice = by_code(program.write(tmp_path))["norm"]
    assert advice.evidence["kernels"] == 5 + own
    assert ("with backward" in advice.cause) == bool(own)


def test_lines_of_which_one_saves_by_itself_are_no_waits_that_cost_only_together(tmp_path: Path) -> None:
    waiting = replace(MEAN, called="x.max")
    _, given = waits_together(python_ns=MS)
    result = equal_steps(within("forward", *WAITS), wait, wait).write(tmp_path, [waiting, *given["lines"]])
    assert [one.cause for one in result.tries if one.code == "waits"] == ["x.max() waits for the GPU, 8 times a step"]


@pytest.mark.parametrize(
    ("own", "parts", "module"), [(2, 1, "moe"), (4, 2, "moe"), (1, 1, "moe.act"), (1, 3, "moe.act")]
)
def test_a_loop_around_a_module_is_the_outer_ones_if_most_kernels_are(
    tmp_path: Path, own: int, parts: int, module: str
) -> None:
    """What its lines wait for goes with it, as far as lines are known."""
    program, given = mixture(own, parts)
    found = by_code(program.write(tmp_path / "all", **given))["loop"]
    assert found.module == module
    alone = by_code(program.write(tmp_path / "alone", **{**given, "lines": []}))["loop"]
    assert alone.module == module
    assert (after(found)[1] < after(alone)[1]) == (module == "moe")


def test_a_loop_is_named_where_its_turns_compute_unless_they_call_a_function(tmp_path: Path) -> None:
    program, given = looped_outside()
    others = [one for one in given["lines"] if not one.is_caller]
    for name, lines, expected in (("calls", given["lines"], 20), ("computes", others, 60)):
        found = by_code(program.write(tmp_path / name, **{**given, "lines": lines}))["loop"]
        assert found.line is not None
        assert found.line.line == expected


def test_compiling_stands_behind_a_chain_by_what_it_saves_beside_it(tmp_path: Path) -> None:
    found = {layers: [one.code for one in gated(layers).write(tmp_path / str(layers)).tries] for layers in (2, 10, 40)}
    assert found == {2: ["chain"], 10: ["chain", "compile"], 40: ["compile"]}


def test_where_no_step_can_be_replayed_lines_that_wait_are_no_causes(tmp_path: Path) -> None:
    lines = [line(2 * MS, called="boxes.tolist", waits=1), line(MS, called="loss.item", line=50, waits=1)]
    result = equal_steps(python(MS)).write(tmp_path, lines)
    assert result.tries == ()
    assert (result.nothing or "").startswith("Nothing is predicted: ")


def test_of_a_line_that_converts_and_moves_its_wait_is_that_of_the_move(tmp_path: Path) -> None:
    program = equal_steps(within("forward", *WAITS))
    for waits_in, is_said in ((None, "x.float() waits for the GPU"), ("….to", None), ("….item", ".item() waits for")):
        convert = replace(MEAN, called="x.float", waits=3, waits_in=waits_in)
        found = by_code(program.write(tmp_path / str(waits_in), [convert]))
        assert ("waits" in found) == (is_said is not None)
        assert is_said is None or found["waits"].cause.startswith(is_said)


@pytest.mark.parametrize(
    ("changes", "is_spared"),
    [({}, True), ({"waits": 3.0}, False), ({"function": "loss_of"}, False)],
)
def test_what_reads_many_values_outside_of_the_passes_is_left_out_with_its_python(
    tmp_path: Path, changes: dict[str, Any], *, is_spared: bool
) -> None:
    """Not what computes the loss, or reads few values, such as an action."""
    reads = replace(NORMS, called="log_norms", inside="grads.grad_norm", **changes)
    call = line(3 * MS, called="loss_of", line=7, is_caller=True)
    forward, backward = line(MS, "forward", "model", line=5), line(MS, "backward", "loss.backward", line=9)
    result = ONE_BY_ONE.write(tmp_path, [reads, forward, backward, call])
    assert ("do it every 50 steps" in str(result.to_dict()["advice"])) == is_spared


@pytest.mark.parametrize(("turn", "is_one"), [(A_CLASS, True), ([*A_CLASS[:-1], launch(NVJET, 5_000), read], False)])
def test_a_loss_in_a_loop_is_computed_for_all_classes_at_once_unless_each_has_a_network(
    tmp_path: Path, turn: Sequence[Action], *, is_one: bool
) -> None:
    result = equal_steps(FORWARD, within("forward/model/dice", *turn * 12), wait).write(tmp_path, lines=[CHECKED])
    assert ("compute it for all at once" in by_code(result)["waits"].change) == is_one


def test_a_kernel_in_16_bits_or_of_whole_numbers_is_no_faster_in_bf16() -> None:
    names = [ADD, ADD.replace("float", "c10::BFloat16, float"), ADD.replace("float", "c10::Half"), OUTER_SCAN]
    assert [handles_fp32(name) for name in names] == [True, False, False, False]


def test_a_function_of_the_dataset_whose_lines_take_a_batch_together_is_what_to_do_once(tmp_path: Path) -> None:
    program, given = slow_dataset(55 * MS, 50 * MS, batch_ns=220 * MS)
    (parse,) = given["lines"]

    def advise(name: str, function: str, *called: str) -> str:
        lines = [replace(parse, line=at, function=function, called=call) for at, call in enumerate(called, 12)]
        lines[0] = replace(lines[0], function=f"{function}.<lambda>")
        result = by_code(program.write(tmp_path / name, **{**given, "lines": lines}))
        return result["loader"].change if "loader" in result else "num_workers"

    assert "do what Data.stamp does once" in advise("own", "Data.stamp", "parse", "cut", "join", "sort")
    assert "num_workers" in advise("sample", "Data.__getitem__", "parse", "cut", "join", "sort")
    # The lines of a sample that call the same are one.
    assert "do atoms.tolist once" in advise("same", "Data.__getitem__", *("atoms.tolist", "bonds.tolist") * 2)


@pytest.mark.parametrize(("cpus", "change"), [(6, "do json.load once"), (16, "num_workers=11")])
def test_more_workers_are_the_simpler_change_only_where_they_spare_most_of_the_wait(
    tmp_path: Path, cpus: int, change: str
) -> None:
    program, given = slow_dataset(2 * MS, 11 * MS, FORWARD, batch_ns=12 * MS)
    found = by_code(program.write(tmp_path, **{**given, "conditions": {"cpu_count": cpus}}))["loader"]
    assert change in found.change


def test_the_order_of_volumes_has_a_name_of_its_own(tmp_path: Path) -> None:
    """And no edit that could be tried."""
    found = by_code(convolutions(CONVERT, ADD).write(tmp_path, **VOLUMES))["channels-last"]
    assert "torch.channels_last_3d" in found.change
    assert found.edit is None


@pytest.mark.parametrize(("sub_bytes", "code"), [(GIB, "pairs"), (3 * GIB, "norm")])
def test_differences_of_all_pairs_are_no_norm(tmp_path: Path, sub_bytes: int, code: str) -> None:
    """What comes in is small, so that the difference only writes what the square reads and writes."""
    program = blocks("act", *CHAINS["norm"])
    parts = ("sub", 20, sub_bytes), ("pow", 21, 2 * GIB), ("sum", 21, GIB)
    moved = works(*(("h.*/h.*.act", *part) for part in parts))
    found = by_code(program.write(tmp_path, **moved))[code]
    assert found.line is not None
    assert found.line.line == 20


@pytest.mark.parametrize(("first_ns", "named"), [(7 * MS, 9), (10 * MS, 40)])
def test_of_a_call_by_the_dataset_the_line_is_named_in_which_most_of_it_is(
    tmp_path: Path, first_ns: int, named: int
) -> None:
    """Or else that of the call, and not the longest of the lines within it."""
    program, given = slow_dataset(3 * MS, MS)
    calls = line(17 * MS, None, "encode", file="/code/data.py", line=9, thread="worker", is_caller=True)
    own = [
        line(time_ns, None, file="/code/bpe.py", line=at, thread="worker", caller="/code/data.py:9 main")
        for at, time_ns in ((40, first_ns), (41, 6 * MS), (42, 17 * MS - 6 * MS - first_ns))
    ]
    result = program.write(tmp_path, **{**given, "lines": [*own, calls]})
    found = by_code(result)["loader"]
    assert found.line is not None
    assert found.line.line == named


def test_a_generators_gradients_before_the_discriminators_step_need_nothing_of_its_backward(tmp_path: Path) -> None:
    program, given = of_two_models(is_detached=False)
    found = [one for one in program.write(tmp_path, **given).tries if one.code == "unread-gradients"]
    assert [(one.module, one.effect_ns) for one in found] == [
        ("makes", pytest.approx(2 * MS, rel=0.02)),
        ("judges", pytest.approx(2 * MS, rel=0.02)),
    ]
    assert found[0].change == ".detach() of what makes made, for the other optimizer's loss"


def test_what_a_loop_goes_over_is_read_in_the_line_above_it(tmp_path: Path) -> None:
    """Without the loop nobody reads it, and the GPU's work hides the launches."""
    whole = within("forward/model/mlp", launch(NVJET, 4 * MS))
    program = equal_steps(whole, within("forward/model/act", wait, launch(ADD, 3_000, 400)), wait)
    counted = works(("act", "sum", 20, 2**20))
    expected_ns = []
    for number in (19, 18):
        head = line(MS, "forward", "sizes.tolist", line=number, waits=1.0, file="/code/model.py")
        found = by_code(program.write(tmp_path / str(number), [head], **counted))["loop"]
        assert found.line is not None
        assert found.line.line == 20
        expected_ns.append(after(found)[1])
    assert expected_ns[0] < expected_ns[1]


def test_calls_of_several_passes_are_one_call_in_each_of_them(tmp_path: Path) -> None:
    expected_ns = []
    for passes in (1, 2):
        program, given = separate_calls(4_000, passes=passes)
        expected_ns.append(after(by_code(program.write(tmp_path / str(passes), **given))["loop"])[1])
    assert expected_ns[1] > expected_ns[0] + 6 * 4_000


@pytest.mark.parametrize(("count", "first"), [(4, "batch"), (1, "python")])
def test_as_many_samples_in_fewer_passes_are_the_same_training(tmp_path: Path, count: int, first: str) -> None:
    """They stand by what they save; a larger batch, however much it saves, comes last."""
    phases = [within(phase, launch(RECURRENT[0], 3_000, 50)) for phase in ("forward", "backward")]
    program = equal_steps(python(MS // 2), *phases * count, within("optimizer", launch(ADD, 2_000)), wait)
    result = program.write(tmp_path, [line(MS // 2, called="draw")], **with_memory(10 * GIB))
    batch, other = by_code(result)["batch"], by_code(result)["python"]
    assert result.tries[0].code == first
    assert batch.effect_ns > other.effect_ns
    assert ("larger passes: about" in describe_answer(summarize_capture(open_capture(tmp_path)), result)) == (count > 1)


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (("enc.norm", "dec.norm"), ["enc.norm and dec.norm"]),
        (("enc.norm", "dec.norm", "dec.memory.norm"), ["enc.norm and 2 more modules"]),
        (("enc.norm", "dec.scale"), ["enc.norm and dec.scale"]),
        (("enc.norm", "other.scale"), ["enc.norm", "other.scale"]),
    ],
)
def test_one_change_in_modules_of_one_name_or_of_the_same_kernels_is_one_try(
    tmp_path: Path, names: tuple[str, ...], modules: list[str]
) -> None:
    same, other = CHAINS["norm"], [CHAINS["norm"][1], CHAINS["norm"][0], *CHAINS["norm"][2:]]
    kernels = [other if name.startswith("other") else same for name in names]
    norms = [
        within(f"forward/model/{name}", *[launch(*kernel) for kernel in own])
        for name, own in zip(names, kernels, strict=True)
    ]
    calls = range(len(names), 0, -1)
    parts = [part for norm, count in zip(norms, calls, strict=True) for part in [norm, launch(NVJET, 100_000)] * count]
    found = [advice for advice in equal_steps(*parts, wait).write(tmp_path).tries if advice.code == "norm"]
    assert [advice.module for advice in found] == modules
    assert sum(int(advice.evidence["kernels"]) for advice in found) == 5 * sum(calls)
    saved_ns = sum(advice.saves_ns.expected for advice in found if advice.saves_ns)
    assert saved_ns == pytest.approx(sum(calls) * (409_000 + 5_000 - 221_000), rel=0.02)


ATTENTION = "h.*/h.*.attn"


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ([(ATTENTION, "_softmax", 30, 9), (ATTENTION, "bmm", 31, 99), ("loss", "_softmax", 50, 99)], 30),
        # Two functions do it: the larger one counts.
        ([(ATTENTION, "_softmax", 30, 9), (ATTENTION, "_safe_softmax", 33, 10)], 33),
        # A line of the user's own calls a library's block, in which all of this is.
        ([(ATTENTION, "_softmax", 30, 9), ("h.*", "add", 30, 9)], None),
        ([(ATTENTION, "bmm", 31, 99)], None),
    ],
)
def test_a_cause_in_kernels_has_the_line_that_calls_its_operators(
    tmp_path: Path, lines: list[tuple[str, str, int, int]], line: int | None
) -> None:
    (found,) = by_code(blocks("attn", *WRITTEN_OUT).write(tmp_path, **works(*lines))).values()
    assert (found.code, found.module) == ("attention", "h.*.attn")
    assert found.line == (None if line is None else SourceLine("/code/model.py", line, "forward"))


def test_python_of_several_lines_of_one_call_goes_with_the_call(tmp_path: Path) -> None:
    program, given = python_in_call()
    result = program.write(tmp_path / "all", **given)
    advice = by_code(result)["python"]
    assert advice.line == SourceLine("/code/data.py", 20, "main")
    assert advice.cause == "Python in make_batch (train.py:99) keeps the GPU waiting"
    assert advice.edit == "no-host:/code/train.py:99"
    assert [one.code for one in result.tries].count("python") == 1
    assert advice.effect_ns == pytest.approx(4 * MS, rel=0.02)
    # Without callers the two lines are apart; and a call that prepares kernels for half of its time is none of these.
    lines = [replace(one, caller=None) for one in given["lines"]]
    apart = [one.effect_ns for one in program.write(tmp_path / "apart", lines=lines).tries if one.code == "python"]
    assert apart == pytest.approx([2.5 * MS, 1.5 * MS], rel=0.02)
    half, given = python_in_call(0.5)
    assert "make_batch" not in str(half.write(tmp_path / "half", **given).to_dict()["advice"])


def test_what_autocast_saves_stands_before_what_saves_less_than_half_as_much(tmp_path: Path) -> None:
    """It changes the numbers: else it stands last, after what only one line costs."""
    codes = []
    for time_ns in (2 * MS, MS // 2):
        program = equal_steps(python(time_ns), IN_TF32, wait)
        tries = program.write(tmp_path / str(time_ns), [replace(PACK, time_ns=time_ns)]).tries
        codes.append([advice.code for advice in tries])
    assert codes == [["python", "autocast"], ["autocast", "python"]]


def test_the_largest_effect_that_is_printed_stands_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the screening says, which asks one recorded step."""

    def screen(evidence: Evidence, changes: Sequence[Any]) -> int:
        return round(0.9 ** len(changes) * evidence.now_ns)

    monkeypatch.setattr(Evidence, "expect_after", screen)
    found = []
    for data_ns, python_ns in ((8 * MS, 4 * MS), (4 * MS, 8 * MS)):
        program = equal_steps(within("data", python(data_ns)), FORWARD, wait, python(python_ns), wait)
        lines = [*loads(data_ns)[1]["lines"], replace(PACK, time_ns=python_ns)]
        found.append([advice.code for advice in program.write(tmp_path / f"{data_ns}", lines).tries])
    assert found == [["loader", "python"], ["python", "loader"]]


TRAINER = [line(MS, phase, "trainer.train", line=90) for phase in ("forward", "backward")]


def test_autocast_that_saves_far_more_than_others_is_among_three_tries(tmp_path: Path) -> None:
    """It changes the numbers, and is asked for in the words of what runs the steps."""
    small = [replace(PACK, line=at, function=f"f{at}") for at in (10, 40, 70)]
    program = equal_steps(*[python(2 * MS), wait] * 3, *[IN_TF32] * 4, wait)
    for name, more, change in (("loop", [], "torch.autocast("), ("trainer", TRAINER, "TrainingArguments(bf16=True)")):
        tries = program.write(tmp_path / name, [*small, *more]).tries
        assert [advice.code for advice in tries] == ["autocast", "python", "python"]
        assert tries[0].change.startswith(change)


def loader(workers: int, **more: Any) -> dict[str, Any]:
    """Return what is known of the lines of a loader that gives each step its batch."""
    places = {"file": "/code/train.py", "line": 80, "keeps_line": 82, "function": "make", "keeps_function": "make"}
    return {**places, "workers": workers, "epochs": 1, "batches": 50, **more}


def test_too_few_workers_are_named_where_their_number_is_written(tmp_path: Path) -> None:
    """Where more than a usual number are needed the dataset is what is slow; its line is named in any case."""
    found = []
    for workers, batch_ns in ((0, 0), (1, 20 * MS), (1, 30 * MS), (1, 80 * MS)):
        program, given = (
            loads(5 * MS) if not workers else with_workers(5 * MS, 64, batch_ns, workers=1, batch_ns=batch_ns)
        )
        (process,) = given.get("processes", [{"pid": 7}])
        lines = given.get("lines") or [line(batch_ns, called="resize", file="/code/data.py", line=12, thread="worker")]
        processes = [{**process, "loaders": [loader(workers), loader(4, line=99, batches=9)]}]
        advice = by_code(program.write(tmp_path / f"{batch_ns}", **{**given, "lines": lines, "processes": processes}))
        assert advice["loader"].line is not None
        found.append((advice["loader"].line.line, advice["loader"].cause.partition(", and")[0]))
    assert found == [
        (80, "the DataLoader has no workers: Image.open at data.py:12 runs in the step"),
        (80, "1 worker of the DataLoader makes a batch every 20 ms, mostly in resize at data.py:12"),
        (80, "1 worker of the DataLoader makes a batch every 30 ms, mostly in resize at data.py:12"),
        (12, "1 worker of the DataLoader makes a batch every 80 ms"),
    ]


def test_a_copy_without_files_names_no_loaders_line(tmp_path: Path) -> None:
    program, _ = loads(5 * MS)
    advice = program.write(tmp_path, processes=[{"pid": 7, "loaders": [loader(0, file=LEFT_OUT)]}]).tries
    assert [(one.code, one.line, one.cause.partition(", and")[0]) for one in advice] == [
        ("loader", None, "the DataLoader has no workers")
    ]


def test_workers_that_begin_anew_are_named_where_it_is_written_that_they_do(tmp_path: Path) -> None:
    program, given = restarts(BURST_NS)
    (process,) = given["processes"]
    given = {**given, "processes": [{**process, "loaders": [loader(4)]}]}
    for name, more, change in (("loop", [], "DataLoader("), ("trainer", TRAINER, "TrainingArguments(dataloader_pers")):
        found = by_code(program.write(tmp_path / name, **{**given, "lines": [*given.get("lines", []), *more]}))[
            "loader"
        ]
        assert found.line == SourceLine("/code/train.py", 82, "make")
        assert found.change.startswith(change)


def test_workers_of_a_trainer_are_asked_for_by_its_arguments(tmp_path: Path) -> None:
    program, given = loads(5 * MS)
    trainer = TRAINER
    for name, more, change in (("loop", [], "DataLoader("), ("trainer", trainer, "TrainingArguments(dataloader_num")):
        found = program.write(tmp_path / name, **{**given, "lines": [*given["lines"], *more]})
        assert by_code(found)["loader"].change.startswith(change)


def test_what_runs_in_rare_steps_alone_is_a_cause_of_the_mean_step(tmp_path: Path) -> None:
    program = equal_steps(FORWARD, wait)
    program.write(tmp_path, [line(MS)])
    usual = program.lengths[0]
    steps = [{"step_ns": usual + (at % 10 == 5) * 40 * MS} for at in range(40)]
    saving = replace(line(4 * MS, called="torch.save", line=50), error_ns=4 * MS // 2, samples=160)
    write_lines(tmp_path / "lines.jsonl", split_lines(LineSteps(tuple(steps)), [saving]))
    opened = open_capture(tmp_path)
    result = find_advice(opened, summarize_capture(opened))
    (found,) = result.tries
    assert (found.code, found.line, found.short_cause) == (
        "python",
        SourceLine("/code/train.py", 50, "main"),
        "one step in 10 takes 40 ms longer",
    )
    mean_ns = usual + 4 * MS
    assert found.other_step_ns == pytest.approx(mean_ns, rel=0.01)
    assert found.effect_ns == pytest.approx(4 * MS, rel=0.02)
    (before,) = [text for text in describe_effects(found) if "→" in text]
    assert before.startswith(f"{mean_ns / MS:.3f}"[:4])
    answer = describe_answer(summarize_capture(opened), result)
    assert answer.startswith(f"A step takes {usual / MS:.3f} ms, and ")
    assert "on average: one step in 10 takes 40 ms longer (train.py:50 main). Without that: about" in answer
    # One alone does not say how often they come, only in how many steps it came.
    once = replace(saving, time_ns=4 * MS, error_ns=4 * MS)
    write_lines(tmp_path / "lines.jsonl", split_lines(LineSteps(tuple(steps[:10])), [once]))
    opened = open_capture(tmp_path)
    said = describe_answer(summarize_capture(opened), find_advice(opened, summarize_capture(opened)))
    assert f" on average of those seen: 1 of {10 + STEPS} steps took 40 ms longer" in said
    # Without that it is longer than the typical step, which stands beside it on the page.
    *_, (time, label) = _figures(summarize_capture(opened), result)
    assert time.startswith("≈ ")
    assert label.startswith("a step on average after the first Try (")
    assert label.endswith(f"); {before.partition(' → ')[0]} now")


def test_the_line_of_a_trainer_is_no_culprit_though_one_phase_alone_limits_the_step(tmp_path: Path) -> None:
    def culprits(*phases: str) -> list[int]:
        folder = tmp_path / "-".join(phases)
        equal_steps(FORWARD, wait).write(folder, [line(MS, phase, "trainer.fit") for phase in phases])
        trace = open_capture(folder).trace
        assert trace is not None
        return [culprit.line for limit in Limit for culprit in trace.step_limits.lines_of(limit)]

    assert culprits("forward") == [30]
    assert culprits("forward", "backward") == []


def test_how_much_of_rare_steps_a_line_has_is_said_unless_it_has_most(tmp_path: Path) -> None:
    program = equal_steps(FORWARD, wait)
    program.write(tmp_path, [line(MS)])
    usual = program.lengths[0]
    steps = [{"step_ns": usual + (at % 10 == 5) * 40 * MS} for at in range(40)]

    def advise(*lines: LineTime) -> Advice:
        write_lines(tmp_path / "lines.jsonl", split_lines(LineSteps(tuple(steps)), lines))
        opened = open_capture(tmp_path)
        (found,) = find_advice(opened, summarize_capture(opened)).tries
        return found

    half = replace(line(2 * MS, called="torch.save", line=50), error_ns=MS, samples=160)
    assert advise(half).cause == "one step in 10 takes 40 ms longer, 20 ms of it for torch.save"
    evaluating = replace(line(4 * MS, "inference", "model", line=50), error_ns=2 * MS)
    assert advise(evaluating).change.endswith("or on larger batches")
    # What waits for the GPU first, and then takes long without a wait, computes on the CPU.
    moves = replace(line(0, called="votes.to", line=48), waits=0.1)
    counts = replace(line(4 * MS, called="votes.argmax", line=50), error_ns=2 * MS)
    found = advise(counts, moves)
    assert found.line is not None
    assert found.line.line == 48
    assert found.cause.endswith(" longer, on the CPU, to which line 48 moves tensors")
    assert "on the CPU" not in advise(replace(counts, waiting_ns=3 * MS, waits=1.0), moves).cause
    assert "on the CPU" not in advise(replace(counts, called="np.argmax"), moves).cause
    assert "on the CPU" not in advise(counts, replace(moves, line=52)).cause
    assert "on the CPU" not in advise(evaluating, moves).cause
    moves = replace(moves, called="mels.cpu")
    assert "on the CPU" not in advise(evaluating, moves).cause
    assert "on the CPU" in advise(replace(evaluating, called="torch.istft"), moves).cause
    # A copy that takes most itself, and not what it waits for.
    copies = replace(line(3 * MS, called="logits.cpu", line=47), waits=0.1, waiting_ns=3 * MS, error_ns=3 * MS // 2)
    found = advise(copies, replace(counts, time_ns=MS, error_ns=MS // 2), moves)
    assert found.line is not None
    assert found.line.line == 47
    assert "on the CPU" not in advise(replace(copies, called="loss.item"), moves).cause
    for passes_ns, copy in ((10 * MS, copies.place), (30 * MS, None)):
        evaluating_steps = [{**step, "inference_event_ns": (step["step_ns"] > usual) * passes_ns} for step in steps]
        rare = find_rare_steps(RunLines(LineSteps(tuple(evaluating_steps)), (copies,)))
        assert rare is not None
        assert (rare.copy and rare.copy.place) == copy
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["conditions"] = {"autocast_dtypes": ["bfloat16"], "evaluates_without_autocast": True}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert advise(evaluating).change == "do it under the autocast that training has, or less often"
    loading = replace(line(4 * MS, "data", "DataLoader.__iter__", line=50), error_ns=2 * MS)
    assert advise(loading).change.endswith("or give its DataLoader workers that stay: persistent_workers=True")
    manifest["processes"] = [{"pid": 7, "loading": {"workers": 4, "keeps_workers": True}}]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert advise(loading).change.endswith(
        "or let its sampler begin anew by itself: each epoch's first batch is waited for"
    )
    manifest["processes"][0]["loaders"] = [loader(2, keeps_workers=True), loader(4, epochs=3)]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    found = advise(loading)
    assert found.line == SourceLine("/code/train.py", 82, "make")
    assert found.change.startswith("give this DataLoader workers that stay (persistent_workers=True)")
    del manifest["processes"][0]["loaders"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    # What a trainer does in rare steps is no line of the user's own.
    fit = line(4 * MS, called="trainer.fit")
    found = advise(replace(fit, error_ns=2 * MS), replace(fit, phase="backward"))
    assert found.cause == "one step in 10 takes 40 ms longer, in trainer.fit itself"
    assert found.change == "evaluate, save or log less often, or less of it"
    reads = replace(fit, error_ns=2 * MS, waits=12.8, waiting_ns=3 * MS)
    found = advise(reads, replace(fit, phase="backward"))
    assert found.cause == "one step in 10 takes 40 ms longer, in trainer.fit, mostly waits for 128 reads from the GPU"
    assert found.change.startswith("return fewer tensors from the model")
    assert advise(replace(reads, waits=6), replace(fit, phase="backward")).cause.endswith("in trainer.fit itself")
    waits = replace(fit, phase="data", error_ns=2 * MS)
    found = advise(waits, replace(fit, phase="backward", time_ns=MS))
    assert found.cause == "one step in 10 takes 40 ms longer, in trainer.fit, mostly a wait for data"
    assert found.change.endswith("or let its sampler begin anew by itself: each epoch's first batch is waited for")
    found = advise(waits, replace(fit, phase="inference", error_ns=2 * MS), replace(fit, phase="backward", time_ns=MS))
    assert found.change == "give its evaluation's DataLoader workers that stay, or evaluate less often"
    metrics = replace(line(MS, called="np.argmax", line=70), function="compute_metrics", error_ns=MS // 2)
    found = advise(replace(fit, time_ns=3 * MS, error_ns=3 * MS // 2), replace(fit, phase="backward"), metrics)
    assert found.change.startswith("preprocess_logits_for_metrics that returns classes")
    padding = "operations.pad_across_processes._pad_across_processes"
    found = advise(replace(fit, error_ns=2 * MS, inside=padding), replace(fit, phase="backward"))
    assert found.change.startswith("preprocess_logits_for_metrics that returns classes")
    found = advise(replace(fit, error_ns=2 * MS, inside="storage._StorageBase.cpu"), replace(fit, phase="backward"))
    assert found.cause == "one step in 10 takes 40 ms longer, in trainer.fit, which saves a checkpoint"
    assert found.change == "save checkpoints less often, or less of the state"


def test_steps_that_become_shorter_say_that_the_timed_ones_were_warming_up(tmp_path: Path) -> None:
    program = equal_steps(FORWARD, wait)
    program.write(tmp_path, [line(MS)])
    usual = program.lengths[0]

    def warnings(*later: int) -> list[str]:
        steps = tuple({"step_ns": time_ns} for time_ns in (usual, *later))
        write_lines(tmp_path / "lines.jsonl", split_lines(LineSteps(steps), [line(MS)]))
        return [finding.message for finding in summarize_capture(open_capture(tmp_path)).findings]

    (said,) = warnings(*[usual // 2] * 10)
    assert said.startswith("the steps become shorter: the last 10 that were seen took 1.02 ms, ")
    # A few may still be longer, as those of lengths that have not come before.
    assert warnings(*[usual // 2] * 8, usual, usual) == [said]
    assert not warnings(*[usual // 2] * 7, usual, usual, usual)
    assert not warnings(*[usual // 2] * 9)
    warnings(*[usual // 2] * 10)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["warnings"] = ["recorded steps were faster than unprofiled ones: measure again"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert warnings(*[usual // 2] * 10) == [said]
    summary = summarize_capture(open_capture(tmp_path))
    assert describe_answer(summary, AdviceResult()).startswith("A step takes 2.042 ms (later ones 1.021 ms): ")


def test_a_try_is_of_the_shorter_steps_that_followed(tmp_path: Path) -> None:
    program = equal_steps(FORWARD, python(10 * MS), wait)
    lines = [line(10 * MS)]
    (timed,) = program.write(tmp_path, lines).tries
    usual = program.lengths[0]
    write_lines(
        tmp_path / "lines.jsonl", split_lines(LineSteps(tuple({"step_ns": usual // 2} for _ in range(11))), lines)
    )
    opened = open_capture(tmp_path)
    summary = summarize_capture(opened)
    advice = find_advice(opened, summary)
    (later,) = advice.tries
    assert later.other_step_ns == usual // 2
    assert after(later) == pytest.approx([time_ns / 2 for time_ns in after(timed)], rel=0.01)
    assert later.saves_ns is not None
    assert later.saves_ns.expected == usual // 2 - after(later)[1]
    assert " ms later on: " in describe_answer(summary, advice)


def test_plans_that_later_steps_do_without_are_no_cause(tmp_path: Path) -> None:
    program, usual = planned_attention(40 * MS, 9_000, 9_000), [line(MS)]
    steps = [{"step_ns": program.lengths[0]}, *[{"step_ns": program.lengths[0] // 2}] * 10]
    assert [one.code for one in program.write(tmp_path, usual).tries] == ["attention-plans"]
    write_lines(tmp_path / "lines.jsonl", split_lines(LineSteps(tuple(steps)), usual))
    opened = open_capture(tmp_path)
    assert not find_advice(opened, summarize_capture(opened)).tries


def test_values_that_a_rollout_reads_one_by_one_are_named_and_the_rollout_is_no_cause(tmp_path: Path) -> None:
    program = equal_steps(FORWARD, wait)
    program.write(tmp_path, [line(MS)])
    usual = program.lengths[0]
    rollout = {"step_ns": usual + 40 * MS, "inference_host_ns": 16 * MS}
    steps = (*[{"step_ns": usual, "inference_host_ns": 0}] * 3, rollout) * 10
    acting = replace(line(4 * MS, "inference", "agent", line=51), error_ns=6 * MS // 5)

    def ask(*lines: LineTime) -> tuple[AdviceResult, str]:
        write_lines(tmp_path / "lines.jsonl", split_lines(LineSteps(steps), lines))
        opened = open_capture(tmp_path)
        summary = summarize_capture(opened)
        advice = find_advice(opened, summary)
        return advice, describe_answer(summary, advice)

    reads = replace(line(4 * MS, line=50), error_ns=6 * MS // 5, waits=200.0, waiting_ns=4 * MS)
    advice, said = ask(reads, acting)
    (found,) = advice.tries
    assert (found.code, found.line and found.line.line) == ("waits", 50)
    assert found.cause == "a value is read from the GPU 800 times in one step of 4"
    assert after(found) == pytest.approx((usual + 4 * MS, usual + 6 * MS, usual + 8 * MS), rel=0.1)
    assert "on average: a value is read" in said
    # Each of them waits for a pass of the model.
    advice, said = ask(replace(reads, waits=20.0), acting)
    assert not advice.tries
    assert " ms on average: " in said
    # What calls itself an evaluation is one; others come seldom.
    advice, _ = ask(replace(acting, function="evaluate"))
    assert advice.tries[0].cause.startswith("one step in 4 takes 40 ms longer")
    steps = (*[{"step_ns": usual, "inference_host_ns": 0}] * 9, rollout) * 4
    advice, _ = ask(replace(acting, time_ns=3 * MS // 2, error_ns=MS))
    assert advice.tries[0].cause.startswith("one step in 10 takes 40 ms longer")


def test_calls_with_images_of_two_sizes_become_two(tmp_path: Path) -> None:
    program, given = separate_calls(4_000)
    one = by_code(program.write(tmp_path / "one", **given))["loop"]
    given["work"]["independent_calls"][0]["sizes"] = 2
    two = by_code(program.write(tmp_path / "two", **given))["loop"]
    assert two.change == "one call for all of one size, on what they are given stacked together"
    assert 0 < two.effect_ns < one.effect_ns


def test_a_capture_that_failed_or_that_cannot_be_replayed_gets_a_reason_and_no_try() -> None:
    for name, reason in (
        ("graph_whole.nsys2023.sqlite", "failed its self-check"),
        ("hooks.nsys2025.sqlite", "no recorded step"),
    ):
        opened = open_capture(capture(name))
        result = find_advice(opened, summarize_capture(opened))
        assert result.tries == ()
        assert result.nothing is not None
        assert reason in result.nothing


def test_an_edit_that_can_be_tried_in_a_run_with_its_command_is_proven_by_trying_it(tmp_path: Path) -> None:
    summary = Summary("run")
    evidence = Evidence(OpenedCapture(Path("run"), None, None, None), summary)
    fused = Cause("optimizer", "AdamW steps one by one", "fused=True", edit="optimizer:fused")
    assert _prove(evidence, fused) == "profkit compare RUN NEW"
    evidence.manifest = Manifest(argv=("python", "train.py"))
    assert _prove(evidence, fused) == "profkit try RUN --edit optimizer:fused"
    assert _prove(evidence, replace(fused, edit="no-wait:train.py:30")) == "profkit compare RUN NEW"
    (tmp_path / "manifest.json").write_text("{}")
    evidence.capture = OpenedCapture(tmp_path / "trace.json.gz", Run(tmp_path), None, None)
    assert _prove(evidence, fused) == "profkit compare RUN NEW"
    evidence.capture = replace(evidence.capture, path=tmp_path)
    assert _prove(evidence, replace(fused, proof="profkit memory RUN --leaks")) == "profkit memory RUN --leaks"
