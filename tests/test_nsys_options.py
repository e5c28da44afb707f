"""How nsys is called: what may be chosen, what profkit keeps to itself, and how a graph is traced."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from profkit.launch.nsys import (
    Nsys,
    build_nsys_argv,
)


def _argv(*, cuda: bool = True, **how: Any) -> list[str]:
    return build_nsys_argv(Nsys(Path("nsys"), "1.0", **how), Path("run/trace"), ["python"], cuda=cuda)


@pytest.mark.nsys
def test_a_real_nsys_names_all_that_is_used() -> None:
    nsys = shutil.which("nsys")
    assert nsys, "the marker promises an nsys"
    known = subprocess.run([nsys, "profile", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(word.partition("=")[0] in known for word in _argv() if word.startswith("--"))


def test_an_nsys_of_which_nothing_is_known_gets_all_flags() -> None:
    argv = build_nsys_argv(Nsys(Path("/n/nsys"), "1.0"), Path("run/trace"), ["python", "x"], cuda=True, temporary="/t")
    assert " ".join(argv) == (
        "/n/nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --cuda-graph-trace=node "
        "--capture-range=cudaProfilerApi --capture-range-end=stop --env-var=TMPDIR=/t --output=run/trace python x"
    )


def test_the_choice_for_graphs_is_passed_on() -> None:
    assert "--cuda-graph-trace=graph" in _argv(cuda_graph_trace="graph")


def test_without_cuda_its_apis_are_left_out() -> None:
    argv = _argv(cuda=False)
    assert "--trace=nvtx" in argv
    assert not [word for word in argv if "capture-range" in word or "graph" in word]


def test_a_percent_in_the_runs_name_is_no_pattern() -> None:
    argv = build_nsys_argv(Nsys(Path("nsys"), "1.0"), Path("50%p/trace"), ["python"], cuda=False)
    assert "--output=50%%p/trace" in argv
