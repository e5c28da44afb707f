"""The guides: all of them are shown, and what they tell a reader to type exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import profkit
from profkit.cli import cli
from profkit.guides import TOPICS, read_guide, title_of

FOLDER = Path(profkit.__file__).parent / "guides"


def test_every_guide_is_a_topic_and_the_list_shows_its_title() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(TOPICS)
    shown = CliRunner().invoke(cli, ["help"]).output
    assert all(f"{topic:<12} {title_of(topic)}" in shown for topic in TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_guide_is_shown_as_it_is_written(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click, "echo_via_pager", None)  # pages are turned in a terminal alone
    result = CliRunner().invoke(cli, ["help", topic])
    assert (result.exit_code, result.output.strip()) == (0, read_guide(topic).strip())


def test_help_of_a_command_is_the_commands_own() -> None:
    runner = CliRunner()
    own = runner.invoke(cli, ["kernels", "--help"], prog_name="profkit").output
    assert (
        runner.invoke(cli, ["help", "kernels"], prog_name="profkit").output.split("\n", 1)[1] == own.split("\n", 1)[1]
    )


def test_help_of_run_fits_a_screen_or_two_and_all_options_are_one_word_away() -> None:
    runner = CliRunner()
    short, whole = (
        runner.invoke(cli, ["run", option], terminal_width=80).output for option in ("--help", "--help-all")
    )
    assert len(short.splitlines()) <= 60
    assert "--cuda-graph-trace" not in short
    context = click.Context(cli)
    command = cli.get_command(context, "run")
    assert command is not None
    assert all(parameter.opts[0] in whole for parameter in command.params if isinstance(parameter, click.Option))


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["train.py", "--lr", "1"], ("python", "train.py", "--lr", "1")),
        (
            ["--steps", "2", "-o", "x.py", "train.py", "--steps", "9", "--"],
            ("python", "train.py", "--steps", "9", "--"),
        ),
        (["./program.py", "--help"], ("./program.py", "--help")),
        (["--", "python", "train.py", "-x"], ("python", "train.py", "-x")),
        (["model.tiny", "--steps", "2"], ("model.tiny",)),
    ],
)
def test_all_that_follows_a_script_is_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], target: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    for name, mode in (("train.py", 0o644), ("program.py", 0o755)):
        Path(name).touch(mode)
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    assert command.make_context("run", words).params["target"] == target


def test_a_script_runs_in_profkits_own_python_where_another_one_is_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("train.py", "python"):
        Path(name).touch(0o755 if name == "python" else 0o644)
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    assert command.make_context("run", ["train.py"]).params["target"] == (sys.executable, "train.py")


def test_an_unknown_topic_names_those_that_exist() -> None:
    result = CliRunner().invoke(cli, ["help", "atribution"])
    assert result.exit_code != 0
    assert "attribution" in str(result.exception)


@pytest.mark.parametrize("topic", TOPICS)
def test_every_option_that_a_guide_names_exists(topic: str) -> None:
    context = click.Context(cli)
    known = {"--lr"}  # of somebody's script
    known |= {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-id", "--rdzv-endpoint"}  # of torchrun
    known |= {"--type", "--include-blobs"}  # of nsys export
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        known |= {one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", read_guide(topic)))
    assert named <= known | {"--help", "--debug"}, named - known


@pytest.mark.parametrize("topic", TOPICS)
def test_guides_have_lines_that_a_screen_holds_and_whole_words(topic: str) -> None:
    text = read_guide(topic)
    assert max(len(line) for line in text.split("\n") if not line.startswith("|")) <= 120
    assert not re.search(r"\bunless told\b|\btold apart\b|\bthe like\b|\bthereof\b", text)
