"""What torch.compile did in a run: recorded from Dynamo's own records, and said where a person can act on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config, reset
from torch._guards import CompileContext, CompileId, compile_context

from profkit.analysis.kernels.compiled_code import find_compilations, read_run_compilations, sum_compilations
from profkit.capture.compilations import CompilationRecorder, program_line
from profkit.capture.hooks.backward_nodes import watch_backward_calls
from profkit.capture.patches import restore
from profkit.capture.session import Session
from profkit.capture.steps.conditions import count_compiled_graphs
from profkit.run.compiled_code import Compilation, GraphBreak, append_records, read_compiled_code
from profkit.run.directory import COMPILED, MANIFEST, Run
from profkit.run.manifest import Manifest, Process, write_manifest
from profkit.run.recording import COMMAND_WARMUP, COMPLETE, Order, take_processes
from tests.golden import check_text
from tests.observed_ranges import ObservedRanges, observed_ranges


class Broken(nn.Module):  # type: ignore[misc]
    """Two breaks of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        print(end="")
        x = x + 1
        torch._dynamo.graph_break()
        return x.sin()


@pytest.fixture
def observed() -> Iterator[ObservedRanges]:
    with observed_ranges() as observer:
        yield observer
    reset()


def test_breaks_and_recompilations_are_recorded_with_their_step_reason_and_line(
    tmp_path: Path, observed: ObservedRanges
) -> None:
    reset()
    torch._dynamo.utils.clear_compilation_metrics()  # of the tests before
    model = torch.compile(Broken(), backend="aot_eager")
    path, is_recording = tmp_path / COMPILED, False
    watched = CompilationRecorder(path, lambda: is_recording)
    for step, size in enumerate((2, 2, 3)):
        is_recording = step > 0
        watched.step_begins(step, is_recorded=is_recording)
        model(torch.randn(size, 4)).sum().backward()
    watched.look()
    watched.recording_ends()
    is_recording = False
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    watched.look()

    *compiled, after = read_compiled_code(path).compilations
    assert (after.is_recorded, after.is_again) == (False, False)
    first = [one for one in compiled if one.step == 0]
    again = [one for one in compiled if one.step == 2]
    assert len(first) + len(again) == len(compiled)
    assert not any(one.is_again or one.is_recorded for one in first)
    assert all(one.is_again and one.is_recorded for one in again)
    assert {one.what for one in compiled} == {"forward", "backward"}
    assert all(one.duration_ns for one in compiled)
    assert {one.reason for one in again if one.what == "forward"} <= {
        "tensor 'x' size mismatch at index 0. expected 2, actual 3",
        "tensor '___stack0' size mismatch at index 0. expected 2, actual 3",
        None,
    }
    assert any(one.reason for one in again)
    here = f"{program_line(__file__, None, None).partition(':')[0]}:"
    assert all(one.line is not None and one.line.startswith(here) for one in again if one.what == "forward")

    breaks = read_compiled_code(path).breaks
    assert {one.step for one in breaks} == {0, 2}
    places = {one.lines[0] for one in breaks}
    assert len(places) == 2
    assert all(place.startswith(here) and place.endswith(" forward") for place in places)
    assert any("graph_break" in one.reason for one in breaks)
    assert {name for name in observed.events if name.startswith("compiling")} == {"compiling Broken.forward"} | {
        name for name in observed.events if name in ("compiling forward", "compiling backward")
    }


def test_a_function_beyond_the_recompile_limit_is_named(tmp_path: Path) -> None:
    reset()
    path = tmp_path / COMPILED
    watched = CompilationRecorder(path, lambda: False)
    watched.step_begins(0, is_recorded=False)

    def scaled(x: Tensor, by: str) -> Tensor:
        return x * len(by)

    compiled = torch.compile(scaled, backend="eager")
    with config.patch(recompile_limit=2):
        for by in ("a", "bb", "ccc", "dddd"):
            compiled(torch.ones(2), by)
    watched.look()
    reset()
    beyond = [one for one in read_compiled_code(path).compilations if one.failure is not None]
    assert beyond
    assert "recompile limit" in (beyond[0].failure or "")
    assert (beyond[0].line or "").endswith(" scaled")


@pytest.fixture
def unpatched() -> Iterator[None]:
    yield
    restore()


@pytest.mark.usefixtures("unpatched")
def test_a_gradient_that_the_compiler_takes_is_no_backward_pass() -> None:
    begun: list[object] = []
    watch_backward_calls(lambda key, _: begun.append(key), lambda _key, _result: None)
    x = torch.ones(2, requires_grad=True)
    with compile_context(CompileContext(CompileId(frame_id=0, frame_compile_id=0))):
        torch.autograd.grad(x.sum(), x)
    assert begun == []
    torch.autograd.grad(x.sum(), x)
    assert len(begun) == 1


def test_a_torch_whose_records_changed_ends_the_watch_and_not_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._dynamo.utils, "get_compilation_metrics", lambda: 1 / 0)
    watched = CompilationRecorder(tmp_path / COMPILED, lambda: False)
    watched.step_begins(0, is_recorded=False)
    watched.look()
    assert not (tmp_path / COMPILED).exists()


_FORWARD = Compilation("1-1", 1, "forward", "model.py:3 forward", 0, False, False, 2_000_000_000)
_AGAIN = replace(
    _FORWARD,
    id="1-2",
    step=5,
    is_recorded=True,
    is_again=True,
    duration_ns=500_000_000,
    reason="tensor 'x' size mismatch at index 0. expected 8, actual 12",
)
_BREAK = GraphBreak("1-3", 1, "Tensor.item()", None, None, ("model.py:9 forward",), 0, False)


IN_RECORDED = {"step": 5, "is_recorded": True}
RECORDS: dict[str, tuple[Compilation | GraphBreak, ...]] = {
    "a recompilation in a recorded step": (_FORWARD, _AGAIN, replace(_AGAIN, id="1-4", what="backward", line=None)),
    "what another process compiled in an earlier run": (_FORWARD, replace(_AGAIN, pid=2)),
    "a first compilation in a recorded step": (replace(_FORWARD, **IN_RECORDED),),
    "a line that breaks graphs, met twice": (_BREAK, replace(_BREAK, id="1-5", **IN_RECORDED)),
    "what was not compiled, and what runs without CUDA graphs": (
        replace(_FORWARD, failure="Unsupported: generator", failed_line="model.py:7 walk"),
        replace(_FORWARD, id="1-9", cudagraphs_skipped="mutated inputs (1 instances)"),
    ),
}


def test_what_is_said_of_compilations(tmp_path: Path) -> None:
    text = ""
    for name, records in RECORDS.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        process = Process(process="1", pid=1, rank=None, state=COMPLETE)
        write_manifest(folder / MANIFEST, Manifest(processes=(process,)))
        append_records(folder / COMPILED, records)
        known = read_run_compilations(Run(folder))
        assert known is not None
        breaks = [(one.times, one.in_recorded_steps) for one in known.breaks]
        said = [f"  {one.code}: {one.message}\n" for one in find_compilations(Run(folder))]
        text += f"{name}; breaks (times, in recorded steps): {breaks}\n" + "".join(said)
    check_text("compilations", text)


def test_the_time_before_recorded_steps_is_kept_apart() -> None:
    found = sum_compilations([_FORWARD, _AGAIN], [])
    assert (found.before_ns, found.before_count, found.recorded_ns) == (2_000_000_000, 1, 500_000_000)


@pytest.mark.parametrize(("compiling", "recorded_from"), [(range(3), 14), (range(8), 19), (range(40), 23)])
def test_steps_that_compile_are_no_timed_ones_as_far_as_dynamo_compiles_a_function_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiling: range, recorded_from: int
) -> None:
    """Three steps are not timed, eleven are; of a program that compiles in every step the twelfth and later ones."""
    session = Session(Order(str(tmp_path), "kineto", COMMAND_WARMUP, 2, annotate=False))
    for number in range(recorded_from + 3):
        done = sum(step < number for step in compiling)
        monkeypatch.setattr("profkit.capture.session.count_compiled_graphs", lambda done=done: done)
        session.boundary(number)
    session.end()
    (process,) = take_processes(tmp_path)
    assert (process.state, len(process.profiled)) == ("complete", 2)
    assert session._first == recorded_from
    assert len(process.attached) == 11


def test_no_graph_is_counted_while_another_thread_imports_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", ModuleType("torch._dynamo.utils"))
    assert count_compiled_graphs() == 0
