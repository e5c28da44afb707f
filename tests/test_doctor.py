"""The doctor's checks on machines made up of files, and the command on this one."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from profkit.launch.doctor import (
    Check,
    Machine,
    Package,
    can_record,
    check_disk,
    check_driver,
    check_importer,
    check_nsys,
    check_nsys_against_driver,
    check_nvtx,
    check_torch,
    examine,
    find_driver,
    installed_package,
)
from profkit.launch.nsys import Nsys, cupti_of
from profkit.report.commands.machine import build_doctor_document
from profkit.report.document import render

OLD, NEW = "2023.4.4.54-234433681190v0", "2025.3.1.90-253135822126v0"
COMPUTE = "opt/nvidia/nsight-compute/2025.3.1/host/target-linux-x64/nsys"


def _file(path: Path, text: str = "", *, executable: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _nsys(root: Path, place: str, version: str, cupti: str | None = None) -> Nsys:
    path = _file(root / place, f"#!/bin/sh\necho 'NVIDIA Nsight Systems version {version}'\n", executable=True)
    if cupti:
        _file(path.parent / f"libcupti.so.{cupti}")
    return Nsys(path, version)


def _packages(**versions: str) -> Callable[[str], Package | None]:
    """Return installed packages; torch's version stands for its CUDA too: ``2.9.0+cu130`` is built for 13.0."""

    def find(name: str) -> Package | None:
        if name not in versions:
            return None
        local = versions[name].partition("+")[2]
        cuda = f"'{local[2:-1]}.{local[-1]}'" if local.startswith("cu") else "None"
        hip = f"'{local[4:]}'" if local.startswith("rocm") else "None"
        text = f"__version__ = '{versions[name]}'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
        return Package(versions[name], lambda file: text if file == "torch/version.py" else None)

    return find


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a bare machine: no driver, no programs, no packages."""
    for name in ("root", "work", "temporary"):
        (tmp_path / name).mkdir()
    return Machine(
        environment={"PATH": str(tmp_path / "root/bin")},
        root=tmp_path / "root",
        working_directory=tmp_path / "work",
        temporary_directory=tmp_path / "temporary",
        package=_packages(),
        output=lambda argv: None,
        lacking=lambda importer: [],
    )


def _with_gpu(machine: Machine, driver: str = "580.159.03", model: str = "NVIDIA H200") -> Machine:
    _file(
        machine.root / "proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX x86_64  {driver}  Release\nGCC 12.2.0\n",
    )
    for number in range(2):
        _file(
            machine.root / f"proc/driver/nvidia/gpus/0000:00:0{number}.0/information", f"Model: \t\t {model}\nIRQ: 4\n"
        )
        _file(machine.root / f"dev/nvidia{number}")
    return machine


def test_the_newest_cupti_next_to_nsys_counts_also_behind_a_wrapper(tmp_path: Path) -> None:
    nsys = _nsys(tmp_path, "a/target-linux-x64/nsys", OLD)
    assert cupti_of(nsys.path) is None
    for version in ("9.2", "12.4", "12.10", "12.4.127"):
        _file(nsys.path.parent / f"libcupti.so.{version}")
    assert cupti_of(nsys.path) == cupti_of(_nsys(tmp_path, "a/bin/nsys", OLD).path) == "12.10"


def test_nsys_is_missing_does_not_start_or_is_named_with_the_others_that_lie_here(machine: Machine) -> None:
    missing = check_nsys(machine, None)
    assert missing.state == "warning"
    assert "install nsight-systems-cli, put nsys on PATH, or name it in $NSYS" in str(missing.advice)
    assert check_nsys(machine, "/x/nsys: nsys does not start: boom") == Check(
        "nsys", "failed", "/x/nsys: nsys does not start: boom", "reinstall it, or name one that starts in $NSYS"
    )
    nsys, other = _nsys(machine.root, "x/nsys", OLD), _nsys(machine.root, COMPUTE, NEW)
    assert check_nsys(machine, nsys) == Check("nsys", "ok", f"{OLD}: {nsys.path}; also here: {other.path}")


@pytest.mark.parametrize(
    ("cupti", "driver", "state"),
    [
        ("12.4", "580.159.03", "warning"),
        ("13.0", "580.159.03", "ok"),
        ("12.4", "550.54.15", "ok"),
        ("12.4", "570.86", "note"),
        ("13.0", "550.54.15", "ok"),
        (None, "580.159.03", "note"),
        ("12.4", "440.33", "note"),
        ("12.4", None, "ok"),
    ],
)
def test_the_major_version_decides_whether_nsys_knows_the_driver(
    machine: Machine, cupti: str | None, driver: str | None, state: str
) -> None:
    finding = check_nsys_against_driver(machine, _nsys(machine.root, "bin/nsys", OLD, cupti), driver)
    assert finding.state == state
    assert (finding.advice is None) == (state == "ok")


def test_a_newer_nsys_that_lies_here_is_named(machine: Machine) -> None:
    nsys = _nsys(machine.root, "bin/nsys", OLD, "12.4")
    finding = check_nsys_against_driver(machine, nsys, "580.159.03")
    assert finding.advice == "install an Nsight Systems made for CUDA 13"
    _nsys(machine.root, "opt/nvidia/nsight-systems/2024.6/target-linux-x64/nsys", "2024.6", "12.6")
    newer = _nsys(machine.root, COMPUTE, NEW, "13.0")
    finding = check_nsys_against_driver(machine, nsys, "580.159.03")
    assert finding.advice == f"set NSYS={newer.path}"
    assert finding.found.startswith("CUPTI 12.4, driver 580.159.03 knows CUDA 13.0: nsys is too old and may lose")


def test_the_importer_is_found_with_the_libraries_that_it_lacks(machine: Machine) -> None:
    nsys = _nsys(machine.root, COMPUTE, NEW)
    assert "no QdstrmImporter" in check_importer(machine, nsys).found
    importer = _file(nsys.path.parent.parent / "host-linux-x64/QdstrmImporter", executable=True)
    assert check_importer(machine, nsys) == Check("importer", "ok", str(importer))
    lacking = replace(machine, lacking=lambda path: ["libdw.so.1", "libelf.so.1"] if path == importer else [])
    assert check_importer(lacking, nsys) == Check(
        "importer", "warning", f"{importer} lacks libdw.so.1, libelf.so.1", "install libdw1 libelf1"
    )


@pytest.mark.parametrize(
    ("nvtx", "nsys", "state"),
    [
        ("0.2.11", OLD, "ok"),
        ("0.2.12", OLD, "warning"),
        ("0.2.17", OLD, "warning"),
        ("0.2.17", "2024.6.1", "warning"),
        ("0.2.17", NEW, "ok"),
        ("0.2.8", NEW, "ok"),
        (None, NEW, "warning"),
    ],
)
def test_whether_nsys_sees_nvtx(machine: Machine, nvtx: str | None, nsys: str, state: str) -> None:
    machine = replace(machine, package=_packages(**({"nvtx": nvtx} if nvtx else {})))
    assert check_nvtx(machine, Nsys(Path("nsys"), nsys)).state == state


def test_gpus_are_read_from_the_kernel_module_alone(machine: Machine) -> None:
    assert find_driver(machine) is None
    assert check_driver(machine, None).state == "note"
    machine = _with_gpu(machine)
    assert find_driver(machine) == "580.159.03"
    assert check_driver(machine, "580.159.03") == Check("GPU", "ok", "2 × NVIDIA H200, driver 580.159.03")
    for hidden in ("", "-1"):
        hides = replace(machine, environment={"CUDA_VISIBLE_DEVICES": hidden})
        assert check_driver(hides, "580.159.03").advice == "unset CUDA_VISIBLE_DEVICES"
    shutil.rmtree(machine.root / "dev")
    finding = check_driver(machine, "580.159.03")
    assert (finding.state, finding.advice) == ("warning", "start the container with --gpus all")


def test_gpus_are_read_from_nvidia_smi_alone(machine: Machine) -> None:
    answers = {"name": "NVIDIA L4\nNVIDIA T4\n", "driver_version": "550.54.15\n550.54.15\n"}
    machine = replace(machine, output=lambda argv: answers[argv[1].partition("=")[2]])
    _file(machine.root / "dev/dxg")
    assert find_driver(machine) == "550.54.15"
    assert check_driver(machine, "550.54.15").found == "1 × NVIDIA L4, 1 × NVIDIA T4, driver 550.54.15"


@pytest.mark.parametrize(
    ("torch", "driver", "state", "found"),
    [
        (None, None, "failed", "not installed"),
        ("2.13.0+cpu", None, "ok", "2.13.0+cpu, without CUDA"),
        ("2.13.0+cpu", "580.1", "warning", "without CUDA: the GPU stays unused"),
        ("2.13.0+cu130", "580.1", "ok", "2.13.0+cu130, CUDA 13.0"),
        ("2.13.0+cu130", "550.1", "warning", "driver 550.1 knows CUDA 12.4 at most"),
        ("2.13.0+cu128", "550.1", "ok", "CUDA 12.8"),
        ("2.13.0+cu130", None, "ok", "CUDA 13.0"),
        ("2.13.0+rocm6.4", None, "warning", "ROCm 6.4"),
    ],
)
def test_the_build_of_torch(machine: Machine, torch: str | None, driver: str | None, state: str, found: str) -> None:
    machine = replace(machine, package=_packages(**({"torch": torch} if torch else {})))
    finding = check_torch(machine, driver)
    assert finding.state == state
    assert found in finding.found


def test_an_installed_package_is_read_without_an_import() -> None:
    package = installed_package("nvtx")
    assert package is not None
    assert package.version[0].isdigit()
    assert package.read("no/such/file.py") is None
    assert installed_package("no-such-package-at-all") is None


def test_room_on_the_disks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = check_disk(replace(machine, temporary_directory=machine.root / "none"))[1]
    assert missing.state == "failed"
    assert "No such file" in missing.found
    for free, state in ((50 * 1024**3, "ok"), (1024**3, "warning"), (1024**2, "failed")):
        usage = type("usage", (), {"free": free})
        monkeypatch.setattr("profkit.launch.doctor.shutil.disk_usage", lambda path, usage=usage: usage)
        assert [finding.state for finding in check_disk(machine)] == [state, state]


def test_a_whole_machine_can_record(machine: Machine) -> None:
    nsys = _nsys(machine.root, "bin/nsys", NEW, "13.0")
    _file(nsys.path.parent.parent / "host/QdstrmImporter", executable=True)
    machine = replace(_with_gpu(machine), package=_packages(nvtx="0.2.11", torch="2.13.0+cu130"))
    findings = examine(machine, nsys)
    checks = "nsys, nsys and driver, importer, nvtx, GPU, torch, working directory, temporary directory"
    assert ", ".join(finding.check for finding in findings) == checks
    assert {finding.state for finding in findings} == {"ok"}
    assert can_record(findings)


def test_recording_needs_an_nsys_or_torch_and_free_disk_space(machine: Machine) -> None:
    nsys = _nsys(machine.root, "bin/nsys", NEW)
    torch = replace(machine, package=_packages(torch="2.13.0+cpu"))
    assert can_record(examine(machine, nsys))
    assert can_record(examine(torch, None))
    assert can_record(examine(torch, "does not start"))
    assert not can_record(examine(machine, None))
    assert not can_record(examine(machine, "does not start"))
    assert not can_record(examine(replace(torch, working_directory=machine.root / "none"), nsys))


def test_the_findings_fit_80_columns_and_every_format_holds_the_advice() -> None:
    long = "word " * 40
    rows = [vars(Check("a", "warning", long, long)), vars(Check("b", "ok", "x"))]
    document = build_doctor_document(rows, can_record=True, on_screen=True)
    text = render(document, "table")
    assert max(map(len, text.splitlines())) <= 80
    assert (text.count("word"), text.count("→")) == (80, 1)
    rows = [vars(Check("a", "warning", "f", "do x")), vars(Check("b", "ok", "g"))]
    document = build_doctor_document(rows, can_record=True, on_screen=False)
    assert render(document, "csv").splitlines() == ["check,state,found,advice", "a,warning,f,do x", "b,ok,g,"]
    assert "| a | warning | f | do x |" in render(document, "markdown")
    assert r"a & warning & f & do x \\" in render(document, "latex")


# An nsys that starts a program and records nothing of it.
FAKE = """#!/bin/sh
case $1 in --version) echo 'NVIDIA Nsight Systems version 1.0';;
profile) shift
while [ "${1#-}" != "$1" ]; do shift; done
"$@";; esac
"""


class TestCommand:
    def test_here(self, profkit: Callable, tmp_path: Path) -> None:
        done = profkit(
            "doctor", cwd=tmp_path, env={**os.environ, "NSYS": str(_file(tmp_path / "nsys", FAKE, executable=True))}
        )
        assert done.returncode == 0
        assert "1.0:" in done.stdout
        assert "working directory" in done.stdout

    def test_an_nsys_that_does_not_start_is_a_finding(self, profkit: Callable, tmp_path: Path) -> None:
        done = profkit("doctor", cwd=tmp_path, env={**os.environ, "NSYS": "/no/nsys"})
        assert done.returncode == 0
        assert "nsys                 failed  $NSYS is /no/nsys" in done.stdout

    def test_nothing_can_be_recorded(self, profkit: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        states = {"nsys": "warning", "torch": "failed", "working directory": "ok", "temporary directory": "ok"}
        checks = [Check(name, state, "x") for name, state in states.items()]
        monkeypatch.setattr("profkit.cli.machine.examine", lambda _machine, _nsys: checks)
        done = profkit("doctor")
        assert done.returncode == 3
        assert done.stderr.startswith("profkit: nothing can be recorded here: profkit needs torch or a working nsys")
