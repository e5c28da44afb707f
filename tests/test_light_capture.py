"""The light record that each rank leaves: by real processes with gloo on the CPU, and by stand-ins for NCCL's."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.forked_scripts import Forks

torch = pytest.importorskip("torch")

from profkit.capture import flight_recorder, light  # noqa: E402
from profkit.capture.flight_recorder import FlightRecorder  # noqa: E402
from profkit.capture.hooks.backward_nodes import Carrier, at_graph_end, watch_graph_end  # noqa: E402
from profkit.capture.light import LightRecorder  # noqa: E402
from profkit.capture.steps import times  # noqa: E402
from profkit.capture.steps.times import Mark, Span  # noqa: E402
from profkit.run.directory import Run  # noqa: E402
from profkit.run.light_columns import read_light  # noqa: E402
from profkit.run.light_record import LightRecord, StepRecord  # noqa: E402
from profkit.trace.kineto import CollectiveArguments  # noqa: E402

RANKS = 4

SCRIPT = """
import json, os, sys
from dataclasses import asdict
sys.path[:0] = [os.getcwd()]
import torch
from profkit.capture.flight_recorder import logged_collectives
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

distributed.init_process_group("gloo")
rank = distributed.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8), process_group=mesh.get_group("dp"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=1)
for batch in batches:
    output = model(batch)
    gathered = [torch.empty(1, 8) for _ in range(2)]
    distributed.all_gather(gathered, output.detach(), group=mesh.get_group("tp"))
    loss = output.square().sum()
    loss.backward()
    optimizer.step()
with open(f"logged-{rank}", "w") as file:
    json.dump([asdict(call) for call in logged_collectives(0)], file)
del model  # or torch may wait, with the GIL, for gloo's thread, which waits for the GIL
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """Four ranks in a mesh of two by two, recorded by torch.profiler in steps 2 and 3 of 12."""
    folder = tmp_path_factory.mktemp("light")
    forks.record_ranks(folder, SCRIPT, RANKS, "--warmup", "2", "--steps", "2", "--no-lines")
    return folder


@pytest.fixture(scope="module")
def records(place: Path) -> dict[int, LightRecord]:
    return {rank: read_light(path) for rank, path in Run(place / "run").light_records.items()}


def test_every_rank_leaves_all_its_steps_also_those_after_the_recording(records: dict[int, LightRecord]) -> None:
    assert list(records) == list(range(RANKS))
    for rank, record in records.items():
        assert (record.rank, record.world_size, record.source) == (rank, RANKS, "light")
        assert [step.name for step in record.steps] == [f"step {number}" for number in range(12)]
        for step in record.steps[1:]:
            phases = {phase for phase, start, end in step.phases if start < end}
            assert {"data", "forward", "loss", "backward", "optimizer"} <= phases
            assert 0 < sum(end - start for _, start, end in step.phases) <= step.end_ns - step.start_ns


def test_collectives_carry_group_ranks_sequence_type_and_bytes(records: dict[int, LightRecord]) -> None:
    for rank, record in records.items():
        named = {group.dimension: group for group in record.groups}
        assert named["dp"].ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
        assert named["tp"].ranks == ((0, 1) if rank < 2 else (2, 3))
        assert named["tp"].backend == "gloo"
        last = record.steps[-1].collectives
        rows = list(zip(last.group, last.kind, last.dtype, last.bytes, strict=True))
        # 8 x 8 weights and 8 biases of the gradient; two outputs of 8.
        expected = [
            (named["tp"].number, "all_gather", "float32", 64),
            (named["dp"].number, "all_reduce", "float32", 288),
        ]
        assert rows == expected
        called = [time for time in last.called_ns if time is not None]
        assert 0 < called[0] < called[1] < record.steps[-1].end_ns - record.steps[-1].start_ns


def test_a_collective_has_the_same_sequence_number_on_all_ranks_of_its_group(records: dict[int, LightRecord]) -> None:
    def sequences(rank: int, dimension: str) -> list[int]:
        numbers = {group.number for group in records[rank].groups if group.dimension == dimension}
        found = [step.collectives for step in records[rank].steps]
        return [seq for one in found for at, seq in zip(one.group, one.sequence, strict=True) if at in numbers]

    for one, other, dimension in ((0, 2, "dp"), (1, 3, "dp"), (0, 1, "tp"), (2, 3, "tp")):
        assert sequences(one, dimension) == sequences(other, dimension)
        assert len(set(sequences(one, dimension))) == len(sequences(one, dimension)) >= 12


def test_what_a_trace_of_cuda_alone_lacks_of_collectives_is_logged_as_torch_profiler_says_it(place: Path) -> None:
    for rank in range(RANKS):
        *_, gathered, reduced = json.loads((place / f"logged-{rank}").read_text())
        assert (gathered["kind"], reduced["kind"]) == ("all_gather", "all_reduce")
        described = CollectiveArguments({})
        for call in (gathered, reduced):
            described.add({"args": call["arguments"]})
        assert [(call.kind, call.ranks, call.dimension, call.dtype, call.byte_count) for call in described.found] == [
            ("all_gather", (0, 1) if rank < 2 else (2, 3), "tp", "float32", 64),
            ("all_reduce", (0, 2) if rank % 2 == 0 else (1, 3), "dp", "float32", 288),
        ]
        assert [call.sequence for call in described.found] == [call["arguments"]["Seq"] for call in (gathered, reduced)]


class Recorder:
    """A flight recorder of NCCL's whose ring, clock and watchdog the test moves."""

    def __init__(self, ring: int) -> None:
        self.ring = ring
        self.entries: list[dict[str, Any]] = []
        self.count = 0

    def call(self, now_ns: int, **more: Any) -> None:
        entry = {
            "record_id": self.count,
            "process_group": ("0", "mesh_fsdp"),
            "collective_seq_id": self.count + 1,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "profiling_name": "nccl:_reduce_scatter_base",
            "time_created_ns": now_ns,
            "input_sizes": [[4, 100]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[100]],
            "output_dtypes": ["BFloat16"],
            "retired": True,
            "duration_ms": 0.002,
            **more,
        }
        self.count += 1
        self.entries = [*self.entries, entry][-self.ring :]

    def dump(self, **_options: bool) -> bytes:
        return pickle.dumps({"entries": self.entries, "pg_config": {"0": {"ranks": "[0, 1, 2, 3]"}}})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder(1000)
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_nccl_trace", made.dump, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda **_: pickle.dumps({}), raising=False)
    return made


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host's clock, which the test moves."""
    now = [0]
    monkeypatch.setattr(light, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(light, "time_ns", lambda: 1_000_000)
    monkeypatch.setattr(light, "several_ranks", lambda: True)
    monkeypatch.setattr(light.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(light.distributed, "get_world_size", lambda: 4)
    return now


class Rank:
    """A rank whose light record is made of steps that the test makes."""

    def __init__(self, folder: Path, recorder: Recorder, ticks: list[int]) -> None:
        self.folder, self.recorder, self.ticks = folder, recorder, ticks
        self.record = LightRecorder(folder)

    def call(self, at_ns: int, **more: Any) -> None:
        """Call a collective so long after the step's start."""
        self.recorder.call(1_000_000 + self.ticks[0] + at_ns, **more)

    def step(
        self, number: int, spans: Sequence[Span] = (), calls: Iterable[int] = (), length_ns: int = 1_000, **how: Any
    ) -> None:
        self.record.step_begins(number, **how)
        for at_ns in calls:
            self.call(at_ns)
        self.ticks[0] += length_ns
        self.record.step_ended([*spans])

    def steps(self, numbers: range, calls: int = 1, **how: Any) -> None:
        """Make steps of 1,000 ns, with this many collectives each."""
        for number in numbers:
            now = self.ticks[0]
            forward = Span("forward", Mark(now + 100, None), Mark(now + 500, None))
            self.step(number, [forward], range(10, 10 * calls + 1, 10), **how)

    def left(self, *, is_over: bool = True) -> tuple[StepRecord, ...]:
        """Return the steps in the file, by default as it is at the end of the process."""
        if is_over:
            self.record.end()
        return read_light(self.folder / "light.rank1.jsonl").steps

    @property
    def names(self) -> list[str | None]:
        """Return the names of the steps that are left at the end."""
        return [step.name for step in self.left()]


@pytest.fixture
def rank(tmp_path: Path, recorder: Recorder, ticks: list[int]) -> Rank:
    return Rank(tmp_path, recorder, ticks)


def test_the_durations_of_nccl_give_start_and_end(rank: Rank) -> None:
    rank.step(0, calls=(100, 600, 2000), length_ns=5000)
    (step,) = rank.left()
    (group,) = read_light(rank.folder / "light.rank1.jsonl").groups
    assert (group.dimension, group.backend, group.ranks) == ("fsdp", "nccl", (0, 1, 2, 3))
    calls = step.collectives
    assert (calls.kind, calls.dtype, calls.bytes) == (["reduce_scatter"] * 3, ["bfloat16"] * 3, [800] * 3)
    assert calls.called_ns == [100, 600, 2000]
    # The second is called while the first runs for 2,000 ns, and begins when that has ended.
    assert (calls.start_ns, calls.end_ns) == ([100, 2100, 4100], [2100, 4100, 6100])


def test_a_step_waits_one_writing_for_the_durations_of_its_collectives(rank: Rank) -> None:
    rank.steps(range(7))
    rank.call(10, retired=False, duration_ms=None)
    rank.step(7)
    assert len(rank.left(is_over=False)) == 7
    rank.recorder.entries[-1].update(retired=True, duration_ms=0.5)
    assert rank.left()[7].collectives.end_ns == [500_010]


def test_a_step_of_which_the_ring_lost_collectives_has_none(rank: Rank) -> None:
    rank.recorder.ring = 10
    rank.steps(range(8), calls=4)
    assert [len(step.collectives) for step in rank.left()] == [0, 0, 0, 0, 0, 0, 4, 4]


def test_after_128_steps_rows_of_32_are_kept(rank: Rank) -> None:
    rank.steps(range(1600))
    kept = [*range(128), *range(512, 544), *range(1024, 1056), *range(1536, 1568)]
    assert rank.names == [f"step {number}" for number in kept]
    assert all(len(step.collectives) == 1 for step in rank.left())


def test_half_an_hour_leaves_a_megabyte_and_nothing_grows(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """90,000 steps of 20 ms with four collectives each, of which the flight recorder holds the last 200."""
    rank.recorder.ring = 200
    monkeypatch.setattr(light, "RING", 200)
    held: list[int] = []
    # The steps between two rows begin and end, and nothing else: some of them will do.
    numbers = [*range(140), *(at for at in range(140, 90_000) if at % (512 if at < 10_000 else 4096) < 42)]
    tracemalloc.start()
    try:
        for number in numbers:
            start = rank.ticks[0] = number * 20_000_000
            wants_phases = rank.record.step_begins(number)
            for call in range(4 if wants_phases else 0):
                rank.call(10 * (call + 1), duration_ms=None)
            marks = [Mark(start + at * 3_000_000, None) for at in range(6)]
            names = ("data", "forward", "loss", "backward", "optimizer") if wants_phases else ()
            rank.ticks[0] += 19_000_000
            rank.record.step_ended([Span(name, marks[at], marks[at + 1]) for at, name in enumerate(names)])
            if number % 16_384 == 41:
                held.append(tracemalloc.get_traced_memory()[0])
        steps = rank.left()
    finally:
        tracemalloc.stop()
    assert max(held[2:]) < held[1] + 200_000
    assert 1_000 < len(steps) < 1_700
    assert all(len(step.collectives) == 4 for step in steps)
    assert (rank.folder / "light.rank1.jsonl").stat().st_size < 1_300_000


def test_steps_that_other_ranks_record_in_full_are_kept_too(rank: Rank) -> None:
    rank.steps(range(300))
    rank.steps(range(300, 305), is_recorded=True)
    rank.steps(range(305, 312))
    assert len(rank.left(is_over=False)) == 128
    rank.steps(range(312, 313))
    assert [step.name for step in rank.left(is_over=False)[128:]] == [f"step {number}" for number in range(300, 305)]


def test_recorded_steps_are_kept_however_late_but_not_endlessly_and_counting_anew_begins_the_file_anew(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light, "_MOST_RECORDED", 3)
    rank.steps(range(5_300, 5_305), is_recorded=True)
    assert rank.names == ["step 5300", "step 5301", "step 5302"]
    rank.record = LightRecorder(rank.folder)
    rank.steps(range(9))
    rank.steps(range(1, 4))
    assert rank.names == ["step 1", "step 2", "step 3"]


def test_a_failure_ends_the_record_in_one_line_and_not_the_program(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.record = LightRecorder(rank.folder / "gone")
    rank.steps(range(20))
    rank.record.end()
    (line,) = capsys.readouterr().err.splitlines()
    assert "the light record of this rank ends here (FileNotFoundError" in line


def test_a_process_alone_leaves_none(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "several_ranks", lambda: False)
    assert not rank.record.step_begins(0)
    rank.record.step_ended([])
    rank.record.end()
    assert not list(rank.folder.iterdir())


@pytest.mark.parametrize(
    ("version", "given", "added"),
    [
        ("2.4.0", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ("2.13.0+cpu", {}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ("2.13.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, {}),
    ],
)
def test_the_ring_is_asked_for_by_the_name_that_torch_knows(
    version: str, given: dict[str, str], added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(given)
    monkeypatch.setattr(flight_recorder.torch, "__version__", version)
    monkeypatch.setattr(flight_recorder.os, "environ", environment)
    flight_recorder.turn_on()
    assert environment == {**given, **added}


def test_nccl_is_not_asked_for_times_which_cost_more_than_all_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(flight_recorder.os, "environ", environment)
    monkeypatch.setattr(light.distributed, "destroy_process_group", lambda: None)
    LightRecorder(Path()).begin()
    assert len(environment) == 1
    assert "TORCH_NCCL_ENABLE_TIMING" not in environment


def test_the_end_of_a_graph_is_seen_before_what_its_nodes_wait_for() -> None:
    seen: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda _: at_graph_end(lambda: seen.append("reduced")))
    loss = (weight * 2).sum()
    carrier = Carrier()
    unwatch = watch_graph_end([None, loss], lambda: seen.append("computed"), carrier)
    assert unwatch is not None
    loss.backward(retain_graph=True)
    unwatch()
    loss.backward()
    assert seen == ["computed", "reduced", "reduced"]
    assert watch_graph_end([weight], lambda: seen.append("never"), carrier) is None


def test_a_torch_without_a_flight_recorder_has_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        monkeypatch.delattr(c10d, name, raising=False)
    flight = FlightRecorder()
    flight.look()
    assert flight.between(0, 2**63) == []
    assert flight.group("0", 0).ranks == ()


def test_nccls_collectives_count_from_the_first_where_gloos_came_before(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloo = Recorder(1000)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", gloo.dump, raising=False)
    flight = FlightRecorder()
    for now_ns in (10, 20, 30):
        gloo.call(now_ns, profiling_name="gloo:all_reduce")
    flight.look()
    assert [one.called_ns for one in flight.between(0, 2**63)] == [10, 20, 30]
    for now_ns in (40, 50):
        recorder.call(now_ns)
    flight.look()
    gloo.call(60, profiling_name="gloo:all_reduce")
    recorder.call(70)
    flight.look()
    assert [one.called_ns for one in flight.between(40, 80)] == [40, 50, 70]


@pytest.mark.parametrize(
    ("collectives", "reading_ns", "period"),
    [
        (100, 0, 8),  # twice as many as the ring holds between two readings are lost otherwise
        (5, 0, 128),
        (100, 200, 64),  # 1 part in 200 of 64 steps of 1,000 ns
        (100, 1_000_000, 136),  # never, but for some steps after the last of a row
    ],
)
def test_the_file_is_written_as_seldom_as_its_cost_asks_and_the_ring_allows(
    collectives: int, reading_ns: int, period: int, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(**_options: bool) -> bytes:
        rank.ticks[0] += reading_ns
        return rank.recorder.dump()

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", slow)
    rank.steps(range(8), calls=collectives)
    written = len(rank.left(is_over=False))
    rank.steps(range(8, period - 1))
    assert len(rank.left(is_over=False)) == written
    rank.steps(range(max(8, period - 1), max(16, period)))
    assert len(rank.left(is_over=False)) > written


class Event:
    """An event of CUDA's that the GPU passes at a time that the test says."""

    def __init__(self, passed_ns: int) -> None:
        self.passed_ns = passed_ns

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return (later.passed_ns - self.passed_ns) / 1e6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, ticks: list[int]) -> list[Event]:
    """A GPU whose clock is the host's; what is recorded there is noted, and its events can be used again."""
    unused: list[Event] = []
    cuda = light.torch.cuda
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(light, "mark_on_gpu", lambda: Mark(ticks[0], Event(ticks[0])))
    monkeypatch.setattr(light, "give_back", lambda _device, events: unused.extend(events))
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", lambda: {"allocated_bytes": {"all": {"peak": 2000}}})
    monkeypatch.setattr(light, "_PATIENCE_S", 0.0)
    return unused


def _mark(at_ns: int, passed_ns: int | None = None, device: int = 0) -> Mark:
    """Return a mark that the host makes then, and the GPU passes at once, or later."""
    return Mark(at_ns, Event(at_ns if passed_ns is None else passed_ns), device)


def test_what_a_backward_pass_waited_for_at_its_end_is_noted_with_its_last_collective(
    rank: Rank, gpu: list[Event]
) -> None:
    for number in range(2):
        start = rank.ticks[0]
        for at in (3_000, 4_000, 7_000):
            rank.call(at, profiling_name="nccl:all_reduce", duration_ms=None)
        ends = [_mark(start + at, start + passed) for at, passed in ((2_000, 2_500), (5_000, 9_000), (4_900, 8_600))]
        forward = Span("forward", _mark(start + 1_000, start + 1_100), ends[0])
        rank.step(number, [forward, Span("backward", _mark(start + 2_000, start + 2_500), *ends[1:])], (), 10_000)
    steps = rank.left()
    assert [step.gpu_phases for step in steps] == [(("forward", 1_100, 2_500), ("backward", 2_500, 9_000))] * 2
    assert [step.collectives.exposed_ns for step in steps] == [[None, 400, None]] * 2
    assert [step.collectives.end_ns for step in steps] == [[None] * 3] * 2
    # The GPU had left the first step's backward pass for 2,100 ns when the second's forward pass began.
    assert [step.launch_wait_ns for step in steps] == [0, 2_100]
    assert [step.peak_bytes for step in steps] == [2000] * 2
    # Of each step all events but the one that the next step's times count from, and the one that this step's did.
    assert sorted(event.passed_ns for event in gpu) == [0, 1_100, 2_500, 2_500, 8_600, 9_000] + [
        10_000 + time for time in (2_500, 2_500, 8_600, 9_000)
    ]


def test_the_events_of_many_steps_are_read_at_once_but_of_none_that_the_gpu_has_not_passed(
    rank: Rank, gpu: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light, "_FIRST_PERIOD", 64)
    passed_ns = [0]
    monkeypatch.setattr(Event, "query", lambda event: event.passed_ns <= passed_ns[0])
    for number in range(16):
        if number == 15:
            passed_ns[0] = 10_950  # all of steps 0 to 10
            assert gpu == []
        rank.step(number, [Span("forward", _mark(number * 1_000 + 100), _mark(number * 1_000 + 900))])
    assert len(gpu) == 2 * 11
    passed_ns[0] = 1_000_000
    assert [step.gpu_phases for step in rank.left()] == [(("forward", 100, 900),)] * 16


def test_steps_that_the_gpu_has_not_passed_when_the_process_ends_keep_their_times_on_the_host(
    rank: Rank, gpu: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "query", lambda event: event.passed_ns <= 1_000)
    for number in range(2):
        start = rank.ticks[0]
        loaded = Mark(start + 10, times._HOST), Mark(start + 90, times._HOST)
        rank.step(number, [Span("data", *loaded), Span("forward", _mark(start + 100), _mark(start + 900))])
    steps = rank.left()
    assert [step.phases for step in steps] == [(("data", 10, 90), ("forward", 100, 900))] * 2
    assert [step.gpu_phases for step in steps] == [(("forward", 100, 900),), ()]


def test_phases_on_another_gpu_are_left_out_until_the_process_has_gone_over_to_it(
    rank: Rank, gpu: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = [0]
    monkeypatch.setattr(light, "_READ_TOGETHER", 1)
    monkeypatch.setattr(light, "mark_on_gpu", lambda: _mark(rank.ticks[0], device=device[0]))
    for number, (forward, backward) in enumerate(((0, 0), (0, 1), (1, 1), (1, 1))):
        start = rank.ticks[0]
        spans = [
            Span(name, _mark(start + at, device=on), _mark(start + at + 200, device=on))
            for name, at, on in (("forward", 100, forward), ("backward", 500, backward))
        ]
        computed = _mark(start + 600, device=1 - backward)
        rank.record.step_begins(number)
        device[0] = backward
        rank.ticks[0] += 1_000
        rank.record.step_ended([spans[0], spans[1]._replace(computed=computed)])
    both = ("forward", 100, 300), ("backward", 500, 700)
    steps = rank.left()
    assert [step.gpu_phases for step in steps] == [both, both[:1], (), both]
    assert [len(step.phases) for step in steps] == [2] * 4
