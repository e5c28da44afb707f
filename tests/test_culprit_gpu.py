"""On GPUs: who is late, and why, in programs in which a delay was put into one rank of two (`late_program.py`).

    pytest -m gpu -p no:cacheprovider tests/test_culprit_gpu.py

Most cases are a run of their own under torchrun, of 15 to 25 seconds; the most important ones come first. ``-k``
chooses: ``ddp``, ``fsdp2``, ``tp``, ``bound`` (the GPU sets the pace), ``nsys``, ``kineto``, ``light``, or a place.
Where ``PROFKIT_RESULTS`` names a file, each case adds a line to it as soon as it is judged, and where ``PROFKIT_RUNS``
names a folder, the runs are kept there. On a machine with one GPU the two ranks share it, and NCCL goes through
sockets; start `nvidia-cuda-mps-control -d` first, or they wait for each other's slices of time. Without a GPU
``PROFKIT_CPU=1`` runs all of it over gloo, to try the tests themselves.

What is true is known from the program's own log, in which nothing is profkit's: how long the delay took, and how much
longer a step took than in the same program, recorded alike, without a delay. A delay that the GPU hides costs nothing,
and nobody is to be named then. Without a delay somebody may be named only if the log shows that host to be slower too.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

torch = pytest.importorskip("torch")


ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "late_program.py"
GPUS = torch.cuda.device_count()
IS_ON_CPU = GPUS == 0

WARMUP, STEPS, AFTER = (3, 8, 12) if IS_ON_CPU else (6, 12, 40)
SMALL = ("--ms", "120", "--blocks", "4", "--size", "32", "--batch", "8")
"""For the CPU: a delay longer than what processes on few cores wait for each other by chance."""
LARGE = ("--size", "2048", "--batch", "8192")
"""So much that the GPU sets the pace."""
LEAST, NONE = 0.10, 0.03
"""A rank must be named whose delay makes a step longer by the first share of it, and must not be below the second.

profkit's own limit, 5 % of a step, lies between them."""

HOST = {
    "data": ("data", {"data"}),
    "forward": ("python", {"forward"}),
    "backward": ("python", {"backward"}),
    "collective": ("python", {"before optimizer"}),
    "optimizer": ("python", {"optimizer", "before optimizer"}),
    "after": ("python", {"before data"}),
}
"""Delay → its cause and its phase. What an optimizer does before its first kernel may lie before its range."""
GPU = {"kernels": ("kernels", {"forward"}), "copy": ("copy", {"forward"})}


@dataclass(frozen=True)
class Case:
    """A recording, and what is read of it: with ``is_read_light`` only the light records that it left."""

    recorder: str
    way: str
    delay: str
    is_bound: bool = False
    is_read_light: bool = False

    def __str__(self) -> str:
        reader = f"light_of_{self.recorder}" if self.is_read_light else self.recorder
        return f"{reader}-{self.way}{'-bound' if self.is_bound else ''}-{self.delay}"

    @property
    def recording(self) -> Case:
        return replace(self, is_read_light=False)

    @property
    def knows_kernels(self) -> bool:
        return self.recorder != "light" and not self.is_read_light


def _cases() -> list[Case]:
    chosen = {
        ("ddp", False): {
            "nsys": "none forward backward data optimizer kernels copy",
            "kineto": "none forward backward data optimizer",
            "light": "none forward backward data optimizer after kernels",
        },
        ("fsdp2", False): {
            "nsys": "none forward backward collective",
            "kineto": "none forward kernels",
            "light": "none forward data collective",
        },
        ("ddp", True): {"kineto": "none forward kernels", "nsys": "none data", "light": "none backward"},
        ("tp", False): {"nsys": "none forward", "kineto": "none forward", "light": "none forward backward"},
    }
    cases = []
    for (way, is_bound), recorders in chosen.items():
        rest = {recorder: places.split() for recorder, places in recorders.items()}
        while any(rest.values()):  # by turns, so that all recorders have had the first delays early
            for recorder, places in rest.items():
                if places:
                    case = Case(recorder, way, places.pop(0), is_bound)
                    cases += [case] if recorder == "light" else [case, replace(case, is_read_light=True)]
    return cases


CASES = _cases()


class Log:
    """What the ranks wrote down themselves, in ns."""

    def __init__(self, folder: Path) -> None:
        content = [json.loads((folder / f"log{rank}.json").read_text()) for rank in range(2)]
        self.marks: list[str] = content[0]["marks"]
        self._steps = [one["steps"] for one in content]
        self._ends = [[*(marks[0] for marks in one["steps"][1:]), one["done_ns"]] for one in content]
        self.delay_ns = median(content[1]["delay_ns"]) if content[1]["delay_ns"] else 0.0

    def step_ns(self, *, is_recorded: bool) -> float:
        """Return what a step of rank 1 took while steps were recorded, or in those after that.

        profkit waits for the GPU after each recorded step. After them it does not: what a host is ahead of its GPU
        varies from step to step, and the mean counts.
        """
        took = [end - marks[0] for marks, end in zip(self._steps[1], self._ends[1], strict=True)]
        return median(took[WARMUP + 1 : WARMUP + STEPS]) if is_recorded else mean(took[WARMUP + STEPS + 2 :])

    def longer_ns(self, rank: int, phase: str, *, is_recorded: bool) -> float:
        """Return how much longer a rank's host takes than the other's for a phase, or for all if it is ""."""
        window = slice(WARMUP + 1, WARMUP + STEPS) if is_recorded else slice(WARMUP + STEPS + 2, None)
        names = {
            "": self.marks[1:],
            "before optimizer": ["collective", "optimizer"],
            "before data": ["end"],
            "before forward": ["data", "forward"],
            "before backward": ["loss", "backward"],
        }.get(phase, [phase])
        ends = [self.marks.index(name) for name in names]

        def median_of(one: int) -> float:
            return median(sum(marks[at] - marks[at - 1] for at in ends) for marks in self._steps[one][window])

        return median_of(rank) - median_of(1 - rank)


def _record(case: Case, place: Path, *options: str) -> Path:
    """Record the case in the folder ``place``; return the run."""
    place.mkdir(parents=True, exist_ok=True)
    recorder = ("--ranks", "9") if case.recorder == "light" else (f"--{case.recorder}",)
    steps = ("--warmup", str(WARMUP), "--steps", str(STEPS))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(PROGRAM))
    program = ("--way", case.way, "--delay", case.delay, "--steps", str(WARMUP + STEPS + AFTER))
    size = SMALL if IS_ON_CPU else LARGE if case.is_bound else ()
    done = _profkit("run", "-o", "run", *steps, *recorder, *options, "--", *torchrun, *program, *size, cwd=place)
    (place / "said.txt").write_text(done.stdout + done.stderr)
    if "there is no Nsight Systems here" in done.stderr:
        pytest.skip("no nsys")
    assert done.returncode == 0, done.stderr
    return place / "run"


def _profkit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", "-m", "profkit", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=_environment())


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}


def _read(case: Case, run: Path, place: Path) -> dict[str, Any]:
    if case.is_read_light:
        place.mkdir()
        for path in (run / "manifest.json", *run.glob("light*.jsonl")):
            shutil.copy(path, place)
        run = place
    done = _profkit("ranks", str(run), "--format", "json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@dataclass(frozen=True)
class Judgement:
    """What is wrong with what profkit says, if anything; ``line`` is what there is to know of the case."""

    wrong: str
    line: str


def judge(case: Case, found: dict[str, Any], log: Log, without: Log) -> Judgement:
    """Hold what `profkit ranks` says against the program's own log, and that of the same program without a delay."""
    is_recorded = case.knows_kernels
    step_ns = log.step_ns(is_recorded=is_recorded)
    costs = {part: log.step_ns(is_recorded=part) - without.step_ns(is_recorded=part) for part in (True, False)}
    culprit = found["culprit"]
    expected = _expected(case, costs, log)
    wrong = _what_is_wrong(case, culprit, expected, log, costs[is_recorded], step_ns)
    if wrong and culprit is None and expected == "named" and _may_be_unknown(case, found):
        wrong = ""
    said = "nobody"
    if culprit is not None:
        said = f"rank {culprit['rank']} {culprit['cause']} {culprit['phase'] or 'everywhere'} " + " ".join(
            f"{name} {culprit[f'{name}_ns'] / 1e6:.1f}" for name in ("extra", "late", "gain")
        )
        if culprit["late_steps"] != culprit["steps"]:
            said += f" in {culprit['late_steps']} of {culprit['steps']}"
    elif found["latest"] is not None:
        said += f" (rank {found['latest']['rank']} costs {found['latest']['cost_ns'] / 1e6:.1f})"
    line = (
        f"{'WRONG' if wrong else 'ok':5} {case!s:32} {expected:9} delay {log.delay_ns / 1e6:5.1f} costs "
        f"{costs[is_recorded] / 1e6:5.1f} of {step_ns / 1e6:6.1f} ms | {said}{f' | {wrong}' if wrong else ''}"
    )
    return Judgement(wrong, line)


def _expected(case: Case, costs: dict[bool, float], log: Log) -> str:
    """Return whether rank 1 is to be named, or nobody, or whether both are right.

    Light records hold the recorded steps as well as those after them. A delay that made steps much shorter was none of
    the difference between the two recordings.
    """
    if case.delay == "none":
        return "nobody"
    parts = [True] if case.knows_kernels else [True, False]
    shares = [costs[part] / log.step_ns(is_recorded=part) for part in parts]
    if min(shares) >= LEAST:
        return "named"
    return "nobody" if -NONE < max(shares) < NONE else "either"


def _what_is_wrong(
    case: Case, culprit: dict[str, Any] | None, expected: str, log: Log, cost_ns: float, step_ns: float
) -> str:
    if culprit is None:
        return "nobody is named" if expected == "named" else ""
    if expected == "nobody":
        rank, phase, extra_ns = culprit["rank"], culprit["phase"], culprit["extra_ns"]
        longer_ns = log.longer_ns(rank, phase, is_recorded=case.knows_kernels)
        return "" if longer_ns >= extra_ns / 2 else f"by the log its host takes {longer_ns / 1e6:.1f} ms longer there"
    cause, phases = (HOST | GPU)[case.delay]
    causes = {cause}
    if not case.knows_kernels and cause == "copy":
        causes = {"copy", "kernels"}  # without a profiler both are time of the GPU's
    if IS_ON_CPU and not case.knows_kernels and cause == "kernels":
        causes = {"python"}  # and the host's, where it computes by itself
    if culprit["rank"] != 1 or culprit["cause"] not in causes or culprit["phase"] not in phases:
        return f"it is rank 1, {' or '.join(sorted(causes))}, {' or '.join(sorted(phases))}"
    # What it took longer is the delay and what this rank's host or GPU differs by anyway; of a delay that is hidden in
    # part, no less than half of what it cost. What a step would gain cannot be more than the delay.
    least_ns, most_ns = min(cost_ns, log.delay_ns) / 2, 1.25 * log.delay_ns + 0.05 * step_ns
    if not least_ns <= culprit["extra_ns"] <= most_ns:
        return f"extra is not between {least_ns / 1e6:.1f} and {most_ns / 1e6:.1f} ms"
    if culprit["gain_ns"] > most_ns:
        return f"gain is more than {most_ns / 1e6:.1f} ms"
    return ""


def _may_be_unknown(case: Case, found: dict[str, Any]) -> bool:
    """Return whether nobody could know: how long ranks waited within phases, for a GPU whose host was not late."""
    return found["waits_untimed"] and case.delay in GPU and not case.knows_kernels and case.way != "ddp"


def _note(line: str) -> None:
    print(line, flush=True)
    if os.environ.get("PROFKIT_RESULTS"):
        with Path(os.environ["PROFKIT_RESULTS"]).open("a") as file:
            file.write(line + "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("PROFKIT_RUNS")
    folder = Path(kept) / "culprit" if kept else tmp_path_factory.mktemp("culprit")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


Recorded = Callable[[Case], Path]


@pytest.fixture(scope="module")
def recorded(place: Path) -> Recorded:

    @functools.cache
    def record(case: Case) -> Path:
        _record(case, place / str(case))
        return place / str(case)

    return record


@pytest.fixture
def gpu() -> None:
    if IS_ON_CPU and not os.environ.get("PROFKIT_CPU"):
        pytest.skip("needs a GPU")


def _assert_right(case: Case, recorded: Recorded) -> None:
    began = time.monotonic()
    without, folder = recorded(replace(case.recording, delay="none")), recorded(case.recording)
    found = _read(case, folder / "run", folder / "light")
    judged = judge(case, found, Log(folder), Log(without))
    _note(f"{judged.line} | {time.monotonic() - began:.0f} s")
    assert not judged.wrong, judged.line


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_who_is_late_is_what_the_programs_own_log_says(gpu: None, recorded: Recorded, case: Case) -> None:
    if IS_ON_CPU and (case.delay == "copy" or case.is_bound):
        pytest.skip("needs a GPU")
    _assert_right(case, recorded)
