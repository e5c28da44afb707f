"""What a step takes after edits: predictions hold the truth where it is known, or say why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.step_replay.calibrate import AS_RECORDED, PAUSE_NS, Fit, find_phases, fit_host
from profkit.analysis.step_replay.columns import COPY, LAUNCH, WAIT
from profkit.analysis.step_replay.edits import ProgramFacts
from profkit.analysis.step_replay.predict import TimeAnswer, predict_time
from profkit.analysis.step_replay.replay import Constants, prepare, prove, run
from profkit.analysis.step_replay.steps import FROM_HOST, ReplayedStep, StepReplay
from profkit.errors import UsageError
from profkit.names import DATA
from profkit.run.edits import EDITS, FORMS, parse_edits, read_factor
from profkit.run.lines import LineTime
from tests.efficiency_runs import SMALL
from tests.in_process import run_command
from tests.step_machine import Doing, Machine, steady_step_ns

CONSTANTS = Constants(latency_ns=1_500, gap_ns=1_000, wake_ns=8_000, event_ns=700, wait_ns=2_000)
SLOWED = 1.6
"""How much slower the host of a recording is than that of the program."""
KNOWN = 0.1
"""Factors on the host's time that lie closer together leave little open."""

FORWARD = [Doing(9_000, 4_000, LAUNCH, durations_ns=(30_000 if number % 3 else 3_000,)) for number in range(60)]
OPTIMIZER = [Doing(6_000, 4_000, LAUNCH, durations_ns=(5_000,)) for _ in range(120)]
PROGRAM = [*FORWARD, *OPTIMIZER]
WAITING = [*FORWARD[:30], Doing(2_000, 2_000, WAIT, waits_for=(29,)), *FORWARD[30:], *OPTIMIZER]

Kind = Callable[[int], str]


def slow_host(program: Sequence[Doing], factor: float, *, pauses: bool = True) -> list[Doing]:
    """Return the program with a slower host; its waits, and without ``pauses`` its pauses, take as long as before."""
    return [
        replace(
            doing,
            gap_ns=round(doing.gap_ns * (factor if pauses or doing.gap_ns < PAUSE_NS else 1)),
            own_ns=round(doing.own_ns * (1 if doing.waits_for else factor)),
        )
        for doing in program
    ]


def elementwise(row: int) -> str:
    return "elementwise"


def recorded(program: Sequence[Doing], *, category: Kind = elementwise, unprofiled: bool = True) -> StepReplay:
    return _record(tuple(program), category, unprofiled)


@cache
def _record(program: tuple[Doing, ...], category: Kind, unprofiled: bool) -> StepReplay:
    """Return the replay of a program's recording, whose host was slower than unprofiled."""
    step = prepare(Machine(slow_host(program, SLOWED, pauses=False), CONSTANTS).run().columns(), CONSTANTS)
    truth = Machine(list(program), CONSTANTS).run()
    edge = len(program) - len(OPTIMIZER)
    middle, end = step.call_end_ns[edge - 1], step.recorded_ns
    phases = find_phases(step, {"forward": [(0, middle)], "optimizer": [(middle, end)]})
    fit: Fit | None = AS_RECORDED
    if unprofiled:
        # Both phases together take the whole step.
        fit = fit_host(step, CONSTANTS, phases, {"forward": truth.step_ns, "optimizer": 0}, truth.step_ns // 200)
        assert fit is not None
    rows = range(len(step.row))
    names = {row: f"{category(row)}_kernel" for row in rows}
    categories = {row: category(row) for row in rows}
    phase = ["forward"] * edge + ["optimizer"] * len(OPTIMIZER)
    proof = prove((step, run(step, CONSTANTS)))
    gap_phases = [{name: max(gap, 0)} for name, gap in zip(phase, step.gap_ns, strict=True)]
    nowhere = [None] * len(program), [None] * len(step.row)
    kept = ReplayedStep(step, phases, proof, fit, names, categories, phase, gap_phases, *nowhere)
    now_ns = steady_step_ns(program, CONSTANTS) if unprofiled else None
    return StepReplay(CONSTANTS, (kept,), now_ns, 0, None, step.recorded_ns)


def predicted(program: Sequence[Doing], *edits: str, facts: ProgramFacts | None = None, **how: Kind) -> TimeAnswer:
    return predict_time(recorded(program, **how), parse_edits(edits), facts or ProgramFacts())


def steady(program: Sequence[Doing]) -> int:
    return _steady(tuple(program))


_steady = cache(lambda program: steady_step_ns(program, CONSTANTS))


def holds(answer: TimeAnswer, truth: Sequence[Doing]) -> bool:
    assert answer.refusal is None
    assert answer.low_ns is not None
    assert answer.high_ns is not None
    time_ns = steady(truth)
    if answer.expected_ns is not None:
        assert answer.limited_by is not None
        assert sum(answer.limited_by.values()) == answer.expected_ns
        assert answer.low_ns <= answer.expected_ns <= answer.high_ns
        if answer.fit.most - answer.fit.least < KNOWN:
            assert answer.expected_ns == pytest.approx(time_ns, rel=0.05)
    return answer.low_ns <= time_ns <= answer.high_ns


def scaled(program: Sequence[Doing], factor: float) -> list[Doing]:
    return [
        replace(doing, durations_ns=tuple(round(time * factor) for time in doing.durations_ns)) for doing in program
    ]


@pytest.mark.parametrize("factor", ["×2", "×10", "×1/2", "×1/4"])
def test_a_faster_or_slower_gpu(factor: str) -> None:
    truth = scaled(PROGRAM, 1 / float(read_factor(factor)))
    assert holds(predicted(PROGRAM, f"gpu:{factor}"), truth)


@pytest.mark.parametrize("factor", ["×2", "×1/2"])
def test_another_batch_makes_kernels_longer_or_shorter_and_leaves_the_optimizer(factor: str) -> None:
    by = float(read_factor(factor))
    kernels = [round(2_500 + (doing.durations_ns[0] - 2_500) * by) for doing in FORWARD]
    forward = [replace(doing, durations_ns=(time_ns,)) for doing, time_ns in zip(FORWARD, kernels, strict=True)]
    assert holds(predicted(PROGRAM, f"batch:{factor}"), [*forward, *OPTIMIZER])


@pytest.mark.parametrize("factor", ["×2", "×10", "×1/2"])
def test_a_faster_or_slower_host(factor: str) -> None:
    assert holds(predicted(WAITING, f"cpu:{factor}"), slow_host(WAITING, 1 / float(read_factor(factor))))


def test_kernels_by_name_and_links_by_category() -> None:
    in_forward: Kind = lambda row: "gemm" if row < len(FORWARD) else "communication"  # noqa: E731
    assert holds(predicted(PROGRAM, "kernels:gemm*:×3", category=in_forward), [*scaled(FORWARD, 3), *OPTIMIZER])
    assert holds(predicted(PROGRAM, "links:×1/4", category=in_forward), [*FORWARD, *scaled(OPTIMIZER, 4)])


def test_a_wait_that_is_gone() -> None:
    line = LineTime("/home/a/train.py", 7, "train", None, "forward", "main", 20, 100_000, 1_000, 1.0, 90_000)
    answer = predicted(WAITING, "no-wait:train.py:7", facts=ProgramFacts(lines=[line]))
    assert holds(answer, [doing for doing in WAITING if not doing.waits_for])


def test_without_a_wait_the_host_prepares_the_next_step_while_the_gpu_computes() -> None:
    program = [replace(FORWARD[0], gap_ns=3_000_000), *(replace(doing, durations_ns=(80_000,)) for doing in FORWARD)]
    waiting = [*program, *OPTIMIZER, Doing(2_000, 2_000, WAIT, waits_for=(len(program) + len(OPTIMIZER) - 1,))]
    line = LineTime("/home/a/train.py", 7, "train", None, "optimizer", "main", 20, 100_000, 1_000, 1.0, 90_000)
    truth = [*program, *OPTIMIZER]
    assert steady_step_ns(truth, CONSTANTS) < 0.7 * steady_step_ns(waiting, CONSTANTS)
    assert holds(predicted(waiting, "no-wait:train.py:7", facts=ProgramFacts(lines=[line])), truth)


@pytest.mark.parametrize("calls", [False, True])
def test_python_of_a_line_is_gone_with_all_that_what_it_calls_does(*, calls: bool) -> None:
    program = [*FORWARD[:30], replace(FORWARD[30], gap_ns=3_000_000), *FORWARD[31:], *OPTIMIZER]
    truth = [*FORWARD[:30], replace(FORWARD[30], gap_ns=0), *FORWARD[31:], *OPTIMIZER]
    alone = LineTime("/home/a/train.py", 7, "train", None, "forward", "main", 50, 3_000_000, 30_000, 0.0)
    own = replace(alone, called="draw", samples=3, time_ns=500_000, error_ns=9_000)
    inner = replace(alone, line=3, function="draw", time_ns=2_500_000)
    caller = replace(own, samples=50, time_ns=2_500_000, error_ns=30_000, is_caller=True)
    facts = ProgramFacts(lines=[inner, own], callers=[caller]) if calls else ProgramFacts(lines=[alone])
    assert holds(predicted(program, "no-host:a/train.py:7", facts=facts), truth)


def test_a_line_that_is_not_known_or_trains_is_refused_by_name() -> None:
    own = LineTime("/home/a/train.py", 3, "draw", None, "forward", "main", 50, 2_500_000, 30_000, 0.0)
    answer = predicted(PROGRAM, "no-host:train.py:7", facts=ProgramFacts(lines=[own]))
    assert answer.refusal is not None
    assert answer.refusal.endswith("does not say which lines call others; most of train.py's time is in line 3")
    callers = [
        replace(own, line=9, phase=phase, is_caller=True) for phase in ("forward", "backward", "optimizer", None)
    ]
    answer = predicted(PROGRAM, "no-host:train.py:9", facts=ProgramFacts(lines=[own], callers=callers))
    assert answer.refusal == "this line calls what trains: all that a step does lies in it"


def test_in_a_cuda_graph_of_the_step_kernels_follow_one_another_at_once() -> None:
    own_ns = CONSTANTS.launch_ns + 300 * len(PROGRAM)
    truth = [replace(PROGRAM[0], own_ns=own_ns), *(replace(doing, gap_ns=0, own_ns=0) for doing in PROGRAM[1:])]
    assert holds(predicted(PROGRAM, "graphs"), truth)
    kernels = [replace(doing, durations_ns=(3_000,)) for doing in PROGRAM]
    assert predicted(kernels, "graphs").expected_ns == pytest.approx(len(kernels) * 3_150, rel=0.02)
    copy = Doing(2_000, 0, COPY, durations_ns=(4_000,), inside_ns=1_000, tail_ns=1_000)
    assert "pageable" in (predicted([*FORWARD, copy, *OPTIMIZER], "graphs").refusal or "")


def test_a_fused_optimizer() -> None:
    facts = ProgramFacts(optimizer_bytes=75_000_000, bytes_per_s=1e12)
    truth = [*FORWARD, Doing(6_000, 4_000, LAUNCH, durations_ns=(100_000,))]
    assert holds(predicted(PROGRAM, "optimizer:fused", facts=facts), truth)


def data_waits(program: list[Doing], wait_ns: int, *, edit: str = "workers:4", **facts: Any) -> TimeAnswer:
    """Predict for a program whose first call waits that long for data, in a DataLoader with workers or without."""
    replay = recorded(program)
    (step,) = replay.steps
    waited = [{DATA: wait_ns}, *step.gap_phases[1:]]
    return predict_time(
        replace(replay, steps=(replace(step, gap_phases=waited),)), parse_edits([edit]), ProgramFacts(**facts)
    )


def test_batches_of_enough_workers_are_ready() -> None:
    program = [replace(FORWARD[0], gap_ns=5_000_000), *FORWARD[1:], *OPTIMIZER]
    assert holds(data_waits(program, 5_000_000), [replace(FORWARD[0], gap_ns=250_000), *program[1:]])


def test_workers_that_are_too_few_keep_the_step_waiting() -> None:
    program = [replace(FORWARD[0], gap_ns=60_000_000), *FORWARD[1:], *OPTIMIZER]
    rest_ns = Machine([*PROGRAM], CONSTANTS).run().step_ns
    late_ns = 60_000_000 // 4 - rest_ns
    assert late_ns > 5_000_000
    truth = [replace(FORWARD[0], gap_ns=late_ns), *program[1:]]
    for facts in ({}, {"workers": 1, "batch_ns": 60_000_000}):
        assert holds(data_waits(program, 60_000_000, **facts), truth)
    assert "is not known" in (data_waits(program, 60_000_000, workers=1).refusal or "")


@pytest.mark.parametrize(
    ("workers", "cpus", "expected", "most"),
    [(8, 256, 1.61, 2.64), (16, 256, 1.0, 1.32), (14, 16, 1.09, 1.59), (60, 256, 1.0, 1.0)],
)
def test_workers_that_just_keep_up_may_be_late_though_the_gpu_still_has_work(
    workers: int, cpus: int, expected: float, most: float
) -> None:
    """The GPU works for 56 ms, the host hardly, and one worker takes 656 ms for a batch."""
    step = scaled(PROGRAM, 30)
    program = [replace(step[0], gap_ns=600_000_000), *step[1:]]
    facts: dict[str, Any] = {"workers": 1, "batch_ns": 656_000_000, "cpus": cpus}
    answer = data_waits(program, 600_000_000, edit=f"workers:{workers}", **facts)
    assert answer.expected_ns is not None
    assert answer.high_here_ns is not None
    assert answer.expected_ns / steady(step) == pytest.approx(expected, rel=0.02)
    assert answer.high_here_ns / steady(step) == pytest.approx(most, rel=0.02)


def test_more_workers_never_make_the_step_longer() -> None:
    program = [replace(FORWARD[0], gap_ns=60_000_000), *FORWARD[1:], *OPTIMIZER]
    for workers in (0, 1):
        facts: dict[str, Any] = {"workers": workers, "batch_ns": 60_000_000, "cpus": 16, "threads": 16}
        answers = [data_waits(program, 60_000_000, edit=f"workers:{count}", **facts) for count in range(2, 18)]
        for figure in ("low_ns", "expected_ns", "high_ns"):
            steps = [getattr(answer, figure) for answer in answers]
            assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_another_process_of_the_program_may_have_a_faster_or_slower_host(factor: float) -> None:
    answer = predicted(WAITING, "gpu:×1")
    assert answer.low_ns is not None
    assert answer.high_ns is not None
    assert answer.low_ns < steady_step_ns(slow_host(WAITING, factor), CONSTANTS) < answer.high_ns


def test_two_things_that_are_open_make_an_interval_less_wide_than_their_sum() -> None:
    answer = predicted(
        scaled(PROGRAM, 20), "optimizer:fused", facts=ProgramFacts(optimizer_bytes=2_000_000_000, bytes_per_s=4e12)
    )
    assert answer.widths_ns is not None
    assert answer.low_ns is not None
    assert answer.high_ns is not None
    assert max(answer.widths_ns.values()) <= answer.high_ns - answer.low_ns < sum(answer.widths_ns.values())


def test_copies_from_pinned_memory_do_not_hold_the_host() -> None:
    copy = Doing(2_000, 0, COPY, durations_ns=(4_000_000,), inside_ns=500_000, tail_ns=1_000)
    replay = recorded([*FORWARD, copy, *OPTIMIZER])
    (step,) = replay.steps
    row = len(FORWARD)
    named = replace(step, names={**step.names, row: FROM_HOST}, copied_bytes={row: 40_000_000})
    answer = predict_time(replace(replay, steps=(named,)), parse_edits(["pin-memory"]), ProgramFacts(workers=2))
    asynchronous = Doing(2_000, 4_000, LAUNCH, durations_ns=(1_000_000,))
    assert holds(answer, [*FORWARD, asynchronous, *OPTIMIZER])


def test_what_a_checkpoint_computes_again_is_gone() -> None:
    replay = recorded(PROGRAM)
    (step,) = replay.steps
    again = range(20, 40)
    module = ["blocks.*" if call in again else None for call in range(len(PROGRAM))]
    replay = replace(replay, steps=(replace(step, module=module, recomputing=set(again)),))
    answer = predict_time(replay, parse_edits(["no-checkpoint:blocks.*"]), ProgramFacts())
    assert holds(answer, [*PROGRAM[:20], *PROGRAM[40:]])
    assert "nothing is computed again" in (
        predict_time(replay, parse_edits(["no-checkpoint:other"]), ProgramFacts()).refusal or ""
    )


def with_blocks() -> StepReplay:
    """Return the replay of the program, whose first twenty calls are blocks' forward passes and later ones backward."""
    replay = recorded(PROGRAM)
    (step,) = replay.steps
    modules = ["blocks.*" if call in range(20) else None for call in range(len(PROGRAM))]
    modules[60:80] = ["blocks.*"] * 20
    phase = ["backward" if call in range(60, 80) else name for call, name in enumerate(step.phase)]
    return replace(replay, steps=(replace(step, module=modules, phase=phase),))


def test_what_a_checkpoint_would_compute_again_comes_on_top() -> None:
    answer = predict_time(with_blocks(), parse_edits(["checkpoint:blocks.*"]), ProgramFacts())
    for slower in (1.0, 1.5, 2.0):
        again = slow_host(PROGRAM[:20], slower)
        assert holds(answer, [*PROGRAM[:60], *again, *PROGRAM[60:]])


@pytest.mark.parametrize(
    ("edit", "module", "last", "is_saved"),
    [
        ("checkpoint:blocks.*", "blocks.*.out", "CUDAFunctor_add<float>", False),
        ("checkpoint:blocks.*:reentrant", "blocks.*.out", "CUDAFunctor_add<float>", True),
        ("checkpoint:blocks.*", "blocks.*.out", "MulFunctor<float>", True),
        ("checkpoint:blocks.*", "blocks.*", "CUDAFunctor_add<float>", True),
    ],
)
def test_a_checkpoint_computes_again_what_was_saved_and_not_the_product_and_sum_after_it(
    edit: str, module: str, last: str, is_saved: bool
) -> None:
    replay = with_blocks()
    (step,) = replay.steps
    assert not any("gemm" in name for name in step.categories.values())
    rows = range(*step.columns.launches[18]), range(*step.columns.launches[19])
    assert [len(each) for each in rows] == [1, 1]
    (product,), (added,) = rows
    operations = [module if row == product else each for row, each in enumerate(step.operation_module)]
    categories = {**step.categories, product: "gemm", added: "elementwise"}
    names = {**step.names, added: last}
    step = replace(step, operation_module=operations, categories=categories, names=names)
    replay = replace(replay, steps=(step,))
    answer = predict_time(replay, parse_edits([edit]), ProgramFacts())
    whole = predict_time(replay, parse_edits(["checkpoint:blocks.*:reentrant"]), ProgramFacts())
    assert answer.expected_ns is not None
    assert whole.expected_ns is not None
    assert (answer.expected_ns == whole.expected_ns) is is_saved
    assert answer.expected_ns <= whole.expected_ns


def with_kernels(names: Mapping[int, str], category: str = "gemm") -> StepReplay:
    """Return the replay of the program, some of whose kernels have these names."""
    replay = recorded(PROGRAM)
    (step,) = replay.steps
    categories = {**step.categories, **dict.fromkeys(names, category)}
    return replace(replay, steps=(replace(step, names={**step.names, **names}, categories=categories),))


def test_products_in_tf32_and_bf16_take_less_time_and_how_much_less_is_open() -> None:
    replay = with_kernels(dict.fromkeys(range(0, 60, 3), "sgemm_128x64"))
    (step,) = replay.steps
    slow = replace(step, columns=replace(step.columns, duration_ns=[900_000] * 60 + [5_000] * 120))
    replay = replace(replay, steps=(slow,), unprofiled_ns=60_000_000)
    for edit, share in (("tf32", 1 / 5), ("autocast:bf16", 1 / 9)):
        answer = predict_time(replay, parse_edits([edit]), ProgramFacts())
        assert answer.low_ns is not None
        assert answer.high_ns is not None
        assert answer.expected_ns is not None
        assert answer.low_ns < answer.expected_ns < answer.high_ns
        saved_ns = 20 * 900_000 * (1 - share)
        if edit == "tf32":
            assert answer.low_ns <= 60_000_000 - saved_ns <= answer.high_ns


@pytest.mark.parametrize(
    ("norm", "convolution", "conversion", "kept"),
    [
        ("at::native::batch_norm_backward_kernel", "dgrad_nhwc", "nchwToNhwcKernel", (0.4, 1.0, 0.0)),
        ("cudnn::bn_bw_1C11", "implicit_convolve_sgemm", "nchwToNhwcKernel", (0.95, 0.95, 0.0)),
        ("at::native::batch_norm_backward_kernel", "dgrad_nhwc", "copy_kernel", (0.4, 0.95, 1.0)),
    ],
)
def test_the_layout_of_images_costs_conversions_and_torchs_own_norms(
    norm: str, convolution: str, conversion: str, kept: tuple[float, float, float]
) -> None:
    """Convolutions whose inputs are converted run the other layout's kernels already."""
    rows = range(0, 60, 3), range(1, 60, 3), range(2, 60, 3)
    replay = with_kernels(dict.fromkeys(rows[0], norm), "normalization")
    (step,) = replay.steps
    names = {**dict.fromkeys(rows[1], convolution), **dict.fromkeys(rows[2], conversion)}
    columns = replace(step.columns, duration_ns=[900_000] * 60 + [5_000] * 120)
    step = replace(step, names={**step.names, **names}, columns=columns)
    replay = replace(replay, steps=(step,), unprofiled_ns=replay.run(columns).step_ns)
    answer = predict_time(replay, parse_edits(["channels-last"]), ProgramFacts())
    assert replay.now_ns is not None
    expected_ns = replay.now_ns - 20 * 900_000 * (3 - sum(kept))
    assert answer.expected_ns == pytest.approx(expected_ns, rel=0.02)


def test_a_step_that_no_speed_of_the_host_explains_is_not_the_typical_one() -> None:
    (step,) = recorded(PROGRAM).steps
    longer = replace(step, fit=AS_RECORDED, proof=replace(step.proof, recorded_ns=2 * step.proof.recorded_ns))
    replay = replace(recorded(PROGRAM), steps=(longer, step, longer))
    assert (replay.typical, replay.fit.most) == (step, step.fit.most)
    assert replace(replay, steps=(longer,)).typical is longer, "the only one"


@pytest.mark.parametrize(
    ("pauses_ns", "phase", "kept"),
    [
        ((8, 0, 8), "forward", [1]),
        ((8, 9, 8), "forward", [0, 1, 2]),  # the program's own, in every step
        ((2, 0, 0), "forward", [0, 1, 2]),  # less than a quarter of the step
        ((8, 0, 8), DATA, [0, 1, 2]),
    ],
)
def test_a_step_in_which_the_machine_held_the_host_up_predicts_nothing(
    pauses_ns: Sequence[int], phase: str, kept: Sequence[int]
) -> None:
    (step,) = recorded(PROGRAM).steps
    gaps, phases = step.columns.gap_ns, step.gap_phases
    steps = [
        replace(
            step,
            columns=replace(step.columns, gap_ns=[gaps[0] + pause * 1_000_000, *gaps[1:]]),
            gap_phases=[{phase: gaps[0] + pause * 1_000_000}, *phases[1:]],
        )
        for pause in pauses_ns
    ]
    replay = replace(recorded(PROGRAM), steps=tuple(steps), unprofiled_ns=20_000_000)
    assert [steps.index(each) for each in replay.fitted] == kept


def test_convolutions_stay_as_they_are_in_tf32() -> None:
    replay = with_kernels({3: "implicit_convolve_sgemm"})
    assert "no product runs in fp32" in (predict_time(replay, parse_edits(["tf32"]), ProgramFacts()).refusal or "")
    for edit in ("channels-last", "cudnn-benchmark"):
        assert predict_time(replay, parse_edits([edit]), ProgramFacts()).refusal is None
        assert "no convolution" in (predicted(PROGRAM, edit).refusal or "")


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ("graphs", "waits for the GPU"),
        ("workers:4", "does not wait for data"),
        ("pin-memory", "copies nothing from pageable memory"),
        ("autocast:bf16", "no product runs in fp32 or TF32"),
        ("no-wait:train.py:7", "holds no lines"),
        ("no-host:train.py:7", "holds no lines"),
        ("optimizer:fused", "is not recorded"),
        ("no-anomaly", "was not on"),
        ("optimizer:sgd", "another optimizer"),
        ("zero-grad:none", "no kernel that sets gradients to zero"),
        ("tf32", "no product runs in fp32"),
        ("checkpoint:h.*", "no module of this name"),
        ("checkpoint:h.*:every=2", "is not known"),
        ("links:×2", "no such operation"),
        ("kernels:nothing*:×2", "no such operation"),
    ],
)
def test_what_a_recording_does_not_show_is_refused_in_a_sentence(edit: str, why: str) -> None:
    answer = predicted(WAITING, edit)
    assert answer.refusal is not None
    assert why in answer.refusal
    assert (answer.low_ns, answer.expected_ns, answer.high_ns) == (None, None, None)


def test_without_an_unprofiled_step_what_the_profilers_slow_host_may_explain_is_not_sold() -> None:
    kernels = [*(Doing(9_000, 4_000, LAUNCH, durations_ns=(12_000,)) for _ in range(300)), *OPTIMIZER]
    answer = predict_time(recorded(kernels, unprofiled=False), parse_edits(["graphs"]), ProgramFacts())
    assert answer.now_ns is not None
    assert answer.high_ns is not None
    assert answer.high_ns > 0.9 * answer.now_ns
    known = predicted(kernels, "graphs")
    assert known.high_ns is not None
    assert known.now_ns is not None
    assert known.high_ns < known.now_ns
    assert any("the profiler may have slowed Python" in text for text in answer.assumptions)


def test_a_refused_replay_predicts_nothing_and_names_all_edits_that_it_was_asked_for() -> None:
    refused = replace(recorded(PROGRAM), refusal="why")
    answer = predict_time(refused, parse_edits(["checkpoint:h.*", "tf32"]), ProgramFacts())
    assert (set(answer.edits), answer.refusal) == ({"checkpoint:h.*", "tf32"}, "why")


def test_a_line_that_does_not_wait_or_is_not_known_is_refused() -> None:
    line = LineTime("/home/a/train.py", 7, "train", None, "forward", "main", 20, 100_000, 1_000, 0.0)
    facts = ProgramFacts(lines=[line])
    assert "does not wait" in (predicted(WAITING, "no-wait:train.py:7", facts=facts).refusal or "")
    for other in ("other.py:7", "train.py:8", "b/train.py:7"):
        assert "no time or wait of this line" in (predicted(WAITING, f"no-host:{other}", facts=facts).refusal or "")


def test_a_bound_has_no_expected_time_and_says_why() -> None:
    replay = with_kernels(dict.fromkeys(range(60), "cudnn_convolution"))
    answer = predict_time(replay, parse_edits(["cudnn-benchmark"]), ProgramFacts())
    assert (answer.refusal, answer.expected_ns, answer.limited_by) == (None, None, None)
    assert answer.low_ns is not None
    assert answer.now_ns is not None
    assert answer.low_ns < answer.now_ns
    assert "cudnn-benchmark" in answer.assumptions[0]


def test_compiling_fuses_small_kernels_and_its_graphs_replay_each_pass() -> None:
    plain, default, graphs = (predicted(PROGRAM, *edits) for edits in ((), ("compile",), ("compile:reduce-overhead",)))
    assert predicted(PROGRAM, "compile:default").expected_ns == default.expected_ns
    assert plain.now_ns is not None
    assert default.expected_ns is not None
    assert graphs.expected_ns is not None
    assert graphs.expected_ns < default.expected_ns <= plain.now_ns
    assert predicted(WAITING, "compile").refusal is None
    assert "no graph can hold" in (predicted(WAITING, "compile:reduce-overhead").refusal or "")


def test_the_order_of_edits_does_not_matter() -> None:
    first, *others = ("graphs", "gpu:×2", "kernels:elem*:×0.7", "cpu:×1.5")
    orders = ((first, *others), (*others, first), (first, *others)[::-1])
    assert len({repr(predicted(PROGRAM, *order).to_dict()) for order in orders}) == 1


def test_without_unprofiled_steps_the_recorded_one_stands() -> None:
    answer = predict_time(recorded(PROGRAM, unprofiled=False), parse_edits(["gpu:×2"]), ProgramFacts())
    assert answer.unprofiled_ns is None
    assert answer.now_ns == Machine(slow_host(PROGRAM, SLOWED), CONSTANTS).run().step_ns
    assert any("as recorded" in assumption for assumption in answer.assumptions)


def test_the_step_now_is_the_one_that_the_summary_states() -> None:
    opened = read_trace(SMALL)
    answer = opened.predict_time(parse_edits(["gpu:×2"]))
    assert answer.now_ns == round(opened.account.recorded_step_ns() or 0)


def test_what_an_edit_does_to_numbers_is_said() -> None:
    said = run_command("whatif", SMALL, "--edit", "tf32").stdout
    assert "tf32 changes what is computed: products keep 10 bits of mantissa" in " ".join(said.split())


def test_edits_are_read_in_the_tables_order() -> None:
    texts = [form.replace("×F", "×2").partition("|")[0].partition("[")[0] for form in FORMS if "optimizer" not in form]
    assert [edit.text for edit in parse_edits(reversed(texts))] == [edit.text for edit in parse_edits(texts)]
    assert {edit.spec for edit in parse_edits(texts)} == {spec for spec in EDITS if spec.name != "optimizer"}
    for wrong in ("gpu", "graphs:all", "autocast:fp8", "optimizer", "speed:×2", ""):
        with pytest.raises(UsageError, match=r"no edit|no autocast 'fp8'; it is one of bf16"):
            parse_edits([wrong])
    for wrong in ("twice", "×0", "-1"):
        with pytest.raises(UsageError, match=r"write ×2, x2 or 0\.5"):
            read_factor(wrong)


def test_the_command_predicts_the_time_from_a_trace_alone() -> None:
    data = json.loads(run_command("whatif", SMALL, "--edit", "cpu:×2", "--format", "json").stdout)
    after = data["time"]["after_ns"]
    assert (data["schema"], data["memory"]) == (2, None)
    assert after["low"] < after["expected"] < after["high"] < data["time"]["step_ns"]
    assert sum(data["time"]["limited_by"].values()) == after["expected"]
    assert "cpu:" in run_command("whatif", SMALL, "--edit", "cpu:×2", "--format", "csv").stdout


def test_a_snapshot_alone_gets_memory_and_unchanged_is_said() -> None:
    snapshot = SMALL.with_name("small-train.snapshot.pickle.gz")
    done = run_command("whatif", snapshot, "--edit", "gpu:×2")
    assert done.stdout.strip() == "Memory: unchanged"


def test_what_the_error_of_a_line_leaves_of_its_long_pause_is_gone_too() -> None:
    pause = 8_000_000
    program = [*FORWARD[:30], replace(FORWARD[30], gap_ns=pause), *FORWARD[31:], *OPTIMIZER]
    for error_ns, left_ns in ((500_000, 9_000), (10_000, 400_000)):
        time_ns = pause - 400_000
        line = LineTime("/code/train.py", 7, "main", None, "forward", "main", 90, time_ns, error_ns, 0.0, 0)
        answer = predicted(program, "no-host:train.py:7", facts=ProgramFacts(lines=[line]))
        truth = [*FORWARD[:30], replace(FORWARD[30], gap_ns=left_ns), *FORWARD[31:], *OPTIMIZER]
        assert answer.expected_ns == pytest.approx(steady_step_ns(truth, CONSTANTS), rel=0.01)
