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
    build_export_argv,
    build_nsys_argv,
    check_abilities,
    parse_abilities,
    parse_extra,
    parse_traces,
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


def test_the_help_names_options_and_apis() -> None:
    known = parse_abilities(HELP)
    assert known.options == {"--capture-range", "--cuda-graph-trace", "--ib-switch-metrics-device", "--trace"}
    assert known.traces == {"cuda", "nvtx", "osrt", "none"}
    assert parse_abilities("what is that?") == Abilities()


@pytest.mark.nsys
def test_a_real_nsys_names_all_that_is_used() -> None:
    nsys = shutil.which("nsys")
    assert nsys, "the marker promises an nsys"
    known = read_abilities(Path(nsys))
    flags = {word.partition("=")[0] for word in _argv(NsysOptions()) if word.startswith("--")}
    assert flags <= known.options
    assert {"cuda", "nvtx", "osrt"} <= known.traces


def test_an_nsys_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="does not start"):
        read_abilities(tmp_path / "nsys")


def test_traces_and_graphs_are_passed_on() -> None:
    argv = _argv(NsysOptions(("cuda", "nvtx", "osrt"), "graph"))
    assert "--trace=cuda,nvtx,osrt" in argv
    assert "--cuda-graph-trace=graph" in argv


def test_without_cuda_its_apis_are_left_out() -> None:
    argv = _argv(NsysOptions(("cuda", "nvtx", "osrt", "cublas")), cuda=False)
    assert "--trace=nvtx,osrt" in argv
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


def test_extra_flags_come_after_ours_and_stand_in_for_a_default() -> None:
    argv = _argv(NsysOptions(extra=("--sample=process-tree", "-b", "none")))
    assert argv[-4:] == ["--sample=process-tree", "-b", "none", "python"]
    assert "--sample=none" not in argv
    assert "--cpuctxsw=none" in argv


def test_a_percent_in_the_runs_name_is_no_pattern() -> None:
    argv = build_nsys_argv(Nsys(Path("nsys"), "1.0"), Path("50%p/trace"), ["python"], cuda=False)
    assert "--output=50%%p/trace" in argv


def test_traces_need_nvtx() -> None:
    assert parse_traces("cuda, nvtx,cuda") == ("cuda", "nvtx")
    with pytest.raises(UsageError, match=r"--trace cuda: ranges come through NVTX; write --trace cuda,nvtx$"):
        parse_traces("cuda")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ()),
        ("--gpuctxsw=true -b none", ("--gpuctxsw=true", "-b", "none")),
        ("--session-new 'my session'", ("--session-new", "my session")),
        ("--trace-fork-before-exec=true --samples-per-backtrace=2", None),
    ],
)
def test_extra_flags_are_split_as_a_shell_would(text: str, words: tuple[str, ...] | None) -> None:
    assert parse_extra(text) == (tuple(text.split()) if words is None else words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-o x", "--nsys-args: -o is set by profkit itself; leave it out"),
        ("--output=x", "--nsys-args: --output is set by profkit itself"),
        ("--outp=x", "--nsys-args: --outp is set by profkit itself"),
        ("-c nvtx", "-c is set by profkit itself"),
        ("--capture-range=nvtx", "--capture-range is set by profkit itself; leave it out"),
        ("--capture-range-end=none", "--capture-range-end is set by profkit itself"),
        ("--export=json", "--export is set by profkit itself"),
        ("--trace=cuda", "--trace is set by profkit itself; use profkit's own --trace"),
        ("--cuda-graph-trace=graph", "use profkit's own --cuda-graph-trace"),
        ("python", "python is not an nsys flag"),
        ("--gpuctxsw=true python", "python is not an nsys flag"),
        ("-b none python", "python is not an nsys flag"),
        ("--gpuctxsw", "--gpuctxsw lacks its value"),
        ("--session-new 'my", "--nsys-args: No closing quotation"),
    ],
)
def test_nsys_args_that_profkit_cannot_pass_on_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_extra(text)
    assert said in str(error.value)


def test_an_api_that_this_nsys_does_not_know_is_refused() -> None:
    known = parse_abilities(HELP)
    check_abilities(NsysOptions(("cuda", "nvtx", "osrt"), "graph"), known, "2023.4")
    check_abilities(NsysOptions(("anything", "nvtx")), Abilities(), "9")
    with pytest.raises(UsageError, match=r"--trace ucx: nsys 2023\.4 knows cuda, nvtx, osrt$"):
        check_abilities(NsysOptions(("ucx", "nvtx")), known, "2023.4")
    old = Abilities(frozenset({"--trace"}), frozenset())
    with pytest.raises(UsageError, match=r"--cuda-graph-trace graph: nsys 2021\.1 does not support it"):
        check_abilities(NsysOptions(cuda_graph_trace="graph"), old, "2021.1")


EXPORT_HELP = """usage: nsys export [<args>] [nsys-rep-file]

\t-f, --force-overwrite=

\t   Possible values are 'true' or 'false'.

\t--include-blobs [true|false]

\t   Optional values are 'true' or 'false'. If no value is given,
"""
"""As nsys 2025.3.1 writes it."""


def test_payloads_are_exported_where_the_version_can() -> None:
    options = parse_abilities(EXPORT_HELP).options
    assert options == {"--force-overwrite", "--include-blobs"}
    argv = build_export_argv(Path("nsys"), Path("a.nsys-rep"), Path("a.sqlite"), options)
    assert argv[1:] == [
        "export",
        "--type=sqlite",
        "--quiet=true",
        "--include-blobs=true",
        "--output=a.sqlite",
        "a.nsys-rep",
    ]
    assert "--include-blobs=true" not in build_export_argv(Path("nsys"), Path("a.nsys-rep"), Path("a.sqlite"))
