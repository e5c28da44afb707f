"""``profkit memory`` as a person meets it, and two snapshots compared by their peaks."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.analysis.memory.compare import Comparison
from profkit.cli.memory import memory
from profkit.report.commands.memory import BY, memory_table
from tests.allocator_reference import MIB
from tests.captures import capture
from tests.golden import check_transcript
from tests.memory_captures import Training
from tests.test_memory_modules import Layers


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(memory, [str(one) for one in arguments], catch_exceptions=True)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return Training().write(tmp_path)


def made_in(folder: Path) -> dict[str, Path]:
    """Write made captures: runs with a ledger, and snapshots that lack something."""
    for name, training in (("run", Training()), ("layers", Layers()), ("none", None)):
        (folder / name).mkdir()
        if training is not None:
            training.write_run(folder / name)
    failing, late, without = Training(), Training(), Training()
    failing.allocator.run_out(300 * MIB, device_free=20 * MIB)
    late.allocator.max_entries = 40
    late.step(3, False)
    without.allocator.events.clear()
    named = {"failing": failing, "late": late, "without": without, "leaking": Training(leaks=True, steps=4)}
    snapshots = {name: training.write(folder, f"{name}.pickle") for name, training in named.items()}
    return snapshots | {name: folder / name for name in ("run", "layers", "none")}


STYLES = ("table", "markdown", "latex", "csv")
CALLS = (
    "run",
    *(f"leaking --leaks --format {style}" for style in STYLES),
    "leaking --at phase:forward --stack adam.py --min-size 1MiB --top 1",
    "leaking --stack adam.py --format json",
    "leaking --phase tail=step?*",
    "leaking --by module",
    *(f"failing --format {style}" for style in (*STYLES, "json")),
    "failing --at oom --capacity 400MiB",
    "late",
    "without",
    *(f"layers --by {by} --format {style}" for by in BY for style in ("table", "csv")),
    *(f"layers --top 2 --format {style}" for style in STYLES),
    "layers --by module --top 3",
    "layers --by module --stack h.1.attn",
    *(f"run --{wrong}" for wrong in ("at noon", "device 3", "phase forward", "stack no-such-line", "min-size 1TiB")),
    "run --min-size much",
    "none",
)


def test_what_memory_prints(tmp_path: Path) -> None:
    made = made_in(tmp_path)
    calls = [(made[name], *words) for name, *words in map(str.split, CALLS)]
    check_transcript("memory", [("memory", *words) for words in calls])
    run, layers = made["run"], made["layers"]
    pairs = [(layers, layers), (run, layers), (layers, run)]
    compared = [("compare", *pair, "--force", "--format", style) for pair in pairs for style in STYLES]
    check_transcript("memory-compared", compared)


@pytest.mark.parametrize("name", ["small.pickle", "expandable.pickle", "midrun.pickle", "oom.pickle"])
def test_the_output_fits_a_screen(name: str) -> None:
    lines = run(capture(name)).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 50


@pytest.mark.filterwarnings("error")
def test_a_picture_can_show_any_name(tmp_path: Path) -> None:
    data = Training().snapshot()
    for annotation in data["external_annotations"]:
        annotation["name"] = "$x$ \\frac{ 注意力"
    for event in data["device_traces"][0]:
        for frame in event["frames"]:
            frame["name"] = "_$f"
            frame["filename"] = "_$f"
    path = tmp_path / "$s$ \\frac{.pickle"
    path.write_bytes(pickle.dumps(data))
    result = run(path, "--timeline", tmp_path / "t.png", "--phase", "_$p=*")
    assert (result.exit_code, result.exception) == (0, None)


# -- two snapshots -------------------------------------------------------------------------------------------------


def compared(before: Training, after: Training) -> Comparison:
    result = before.opened().against(after.opened())
    assert sum(part.bytes for part in result.parts) == result.difference_bytes
    assert sum(result.by_kind.values()) == result.difference_bytes
    return result


def kinds(result: Comparison) -> dict[str, int]:
    """Return the kinds but for the padding: what a block could not split off depends on where it came to lie."""
    assert abs(result.by_kind.get("padding", 0)) <= MIB
    return {kind: size for kind, size in result.by_kind.items() if kind not in {"same", "padding"}}


def with_mask(frees_late: bool) -> Training:
    """The forward pass makes a mask, and frees it at once or not before the step's end."""
    training = Training(steps=0)
    for step in range(3):
        mask = training.malloc(6 * MIB, "mask")
        if not frees_late:
            training.allocator.free(mask)
        training.step(step, False)
        if frees_late:
            training.allocator.free(mask)
    return training


def test_an_allocation_of_one_run_is_larger_new_or_longer_lived_and_of_the_other_the_opposite() -> None:
    more = Training(steps=0)
    more.malloc(6 * MIB, "keep")
    for step in range(3):
        more.step(step, False)
    for before, after, kind, opposite, size in (
        (Training(), Training(scale=2), "larger", "smaller", 12 * MIB),
        (Training(), more, "new", "gone", 6 * MIB),
        (with_mask(False), with_mask(True), "longer-lived", "shorter-lived", 6 * MIB),
    ):
        assert kinds(compared(before, after)) == {kind: size}
        assert kinds(compared(after, before)) == {opposite: -size}


def with_two(kept: int) -> Training:
    """The same lines make 6 MiB and 8 MiB; one is freed at once, the other (``kept``) lives through the steps."""
    training = Training(steps=0)
    blocks = [training.malloc(size * MIB, "mask") for size in (6, 8)]
    training.allocator.free(blocks[1 - kept])
    for step in range(2):
        training.step(step, False)
    return training


def test_an_allocation_that_the_other_run_has_outside_its_peak_moved_the_peak() -> None:
    """The optimizer's temporary makes the peak move there, when the activations are gone already."""
    training = Training()
    big = training.malloc(60 * MIB, "keep")
    training.allocator.free(big)
    result = compared(Training(), training)
    assert kinds(result)["new"] == 60 * MIB
    assert kinds(result)["moved peak"] == -(12 + 8 + 4) * MIB - 3072


def with_states(stack: str, size: int = 4 * MIB, steps: int = 3) -> Training:
    """The lines of ``stack`` make the optimizer's states, which the ledger names."""
    training = Training(steps=0)
    training.states = [training.malloc(size, stack, ("optimizer_state", f"w{n}.exp_avg")) for n in range(4)]
    for step in range(steps):
        training.step(step, False)
    return training


def test_a_named_tensor_matches_whichever_lines_made_it() -> None:
    before, after = with_states("state"), with_states("keep")
    one, other = before.opened_run(), after.opened_run()
    assert kinds(one.against(other)) == {}
    assert kinds(compared(before, after)) == {"new": 16 * MIB, "gone": -16 * MIB}  # without the ledgers
    assert kinds(one.against(after.opened())) == {"new": 16 * MIB, "gone": -16 * MIB}  # and with one of them
    assert kinds(one.against(with_states("keep", 6 * MIB).opened_run())) == {"larger": 8 * MIB}


@pytest.mark.parametrize(
    ("named", "unnamed", "owner_count", "label"),
    [
        ((4, 5, 7, 5), (), 4, "w2.exp_avg and 3 more"),  # the largest in the middle
        ((4,), (), 1, "w0.exp_avg"),
        ((4,), (9,), 0, "train.py:44 <module> (adam.py:7 _init_group)"),
    ],
)
def test_a_part_of_several_tensors_says_how_many_and_one_with_unnamed_ones_is_shown_by_its_stack(
    named: tuple[int, ...], unnamed: tuple[int, ...], owner_count: int, label: str
) -> None:
    after = Training(steps=0)
    after.states = [
        after.malloc(size * MIB, "state", ("optimizer_state", f"w{number}.exp_avg"))
        for number, size in enumerate(named)
    ]
    after.states += [after.malloc(size * MIB, "state") for size in unnamed]
    after.step(0, False)
    result = Training(steps=0).opened_run().against(after.opened_run())
    (at,) = [at for at, part in enumerate(result.parts) if any("_init_group" in frame for frame in part.stack)]
    part = result.parts[at]
    assert (part.kind, part.count, part.owner_count) == ("new", len(named) + len(unnamed), owner_count)
    assert memory_table(result).rows[at]["stack"] == label


@pytest.mark.parametrize(("stack", "other"), [("state", "compiled state"), ("generated", "generated anew")])
def test_frames_by_torch_compile_do_not_count_in_a_match(stack: str, other: str) -> None:
    assert kinds(compared(with_states(stack), with_states(other))) == {}


OPPOSITE = {"new": "gone", "larger": "smaller", "longer-lived": "shorter-lived"}
OPPOSITE |= {later: earlier for earlier, later in OPPOSITE.items()}
TRAININGS = st.one_of(
    st.builds(Training, steps=st.integers(0, 4), scale=st.integers(1, 3), leaks=st.booleans()),
    st.builds(
        with_states,
        st.sampled_from(["state", "compiled state", "keep", "forward"]),
        st.sampled_from([3 * MIB, 4 * MIB]),
        st.integers(0, 3),
    ),
    st.builds(with_mask, st.booleans()),
    st.builds(with_two, st.integers(0, 1)),
)


@given(TRAININGS, TRAININGS, st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_comparison_in_the_other_direction_is_the_opposite(
    before: Training, after: Training, has_ledger: bool
) -> None:
    sides = [training.opened_run() if has_ledger else training.opened() for training in (before, after)]
    there, back = sides[0].against(sides[1]), sides[1].against(sides[0])
    assert sum(there.by_kind.values()) == sum(part.bytes for part in there.parts) == there.difference_bytes
    assert there.by_kind == {OPPOSITE.get(kind, kind): -size for kind, size in back.by_kind.items()}
    assert {part.kind for part in sides[0].against(sides[0]).parts} <= {"same"}
