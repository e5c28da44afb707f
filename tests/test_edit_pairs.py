"""Edits of real runs, against the peaks that the changed programs really had on the same kind of GPU (H200, H100)."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.run.owners import read_owners
from profkit.snapshot.reader import read_snapshot

TRACES = Path(__file__).parent.parent / "traces"

# Requested, allocated and reserved peaks of the programs that were really changed.
FUSED = (3_163_501_252, 3_183_029_248, 3_703_570_432)
SGD = (2_959_044_352, 2_974_878_208, 3_667_918_848)
NANOGPT_SGD = (12_870_285_520, 12_882_161_664, 16_022_241_280)
NANOGPT_CHECKPOINTS = (10_062_090_556, 10_064_621_056, 13_541_310_464)
NANOGPT_EVERY_SECOND = (11_963_683_228, 11_967_006_208, 16_018_046_976)
RESNET_CHECKPOINTS = (1_633_420_991, 1_644_867_584, 2_139_095_040)
RESNET_REENTRANT = (1_736_181_439, 1_748_545_536, 2_153_775_104)
RESNET_STAGES = (2_011_377_712, 2_022_828_032, 2_854_223_872)
ENCODER_CHECKPOINTS = (1_568_398_504, 1_571_022_848, 1_866_465_280)
MOMENTUM = (3_061_272_480, 3_077_896_704, 3_684_696_064)


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
        ("resnet50-adamw", "optimizer:adamw-fused", FUSED),
        ("resnet50-adamw", "optimizer:sgd", SGD),
        ("resnet50-adamw", "optimizer:sgd-momentum", MOMENTUM),
        ("nanogpt", "optimizer:sgd", NANOGPT_SGD),
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
        ("nanogpt", "checkpoint:h.*", NANOGPT_CHECKPOINTS, 3e-4, 0),
        ("nanogpt", "checkpoint:transformer.h.*:every=2", NANOGPT_EVERY_SECOND, 3e-4, 0),
        ("resnet50-adamw", "checkpoint:layer*.*", RESNET_CHECKPOINTS, 0.003, 0.02),
        ("resnet50-adamw", "checkpoint:layer*.*:reentrant", RESNET_REENTRANT, 0.003, 0.02),
        # Whole stages; their outputs are written in place, by a module without an allocation of its own.
        ("resnet50-adamw", "checkpoint:layer?", RESNET_STAGES, 0.003, 0.02),
        # A saved tensor goes 48 MiB of sums later, with its node; products with a bias need a workspace in backward.
        ("encoder", "checkpoint:layers.*", ENCODER_CHECKPOINTS, 0.002, None),
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


def test_a_search_finds_the_cheapest_edits_that_fit(recorded: dict[str, OpenedSnapshot]) -> None:
    nanogpt = recorded["nanogpt"]
    as_it_is = nanogpt.whatif(fit=True, capacity_bytes=20 * 2**30)
    assert as_it_is.search
    assert len(as_it_is.cases) == 1
    loss = nanogpt.whatif(fit=True, capacity_bytes=10 * 2**30)
    assert loss.search
    assert loss.cases[1].edits == ("loss:fused",)
    more = nanogpt.whatif(fit=True, capacity_bytes=4 * 2**30)
    assert more.search
    assert more.cases[1].fits
    assert any(edit.startswith("checkpoint:") for edit in more.cases[1].edits)
    never = nanogpt.whatif(fit=True, capacity_bytes=2**28)
    assert never.search is False
