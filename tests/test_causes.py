"""Each row of the table of causes names what a capture has, and not what one that nearly has it lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
LAYER_NORM = "void at::native::vectorized_layer_norm_kernel<float, float, false>(int, T2, const T1 *)"
ADAMW = {"name": "AdamW", "is_torchs": True, "parameter_bytes": 4 * 10**6, "state_bytes": 8 * 10**6}
STEPS = 3


class Program:
    """Steps of a program on a machine with one stream: the host launches, and the GPU follows.

    A launch takes 5 µs of Python and 3 µs in its call; a kernel begins 1.5 µs later, or 1 µs after the one before.
    """

    def __init__(self) -> None:
        self.builder, self.now, self.free = NsysBuilder(), 1_000, 0
        self.builder.add("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
        self.lengths: list[int] = []

    @contextmanager
    def range(self, path: str) -> Iterator[None]:
        names, opened = path.split("/"), self.now
        self.now += 10 * len(names)
        yield
        self.now += 10 * len(names)
        for depth, name in enumerate(names):
            self.builder.range(name, opened + depth, self.now - depth)

    @contextmanager
    def step(self) -> Iterator[None]:
        began = self.now
        yield
        self.now += 1_000
        self.builder.range(f"step {len(self.lengths)}", began, self.now)
        self.lengths.append(self.now - began)

    def launch(self, name: str, duration: int, times: int = 1) -> None:
        for _ in range(times):
            self.now += 5_000
            correlation = self.builder.call(self.now, duration=3_000)
            self.now += 3_000
            start = max(self.now + 1_500, self.free + 1_000)
            self.builder.kernel(None, duration, name=name, start=start, correlation=correlation)
            self.free = start + duration

    def wait(self) -> None:
        self.now += 2_000
        ended = max(self.now + 2_000, self.free + 8_000)
        self.builder.call(self.now, duration=ended - self.now, name="cudaStreamSynchronize_v3020")
        self.now = ended

    def copy(self, duration: int) -> None:
        """Copy from pageable memory: the call holds the host until the copy has ended."""
        self.now += 5_000
        start = max(self.now + 5_000, self.free + 1_000)
        self.builder.copy(self.now, duration, start=start)
        self.free = start + duration
        self.builder.rows["CUPTI_ACTIVITY_KIND_MEMCPY"][-1]["bytes"] = 60 * duration
        ended = self.free + 3_000
        self.builder.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["end"] = ended
        self.now = ended

    def allocate(self, duration: int) -> None:
        self.now += 2_000
        self.builder.call(self.now, duration=duration, name="cudaMalloc_v3020")
        self.now += duration

    def write(
        self, folder: Path, lines: Sequence[LineTime] = (), conditions: dict[str, Any] | None = None, **more: Any
    ) -> AdviceResult:
        """Write a run, and return what is advised."""
        self.builder.write(folder / "trace.sqlite")
        steps = [{"step_ns": length} for length in self.lengths]
        manifest = {"status": "complete", "device": "cuda", "attached": {"steps": steps}, "conditions": conditions}
        (folder / "manifest.json").write_text(json.dumps(manifest | more))
        if lines:
            write_lines(folder / "lines.jsonl", RunLines(LineSteps(MS, tuple(steps)), tuple(lines)))
        opened = open_capture(folder)
        return find_advice(opened, summarize_capture(opened))


def line(time_ns: int, phase: str | None = None, called: str | None = None, **more: Any) -> LineTime:
    """Return what a line took of a step."""
    known: dict[str, Any] = {
        "file": "/work/train.py",
        "line": 30,
        "function": "main",
        "thread": "main",
        "samples": 100,
        "error_ns": time_ns // 50,
        "waits": 0,
    }
    return LineTime(**{**known, "called": called, "phase": phase, "time_ns": time_ns, **more})


def found(result: AdviceResult) -> dict[str, Advice]:
    return {advice.code: advice for advice in result.tries}


def after(advice: Advice) -> tuple[int, int, int]:
    assert advice.after_ns is not None
    return advice.after_ns.low, advice.after_ns.expected, advice.after_ns.high


def test_python_outside_of_the_phases_is_named_by_its_line_and_leaves_the_rest_of_the_step(tmp_path: Path) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            program.now += 4 * MS
            with program.range("forward"):
                program.launch(NVJET, 100_000, 20)
                program.wait()
    result = program.write(tmp_path, [line(4 * MS, called="make_batch"), line(MS // 100, line=31)])
    (advice,) = result.tries
    assert (advice.code, advice.line and advice.line.line, advice.edit) == ("python", 30, "no-host:/work/train.py:30")
    low, expected, high = after(advice)
    truth = program.lengths[0] - 4 * MS
    assert low <= truth <= high
    assert expected == pytest.approx(truth, rel=0.1)
    assert result.together_ns is None


def test_a_line_that_calls_a_trainer_is_no_python_of_its_own(tmp_path: Path) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            program.now += 4 * MS
            with program.range("backward"):
                program.launch(NVJET, 100_000, 20)
                program.wait()
    lines = [line(4 * MS, called="trainer.fit"), line(MS, "backward", "trainer.fit")]
    assert "python" not in found(program.write(tmp_path, lines))


def test_python_that_the_gpu_hides_is_no_cause(tmp_path: Path) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("forward"):
                program.launch(NVJET, 300_000, 20)
            program.now += 4 * MS
            program.wait()
    assert program.write(tmp_path, [line(4 * MS, called="make_batch")]).tries == ()


def test_a_tensor_made_on_the_cpu_is_made_on_the_gpu_without_its_copy(tmp_path: Path) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            program.now += 4 * MS
            program.copy(2 * MS)
            with program.range("forward"):
                program.launch(NVJET, 100_000, 20)
                program.wait()
    (advice,) = program.write(tmp_path, [line(4 * MS, called="torch.randn")]).tries
    assert (advice.code, advice.change) == ("made-on-cpu", 'torch.randn(…, device="cuda")')
    low, _, high = after(advice)
    assert low - 10_000 <= program.lengths[0] - 6 * MS - 18_000 <= high


@pytest.mark.parametrize(
    ("called", "work_before", "is_named"),
    [("torch.tensor", True, True), ("make_batch", True, False), ("torch.tensor", False, False)],
)
def test_a_tensor_of_pythons_numbers_is_named_where_the_move_that_waits_leaves_the_gpu_without_work(
    tmp_path: Path, called: str, *, work_before: bool, is_named: bool
) -> None:
    """Without work before them the first of the three steps is short: with such a spread nothing may be saved."""
    program = Program()
    if work_before:
        program.launch(NVJET, 200_000, 20)
    for _ in range(STEPS):
        with program.step():
            program.now += MS // 2
            program.copy(10_000)
            program.now += MS // 4
            with program.range("forward"):
                program.launch(NVJET, 200_000, 20)
    lines = [line(MS // 2, called=called, line=20), line(MS, called="ids.to", line=31, waits=1, waiting_ns=MS)]
    advice = found(program.write(tmp_path, lines))
    assert ("python" in advice) == is_named
    if is_named:
        assert advice["python"].line is not None
        assert (advice["python"].line.line, advice["python"].edit) == (20, "no-wait:/work/train.py:31")
        low, expected, high = after(advice["python"])
        assert low <= 20 * 201_000 <= high
        assert expected == pytest.approx(20 * 201_000, rel=0.02)


def test_a_copy_from_pageable_memory_holds_the_host_only_where_the_gpu_is_late_for_it(tmp_path: Path) -> None:
    def write(folder: Path, kernels: int) -> dict[str, Advice]:
        program = Program()
        for _ in range(STEPS):
            with program.step():
                with program.range("forward"):
                    program.launch(NVJET, 2_000, 100)
                program.copy(MS // 2)
                with program.range("backward"):
                    program.launch(NVJET, 2_000, kernels)
                program.wait()
        folder.mkdir()
        workers = [{"loading": {"workers": 4}}]
        return found(program.write(folder, [line(MS // 2, called="images.to", waits=1)], processes=workers))

    advice = write(tmp_path / "late", 100)["pageable-copy"]
    assert advice.line is not None
    assert advice.line.line == 30
    assert "pageable-copy" not in write(tmp_path / "last", 0)


@pytest.mark.parametrize(("data_ns", "is_named"), [(5 * MS, True), (20_000, False)])
def test_a_loader_is_named_with_the_line_of_its_dataset(tmp_path: Path, data_ns: int, *, is_named: bool) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("data"):
                program.now += data_ns
            with program.range("forward"):
                program.launch(NVJET, 100_000, 20)
                program.wait()
    dataset = line(data_ns // 3, "data", "Image.open", file="/work/data.py", line=12, function="__getitem__")
    loop = line(2 * data_ns // 3, "data", "next", line=88)  # the loader itself, which makes a batch of the images
    result = program.write(tmp_path, [dataset, loop])
    assert ("loader" in found(result)) == is_named
    if is_named:
        advice = found(result)["loader"]
        assert advice.line is not None
        assert (advice.line.file, advice.line.line) == ("/work/data.py", 12)
        assert "has no workers" in advice.cause
        assert advice.edit == "workers:4"
        low, _, high = after(advice)
        assert low <= program.lengths[0] - data_ns + 250_000 <= high


@pytest.mark.parametrize(
    ("cpus", "cpu_ns", "edit"),
    [
        (16, 20 * MS, "workers:13"),
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
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("data"):
                program.now += 3 * MS
            with program.range("forward"):
                program.launch(NVJET, 100_000, 20)
                program.wait()
    steps = tuple({"step_ns": length} for length in program.lengths)
    of_workers = LineSteps(MS, steps, batches=50, batch_ns=20 * MS, batch_cpu_ns=cpu_ns)
    write_lines(tmp_path / "lines.jsonl", RunLines(of_workers, ()))
    loading = {"pid": 7, "loading": {"workers": 4, "batches_per_step": 1.0}}
    advice = found(program.write(tmp_path, conditions={"cpu_count": cpus}, processes=[loading]))
    assert ("loader" in advice) == (edit is not None)
    if edit is not None:
        assert advice["loader"].edit == edit


def test_a_wait_is_a_cause_only_if_the_gpu_runs_out_of_work_for_it(tmp_path: Path) -> None:
    def write(folder: Path, python_ns: int) -> dict[str, Advice]:
        program = Program()
        for _ in range(STEPS):
            with program.step(), program.range("forward"):
                for _ in range(8):
                    program.launch(NVJET, 60_000, 5)
                    program.wait()
                    program.now += python_ns
        folder.mkdir()
        return found(program.write(folder, [line(MS, "forward", "y.mean().item", waits=8, waiting_ns=MS)]))

    advice = write(tmp_path / "late", 60_000)["waits"]
    assert advice.cause == "y.mean().item() waits for the GPU, 8 times a step"
    assert advice.edit == "no-wait:/work/train.py:30"
    assert advice.evidence["waits"] == 8
    program = Program()
    for _ in range(STEPS):
        with program.step(), program.range("forward"):
            program.launch(NVJET, 300_000, 40)
            program.wait()
    (tmp_path / "last").mkdir()
    last = program.write(tmp_path / "last", [line(MS, "forward", "loss.item", waits=1, waiting_ns=MS)])
    assert last.tries == ()
    assert last.nothing is not None
    assert last.nothing == "Nothing found that would save more than 2 %: the step is 100 % arithmetic."


@pytest.mark.parametrize(("optimizer", "is_named"), [(ADAMW, True), ({**ADAMW, "name": "Muon"}, False)])
def test_an_optimizer_in_a_loop_is_fused_where_torch_can(
    tmp_path: Path, optimizer: dict[str, object], *, is_named: bool
) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("forward"):
                program.launch(NVJET, 100_000, 10)
            with program.range("optimizer"):
                program.launch(ADD, 2_000, 400)
            program.wait()
    advice = found(program.write(tmp_path, conditions={"optimizers": [optimizer]}))
    assert ("optimizer" in advice) == is_named
    if is_named:
        assert (advice["optimizer"].edit, advice["optimizer"].module) == ("optimizer:fused", "optimizer")


def test_fp32_products_are_named_with_their_module_and_those_of_bf16_are_not(tmp_path: Path) -> None:
    def write(folder: Path, product: str) -> dict[str, Advice]:
        program = Program()
        for _ in range(STEPS):
            with program.step():
                with program.range("forward/model/head"):
                    program.launch(product, MS, 3)
                with program.range("forward/model/body"):
                    program.launch(product, MS, 1)
                program.wait()
        folder.mkdir()
        return found(program.write(folder))

    advice = write(tmp_path / "fp32", SGEMM)["tf32"]
    assert (advice.module, advice.edit) == ("head", "tf32")
    assert advice.cause == "4 matrix products run in fp32, without tensor cores, 3 of them in one module"
    low, expected, high = after(advice)
    assert low < 4 * MS / 7.4 < expected < high < 1.6 * MS
    assert "tf32" not in write(tmp_path / "bf16", NVJET)
    assert "sizes" in write(tmp_path / "odd", MISALIGNED)
    assert "sizes" not in write(tmp_path / "even", ALIGNED)
    assert "sizes" not in write(tmp_path / "simt", SIMT), "without tensor cores every size is aligned to one number"


def _write_modules(folder: Path, module: str, kernels: Sequence[tuple[str, int]]) -> dict[str, Advice]:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            for block in range(4):
                with program.range(f"forward/model/h.{block}/h.{block}.{module}"):
                    for name, duration in kernels:
                        program.launch(name, duration)
                with program.range(f"forward/model/h.{block}/h.{block}.mlp"):
                    program.launch(NVJET, 200_000)
            program.wait()
    folder.mkdir()
    return found(program.write(folder))


def test_attention_that_is_written_out_is_named_and_a_softmax_elsewhere_is_not(tmp_path: Path) -> None:
    written = [(NVJET, 100_000), (ADD, 100_000), (SOFTMAX, 100_000), (NVJET, 100_000)]
    advice = _write_modules(tmp_path / "written", "attn", written)["attention"]
    assert (advice.module, advice.change) == ("h.*.attn", "F.scaled_dot_product_attention")
    low, expected, high = after(advice)
    assert low < expected < high
    assert "attention" not in _write_modules(tmp_path / "fused", "attn", [(NVJET, 100_000), (FLASH, 100_000)])
    assert "attention" not in _write_modules(tmp_path / "gate", "gate", [(NVJET, 100_000), (SOFTMAX, 100_000)])


@pytest.mark.parametrize(
    ("kernels", "code"),
    [
        ([(ADD, 100_000)] * 6 + [(TANH, 100_000)], "activation"),
        ([(TANH, 100_000)], None),
        ([(ADD, 3_000)] * 60, "loop"),
        ([(ADD, 3_000)] * 3, None),
        (
            [(SUM, 100_000), *[(ADD, 100_000)] * 3, (ADD.replace("CUDAFunctor_add<float>", "sqrt_kernel_cuda"), 9_000)],
            "norm",
        ),
        ([(LAYER_NORM, 100_000)], None),
    ],
)
def test_a_chain_of_small_kernels_in_a_module_is_named_by_what_it_is(
    tmp_path: Path, kernels: Sequence[tuple[str, int]], code: str | None
) -> None:
    advice = _write_modules(tmp_path / "run", "act", kernels)
    assert {"activation", "loop", "norm", "chain"} & set(advice) == ({code} if code else set())
    if code:
        assert advice[code].module == "h.*.act"
        assert advice[code].evidence["kernels"] == 4 * len(kernels)


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
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("forward"):
                program.launch(NVJET, 100_000)
                program.launch(ADD, 100_000, 8)
            program.wait()
    advice = found(program.write(tmp_path, lines))
    place = advice["chain"].line if "chain" in advice else None
    assert (None if place is None else place.line) == named


def test_gathering_and_scattering_take_as_long_in_compiled_code(tmp_path: Path) -> None:
    def write(folder: Path, kernel: str) -> dict[str, Advice]:
        program = Program()
        for _ in range(STEPS):
            with program.step():
                with program.range("forward/model/layer"):
                    for _ in range(10):
                        program.launch(NVJET, 50_000)
                        program.launch(kernel, 100_000)
                program.wait()
        folder.mkdir()
        return found(program.write(folder))

    assert "compile" in write(tmp_path / "add", ADD)
    assert "compile" not in write(tmp_path / "scatter", "void at::native::indexFuncLargeIndex<float, long>(T1)")


def test_conversions_zeroed_gradients_and_allocations_are_named_by_kernels_and_calls(
    tmp_path: Path,
) -> None:
    def write(folder: Path, conversion: str, zero: str, *, allocates: bool) -> dict[str, Advice]:
        program = Program()
        for _ in range(STEPS):
            with program.step():
                if allocates:
                    program.allocate(MS)
                with program.range("forward/model/conv"):
                    program.launch(conversion, 200_000)
                    program.launch(CONVOLUTION, 500_000)
                with program.range("optimizer"):
                    program.launch(zero, 200_000)
                program.wait()
        folder.mkdir()
        return found(program.write(folder))

    advice = write(tmp_path / "all", CONVERT, ZERO, allocates=True)
    assert set(advice) == {"channels-last", "zero-grad", "allocations"}
    assert advice["channels-last"].module == "conv"
    assert write(tmp_path / "none", NVJET, ADD, allocates=False) == {}


@pytest.mark.parametrize("is_on", [True, False])
def test_anomaly_detection_is_a_condition_of_the_run(tmp_path: Path, *, is_on: bool) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("forward"):
                program.launch(NVJET, 20_000, 20)
            with program.range("backward"):
                for _ in range(20):
                    program.launch(NVJET, 20_000)
                    program.now += 50_000
                    program.wait()
    advice = found(program.write(tmp_path, conditions={"anomaly_detection": is_on}))
    assert ("anomaly" in advice) == is_on


def test_a_step_that_launches_limit_is_replayed_unless_a_wait_forbids_it(tmp_path: Path) -> None:
    def write(folder: Path, duration: int, *, waits: bool, lines: Sequence[LineTime] = ()) -> dict[str, Advice]:
        program = Program()
        for _ in range(STEPS):
            with program.step():
                for phase in ("forward", "backward"):
                    with program.range(phase):
                        for name in (NVJET, ADD, NVJET, SUM) * 40:
                            program.launch(name, duration)
                        if waits:
                            program.wait()
                program.wait()
        folder.mkdir()
        return found(program.write(folder, lines))

    late = write(tmp_path / "free", 3_000, waits=False)
    assert (late["launches"].edit, late["launches"].evidence["launches"]) == ("compile:reduce-overhead", 320)
    assert "launches" not in write(tmp_path / "waiting", 3_000, waits=True), "no line is known that could wait less"
    reads = [line(MS, "forward", "y.max().item", waits=1), line(MS, "backward", "hook", waits=1, line=40)]
    waiting = write(tmp_path / "known", 3_000, waits=True, lines=reads)["launches"]
    assert waiting.line is not None
    assert waiting.change == 'no wait at train.py:30, which graphs forbid; then model.compile(mode="reduce-overhead")'
    busy = write(tmp_path / "busy", 40_000, waits=False)
    assert (busy["compile"].edit, busy["compile"].evidence["small_ns"]) == ("compile", 160 * 40_000)
    assert after(busy["compile"])[1] == pytest.approx(160 * 40_000 * 1.65, rel=0.05)


def test_compiling_a_model_leaves_the_loss_outside_of_it_as_it_is(tmp_path: Path) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("forward/model/layer"):
                for _ in range(10):
                    program.launch(NVJET, 50_000)
                    program.launch(ADD, 40_000)
            with program.range("backward"):
                program.launch(SOFTMAX, 300_000)
            program.wait()
    advice = found(program.write(tmp_path))["compile"]
    assert advice.evidence["small_ns"] == 10 * 40_000
    assert after(advice)[1] == pytest.approx(program.lengths[0] - 0.35 * 10 * 40_000, rel=0.02)


@pytest.mark.parametrize(("launches", "can_be"), [((160, 160, 160), True), ((160, 162, 160), False)])
def test_a_graph_holds_no_step_whose_kernels_change(tmp_path: Path, launches: Sequence[int], *, can_be: bool) -> None:
    program = Program()
    for count in launches:
        with program.step():
            for phase in ("forward", "backward"):
                with program.range(phase):
                    program.launch(NVJET, 3_000, count)
            program.wait()
    assert ("launches" in found(program.write(tmp_path))) == can_be


def test_at_most_three_causes_are_tried_and_what_they_buy_together_is_no_sum(tmp_path: Path) -> None:
    """Python and CUDA's allocator hold the host, then products and zeros take the GPU's time."""
    program = Program()
    for _ in range(STEPS):
        with program.step():
            program.now += 3 * MS
            program.allocate(MS)
            with program.range("forward/model/head"):
                program.launch(SGEMM, 2 * MS, 2)
            with program.range("optimizer"):
                program.launch(ZERO, MS // 3)
            program.wait()
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


GIB = 2**30


def _write_pauses(
    folder: Path, name: str, counter: str, *, in_steps: int, counted: int, after_ns: int = 0
) -> tuple[Program, AdviceResult]:
    """Write a run whose host pauses for 2 ms in each recorded step: in some of them in a range up to ``after_ns``."""
    program = Program()
    for number in range(STEPS):
        with program.step(), program.range("forward"):
            program.launch(NVJET, 50_000, 10)
            began = program.now
            program.now += 2 * MS
            if number < in_steps:
                program.builder.range(name, began, program.now - after_ns)
            program.launch(NVJET, 50_000, 10)
            program.wait()
    folder.mkdir(exist_ok=True)
    during = {"steps": [{"step_ns": length} for length in program.lengths], "during": {counter: counted}}
    lines = [line(2 * MS, "forward", "gc.collect", line=44, samples=9), line(2 * MS, "forward", "scale", line=50)]
    return program, program.write(folder, lines, attached=during, processes=[{"pid": 7}])


@pytest.mark.parametrize(("in_steps", "counted"), [(STEPS, STEPS), (STEPS - 1, STEPS), (1, STEPS), (STEPS, 1)])
def test_garbage_is_a_cause_where_most_steps_collect_it(tmp_path: Path, in_steps: int, counted: int) -> None:
    program, result = _write_pauses(
        tmp_path, "collecting garbage", "full_collections", in_steps=in_steps, counted=counted
    )
    advice = found(result)
    assert ("garbage" in advice) == (min(in_steps, counted) > 1)
    if "garbage" in advice:
        assert advice["garbage"].line == SourceLine("/work/train.py", 44, "main")
        assert advice["garbage"].evidence["paused_ns"] == 2 * MS
        low, expected, high = after(advice["garbage"])
        truth = 20 * 51_000 + 20_000
        assert low <= truth <= high < program.lengths[0]
        assert expected == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("is_again", [True, False])
def test_a_step_that_compiles_again_every_time_is_named_with_the_function_and_the_reason(
    tmp_path: Path, *, is_again: bool
) -> None:
    compiled = Compilation(
        id="7-1",
        pid=7,
        compile_id="0/3",
        what="forward",
        line="loss.py:12 scale",
        step=2,
        is_recorded=True,
        is_again=is_again,
        duration_ns=2 * MS,
        reason="name == 'step 1'              # return loss * 2  # loss.py:13 in scale",
    )
    append_records(tmp_path / "compiled.jsonl", [compiled])
    _, result = _write_pauses(
        tmp_path, "compiling scale", "compiled_graphs", in_steps=STEPS, counted=STEPS, after_ns=MS // 2
    )
    advice = found(result)
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
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("forward"):
                for _ in range(200):
                    program.launch(NVJET, 10_000)
                    if blocks:
                        program.builder.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["end"] = program.free + 4_000
                        program.now = program.free + 4_000
            program.wait()
    advice = found(program.write(tmp_path, conditions={"launch_blocking": is_set}))
    assert ("launch-blocking" in advice) == (is_set and blocks)
    if is_set and blocks:
        low, expected, high = after(advice["launch-blocking"])
        truth = 200 * 11_000 + 20_000
        assert low <= truth <= high < program.lengths[0]
        assert expected == pytest.approx(truth, rel=0.15)


def _write_small_passes(
    folder: Path, passes: int, duration: int, **conditions: int
) -> tuple[Program, dict[str, Advice]]:
    """Write steps of passes of 50 kernels, for each of which the host takes 8 µs, and one kernel of the optimizer."""
    program = Program()
    for _ in range(STEPS):
        with program.step():
            for _ in range(passes):
                for phase in ("forward", "backward"):
                    with program.range(phase):
                        program.launch(NVJET, duration, 50)
            with program.range("optimizer"):
                program.launch(ADD, 2_000)
            program.wait()
    folder.mkdir()
    known = {"reserved_peak_bytes": 10 * GIB, "gpu_memory_bytes": 140 * GIB}
    return program, found(program.write(folder, conditions=known | conditions))


def test_a_batch_is_small_where_the_gpu_waits_for_python_and_memory_has_room(tmp_path: Path) -> None:
    program, advice = _write_small_passes(tmp_path / "small", 1, 3_000)
    batch = advice["batch"]
    assert (batch.edit, batch.line) == ("batch:×2", None)
    assert batch.costs is not None
    low, expected, high = after(batch)
    assert low <= program.lengths[0] / 2 <= high
    assert expected == pytest.approx(program.lengths[0] / 2, rel=0.2)
    assert "batch" not in _write_small_passes(tmp_path / "busy", 1, 20_000)[1]
    assert "batch" not in _write_small_passes(tmp_path / "full", 1, 3_000, reserved_peak_bytes=60 * GIB)[1]


def test_a_step_of_more_samples_that_was_measured_says_nothing_of_its_effect(tmp_path: Path) -> None:
    batch = _write_small_passes(tmp_path / "small", 1, 3_000)[1]["batch"]
    assert batch.saves_ns is not None
    longer = Trial(("batch:×2",), processes=3, change_ns=0.5 * MS, batch_factor=2.0)
    assert replace(batch, measured=longer).effect_ns == batch.saves_ns.expected
    assert replace(batch, measured=replace(longer, batch_factor=1.0)).effect_ns == -0.5 * MS


def test_small_passes_of_one_step_become_fewer_without_another_batch(tmp_path: Path) -> None:
    _, advice = _write_small_passes(tmp_path / "four", 4, 3_000)
    batch = advice["batch"]
    assert batch.change == "passes of 2 times the samples, and 2 times fewer of them"
    assert (batch.edit, batch.costs) == (None, None)
    assert "batch" not in _write_small_passes(tmp_path / "three", 3, 3_000)[1]


@pytest.mark.parametrize(("held", "is_named"), [(30 * GIB, True), (120 * GIB, False)])
def test_checkpoints_are_needless_where_half_of_the_memory_is_free(
    tmp_path: Path, held: int, *, is_named: bool
) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            for block in ("h.0", "h.1"):
                with program.range(f"forward/model/{block}"):
                    program.launch(NVJET, MS // 2)
            for block in ("h.1", "h.0"):
                with program.range(f"backward/model/{block}"):
                    with program.range(f"recompute/{block}"):
                        program.launch(NVJET, MS // 2)
                    program.launch(NVJET, MS)
            program.wait()
    conditions = {"reserved_peak_bytes": held, "gpu_memory_bytes": 140 * GIB}
    advice = found(program.write(tmp_path, conditions=conditions))
    assert ("recompute" in advice) == is_named
    if is_named:
        assert advice["recompute"].module == "h.*"
        low, expected, high = after(advice["recompute"])
        assert low <= program.lengths[0] - MS <= high
        assert expected == pytest.approx(program.lengths[0] - MS, rel=0.02)


@pytest.mark.parametrize(("grown", "codes"), [(100 * 2**20, ["growth"]), (2**18, [])])
def test_memory_that_grows_ends_the_run_and_comes_first(tmp_path: Path, grown: int, codes: list[str]) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            with program.range("forward"):
                program.launch(NVJET, MS, 5)
            program.wait()
    steps = [{"step_ns": length} for length in program.lengths]
    attached = {"steps": steps, "during": {"allocated_bytes": STEPS * grown}}
    conditions = {"reserved_peak_bytes": 30 * GIB, "gpu_memory_bytes": 140 * GIB}
    result = program.write(tmp_path, conditions=conditions, attached=attached)
    assert [advice.code for advice in result.tries] == codes
    if codes:
        (advice,) = result.tries
        assert advice.cause == "every step keeps 100.0 MiB more: memory is full in 1,126 steps"
        assert advice.saves_bytes is not None
        assert advice.saves_bytes.expected == grown


class Keeping(Training):
    """Leaves 4 MiB behind in every step."""

    def malloc(self, size: int, stack: str, owner: tuple[str, str] | None = None) -> Block:
        return super().malloc(4 * MIB if size == 700 else size, stack, owner)


def test_a_line_that_keeps_memory_is_named_where_its_history_was_recorded(tmp_path: Path) -> None:
    opened = open_capture(Keeping(steps=6, leaks=True).write(tmp_path))
    advice = found(find_advice(opened, summarize_capture(opened)))["growth"]
    assert advice.line is not None
    assert advice.line == SourceLine("train.py", 30, "remember")
    whole = open_capture(Training(steps=6).write(tmp_path))
    assert "growth" not in found(find_advice(whole, summarize_capture(whole)))


def _memory(**changes: Any) -> Summary:
    """Return 10 GiB at the peak, of them 6 GiB activations in four blocks whose forward pass takes 8 ms."""
    block = PartRow("h.*", ("model", "h.*"), 6 * GIB, 0.6, 4, 0, {"activations": 6 * GIB}, {}, number=4)
    known: dict[str, Any] = {
        "device": 0,
        "peak_bytes": 10 * GIB,
        "exact": True,
        "phase": "backward",
        "by_category": {"activations": 6 * GIB, "gradients": GIB},
        "reserved_peak_bytes": 12 * GIB,
        "capacity_bytes": 13 * GIB,
        "expandable_reserved_bytes": None,
        "modules": (block,),
        "failure": None,
        "failed_request_bytes": None,
        "agrees": None,
        "recording_cost": None,
    }
    modules = (ModuleTime("h.*", "model", 4, 8 * MS, 16 * MS, 0),)
    return Summary("run", memory=MemoryUse(**{**known, **changes}), modules=modules, passes=1.0)


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
    advice = found(find_advice(open_capture(ROOT / "traces" / "tiny-train-cpu.nsys2023.sqlite"), _memory(**changes)))
    assert set(advice) == ({code} if code else set())
    if code:
        assert advice[code].after_ns is None
        assert advice[code].saves_bytes is not None
        assert advice[code].saves_bytes.expected == saved


@pytest.mark.parametrize("culprit", [1, 0, None])
def test_a_late_rank_is_named_with_the_step_of_all_ranks_without_it(captures: Path, culprit: int | None) -> None:
    """Rank 1 costs the other time in this recording; that rank 0 were on time would change nothing."""
    opened = open_capture(captures / "ddp.nsys2025.sqlite")
    summary = summarize_capture(opened)
    assert summary.compared is not None
    assert "late-rank" not in found(find_advice(opened, summary)), "which may be the profiler's doing"
    late = None
    if culprit is not None:
        late = Culprit(
            rank=culprit,
            cause="data",
            phase="data",
            module="",
            late_ns=3 * MS,
            extra_ns=4 * MS,
            idle_ns=4 * MS,
            gain_ns=3 * MS,
            share=0.9,
            group=None,  # type: ignore[arg-type]
            compared_with=0,
            late_steps=10,
            steps=10,
        )
    compared = replace(summary.compared, verdict=replace(summary.compared.verdict, culprit=late))
    advice = found(find_advice(opened, replace(summary, compared=compared)))
    assert ("late-rank" in advice) == (culprit == 1)
    if culprit == 1:
        low, expected, _ = after(advice["late-rank"])
        assert advice["late-rank"].edit == "on-time:1"
        assert low < expected < 44_734_852
        saves = advice["late-rank"].saves_ns
        assert saves is not None
        assert saves.expected == 44_734_852 - expected


def test_nothing_found_says_of_the_step_what_its_tree_says(tmp_path: Path) -> None:
    """Steps half as long as the recorded ones are not what was replayed: the tree rests on the GPU's time."""
    program = Program()
    for _ in range(STEPS):
        with program.step(), program.range("forward"):
            program.now += 12 * MS
            program.launch(NVJET, 300_000, 40)
            program.wait()
    result = program.write(tmp_path, attached={"steps": [{"step_ns": 12_100_000}] * 10})
    summary = summarize_capture(open_capture(tmp_path))
    assert summary.tree is not None
    assert summary.tree.basis == "gpu"
    assert result.nothing is not None
    assert result.nothing.endswith(f"the step is {100 * summary.tree.parts[0].time_ns / 12_100_000:.0f} % arithmetic.")


def test_of_several_ranks_nothing_found_is_no_refusal(captures: Path) -> None:
    opened = open_capture(captures / "ddp.nsys2025.sqlite")
    summary = summarize_capture(opened)
    assert summary.limits is not None
    assert summary.limits.refusal is not None
    assert _say_nothing(Evidence(opened, summary)) == "Nothing found that would save more than 2 %."


@pytest.mark.parametrize(("early", "late"), [(2, 1), (0, 1), (0, 2)])
def test_gradients_that_are_summed_after_each_pass_need_be_so_after_the_last(
    tmp_path: Path, early: int, late: int
) -> None:
    program = Program()
    for _ in range(STEPS):
        with program.step():
            for collectives in (early, late):
                for phase in ("forward", "backward"):
                    with program.range(phase):
                        program.launch(NVJET, 100_000, 10)
                        if phase == "backward":
                            program.launch(NCCL, 500_000, collectives)
            program.wait()
    advice = found(program.write(tmp_path))
    assert ("no-sync" in advice) == (early > 0)
    if early:
        assert advice["no-sync"].evidence["collectives"] == early
        low, expected, high = after(advice["no-sync"])
        truth = program.lengths[0] - early * 501_000
        assert low <= truth <= high
        assert expected == pytest.approx(truth, rel=0.05)


def _note(folder: Path, *, sizes: Sequence[int] = (4, 4, 4), cpu_ns: int | None = None, **conditions: Any) -> str:
    """Return the notes on steps of so many convolutions each, and on four workers with batches of 10 ms."""
    program = Program()
    for size in sizes:
        with program.step():
            with program.range("forward"):
                program.launch(CONVOLUTION, 500_000, size)
            program.wait()
    folder.mkdir()
    steps = tuple({"step_ns": length} for length in program.lengths)
    of_workers = LineSteps(MS, steps, batches=50, batch_ns=10 * MS, batch_cpu_ns=cpu_ns)
    write_lines(folder / "lines.jsonl", RunLines(of_workers, (line(MS),)))
    loading = {"pid": 7, "loading": {"workers": 4}}
    return " ".join(program.write(folder, conditions={"cpu_count": 16, **conditions}, processes=[loading]).notes)


def test_what_slows_a_step_down_by_an_unknown_time_is_a_note_and_no_try(tmp_path: Path) -> None:
    assert _note(tmp_path / "none", cudnn_benchmark=True, deterministic_algorithms=False, cpu_ns=10 * MS) == ""
    assert "every recorded step runs the same 4 kernels of" in _note(tmp_path / "rules", cudnn_benchmark=False)
    assert _note(tmp_path / "sizes", sizes=(4, 5, 4), cudnn_benchmark=False) == ""
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
