"""A light record as columns: the same as its steps one by one, by a second and slower method."""

from __future__ import annotations

from pathlib import Path

import pytest

from profkit.analysis.ranks.costs import longer_on_gpu
from profkit.run.light_columns import UNKNOWN, columns_of, read_light, read_light_columns
from profkit.run.light_record import StepRecord
from tests.rank_builder import NCCL, Delay, compare_records, light_records, plain_columns, simulate, write_light_run

RECORDED = sorted((Path(__file__).parent / "light_records").glob("*/light*.jsonl"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_and_its_steps_one_by_one_give_the_same_columns(path: Path) -> None:
    assert plain_columns(columns_of(read_light(path)[1])) == plain_columns(read_light_columns(path))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_columns_hold_what_each_collective_of_the_file_says(path: Path) -> None:
    record, columns = read_light(path)[1], read_light_columns(path).calls
    rows = [
        (number, *(getattr(step.collectives, name)[row] for name in ("group", "sequence", "bytes", "called_ns")))
        for number, step in enumerate(record.steps)
        for row in range(len(step.collectives))
    ]
    found = zip(columns.step, columns.group, columns.sequence, columns.bytes, columns.called_ns, strict=True)
    assert [tuple(None if value == UNKNOWN else int(value) for value in row) for row in found] == rows
    kinds = [kind for step in record.steps for kind in step.collectives.kind]
    assert [columns.names[what][0] for what in columns.what] == kinds


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_phases_took_longer_on_the_gpu_is_that_of_each_step(path: Path) -> None:
    record, columns = read_light(path)[1], read_light_columns(path)
    longer = longer_on_gpu(columns.steps, columns.calls)
    named = [step for step in record.steps if step.name is not None]
    assert len(longer) == len(named)
    for number, step in enumerate(named):
        times = zip(longer.parts, longer.times_ns[number].tolist(), strict=True)
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
    assert culprit is not None
    assert (culprit.rank, culprit.cause) == (1, "python")
    assert abs(culprit.late_ns - delay_ns) < 100_000
    ends = [[(start, end) for _, start, end, name in line.kernels if name == NCCL] for line in lines]
    waited = [sum(mine[0] - last[0] for mine, last in zip(ends[rank], ends[1], strict=True)) for rank in range(4)]
    assert found.waits_ns[:, 1].tolist() == [-time for time in waited]
