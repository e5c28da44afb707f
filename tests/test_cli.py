"""The command line as a whole: wrong commands get one line with the next thing to type."""

from __future__ import annotations

import pytest

from profkit.cli import main


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["kernel", "trace.sqlite"], "profkit: no command 'kernel'; did you mean 'kernels'?"),
        (["frobnicate"], "profkit: no command 'frobnicate'; `profkit --help` lists them"),
        (["help", "atribution"], "profkit: no guide and no command 'atribution'; did you mean 'attribution'?"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_nearest_one(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert (done.value.code, capsys.readouterr().err) == (2, line + "\n")
