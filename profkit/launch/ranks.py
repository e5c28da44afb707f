"""Several processes of one target: how they are started, and what is left of those that failed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profkit.errors import UsageError
from profkit.models.attachment import FAILURE_GLOB, MEETING_GLOB

_OWN_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_WITH_VALUE = ("-X", "-W")

_HOW = "give it to {0} itself: profkit run -- {0} … , and leave --nproc-per-node out"


def build_rank_argv(words: Sequence[str], count: int) -> list[str]:
    """Return the command that starts ``python train.py …`` or ``python -m pkg …`` as so many ranks of one machine.

    torch's own launcher does it, in the Python that the command names.

    Raises:
        UsageError: the command starts its ranks itself, or is none that starts a Python script or module.
    """
    program, *rest = words
    name = Path(program).name
    if name in _OWN_LAUNCHERS:
        raise UsageError(f"--nproc-per-node {count}: {name} starts its processes itself; {_HOW.format(name)}")
    at = 0
    while at < len(rest) and rest[at].startswith("-") and rest[at] not in ("-m", "-c", "-"):
        at += 2 if rest[at] in _WITH_VALUE else 1
    flags, target = rest[:at], rest[at:]
    if not name.startswith("python") or not target or target[0] in ("-c", "-"):
        raise UsageError(
            f"--nproc-per-node {count}: starts Python scripts and modules: profkit run --nproc-per-node {count} -- "
            "python train.py, or -- python -m package.module"
        )
    if target[0] == "-m" and target[1:2] and target[1] in _LAUNCHER_MODULES:
        raise UsageError(f"--nproc-per-node {count}: {target[1]} starts its processes itself; {_HOW.format(target[1])}")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [program, *flags, *launcher, *target]


def node_suffix(environment: Mapping[str, str]) -> str:
    """Return what tells this machine's run from those of the others in a job: ``-node1``; "" in a job of one.

    Whoever starts the machines says which this is: ``NODE_RANK`` (or ``GROUP_RANK``, as torchrun names it) and, if it
    likes, ``NNODES``.
    """
    number = environment.get("NODE_RANK", environment.get("GROUP_RANK", ""))
    return f"-node{number}" if number.isdecimal() and environment.get("NNODES", "2") != "1" else ""


def take_results(path: Path) -> list[dict[str, Any]]:
    """Return what a worker left at ``path``, or each of its ranks beside it, in their order; the files are removed."""
    stem, _, suffix = path.name.partition(".")
    found = {0: path} if path.exists() else {}
    for other in path.parent.glob(f"{stem}.rank*.{suffix}"):
        found[int(other.name.removeprefix(f"{stem}.rank").removesuffix(f".{suffix}"))] = other
    results = []
    for rank in sorted(found):
        results.append({"rank": rank, **json.loads(found[rank].read_text(encoding="utf-8"))})
        found[rank].unlink()
    for meeting in path.parent.glob(MEETING_GLOB):
        meeting.unlink()
    return results


def join_results(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first rank's result, with every rank's own under ``processes`` where there are several."""
    if len(results) == 1:
        return results[0]
    kept = ("rank", "local_rank", "pid", "device", "gpu", "losses", "steps")
    each = [{"process": f"rank{one['rank']}", **{key: one[key] for key in kept}} for one in results]
    return {**results[0], "processes": each}


def explain_failure(results: list[dict[str, Any]]) -> str | None:
    """Return why a worker failed, in its own words, and of several ranks which; None if none left a word."""
    said = [(one["rank"], str(one["error"])) for one in results if one.get("error") is not None]
    if len(results) == 1 and said and said[0][0] == 0:
        return said[0][1]
    return "; ".join(f"rank {rank}: {error}" for rank, error in said) or None


def take_failures(run: Path) -> list[str]:
    """Return which ranks an exception ended, each as a sentence; clears away what ranks left for each other."""
    found = []
    for path in run.glob(FAILURE_GLOB):
        failure = json.loads(path.read_text(encoding="utf-8"))
        found.append((int(failure["rank"]), str(failure["error"])))
        path.unlink()
    for path in run.glob(MEETING_GLOB):
        path.unlink()
    return [f"rank {rank} failed: {error}" for rank, error in sorted(found)]
