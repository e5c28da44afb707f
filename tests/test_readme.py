"""The README's examples say what the commands say, and the traces hold what their README claims."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from profkit import read_snapshot, read_trace
from profkit.cli import _COMMANDS
from tests.conftest import ROOT

if TYPE_CHECKING:
    from tests.forked_scripts import Forks

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
    done = forks.run([sys.executable, "examples.py"], tmp_path)
    assert done.returncode == 0, done.stderr
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


def test_the_nsys_figures_come_out_of_plain_sql_too() -> None:
    connection = sqlite3.connect(f"file:{TRACES / 'small-train.nsys2025.sqlite'}?mode=ro", uri=True)
    sql = """
        SELECT count(DISTINCT k.rowid), sum(k.end - k.start)
        FROM CUPTI_ACTIVITY_KIND_KERNEL k
        JOIN CUPTI_ACTIVITY_KIND_RUNTIME r
          ON r.correlationId = k.correlationId AND (r.globalTid & ~0xFFFFFF) = k.globalPid
        JOIN NVTX_EVENTS n ON r.start >= n.start AND r.start < n.end
        LEFT JOIN StringIds s ON s.id = n.textId
        WHERE coalesce(n.text, s.value) = 'backward'
    """
    assert connection.execute(sql).fetchone() == (2422, 35_723_791)
    connection.close()


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


def test_cpu_self_times_sum_to_the_time_of_the_outermost_operators() -> None:
    trace = read_trace(TRACES / "tiny-train-cpu.kineto.json.gz").trace
    by_thread: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for thread, start, end in zip(
        trace.work.launch_thread.tolist(), trace.work.start_ns.tolist(), trace.work.end_ns.tolist(), strict=True
    ):
        by_thread[thread].append((start, -end))
    top = 0
    for spans in by_thread.values():
        reach = 0
        for start, minus_end in sorted(spans):
            if start >= reach:
                top, reach = top - minus_end - start, -minus_end
    assert top == int(trace.work.duration_ns.sum())


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
