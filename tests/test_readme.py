"""The README and the guides: what they say is what the commands say, and what they tell a reader to type exists."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

import profkit
from profkit import read_snapshot, read_trace
from profkit.cli import _COMMANDS, GUIDES, cli, read_guide
from tests.conftest import ROOT

if TYPE_CHECKING:
    from tests.forked_scripts import Forks
from tests.test_attribution import slow_account

pytestmark = pytest.mark.usefixtures("read_once")

README = (ROOT / "README.md").read_text(encoding="utf-8")
TRACES = ROOT / "traces"

EXAMPLES = re.findall(r"```console\n\$ profkit (.*)\n((?s:.*?))```", README)


@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example_prints_what_it_says(profkit: Callable, command: str, output: str) -> None:
    command, _, lines = command.partition(" | head -")
    done = profkit(*shlex.split(command), cwd=ROOT)
    shown = "".join(done.stdout.splitlines(keepends=True)[: int(lines) if lines else None])
    assert shown == output
    assert done.returncode == (3 if command.startswith("check") else 0)
    assert max(map(len, output.splitlines())) <= 80


def test_the_readme_is_short_and_shows_five_answers() -> None:
    assert len(README.splitlines()) <= 200
    assert {command.split()[0] for command, _ in EXAMPLES} == {"kernels", "efficiency", "memory", "compare", "check"}


@pytest.mark.parametrize("page", ["README.md", "profkit/README.md", "recipes/README.md", "traces/README.md"])
def test_every_relative_link_leads_to_a_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_the_house_names_rooms_that_exist() -> None:
    text = (ROOT / "profkit" / "README.md").read_text(encoding="utf-8")
    for room in re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text):
        assert (ROOT / "profkit" / room).exists() or (ROOT / room).exists(), f"profkit/README.md names {room}"


LOOP = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
loader = batches = [torch.ones(2, 8)] * 40

def train_step(batch):
    model(batch).sum().backward()
    optimizer.step()

"""


@pytest.mark.parametrize("page", ["README.md", "profkit/guides/python.md"])
def test_the_python_examples_run(page: str, forks: Forks, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n((?s:.*?))```", (ROOT / page).read_text(encoding="utf-8"))
    assert examples
    (tmp_path / "traces").symlink_to(TRACES)
    (tmp_path / "examples.py").write_text(LOOP + "".join(examples))
    done = forks.check([sys.executable, "examples.py"], tmp_path)
    assert "35723791" in done.stdout
    assert "unprofiled (" in done.stdout, "the summary of what was recorded"
    assert (
        done.stderr == "profkit: no memory was recorded: no GPU was used (memory=True records the allocator of CUDA)\n"
    )


def test_the_readme_names_every_command() -> None:
    for command in _COMMANDS:
        assert re.search(rf"`profkit {command}[ `]", README), f"README.md has no line for {command}"


def _figures() -> list[tuple[str, str, int, int]]:
    rows = re.findall(r"^\| `(\S+)` \| ([\d,]+ · .*) \|$", (TRACES / "README.md").read_text(), re.M)
    found = []
    for name, cells in rows:
        for part, cell in zip(("", "forward", "backward", "optimizer"), cells.split("|"), strict=True):
            if "·" in cell and cell.strip() != "0 · 0":
                count, total = (int(number.replace(",", "")) for number in cell.split("·"))
                found.append((name, part, count, total))
    return found


def test_figures_are_given_for_three_traces() -> None:
    assert len({name for name, *_ in _figures()}) == 3


@pytest.mark.parametrize(("name", "part", "count", "total_ns"), _figures())
def test_a_trace_holds_its_known_figures(name: str, part: str, count: int, total_ns: int) -> None:
    result = read_trace(TRACES / name).kernels(part or None)
    assert (result.kernel_count, result.kernel_time_ns) == (count, total_ns)
    if part and name.endswith(".sqlite"):
        assert slow_account(TRACES / name, part) == (count, total_ns)


def test_the_kineto_figures_come_out_of_the_raw_events_too() -> None:
    """Kernels by their launch's time alone, inside the annotation, on any thread: torch has one main thread here."""
    events = json.loads(gzip.decompress((TRACES / "small-train.kineto.json.gz").read_bytes()))["traceEvents"]
    spans = [
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation" and e["name"] == "backward"
    ]
    launches = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    inside = [
        e
        for e in events
        if e.get("cat") == "kernel" and any(a <= launches[e["args"]["correlation"]] < b for a, b in spans)
    ]
    assert len(inside) == 2422
    assert sum(round(e["dur"] * 1000) for e in inside) == 35_722_497


def test_the_snapshot_gives_the_allocators_own_peaks() -> None:
    result = read_snapshot(TRACES / "small-train.snapshot.pickle.gz").memory()
    figures = (
        result.totals.allocated_peak_bytes,
        result.totals.reserved_peak_bytes,
        result.totals.requested_peak_bytes,
    )
    said = re.search(
        r"peaks of ([\d,]+) B allocated, ([\d,]+) B\s+reserved and ([\d,]+) B", (TRACES / "README.md").read_text()
    )
    assert said is not None
    assert figures == tuple(int(number.replace(",", "")) for number in said.groups())
    assert result.totals.exact
    by_category = {row.category: row.bytes for row in result.composition.by_category}
    assert sum(by_category.values()) == figures[0]
    # 111 parameters, 25 of them norm gains that no constructor of torch's made.
    assert 485e6 < by_category["parameters"] < 516_115_968


def test_the_traces_are_small_and_carry_no_environment() -> None:
    files = [path for path in TRACES.rglob("*") if path.is_file() and path.suffix != ".md"]
    assert sum(path.stat().st_size for path in files) < 5_000_000
    for path in files:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        for word in (b"LD_LIBRARY_PATH", b"/home/", b"/root/", b"HOSTNAME"):
            assert word not in data, f"{path.name} holds {word!r}"


def test_every_trace_is_described() -> None:
    text = (TRACES / "README.md").read_text()
    runs = {path.parent for path in TRACES.rglob("manifest.json")}
    for path in (*TRACES.iterdir(), *runs):
        is_folder_of_runs = path.is_dir() and path not in runs
        assert path.suffix == ".md" or is_folder_of_runs or f"`{path.relative_to(TRACES)}`" in text


# -- the guides ------------------------------------------------------------------------------------------------------


FOLDER = Path(profkit.__file__).parent / "guides"


def test_every_guide_is_a_topic_and_the_list_shows_its_title() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(GUIDES)
    shown = CliRunner().invoke(cli, ["help"]).output
    titles = {topic: read_guide(topic).partition("\n")[0].removeprefix("# ") for topic in GUIDES}
    assert all(f"{topic:<12} {title}" in shown for topic, title in titles.items())


def test_help_shows_a_guide_as_it_is_written_and_of_a_command_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click, "echo_via_pager", None)  # pages are turned in a terminal alone
    for topic in GUIDES:
        result = CliRunner().invoke(cli, ["help", topic])
        assert (result.exit_code, result.output.strip()) == (0, read_guide(topic).strip())
    asked, own = (CliRunner().invoke(cli, words).output for words in (["help", "kernels"], ["kernels", "--help"]))
    assert asked.split("\n", 1)[1] == own.split("\n", 1)[1]


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


def test_every_option_that_a_guide_names_exists() -> None:
    context = click.Context(cli)
    known = {"--lr"}  # of somebody's script
    known |= {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-id", "--rdzv-endpoint"}  # of torchrun
    known.add("--type")  # of nsys export
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        known |= {one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)}
    for topic in GUIDES:
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", read_guide(topic)))
        assert named <= known | {"--help", "--debug"}, (topic, named - known)


def test_guides_have_lines_that_a_screen_holds() -> None:
    for topic in GUIDES:
        assert max(len(line) for line in read_guide(topic).split("\n") if not line.startswith("|")) <= 120
