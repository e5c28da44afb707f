"""What a job of several machines tells each process of it, and how its machines find one run's directory.

torchrun, Slurm and the MPIs each have names of their own for a process's rank and for the number of its machine.
"""

from __future__ import annotations

from collections.abc import Mapping

_NODE = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
"""Where the number of this machine in the job stands; torchrun calls it GROUP_RANK in its workers."""


def number_in(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the whole number that the first of these variables holds; None if none is set to one."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)


def node_number(environment: Mapping[str, str]) -> int | None:
    """Return the number of this machine in its job, None if nobody says it."""
    return number_in(environment, *_NODE)
