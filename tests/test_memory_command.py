"""``profkit memory`` as a person meets it: what it prints, in which formats, and how it fails."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profkit.cli.memory import memory
from profkit.errors import RunError, UsageError
from tests.allocator_reference import MIB
from tests.captures import capture
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


def test_a_moment_and_named_phases_can_be_chosen(snapshot: Path) -> None:
    out = run(snapshot, "--at", "phase:forward", "--top", "1").stdout
    assert "At phase:forward" in out
    assert "tail" in run(snapshot, "--phase", "tail=step *").stdout


def test_the_evidence_adds_up_to_what_is_allocated(snapshot: Path) -> None:
    peak = json.loads(run(snapshot, "--format", "json").stdout)["peak"]
    assert sum(peak["evidence"].values()) == peak["allocated_bytes"]


@pytest.mark.parametrize("style", ["table", "markdown", "latex", "csv"])
def test_every_format_shows_leaks_if_asked(tmp_path: Path, style: str) -> None:
    path = Training(leaks=True, steps=4).write(tmp_path)
    asked, plain = (run(path, *flags, "--format", style).output for flags in (["--leaks"], []))
    stack = "train.py:30 remember"
    assert asked.count(stack) > plain.count(stack)
    if style == "csv":
        rows = [row for row in csv.reader(asked.splitlines()) if row[0] == "left behind"]
        # Once a step, and with the first step's state of the optimizer.
        assert [(row[2], row[4], row[6]) for row in rows if stack in row[1]] == [
            ("1024", "1", f"step {step}") for step in (1, 2, 3)
        ]
        assert sum(int(row[2]) for row in rows if row[6] == "step 1") == 1024 + 16 * MIB
    else:
        assert "May leak: 1.000 KiB in 1 allocation per step" in asked
    assert "left behind" not in plain


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


@pytest.mark.parametrize("option", ["--at noon", "--device 3", "--phase forward"])
def test_a_wrong_option_is_a_usage_error(snapshot: Path, option: str) -> None:
    assert isinstance(run(snapshot, *option.split()).exception, UsageError)


def test_a_bad_size_and_a_directory_that_is_no_run_are_refused(snapshot: Path, tmp_path: Path) -> None:
    assert run(snapshot, "--capacity", "much").exit_code == 2
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
