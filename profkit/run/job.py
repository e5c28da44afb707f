"""A job of several ranks: what its launcher says of them and their machines, where their runs lie, and which ranks
are recorded in full (``--ranks``).

Each machine runs ``profkit run`` by itself, and none waits for another. With one ``-o`` on a disk that all share each
makes a run of its own within it: ``node0``, ``node1``, …; or ``rank5``, where each rank has a ``profkit run`` of its
own (``srun profkit run … -- python train.py``). ``job.json`` next to them says whose they are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profkit.errors import RunError
from profkit.files import write_new_json
from profkit.run import read_record
from profkit.text_kinds import Message, Word

JOB = "job.json"

FIRST_OF_JOB = ("node0", "rank0")
"""The names of the first run of a job."""

_NODE = ("NODE_RANK", "GROUP_RANK")
"""Where the number of this machine in the job stands; torchrun calls it GROUP_RANK in its workers."""

_TASKS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
"""How many processes the MPIs and Slurm started, and which of them this is.

The MPIs first: within Slurm they have ``srun`` start one daemon a machine, and what Slurm says is of these.
"""

_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
)
"""The ranks of the job, this one, those of this machine, and this one among them, by Open MPI and by MPICH."""

_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_STARTERS = ("srun", "mpirun", "mpiexec", "orterun", "prterun", "aprun")
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

FIRST_PER_NODE = "first-per-node"

_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class Job:
    """The job that a run belongs to.

    ``id`` is the cluster's number for it, with the step that started its processes if one did, how often it was
    requeued and the rendezvous of its ranks; None if it has none of these. ``count`` is how many runs there are, None
    if that is not known; ``number`` is this one's, None if nobody says it. ``unit`` is what has a run of its own:
    ``node`` or ``rank``.
    """

    id: Message | None = None
    count: int | None = None
    number: int | None = None
    unit: Word = "node"


def number_in(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the whole number that the first of these variables holds; None if none is set to one."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)


def node_number(environment: Mapping[str, str]) -> int | None:
    """Return the number of this machine in its job, None if nobody says it.

    An MPI says how many ranks are on this machine: where all machines have as many, ranks were dealt to one machine
    after another, or to all in turns.
    """
    own, in_step = number_in(environment, *_NODE), number_in(environment, "SLURM_NODEID")
    count, rank, here, place = (number_in(environment, *names) for names in _MPI)
    if own is not None:
        return own
    if count is None or rank is None or here is None or place is None or not here or count % here:
        return in_step
    machines = count // here
    if place == rank % here:
        return rank // here
    return rank % machines if place == rank // machines else None


def rank_number(environment: Mapping[str, str]) -> int | None:
    """Return the rank of this process in its job, None if it is no rank, or nobody says which."""
    if "RANK" in environment:
        return number_in(environment, "RANK")
    count, number = _task(environment)
    return number if count > 1 else None


def rank_of_command(environment: Mapping[str, str], words: Sequence[str]) -> int | None:
    """Return the rank of the process that runs ``words``; None also of a launcher of torch's that Slurm started."""
    return None if _names_torch_launcher(words) else rank_number(environment)


def _task(environment: Mapping[str, str]) -> tuple[int, int | None]:
    for count, number in _TASKS:
        started = number_in(environment, count)
        if started is not None:
            return started, number_in(environment, number)
    return 1, None


def local_rank_number(environment: Mapping[str, str]) -> int | None:
    """Return the number of this process among those of its machine, None if nobody says it."""
    return number_in(environment, "LOCAL_RANK", *_MPI[3], "SLURM_LOCALID")


def _names_torch_launcher(words: Sequence[str]) -> bool:
    before_script = itertools.takewhile(lambda word: not word.endswith(".py"), words[:6])
    return any(Path(word).name in _TORCH for word in before_script)


def starts_on_all_machines(words: Sequence[str]) -> bool:
    """Return whether a command is srun or mpirun, of which one may start the processes of several machines."""
    return bool(words) and Path(words[0]).name.partition(".")[0] in _STARTERS  # Debian has mpirun.openmpi


def find_job(environment: Mapping[str, str], words: Sequence[str]) -> Job | None:
    """Return the job that a ``profkit run`` of the command ``words`` is a part of; None if it is alone in it."""
    if starts_on_all_machines(words):
        return None
    said = _options(words)
    nodes = said.get("nodes", environment.get("NNODES", "")).rpartition(":")[2]
    count = int(nodes) if nodes.isdecimal() else None
    started, number = _task(environment)
    parts = [
        _cluster_job(environment, with_step=started > 1),
        said.get("id", "") if said.get("id") != "none" else "",
        said.get("endpoint", environment.get("MASTER_ADDR", "")),
    ]
    job = Job("/".join(filter(None, parts)) or None, count)
    if count == 1 and started < 2:
        return None
    if said.get("node", "").isdecimal():
        return replace(job, number=int(said["node"]))
    if started > 1:
        is_alone = number_in(environment, *_MPI[2]) == 1 or started == number_in(environment, "SLURM_STEP_NUM_NODES")
        return replace(job, count=started, number=number, unit="node" if (count or 1) > 1 or is_alone else "rank")
    # SLURM_NODEID says nothing here: a whole allocation has it, also for a command that runs on one machine.
    number = number_in(environment, *_NODE)
    return replace(job, number=number) if number is not None or (count or 1) > 1 else None


def _cluster_job(environment: Mapping[str, str], *, with_step: bool) -> str:
    """One job may start several such trainings, one after another or at once: ``with_step``, where all processes were
    started together, that says which. A job that Slurm requeues keeps its number.
    """
    number = next((environment[name] for name in _JOB if environment.get(name)), "")
    mpi, step = environment.get("PMIX_NAMESPACE"), environment.get("SLURM_STEP_ID")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if with_step and "OMPI_COMM_WORLD_SIZE" in environment:
        number = ".".join(filter(None, [number, mpi]))
    elif with_step and number and step:
        number = f"{number}.{step}"
    return number if restarts in ("", "0") else f"{number} restart {restarts}"


def claim(shared: Path, job: Job) -> Path:
    """Make the directory of one of the job's runs within ``shared``, and return it.

    Raises:
        RunError: ``shared`` holds something else, another job, or this run already.
        OSError: it cannot be made.
    """
    shared.mkdir(parents=True, exist_ok=True)
    foreign = [
        path.name for path in shared.iterdir() if path.name != JOB and not is_of_job(path) and path.name[0] != "."
    ]
    if foreign:
        raise RunError(f"{shared}: exists and is not empty; name a new directory with -o, or remove this one")
    held = _share(shared, job)
    if held != job.id:
        raise RunError(f"{shared}: holds the job {held}, and this is {job.id}; name a new directory with -o")
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
    return re.fullmatch(r"(node|rank)\d+", path.name) is not None


def _share(shared: Path, job: Job) -> str | None:
    """Return the job that ``job.json`` names; whoever comes first writes it, whole."""
    path = shared / JOB
    try:
        write_new_json(path, {"version": 1, "id": job.id, "count": job.count})
    except FileExistsError:
        return read_record(Job, path).id
    return job.id


def _options(words: Sequence[str]) -> dict[str, str]:
    if not _names_torch_launcher(words):
        return {}
    said: dict[str, str] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        known = _OPTIONS.get(name.lstrip("-").replace("-", "_")) if name.startswith("--") else None
        if known is not None:
            value = value if equals else next(iter(words[at + 1 : at + 2]), "")
            said.setdefault(known, value)
    return said


@dataclass(frozen=True)
class RankChoice:
    """The ranks to record in full: those in some spans, both ends included; without spans the first of each machine."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> RankChoice:
        """Return the choice that a text makes; ValueError if it makes none."""
        if text == FIRST_PER_NODE:
            return cls()
        parts = [_SPAN.fullmatch(part.strip()) for part in text.split(",")]
        spans = tuple((int(part[1]), int(part[2] or part[1])) for part in parts if part is not None)
        if len(spans) < len(parts) or any(first > last for first, last in spans):
            raise ValueError(f"{text}: name ranks (0,7,8-15), or {FIRST_PER_NODE}")
        return cls(spans)

    def includes(self, rank: int | None, local_rank: int | None) -> bool:
        if rank is None:
            return True
        return any(first <= rank <= last for first, last in self.spans) if self.spans else not local_rank
