"""``profkit memory`` as a person meets it, and two snapshots compared by their peaks."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit import read_snapshot
from profkit.analysis.memory.compare import Comparison
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.cli.memory import memory
from profkit.errors import RunError
from profkit.report.commands.memory import BY, memory_table
from profkit.snapshot.reader import build_snapshot
from tests.allocator_reference import MIB
from tests.captures import capture
from tests.golden import check_transcript
from tests.memory_captures import Training


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(memory, [str(one) for one in arguments], catch_exceptions=True)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return Training().write(tmp_path)


@pytest.mark.parametrize("name", ["small.pickle", "expandable.pickle", "midrun.pickle", "oom.pickle"])
def test_the_output_fits_a_screen(name: str) -> None:
    lines = run(capture(name)).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 50


def test_the_figures_of_a_real_run_are_printed() -> None:
    out = run(capture("small.pickle")).stdout
    assert "allocated  peak 2.863 GiB (3,073,660,928 B), exact, at 3.822 s" in out
    assert "reserved   peak 3.023 GiB (3,246,391,296 B)" in out
    assert "requested  peak 2.821 GiB (3,029,062,664 B)" in out


def test_a_run_directory_is_read_with_its_recorded_owners(tmp_path: Path) -> None:
    out = run(Training().write_run(tmp_path)).stdout
    assert "PyTorch's own peaks, recorded by the run, agree to the byte" in out
    assert "known tensor" in out


def test_each_way_of_asking_prints_what_it_did(snapshot: Path, tmp_path: Path) -> None:
    """What each step left behind are 1 KiB, and with the first step the optimizer's state."""
    leaky = Training(leaks=True, steps=4).write(tmp_path, "leaky.pickle")
    filtered = ("--at", "phase:forward", "--stack", "adam.py", "--min-size", "1MiB", "--top", "1")
    calls: list[tuple[str | Path, ...]] = [
        (snapshot,),
        *((snapshot, "--by", by, "--format", style) for by in BY for style in ("table", "csv")),
        (snapshot, *filtered),
        (snapshot, "--phase", "tail=step *"),
        (leaky, "--format", "csv"),
        *((leaky, "--leaks", "--format", style) for style in ("table", "markdown", "latex", "csv")),
        # A wrong option or an empty selection is a usage error.
        *((snapshot, *wrong.split()) for wrong in ("--at noon", "--device 3", "--phase forward", "--min-size 1TiB")),
        (snapshot, "--stack", "no-such-line"),
    ]
    again = Path(shutil.copy(snapshot, tmp_path / "again.pickle"))
    same = [("compare", snapshot, again, "--format", style) for style in ("table", "markdown", "latex")]
    check_transcript("memory", [*(("memory", *words) for words in calls), *same])


@pytest.mark.parametrize("filters", [[], ["--stack", "adam.py"], ["--min-size", "1MiB"]])
def test_the_evidence_adds_up_to_what_is_allocated_also_under_a_filter(snapshot: Path, filters: list[str]) -> None:
    peak = json.loads(run(snapshot, *filters, "--format", "json").stdout)["peak"]
    assert sum(peak["evidence"].values()) == peak["allocated_bytes"]
    assert ("not_selected" in peak["evidence"]) == bool(filters)


def test_a_timeline_is_written_whole_or_the_old_file_stays(snapshot: Path, tmp_path: Path) -> None:
    for name in ("t.html", "t.png"):
        target, link = tmp_path / f"real-{name}", tmp_path / name
        target.write_bytes(b"old")
        target.chmod(0o600)
        link.symlink_to(target)
        assert run(snapshot, "--timeline", link).exit_code == 0
        assert link.is_symlink()
        assert len(target.read_bytes()) > 1000
        assert target.stat().st_mode & 0o777 == 0o600
        assert isinstance(run(snapshot, "--timeline", tmp_path / "none" / name).exception, FileNotFoundError)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "tmp"))]


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


def test_a_bad_size_and_a_directory_that_is_no_run_are_refused(snapshot: Path, tmp_path: Path) -> None:
    assert run(snapshot, "--min-size", "much").exit_code == 2
    (tmp_path / "empty").mkdir()
    assert isinstance(run(tmp_path / "empty").exception, RunError)


def test_a_history_that_lacks_something_is_a_warning_on_stderr(tmp_path: Path) -> None:
    incomplete = run(capture("midrun.pickle"))
    assert "history incomplete" in incomplete.stdout
    assert "233 blocks (1,060,567,552 B) were live before the first event" in incomplete.stderr
    data = Training().snapshot()
    data["device_traces"] = []
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data))
    without = run(tmp_path / "s.pickle")
    assert without.exit_code == 0
    assert "a lower bound: the true peak may be higher" in " ".join(without.stdout.split())
    assert "no history was recorded" in without.stderr


@pytest.mark.parametrize("style", ["table", "markdown", "latex", "json"])
def test_every_format_holds_the_verdict_on_an_oom_error_and_every_warning(style: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    run(capture("oom.pickle"), "--format", style, "-o", target)
    text = " ".join(target.read_text().split())
    assert "the live allocations and the request do not fit together" in text
    assert "of the bytes is unknown" in text
    if style == "table":
        assert "Out of memory 1 time" in text
        assert "needed up to 192.0 MiB (201,326,592 B) more" in text


@pytest.mark.parametrize("style", ["table", "markdown", "latex", "json", "csv"])
def test_equal_allocations_share_a_line_and_the_lines_that_are_hidden_are_added_up(style: str) -> None:
    text = run(capture("oom.pickle"), "--format", style).stdout
    assert ("27 × 256.0 MiB" in text) == (style not in ("json", "csv"))
    rest = run(capture("small.pickle"), "--format", style, "--top", "2").stdout
    assert ("22 smaller places" in rest) == (style not in ("json", "csv"))


def test_reading_does_not_change_the_file(snapshot: Path) -> None:
    before = snapshot.read_bytes(), snapshot.stat().st_mtime_ns, sorted(snapshot.parent.iterdir())
    run(snapshot)
    assert (snapshot.read_bytes(), snapshot.stat().st_mtime_ns, sorted(snapshot.parent.iterdir())) == before


# -- two snapshots -------------------------------------------------------------------------------------------------


def opened(training: Training) -> OpenedSnapshot:
    return OpenedSnapshot(build_snapshot(Path("made.pickle"), training.snapshot()))


def compared(before: Training, after: Training) -> Comparison:
    result = opened(before).against(opened(after))
    assert sum(part.bytes for part in result.parts) == result.difference_bytes
    assert sum(result.by_kind.values()) == result.difference_bytes
    return result


def kinds(result: Comparison) -> dict[str, int]:
    """Return the kinds but for the padding: what a block could not split off depends on where it came to lie."""
    assert abs(result.by_kind.get("padding", 0)) <= MIB
    return {kind: size for kind, size in result.by_kind.items() if kind not in {"same", "padding"}}


@pytest.mark.parametrize(
    ("before", "after"),
    [("small_forward_cpp_stacks", "small"), ("small", "midrun"), ("midrun", "expandable"), ("oom", "small")],
)
def test_the_parts_of_real_snapshots_sum_to_the_difference(before: str, after: str) -> None:
    one, other = read_snapshot(capture(f"{before}.pickle")), read_snapshot(capture(f"{after}.pickle"))
    for result in (one.against(other), other.against(one)):
        assert sum(part.bytes for part in result.parts) == result.difference_bytes
        assert result.exact


def test_two_equal_runs_have_no_difference() -> None:
    assert kinds(compared(Training(), Training(steps=5))) == {}


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


def test_an_allocation_that_both_runs_made_is_not_larger() -> None:
    assert kinds(compared(with_two(0), with_two(1))) == {"longer-lived": 8 * MIB, "shorter-lived": -6 * MIB}


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


def ledgered(training: Training, folder: Path) -> OpenedSnapshot:
    folder.mkdir(exist_ok=True)
    return read_snapshot(training.write_run(folder))


def test_a_named_tensor_matches_whichever_lines_made_it(tmp_path: Path) -> None:
    before, after = with_states("state"), with_states("keep")
    one, other = ledgered(before, tmp_path / "a"), ledgered(after, tmp_path / "b")
    assert kinds(one.against(other)) == {}
    assert kinds(compared(before, after)) == {"new": 16 * MIB, "gone": -16 * MIB}  # without the ledgers
    assert kinds(one.against(opened(after))) == {"new": 16 * MIB, "gone": -16 * MIB}  # and with one of them
    grown = ledgered(with_states("keep", 6 * MIB), tmp_path / "c")
    assert kinds(one.against(grown)) == {"larger": 8 * MIB}


def test_a_part_of_several_tensors_says_how_many(tmp_path: Path) -> None:
    """Four states, the largest in the middle, stand in one line; so does a single one, under its name alone."""
    for folder, sizes, said in (
        ("several", (4, 5, 7, 5), "w2.exp_avg and 3 more"),
        ("one", (4,), "w0.exp_avg"),
    ):
        after = Training(steps=0)
        after.states = [
            after.malloc(size * MIB, "state", ("optimizer_state", f"w{number}.exp_avg"))
            for number, size in enumerate(sizes)
        ]
        after.step(0, False)
        runs = [ledgered(Training(steps=0), tmp_path / "before"), ledgered(after, tmp_path / folder)]
        result = runs[0].against(runs[1])
        states = [part for part in result.parts if "exp_avg" in part.label]
        assert [(part.kind, part.count, part.owner_count) for part in states] == [("new", len(sizes), len(sizes))]
        rows = memory_table(result).rows
        assert [row["stack"] for row in rows if "exp_avg" in row["stack"]] == [said]


def test_a_part_with_unnamed_tensors_is_shown_by_its_stack(tmp_path: Path) -> None:
    after = Training(steps=0)
    after.states = [after.malloc(4 * MIB, "state", ("optimizer_state", "w0.exp_avg")), after.malloc(9 * MIB, "state")]
    after.step(0, False)
    result = ledgered(Training(steps=0), tmp_path / "a").against(ledgered(after, tmp_path / "b"))
    (part,) = (part for part in result.parts if any("_init_group" in frame for frame in part.stack))
    assert (part.label, part.count, part.owner_count) == ("train.py:44 <module> (adam.py:7 _init_group)", 2, 0)


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
@settings(max_examples=60, deadline=None)
def test_the_comparison_in_the_other_direction_is_the_opposite(
    before: Training, after: Training, has_ledger: bool
) -> None:
    with TemporaryDirectory() as folder:
        sides = [
            ledgered(training, Path(folder) / str(number)) if has_ledger else opened(training)
            for number, training in enumerate((before, after))
        ]
    there, back = sides[0].against(sides[1]), sides[1].against(sides[0])
    assert sum(there.by_kind.values()) == sum(part.bytes for part in there.parts) == there.difference_bytes
    assert there.by_kind == {OPPOSITE.get(kind, kind): -size for kind, size in back.by_kind.items()}
    assert {part.kind for part in sides[0].against(sides[0]).parts} <= {"same"}
