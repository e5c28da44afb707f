"""Completion in a shell: commands, options, and the ranges of the capture that the command line names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import call_main
from tests.nsys_builder import NsysBuilder


def completed(*words: str, shell: str = "bash") -> list[str]:
    """Return what the shell would offer for the last word."""
    env = {"_PROFKIT_COMPLETE": f"{shell}_complete", "COMP_WORDS": "\n".join(["profkit", *words])}
    env["COMP_CWORD"] = words[-1] if shell == "fish" else str(len(words))
    done = call_main([], env)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    builder = NsysBuilder()
    for number, name in enumerate(("forward", "layer 0", "layer 1", "it's $5", "odd\x1bname", "forward")):
        builder.range(name, 100 * number, 100 * number + 50)
    return builder.write(tmp_path / "t.sqlite")


def test_ranges_of_the_capture_are_offered(capture: Path) -> None:
    assert completed("kernels", str(capture), "--range", "for") == ["forward"]
    assert completed("kernels", str(capture), "--range", "layer") == [r"layer\ \*", r"layer\ 0", r"layer\ 1"]
    assert completed("efficiency", str(capture), "--range", "i") == [r"it\'s\ \$5"]
    assert completed("compare", str(capture), "b.sqlite", "--range", "layer\\ 1") == [r"layer\ 1"]
    assert completed("kernels", str(capture), "--range", "odd") == []


def test_zsh_escapes_names_itself(capture: Path) -> None:
    env = {"_PROFKIT_COMPLETE": "zsh_complete", "COMP_CWORD": "4"}
    words = f"profkit kernels {capture} --exclude layer"
    out = call_main([], {**env, "COMP_WORDS": words}).stdout
    assert "layer 0\n" in out
    assert "\\" not in out


def test_what_cannot_be_read_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without a run that a command would take
    assert completed("kernels", str(tmp_path / "gone.sqlite"), "--range", "f") == []
    assert completed("kernels", "--range", "f") == []
    assert completed("kernel", "x", "--range", "f") == []


def test_commands_are_offered() -> None:
    assert completed("ke") == ["kernels"]
    assert {"run", "kernels", "export"} <= set(completed(""))
    assert "--range" in completed("kernels", "--ra")
