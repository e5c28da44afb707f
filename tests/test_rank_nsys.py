"""``--nsys --ranks``: each chosen rank has an Nsight Systems of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profkit.run.directory import LOG
from profkit.run.recording import RANK_NSYS, VARIABLE, Order, RankNsys
from tests.in_process import run_profkit
from tests.launched import Started, first_line, is_alive, started, wait_until
from tests.test_rank_choice import SCRIPT

pytest.importorskip("torch")

from profkit import read_trace
from profkit.joining import read_ranks

ROOT = Path(__file__).parent.parent

# Skips its own options and becomes the program, as far as its caller can see.
NSYS = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""

# Ends twice before its program has begun, then does as NSYS.
ENDS_EARLY = """#!/bin/sh
echo >> {tries}
[ $(wc -l < {tries}) -gt 2 ] || exit {status}
while [ "${{1#-}}" != "$1" ]; do shift; done
exec "$@"
"""

# Says that it waits, and starts nothing.
STALLS = """#!/bin/sh
echo waits
exec sleep 600
"""

REFUSES = """#!/bin/sh
case "$*" in
--version) echo "NVIDIA Nsight Systems version 2025.3.1.1-1v0" ;;
*--help*) ;;
*) echo "this machine does not let itself be profiled"; exit 1 ;;
esac
"""

EXPORTS_ALL_BUT_RANK_1 = """#!/bin/sh
case "$*" in
*--help*) ;;
export*trace.rank1*) echo "this report is damaged"; exit 1 ;;
esac
exec {nsys} "$@"
"""

CRASHES = SCRIPT.replace(
    "    optimizer.step()",
    """    optimizer.step()
    if _ == 6 and distributed.get_rank() == 0:
        raise ValueError("the data of this rank are bad")""",
)

# Rank 1 ends its first process, as a launcher does that has lost its patience, and does not end by itself.
KILLED = SCRIPT.replace(
    "    optimizer.step()",
    """    optimizer.step()
    if _ == 6 and distributed.get_rank() == 1:
        os.write(1, f"program {os.getpid()}\\n".encode())
        os.kill(int(os.environ["PROFKIT_RANK_NSYS"].rpartition("-")[2]), 9)
        time.sleep(600)""",
)

# One write a line: where Python does not buffer, `print` writes word by word, and two ranks' words mingle.
ENDLESS = SCRIPT.replace("range(8)", "range(10**9)").replace(
    "    optimizer.step()",
    """    optimizer.step()
    if _ == 8:
        os.write(1, f"recorded {os.getpid()}\\n".encode())""",
)


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _arguments(place: Path, ranks: str, count: int, script: str) -> tuple[str, ...]:
    (place / "train.py").write_text(script)
    steps = ("--warmup", "5", "--steps", "2", "--nproc-per-node", str(count))
    return ("run", "-o", "run", "--nsys", "--ranks", ranks, *steps, "--", sys.executable, "train.py")


def _record(place: Path, ranks: str, count: int = 3, script: str = SCRIPT) -> Any:
    return run_profkit(*_arguments(place, ranks, count, script), cwd=place, **ENVIRONMENT)


def _files(place: Path) -> set[str]:
    return {
        path.name
        for path in (place / "run").iterdir()
        if not path.name.startswith(("light", "lines", "manifest", "log"))
    }


@pytest.mark.nsys
@pytest.mark.parametrize(
    ("ranks", "recorded"), [("1", {1}), ("0,2", {0, 2}), ("first-per-node", {0}), ("slowest", {2})]
)
def test_chosen_ranks_have_a_report_each_and_all_are_compared(tmp_path: Path, ranks: str, recorded: set[int]) -> None:
    done = _record(tmp_path, ranks)
    assert done.returncode == 0, done.stderr
    stems = {f"trace.rank{rank}" if rank else "trace" for rank in recorded}
    assert _files(tmp_path) == {f"{stem}.{suffix}" for stem in stems for suffix in ("nsys-rep", "sqlite")}
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert {one["rank"] for one in manifest["processes"] if one["is_recorded"]} == recorded
    opened = read_trace(tmp_path / "run")
    assert not opened.self_check.failed
    for rank in recorded if len(recorded) > 1 else ():
        names = [row.name for row in read_trace(tmp_path / "run", rank=rank).ranges().ranges]
        assert [names.count(name) for name in ("step 5", "step 6", "backward")] == [1, 1, 2]
    found = read_ranks(tmp_path / "run")
    assert [row.rank for row in found.ranks] == [0, 1, 2]


@pytest.mark.nsys
def test_a_rank_whose_report_cannot_be_exported_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    stub = tmp_path / "nsys"
    stub.write_text(EXPORTS_ALL_BUT_RANK_1.format(nsys=shutil.which("nsys")))
    stub.chmod(0o755)
    done = run_profkit(
        *_arguments(tmp_path, "0,1", 3, SCRIPT), cwd=tmp_path, **ENVIRONMENT, NSYS=str(stub), COLUMNS="500"
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1: " in done.stderr
    assert "this report is damaged; the report is kept as unread.rank1.nsys-rep" in done.stderr
    assert _files(tmp_path) == {"trace.nsys-rep", "trace.sqlite", "unread.rank1.nsys-rep"}
    run = tmp_path / "run"
    assert "step 5" in {row.name for row in read_trace(run, rank=0).ranges().ranges}
    assert [row.rank for row in read_ranks(run).ranks] == [0, 1, 2]


@pytest.mark.nsys
def test_a_rank_that_is_ended_because_another_failed_leaves_its_report(tmp_path: Path) -> None:
    done = _record(tmp_path, "1", count=2, script=CRASHES)
    assert done.returncode == 1
    assert "rank 0: ValueError: the data of this rank are bad" in done.stderr.splitlines()[-1]
    assert _files(tmp_path) == {"trace.rank1.nsys-rep", "trace.rank1.sqlite"}
    names = {row.name for row in read_trace(tmp_path / "run").ranges().ranges}
    assert {"step 5", "backward"} <= names, "the step in which it ended has no end"


@pytest.mark.nsys
def test_a_program_whose_first_process_was_killed_is_ended_and_leaves_its_report(tmp_path: Path) -> None:
    done = _record(tmp_path, "1", count=2, script=KILLED)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("program ")]
    assert not is_alive(int(line.split()[1]))
    assert _files(tmp_path) == {"trace.rank1.nsys-rep", "trace.rank1.sqlite"}


@pytest.mark.nsys
def test_ctrl_c_after_the_recorded_steps_keeps_the_reports(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "profkit", *_arguments(tmp_path, "0,1", 2, ENDLESS)]
    with started(words, cwd=tmp_path, env={**os.environ, **ENVIRONMENT}) as run:
        programs = [int(first_line(run, "recorded ").split()[1]) for _ in range(2)]
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate()
    assert run.returncode == 130, errors
    assert not any(map(is_alive, programs))
    assert _files(tmp_path) == {f"trace{rank}.{kind}" for rank in ("", ".rank1") for kind in ("nsys-rep", "sqlite")}
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["reason"] == "interrupted"
    assert read_trace(tmp_path / "run").ranks.numbers == (0, 1)


def _start(place: Path, code: str, ranks: str = "1", *words: str, stands_in: str = NSYS, **variables: str) -> Started:
    """Start a Python of rank 1 that is to run under an nsys of its own."""
    (place / "nsys").write_text(stands_in)
    (place / "nsys").chmod(0o755)
    nsys = RankNsys((str(place / "nsys"), "--output={report}"), str(place / "scratch"), os.getppid())
    order = replace(Order(str(place), "nsys", 5, 3), ranks=ranks, rank_nsys=nsys)
    paths = os.pathsep.join([str(ROOT / "profkit" / "capture" / "child"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, VARIABLE: order.to_json(), "RANK": "1", "LOCAL_RANK": "1"}
    (place / "main.py").write_text(code)
    return started([sys.executable, *(words or ["main.py"])], cwd=place, env={**environment, **variables})


def _runs_under_nsys(place: Path, ranks: str, *words: str, **variables: str) -> bool:
    with _start(place, f"import os; print({RANK_NSYS!r} in os.environ)", ranks, *words, **variables) as rank:
        said, _ = rank.communicate()
    return said == "True\n"


def test_a_rank_runs_under_nsys_if_it_is_chosen_or_may_be_the_slowest(tmp_path: Path) -> None:
    chosen = {ranks: _runs_under_nsys(tmp_path, ranks) for ranks in ("1", "0,2", "0-3", "slowest", "first-per-node")}
    assert chosen == {"1": True, "0,2": False, "0-3": True, "slowest": True, "first-per-node": False}
    assert _runs_under_nsys(tmp_path, "first-per-node", LOCAL_RANK="0")


def test_a_launcher_of_ranks_is_none_even_where_the_cluster_numbers_it(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(f"import os; print({RANK_NSYS!r} in os.environ)")
    assert not _runs_under_nsys(tmp_path, "1", "torchrun")


def test_what_a_recorded_rank_starts_has_no_nsys_of_its_own(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys
print(os.environ[{RANK_NSYS!r}], flush=True)
subprocess.run([sys.executable, "-c", "import os; print(os.environ[{RANK_NSYS!r}])"])
"""
    with _start(tmp_path, code) as rank:
        said, _ = rank.communicate()
    assert said.split() == [f"partial.nsys-rank1-{rank.pid}"] * 2


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getpid(), 15)", -15),
        ("os.abort()", -6),
    ],
)
def test_a_rank_ends_as_its_program_does(tmp_path: Path, ending: str, status: int) -> None:
    with _start(tmp_path, f"import os, sys; {ending}") as rank:
        rank.communicate()
    assert rank.returncode == status


@pytest.mark.parametrize("status", [0, 1])
def test_an_nsys_that_ends_before_its_program_begins_is_started_again(tmp_path: Path, status: int) -> None:
    tries = tmp_path / "tries"
    ends_early = ENDS_EARLY.format(tries=tries, status=status)
    code = f"import os, sys; print({RANK_NSYS!r} in os.environ); sys.exit(7)"
    with _start(tmp_path, code, stands_in=ends_early) as rank:
        said, _ = rank.communicate()
    assert (said, rank.returncode, len(tries.read_text())) == ("True\n", 7, 3)


def test_a_rank_that_is_ended_before_its_program_begins_does_not_run_it(tmp_path: Path) -> None:
    with _start(tmp_path, "print('ran')", stands_in=STALLS) as rank:
        wait_until(lambda: "waits" in (tmp_path / LOG).read_text() if (tmp_path / LOG).exists() else False)
        rank.send_signal(signal.SIGTERM)
        said, _ = rank.communicate()
    assert (said, rank.returncode) == ("", -signal.SIGTERM)


def test_a_signal_for_a_rank_reaches_its_program_once(tmp_path: Path) -> None:
    code = """
import signal, sys
came = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: came.append(number))
print("ready", flush=True)
while len(came) < 2:
    signal.pause()
print(*came)
"""
    with _start(tmp_path, code) as rank:
        first_line(rank, "ready")
        rank.send_signal(signal.SIGUSR1)
        rank.send_signal(signal.SIGTERM)
        said, _ = rank.communicate()
    assert sorted(map(int, said.split())) == [signal.SIGUSR1, signal.SIGTERM]
    assert rank.returncode == 0


def test_a_rank_whose_nsys_does_not_start_runs_on_and_is_named(tmp_path: Path) -> None:
    stub = tmp_path / "nsys"
    stub.write_text(REFUSES)
    stub.chmod(0o755)
    script = "import sys, torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
    script += "for _ in range(8):\n    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\nsys.exit(3)\n"
    words = [*_arguments(tmp_path, "0", 1, script)]
    done = run_profkit(*words, cwd=tmp_path, **ENVIRONMENT, NSYS=str(stub), RANK="0", WORLD_SIZE="1")
    assert done.returncode == 3
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["reason"] == "nothing was recorded: its Nsight Systems did not start, see log.txt"
    assert "does not let itself be profiled" in (tmp_path / "run" / "log.txt").read_text()
