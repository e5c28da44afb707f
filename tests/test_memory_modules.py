"""What each module held, and each phase: ``profkit memory --by module`` and ``--by phase``."""

from __future__ import annotations

import csv
import io
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from profkit import read_snapshot
from profkit.analysis.memory.device import Composition
from profkit.analysis.memory.places import fold
from profkit.report.commands.memory import build_memory_document
from profkit.report.document import render
from profkit.run.directory import SNAPSHOT
from tests.allocator_reference import MIB, Block
from tests.captures import capture
from tests.in_process import run_command
from tests.memory_captures import Training

LAYERS = ("h.0", "h.1", "h.2")
OUTSIDE = "(outside modules)"


class Layers(Training):
    """A model of three layers and a head, tied to its embedding; one flat parameter; gradients in one bucket.

    ``held`` is where the bytes are that are live, by hand: the names of the module and all around it → bytes. It is
    kept at the allocator's peak.
    """

    def __init__(self, *, texts: bool = True, steps: int = 2, extents: bool = True) -> None:
        super().__init__(steps=0)
        for weight in self.weights:
            self.allocator.free(weight)
        self.ledger = self.ledger[:1]
        self.texts, self.extents = texts, extents
        self.phase = self.module = ""
        self.live: dict[Block, list[tuple[str, int]]] = {}
        self.held: Counter[str] = Counter()
        embedding = self.put(5 * MIB, [("model", 5 * MIB)])
        for name in ("wte.weight", "head.weight"):
            self.own(embedding, "parameter", name, 0, 5 * MIB)
        for layer in LAYERS:
            self.own(self.put(3 * MIB, [(f"{layer}.attn", 3 * MIB)]), "parameter", f"{layer}.attn.weight")
            # Two tensors of one block, each of another part of it, with 100 bytes of alignment between.
            mlp = self.put(4 * MIB, [(f"{layer}.mlp.up", MIB), (f"{layer}.mlp.down", 2 * MIB)])
            self.own(mlp, "parameter", f"{layer}.mlp.up.weight", 0, MIB)
            self.own(mlp, "parameter", f"{layer}.mlp.down.weight", MIB + 100, 2 * MIB)
        for step in range(steps):
            self.train(step)

    def put(self, size: int, where: list[tuple[str, int]] | None = None, stack: str = "forward") -> Block:
        """Allocate for these modules, what is left over for the one that holds them; by default for the open one."""
        before = len(self.allocator.events)
        block = super().malloc(size, stack)
        if self.texts and self.phase:
            for event in self.allocator.events[before:]:
                event["user_metadata"] = f"profkit:{self.phase}:{self.module}"
        outside = f"{OUTSIDE}/{self.phase or '(before the first phase)'}"
        self.live[block] = where or [(self.module or outside, size)]
        if self.allocator.allocated.current > sum(self.held[top] for top in ("model", OUTSIDE)):
            self.held = self.count()
        return block

    def put_with(self, text: str, size: int) -> None:
        self.put(size)
        self.allocator.events[-1]["user_metadata"] = text

    def drop(self, *blocks: Block) -> None:
        for block in blocks:
            self.allocator.free(block)
            del self.live[block]

    def count(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for block, where in self.live.items():
            for module, size in where:
                for name in _around(module):
                    held[name] += size
            names = [_around(module) for module, _ in where]
            for name in set(names[0]).intersection(*names):
                held[name] += block.size - sum(size for _, size in where)
        return held

    def own(self, block: Block, role: str, name: str, offset: int = 0, size: int | None = None) -> None:
        entry = {"kind": "owned", "time_us": self.allocator.clock, "device": 0, "address": block.address, "step": 0}
        if self.extents and size is not None:
            entry |= {"offset_bytes": offset, "own_bytes": size}
        self.ledger.append({**entry, "bytes": block.requested, "role": role, "name": name})

    @contextmanager
    def inside(self, name: str, phase: str | None = None) -> Iterator[None]:
        before = self.phase, self.module
        self.phase, self.module = phase or self.phase, "" if phase and phase != "recompute" else name
        self.mark("START", name)
        yield
        self.mark("END", name)
        self.phase, self.module = before

    def train(self, number: int) -> None:
        with self.inside(f"step {number}"):
            self.phase = self.module = ""
            saved, gradients = [], []
            with self.inside("forward", "forward"), self.inside("model"):
                for layer in LAYERS:
                    with self.inside(layer):
                        with self.inside(f"{layer}.attn"):
                            saved.append(self.put(6 * MIB))
                            self.drop(self.put(2 * MIB))
                        with self.inside(f"{layer}.mlp"):
                            saved.append(self.put(7 * MIB + 5))
                saved.append(self.put(5 * MIB))
            with self.inside("loss", "loss"):
                saved.append(self.put(1000))
            with self.inside("backward", "backward"):
                for layer in reversed(LAYERS):
                    with self.inside(layer), self.inside(f"{layer}.mlp"):
                        with self.inside("recompute", "recompute"):
                            self.module = f"{layer}.mlp"
                            again = self.put(9 * MIB, stack="backward")
                        gradients.append(self.put(3 * MIB, [(f"{layer}.mlp.up", 3 * MIB)], "backward"))
                        self.drop(again)
                for layer, gradient in zip(reversed(LAYERS), gradients, strict=True):
                    self.own(gradient, "gradient", f"{layer}.mlp.up.weight")
            with self.inside("optimizer", "optimizer"):
                self.put(MIB, stack="state")
            self.drop(*saved, *gradients)


def _around(module: str) -> list[str]:
    if module.startswith(OUTSIDE):
        return [OUTSIDE, module.rpartition("/")[2]]
    parts = module.split(".") if module != "model" else []
    return ["model", *(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))]


def at_peak(training: Layers, folder: Path, **options: Any) -> Composition:
    return read_snapshot(training.write_run(folder)).memory(**options).composition


@pytest.mark.parametrize("texts", [True, False])
def test_each_module_holds_what_was_counted_by_hand(tmp_path: Path, texts: bool) -> None:
    training = Layers(texts=texts)
    at = at_peak(training, tmp_path)
    assert {row.name: row.bytes for row in at.by_module} == training.held
    kinds = Counter[str]()
    for row in at.by_module:
        if len(row.path) == 1:
            kinds.update(row.evidence)
    assert set(kinds) == ({"identity", "metadata"} if texts else {"identity", "range"})


def test_siblings_that_differ_only_in_a_number_share_a_row(tmp_path: Path) -> None:
    result = read_snapshot(Layers().write_run(tmp_path)).memory()
    rows = {row.name: row for row in result.composition.by_module}
    folded = {row.name: row for row in fold(result.composition.by_module)}
    assert list(folded)[:6] == ["model", "h.*", "h.*.attn", "h.*.mlp", "h.*.mlp.up", "h.*.mlp.down"]
    for part in ("", ".attn", ".mlp", ".mlp.up"):
        assert folded[f"h.*{part}"].bytes == sum(rows[f"{layer}{part}"].bytes for layer in LAYERS)
        assert folded[f"h.*{part}"].number == 3
    for count, name in ((2, "h.*"), (1, "h.0")):
        some = [row for row in result.composition.by_module if not row.name.startswith(LAYERS[count:])]
        assert name in {row.name for row in fold(some)}
    shown = render(build_memory_document(result, by="module"), "table").splitlines()
    assert max(map(len, shown)) <= 80
    assert [line[:20].rstrip() for line in shown if "×3" in line and "mlp" in line] == ["  mlp ×3"]
    few = render(build_memory_document(result, by="module", top=3), "table")
    assert "5 smaller rows counted in those around them" in few
    assert ("mlp ×3" in few, "attn ×3" in few) == (True, False)


def test_equal_allocations_of_like_modules_share_a_line(tmp_path: Path) -> None:
    at = at_peak(Layers(), tmp_path)
    assert {("h.*.mlp", 3), ("h.*.attn.weight", 3)} <= {(row.owner, row.count) for row in at.largest_groups}
    assert "wte.weight, head.weight (tied)" in {row.owner for row in at.largest}
    one = {row.owner for row in at_peak(Layers(), tmp_path, stack="h.1.attn.weight").largest_groups}
    assert one == {"h.1.attn.weight"}


def test_what_a_filter_leaves_out_is_one_line_without_a_use(tmp_path: Path) -> None:
    shown = run_command("memory", Layers().write_run(tmp_path), "--by", "module", "--stack", "h.1.attn").stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("(not selected)")]
    assert line.split()[2:-2] == ["–"] * 2
    (whole,) = [line for line in shown.splitlines() if line.startswith("all ")]
    assert whole.split()[-1] == "100.0%"


def test_a_storage_stands_where_its_tensors_meet_if_their_bytes_are_not_known_or_overlap(tmp_path: Path) -> None:
    at = at_peak(Layers(extents=False), tmp_path)
    own = {row.name: row.own_bytes for row in at.by_module}
    assert own["h.0.mlp"] >= 4 * MIB
    assert "h.0.mlp.down" not in own
    assert own["model"] >= 5 * MIB, "the embedding, which is tied to the head"
    (tied,) = {row.owner for row in at.largest if row.owner and "wte" in row.owner}
    assert tied == "shared storage: wte.weight, head.weight (2 parameters)"


def test_a_saved_tensor_without_a_name_bears_the_module_that_made_it(tmp_path: Path) -> None:
    training = Layers(steps=0)
    training.phase = "forward"
    for layer in LAYERS:
        training.module = f"{layer}.attn"
        training.own(training.put(90 * MIB), "saved", "")
    at = at_peak(training, tmp_path)
    assert ("activations", "h.*.attn", 3) in {(row.category, row.owner, row.count) for row in at.largest_groups}
    (row,) = [row for row in at.by_module if row.name == "h.1.attn"]
    assert row.categories["activations"] == 90 * MIB


def test_a_bucket_of_gradients_is_split_among_its_modules(tmp_path: Path) -> None:
    training = Layers(steps=0)
    bucket = training.put(9 * MIB, stack="backward")
    for number, layer in enumerate(LAYERS):
        training.own(bucket, "gradient", f"{layer}.attn.weight", number * 3 * MIB, 3 * MIB)
    rows = {row.name: row.categories for row in at_peak(training, tmp_path).by_module}
    assert [rows[f"{layer}.attn"]["gradients"] for layer in LAYERS] == [3 * MIB] * 3


@pytest.mark.parametrize("texts", [True, False])
def test_what_a_checkpoint_computes_again_is_a_phase_and_outlives_it_as_activations(
    tmp_path: Path, texts: bool
) -> None:
    rows = {row.name: row.categories for row in at_peak(Layers(texts=texts), tmp_path).by_phase}
    assert rows["recompute"] == {"activations": 9 * MIB}
    assert {row.phase for row in at_peak(Layers(texts=texts), tmp_path).largest if row.bytes == 9 * MIB} == {
        "recompute"
    }
    training = Layers(texts=texts, steps=1)
    with training.inside("backward", "backward"), training.inside("recompute", "recompute"):
        training.drop(training.put(300 * MIB, stack="backward"))
    rows = {row.name: row.categories for row in at_peak(training, tmp_path).by_phase}
    assert rows["recompute"] == {"temporaries": 300 * MIB}


def test_a_range_that_ends_when_it_begins_holds_nothing(tmp_path: Path) -> None:
    training = Layers(texts=False, steps=1)
    with training.inside("forward", "forward"), training.inside("model"):
        training.annotations += [{**training.annotations[-1], "name": "h.1"} for _ in range(2)]
        training.annotations[-1]["stage"] = "END"
        training.drop(training.put(300 * MIB))
    own = {row.name: row.own_bytes for row in at_peak(training, tmp_path).by_module}
    assert own["model"] >= 300 * MIB


def test_memory_of_a_loss_that_is_a_plain_function_is_between_two_phases(tmp_path: Path) -> None:
    training = Layers(texts=False, steps=1)
    with training.inside("forward", "forward"), training.inside("model"):
        training.drop(training.put(MIB))
    training.phase = training.module = ""
    loss = training.put(300 * MIB)
    with training.inside("backward", "backward"), training.inside("model"):
        training.drop(training.put(400 * MIB, stack="backward"), loss)
    rows = {"/".join(row.path): row.bytes for row in at_peak(training, tmp_path).by_module}
    assert rows["(outside modules)/(between forward and backward)"] == 300 * MIB


def test_a_model_that_only_answers_has_phases_too(tmp_path: Path) -> None:
    training = Layers(texts=False, steps=0)
    for phase in ("prefill", "decode"):
        with training.inside(phase), training.inside("inference", "inference"):
            training.drop(training.put(300 * MIB))
    result = read_snapshot(training.write_run(tmp_path)).memory()
    assert [phase.name for phase in result.phases] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("owners", "where"),
    [
        ([("optimizer_state", "h.1.mlp.up.weight.exp_avg")], "h.1.mlp.up"),
        ([("optimizer_state", "(a parameter outside the modules).exp_avg")], "(in no phase)"),
        ([("parameter", "scale")], "model"),
        ([("buffer", "h.0.mask")], "h.0"),
        ([("input", "input")], "(in no phase)"),
        ([("saved", "h.1.attn")], "h.1.attn"),
        ([("gradient", "h.1.attn.weight"), ("gradient", "h.1.mlp.up.weight")], "h.1"),
        ([], "(no module known)"),
    ],
)
def test_the_module_of_a_tensor_is_what_its_name_says(
    tmp_path: Path, owners: list[tuple[str, str]], where: str
) -> None:
    training = Layers(steps=0)
    training.annotations.clear()
    block = training.put(200 * MIB)
    for role, name in owners:
        training.own(block, role, name)
    own = {row.name: row.own_bytes for row in at_peak(training, tmp_path).by_module}
    assert own[where] >= 200 * MIB


def test_a_module_that_is_called_model_is_not_the_outermost_one(tmp_path: Path) -> None:
    training = Layers(steps=0)
    training.own(training.put(50 * MIB), "parameter", "model.layers.0.weight")
    for module in ("model/model", "model/model.layers.0", "model/"):
        training.put_with(f"profkit:forward:{module}", 60 * MIB)
    rows = {row.path: row.own_bytes for row in at_peak(training, tmp_path).by_module}
    assert rows["model", "model"] == 60 * MIB
    assert rows["model", "model", "layers", "0"] == 110 * MIB
    assert rows["model",] >= 60 * MIB


def test_a_workspace_and_the_buckets_of_a_wrapper_are_no_modules(tmp_path: Path) -> None:
    training = Layers(steps=1)
    training.put(150 * MIB, stack="bucket")
    with training.inside("forward", "forward"), training.inside("h.0.attn"):
        product = training.put(100 * MIB)
        training.put(32 * MIB)
        training.put(200 * MIB, stack="bucket")
    training.drop(product)
    rows = {row.name: row.categories for row in at_peak(training, tmp_path).by_module}
    assert rows["workspace"] == {"workspace": 32 * MIB}
    assert rows["communication"] == {"communication": 150 * MIB}
    assert "workspace" not in rows["h.0.attn"]
    assert rows["h.0.attn"]["communication"] == 200 * MIB


def test_a_name_of_a_million_parts_makes_no_million_rows(tmp_path: Path) -> None:
    training = Layers(steps=0)
    training.put_with("profkit:forward:" + "a." * 1_000_000, 60 * MIB)
    assert len(at_peak(training, tmp_path).by_module) < 100


def test_two_models_have_a_tree_each(tmp_path: Path) -> None:
    training = Layers(steps=0)
    for name in ("netG/main.0.weight", "netD/main.0.weight", "netD/scale"):
        training.own(training.put(50 * MIB), "parameter", name)
    training.put_with("profkit:forward:netD/main.1", 60 * MIB)
    training.put_with("profkit:forward:netD/", 70 * MIB)
    rows = {row.name: row for row in at_peak(training, tmp_path).by_module}
    names = ("netG", "netD", "netD/main", "netD/main.0", "netD/main.1")
    assert [rows[name].bytes // MIB for name in names] == [50, 230, 110, 50, 60]
    assert rows["netD"].own_bytes == 120 * MIB


@pytest.mark.parametrize(
    ("text", "where", "phase"),
    [
        ("profkit:forward:h.1.attn", "h.1.attn", "forward"),
        ("profkit:recompute:h.1", "h.1", "recompute"),
        ("profkit:optimizer:", "optimizer", "optimizer"),
        ("profkit:backward:loss", "backward", "backward"),  # what an earlier profkit wrote
        ("the program's own", "(no module known)", "(in no phase)"),
    ],
)
def test_the_text_in_an_event_says_its_module_and_phase(tmp_path: Path, text: str, where: str, phase: str) -> None:
    training = Layers(steps=0)
    training.put_with(text, 200 * MIB)
    at = at_peak(training, tmp_path)
    own = {row.name: row.own_bytes for row in at.by_module}
    assert own[where] >= 200 * MIB
    assert max(at.by_phase, key=lambda row: row.bytes).name == phase


def test_ranges_of_two_devices_prove_no_module_of_the_backward_pass(tmp_path: Path) -> None:
    training = Layers(texts=False)
    data = training.snapshot()
    other = pickle.loads(pickle.dumps(data))
    data["device_traces"] += other["device_traces"]
    data["segments"] += [{**segment, "device": 1} for segment in other["segments"]]
    run = training.write_run(tmp_path)
    (run / SNAPSHOT).write_bytes(pickle.dumps(data))
    rows = {row.name: row for row in read_snapshot(run).memory(device=0).composition.by_module}
    assert rows["(no module known)"].bytes == 9 * MIB, "what was computed again"
    assert rows["h.0.attn"].categories["activations"] == training.held["h.0.attn"] - 3 * MIB


def test_ranges_of_one_thread_prove_no_module_of_the_backward_pass(tmp_path: Path) -> None:
    """Older torch keeps the ranges of the thread that began the recording alone."""
    training = Layers(texts=False)
    is_backward, kept = False, []
    for mark in training.annotations:
        is_backward = mark["stage"] == "START" if mark["name"] == "backward" else is_backward
        kept += [mark] if not is_backward or mark["name"] == "backward" else []
    training.annotations = kept
    rows = {row.name: row for row in at_peak(training, tmp_path).by_module}
    assert rows["(no module known)"].categories["temporaries"] == 9 * MIB


@pytest.mark.parametrize("name", ["small.pickle", "expandable.pickle", "midrun.pickle", "oom.pickle"])
def test_modules_and_phases_of_real_snapshots_sum_to_what_is_allocated(name: str) -> None:
    opened = read_snapshot(capture(name))
    memory, at = opened.device(), opened.memory().composition
    for options in ({}, {"min_bytes": MIB}):
        found = opened.memory(**options).composition
        assert sum(row.bytes for row in found.by_module if len(row.path) == 1) == found.allocated_bytes
        assert sum(row.own_bytes for row in found.by_module) == found.allocated_bytes
        assert sum(row.bytes for row in found.by_phase) == found.allocated_bytes
    by_phase: Counter[str] = Counter()
    for row in range(len(memory.history.replay)):
        birth, freed = int(memory.history.replay.birth[row]), int(memory.history.replay.freed[row])
        if birth < at.moment <= freed:
            time = memory.timeline.times_us[birth]
            phases = [one.name for one in memory.timeline.phases if one.start_us <= time <= one.end_us]
            before = [one.name for one in memory.timeline.phases if one.end_us < time][-1:]
            after = [one.name for one in memory.timeline.phases if one.start_us > time][:1]
            where = f"(between {before[0]} and {after[0]})" if before and after else "(after the last phase)"
            where = where if before else "(before the first phase)" if after else "(in no phase)"
            where = (phases or [where])[0] if birth >= 0 else "(before recording)"
            by_phase[where] += int(memory.history.replay.size_bytes[row])
    assert {row.name: row.bytes for row in at.by_phase} == by_phase


@pytest.mark.parametrize("by", ["module", "category", "stack", "phase"])
def test_by_shows_one_table_and_csv_holds_it_exactly(tmp_path: Path, by: str) -> None:
    run = Layers().write_run(tmp_path)
    data = json.loads(run_command("memory", run, "--by", by, "--format", "json").stdout)
    table = run_command("memory", run, "--by", by).stdout
    assert "--by module shows" not in table
    assert sum(f"  {other}" in table or table.count(f"\n{other}  ") for other in ("module", "category")) <= 1
    rows = list(csv.DictReader(io.StringIO(run_command("memory", run, "--by", by, "--format", "csv").stdout)))
    assert len(rows) == len(data["peak"][f"by_{by}"])
    top = [row for row in rows if by != "module" or "/" not in row["module"]]
    assert sum(int(row["bytes"]) for row in top) == data["allocated"]["peak_bytes"]
    if by in ("module", "phase"):
        kinds = [key for key in rows[0] if key not in ("module", "phase", "bytes", "own_bytes", "share", "count")]
        assert all(sum(int(row[kind]) for kind in kinds) == int(row["bytes"]) for row in rows)


def test_json_has_the_tree_of_modules_and_a_line_says_how_to_see_it(tmp_path: Path) -> None:
    run = Layers().write_run(tmp_path)
    data = json.loads(run_command("memory", run, "--format", "json").stdout)
    row = next(row for row in data["peak"]["by_module"] if row["path"] == ["model", "h", "0", "attn"])
    assert row["module"] == "h.0.attn"
    assert set(row) == {"module", "path", "bytes", "share", "count", "own_bytes", "categories", "evidence"}
    assert sum(row["categories"].values()) == sum(row["evidence"].values()) == row["bytes"]
    assert set(data["peak"]["by_phase"][0]) == {"phase", "bytes", "share", "count", "categories"}
    assert "--by module shows what each module held" in run_command("memory", run).stdout
    assert "--by module" not in run_command("memory", capture("small.pickle")).stdout
