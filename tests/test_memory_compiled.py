"""Memory of compiled code: each allocation is the module's whose result lies in it at the moment that is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from profkit import read_snapshot
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.places import PartRow
from profkit.run.compiled_code import Allocation, CompiledGraph, Holder, Launch, append_records
from profkit.run.directory import COMPILED
from tests.allocator_reference import MIB, Block
from tests.in_process import run_command
from tests.memory_captures import Training, assert_books_close, sizes

FORWARD, BACKWARD = "c" + "f" * 51, "c" + "b" * 51
SEVERAL = ("h.0.a", "h.0.b")


@dataclass
class Code:
    """A generated file in the making: what its lines do, the record of it, and nothing else that runs."""

    code: str
    saved: tuple[str, ...] = ()
    """The buffers of a forward pass that this code is given, after a parameter, under other names."""
    steps: list[tuple[str, int, str, str]] = field(default_factory=list)
    """(what, line, name, old name or module)"""

    def add(self, what: str, name: str, other: str = "") -> None:
        self.steps.append((what, 10 + 2 * len(self.steps), name, other))

    def graph(self) -> CompiledGraph:
        allocations: dict[str, tuple[int | None, list[Holder], int | None]] = {
            given: (None, [Holder(0, name=given)], None) for given in self.given
        }
        launches = []
        for what, line, name, other in self.steps:
            module = None if other == "several" else other
            # The launch that writes a buffer stands on the line after it.
            launches.append(Launch(line + 1, f"triton_{line}", False, (other,) if module else SEVERAL))
            holder = Holder(line, line + 1, module, f"model.py:{line} forward" if module else None, name)
            if what == "allocate":
                allocations[name] = line, [holder], None
            elif what.startswith("reuse"):
                first, holders, _ = allocations.pop(what.partition(" ")[2])
                allocations[name] = first, [*holders, holder], None
            else:
                first, holders, _ = allocations.pop(name)
                allocations[f"{name} at {line}"] = first, holders, line
                launches.pop()
        found = tuple(
            Allocation(first, tuple(holders), freed)
            for first, holders, freed in allocations.values()
            if first is not None or len(holders) > 1
        )
        is_backward = self.code == BACKWARD
        graph = CompiledGraph(self.code, self.code, "2.11.0", "Model.forward", is_backward, tuple(launches), found)
        if is_backward:
            return replace(graph, inputs=("primals_1", *self.given, "tangents_1"))
        returned = [name for name, (_, _, freed) in allocations.items() if freed is None]
        return replace(graph, inputs=("primals_1", "primals_2"), outputs=("", "primals_1", *returned))

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(f"mul_{number}" for number in range(len(self.saved)))

    @property
    def returned(self) -> tuple[str, ...]:
        """The buffers that the code returns."""
        return self.graph().outputs[2:]


class Compiled(Training):
    """Calls of generated code on the reference allocator, which note whose results lie where after every event."""

    def __init__(self, around: str = "model") -> None:
        super().__init__(steps=0)
        self.around, self.phase = around, "forward"
        self.held: dict[Block, str] = {}
        self.moments: dict[int, dict[int, str]] = {}
        """Moment → address → module, by hand."""
        self.vague: set[int] = set()
        """Moments after what no line of the running code allocated was freed: the line that runs is not known."""
        self.graphs: dict[str, CompiledGraph] = {}

    def put(self, size: int, code: str, line: int) -> Block:
        before = len(self.allocator.events)
        block = self.allocator.malloc(size)
        frames = [
            {"name": "call", "filename": f"/tmp/inductor/xx/{code}.py", "line": line},
            {"name": "forward", "filename": "/home/me/model.py", "line": line},
            {"name": "<module>", "filename": "/home/me/train.py", "line": 3},
        ]
        for event in self.allocator.events[before:]:
            event |= {"frames": frames, "user_metadata": f"profkit:{self.phase}:{self.around}"}
        return block

    def call(self, code: Code, sizes: Iterator[int], saved: dict[str, Block] | None = None) -> dict[str, Block]:
        """Run generated code, which is given what a forward pass returned; return what is left."""
        self.graphs[code.code] = code.graph()
        blocks = {given: (saved or {})[name] for given, name in zip(code.given, code.saved, strict=True)}
        for what, line, name, other in code.steps:
            if what == "allocate":
                blocks[name] = self.put(next(sizes), code.code, line)
                self.held[blocks[name]] = other
            elif what == "free":
                block = blocks.pop(name)
                self.drop(block)
                if block in (saved or {}).values():
                    self.vague.add(len(self.allocator.events))
            else:
                blocks[name] = blocks.pop(what.partition(" ")[2])
                self.held[blocks[name]] = other
                continue  # the allocator knows nothing of this
            self.note()
        return blocks

    def drop(self, *blocks: Block) -> None:
        for block in blocks:
            self.held.pop(block)
            self.allocator.free(block)

    def note(self) -> None:
        self.moments[len(self.allocator.events)] = {block.address: module for block, module in self.held.items()}

    def write_run(self, folder: Path) -> Path:
        super().write_run(folder)
        append_records(folder / COMPILED, list(self.graphs.values()))
        return folder


def random_code(code: str, chance: random.Random, saved: tuple[str, ...] = ()) -> Code:
    """Return code that allocates, hands on and frees memory, as Inductor writes it."""
    made = Code(code, saved)
    made.add("allocate", "first", "h.0.attn")
    made.add("reuse first", "second", "h.1.mlp.up")
    live = ["second", *made.given]
    for number in range(chance.randrange(4, 30)):
        what = chance.choice(("allocate", "allocate", "reuse", "free"))
        module = f"h.{number % 4}.{chance.choice(('attn', 'mlp.up', 'norm'))}"
        if what == "allocate" or not live:
            made.add("allocate", f"buf{number}", module)
            live.append(f"buf{number}")
        elif what == "reuse":
            old = live.pop(chance.randrange(len(live)))
            made.add(f"reuse {old}", f"buf{number}", module)
            live.append(f"buf{number}")
        else:
            made.add("free", live.pop(chance.randrange(len(live))))
    return made


def modules_at(memory: DeviceMemory, moment: int) -> dict[int, str]:
    """Return the module of each block that compiled code holds at a moment, by address."""
    addresses = memory.history.replay.address
    found = {}
    for row in memory.live_rows(moment):
        place = memory.place_of(row, moment)
        if place.evidence == "code":
            found[int(addresses[row])] = place.shared or place.modules[0][0]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_at_every_event_each_block_is_the_modules_whose_result_it_holds(seed: int) -> None:
    chance = random.Random(seed)
    amounts = iter(lambda: chance.randrange(1, 40) * 100_000, 0)
    program = Compiled()
    forward = random_code(FORWARD, chance)
    backward = random_code(BACKWARD, chance, forward.returned)
    for _ in range(3):
        program.phase = "forward"
        saved = program.call(forward, amounts)
        program.phase = "backward"
        left = program.call(backward, amounts, saved)
        other = program.malloc(MIB, "forward")
        program.note()
        program.drop(*left.values())
        program.allocator.free(other)
    opened = program.opened_run()
    memory = opened.device()
    for moment, truth in program.moments.items():
        found = modules_at(memory, moment)
        if moment in program.vague:
            assert found.keys() == truth.keys()
            assert all(truth[address] in said.removeprefix("one of: ").split(", ") for address, said in found.items())
        else:
            assert found == truth
    assert_books_close(opened.memory())


def block_code() -> Code:
    """Return code whose first memory serves twice, and whose last is of two modules."""
    code = Code(FORWARD)
    code.add("allocate", "buf0", "h.0.a")
    code.add("allocate", "buf1", "h.0.mlp.up")
    code.add("reuse buf0", "buf2", "h.1.norm")
    code.add("allocate", "buf3", "several")
    code.add("free", "buf1")
    return code


SIZES = (8 * MIB, 4 * MIB, 2 * MIB)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    program = Compiled()
    program.call(block_code(), iter(SIZES))
    return program.write_run(tmp_path)


def rows_of(path: Path) -> dict[str, PartRow]:
    return {row.name: row for row in read_snapshot(path).memory().composition.by_module}


def test_a_compiled_run_has_the_tree_of_modules_and_the_lines_whose_results_memory_holds(run: Path) -> None:
    composition = read_snapshot(run).memory().composition
    rows = {row.name: row for row in composition.by_module}
    assert rows["h.1.norm"].bytes == SIZES[0], "who holds the memory, not who asked for it"
    assert "h.0.a" not in rows
    assert rows["h.0.mlp.up"].own_bytes == SIZES[1]
    shared = rows["h.0.shared: h.0.a + h.0.b"]
    assert (shared.bytes, shared.path) == (SIZES[2], ("model", "h", "0", "shared: h.0.a + h.0.b"))
    assert rows["model"].evidence == {"identity": 8 * MIB, "code": sum(SIZES)}
    assert rows["h.0.mlp.up"].categories == {"temporaries": SIZES[1]}, "what the code frees itself"
    assert "temporaries" not in rows["h.1.norm"].categories
    lines = {row.stack[0]: row.bytes for row in composition.by_stack}
    reused = next(line for what, line, _, _ in block_code().steps if what.startswith("reuse"))
    assert lines[f"model.py:{reused} forward"] == SIZES[0]
    assert "recorded with the compiled code" in run_command("memory", str(run), "--by", "module").stdout


def test_what_a_library_keeps_of_what_no_line_asked_for_is_its_workspace() -> None:
    program, code = Compiled(), block_code()
    program.call(code, iter(SIZES))
    # The launch that writes buf0: a product of matrices, whose library needs memory of its own.
    program.put(MIB, FORWARD, 11)
    program.allocator.free(program.put(4 * MIB, FORWARD, 13))
    result = program.opened_run().memory()
    rows = {row.name: row for row in result.composition.by_module}
    assert rows["workspace"].bytes == MIB
    assert (sizes(result)["workspace"], sizes(result)["temporaries"]) == (MIB, 4 * MIB)


def test_the_modules_of_an_only_model_are_named_without_it() -> None:
    program = Compiled("model/")
    program.call(block_code(), iter(SIZES))
    result = program.opened_run().memory()
    names = {row.owner for row in result.composition.largest}
    assert {"h.1.norm", "shared: h.0.a + h.0.b"} <= names
    assert "h.0.shared: h.0.a + h.0.b" in {row.name for row in result.composition.by_module}


def test_names_stand_below_the_module_that_was_compiled(tmp_path: Path) -> None:
    program = Compiled("layers.3")
    program.call(block_code(), iter(SIZES))
    rows = rows_of(program.write_run(tmp_path))
    assert {"layers.3.h.1.norm", "layers.3.h.0.mlp.up"} <= set(rows)


def test_between_two_events_both_holders_are_named_if_it_may_be_either() -> None:
    program = Compiled()
    other = program.malloc(MIB, "forward")
    code = Code(FORWARD)
    code.add("allocate", "buf0", "h.0.a")
    code.add("allocate", "buf1", "h.0.b")
    code.add("reuse buf0", "buf2", "h.0.c")
    code.add("allocate", "buf3", "h.0.d")
    blocks = [program.put(SIZES[0], FORWARD, 10), program.put(SIZES[1], FORWARD, 12)]
    program.allocator.free(other)  # something else happens between the call's second and third event
    moment = len(program.allocator.events)
    blocks.append(program.put(SIZES[2], FORWARD, 16))
    program.graphs[FORWARD] = code.graph()
    memory = program.opened_run().device()
    found = modules_at(memory, moment)
    assert found[blocks[0].address] == "one of: h.0.a, h.0.c"
    assert found[blocks[1].address] == "h.0.b"
    after = len(program.allocator.events)
    assert modules_at(memory, after)[blocks[0].address] == "h.0.c"


def test_code_that_the_run_knows_nothing_of_stays_with_the_module_that_was_compiled(tmp_path: Path) -> None:
    program = Compiled()
    program.call(block_code(), iter(SIZES))
    program.graphs.clear()
    rows = rows_of(program.write_run(tmp_path))
    assert rows["model"].evidence == {"identity": 8 * MIB, "metadata": sum(SIZES)}


def test_two_peaks_are_compared_by_the_modules_that_hold_the_memory(run: Path, tmp_path: Path) -> None:
    parts = read_snapshot(Training(steps=0).write_run(tmp_path / "before")).against(read_snapshot(run)).parts
    compiled = max(parts, key=lambda part: part.bytes)
    assert (compiled.label, compiled.owner_count, compiled.bytes) == ("h.1.norm", 3, sum(SIZES))
