"""How nsys is called: what may be chosen, what profkit keeps to itself, and what an older or newer nsys knows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from profkit.errors import ToolError, UsageError
from profkit.launch.nsys import (
    Abilities,
    Nsys,
    NsysOptions,
    build_nsys_argv,
    check_abilities,
    parse_abilities,
    read_abilities,
)

HELP = """
usage: nsys profile [<args>] [application] [<application args>]

\t-c, --capture-range=

\t   Possible values are none, cudaProfilerApi, nvtx, hotkey.

\t--cuda-graph-trace=<granularity>[:<launch origin>]

\t   Set the granularity. Possible values for <granularity> are 'graph' or 'node'.

\t(Experimental) --ib-switch-metrics-device=<IB switch GUID>[,<IB switch GUID>...]

\t-t, --trace=

\t   Possible values are 'cuda', 'nvtx',
\t   'osrt' or 'none'.
\t   If 'none' is selected, no APIs are traced.
\t   Default is 'cuda,opengl'. Application scope.
"""


def _argv(options: NsysOptions, *, cuda: bool = True, known: str = "") -> list[str]:
    nsys = Nsys(Path("nsys"), "1.0", parse_abilities(known), options)
    return build_nsys_argv(nsys, Path("run/trace"), ["python"], cuda=cuda)


def test_the_help_names_options() -> None:
    known = parse_abilities(HELP)
    assert known.options == {"--capture-range", "--cuda-graph-trace", "--ib-switch-metrics-device", "--trace"}
    assert parse_abilities("what is that?") == Abilities()


@pytest.mark.nsys
def test_a_real_nsys_names_all_that_is_used() -> None:
    nsys = shutil.which("nsys")
    assert nsys, "the marker promises an nsys"
    known = read_abilities(Path(nsys))
    flags = {word.partition("=")[0] for word in _argv(NsysOptions()) if word.startswith("--")}
    assert flags <= known.options


def test_an_nsys_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="does not start"):
        read_abilities(tmp_path / "nsys")


def test_the_choice_for_graphs_is_passed_on() -> None:
    assert "--cuda-graph-trace=graph" in _argv(NsysOptions("graph"))


def test_without_cuda_its_apis_are_left_out() -> None:
    argv = _argv(NsysOptions(), cuda=False)
    assert "--trace=nvtx" in argv
    assert not [word for word in argv if "capture-range" in word or "graph" in word]


def test_flags_that_this_nsys_does_not_know_are_left_out() -> None:
    argv = _argv(NsysOptions(), known=HELP)
    assert [word for word in argv if word.startswith("--")] == [
        "--trace=cuda,nvtx",
        "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi",
        "--env-var=TMPDIR=/tmp",
        "--output=run/trace",
    ]


def test_a_percent_in_the_runs_name_is_no_pattern() -> None:
    argv = build_nsys_argv(Nsys(Path("nsys"), "1.0"), Path("50%p/trace"), ["python"], cuda=False)
    assert "--output=50%%p/trace" in argv


def test_a_choice_that_this_nsys_does_not_have_is_refused() -> None:
    check_abilities(NsysOptions("graph"), parse_abilities(HELP), "2023.4")
    check_abilities(NsysOptions("graph"), Abilities(), "9")
    with pytest.raises(UsageError, match=r"--cuda-graph-trace graph: nsys 2021\.1 does not support it"):
        check_abilities(NsysOptions("graph"), Abilities(frozenset({"--trace"})), "2021.1")
