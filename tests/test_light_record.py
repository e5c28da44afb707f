"""Light records: written and read back, as steps and as columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from profkit.analysis.ranks.reduce import longer_on_gpu
from profkit.errors import RunError
from profkit.names import kind_of_collective
from profkit.run.light_columns import read_light, read_light_columns
from profkit.run.light_record import TOGETHER, VERSION, Collectives, Group, LightRecord, StepRecord, write_light_record
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


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    assert read_light(path) == RECORD


def test_columns_that_several_steps_share_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    steps = tuple(replace(RECORD.steps[0], name=f"step {number}") for number in range(70))
    write_light_record(path, replace(RECORD, steps=steps))
    assert path.read_text().count("all_reduce") == 1
    assert read_light(path).steps == steps
    # Where they differ each time, the writer does not remember all of them.
    steps = tuple(
        replace(step, collectives=replace(step.collectives, bytes=[number])) for number, step in enumerate(steps)
    )
    write_light_record(path, replace(RECORD, steps=steps))
    write_light_record(path, replace(RECORD, steps=(*steps, steps[0], steps[-1])))
    assert path.read_text().count('"kind":"calls"') == 71
    assert read_light(path).steps == (*steps, steps[0], steps[-1])


def test_calls_that_no_line_before_described_are_named(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    path.write_text(path.read_text().replace('"calls":"0', '"calls":"7') + "{")
    with pytest.raises(RunError, match=r"light.jsonl:4: "):
        read_light(path)


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_version_is_refused_with_what_to_do(tmp_path: Path, version: int) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    path.write_text(path.read_text().replace(f'"version":{VERSION}', f'"version":{version}', 1))
    with pytest.raises(RunError, match=rf"light.jsonl: version {version}, .* no longer reads; record the run again"):
        read_light_columns(path)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    steps = tuple(replace(RECORD.steps[0], name=f"step {number}") for number in range(TOGETHER + 3))
    write_light_record(path, replace(RECORD, steps=steps))
    path.write_text(path.read_text()[:-30])
    assert read_light(path).steps == steps[:TOGETHER]


@pytest.mark.parametrize("count", [0, 1, TOGETHER, 3 * TOGETHER + 1])
def test_lines_of_some_steps_are_read_as_one(tmp_path: Path, count: int) -> None:
    path = tmp_path / "light.jsonl"
    # Some lines know what others do not, and hold no rows of a table.
    steps = tuple(
        replace(
            RECORD.steps[number // TOGETHER % 2],
            name=f"step {number}",
            start_ns=number * 10_000,
            end_ns=number * 10_000 + 9_000,
            peak_bytes=None if number < TOGETHER else number,
        )
        for number in range(count)
    )
    write_light_record(path, replace(RECORD, steps=steps))
    assert read_light(path).steps == steps


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"sequence":"41"', '"sequence":"x"', "collectives.sequence holds something else than whole numbers"),
        ('"sequence":"41"', '"sequence":"?"', "collectives.sequence holds something else than whole numbers"),
        (
            '"sequence":"41"',
            '"sequence":"99999999999999999999"',
            "collectives.sequence holds something else than whole",
        ),
        ('"end_ns":"9100', '"end_ns":"-9100', "a step ends before it starts"),
        ('"end_ns":"9100', '"end_ns":"-99999999999999999999', "end_ns holds something else than whole numbers"),
        ('"sequence":"41",', "", "collectives.sequence is missing"),
        ('"sequence":"41"', '"sequence":"41,42"', "collectives.sequence does not hold 1 numbers"),
        ('"sequence":"41"', '"sequence":41', ""),
        ('"called_ns":"-3"', '"called_ns":"-3,,"', "collectives.called_ns holds something else"),
        ('"start_ns":"100,', '"start_ns":"now,', "start_ns holds something else"),
        ('["data","forward"]', '["data",7]', "a phase has a name that is no text"),
        ('["data","forward"]', '["data"]', "a phase does not hold 2 names"),
        ('"name":["step 3",null]', '"name":"step 3"', "name is not a list"),
        ('["power cap"]', "[7]", "throttle has a name that is no text"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "light.jsonl"
    write_light_record(path, RECORD)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1) + "{")
    with pytest.raises(RunError, match=rf"light.jsonl:4: .*{message}"):
        read_light(path)


def test_a_file_without_a_header_is_no_light_record(tmp_path: Path) -> None:
    path = tmp_path / "light.jsonl"
    path.write_text("")
    with pytest.raises(RunError, match="no header"):
        read_light(path)
    path.write_text('{"kind": "header", "version": 4}\n')
    with pytest.raises(RunError, match="newer profkit"):
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
