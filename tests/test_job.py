"""A job of several machines: how each finds the directory of one run, and what is read from it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from profkit.errors import RunError, UsageError
from profkit.joining import gather
from profkit.run.directory import choose_run, make_run_directory, runs_of_job
from profkit.run.job import Job, find_job, local_rank_number, node_number, rank_number, rank_of_command
from tests.in_process import check_command, manifest_of, run_command
from tests.launched import run_threads, started
from tests.run_builder import start_run
from tests.training_scripts import training_of_ranks

if TYPE_CHECKING:
    from tests.forked_scripts import Forks

TORCHRUN = ["torchrun", "--nnodes=2", "--rdzv-id", "j7", "--rdzv_endpoint=head:29500", "train.py"]
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
# Open MPI has srun start one daemon on each of two machines, and each daemon two ranks, as seen with 4.1.4.
MPI_IN_SLURM = {
    **MPI,
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "SLURM_JOB_ID": "88",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
SLURM = {"SLURM_JOB_ID": "88", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2"}
STEP = {**SLURM, "SLURM_STEP_ID": "3"}


@pytest.mark.parametrize(
    ("environment", "words", "job"),
    [
        ({}, ["python", "train.py"], None),
        ({}, TORCHRUN, Job("j7/head:29500", 2)),
        ({}, ["python", "-m", "torch.distributed.run", "--nnodes", "1:4", "a.py"], Job(None, 4)),
        ({}, ["torchrun", "--nnodes=1", "train.py"], None),
        ({}, ["torchrun", "--nnodes=2", "--node_rank", "1", "--master-addr=head", "a.py"], Job("head", 2, 1)),
        ({}, ["accelerate", "launch", "--num_machines=2", "--machine_rank=0", "a.py"], Job(None, 2, 0)),
        ({}, ["python", "train.py", "--nnodes=2"], None),
        ({"NODE_RANK": "1"}, ["python", "train.py"], Job(None, None, 1)),
        ({"GROUP_RANK": "0", "NNODES": "2"}, ["python", "train.py"], Job(None, 2, 0)),
        ({"NODE_RANK": "0", "NNODES": "1"}, ["python", "train.py"], None),
        ({"NODE_RANK": "head"}, ["python", "train.py"], None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2"}, TORCHRUN, Job("88/j7/head:29500", 2, 1)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, ["python", "a.py"], Job("88", 8, 1, "rank")),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, ["srun", "python", "a.py"], None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, ["python", "a.py"], Job(None, 4, 3, "rank")),
        ({**MPI, "PMIX_NAMESPACE": "13"}, ["python", "a.py"], Job("13", 4, 2, "rank")),
        ({**MPI_IN_SLURM, "PMIX_NAMESPACE": "13"}, ["python", "a.py"], Job("88.13", 4, 2, "rank")),
        ({**MPI_IN_SLURM, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, ["python", "a.py"], None),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}, ["accelerate", "launch", "a.py"], Job(None, 2, 1)),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ["accelerate", "launch", "a.py"], Job(None, 4, 2)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "8"}, ["python", "a.py"], Job("88.3", 8, 1, "rank")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, TORCHRUN, Job("88.3/j7/head:29500", 2, 1)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, TORCHRUN, Job("88/j7/head:29500", 2)),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_RESTART_COUNT": "2"},
            ["python", "a.py"],
            Job("88.3 restart 2", 8, 1, "rank"),
        ),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ["torchrun", "--nnodes=1", "a.py"], Job(None, 4, 2, "rank")),
        (MPI_IN_SLURM, ["mpirun.openmpi", "-n", "4", "python", "a.py"], None),
    ],
)
def test_the_launcher_or_the_cluster_says_which_machine_of_which_job_this_is(
    environment: dict[str, str], words: list[str], job: Job | None
) -> None:
    assert find_job(environment, words) == job


@pytest.mark.parametrize(
    ("environment", "rank", "node"),
    [
        ({"RANK": "5", "GROUP_RANK": "1"}, 5, 1),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2"}, 1, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 3, None),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 2, 1),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 2, 0),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2, 0),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, 3, 3),
        (MPI_IN_SLURM, 2, 1),
        # Where mpirun's own machine has no daemon, the step counts the other machines alone.
        ({**MPI_IN_SLURM, "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 2, 1),
        ({**MPI_IN_SLURM, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 2, 1),
        ({"SLURM_PROCID": "0"}, None, None),
        ({}, None, None),
    ],
)
def test_a_process_knows_its_rank_by_each_launcher(
    environment: dict[str, str], rank: int | None, node: int | None
) -> None:
    assert (rank_number(environment), node_number(environment)) == (rank, node)


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        (["torchrun", "--nnodes=2", "train.py"], None),
        (["python", "-m", "torch.distributed.run", "--nnodes", "2", "a.py"], None),
        (["python", "/usr/bin/accelerate", "launch", "a.py"], None),
        (["python", "-u", "a.py", "--launcher", "torchrun"], 1),
        (["python", "a.py"], 1),
    ],
)
def test_a_launcher_that_slurm_started_is_no_rank(words: list[str], rank: int | None) -> None:
    assert rank_of_command({**SLURM, "SLURM_STEP_NUM_TASKS": "2"}, words) == rank


def test_ranks_of_a_machine_are_numbered_by_their_own_mpi() -> None:
    assert local_rank_number({**MPI_IN_SLURM, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}) == 1
    assert local_rank_number({"SLURM_LOCALID": "3"}) == 3


def _make(shared: Path, job: Job) -> Path:
    return start_run(make_run_directory(shared, "train", job))


def test_machines_with_one_directory_get_one_each_within_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    assert _make(shared, Job("j7", 2, 1)) == shared / "node1"
    assert _make(shared, Job("j7", 2, 0)) == shared / "node0"
    assert runs_of_job(shared) == [shared / "node0", shared / "node1"]
    assert json.loads((shared / "job.json").read_text())["id"] == "j7"


def test_machines_that_nobody_numbers_take_the_next_free_number(tmp_path: Path) -> None:
    shared, made = tmp_path / "shared", list[Path]()
    run_threads(lambda _: made.append(_make(shared, Job("j7", 8))), 8)
    assert sorted(made) == [shared / f"node{number}" for number in range(8)]
    with pytest.raises(RunError, match="holds the run of all 8 machines of a job already"):
        make_run_directory(shared, "train", Job("j7", 8))


def test_another_job_and_a_machine_that_is_there_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    _make(shared, Job("j7", 2, 0))
    with pytest.raises(RunError, match="holds the job j7, and this is j8"):
        make_run_directory(shared, "train", Job("j8", 2, 1))
    with pytest.raises(RunError, match="holds the run of node 0 already"):
        make_run_directory(shared, "train", Job("j7", 2, 0))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    with pytest.raises(RunError, match="exists and is not empty"):
        make_run_directory(tmp_path / "notes", "train", Job("j7", 2, 0))


def test_without_a_name_the_job_is_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [make_run_directory(None, "train", Job("88/head:29500", 2, number)) for number in (0, 1)]
    assert [str(path) for path in made] == [f"runs/88-head-29500-train/node{number}" for number in (0, 1)]


def test_one_run_of_a_job_is_chosen_by_a_rank(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for number in (0, 1):
        processes = [{"rank": 2 * number + local} for local in (0, 1)]
        start_run(_make(shared, Job("j7", 2, number)), processes=processes)
    assert choose_run(shared, 3) == shared / "node1"
    with pytest.raises(UsageError, match="no rank 4: none of the 2 runs"):
        choose_run(shared, 4)
    with pytest.raises(UsageError, match=r"profkit ranks .*shared compares their ranks"):
        choose_run(shared)
    assert choose_run(shared / "node1") == shared / "node1"
    for number in (0, 1):
        _make(tmp_path / "ranks", Job("j7", 2, number, "rank"))
    with pytest.raises(UsageError, match=r"holds the runs of 2 ranks: profkit ranks .*ranks compares them; for one"):
        choose_run(tmp_path / "ranks")


SCRIPT = training_of_ranks(6)


@pytest.fixture(scope="module")
def two_machines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two launchers on this machine, each with one rank, that share a directory as two machines would."""
    pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("machines")
    (place / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-id", "j7", "--rdzv-endpoint", f"localhost:{port}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "profkit", "run", "-o", "shared", "--warmup", "1", "--steps", "2", "--", *torchrun)
    with ExitStack() as stack:
        launched = [stack.enter_context(started([*command, "train.py"], cwd=place, env=environment)) for _ in range(2)]
        said = [one.communicate() for one in launched]
    assert [one.returncode for one in launched] == [0, 0], said
    (place / "printed.json").write_text(json.dumps([printed for printed, _ in said]))
    return place / "shared"


def test_what_a_rank_starts_does_not_take_its_place(tmp_path: Path, forks: Forks) -> None:
    """A rank's RANK is in the environment of all that it starts, as is Slurm's number of a task."""
    (tmp_path / "train.py").write_text(
        "import subprocess, sys, torch\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])\n"
        "for _ in range(4):\n    optimizer.step()\n"
        "subprocess.run([sys.executable, '-c', 'import torch'], check=True)\n"
    )
    words = ("--warmup", "1", "--steps", "2", "-o", "run", "--", sys.executable, "train.py")
    said = forks.run_profkit("run", *words, cwd=tmp_path, RANK="1", WORLD_SIZE="2").stderr
    assert "runs again" not in said  # as a script without steps would
    processes = manifest_of(tmp_path / "run")["processes"]
    assert [(process["rank"], len(process["profiled"])) for process in processes] == [(1, 2)], said


def test_of_runs_that_begin_at_once_in_one_directory_one_has_it(tmp_path: Path) -> None:
    """Each finds the directory empty, as the tasks of a job array do that start in the same second."""
    from profkit.run.manifest import Manifest, write_manifest

    said: list[str] = []

    def begin(number: int) -> None:
        try:
            write_manifest(tmp_path / "manifest.json", Manifest(target=f"task {number}"), is_first=True)
        except FileExistsError:
            return
        said.append(f"task {number}")

    run_threads(begin, 8)
    assert [manifest_of(tmp_path)["target"]] == said
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.slow
def test_two_launchers_leave_one_directory_with_a_run_each(two_machines: Path) -> None:
    runs = runs_of_job(two_machines)
    assert [path.name for path in runs] == ["node0", "node1"]
    found = {process["rank"] for path in runs for process in manifest_of(path)["processes"]}
    assert found == {0, 1}
    assert {path.name for run in runs for path in run.glob("light*")} == {"light.jsonl", "light.rank1.jsonl"}


@pytest.mark.slow
def test_of_the_runs_of_a_job_the_first_alone_says_what_to_read_next(two_machines: Path) -> None:
    printed = json.loads((two_machines.parent / "printed.json").read_text())
    assert sorted("The run is shared/node0. Next:" in one for one in printed) == [False, True]
    assert sorted("Next:" in one for one in printed) == [False, True]


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        (("--", "srun", "-n", "2", "python", "a.py"), True),
        (("--", "torchrun", "a.py"), False),
    ],
)
def test_one_nsys_around_srun_is_said_to_record_one_machine(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], is_said: bool
) -> None:
    command = importlib.import_module("profkit.cli.run")

    def stop(*_: object, **__: object) -> None:
        raise RunError("enough")

    monkeypatch.setattr(command, "require_nsys", lambda *_: None)
    monkeypatch.setattr(command, "record_run", stop)
    done = CliRunner().invoke(command.run, ["--nsys", *words])
    assert str(done.exception) == "enough"
    assert ("Failed to connect to Agent" in done.stderr) == is_said


@pytest.mark.slow
def test_a_command_reads_one_rank_of_a_job(two_machines: Path) -> None:
    check_command("kernels", two_machines, "--rank", "1", "--format", "json")
    refused = run_command("kernels", two_machines)
    assert refused.returncode == 2
    assert "holds the runs of 2 machines: profkit ranks" in refused.stderr


@pytest.mark.slow
def test_runs_from_several_disks_are_put_in_the_order_of_their_ranks(two_machines: Path, tmp_path: Path) -> None:
    # On disks of their own both machines would have called theirs node0.
    for host, run in zip("ab", reversed(runs_of_job(two_machines)), strict=True):
        shutil.copytree(run, tmp_path / host / "node0")
    by_rank = {light.name: light.parent for light in tmp_path.glob("*/node0/light*")}
    done = check_command("gather", *sorted(by_rank.values()), "-o", tmp_path / "run")
    assert "holds 2 ranks of 2 machines." in done.stdout
    first, second = runs_of_job(tmp_path / "run")
    assert (first / "light.jsonl").read_text() == (by_rank["light.jsonl"] / "light.jsonl").read_text()
    assert {path.name for path in second.iterdir()} == {path.name for path in by_rank["light.rank1.jsonl"].iterdir()}
    assert json.loads((tmp_path / "run" / "job.json").read_text())["count"] == 2
    half = run_command("gather", first, "-o", tmp_path / "half")
    assert "holds 1 rank of 1 machine; the job has 2." in half.stdout


def _one_run(path: Path, ranks: list[int], job: str) -> Path:
    return start_run(path, processes=[{"rank": rank} for rank in ranks], job={"id": job})


def test_runs_that_are_not_of_one_job_are_not_gathered(tmp_path: Path) -> None:
    one = _one_run(tmp_path / "one", [0, 1], "j7")
    cases = (
        (_one_run(tmp_path / "same", [1, 2], "j7"), "rank 1 is in "),
        (_one_run(tmp_path / "other", [2, 3], "j8"), "the runs are of different jobs: j7 and j8"),
        (_one_run(tmp_path / "none", [], "j7"), "does not say which ranks it holds"),
        (one, "rank 0 is in (.*)one and in (.*)one"),
    )
    for other, said in cases:
        with pytest.raises(UsageError, match=said):
            gather([one, other], tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match="exists; name a new directory"):
        gather([one], one)


@pytest.mark.slow
def test_a_scrubbed_run_of_a_job_names_no_host(two_machines: Path, tmp_path: Path) -> None:
    check_command("scrub", two_machines / "node0", "-o", tmp_path / "copy")
    assert "localhost" not in (tmp_path / "copy" / "manifest.json").read_text()
    (light,) = (two_machines / "node0").glob("light*")
    assert (tmp_path / "copy" / light.name).read_text() == light.read_text()


@pytest.mark.slow
def test_the_ranks_of_all_machines_are_compared(two_machines: Path) -> None:
    done = check_command("ranks", two_machines, "--format", "json")
    found = json.loads(done.stdout)
    assert sorted(rank["node"] for rank in found["ranks"]) == [0, 1]


def test_links_in_a_run_are_not_gathered(tmp_path: Path) -> None:
    run = _one_run(tmp_path / "one", [0], "j7")
    (run / "itself").symlink_to(".")
    (run / "zero").symlink_to("/dev/zero")
    (run / "folder").mkdir()
    os.mkfifo(run / "pipe")
    gathered = gather([run], tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "node0").iterdir()] == ["manifest.json"]
    assert gathered.left_out == tuple(str(run / name) for name in ("folder", "itself", "pipe", "zero"))


def test_a_run_that_is_larger_than_the_disk_is_not_gathered(tmp_path: Path) -> None:
    run = _one_run(tmp_path / "one", [0], "j7")
    with (run / "trace.sqlite").open("wb") as file:
        file.truncate(1 << 42)  # it takes no room itself
    with pytest.raises(RunError, match=r"holds 4.1e\+03 GiB, and .* has room for"):
        gather([run], tmp_path / "run")
    assert not (tmp_path / "run").exists()
