"""Several processes of one target: the command that starts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profkit.errors import UsageError

_OWN_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_WITH_VALUE = ("-X", "-W")

_HOW = "give it to {0} itself: profkit run -- {0} … , and leave --nproc-per-node out"


def build_rank_argv(words: Sequence[str], count: int) -> list[str]:
    """Return the command that starts ``python train.py …`` or ``python -m pkg …`` as ``count`` ranks of one machine.

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
