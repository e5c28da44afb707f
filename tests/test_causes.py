"""Each row of the table of causes names what a capture has, and not what one that nearly has it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from profkit.analysis.causes.advice import MOST_TRIES, Advice, AdviceResult, _prove, _say_nothing, find_advice
from profkit.analysis.causes.evidence import Cause, Evidence, SourceLine
from profkit.analysis.memory.places import PartRow
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.ranks.culprit import Culprit
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import MemoryUse, Summary
from profkit.analysis.tree.modules import ModuleTime
from profkit.analysis.trials import Trial
from profkit.reading import open_capture
from profkit.run.compiled_code import Compilation, append_records
from profkit.run.edits import parse_edits
from profkit.run.lines import LineSteps, LineTime, RunLines, write_lines
from profkit.run.manifest import Manifest
from tests.allocator_reference import MIB, Block
from tests.captures import capture
from tests.conftest import ROOT
from tests.memory_captures import Training
from tests.nsys_builder import NsysBuilder
from tests.rank_builder import NCCL
from tests.step_builder import ADD, NVJET, SGEMM, SUM

MS = 1_000_000
GIB = 2**30
SOFTMAX = "void softmax_warp_forward<float, float, float, 9, false, false>(float *, const float *, int, int, int)"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)"
TANH = ADD.replace("CUDAFunctor_add<float>", "tanh_kernel_cuda")
SQRT = ADD.replace("CUDAFunctor_add<float>", "sqrt_kernel_cuda")
ZERO = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, ZeroFunctor<float>>(T1)"
CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_execute_kernel"
CONVERT = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, (bool)0, (bool)1>(cudnn::ops::nchw2nhwc_params_t)"
MISALIGNED = "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_128x64_32x6_nn_align1>(T1::Params)"
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(cutlass_80_simt_sgemm_64x64_8x5_tn_align1)"
ALIGNED = MISALIGNED.replace("align1", "align8")
TF32 = SGEMM.replace("f32f32_f32f32", "f32f32_tf32f32")
LAYER_NORM = "void at::native::vectorized_layer_norm_kernel<float, float, false>(int, T2, const T1 *)"
SCATTER = "void at::native::indexFuncLargeIndex<float, long>(T1)"
ADAMW = {"name": "AdamW", "is_torchs": True, "parameter_bytes": 4 * 10**6, "state_bytes": 8 * 10**6}
STEPS = 3


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
        self, folder: Path, lines: Sequence[LineTime] = (), conditions: dict[str, Any] | None = None, **more: Any
    ) -> AdviceResult:
        """Write a run, and return what is advised."""
        folder.mkdir(exist_ok=True)
        self.builder.write(folder / "trace.sqlite")
        steps = [{"step_ns": length} for length in self.lengths]
        manifest = {"status": "complete", "device": "cuda", "attached": {"steps": steps}, "conditions": conditions}
        (folder / "manifest.json").write_text(json.dumps(manifest | more))
        if lines:
            write_lines(folder / "lines.jsonl", RunLines(LineSteps(MS, tuple(steps)), tuple(lines)))
        opened = open_capture(folder)
        return find_advice(opened, summarize_capture(opened))

    def write_loader(self, folder: Path, lines: Sequence[LineTime] = (), *, batch_ns: int, cpu_ns: int | None) -> None:
        """Write what four workers of a data loader took for a batch each."""
        folder.mkdir(exist_ok=True)
        steps = tuple({"step_ns": length} for length in self.lengths)
        loader = LineSteps(MS, steps, batches=50, batch_ns=batch_ns, batch_cpu_ns=cpu_ns)
        write_lines(folder / "lines.jsonl", RunLines(loader, tuple(lines)))


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


def copy(duration: int) -> Action:
    """Copy from pageable memory: the call holds the host until the copy has ended."""

    def act(program: Program) -> None:
        program.now += 5_000
        start = max(program.now + 5_000, program.free + 1_000)
        program.builder.copy(program.now, duration, start=start)
        program.free = start + duration
        program.builder.rows["CUPTI_ACTIVITY_KIND_MEMCPY"][-1]["bytes"] = 60 * duration
        program.hold_host(program.free + 3_000)

    return act


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


def line(time_ns: int, phase: str | None = None, called: str | None = None, **more: Any) -> LineTime:
    """Return what a line took of a step."""
    usual = LineTime("/code/train.py", 30, "main", called, phase, "main", 100, time_ns, time_ns // 50, 0)
    return replace(usual, **more)


def by_code(result: AdviceResult) -> dict[str, Advice]:
    return {advice.code: advice for advice in result.tries}


def after(advice: Advice) -> tuple[int, int, int]:
    assert advice.after_ns is not None
    return advice.after_ns.low, advice.after_ns.expected, advice.after_ns.high


def assert_predicted(advice: Advice, truth: float, rel: float) -> None:
    low, expected, high = after(advice)
    assert low <= truth <= high
    assert expected == pytest.approx(truth, rel=rel)


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


def pageable_copy(kernels: int) -> Program:
    phases = [within(phase, launch(NVJET, 2_000, times)) for phase, times in (("forward", 100), ("backward", kernels))]
    return equal_steps(phases[0], copy(MS // 2), phases[1], wait)


def optimizer_loop() -> Program:
    phases = within("forward", launch(NVJET, 100_000, 10)), within("optimizer", launch(ADD, 2_000, 400))
    return equal_steps(*phases, wait)


def small_kernels(name: str) -> Program:
    return equal_steps(within("forward/model/layer", *[launch(NVJET, 50_000), launch(name, 100_000)] * 10), wait)


def backward_that_waits() -> Program:
    backward = within("backward", *[launch(NVJET, 20_000), python(50_000), wait] * 20)
    return equal_steps(within("forward", launch(NVJET, 20_000, 20)), backward)


def passes_of(duration: int, *, waits: bool = False) -> Program:
    kernels = [launch(name, duration) for name in (NVJET, ADD, NVJET, SUM)] * 40
    phases = [within(phase, *kernels, *[wait] * waits) for phase in ("forward", "backward")]
    return equal_steps(*phases, wait)


IMAGES = {"lines": [line(MS // 2, called="images.to", waits=1)], "processes": [{"loading": {"workers": 4}}]}
BATCH = {"lines": [line(4 * MS, called="make_batch")]}
TRAINER = {"lines": [line(4 * MS, called="trainer.fit"), line(MS, "backward", "trainer.fit")]}


@pytest.mark.parametrize(
    ("code", "program", "given"),
    [
        # The line calls a trainer, the GPU hides it.
        ("python", equal_steps(python(4 * MS), within("backward", launch(NVJET, 100_000, 20), wait)), TRAINER),
        ("python", equal_steps(within("forward", launch(NVJET, 300_000, 20)), python(4 * MS), wait), BATCH),
        # Nothing comes after the copy.
        ("pageable-copy", pageable_copy(0), IMAGES),
        ("optimizer", optimizer_loop(), {"conditions": {"optimizers": [{**ADAMW, "name": "Muon"}]}}),
        ("tf32", products(NVJET), {}),
        # TF32 is the change that keeps more of the numbers; these are outside of autocast on purpose.
        ("autocast", products(SGEMM), {}),
        ("autocast", products(TF32), {"conditions": {"autocast_dtypes": ["bfloat16"]}}),
        ("sizes", products(ALIGNED), {}),
        # Without tensor cores every size is aligned to one number.
        ("sizes", products(SIMT), {}),
        ("attention", blocks("attn", (NVJET, 100_000), (FLASH, 100_000)), {}),
        ("attention", blocks("gate", (NVJET, 100_000), (SOFTMAX, 100_000)), {}),
        # Gathering and scattering take as long in compiled code.
        ("compile", small_kernels(SCATTER), {}),
        ("anomaly", backward_that_waits(), {"conditions": {"anomaly_detection": False}}),
        # No line is known that could wait less.
        ("launches", passes_of(3_000, waits=True), {}),
    ],
)
def test_what_nearly_has_a_cause_does_not_have_it(
    tmp_path: Path, code: str, program: Program, given: dict[str, Any]
) -> None:
    assert code not in by_code(program.write(tmp_path, **given))


@pytest.mark.parametrize(
    ("code", "program", "given"),
    [
        ("sizes", products(MISALIGNED), {}),
        ("compile", small_kernels(ADD), {}),
        ("anomaly", backward_that_waits(), {"conditions": {"anomaly_detection": True}}),
    ],
)
def test_what_has_a_cause_has_it_named(tmp_path: Path, code: str, program: Program, given: dict[str, Any]) -> None:
    assert code in by_code(program.write(tmp_path, **given))


def test_python_outside_of_the_phases_is_named_by_its_line_and_leaves_the_rest_of_the_step(tmp_path: Path) -> None:
    program = equal_steps(python(4 * MS), FORWARD)
    result = program.write(tmp_path, [line(4 * MS, called="make_batch"), line(MS // 100, line=31)])
    (advice,) = result.tries
    assert (advice.code, advice.line and advice.line.line, advice.edit) == ("python", 30, "no-host:/code/train.py:30")
    assert_predicted(advice, program.lengths[0] - 4 * MS, 0.1)
    assert result.together_ns is None


def test_a_tensor_made_on_the_cpu_is_made_on_the_gpu_without_its_copy(tmp_path: Path) -> None:
    program = equal_steps(python(4 * MS), copy(2 * MS), FORWARD)
    (advice,) = program.write(tmp_path, [line(4 * MS, called="torch.randn")]).tries
    assert (advice.code, advice.change) == ("made-on-cpu", 'torch.randn(…, device="cuda")')
    low, _, high = after(advice)
    assert low - 10_000 <= program.lengths[0] - 6 * MS - 18_000 <= high


@pytest.mark.parametrize(
    ("called", "work_before", "is_named"),
    [("torch.tensor", True, True), ("make_batch", True, False), ("torch.tensor", False, True)],
)
def test_a_tensor_of_pythons_numbers_is_named_where_the_move_that_waits_leaves_the_gpu_without_work(
    tmp_path: Path, called: str, *, work_before: bool, is_named: bool
) -> None:
    """Without work before them the first of the three steps is short; the others show what is lost."""
    kernels = within("forward", launch(NVJET, 200_000, 20))
    program = equal_steps(
        *(python(MS // 2), copy(10_000), python(MS // 4), kernels),
        before=[launch(NVJET, 200_000, 20)] if work_before else (),
    )
    lines = [line(MS // 2, called=called, line=20), line(MS, called="ids.to", line=31, waits=1, waiting_ns=MS)]
    advice = by_code(program.write(tmp_path, lines))
    assert ("python" in advice) == is_named
    if is_named:
        assert advice["python"].line == SourceLine("/code/train.py", 20, "main")
        assert advice["python"].edit == "no-wait:/code/train.py:31"
        assert_predicted(advice["python"], 20 * 201_000, 0.02)


def test_a_copy_from_pageable_memory_holds_the_host_where_the_gpu_is_late_for_it(tmp_path: Path) -> None:
    advice = by_code(pageable_copy(100).write(tmp_path, **IMAGES))["pageable-copy"]
    assert advice.line == SourceLine("/code/train.py", 30, "main")


@pytest.mark.parametrize(("data_ns", "is_named"), [(5 * MS, True), (20_000, False)])
def test_a_loader_is_named_with_the_line_of_its_dataset(tmp_path: Path, data_ns: int, *, is_named: bool) -> None:
    program = equal_steps(within("data", python(data_ns)), FORWARD)
    dataset = line(data_ns // 3, "data", "Image.open", file="/code/data.py", line=12, function="__getitem__")
    loop = line(2 * data_ns // 3, "data", "next", line=88)  # the loader itself, which makes a batch of the images
    advice = by_code(program.write(tmp_path, [dataset, loop]))
    assert ("loader" in advice) == is_named
    if is_named:
        assert advice["loader"].line == SourceLine("/code/data.py", 12, "__getitem__")
        assert "has no workers" in advice["loader"].cause
        assert advice["loader"].edit == "workers:5"
        low, _, high = after(advice["loader"])
        assert low <= program.lengths[0] - data_ns + 250_000 <= high


def test_workers_are_advised_for_the_step_without_waits_however_much_of_them_the_gpu_hides(tmp_path: Path) -> None:
    """A worker takes 20 ms for a batch, and the GPU 5 ms for a step: 4 workers just keep up, in bursts 8 do."""
    loading = {"pid": 7, "loading": {"workers": 1, "batches_per_step": 1.0}}
    for data_ns in (6 * MS, 17 * MS):
        program = equal_steps(within("data", python(data_ns)), launch(NVJET, 5 * MS))
        folder = tmp_path / str(data_ns)
        program.write_loader(folder, batch_ns=20 * MS, cpu_ns=20 * MS)
        advice = by_code(program.write(folder, conditions={"cpu_count": 64}, processes=[loading]))
        assert advice["loader"].edit == "workers:8"


@pytest.mark.parametrize(
    ("cpus", "cpu_ns", "edit"),
    [
        (16, 20 * MS, "workers:16"),
        (8, 20 * MS, "workers:8"),
        (4, 20 * MS, None),
        (8, 40 * MS, None),
        (4, 10 * MS, "workers:8"),
    ],
)
def test_more_workers_are_no_cure_where_the_cpus_have_no_room_for_them(
    tmp_path: Path, cpus: int, cpu_ns: int, edit: str | None
) -> None:
    """Four workers take 20 ms for a batch, on one CPU each or on several, and the rest of the step takes 2 ms."""
    program = equal_steps(within("data", python(3 * MS)), FORWARD)
    program.write_loader(tmp_path, batch_ns=20 * MS, cpu_ns=cpu_ns)
    loading = {"pid": 7, "loading": {"workers": 4, "batches_per_step": 1.0}}
    advice = by_code(program.write(tmp_path, conditions={"cpu_count": cpus}, processes=[loading]))
    assert ({"loader": advice["loader"].edit} if "loader" in advice else {}) == ({"loader": edit} if edit else {})


def test_a_wait_is_a_cause_only_if_the_gpu_runs_out_of_work_for_it(tmp_path: Path) -> None:
    program = equal_steps(within("forward", *[launch(NVJET, 60_000, 5), wait, python(60_000)] * 8))
    late = program.write(tmp_path / "late", [line(MS, "forward", "y.mean().item", waits=8, waiting_ns=MS)])
    advice = by_code(late)["waits"]
    assert advice.cause == "y.mean().item() waits for the GPU, 8 times a step"
    assert (advice.edit, advice.evidence["waits"]) == ("no-wait:/code/train.py:30", 8)
    program = equal_steps(within("forward", launch(NVJET, 300_000, 40), wait))
    last = program.write(tmp_path / "last", [line(MS, "forward", "loss.item", waits=1, waiting_ns=MS)])
    assert last.tries == ()
    assert last.nothing == "Nothing found that would save more than 2 %: the step is 100 % arithmetic."


ITEM = line(8 * MS, None, "loss.item", line=62, waits=1, waiting_ns=8 * MS)
PACK = line(2 * MS, called="np.argsort", line=56)


def test_a_wait_for_a_gpu_that_python_made_late_is_not_the_cause(tmp_path: Path) -> None:
    """Without the wait Python would pack while the GPU computes, so that either change saves as much."""
    kernels = within("forward", launch(NVJET, 100_000, 100))
    for number, actions in enumerate(((python(2 * MS), kernels, wait), (python(2 * MS), copy(20_000), kernels, wait))):
        result = equal_steps(*actions).write(tmp_path / str(number), [PACK, ITEM])
        assert [(advice.code, advice.line) for advice in result.tries] == [
            ("python", SourceLine("/code/train.py", 56, "main"))
        ]
    (alone,) = equal_steps(*actions).write(tmp_path / "alone", [ITEM]).tries
    assert alone.code == "waits"


def test_a_line_that_reads_a_value_does_not_make_the_wait_of_a_line_that_moves_a_batch(tmp_path: Path) -> None:
    """The copy comes first; without the last wait of the step, Python makes the next batch while the GPU computes."""
    program = equal_steps(python(2 * MS), copy(20_000), within("forward", launch(NVJET, 100_000, 100)), wait)
    (advice,) = program.write(tmp_path, [ITEM]).tries
    assert_predicted(advice, program.lengths[0] - 2 * MS, 0.01)


def test_an_optimizer_in_a_loop_is_fused_where_torch_can(tmp_path: Path) -> None:
    advice = by_code(optimizer_loop().write(tmp_path, conditions={"optimizers": [ADAMW]}))["optimizer"]
    assert (advice.edit, advice.module) == ("optimizer:fused", "optimizer")


def test_fp32_products_are_named_with_their_module(tmp_path: Path) -> None:
    advice = by_code(products(SGEMM).write(tmp_path))["tf32"]
    assert (advice.module, advice.edit) == ("head", "tf32")
    assert advice.cause == "4 matrix products run in fp32, without tensor cores, 3 of them in one module"
    low, expected, high = after(advice)
    assert low < 4 * MS / 7.4 < expected < high < 1.6 * MS


def test_autocast_comes_after_the_other_tries_whatever_it_saves(tmp_path: Path) -> None:
    program = equal_steps(python(2 * MS), within("forward/model/head", launch(TF32, MS, 8)), wait)
    result = program.write(tmp_path, [line(2 * MS, called="make_batch")])
    assert [advice.code for advice in result.tries] == ["python", "autocast"]
    other, last = result.tries
    assert (last.module, last.edit) == ("head", "autocast:bf16")
    assert last.effect_ns > other.effect_ns > 0


def _write_work(folder: Path, flops: dict[str, float], least_bytes: int = 1_000) -> None:
    """Write what ranges of a step's forward pass do, as they lie in one another."""
    names = {path: ["forward", "model", *([path] if path else [])] for path in flops}
    usual = {"other_flops": 0, "needed_flops": 0, "instances": 1, "varies": False, "least_bytes": least_bytes}
    counted = {path: {"flops": round(count), "flops_by_dtype": {"bf16": round(count)}} for path, count in flops.items()}
    ranges = [{"path": names[path], **usual, **counted[path]} for path in flops]
    content = {"version": 1, "source": "counted", "dtype": "bf16", "ranges": ranges, "model_flops": 0, "missing": []}
    folder.mkdir()
    (folder / "work.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("neighbour", "least_bytes", "expected_ns"),
    [
        (ALIGNED, 1_000, 800_000),  # 400 GFLOP at the neighbour's 500 TFLOP/s
        (ALIGNED, 4 * 10**9, 1_042_000),  # at 0.8 of the H200's 4.8 TB/s
        (MISALIGNED, 1_000, 674_000),  # no neighbour shows a rate: 0.6 of the peak
        (FLASH, 1_000, 674_000),  # the neighbour's FLOPs are not all products'
    ],
)
def test_padded_products_are_as_fast_as_their_neighbours(
    tmp_path: Path, neighbour: str, least_bytes: int, expected_ns: int
) -> None:
    head = within("forward/model/head", launch(MISALIGNED, 2 * MS, 2))
    body = within("forward/model/body", launch(NVJET, MS), launch(neighbour, MS))
    folder = tmp_path / "run"
    _write_work(folder, {"": 1_400e9, "head": 400e9, "body": 1_000e9}, least_bytes)
    program = equal_steps(head, body, wait)
    advice = by_code(program.write(folder, gpu="NVIDIA H200"))["sizes"]
    body_ns = round(0.45 * MS) if neighbour == MISALIGNED else MS
    low, expected, high = after(advice)
    assert low < expected < high
    assert expected == pytest.approx(MS + body_ns + expected_ns, rel=0.02)


def test_attention_that_is_written_out_is_named(tmp_path: Path) -> None:
    written = [(NVJET, 100_000), (ADD, 100_000), (SOFTMAX, 100_000), (NVJET, 100_000)]
    advice = by_code(blocks("attn", *written).write(tmp_path))["attention"]
    assert (advice.module, advice.change) == ("h.*.attn", "F.scaled_dot_product_attention")
    low, expected, high = after(advice)
    assert low < expected < high


@pytest.mark.parametrize(
    ("lengths", "is_named"), [([1.0] * 8 + [1.6, 3.0], True), ([0.6, 0.8, 1.0, 1.2, 1.4] * 2, False)]
)
def test_two_long_steps_of_ten_hide_no_cause_and_steps_that_all_differ_do(
    tmp_path: Path, lengths: Sequence[float], *, is_named: bool
) -> None:
    program = equal_steps(within("forward", launch(NVJET, MS, 2)), within("optimizer", launch(ZERO, 150_000)), wait)
    steps = [{"step_ns": round(length * program.lengths[0])} for length in lengths]
    assert ("zero-grad" in by_code(program.write(tmp_path, attached={"steps": steps}))) == is_named


@pytest.mark.parametrize(
    ("kernels", "code"),
    [
        ([(ADD, 100_000)] * 6 + [(TANH, 100_000)], "activation"),
        ([(TANH, 100_000)], None),
        ([(ADD, 3_000)] * 60, "loop"),
        ([(ADD, 3_000)] * 3, None),
        ([(SUM, 100_000), *[(ADD, 100_000)] * 3, (SQRT, 9_000)], "norm"),
        ([(LAYER_NORM, 100_000)], None),
    ],
)
def test_a_chain_of_small_kernels_in_a_module_is_named_by_what_it_is(
    tmp_path: Path, kernels: Sequence[tuple[str, int]], code: str | None
) -> None:
    advice = by_code(blocks("act", *kernels).write(tmp_path))
    assert {"activation", "loop", "norm", "chain"} & set(advice) == ({code} if code else set())
    if code:
        assert (advice[code].module, advice[code].evidence["kernels"]) == ("h.*.act", 4 * len(kernels))


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([line(MS, "forward", "x.add")], 30),
        ([line(MS, "forward", "x.to", waiting_ns=MS), line(MS, "forward", "x.add", line=31)], 31),
        ([line(MS, "forward", "trainer.fit"), line(MS, "backward", "trainer.fit")], None),
    ],
)
def test_a_chain_outside_of_modules_is_named_by_a_line_of_the_users_or_not_at_all(
    tmp_path: Path, lines: Sequence[LineTime], named: int | None
) -> None:
    program = equal_steps(within("forward", launch(NVJET, 100_000), launch(ADD, 100_000, 8)), wait)
    advice = by_code(program.write(tmp_path, lines))
    place = advice["chain"].line if "chain" in advice else None
    assert (None if place is None else place.line) == named


def test_conversions_zeroed_gradients_and_allocations_are_named_by_kernels_and_calls(tmp_path: Path) -> None:
    def convolutions(conversion: str, zero: str) -> list[Action]:
        module = within("forward/model/conv", launch(conversion, 200_000), launch(CONVOLUTION, 500_000))
        return [module, within("optimizer", launch(zero, 200_000)), wait]

    advice = by_code(equal_steps(allocate(MS), *convolutions(CONVERT, ZERO)).write(tmp_path / "all"))
    assert set(advice) == {"channels-last", "zero-grad", "allocations"}
    assert advice["channels-last"].module == "conv"
    assert equal_steps(*convolutions(NVJET, ADD)).write(tmp_path / "none").tries == ()


@pytest.mark.parametrize(
    ("conditions", "fills", "is_named"),
    [
        ({"deterministic_algorithms": True}, 100, True),
        ({"deterministic_algorithms": True, "fills_uninitialized_memory": True}, 100, True),
        ({"deterministic_algorithms": True, "fills_uninitialized_memory": False}, 100, False),
        ({"deterministic_algorithms": False, "fills_uninitialized_memory": True}, 100, False),
        ({"deterministic_algorithms": True}, 4, False),
    ],
)
def test_memory_that_deterministic_algorithms_fill_is_a_cause_where_its_fills_take_long(
    tmp_path: Path, conditions: dict[str, bool], fills: int, *, is_named: bool
) -> None:
    fill = launch("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", 4_000)
    program = equal_steps(within("forward", launch(NVJET, MS, 4), *[fill, launch(NVJET, 10_000)] * fills), wait)
    advice = by_code(program.write(tmp_path, conditions=conditions))
    assert ("deterministic" in advice) == is_named
    if is_named:
        assert (advice["deterministic"].edit, advice["deterministic"].evidence["launches"]) == (None, fills)
        low, expected, high = after(advice["deterministic"])
        assert low < program.lengths[0] - fills * 5_000 < expected < high < program.lengths[0]


@pytest.mark.parametrize(("fills", "has_sums", "is_named"), [(6, True, True), (6, False, False), (3, True, False)])
def test_gradients_filled_one_by_one_are_those_that_backward_adds_to(
    tmp_path: Path, fills: int, *, has_sums: bool, is_named: bool
) -> None:
    """A sum moves three times the bytes of a fill, and goes with it."""
    kind = "at::native::CUDAFunctor_add<float>" if has_sums else "gelu_kernel"
    sums = launch(f"void at::native::vectorized_elementwise_kernel<4, {kind}>", 300_000, fills)
    fill = launch("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", 100_000, fills)
    program = equal_steps(fill, within("forward", launch(NVJET, MS)), within("backward", launch(NVJET, MS), sums), wait)
    advice = by_code(program.write(tmp_path))
    assert ("zero-grad" in advice) == is_named
    if is_named:
        low, expected, high = after(advice["zero-grad"])
        assert low <= expected < high < program.lengths[0]
        assert expected == pytest.approx(program.lengths[0] - fills * 400_000, rel=0.05)


def test_a_step_that_launches_limit_is_replayed_unless_a_wait_forbids_it(tmp_path: Path) -> None:
    late = by_code(passes_of(3_000).write(tmp_path / "free"))["launches"]
    assert (late.edit, late.evidence["launches"]) == ("compile:reduce-overhead", 320)
    reads = [line(MS, "forward", "y.max().item", waits=1), line(MS, "backward", "float", waits=1, line=40)]
    waiting = by_code(passes_of(3_000, waits=True).write(tmp_path / "known", reads))["launches"]
    assert waiting.line is not None
    assert waiting.change == 'no wait at train.py:30, which graphs forbid; then model.compile(mode="reduce-overhead")'
    calls = [reads[0], replace(reads[1], called="super().compute_loss")]
    assert "launches" not in by_code(passes_of(3_000, waits=True).write(tmp_path / "called", calls)), "whose wait is it"
    busy = by_code(passes_of(40_000).write(tmp_path / "busy"))["compile"]
    assert (busy.edit, busy.evidence["small_ns"]) == ("compile", 160 * 40_000)
    assert after(busy)[1] == pytest.approx(160 * 40_000 * 1.65, rel=0.05)


def test_compiling_a_model_leaves_the_loss_outside_of_it_as_it_is(tmp_path: Path) -> None:
    layer = within("forward/model/layer", *[launch(NVJET, 50_000), launch(ADD, 40_000)] * 10)
    program = equal_steps(layer, within("backward", launch(SOFTMAX, 300_000)), wait)
    advice = by_code(program.write(tmp_path))["compile"]
    assert advice.evidence["small_ns"] == 10 * 40_000
    assert after(advice)[1] == pytest.approx(program.lengths[0] - 0.35 * 10 * 40_000, rel=0.02)


@pytest.mark.parametrize(("launches", "can_be"), [((160, 160, 160), True), ((160, 162, 160), False)])
def test_a_graph_holds_no_step_whose_kernels_change(tmp_path: Path, launches: Sequence[int], *, can_be: bool) -> None:
    steps = [[within(phase, launch(NVJET, 3_000, n)) for phase in ("forward", "backward")] for n in launches]
    assert ("launches" in by_code(Program(*([*step, wait] for step in steps)).write(tmp_path))) == can_be


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


def _write_pauses(
    folder: Path, name: str, counter: str, *, in_steps: int, counted: int, after_ns: int = 0
) -> dict[str, Advice]:
    """Write a run whose host pauses for 2 ms in each recorded step: in some of them in a range up to ``after_ns``."""
    kernels = launch(NVJET, 50_000, 10)
    pauses = [python(2 * MS - after_ns, name if number < in_steps else None) for number in range(STEPS)]
    program = Program(*([within("forward", kernels, pause, python(after_ns), kernels, wait)] for pause in pauses))
    during = {"steps": [{"step_ns": length} for length in program.lengths], "during": {counter: counted}}
    lines = [line(2 * MS, "forward", "gc.collect", line=44, samples=9), line(2 * MS, "forward", "scale", line=50)]
    return by_code(program.write(folder, lines, attached=during, processes=[{"pid": 7}]))


@pytest.mark.parametrize(("in_steps", "counted"), [(STEPS, STEPS), (STEPS - 1, STEPS), (1, STEPS), (STEPS, 1)])
def test_garbage_is_a_cause_where_most_steps_collect_it(tmp_path: Path, in_steps: int, counted: int) -> None:
    advice = _write_pauses(tmp_path, "collecting garbage", "full_collections", in_steps=in_steps, counted=counted)
    assert ("garbage" in advice) == (min(in_steps, counted) > 1)
    if "garbage" in advice:
        assert advice["garbage"].line == SourceLine("/code/train.py", 44, "main")
        assert advice["garbage"].evidence["paused_ns"] == 2 * MS
        assert_predicted(advice["garbage"], 20 * 51_000 + 20_000, 0.05)


@pytest.mark.parametrize("is_again", [True, False])
def test_a_step_that_compiles_again_every_time_is_named_with_the_function_and_the_reason(
    tmp_path: Path, *, is_again: bool
) -> None:
    reason = "name == 'step 1'              # return loss * 2  # loss.py:13 in scale"
    compiled = Compilation("7-1", 7, "0/3", "forward", "loss.py:12 scale", 2, True, is_again, 2 * MS, reason=reason)
    append_records(tmp_path / "compiled.jsonl", [compiled])
    counts = {"in_steps": STEPS, "counted": STEPS, "after_ns": MS // 2}
    advice = _write_pauses(tmp_path, "compiling scale", "compiled_graphs", **counts)
    assert ("recompile" in advice) == is_again
    assert "python" not in advice
    if is_again:
        assert advice["recompile"].line == SourceLine("loss.py", 12, "scale")
        assert advice["recompile"].cause.endswith("compiles again in most steps: name == 'step 1'")
        assert after(advice["recompile"])[1] == pytest.approx(20 * 51_000 + 20_000, rel=0.05)


@pytest.mark.parametrize(("is_set", "blocks"), [(True, True), (False, True), (True, False)])
def test_launches_that_block_are_a_cause_if_the_host_is_late_for_it(
    tmp_path: Path, *, is_set: bool, blocks: bool
) -> None:
    program = equal_steps(within("forward", launch(NVJET, 10_000, 200, blocks=blocks)), wait)
    advice = by_code(program.write(tmp_path, conditions={"launch_blocking": is_set}))
    assert ("launch-blocking" in advice) == (is_set and blocks)
    if is_set and blocks:
        assert_predicted(advice["launch-blocking"], 200 * 11_000 + 20_000, 0.15)


def small_passes(passes: int, duration: int) -> Program:
    """Steps of passes of 50 kernels, for each of which the host takes 8 µs, and one kernel of the optimizer."""
    phases = [within(phase, launch(NVJET, duration, 50)) for phase in ("forward", "backward")]
    return equal_steps(*phases * passes, within("optimizer", launch(ADD, 2_000)), wait)


def _advise_batch(program: Program, folder: Path, held: int = 10 * GIB) -> Advice | None:
    conditions = {"reserved_peak_bytes": held, "gpu_memory_bytes": 140 * GIB}
    return by_code(program.write(folder, conditions=conditions)).get("batch")


def test_a_batch_is_small_where_the_gpu_waits_for_python_and_memory_has_room(tmp_path: Path) -> None:
    program = small_passes(1, 3_000)
    batch = _advise_batch(program, tmp_path / "small")
    assert batch is not None
    assert (batch.edit, batch.line) == ("batch:×2", None)
    assert batch.costs is not None
    assert_predicted(batch, program.lengths[0] / 2, 0.2)
    assert _advise_batch(small_passes(1, 20_000), tmp_path / "busy") is None
    assert _advise_batch(program, tmp_path / "full", held=60 * GIB) is None
    # Of a step of more samples, what was measured says nothing of the effect.
    assert batch.saves_ns is not None
    longer = Trial(("batch:×2",), processes=3, change_ns=0.5 * MS, batch_factor=2.0)
    assert replace(batch, measured=longer).effect_ns == batch.saves_ns.expected
    assert replace(batch, measured=replace(longer, batch_factor=1.0)).effect_ns == -0.5 * MS


def test_small_passes_of_one_step_become_fewer_without_another_batch(tmp_path: Path) -> None:
    batch = _advise_batch(small_passes(4, 3_000), tmp_path / "four")
    assert batch is not None
    assert batch.change == "passes of 2 times the samples, and 2 times fewer of them"
    assert (batch.edit, batch.costs) == (None, None)
    assert _advise_batch(small_passes(3, 3_000), tmp_path / "three") is None


@pytest.mark.parametrize(("held", "is_named"), [(30 * GIB, True), (120 * GIB, False)])
def test_checkpoints_are_needless_where_half_of_the_memory_is_free(
    tmp_path: Path, held: int, *, is_named: bool
) -> None:
    forward = [within(f"forward/model/{block}", launch(NVJET, MS // 2)) for block in ("h.0", "h.1")]
    backward = [
        within(f"backward/model/{block}", within(f"recompute/{block}", launch(NVJET, MS // 2)), launch(NVJET, MS))
        for block in ("h.1", "h.0")
    ]
    program = equal_steps(*forward, *backward, wait)
    conditions = {"reserved_peak_bytes": held, "gpu_memory_bytes": 140 * GIB}
    advice = by_code(program.write(tmp_path, conditions=conditions))
    assert ("recompute" in advice) == is_named
    if is_named:
        assert advice["recompute"].module == "h.*"
        assert_predicted(advice["recompute"], program.lengths[0] - MS, 0.02)


@pytest.mark.parametrize(("grown", "codes"), [(100 * 2**20, ["growth"]), (2**18, [])])
def test_memory_that_grows_ends_the_run_and_comes_first(tmp_path: Path, grown: int, codes: list[str]) -> None:
    program = equal_steps(within("forward", launch(NVJET, MS, 5)), wait)
    steps = [{"step_ns": length} for length in program.lengths]
    attached = {"steps": steps, "during": {"allocated_bytes": STEPS * grown}}
    conditions = {"reserved_peak_bytes": 30 * GIB, "gpu_memory_bytes": 140 * GIB}
    result = program.write(tmp_path, conditions=conditions, attached=attached)
    assert [advice.code for advice in result.tries] == codes
    for advice in result.tries:
        assert advice.cause == "every step keeps 100.0 MiB more: memory is full in 1,126 steps"
        assert advice.saves_bytes is not None
        assert advice.saves_bytes.expected == grown


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
    assert summary.limits.refusal is not None
    assert _say_nothing(Evidence(opened, summary)) == "Nothing found that would save more than 2 %.", "no refusal"
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
    ("path", "said"),
    [
        (ROOT / "tests" / "light_records" / "ddp-data", "Nothing is predicted: no trace was recorded."),
        (ROOT / "traces" / "tiny-train-cpu.nsys2023.sqlite", "Nothing is predicted: no work of a GPU was recorded."),
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


def test_nothing_found_says_of_the_step_what_its_tree_says(tmp_path: Path) -> None:
    """Steps half as long as the recorded ones are not what was replayed: the tree rests on the GPU's time."""
    program = equal_steps(within("forward", python(12 * MS), launch(NVJET, 300_000, 40), wait))
    result = program.write(tmp_path, attached={"steps": [{"step_ns": 12_100_000}] * 10})
    summary = summarize_capture(open_capture(tmp_path))
    assert summary.tree is not None
    assert summary.tree.basis == "gpu"
    assert result.nothing is not None
    assert result.nothing.endswith(f"the step is {100 * summary.tree.parts[0].time_ns / 12_100_000:.0f} % arithmetic.")


@pytest.mark.parametrize(("early", "late"), [(2, 1), (0, 1), (0, 2)])
def test_gradients_that_are_summed_after_each_pass_need_be_so_after_the_last(
    tmp_path: Path, early: int, late: int
) -> None:
    kernels = launch(NVJET, 100_000, 10)
    passes = [
        (within("forward", kernels), within("backward", kernels, launch(NCCL, 500_000, collectives)))
        for collectives in (early, late)
    ]
    program = equal_steps(*passes[0], *passes[1], wait)
    advice = by_code(program.write(tmp_path))
    assert ("no-sync" in advice) == (early > 0)
    if early:
        assert advice["no-sync"].evidence["collectives"] == early
        assert_predicted(advice["no-sync"], program.lengths[0] - early * 501_000, 0.05)


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
    program.write_loader(folder, [line(MS)], batch_ns=10 * MS, cpu_ns=cpu_ns)
    loading = {"pid": 7, "loading": {"workers": 4}}
    return " ".join(program.write(folder, conditions={"cpu_count": 16, **conditions}, processes=[loading]).notes)


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


def test_an_edit_that_can_be_tried_in_a_run_with_its_command_is_proven_by_trying_it() -> None:
    summary = Summary("run")
    evidence = Evidence(OpenedCapture(Path("run"), None, None, None), summary)
    fused = Cause("optimizer", "AdamW steps one by one", "fused=True", edit="optimizer:fused")
    assert _prove(evidence, fused) == "profkit compare RUN NEW"
    evidence.manifest = Manifest(argv=("python", "train.py"))
    assert _prove(evidence, fused) == "profkit try RUN --edit optimizer:fused"
    assert _prove(evidence, replace(fused, edit="no-wait:train.py:30")) == "profkit compare RUN NEW"
    assert _prove(evidence, replace(fused, proof="profkit memory RUN --leaks")) == "profkit memory RUN --leaks"
