"""What a step takes after edits: predictions hold the truth where it is known, or say why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.step_replay import COPY, LAUNCH, WAIT, ProgramFacts
from profkit.analysis.step_replay.calibrate import AS_RECORDED, PAUSE_NS, Fit, find_phases, fit_host
from profkit.analysis.step_replay.edits import Setting
from profkit.analysis.step_replay.kernel_edits import compile_model
from profkit.analysis.step_replay.predict import predict_time
from profkit.analysis.step_replay.replay import Constants, prepare, prove, run
from profkit.analysis.step_replay.steps import FROM_HOST, ReplayedStep, StepReplay
from profkit.errors import UsageError
from profkit.names import DATA
from profkit.report.units import format_ns
from profkit.run.edits import EDITS, FORMS, parse_edits, read_factor
from profkit.run.lines import LineTime
from tests.efficiency_runs import SMALL
from tests.golden import check_text
from tests.in_process import printed, run_command
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
    truth_ns = steady_step_ns(program, CONSTANTS) if unprofiled else None
    edge = len(program) - len(OPTIMIZER)
    middle, end = step.call_end_ns[edge - 1], step.recorded_ns
    phases = find_phases(step, {"forward": [(0, middle)], "optimizer": [(middle, end)]})
    fit: Fit | None = AS_RECORDED
    if truth_ns is not None:
        # Both phases together take the whole step.
        fit = fit_host(step, CONSTANTS, phases, {"forward": truth_ns, "optimizer": 0}, truth_ns // 200)
        assert fit is not None
    rows = range(len(step.row))
    names = {row: f"{category(row)}_kernel" for row in rows}
    categories = {row: category(row) for row in rows}
    phase = ["forward"] * edge + ["optimizer"] * len(OPTIMIZER)
    proof = prove((step, run(step, CONSTANTS)))
    gap_phases = [{name: max(gap, 0)} for name, gap in zip(phase, step.gap_ns, strict=True)]
    nowhere = [None] * len(program), [None] * len(step.row)
    kept = ReplayedStep(step, phases, proof, fit, names, categories, phase, gap_phases, *nowhere)
    return StepReplay(CONSTANTS, (kept,), truth_ns, 0, None, step.recorded_ns)


def predicted(program: Sequence[Doing] | StepReplay, *edits: str, facts: ProgramFacts | None = None, **how: Any) -> Any:
    """Return what is predicted for a program, or for the replay of one."""
    replay = program if isinstance(program, StepReplay) else recorded(program, **how)
    return predict_time(replay, parse_edits(edits), facts or ProgramFacts())


def changed(replay: StepReplay, **fields: Any) -> StepReplay:
    """Return a replay with other fields of its one step."""
    (step,) = replay.steps
    return replace(replay, steps=(replace(step, **fields),))


def steady(program: Sequence[Doing]) -> int:
    return _steady(tuple(program))


_steady = cache(lambda program: steady_step_ns(program, CONSTANTS))


def holds(answer: Any, truth: Sequence[Doing]) -> bool:
    assert answer.refusal is None
    time_ns = steady(truth)
    if answer.expected_ns is not None:
        assert sum(answer.limited_by.values()) == answer.expected_ns
        assert answer.low_ns <= answer.expected_ns <= answer.high_ns
        if answer.fit.most - answer.fit.least < KNOWN:
            assert answer.expected_ns == pytest.approx(time_ns, rel=0.05)
    return answer.low_ns <= time_ns <= answer.high_ns


def scaled(program: Sequence[Doing], factor: float) -> list[Doing]:
    return [
        replace(doing, durations_ns=tuple(round(time * factor) for time in doing.durations_ns)) for doing in program
    ]


def in_forward(row: int) -> str:
    return "gemm" if row < len(FORWARD) else "communication"


def with_batch(by: float) -> list[Doing]:
    """Return the program with another batch: kernels are longer or shorter, but for the optimizer's."""
    kernels = [round(2_500 + (doing.durations_ns[0] - 2_500) * by) for doing in FORWARD]
    forward = [replace(doing, durations_ns=(time_ns,)) for doing, time_ns in zip(FORWARD, kernels, strict=True)]
    return [*forward, *OPTIMIZER]


def with_pause(gap_ns: int) -> list[Doing]:
    return [*FORWARD[:30], replace(FORWARD[30], gap_ns=gap_ns), *FORWARD[31:], *OPTIMIZER]


WAITS = LineTime("/home/a/train.py", 7, "train", None, "forward", "main", 20, 100_000, 1_000, 1.0, 90_000)
RUNS = LineTime("/home/a/train.py", 7, "train", None, "forward", "main", 50, 3_000_000, 30_000, 0.0)
CALLS = replace(RUNS, called="draw", samples=3, time_ns=500_000, error_ns=9_000)
CALLED = replace(RUNS, line=3, function="draw", time_ns=2_500_000)
CALLER = replace(CALLS, samples=50, time_ns=2_500_000, error_ns=30_000, is_caller=True)
BUSY = [
    replace(FORWARD[0], gap_ns=3_000_000),
    *(replace(doing, durations_ns=(80_000,)) for doing in FORWARD),
    *OPTIMIZER,
]
GRAPHED_NS = CONSTANTS.launch_ns + 300 * len(PROGRAM)
GRAPHED = [replace(PROGRAM[0], own_ns=GRAPHED_NS), *(replace(doing, gap_ns=0, own_ns=0) for doing in PROGRAM[1:])]

TRUTHS: dict[str, tuple[Sequence[Doing], Sequence[Doing], dict[str, Any]]] = {
    **{f"gpu:{by}": (PROGRAM, scaled(PROGRAM, 1 / float(read_factor(by))), {}) for by in ("×2", "×10", "×1/2", "×1/4")},
    **{f"cpu:{by}": (WAITING, slow_host(WAITING, 1 / float(read_factor(by))), {}) for by in ("×2", "×10", "×1/2")},
    **{f"batch:{by}": (PROGRAM, with_batch(float(read_factor(by))), {}) for by in ("×2", "×1/2")},
    "kernels:gemm*:×3": (PROGRAM, [*scaled(FORWARD, 3), *OPTIMIZER], {"category": in_forward}),
    "links:×1/4": (PROGRAM, [*FORWARD, *scaled(OPTIMIZER, 4)], {"category": in_forward}),
    "no-wait:train.py:7": (WAITING, PROGRAM, {"facts": ProgramFacts(lines=[WAITS])}),
    # The host prepares the next step while the GPU computes.
    "no-wait:a/train.py:7": (
        [*BUSY, Doing(2_000, 2_000, WAIT, waits_for=(len(BUSY) - 1,))],
        BUSY,
        {"facts": ProgramFacts(lines=[replace(WAITS, phase="optimizer")])},
    ),
    # Python of a line, with all that what it calls does.
    "no-host:a/train.py:7": (with_pause(3_000_000), with_pause(0), {"facts": ProgramFacts(lines=[RUNS])}),
    "no-host:train.py:7": (
        with_pause(3_000_000),
        with_pause(0),
        {"facts": ProgramFacts(lines=[CALLED, CALLS], callers=[CALLER])},
    ),
    # In a CUDA graph of the step kernels follow one another at once.
    "graphs": (PROGRAM, GRAPHED, {}),
    "optimizer:fused": (
        PROGRAM,
        [*FORWARD, Doing(6_000, 4_000, LAUNCH, durations_ns=(100_000,))],
        {"facts": ProgramFacts(optimizer_bytes=75_000_000, bytes_per_s=1e12)},
    ),
}
"""Edit → program, what it really is after the edit, and what is known of it."""


@pytest.mark.parametrize("edit", TRUTHS)
def test_the_prediction_holds_the_true_step(edit: str) -> None:
    program, truth, known = TRUTHS[edit]
    assert holds(predicted(program, edit, **known), truth)


def test_in_a_cuda_graph_short_kernels_stand_apart() -> None:
    kernels = [replace(doing, durations_ns=(3_000,)) for doing in PROGRAM]
    assert predicted(kernels, "graphs").expected_ns == pytest.approx(len(kernels) * 3_150, rel=0.02)


def data_waits(program: list[Doing], wait_ns: int, *, edit: str = "workers:4", **facts: Any) -> Any:
    """Predict for a program whose first call waits that long for data, in a DataLoader with workers or without."""
    replay = recorded(program)
    waited = [{DATA: wait_ns}, *replay.steps[0].gap_phases[1:]]
    return predicted(changed(replay, gap_phases=waited), edit, facts=ProgramFacts(**facts))


def test_batches_of_enough_workers_are_ready() -> None:
    program = [replace(FORWARD[0], gap_ns=5_000_000), *FORWARD[1:], *OPTIMIZER]
    assert holds(data_waits(program, 5_000_000), [replace(FORWARD[0], gap_ns=250_000), *program[1:]])


def test_workers_that_are_too_few_keep_the_step_waiting() -> None:
    program = [replace(FORWARD[0], gap_ns=60_000_000), *FORWARD[1:], *OPTIMIZER]
    rest_ns = Machine([*PROGRAM], CONSTANTS).run().step_ns
    late_ns = 60_000_000 // 4 - rest_ns
    assert late_ns > 5_000_000
    truth = [replace(FORWARD[0], gap_ns=late_ns), *program[1:]]
    known: tuple[dict[str, Any], ...] = ({}, {"workers": 1, "batch_ns": 60_000_000})
    for facts in known:
        assert holds(data_waits(program, 60_000_000, **facts), truth)
    assert "is not known" in data_waits(program, 60_000_000, workers=1).refusal
    assert "`profkit try` measures it" in data_waits(program, 60_000_000, edit="workers:0", workers=1).refusal


@pytest.mark.parametrize(("now", "wait_ns"), [(8, 0), (8, 1_000_000)])
def test_fewer_workers_keep_a_step_waiting_that_hardly_waited(now: int, wait_ns: int) -> None:
    program = [replace(FORWARD[0], gap_ns=wait_ns), *FORWARD[1:], *OPTIMIZER]
    answer = data_waits(program, wait_ns, edit="workers:1", workers=now, batch_ns=60_000_000)
    assert answer.expected_ns == pytest.approx(60_000_000, rel=0.25)
    assert answer.expected_ns > 2 * answer.now_ns


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
    assert answer.expected_ns / steady(step) == pytest.approx(expected, rel=0.02)
    assert answer.high_here_ns / steady(step) == pytest.approx(most, rel=0.02)


def test_more_workers_never_make_the_step_longer() -> None:
    program = [replace(FORWARD[0], gap_ns=60_000_000), *FORWARD[1:], *OPTIMIZER]
    for workers in (0, 1):
        facts: dict[str, Any] = {"workers": workers, "batch_ns": 60_000_000, "cpus": 16, "threads": 16}
        answers = [data_waits(program, 60_000_000, edit=f"workers:{count}", **facts) for count in (2, 3, 8, 15, 16, 17)]
        for figure in ("low_ns", "expected_ns", "high_ns"):
            steps = [getattr(answer, figure) for answer in answers]
            assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_another_process_of_the_program_may_have_a_faster_or_slower_host(factor: float) -> None:
    answer = predicted(WAITING, "gpu:×1")
    assert answer.low_ns < steady_step_ns(slow_host(WAITING, factor), CONSTANTS) < answer.high_ns


def test_two_things_that_are_open_make_an_interval_less_wide_than_their_sum() -> None:
    answer = predicted(
        scaled(PROGRAM, 20), "optimizer:fused", facts=ProgramFacts(optimizer_bytes=2_000_000_000, bytes_per_s=4e12)
    )
    assert max(answer.widths_ns.values()) <= answer.high_ns - answer.low_ns < sum(answer.widths_ns.values())


def test_a_replay_that_is_somewhat_off_makes_a_prediction_wider() -> None:
    replay = recorded(PROGRAM)
    (step,) = replay.steps

    def off_by(share: float) -> StepReplay:
        return changed(replay, proof=replace(step.proof, replayed_ns=round((1 + share) * step.proof.recorded_ns)))

    exact, off = (predicted(off_by(share), "gpu:×1") for share in (0.0, 0.015))
    assert off.expected_ns == exact.expected_ns
    assert off.low_ns < exact.low_ns
    assert off.high_ns > exact.high_ns
    width_ns = off.widths_ns["how the replay differs from the recorded step"]
    assert width_ns == pytest.approx(2 * 0.015 * off.expected_ns, rel=1e-3)


def test_no_step_is_shorter_than_what_its_kernels_take() -> None:
    replay = replace(recorded(scaled(PROGRAM, 20)), variation=0.9)
    (step,) = replay.steps
    assert predicted(replay, "gpu:×1").low_ns == round(0.985 * sum(step.columns.duration_ns))
    assert predicted(replay, "gpu:×2").low_ns < predicted(replay, "gpu:×1").low_ns / 1.9


def test_what_is_saved_may_be_more_or_less_by_a_share_of_it() -> None:
    saving, nothing = (predicted(scaled(PROGRAM, 20), f"gpu:×{factor}") for factor in (2, 1))
    saved_ns = saving.now_ns - saving.expected_ns
    assert saved_ns > 0.1 * saving.now_ns
    widths_ns = (answer.widths_ns["what no part of this accounts for"] for answer in (saving, nothing))
    assert [round(width_ns) for width_ns in widths_ns] == [
        round(2 * 0.015 * saving.now_ns + 0.15 * saved_ns),
        round(2 * 0.015 * saving.now_ns),
    ]


def test_copies_from_pinned_memory_do_not_hold_the_host() -> None:
    copy = Doing(2_000, 0, COPY, durations_ns=(4_000_000,), inside_ns=500_000, tail_ns=1_000)
    replay, row = recorded([*FORWARD, copy, *OPTIMIZER]), len(FORWARD)
    names = {**replay.steps[0].names, row: FROM_HOST}
    replay = changed(replay, names=names, copied_bytes={row: 40_000_000})
    answer = predicted(replay, "pin-memory", facts=ProgramFacts(workers=2))
    asynchronous = Doing(2_000, 4_000, LAUNCH, durations_ns=(1_000_000,))
    assert holds(answer, [*FORWARD, asynchronous, *OPTIMIZER])


@pytest.mark.parametrize(("workers", "left_ns"), [(2, 3_000_000), (0, 6_000_000)])
@pytest.mark.parametrize(
    "copy",
    [
        Doing(2_000, 0, COPY, durations_ns=(500_000,), inside_ns=5_000, tail_ns=1_000),
        Doing(2_000, 150_000, LAUNCH, durations_ns=(500_000,)),
    ],
    ids=["to its end", "until it is staged"],
)
def test_with_workers_what_the_line_that_moves_a_batch_takes_goes_with_its_unpinned_memory(
    workers: int, left_ns: int, copy: Doing
) -> None:
    """Without them its memory is shared with nobody, and the program pins a batch of 8 MB itself, for a millisecond."""
    program, left = with_pause(6_000_000), with_pause(left_ns)
    replay = recorded([*program[:40], copy, *program[40:]])
    replay = changed(replay, names={**replay.steps[0].names, 40: FROM_HOST}, copied_bytes={40: 8_000_000})
    move = replace(RUNS, called="images.to")
    others = [replace(move, called="draw"), replace(move, thread="worker")]
    answer = predicted(replay, "pin-memory", facts=ProgramFacts(lines=[move, *others], workers=workers))
    pinned = Doing(2_000, 4_000 + (0 if workers else 1_000_000), LAUNCH, durations_ns=(200_000,))
    assert holds(answer, [*left[:40], pinned, *left[40:]])


def test_a_copy_that_holds_the_host_hardly_is_from_pinned_memory() -> None:
    copy = Doing(2_000, 50_000, LAUNCH, durations_ns=(500_000,))
    replay = recorded([*FORWARD, copy, *OPTIMIZER])
    replay = changed(replay, names={**replay.steps[0].names, len(FORWARD): FROM_HOST})
    assert "nothing from pageable memory" in predicted(replay, "pin-memory").refusal


def test_what_a_checkpoint_computes_again_is_gone() -> None:
    modules = [None] * 20 + ["blocks.*"] * 20 + [None] * (len(PROGRAM) - 40)
    replay = changed(recorded(PROGRAM), module=modules, recomputing=set(range(20, 40)))
    assert holds(predicted(replay, "no-checkpoint:blocks.*"), [*PROGRAM[:20], *PROGRAM[40:]])
    assert "nothing is computed again" in predicted(replay, "no-checkpoint:other").refusal


@pytest.mark.parametrize("own_ns", [0, 2_000_000])
def test_what_the_wrapper_of_a_checkpoint_calls_goes_with_it(own_ns: int) -> None:
    """It reads states before a forward pass, and sets them around what is computed again; other Python stays."""
    reading, states = Doing(300_000 + own_ns, 1_000), [Doing(100_000, 1_000)] * 2
    doings = [*FORWARD[:20], reading, *FORWARD[20:40], *states, *FORWARD[20:40], *states[:1], *FORWARD[40:], *OPTIMIZER]
    ours = {*range(21, 41), *range(43, 63)}
    module = ["blocks.*" if call in ours else None for call in range(len(doings))]
    phase = ["backward" if 41 <= call < 64 else "forward" for call in range(len(doings))]
    replay = changed(recorded(doings), module=module, phase=phase, recomputing=set(range(41, 64)))
    answer = predicted(replay, "no-checkpoint:blocks.*")
    assert holds(answer, [*FORWARD[:20], replace(FORWARD[20], gap_ns=own_ns), *FORWARD[21:], *OPTIMIZER])


def with_blocks() -> StepReplay:
    """Return the replay of the program, whose first twenty calls are blocks' forward passes and later ones backward."""
    replay = recorded(PROGRAM)
    modules = ["blocks.*" if call in (*range(20), *range(60, 80)) else None for call in range(len(PROGRAM))]
    phase = [*replay.steps[0].phase[:60], *["backward"] * 20, *replay.steps[0].phase[80:]]
    return changed(replay, module=modules, phase=phase)


def test_what_a_checkpoint_would_compute_again_comes_on_top() -> None:
    answer = predicted(with_blocks(), "checkpoint:blocks.*")
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
    replay = changed(replay, operation_module=operations, categories=categories, names=names)
    answer = predicted(replay, edit)
    whole = predicted(replay, "checkpoint:blocks.*:reentrant")
    assert (answer.expected_ns == whole.expected_ns) is is_saved
    assert answer.expected_ns <= whole.expected_ns


def with_kernels(names: Mapping[int, str], category: str = "gemm") -> StepReplay:
    """Return the replay of the program, some of whose kernels have these names."""
    replay = recorded(PROGRAM)
    (step,) = replay.steps
    categories = {**step.categories, **dict.fromkeys(names, category)}
    return changed(replay, names={**step.names, **names}, categories=categories)


def test_products_in_tf32_and_bf16_take_less_time_and_how_much_less_is_open() -> None:
    replay = with_kernels(dict.fromkeys(range(0, 60, 3), "sgemm_128x64"))
    columns = replace(replay.steps[0].columns, duration_ns=[900_000] * 60 + [5_000] * 120)
    replay = replace(changed(replay, columns=columns), unprofiled_ns=60_000_000)
    for edit, share in (("tf32", 1 / 5), ("autocast:bf16", 1 / 9)):
        answer = predicted(replay, edit)
        assert answer.low_ns < answer.expected_ns < answer.high_ns
        saved_ns = 20 * 900_000 * (1 - share)
        if edit == "tf32":
            assert answer.low_ns <= 60_000_000 - saved_ns <= answer.high_ns


@pytest.mark.parametrize(
    ("norm", "convolution", "conversion", "kept"),
    [
        ("at::native::batch_norm_backward_kernel", "dgrad_nhwc", "nchwToNhwcKernel", (0.36, 1.0, 0.0)),
        ("cudnn::bn_bw_1C11", "implicit_convolve_sgemm", "nchwToNhwcKernel", (0.95, 0.95, 0.0)),
        ("at::native::batch_norm_backward_kernel", "dgrad_nhwc", "copy_kernel", (0.36, 0.95, 1.0)),
        ("at::native::batch_norm_elemt_channels_last_kernel", "dgrad_nhwc", "copy_kernel", (1.0, 0.95, 1.0)),
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
    replay = changed(
        replace(replay, unprofiled_ns=replay.run(columns).step_ns), names={**step.names, **names}, columns=columns
    )
    answer = predicted(replay, "channels-last")
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


NOT_SHOWN = """
graphs workers:4 pin-memory autocast:bf16 no-wait:train.py:7 no-host:train.py:7 optimizer:fused no-anomaly optimizer:sgd
zero-grad:none tf32 checkpoint:h.* checkpoint:h.*:every=2 links:×2 kernels:nothing*:×2 compile:reduce-overhead
channels-last cudnn-benchmark no-cudnn-attention
"""


RECURRENT = ("elemWiseRNNcell", "RNN_blockPersist_fp_GRU", "LSTM_elementWise_fp")
"""Kernels of cuDNN's recurrent layers."""


def compiled_with(name: str, edit: str) -> Any:
    """Return what is predicted for the program, all of whose kernels in the forward pass are called so."""
    return predicted(with_kernels(dict.fromkeys(range(60), name), "elementwise"), edit)


def test_what_is_refused_in_a_sentence() -> None:
    """What a recording does not show, by any edit; lines that are not known or train; copies from pageable memory."""
    here = (CALLED, *(replace(CALLED, line=9, phase=phase) for phase in ("forward", "backward", "optimizer", None)))
    callers = [replace(line, is_caller=True) for line in here[1:]]
    quick = ProgramFacts(lines=[replace(WAITS, waits=0.0, waiting_ns=0)])
    copy = Doing(2_000, 0, COPY, durations_ns=(4_000,), inside_ns=1_000, tail_ns=1_000)
    convolutions = with_kernels({3: "implicit_convolve_sgemm"})
    answers = {f"waiting program, {edit}": predicted(WAITING, edit) for edit in NOT_SHOWN.split()}
    answers |= {f"a line, {edit}": predicted(WAITING, edit, facts=quick) for edit in (
        "no-wait:train.py:7", "no-host:other.py:7", "no-host:train.py:8", "no-host:b/train.py:7",
    )}  # fmt: skip
    answers |= {
        "a line that others call": predicted(PROGRAM, "no-host:train.py:7", facts=ProgramFacts(lines=[CALLED])),
        "a line of a file of several": predicted(
            PROGRAM, "no-host:train.py:7", facts=ProgramFacts(lines=[CALLED, replace(CALLED, line=5)])
        ),
        "a line that calls what trains": predicted(
            PROGRAM, "no-host:train.py:9", facts=ProgramFacts(lines=[CALLED], callers=callers)
        ),
        "a copy from pageable memory, graphs": predicted([*FORWARD, copy, *OPTIMIZER], "graphs"),
        "convolutions, tf32": predicted(convolutions, "tf32"),
        **{f"{name}, compile:reduce-overhead": compiled_with(name, "compile:reduce-overhead") for name in RECURRENT},
    }
    for answer in answers.values():
        assert (answer.low_ns, answer.expected_ns, answer.high_ns) == (None, None, None)
    check_text("refusals", "".join(f"{name}: {answer.refusal}\n" for name, answer in answers.items()))
    for edit in ("channels-last", "cudnn-benchmark"):
        assert predicted(convolutions, edit).refusal is None


def test_without_an_unprofiled_step_what_the_profilers_slow_host_may_explain_is_not_sold() -> None:
    kernels = [*(Doing(9_000, 4_000, LAUNCH, durations_ns=(12_000,)) for _ in range(300)), *OPTIMIZER]
    answer = predicted(recorded(kernels, unprofiled=False), "graphs")
    assert answer.high_ns > 0.9 * answer.now_ns
    known = predicted(kernels, "graphs")
    assert known.high_ns < known.now_ns
    assert any("the profiler may have slowed Python" in text for text in answer.assumptions)


def test_a_refused_replay_predicts_nothing_and_names_all_edits_that_it_was_asked_for() -> None:
    refused = replace(recorded(PROGRAM), refusal="why")
    answer = predicted(refused, "checkpoint:h.*", "tf32")
    assert (set(answer.edits), answer.refusal) == ({"checkpoint:h.*", "tf32"}, "why")


def test_a_bound_has_no_expected_time_and_says_why() -> None:
    replay = with_kernels(dict.fromkeys(range(60), "cudnn_convolution"))
    answer = predicted(replay, "cudnn-benchmark")
    assert (answer.refusal, answer.expected_ns, answer.limited_by) == (None, None, None)
    assert answer.low_ns < answer.now_ns
    assert "cudnn-benchmark" in answer.assumptions[0]


def test_compiling_fuses_small_kernels_and_its_graphs_replay_each_pass() -> None:
    plain, default, graphs = (predicted(PROGRAM, *edits) for edits in ((), ("compile",), ("compile:reduce-overhead",)))
    assert predicted(PROGRAM, "compile:default").expected_ns == default.expected_ns
    assert graphs.expected_ns < default.expected_ns <= plain.now_ns
    assert predicted(WAITING, "compile").refusal is None


@pytest.mark.parametrize(("every", "left"), [(2, 0.58), (9, 0.58), (10, 0.35), (60, 0.35)])
def test_compiling_leaves_less_of_more_than_eight_kernels_in_a_row(every: int, left: float) -> None:
    (step,) = with_kernels(dict.fromkeys(range(0, 60, every), "sgemm")).steps
    compiled = compile_model(step.columns, Setting(step, CONSTANTS, ProgramFacts(), "expected"))
    small = [row for row in range(54) if row % every]
    assert {compiled.duration_ns[row] / step.columns.duration_ns[row] for row in small} == {left}


def test_kernels_of_recurrent_layers_are_not_fused_and_torchs_own_cells_are() -> None:
    assert {compiled_with(name, "compile").expected_ns for name in RECURRENT} == {recorded(PROGRAM).now_ns}
    for edit in ("compile", "compile:reduce-overhead"):
        own = compiled_with("gru_cell_forward", edit)
        assert own.expected_ns == predicted(PROGRAM, edit).expected_ns


def test_the_order_of_edits_does_not_matter() -> None:
    first, *others = ("graphs", "gpu:×2", "kernels:elem*:×0.7", "cpu:×1.5")
    orders = ((first, *others), (*others, first), (first, *others)[::-1])
    assert len({repr(predicted(PROGRAM, *order).to_dict()) for order in orders}) == 1


def test_without_unprofiled_steps_the_recorded_one_stands() -> None:
    answer = predicted(recorded(PROGRAM, unprofiled=False), "gpu:×2")
    assert answer.unprofiled_ns is None
    assert answer.now_ns == Machine(slow_host(PROGRAM, SLOWED), CONSTANTS).run().step_ns
    assert any("as recorded" in assumption for assumption in answer.assumptions)


@pytest.mark.parametrize("waits", [0, 1])
def test_an_answer_says_so_where_it_rests_on_waits_that_the_profiler_does_not_show(waits: int) -> None:
    replay = recorded(PROGRAM)
    answer = predicted(changed(replay, columns=replace(replay.steps[0].columns, inferred_waits=waits)), "gpu:×2")
    assert any(text.startswith("streams wait for events") for text in answer.assumptions) == bool(waits)


def test_the_step_now_is_the_one_that_the_summary_states() -> None:
    opened = read_trace(SMALL)
    answer = opened.predict_time(parse_edits(["gpu:×2"]))
    assert answer.now_ns == round(opened.account.recorded_step_ns() or 0)


def test_what_an_edit_does_to_numbers_is_said() -> None:
    said = run_command("whatif", SMALL, "--edit", "tf32").stdout
    assert "tf32 changes what is computed: products keep 10 bits of mantissa" in " ".join(said.split())


def test_edits_are_read_in_the_tables_order() -> None:
    texts = [
        form.replace("×F", "×2").replace(":N", ":4").partition("|")[0].partition("[")[0]
        for form in FORMS
        if "optimizer" not in form
    ]
    assert [edit.text for edit in parse_edits(reversed(texts))] == [edit.text for edit in parse_edits(texts)]
    assert {edit.spec for edit in parse_edits(texts)} == {spec for spec in EDITS if spec.name != "optimizer"}
    for wrong in ("gpu", "graphs:all", "autocast:fp8", "optimizer", "speed:×2", ""):
        with pytest.raises(UsageError, match=r"no edit|no autocast 'fp8'; it is one of bf16"):
            parse_edits([wrong])
    for wrong in ("workers:many", "threads:some"):
        with pytest.raises(UsageError, match="write a whole number, such as "):
            parse_edits([wrong])
    for wrong in ("twice", "×0", "-1"):
        with pytest.raises(UsageError, match=r"write ×2, x2 or 0\.5"):
            read_factor(wrong)


def test_the_command_predicts_the_time_from_a_trace_alone() -> None:
    data = printed("whatif", SMALL, "--edit", "cpu:×2")
    after = data["time"]["after_ns"]
    assert (data["schema"], data["memory"]) == (2, None)
    assert after["low"] < after["expected"] < after["high"] < data["time"]["step_ns"]
    assert sum(data["time"]["limited_by"].values()) == after["expected"]
    assert "cpu:" in run_command("whatif", SMALL, "--edit", "cpu:×2", "--format", "csv").stdout
    assert "a step's time is predicted with --edit" in run_command("whatif", SMALL).stderr


def test_a_larger_batch_is_compared_with_as_many_samples_as_now() -> None:
    data = printed("whatif", SMALL, "--edit", "batch:×4")["time"]
    assert data["batch_factor"] == 4
    for end, time_ns in data["after_ns"].items():
        assert data["as_many_samples_ns"][end] == pytest.approx(time_ns / 4, abs=1)
    said = " ".join(run_command("whatif", SMALL, "--edit", "batch:×4").stdout.split())
    expected = format_ns(data["as_many_samples_ns"]["expected"])
    assert "The step after has 4 times as many samples. For as many as now: least " in said
    assert f", expected {expected}, most " in said
    same = printed("whatif", SMALL, "--edit", "cpu:×2")["time"]
    assert (same["batch_factor"], same["as_many_samples_ns"]) == (1, same["after_ns"])
    assert "samples" not in run_command("whatif", SMALL, "--edit", "cpu:×2").stdout


def test_a_snapshot_alone_gets_memory_and_unchanged_is_said() -> None:
    snapshot = SMALL.with_name("small-train.snapshot.pickle.gz")
    done = run_command("whatif", snapshot, "--edit", "gpu:×2")
    assert done.stdout.strip() == "Memory: unchanged"


def test_what_the_error_of_a_line_leaves_of_its_long_pause_is_gone_too() -> None:
    pause = 8_000_000
    for error_ns, left_ns in ((500_000, 9_000), (10_000, 400_000)):
        line = replace(RUNS, samples=90, time_ns=pause - 400_000, error_ns=error_ns)
        answer = predicted(with_pause(pause), "no-host:train.py:7", facts=ProgramFacts(lines=[line]))
        assert answer.expected_ns == pytest.approx(steady(with_pause(left_ns)), rel=0.01)
