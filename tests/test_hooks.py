"""Hooks, at work and at rest: they change nothing in the workload; what they record nests, closes and is whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit.run.directory import Run
from profkit.run.light_columns import read_light
from tests.forked_scripts import Forks

pytest.importorskip("torch")

from profkit.run.owners import read_owners
from tests.hooked_workloads import CHECKPOINTS, WORKLOADS

SCRIPT = Path(__file__).parent / "hooked_workloads.py"


RunScript = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(forks: Forks) -> RunScript:
    """Return a function that runs a script of the tests, and returns the JSON that it prints."""
    return lambda *arguments, script=SCRIPT, warnings="error": forks.printed_json(script, *arguments, warnings=warnings)


@pytest.fixture(scope="module")
def plain(run: RunScript) -> dict[str, Any]:
    return run()


@pytest.fixture(scope="module")
def hooked(run: RunScript) -> dict[str, Any]:
    """With ranges, and the work of each third step counted; without counting the hooks are in `remembered`."""
    return run("hooked", "counted")


@pytest.fixture(scope="module")
def logged(run: RunScript) -> dict[str, Any]:
    return run("logged")


@pytest.fixture(scope="module")
def remembered(run: RunScript, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("remembered"))
    return {**run("remembered", folder, warnings="default"), "folder": folder}


def _trees(events: list[list[Any]]) -> dict[str, int]:
    """Return how often each path of nested ranges was opened; fail if any range closes out of turn."""
    stacks: dict[int, list[str]] = {}
    paths: dict[str, int] = {}
    for kind, name, thread in events:
        stack = stacks.setdefault(thread, [])
        if kind == "open":
            stack.append(name)
            path = "/".join(part for part in stack if not part.startswith("step "))
            paths[path] = paths.get(path, 0) + 1
        elif stack:  # the step that the workload before began in
            assert stack.pop() == name
    assert all(all(name.startswith("step ") for name in stack) for stack in stacks.values()), stacks
    return paths


@pytest.mark.parametrize("how", WORKLOADS)
def test_the_log_holds_the_ranges_that_a_profiler_is_shown(
    how: str, hooked: dict[str, Any], logged: dict[str, Any]
) -> None:
    shown, noted = (
        {path: count for path, count in _trees(run[how]["events"]).items() if "marked" not in path}
        for run in (hooked, logged)
    )
    assert noted == shown
    assert len(noted) >= 9


@pytest.mark.parametrize("how", WORKLOADS)
def test_losses_are_the_same_to_the_bit_and_no_tensor_lives_longer(
    how: str, plain: dict[str, Any], hooked: dict[str, Any], remembered: dict[str, Any]
) -> None:
    assert len(plain[how]["losses"]) >= 4
    for found in (hooked, remembered):
        assert found[how]["losses"] == plain[how]["losses"]
        assert found[how]["graph_breaks"] == plain[how]["graph_breaks"]
    assert hooked[how]["alive"] == plain[how]["alive"]
    assert all(kept <= before for kept, before in zip(remembered[how]["alive"], plain[how]["alive"], strict=True))
    (work,) = hooked[how]["work"]
    # Dynamo leaves the module of a workload that it has compiled to torch's libraries.
    assert work["missing"] == (["compiled code"] if how == "compiled" else [])
    assert work["model_flops"] > 0
    before, after = plain["plain"]["alive"][:2]
    assert before > after == 0, "activations are seen to live and die"


@pytest.mark.parametrize("how", ["plain", "autocast", "evaluation", "exception"])
def test_modules_have_their_ranges_forward_and_backward(how: str, hooked: dict[str, Any]) -> None:
    paths = _trees(hooked[how]["events"])
    failed = 4 if how == "exception" else 0
    for number in range(3):
        for part in ("linear", "relu"):
            name = f"model/blocks.{number}/blocks.{number}.{part}"
            assert paths[f"forward/{name}"] == 4 + failed
            assert paths[f"backward/{name}"] == 4
    assert paths["forward/model/head"] == paths["backward/model/head"] == 4
    assert paths["loss"] == paths["loss/MSELoss"] == paths["backward/MSELoss"] == paths["optimizer"] == 4
    assert paths["forward"] == 4 + 2 * failed
    assert paths["backward"] == 4 + failed


def test_a_modules_last_node_runs_in_its_own_range(hooked: dict[str, Any]) -> None:
    paths = _trees(hooked["plain"]["events"])
    for number in range(3):
        assert paths[f"backward/model/blocks.{number}/blocks.{number}.mark/marked"] == 4


def test_modules_that_take_keywords_and_give_dicts_have_their_backward_and_work_between_them_is_the_models(
    hooked: dict[str, Any],
) -> None:
    paths = _trees(hooked["dict"]["events"])
    assert [paths[f"backward/model/blocks.{at}/blocks.{at}.block"] for at in range(3)] == [4] * 3
    assert paths["backward/model/marked"] == 12
    assert sum(count for path, count in paths.items() if path.endswith("/marked")) == 12


@pytest.mark.parametrize("how", ["grad", "function"])
def test_gradients_that_a_function_returns_are_a_backward_too(how: str, hooked: dict[str, Any]) -> None:
    paths, plain = (_trees(hooked[one]["events"]) for one in (how, "plain"))
    backward = [path for path in plain if path.startswith("backward") and "mark" not in path]
    assert {path: paths.get(path) for path in backward} == dict.fromkeys(backward, 4)


def test_a_gradient_penalty_in_a_forward_pass_has_its_backward_there(hooked: dict[str, Any]) -> None:
    paths = _trees(hooked["penalty"]["events"])
    block = "model/critic/critic.blocks.1"
    assert {path: count for path, count in paths.items() if path.endswith(block)} == {
        f"forward/{block}": 12,
        f"forward/model/backward/{block}": 12,
        f"backward/{block}": 12,
    }
    assert paths["forward"] == paths["forward/model/backward"] == 12
    assert paths["backward"] == 4


def test_replicas_work_within_the_call_of_the_model(hooked: dict[str, Any]) -> None:
    paths = _trees(hooked["replicas"]["events"])
    assert paths["forward"] == paths["forward/model"] == paths["backward/model"] == 4
    assert paths["replica"] == paths["replica/blocks.1/blocks.1.linear"] == 8
    assert paths["backward/model/replica/blocks.1/blocks.1.linear"] == 8


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_what_a_checkpoint_computes_again_lies_in_a_range_under_backward(how: str, hooked: dict[str, Any]) -> None:
    paths = _trees(hooked[how]["events"])
    assert paths["forward"] == paths["backward"] == 4
    times = 8 if how.startswith("nested") else 4  # both checkpoints around the block run it again
    for block in range(2):
        linear = f"blocks.{block}/blocks.{block}.linear"
        assert {path: count for path, count in paths.items() if path.endswith(linear)} == {
            f"forward/model/{linear}": 4,
            f"backward/recompute/{linear}": times,
            f"backward/model/{linear}": 4,
        }
    assert all(path.startswith("backward/recompute") for path in paths if "recompute" in path)
    assert paths["backward/recompute"] == (16 if how.startswith("nested") else 12)


def test_compiled_code_stays_whole_and_is_annotated_as_one(plain: dict[str, Any], hooked: dict[str, Any]) -> None:
    assert hooked["compiled"]["graph_breaks"] == plain["compiled"]["graph_breaks"] == 0
    paths = _trees(hooked["compiled"]["events"])
    assert paths["forward/model"] == paths["backward/model"] == 4
    assert not any("blocks" in path for path in paths)


def test_dynamo_makes_the_same_graphs_whether_the_hooks_are_there_or_not(run: RunScript) -> None:
    script = SCRIPT.with_name("compiled_workloads.py")
    # Where a graph is broken torch itself warns.
    plain, hooked = (run(*how, script=script, warnings="ignore") for how in ((), ("hooked",)))
    assert hooked == plain
    assert plain["first again"][1] == [], "what was compiled before is not compiled again"


def test_nothing_is_left_open(hooked: dict[str, Any]) -> None:
    assert [name for _, name, _ in hooked["end"]["events"]] == ["step 76"]


@pytest.mark.parametrize("how", ["branches", "penalty"])
def test_what_the_script_does_with_an_output_lies_outside_the_modules(how: str, hooked: dict[str, Any]) -> None:
    """The branch that was made last goes back first, and leaves its first module's range open."""
    paths = _trees(hooked[how]["events"])
    assert {path: count for path, count in paths.items() if path.endswith("/marked")} == {"backward/marked": 2 * 4}


def test_every_workload_is_recorded_to_its_end(remembered: dict[str, Any]) -> None:
    memory = remembered["memory"]
    assert memory["failure"] is None
    assert memory["snapshot"] == "snapshot.pickle"
    ledger = read_owners(Path(remembered["folder"]) / "ledger.jsonl")
    assert len(ledger.steps) == 4 * len(WORKLOADS)
    assert {one.role for one in ledger.owned} >= {"parameter", "gradient", "optimizer_state", "input", "saved"}
    assert "blocks.1.linear.weight" in {one.name for one in ledger.owned}


def test_allocations_carry_the_phase_and_the_modules_name(remembered: dict[str, Any]) -> None:
    calls = remembered["memory"]["calls"]
    texts = [call.removeprefix("metadata ") for call in calls if call.startswith("metadata")]
    phases: list[list[str]] = [[]]
    for text in texts:
        if text:
            phases[-1].append(text)
        else:
            phases.append([])
    assert not phases.pop(), "nothing is left behind"
    assert [{text.split(":")[1] for text in phase} for phase in phases[:5]] == [
        {"forward"},
        {"loss"},
        {"backward"},
        {"optimizer"},
        {"forward"},
    ]
    forward, loss, backward = ([text.split(":")[2] for text in phase] for phase in phases[:3])
    assert forward[1:6] == ["model", "first", "model", "blocks.0", "blocks.0.linear"], "and back where a module ends"
    assert loss == ["", "MSELoss", ""]
    assert backward[:2] == ["", "MSELoss"], "until a module's backward begins it is the loss's own"
    order = list(dict.fromkeys(backward))
    for number in (2, 1):
        assert order.index(f"blocks.{number}.relu") < order.index(f"blocks.{number}.linear"), "in reverse"
        assert order.index(f"blocks.{number}.linear") < order.index(f"blocks.{number - 1}.relu")
    assert len(phases) >= 4 * len(WORKLOADS)
    assert {"profkit:recompute:blocks.2.linear", "profkit:inference:blocks.2.linear"} <= set(texts)


PROGRAM = """
import torch
from torch import distributed, nn
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.ones(548, 4), batch_size=1):
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
del model  # or torch may wait, with the GIL, for gloo's thread, which waits for the GIL
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_has_the_phases_of_each_row_of_its_light_record(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("--kineto", "--ranks", "7", "--steps", "2", "--nproc-per-node", "2")
    forks.check_profkit("run", "-o", "run", *options, "--", sys.executable, "train.py", cwd=tmp_path)
    records = [read_light(path) for path in Run(tmp_path / "run").light_records.values()]
    assert len(records) == 2
    for record in records:
        assert [step.name for step in record.steps] == [f"step {at}" for at in (*range(128), *range(512, 544))]
        for step in record.steps[1:]:
            assert [phase for phase, _, _ in step.phases] == ["data", "forward", "loss", "backward", "optimizer"]
            assert step.collectives.kind[-1:] == ["all_reduce"]
