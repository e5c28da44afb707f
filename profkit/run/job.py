"""A job of several machines: what its launcher says of them, and how their runs come to lie in one directory.

Each machine runs ``profkit run`` by itself, and none waits for another. With one ``-o`` on a disk that all share each
makes a run of its own within it: ``node0``, ``node1``, …; or ``rank5``, where each rank has a ``profkit run`` of its
own (``srun profkit run … -- python train.py``). ``job.json`` next to them says whose they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from profkit.errors import RunError
from profkit.files import write_json
from profkit.run.records import read_record

JOB = "job.json"

_NODE = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
"""Where the number of this machine in the job stands; torchrun calls it GROUP_RANK in its workers."""

_TASKS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_NODES"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ""),
    ("PMI_SIZE", "PMI_RANK", ""),
)
"""How many processes Slurm and the MPIs started, which of them this is, and on how many machines."""

_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_STARTERS = ("srun", "mpirun", "mpiexec", "aprun")
"""Programs that start the processes of all machines: there is one ``profkit run`` around them."""

_OPTIONS = {
    "nnodes": "nodes",
    "num_machines": "nodes",
    "node_rank": "node",
    "machine_rank": "node",
    "rdzv_id": "id",
    "rdzv_endpoint": "endpoint",
    "master_addr": "endpoint",
    "main_process_ip": "endpoint",
}
"""The options of torch's and accelerate's launchers that say something of machines."""

_TORCH = ("torchrun", "accelerate", "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


@dataclass(frozen=True)
class Job:
    """The job that a run belongs to.

    ``id`` is the cluster's number for it and the rendezvous of its ranks, None if it has neither; ``count`` how many
    runs there are, None if that is not known; ``number`` is this one's, None if nobody says it. ``unit`` is what has a
    run of its own: ``node`` or ``rank``.
    """

    id: str | None = None
    count: int | None = None
    number: int | None = None
    unit: str = "node"


@dataclass(frozen=True)
class _SharedJob:
    """What ``job.json`` holds."""

    version: int = 1
    id: str | None = None
    count: int | None = None


def number_in(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the whole number that the first of these variables holds; None if none is set to one."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)


def node_number(environment: Mapping[str, str]) -> int | None:
    """Return the number of this machine in its job, None if nobody says it."""
    return number_in(environment, *_NODE)


def rank_number(environment: Mapping[str, str]) -> int | None:
    """Return the rank of this process in its job, None if it is no rank, or nobody says which."""
    if "RANK" in environment:
        return number_in(environment, "RANK")
    for count, number, _ in _TASKS:
        if (number_in(environment, count) or 1) > 1:
            return number_in(environment, number)
    return None


def local_rank_number(environment: Mapping[str, str]) -> int | None:
    """Return the number of this process among those of its machine, None if nobody says it."""
    return number_in(environment, "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def find_job(environment: Mapping[str, str], words: Sequence[str]) -> Job | None:
    """Return the job that a ``profkit run`` of the command ``words`` is a part of; None if it is alone in it."""
    if words and Path(words[0]).name in _STARTERS:
        return None
    said = _options(words)
    nodes = said.get("nodes", environment.get("NNODES", "")).rpartition(":")[2]
    count = int(nodes) if nodes.isdecimal() else None
    parts = [
        next((environment[name] for name in _JOB if environment.get(name)), ""),
        said.get("id", "") if said.get("id") != "none" else "",
        said.get("endpoint", environment.get("MASTER_ADDR", "")),
    ]
    job = Job("/".join(filter(None, parts)) or None, count)
    if count == 1:
        return None
    if said.get("node", "").isdecimal():
        return replace(job, number=int(said["node"]))
    for tasks, task, machines in _TASKS:
        started = number_in(environment, tasks) or 1
        if started > 1:
            is_node = count is not None or started == number_in(environment, machines)
            unit = "node" if is_node else "rank"
            return replace(job, count=started, number=number_in(environment, task), unit=unit)
    # SLURM_NODEID says nothing here: a whole allocation has it, also for a command that runs on one machine.
    number = number_in(environment, "NODE_RANK", "GROUP_RANK")
    return replace(job, number=number) if number is not None or (count or 1) > 1 else None


def claim(shared: Path, job: Job) -> Path:
    """Make the directory of one of the job's runs within ``shared``, and return it.

    Raises:
        RunError: ``shared`` holds something else, another job, or this run already.
        OSError: it cannot be made.
    """
    shared.mkdir(parents=True, exist_ok=True)
    foreign = [one.name for one in shared.iterdir() if one.name != JOB and not is_of_job(one) and one.name[0] != "."]
    if foreign:
        raise RunError(f"{shared}: exists and is not empty; name a new directory with -o, or remove this one")
    found = _share(shared, job)
    if found.id != job.id:
        raise RunError(f"{shared}: holds the job {found.id}, and this is {job.id}; name a new directory with -o")
    numbers: Iterable[int] = range(job.count or 2**16) if job.number is None else [job.number]
    for number in numbers:
        path = shared / f"{job.unit}{number}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    what = f"{job.unit} {job.number}" if job.number is not None else f"all {job.count} machines of a job"
    raise RunError(f"{shared}: holds the run of {what} already; name a new directory with -o, or remove this one")


def is_of_job(path: Path) -> bool:
    """Return whether a path is named as one of the runs of a job."""
    return re.fullmatch(r"(node|rank)\d+", path.name) is not None


def _share(shared: Path, job: Job) -> _SharedJob:
    """Return what ``job.json`` holds; whoever comes first writes it, whole."""
    path = shared / JOB
    mine = _SharedJob(id=job.id, count=job.count)
    draft = shared / f".{JOB}-{os.getpid()}-{os.urandom(4).hex()}"
    write_json(draft, asdict(mine))
    try:
        os.link(draft, path)
    except FileExistsError:
        return read_record(_SharedJob, path)
    except OSError:  # a disk without links
        write_json(path, asdict(mine))
    finally:
        draft.unlink()
    return mine


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return what the options of a launcher of torch's say; none for another program."""
    if not any(Path(word).name in _TORCH for word in words[:6]):
        return {}
    said: dict[str, str] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        known = _OPTIONS.get(name.lstrip("-").replace("-", "_")) if name.startswith("--") else None
        if known is not None:
            value = value if equals else next(iter(words[at + 1 : at + 2]), "")
            said.setdefault(known, value)
    return said
