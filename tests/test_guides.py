"""The guides: all of them are shown, and what they tell a reader to type exists."""

from __future__ import annotations

import re
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
def test_a_guide_is_shown_as_it_is_written(topic: str) -> None:
    result = CliRunner().invoke(cli, ["help", topic])
    assert (result.exit_code, result.output.strip()) == (0, read_guide(topic).strip())


def test_help_of_a_command_is_the_commands_own() -> None:
    runner = CliRunner()
    own = runner.invoke(cli, ["kernels", "--help"], prog_name="profkit").output
    assert (
        runner.invoke(cli, ["help", "kernels"], prog_name="profkit").output.split("\n", 1)[1] == own.split("\n", 1)[1]
    )


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
