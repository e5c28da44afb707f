"""What each module held, and each phase: ``profkit memory --by module`` and ``--by phase``."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from profkit import read_snapshot
from profkit.analysis.memory.places import fold
from profkit.run.directory import SNAPSHOT
from tests.allocator_reference import MIB, Block
from tests.captures import capture
from tests.memory_captures import Training, on_two_devices

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

    def put_with(self, text: str, size: int) -> Block:
        block = self.put(size)
        self.allocator.events[-1]["user_metadata"] = text
        return block

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
        with self.within(name):
            yield
        self.phase, self.module = before

    def own_bytes(self) -> dict[str, int]:
        """Return what each module has at the peak, without the modules in it."""
        return {row.name: row.own_bytes for row in self.at_peak().by_module}

    def uses(self) -> dict[str, dict[str, int]]:
        """Return the categories of what each module has at the peak."""
        return {row.name: row.categories for row in self.at_peak().by_module}

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


@pytest.mark.parametrize("texts", [True, False])
def test_each_module_holds_what_was_counted_by_hand(texts: bool) -> None:
    training = Layers(texts=texts)
    at = training.at_peak()
    assert {row.name: row.bytes for row in at.by_module} == training.held
    kinds = Counter[str]()
    for row in at.by_module:
        if len(row.path) == 1:
            kinds.update(row.evidence)
    assert set(kinds) == ({"identity", "metadata"} if texts else {"identity", "range"})


def test_siblings_that_differ_only_in_a_number_share_a_row() -> None:
    result = Layers().opened_run().memory()
    rows = {row.name: row for row in result.composition.by_module}
    folded = {row.name: row for row in fold(result.composition.by_module)}
    assert list(folded)[:6] == ["model", "h.*", "h.*.attn", "h.*.mlp", "h.*.mlp.up", "h.*.mlp.down"]
    for part in ("", ".attn", ".mlp", ".mlp.up"):
        assert folded[f"h.*{part}"].bytes == sum(rows[f"{layer}{part}"].bytes for layer in LAYERS)
        assert folded[f"h.*{part}"].number == 3
    for count, name in ((2, "h.*"), (1, "h.0")):
        some = [row for row in result.composition.by_module if not row.name.startswith(LAYERS[count:])]
        assert name in {row.name for row in fold(some)}


def test_equal_allocations_of_like_modules_share_a_line() -> None:
    at = Layers().at_peak()
    assert {("h.*.mlp", 3), ("h.*.attn.weight", 3)} <= {(row.owner, row.count) for row in at.largest_groups}
    assert "wte.weight, head.weight (tied)" in {row.owner for row in at.largest}
    one = {row.owner for row in Layers().at_peak(stack="h.1.attn.weight").largest_groups}
    assert one == {"h.1.attn.weight"}


def test_a_storage_stands_where_its_tensors_meet_if_their_bytes_are_not_known_or_overlap() -> None:
    at = Layers(extents=False).at_peak()
    own = {row.name: row.own_bytes for row in at.by_module}
    assert own["h.0.mlp"] >= 4 * MIB
    assert "h.0.mlp.down" not in own
    assert own["model"] >= 5 * MIB, "the embedding, which is tied to the head"
    (tied,) = {row.owner for row in at.largest if row.owner and "wte" in row.owner}
    assert tied == "shared storage: wte.weight, head.weight (2 parameters)"


def test_a_saved_tensor_without_a_name_bears_the_module_that_made_it() -> None:
    training = Layers(steps=0)
    training.phase = "forward"
    for layer in LAYERS:
        training.module = f"{layer}.attn"
        training.own(training.put(90 * MIB), "saved", "")
    at = training.at_peak()
    assert ("activations", "h.*.attn", 3) in {(row.category, row.owner, row.count) for row in at.largest_groups}
    (row,) = [row for row in at.by_module if row.name == "h.1.attn"]
    assert row.categories["activations"] == 90 * MIB


def test_a_bucket_of_gradients_is_split_among_its_modules() -> None:
    training = Layers(steps=0)
    bucket = training.put(9 * MIB, stack="backward")
    for number, layer in enumerate(LAYERS):
        training.own(bucket, "gradient", f"{layer}.attn.weight", number * 3 * MIB, 3 * MIB)
    rows = training.uses()
    assert [rows[f"{layer}.attn"]["gradients"] for layer in LAYERS] == [3 * MIB] * 3


@pytest.mark.parametrize("texts", [True, False])
def test_what_a_checkpoint_computes_again_is_a_phase_and_outlives_it_as_activations(texts: bool) -> None:
    at = Layers(texts=texts).at_peak()
    assert [row.categories for row in at.by_phase if row.name == "recompute"] == [{"activations": 9 * MIB}]
    assert {row.phase for row in at.largest if row.bytes == 9 * MIB} == {"recompute"}
    training = Layers(texts=texts, steps=1)
    with training.inside("backward", "backward"), training.inside("recompute", "recompute"):
        training.drop(training.put(300 * MIB, stack="backward"))
    rows = {row.name: row.categories for row in training.at_peak().by_phase}
    assert rows["recompute"] == {"temporaries": 300 * MIB}


def test_a_range_that_ends_when_it_begins_holds_nothing() -> None:
    training = Layers(texts=False, steps=1)
    with training.inside("forward", "forward"), training.inside("model"):
        training.annotations += [{**training.annotations[-1], "name": "h.1"} for _ in range(2)]
        training.annotations[-1]["stage"] = "END"
        training.drop(training.put(300 * MIB))
    assert training.own_bytes()["model"] >= 300 * MIB


def test_memory_of_a_loss_that_is_a_plain_function_is_between_two_phases() -> None:
    training = Layers(texts=False, steps=1)
    with training.inside("forward", "forward"), training.inside("model"):
        training.drop(training.put(MIB))
    training.phase = training.module = ""
    loss = training.put(300 * MIB)
    with training.inside("backward", "backward"), training.inside("model"):
        training.drop(training.put(400 * MIB, stack="backward"), loss)
    rows = {"/".join(row.path): row.bytes for row in training.at_peak().by_module}
    assert rows["(outside modules)/(between forward and backward)"] == 300 * MIB


def test_a_model_that_only_answers_has_phases_too() -> None:
    training = Layers(texts=False, steps=0)
    for phase in ("prefill", "decode"):
        with training.inside(phase), training.inside("inference", "inference"):
            training.drop(training.put(300 * MIB))
    result = training.opened_run().memory()
    assert [phase.name for phase in result.phases] == ["prefill", "decode"]


Made = tuple[int, str | None, list[tuple[str, str]]]
"""An allocation: MiB, the text in its event, and roles and names of its tensors."""


@pytest.mark.parametrize(
    ("made", "held", "phase"),
    [
        ([(200, None, [("optimizer_state", "h.1.mlp.up.weight.exp_avg")])], {"model/h/1/mlp/up": 200}, None),
        (
            [(200, None, [("optimizer_state", "(a parameter outside the modules).exp_avg")])],
            {"(outside modules)/(in no phase)": 200},
            None,
        ),
        ([(200, None, [("parameter", "scale")])], {"model": 200}, None),
        ([(200, None, [("buffer", "h.0.mask")])], {"model/h/0": 200}, None),
        ([(200, None, [("input", "input")])], {"(outside modules)/(in no phase)": 200}, None),
        ([(200, None, [("saved", "h.1.attn")])], {"model/h/1/attn": 200}, None),
        (
            [(200, None, [("gradient", "h.1.attn.weight"), ("gradient", "h.1.mlp.up.weight")])],
            {"model/h/1": 200},
            None,
        ),
        ([(200, None, [])], {"(no module known)": 200}, "(in no phase)"),
        ([(200, "profkit:forward:h.1.attn", [])], {"model/h/1/attn": 200}, "forward"),
        ([(200, "profkit:recompute:h.1", [])], {"model/h/1": 200}, "recompute"),
        ([(200, "profkit:optimizer:", [])], {"(outside modules)/optimizer": 200}, "optimizer"),
        # What an earlier profkit wrote.
        ([(200, "profkit:backward:loss", [])], {"(outside modules)/backward": 200}, "backward"),
        ([(200, "the program's own", [])], {"(no module known)": 200}, "(in no phase)"),
        (  # a module that is called model is not the outermost one
            [
                (50, None, [("parameter", "model.layers.0.weight")]),
                *((60, f"profkit:forward:{name}", []) for name in ("model/model", "model/model.layers.0", "model/")),
            ],
            {"model/model": 60, "model/model/layers/0": 110, "model": 60},
            None,
        ),
        (  # two models have a tree each
            [
                *((50, None, [("parameter", name)]) for name in ("netG/main.0.weight", "netD/main.0.weight", "netD/x")),
                *((60, f"profkit:forward:netD/{name}", []) for name in ("main.1", "")),
            ],
            {"netG/main/0": 50, "netD": 110, "netD/main/0": 50, "netD/main/1": 60},
            None,
        ),
    ],
)
def test_the_text_in_an_event_and_the_names_of_tensors_say_the_module(
    made: list[Made], held: dict[str, int], phase: str | None
) -> None:
    training = Layers(steps=0)
    training.annotations.clear()
    for size, text, owners in made:
        block = training.put_with(text, size * MIB) if text else training.put(size * MIB)
        for role, name in owners:
            training.own(block, role, name)
    at = training.at_peak()
    # The parameters' own memory is less than 10 MiB.
    own = {"/".join(row.path): row.own_bytes // (10 * MIB) for row in at.by_module}
    assert {name: size for name, size in own.items() if size} == {name: size // 10 for name, size in held.items()}
    assert phase in (None, max(at.by_phase, key=lambda row: row.bytes).name)


def test_a_workspace_and_the_buckets_of_a_wrapper_are_no_modules() -> None:
    training = Layers(steps=1)
    training.put(150 * MIB, stack="bucket")
    with training.inside("forward", "forward"), training.inside("h.0.attn"):
        product = training.put(100 * MIB)
        training.put(32 * MIB)
        training.put(200 * MIB, stack="bucket")
    training.drop(product)
    rows = training.uses()
    assert rows["workspace"] == {"workspace": 32 * MIB}
    assert rows["communication"] == {"communication": 150 * MIB}
    assert "workspace" not in rows["h.0.attn"]
    assert rows["h.0.attn"]["communication"] == 200 * MIB


def test_a_name_of_a_million_parts_makes_no_million_rows() -> None:
    training = Layers(steps=0)
    training.put_with("profkit:forward:" + "a." * 1_000_000, 60 * MIB)
    assert len(training.at_peak().by_module) < 100


def test_ranges_of_two_devices_prove_no_module_of_the_backward_pass(tmp_path: Path) -> None:
    training = Layers(texts=False)
    run = training.write_run(tmp_path)
    data = pickle.loads((run / SNAPSHOT).read_bytes())
    (run / SNAPSHOT).write_bytes(pickle.dumps(on_two_devices(data, training.snapshot())))
    rows = {row.name: row for row in read_snapshot(run).memory(device=0).composition.by_module}
    assert rows["(no module known)"].bytes == 9 * MIB, "what was computed again"
    assert rows["h.0.attn"].categories["activations"] == training.held["h.0.attn"] - 3 * MIB


def test_ranges_of_one_thread_prove_no_module_of_the_backward_pass() -> None:
    """Older torch keeps the ranges of the thread that began the recording alone."""
    training = Layers(texts=False)
    is_backward, kept = False, []
    for mark in training.annotations:
        is_backward = mark["stage"] == "START" if mark["name"] == "backward" else is_backward
        kept += [mark] if not is_backward or mark["name"] == "backward" else []
    training.annotations = kept
    rows = {row.name: row for row in training.at_peak().by_module}
    assert rows["(no module known)"].categories["temporaries"] == 9 * MIB


@pytest.mark.parametrize("name", ["small.pickle", "expandable.pickle", "midrun.pickle", "oom.pickle"])
def test_phases_of_real_snapshots_hold_what_was_allocated_in_them(name: str) -> None:
    opened = read_snapshot(capture(name))
    memory, at = opened.device(), opened.memory().composition
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
