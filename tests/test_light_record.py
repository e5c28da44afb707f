"""Light records: written and read back, as steps and as columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profkit.analysis.ranks.reduce import longer_on_gpu
from profkit.errors import RunError
from profkit.names import kind_of_collective
from profkit.run.light_columns import read_light, read_light_columns
from profkit.run.light_record import TOGETHER, Collectives, Group, LightRecord, StepRecord, write_light_record
from tests.rank_builder import NCCL, Delay, compare_records, light_records, simulate, write_light_run

RECORD = LightRecord(
    rank=1,
    world_size=4,
    node=1,
    device=1,
    clock_base_ns=1_795_193_514_683_000_000,
    groups=(Group(0, "0", (0, 1, 2, 3), "dp", "nccl"),),
    steps=(
        StepRecord(
            "step 3",
            100,
            9_100,
            phases=(("data", 0, 10), ("forward", 20, 400)),
            peak_bytes=1 << 30,
            throttle=("power cap",),
            collectives=Collectives([0], [41], ["all_reduce"], ["float32"], [4096], [-3], [50], [90], [None], [None]),
        ),
        StepRecord(None, 9_100, 9_200),
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "light.jsonl"


def _numbered(count: int, *steps: StepRecord, **changes: Callable[[int], Any]) -> tuple[StepRecord, ...]:
    """Return so many steps, `TOGETHER` like each of these, with what changes from one to the next."""
    changes = {"name": lambda number: f"step {number}", **changes}
    return tuple(
        replace(steps[number // TOGETHER % len(steps)], **{name: of(number) for name, of in changes.items()})
        for number in range(count)
    )


def _assert_comes_back(path: Path, *steps: StepRecord) -> str:
    write_light_record(path, replace(RECORD, steps=steps))
    assert read_light(path) == replace(RECORD, steps=steps)
    return path.read_text()


@pytest.mark.parametrize("count", [0, 1, TOGETHER, 3 * TOGETHER + 1])
def test_steps_are_read_as_they_were_written_however_many_stand_in_a_line(path: Path, count: int) -> None:
    _assert_comes_back(path, *RECORD.steps)
    # Some lines know what others do not, and hold no rows of a table.
    known = {"peak_bytes": lambda number: None if number < TOGETHER else number}
    times = {"start_ns": lambda number: number * 10_000, "end_ns": lambda number: number * 10_000 + 9_000}
    _assert_comes_back(path, *_numbered(count, *RECORD.steps, **times, **known))


def test_columns_that_several_steps_share_are_written_once(path: Path) -> None:
    assert _assert_comes_back(path, *_numbered(70, RECORD.steps[0])).count("all_reduce") == 1
    # Where they differ each time, the writer does not remember all of them.
    calls = RECORD.steps[0].collectives
    steps = _numbered(70, RECORD.steps[0], collectives=lambda number: replace(calls, bytes=[number]))
    assert _assert_comes_back(path, *steps, steps[0], steps[-1]).count('"kind":"calls"') == 71


def test_a_last_line_that_was_cut_off_is_left_out(path: Path) -> None:
    steps = _numbered(TOGETHER + 3, RECORD.steps[0])
    path.write_text(_assert_comes_back(path, *steps)[:-30])
    assert read_light(path).steps == steps[:TOGETHER]


_NO_NUMBERS = "holds something else than whole numbers"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"sequence":"41"', '"sequence":"x"', f":4: .*collectives.sequence {_NO_NUMBERS}"),
        ('"sequence":"41"', '"sequence":"?"', f":4: .*collectives.sequence {_NO_NUMBERS}"),
        ('"sequence":"41"', '"sequence":"99999999999999999999"', f":4: .*collectives.sequence {_NO_NUMBERS}"),
        ('"end_ns":"9100', '"end_ns":"-9100', ":4: .*a step ends before it starts"),
        ('"end_ns":"9100', '"end_ns":"-99999999999999999999', f":4: .*end_ns {_NO_NUMBERS}"),
        ('"sequence":"41",', "", ":4: .*collectives.sequence is missing"),
        ('"sequence":"41"', '"sequence":"41,42"', ":4: .*collectives.sequence does not hold 1 numbers"),
        ('"sequence":"41"', '"sequence":41', ":4: "),
        ('"called_ns":"-3"', '"called_ns":"-3,,"', f":4: .*collectives.called_ns {_NO_NUMBERS}"),
        ('"start_ns":"100,', '"start_ns":"now,', f":4: .*start_ns {_NO_NUMBERS}"),
        ('["data","forward"]', '["data",7]', ":4: .*a phase has a name that is no text"),
        ('["data","forward"]', '["data"]', ":4: .*a phase does not hold 2 names"),
        ('"name":["step 3",null]', '"name":"step 3"', ":4: .*name is not a list"),
        ('["power cap"]', "[7]", ":4: .*throttle has a name that is no text"),
        ('"calls":"0', '"calls":"7', ":4: "),
        ('"bytes":[4096]', '"bytes":[true]', ":3: .*collectives.bytes"),
        ('"bytes":[4096]', '"bytes":[99999999999999999999]', ":3: .*a number that is too large"),
        ('"group":[0]', '"group":[null]', ":3: .*collectives.group"),
        ('"version":3', '"version":1', ": version 1, .* no longer reads; record the run again"),
        ('"version":3', '"version":2', ": version 2, .* no longer reads; record the run again"),
        ('"version":3', '"version":4', ": version 4, .* newer profkit"),
        ('"kind":"header"', '"kind":"head"', ": .* has no header"),
    ],
)
def test_what_is_damaged_or_of_another_version_is_named(path: Path, old: str, new: str, message: str) -> None:
    text = _assert_comes_back(path, *RECORD.steps)
    assert old in text
    path.write_text(text.replace(old, new, 1) + "{")
    with pytest.raises(RunError, match=rf"light.jsonl{message}"):
        read_light(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("c10d::allreduce_", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("nccl:all_to_all_single", "all_to_all"),
        ("gloo:broadcast", "broadcast"),
        ("_reduce_oop", "reduce"),
        ("nccl:send 0->1", "send"),
        ("ampere_sgemm", None),
    ],
)
def test_names_of_torch_and_nccl_become_kinds(name: str, kind: str | None) -> None:
    assert kind_of_collective(name) == kind


RECORDED = sorted((Path(__file__).parent / "light_records").glob("*/light*.jsonl"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_phases_took_longer_on_the_gpu_is_that_of_each_step(path: Path) -> None:
    record, columns = read_light(path), read_light_columns(path)
    parts, times_ns = longer_on_gpu(columns.steps, columns.calls)
    named = [step for step in record.steps if step.name is not None]
    assert len(times_ns) == len(named)
    for number, step in enumerate(named):
        times = zip(parts, times_ns[number].tolist(), strict=True)
        found = {phase: time for (_, phase, _), time in times if time}
        assert found == {phase: time for phase, time in _longer_in(step).items() if time}


def _longer_in(step: StepRecord) -> dict[str, float]:
    """Return what phases of one step took longer on the GPU, phase by phase."""
    calls = step.collectives
    times = list(zip(calls.called_ns, calls.start_ns, calls.end_ns, strict=True))
    timed = [(called, end - start) for called, start, end in times if None not in (called, start, end)]  # type: ignore[operator]
    left, found = 0, {}
    counted = set()
    for name, start, end in step.gpu_phases:
        host = [(begin, stop) for phase, begin, stop in step.phases if phase == name]
        if name not in counted:
            counted.add(name)
            left += sum(time for called, time in timed for begin, stop in host if begin <= called < stop)  # type: ignore[operator]
            if not timed and name == "backward":
                left += sum(time or 0 for time in calls.exposed_ns)
        on_host = sum(stop - begin for begin, stop in host)
        found[name] = found.get(name, 0) + max(end - start - left - on_host, 0)
        left = max(left - (end - start), 0)
    return {name: float(time) for name, time in found.items()}


def test_records_share_the_ranks_of_a_group_that_they_all_name(tmp_path: Path) -> None:
    run = write_light_run(tmp_path / "run", light_records(simulate(2)))
    one, other = (read_light_columns(path).record.groups[0].ranks for path in sorted(run.glob("light*.jsonl")))
    assert one is other


@pytest.mark.parametrize("delay_ns", [2_000_000_000, 5_000_000_000])
def test_waits_of_seconds_are_exact(delay_ns: int) -> None:
    lines = simulate(4, delays=[Delay(1, "forward", delay_ns)])
    found = compare_records(light_records(lines))
    culprit = found.verdict.culprit
    assert (culprit.rank, culprit.cause) == (1, "python")
    assert abs(culprit.late_ns - delay_ns) < 100_000
    ends = [[(start, end) for _, start, end, name in line.kernels if name == NCCL] for line in lines]
    waited = [sum(mine[0] - last[0] for mine, last in zip(ends[rank], ends[1], strict=True)) for rank in range(4)]
    assert found.waits_ns[:, 1].tolist() == [-time for time in waited]
