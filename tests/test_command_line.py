"""What holds for every command: quantities, exit codes, errors of one line, protected files, names, pipes, progress."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.cli import main, outputs
from profkit.cli.options import parse_bytes, parse_milliseconds, parse_percent, parse_share
from tests.conftest import ROOT, call_main
from tests.run_builder import start_run

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_json_shows_the_folders_of_this_machine_only_on_request(profkit: Run, trace: Path) -> None:
    for command in ("kernels", "ranges"):
        full = json.loads(profkit(command, trace, "--format", "json", "--full-names").stdout)
        assert full["trace"] == str(trace)
        assert str(trace.parent) not in profkit(command, trace, "--format", "json").stdout


def test_output_goes_to_a_file_whole_or_not_at_all(profkit: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    done = profkit("kernels", trace, "--format", "json", "-o", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads(out.read_text())["kernel_count"] == 8
    done = profkit("kernels", trace, "-o", tmp_path / "no" / "t.txt")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No such file" in done.stderr


def test_output_to_a_device_writes_to_it_and_does_not_replace_it(profkit: Run, trace: Path) -> None:
    assert profkit("kernels", trace, "-o", "/dev/null").returncode == 0
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.sqlite", None),
        ("directory/", None),
        ("empty.sqlite", b""),
        ("text.sqlite", b"hello"),
        ("report.nsys-rep", b"\x00\x01report"),
        ("trace.json", b'{"name": "not a trace"}'),
        ("trace.json.gz", b"\x1f\x8b\x08garbage"),
    ],
)
def test_bad_files_get_one_line_and_leave_nothing(
    profkit: Run, tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name.endswith("/"):
        path.mkdir()
    before = sorted(tmp_path.rglob("*"))
    environment = {**os.environ, "PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("NSYS", None)
    done = profkit("kernels", path, env=environment)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_lossy_capture_is_read_and_its_verdict_heads_the_output(profkit: Run, captures: Path) -> None:
    path = captures / "lossy.nsys2023.sqlite"
    done = profkit("kernels", path, "--range", "backward")
    assert done.returncode == 0
    assert done.stdout.startswith("SELF-CHECK FAILED")
    assert profkit("kernels", path, "--strict").returncode == 3
    strict = profkit("ranges", path, "--strict")
    assert (strict.returncode, "100 % = " in strict.stdout) == (3, True)
    assert strict.stderr.endswith("the capture failed its self-check\n")
    data = json.loads(profkit("kernels", path, "--format", "json").stdout)
    assert data["self_check"]["passed"] is False
    assert "self-check-launch-without-kernel" in {warning["code"] for warning in data["warnings"]}


def _copy(trace: Path, folder: Path, name: str) -> Path:
    return Path(shutil.copy(trace, folder / name))


def test_a_result_never_replaces_what_is_read(profkit: Run, trace: Path, tmp_path: Path) -> None:
    capture, other = (_copy(trace, tmp_path, name) for name in ("s.png", "after.html"))
    before = capture.read_bytes()
    (tmp_path / "symlink").symlink_to(capture)
    (tmp_path / "hardlink").hardlink_to(capture)
    asked: list[tuple[str | Path, ...]] = [
        (command, capture, "-o", tmp_path / name)
        for name in ("s.png", "symlink", "hardlink", f"./../{tmp_path.name}/s.png")
        for command in ("kernels", "ranges", "memory")
    ]
    asked += [("kernels", capture, "--plot", capture), ("memory", other, "--timeline", other)]
    for words in (*asked, ("compare", capture, other, "-o", other)):
        done = profkit(*words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "this file is being read" in done.stderr
        assert capture.read_bytes() == other.read_bytes() == before


def test_a_result_never_replaces_a_file_of_the_run(profkit: Run, trace: Path, tmp_path: Path) -> None:
    (start_run(tmp_path) / "log.txt").touch()
    _copy(trace, tmp_path, "trace.sqlite")
    before = sorted((path, path.read_bytes()) for path in tmp_path.iterdir())
    for capture in (tmp_path, tmp_path / "trace.sqlite"):
        for name in ("manifest.json", "trace.sqlite", "snapshot.pickle", "ledger.jsonl", "log.txt"):
            assert profkit("kernels", capture, "-o", tmp_path / name).returncode == 2
    assert sorted((path, path.read_bytes()) for path in tmp_path.iterdir()) == before
    assert profkit("kernels", tmp_path, "-o", tmp_path / "kernels.txt").returncode == 0


def test_two_results_do_not_go_to_one_file(profkit: Run, trace: Path, tmp_path: Path) -> None:
    done = profkit("kernels", trace, "-o", tmp_path / "a.png", "--plot", tmp_path / "a.png")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])


@pytest.mark.parametrize("name", ["p.sqlite", "p.json", "p.nsys-rep", "p.pickle"])
def test_a_pipe_is_refused_and_not_waited_for(profkit: Run, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for command in ("kernels", "ranges", "memory"):
        done = profkit(command, tmp_path / name)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "not a regular file" in done.stderr


def test_a_file_whose_name_is_not_utf8_is_read(profkit: Run, trace: Path, tmp_path: Path) -> None:
    path = _copy(trace, tmp_path, "a\udcff#?%.sqlite")
    for style in ("table", "json"):
        done = profkit("kernels", path, "--format", style)
        assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["trace"] == "a\ufffd#?%.sqlite"
    assert profkit("kernels", path, "--format", "json", "-o", tmp_path / "o.json").returncode == 0


def test_a_shell_is_offered_commands_and_options() -> None:
    for words, offered in ((["ke"], "kernels"), (["kernels", "--ra"], "--range")):
        asked = {"COMP_WORDS": "\n".join(["profkit", *words]), "COMP_CWORD": str(len(words))}
        assert f",{offered}\n" in call_main([], {"_PROFKIT_COMPLETE": "bash_complete", **asked}).stdout


def _in_bash(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m profkit"
    return subprocess.run(
        ["bash", "-c", command.replace("profkit", program)], capture_output=True, text=True, check=False
    )


def test_a_closed_or_full_output_gets_one_line_and_a_closed_pipe_none(trace: Path, tmp_path: Path) -> None:
    done = _in_bash(f"profkit kernels {trace} >&-")
    assert (done.returncode, done.stderr) == (1, "profkit: standard output is closed; name a file with -o\n")
    assert _in_bash(f"profkit kernels {trace} -o {tmp_path}/o.txt >&-").returncode == 0
    assert (tmp_path / "o.txt").stat().st_size
    done = _in_bash(f"profkit kernels {trace} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "profkit: No space left on device\n")
    done = _in_bash(f"profkit kernels {trace} --range none 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert _in_bash(f"set -o pipefail; profkit kernels {trace} | head -n 1").stderr == ""


def test_warnings_do_not_enter_a_result_when_the_error_stream_is_closed(two_devices: Path) -> None:
    with_warning = f"profkit kernels {two_devices} --range forward --format json"
    assert "warning: " in _in_bash(with_warning).stderr
    json.loads(_in_bash(f"{with_warning} 2>&-").stdout)


def test_an_unexpected_error_gets_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("index 7\nof 3")

    monkeypatch.setattr("profkit.cli.kernels.open_trace", fail)
    with pytest.raises(SystemExit) as caught:
        main(["kernels", "x"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "profkit: internal error, IndexError: index 7␊of 3; `profkit --debug …` shows where\n"
    )
    with pytest.raises(IndexError):
        main(["--debug", "kernels", "x"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["kernel", "trace.sqlite"], "profkit: no command 'kernel'; did you mean 'kernels'?"),
        (["frobnicate"], "profkit: no command 'frobnicate'; `profkit --help` lists the commands"),
        (["help", "atribution"], "profkit: no guide and no command 'atribution'; did you mean 'attribution'?"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_nearest_one(profkit: Run, arguments: list[str], line: str) -> None:
    done = profkit(*arguments)
    assert (done.returncode, done.stderr) == (2, line + "\n")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_after_a_second_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for patience_s, shown in ((60, False), (0, True)):
        monkeypatch.setattr(outputs, "_PATIENCE_S", patience_s)
        terminal = _Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with outputs.shown_after_a_second("reading [t].sqlite"):
            deadline = time.monotonic() + 60
            while shown and not terminal.getvalue() and time.monotonic() < deadline:
                time.sleep(0.001)
        assert ("reading [t].sqlite …" in terminal.getvalue()) is shown


def test_reading_shows_progress(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    @contextmanager
    def record(doing: str) -> Iterator[None]:
        shown.append(doing)
        yield

    monkeypatch.setattr("profkit.cli.kernels.shown_after_a_second", record)
    for command in ("kernels", "ranges"):
        assert call_main([command, str(trace)]).returncode == 0
    assert shown == ["reading t.sqlite"] * 2


def test_debug_shows_the_traceback(profkit: Run, tmp_path: Path) -> None:
    assert "Traceback" in profkit("--debug", "kernels", tmp_path / "none").stderr


def test_csv_that_goes_to_a_terminal_shows_control_characters(profkit: Run, oddly_named: Path) -> None:
    leader, follower = os.openpty()
    try:
        done = profkit("kernels", oddly_named, "--format", "csv", "-o", os.ttyname(follower))
        shown = os.read(leader, 1 << 16).decode().replace("\r\n", "\n")
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 0, done.stderr
    assert "k␛[31m<float>" in shown
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)


Parse = Callable[[str], Any]

MEANT: dict[Parse, dict[str, Any]] = {
    parse_bytes: {
        **{"0B": 0, "5B": 5, "4096 B": 4096, "10MiB": 10 * 2**20, "10MB": 10**7, " 3M ": 3 * 2**20},
        **{"40GiB": 40 * 2**30, "40GB": 40 * 10**9, "40gb": 40 * 10**9, "1.5 GB": 15 * 10**8, "0.1GB": 10**8},
        **{"0.1GiB": 107_374_182, "2k": 2048, "2kB": 2000, "1T": 2**40, "1TB": 10**12},
    },
    parse_percent: {"0%": 0.0, "10%": 0.1, "12.5 %": 0.125, "100%": 1.0, "10": 0.1, "0.5%": 0.005, "0": 0.0},
    parse_milliseconds: {"120": 120_000_000, "0.5": 500_000, "34.123456": 34_123_456},
    parse_share: {"softmax=15%": ("softmax", 0.15), "range:a=b=2%": ("range:a=b", 0.02)},
}

REFUSED: list[tuple[Parse, list[str], str]] = [
    (parse_bytes, ["", "GiB", "-1", "-1GiB", "nan", "inf", "1e9", "1.5B", "1,000"], "size|unit"),
    (parse_bytes, ["40XB", "40GiBs", "0x10", "1 2", "１GB"], "size|unit"),
    (parse_bytes, ["5", " 5 "], "5 has no unit; write 5GiB, 5MiB or 5B$"),
    (parse_bytes, ["0"], "0 has no unit; write 0GiB"),
    (parse_bytes, ["2.5"], r"^2\.5 has no unit; write 2\.5GiB, 2\.5MiB or 2\.5KiB$"),
    (parse_percent, ["", "120", "120%", "100.1%", "-3%", "nan%", "inf%", "%", "ten%", "1e1%"], "from 0% to 100%"),
    (parse_percent, ["0.1"], r"'0\.1' is ambiguous; write 0\.1% or 10%"),
    (parse_milliseconds, ["", "0", "-5", "nan", "inf", "1e3", "120ms", "1/2"], "not a number of milliseconds above 0"),
    (parse_share, ["softmax", "=3%", "softmax=", "softmax=x", " =3%"], "not NAME=PERCENT|not a percentage"),
]


@pytest.mark.parametrize("parse", MEANT)
def test_each_form_of_a_quantity_is_read(parse: Parse) -> None:
    assert {text: parse(text) for text in MEANT[parse]} == MEANT[parse]


@pytest.mark.parametrize(("parse", "texts", "reason"), REFUSED)
def test_what_is_no_quantity_is_refused_with_the_reason(parse: Parse, texts: list[str], reason: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=reason):
            parse(text)


@settings(deadline=None)
@given(st.integers(0, 2**60))
def test_bytes_are_themselves(size: int) -> None:
    assert parse_bytes(f"{size}B") == size


@pytest.mark.parametrize("option", ["check --max-peak", "memory --min-size", "memory --capacity", "whatif --fit"])
def test_every_size_on_the_command_line_needs_a_unit(option: str) -> None:
    command, name = option.split()
    done = call_main([command, str(ROOT / "traces" / "encoder.snapshot.pickle.gz"), name, "24"])
    assert (done.returncode, "24 has no unit; write 24GiB" in done.stderr) == (2, True), done.stderr


@settings(deadline=None)
@given(st.sampled_from(list(MEANT)), st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_text_is_a_quantity_or_is_refused_in_one_line(parse: Parse, text: str) -> None:
    said = ""
    try:
        parse(text)
    except ValueError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
