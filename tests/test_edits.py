"""Edits of recorded requests: peaks counted by hand (`tests.edited_programs`), and those of programs really changed."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from profkit.allocator.requests import Requests
from profkit.allocator.simulate import simulate
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.whatif import Program
from profkit.analysis.whatif.answers import Case
from profkit.analysis.whatif.apply import apply_edits
from profkit.errors import UsageError
from profkit.names import BACKWARD, LOSS
from profkit.reading import open_snapshot
from profkit.run.owners import read_owners
from profkit.snapshot.reader import read_snapshot
from recipes.model_memory.predict import predict_memory
from recipes.whole_model.cells import Work
from tests.allocator_reference import MIB, Block
from tests.edited_programs import Blocks, opened, program_of
from tests.golden import check_transcript

KIB = 1024
SMALL = Path(__file__).parent.parent / "traces" / "small-train.snapshot.pickle.gz"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return program_of(Blocks(), tmp_path_factory.mktemp("blocks"))


def peak(program: Program, *edits: str) -> int:
    """Return the requested peak after some edits; the simulated one, which must be the same."""
    requests, _ = apply_edits(program, edits)
    settings = program.memory.history.settings
    assert simulate(requests, settings).requested_peak_bytes == requests.peak_bytes()
    return requests.peak_bytes()


def phase_peak(program: Program, requests: Requests, phase: str) -> int:
    """Return the most that was requested in any pass of a phase."""
    simulation = simulate(requests, program.memory.history.settings)
    timeline = program.memory.timeline
    spans = [timeline.moments_of(one) for one in timeline.phases if one.name == phase]
    inside = [(simulation.positions > begin - 1) & (simulation.positions < end) for begin, end in spans]
    return int(simulation.requested[np.logical_or.reduce(inside)].max())


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ("optimizer:none", 52 * MIB),
        ("optimizer:sgd", 52 * MIB),
        ("optimizer:offload", 52 * MIB),
        # Four moments of a million elements: a byte each, a float for each 256; and two tables of 1 KiB.
        ("optimizer:adamw-8bit", 56 * MIB + 4 * 16 * KIB + 2 * KIB),
        # A counter of 4 bytes for each parameter.
        ("optimizer:adamw-fused", 68 * MIB + 8),
        # Half of all but the input: without autocast activations and temporaries are of 4-byte elements.
        ("parameters:bf16", 35 * MIB),
        ("optimizer:sgd-momentum", 60 * MIB),
        ("gradients:bf16", 68 * MIB),
        # The peak moves into the second block's backward pass: 24 + 2 + 10 + 8 + 2 + 4 + 2.
        ("loss:fused", 52 * MIB),
        ("loss:fused:chunks=4", 53 * MIB),
        # Each block keeps its input alone: 24 + 2 + 2 + 2 + 20 + 2.
        ("checkpoint:h.*", 52 * MIB),
        # The first block alone keeps 8 less until the end of the loss; the second one's backward pass has 52 - 8.
        ("checkpoint:h.*:every=2", 60 * MIB),
        ("checkpoint:h.0", 60 * MIB),
    ],
)
def test_the_peak_after_an_edit_is_the_one_counted_by_hand(program: Program, edit: str, expected: int) -> None:
    assert peak(program, edit) == expected


def test_edits_add_up(program: Program) -> None:
    assert peak(program) == 68 * MIB == int(program.memory.history.curves.requested.max())
    # The first block's backward pass: 24 + 2, what is computed again 8, the gradients above and below and of both w.
    assert peak(program, "checkpoint:h.*", "loss:fused") == 46 * MIB
    assert peak(program, "checkpoint:h.*", "loss:fused", "optimizer:sgd") == 30 * MIB
    assert peak(program, "loss:fused", "checkpoint:h.*") == 46 * MIB


def test_a_recomputed_call_stops_at_the_last_tensor_that_it_keeps(program: Program) -> None:
    requests, _ = apply_edits(program, ["checkpoint:h.1"])
    added = ~requests.is_recorded
    # Its temporary and what it keeps, in each of three steps; its output is not computed again.
    assert sorted(requests.requested_bytes[added].tolist()) == [1 * MIB] * 3 + [8 * MIB] * 3
    assert phase_peak(program, requests, BACKWARD) == 60 * MIB


def test_what_is_checkpointed_already_is_left_as_it_is(tmp_path: Path) -> None:
    class First(Blocks):
        """Runs its first block again in backward."""

        def _backward(self, given: list[Block], kept: list[Block], logits: Block) -> None:
            for stage in ("START", "END"):
                for name in ("recompute", "h.0"):
                    self.mark(stage, name)
            super()._backward(given, kept, logits)

    first = program_of(First(), tmp_path)
    with pytest.raises(UsageError, match=r"checkpoint:h\.0: what matches 'h\.0' is checkpointed already"):
        apply_edits(first, ["checkpoint:h.0"])
    _, (applied,) = apply_edits(first, ["checkpoint:h.*"])
    assert applied.recomputed == ("h.1",)


def test_a_fused_step_makes_no_temporaries_and_offloaded_gradients_are_on_the_gpu_one_at_a_time(
    program: Program,
) -> None:
    assert phase_peak(program, program.recorded(), "optimizer") == 40 * MIB
    for edit, size in (("optimizer:adamw-fused", 32 * MIB + 8), ("gradients:offload", 32 * MIB)):
        requests, _ = apply_edits(program, [edit])
        assert phase_peak(program, requests, "optimizer") == size


def test_gradients_that_were_kept_are_freed_after_each_step(tmp_path: Path) -> None:
    kept = program_of(Blocks(keeps_gradients=True), tmp_path)
    assert peak(kept) == 76 * MIB
    assert peak(kept, "zero-grad:none") == 68 * MIB


@pytest.mark.parametrize(
    "edit",
    ["optimizer:sgd", "optimizer:adamw-8bit", "gradients:bf16", "gradients:offload", "checkpoint:h.1", "loss:fused"],
)
def test_an_edit_changes_only_what_it_names(program: Program, edit: str) -> None:
    named = {
        "optimizer": program.is_role("optimizer_state") | program.is_optimizer_temporary,
        "gradients": program.is_role("gradient"),
        "checkpoint": program.is_category("activations", "temporaries"),
        "loss": program.replay.requested_bytes == 20 * MIB,
    }[edit.partition(":")[0]]
    recorded, (requests, _) = program.recorded(), apply_edits(program, [edit])
    for column in ("requested_bytes", "born", "freed", "completed", "kind"):
        before, after = getattr(recorded, column), getattr(requests, column)
        kept = requests.is_recorded & ~named[requests.source]
        assert after[kept].tolist() == before[~named].tolist()


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (["speed:×2"], "no edit 'speed:×2'; edits are optimizer:none"),
        (["optimizer"], "no edit 'optimizer'"),
        (["optimizer:lion"], "optimizer:lion: no optimizer 'lion'; it is one of none, sgd"),
        (["optimizer:sgd", "optimizer:adamw-8bit"], "a program has one optimizer"),
        (["gradients:fp8"], "no kind of gradients 'fp8'"),
        (["gradients:bf16", "gradients:bf16"], None),
        (["batch:×2"], "batch:×2: what it does to memory is not known"),
        (
            ["checkpoint:layers.*"],
            "nothing in a forward pass before a backward pass matches 'layers.*'; ranges are step *, h.*",
        ),
        (["checkpoint:h.*:every=0"], "write checkpoint:GLOB"),
        (["zero-grad:none"], "no known gradient outlives the step"),
        (["loss:chunked"], "no kind of loss"),
    ],
)
def test_what_cannot_be_modelled_is_refused(program: Program, edits: list[str], message: str | None) -> None:
    if message is None:
        apply_edits(program, edits)
        return
    with pytest.raises(UsageError) as caught:
        apply_edits(program, edits)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "edit", "refused"),
    [
        ("small-train", "gradients:bf16", "gradients is only guessed from their lifetimes; `profkit run --memory`"),
        ("small-train", "parameters:bf16", "gradients is only guessed"),
        ("resnet50-adamw", "parameters:bf16", "parameters is only guessed"),
        ("nanogpt-default", "optimizer:sgd", "optimizer state is only guessed"),
    ],
)
def test_what_a_snapshot_without_a_run_only_guesses_is_not_edited(name: str, edit: str, refused: str) -> None:
    real = Program(open_snapshot(TRACES / f"{name}.snapshot.pickle.gz").device())
    with pytest.raises(UsageError, match=refused):
        apply_edits(real, [edit])


def test_an_optimizer_state_that_call_stacks_prove_is_edited_as_if_the_run_had_recorded_it(
    recorded: dict[str, OpenedSnapshot],
) -> None:
    for name in ("resnet50-adamw", "nanogpt"):
        alone = open_snapshot(TRACES / f"{name}.snapshot.pickle.gz")
        for kind in ("none", "sgd", "sgd-momentum", "adamw-8bit", "offload", "adamw-fused"):
            try:
                known = recorded[name].whatif(edits=[f"optimizer:{kind}"], capacity_bytes=2**37).cases[1]
            except UsageError as error:
                with pytest.raises(UsageError, match=re.escape(str(error))):
                    alone.whatif(edits=[f"optimizer:{kind}"])
                continue
            assert alone.whatif(edits=[f"optimizer:{kind}"], capacity_bytes=2**37).cases[1] == known


def test_a_real_model_with_every_layer_checkpointed_has_the_peaks_that_its_sizes_give() -> None:
    """The prediction from the model's sizes was measured on an H200, to the byte."""
    real = Program(open_snapshot(SMALL).device())
    requests, _ = apply_edits(real, ["checkpoint:layer *"])
    expected = predict_memory(Work("small", 256, batch=4, dtype="fp32", checkpoint_layers=1))
    for phase in (LOSS, BACKWARD):
        assert phase_peak(real, requests, phase) == next(one.bytes for one in expected.peaks if one.phase == phase)


def test_a_search_lets_the_request_through_that_ended_the_program(tmp_path: Path) -> None:
    training = Blocks()
    allocator = training.allocator
    # 24 MiB are live then, 16 of them Adam's state; today's reserved peak is far below the capacity.
    allocator.run_out(100 * MIB, device_free=0)
    snapshot = opened(training, tmp_path)
    result = snapshot.whatif(fit=True, capacity_bytes=130 * MIB)
    assert result.search
    assert result.cases[1].edits == ("optimizer:adamw-8bit",)
    assert result.edited is not None
    parts = {part.name: part.after_bytes for part in result.edited.by_category}
    assert parts["(the request that failed)"] == 100 * MIB
    assert snapshot.whatif(fit=True, capacity_bytes=200 * MIB).cases[1].edits == ()


def test_modules_are_found_where_no_range_has_their_names(tmp_path: Path) -> None:
    class Named(Blocks):
        """Its ranges are called otherwise than its modules."""

        module = ""

        def mark(self, stage: str, name: str) -> None:
            self.module = f"blocks.{name[-1]}" if name.startswith("h.") and stage == "START" else ""
            super().mark(stage, name)

        def malloc(self, size: int, stack: str, owner: tuple[str, str] | None = None) -> Block:
            made = super().malloc(size, stack, owner)
            if stack == "forward":
                self.allocator.events[-1]["user_metadata"] = f"profkit:forward:{self.module}"
            return made

    named = program_of(Named(), tmp_path)
    assert peak(named, "checkpoint:blocks.*") == peak(named, "checkpoint:h.*") == 52 * MIB
    assert peak(named, "checkpoint:blocks.*:group=2") == peak(named, "checkpoint:h.*:group=2")


# -- the command ------------------------------------------------------------------------------------------------


def test_what_whatif_prints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    opened(Blocks(), run)
    edits = ("optimizer:sgd", "checkpoint:h.*", "loss:fused", "optimizer:lion", "sequence:×2")
    calls = [
        ("--edit", "checkpoint:h.*", "--edit", "optimizer:sgd"),
        *(("--edit", edit, "--format", style) for edit in edits for style in ("json", "csv")),
        *(("--fit", size) for size in ("200MiB", "60MiB", "1MiB")),
        ("--fit", "60MiB", "--format", "json"),
        ("--fit", "1GiB", "--edit", "loss:fused"),
        *(("--allocator", "expandable_segments:True", "--format", style) for style in ("table", "json")),
        ("--capacity", "60MiB", "--full-names"),
    ]
    check_transcript("whatif-memory", [("whatif", run, *words) for words in calls])


# -- real runs -------------------------------------------------------------------------------------------------------


TRACES = Path(__file__).parent.parent / "traces"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedSnapshot]:
    folder = tmp_path_factory.mktemp("pairs")
    found = {}
    for path in TRACES.glob("*.ledger.jsonl.gz"):
        name = path.name.partition(".")[0]
        ledger = folder / f"{name}.jsonl"
        ledger.write_bytes(gzip.decompress(path.read_bytes()))
        found[name] = OpenedSnapshot(read_snapshot(TRACES / f"{name}.snapshot.pickle.gz"), read_owners(ledger))
    return found


@pytest.mark.parametrize(
    ("name", "edit", "really"),
    [
        ("resnet50-adamw", "optimizer:adamw-fused", (3_163_501_252, 3_183_029_248, 3_703_570_432)),
        ("resnet50-adamw", "optimizer:sgd", (2_959_044_352, 2_974_878_208, 3_667_918_848)),
        ("resnet50-adamw", "optimizer:sgd-momentum", (3_061_272_480, 3_077_896_704, 3_684_696_064)),
        ("nanogpt", "optimizer:sgd", (12_870_285_520, 12_882_161_664, 16_022_241_280)),
    ],
)
def test_edits_of_known_tensors_are_exact(
    recorded: dict[str, OpenedSnapshot], name: str, edit: str, really: tuple[int, int, int]
) -> None:
    case = recorded[name].whatif(edits=[edit]).cases[1]
    assert (case.requested_peak_bytes, case.allocated_peak_bytes, case.reserved_peak_bytes) == really
    assert case.edits == (edit,)


@pytest.mark.parametrize(
    ("name", "edit", "really", "allocated_off", "reserved_off"),
    [
        ("nanogpt", "checkpoint:h.*", (10_062_090_556, 10_064_621_056, 13_541_310_464), 3e-4, 0),
        ("nanogpt", "checkpoint:transformer.h.*:every=2", (11_963_683_228, 11_967_006_208, 16_018_046_976), 3e-4, 0),
        ("resnet50-adamw", "checkpoint:layer*.*", (1_633_420_991, 1_644_867_584, 2_139_095_040), 0.003, 0.02),
        ("resnet50-adamw", "checkpoint:layer*.*:reentrant", (1_736_181_439, 1_748_545_536, 2_153_775_104), 0.003, 0.02),
        # Whole stages; their outputs are written in place, by a module without an allocation of its own.
        ("resnet50-adamw", "checkpoint:layer?", (2_011_377_712, 2_022_828_032, 2_854_223_872), 0.003, 0.02),
        # A saved tensor goes 48 MiB of sums later, with its node; products with a bias need a workspace in backward.
        ("encoder", "checkpoint:layers.*", (1_568_398_504, 1_571_022_848, 1_866_465_280), 0.002, None),
    ],
)
def test_checkpoints_are_exact_in_requested_and_near_in_other_bytes_which_lie_in_the_ranges(
    recorded: dict[str, OpenedSnapshot],
    name: str,
    edit: str,
    really: tuple[int, int, int],
    allocated_off: float,
    reserved_off: float | None,
) -> None:
    case = recorded[name].whatif(edits=[edit]).cases[1]
    assert not case.exact
    assert case.requested_peak_bytes == really[0]
    assert case.allocated_peak_bytes == pytest.approx(really[1], rel=allocated_off)
    if reserved_off is not None:
        assert case.reserved_peak_bytes == pytest.approx(really[2], rel=reserved_off, abs=0)
    ranges = (case.requested_range_bytes, case.allocated_range_bytes, case.reserved_range_bytes)
    for (low, high), true in zip(ranges, really, strict=True):
        assert high is not None
        assert low <= true <= high
        assert high < 1.4 * low


def test_a_model_in_bf16_needs_half_for_all_but_its_indices(recorded: dict[str, OpenedSnapshot]) -> None:
    """This ledger does not say how large an element is: the indices of the pooling have 8 bytes and stay."""
    case = recorded["resnet50-adamw"].whatif(edits=["parameters:bf16"]).cases[1]
    assert case.requested_peak_bytes == pytest.approx(1_660_860_540, rel=0.025)


@pytest.mark.parametrize("edit", ["checkpoint:transformer.h.*", "checkpoint:transformer.h.*:every=2"])
def test_no_peak_of_a_range_lies_below_that_which_it_holds(recorded: dict[str, OpenedSnapshot], edit: str) -> None:
    for allocator in ("", "expandable_segments:True"):
        case = recorded["nanogpt"].whatif(edits=[edit], allocators=[allocator]).cases[1]
        ranges = (case.requested_range_bytes, case.allocated_range_bytes, case.reserved_range_bytes)
        lows, highs = zip(*ranges, strict=True)
        assert [*lows] == sorted(lows)
        assert [*highs] == sorted(highs)


def test_an_edited_program_fits_if_the_upper_end_does_and_not_if_the_lower_does_not(
    recorded: dict[str, OpenedSnapshot],
) -> None:
    def case_in(capacity_bytes: int) -> Case:
        return recorded["resnet50-adamw"].whatif(edits=["checkpoint:layer*.*"], capacity_bytes=capacity_bytes).cases[1]

    low, high = case_in(2 * 2**30).reserved_range_bytes
    assert high is not None
    assert low < 2 * 2**30 < high
    assert [case_in(size).fits for size in (high, 2 * 2**30, 3 * 2**29)] == [True, None, False]


def test_what_a_search_names_when_nothing_fits_has_the_lowest_reserved_peak() -> None:
    """A fused loss alone asks for less than today, and its segments take more."""
    snapshot = open_snapshot(TRACES / "small-train.snapshot.pickle.gz")
    found = snapshot.whatif(fit=True, capacity_bytes=2**30)
    assert found.search is False
    named = found.cases[1].reserved_peak_bytes
    assert named is not None
    for edits in ([], ["loss:fused"], ["checkpoint:layer *:every=2", "loss:fused"]):
        for allocator in ("", "expandable_segments:True"):
            other = snapshot.whatif(edits=edits, allocators=[allocator]).cases[1].reserved_peak_bytes
            assert other is not None
            assert named <= other


def test_a_search_finds_the_cheapest_edits_that_fit(recorded: dict[str, OpenedSnapshot]) -> None:
    for capacity_bytes, kind in ((10 * 2**30, "loss:fused"), (4 * 2**30, "checkpoint:")):
        found = recorded["nanogpt"].whatif(fit=True, capacity_bytes=capacity_bytes)
        assert found.search
        assert found.cases[1].fits
        assert any(edit.startswith(kind) for edit in found.cases[1].edits)
