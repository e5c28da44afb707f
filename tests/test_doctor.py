"""The doctor's checks on machines made up of files, and the command on this one."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

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
from tests.golden import check_text

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


def _bare(place: Path) -> Machine:
    """Return a machine without driver, programs or packages."""
    for name in ("root", "work", "temporary"):
        (place / name).mkdir(parents=True)
    return Machine(
        environment={"PATH": str(place / "root/bin")},
        root=place / "root",
        working_directory=place / "work",
        temporary_directory=place / "temporary",
        package=_packages(),
        output=lambda argv: None,
        lacking=lambda importer: [],
    )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return _bare(tmp_path)


def _with_gpu(machine: Machine) -> Machine:
    driver = machine.root / "proc/driver/nvidia"
    _file(driver / "version", "NVRM version: NVIDIA UNIX x86_64  580.159.03  Release\nGCC 12.2.0\n")
    for number in range(2):
        _file(driver / f"gpus/0000:00:0{number}.0/information", "Model: \t\t NVIDIA H200\nIRQ: 4\n")
        _file(machine.root / f"dev/nvidia{number}")
    return machine


def test_the_newest_cupti_next_to_nsys_counts_also_behind_a_wrapper(tmp_path: Path) -> None:
    nsys = _nsys(tmp_path, "a/target-linux-x64/nsys", OLD)
    assert cupti_of(nsys.path) is None
    for version in ("9.2", "12.4", "12.10", "12.4.127"):
        _file(nsys.path.parent / f"libcupti.so.{version}")
    assert cupti_of(nsys.path) == cupti_of(_nsys(tmp_path, "a/bin/nsys", OLD).path) == "12.10"


Found = Iterator[tuple[str, Check]]


def _of_nsys(machine: Machine) -> Found:
    yield "missing", check_nsys(machine, None)
    yield "does not start", check_nsys(machine, "/x/nsys: nsys does not start: boom")
    nsys, _ = _nsys(machine.root, "x/nsys", OLD), _nsys(machine.root, COMPUTE, NEW)
    yield "with another that lies here", check_nsys(machine, nsys)


def _of_nsys_and_driver(machine: Machine) -> Found:
    """The major version decides whether nsys knows the driver."""
    nsys = _nsys(machine.root, "bin/nsys", OLD)
    drivers = ("580.159.03", "550.54.15", "570.86", "440.33", None)
    for cupti, driver in [*(("12.4", driver) for driver in drivers), ("13.0", "580.159.03"), ("13.0", "550.54.15")]:
        library = _file(nsys.path.parent / f"libcupti.so.{cupti}")
        yield f"CUPTI {cupti}, driver {driver}", check_nsys_against_driver(machine, nsys, driver)
        library.unlink()
    yield "no CUPTI", check_nsys_against_driver(machine, nsys, "580.159.03")
    _file(nsys.path.parent / "libcupti.so.12.4")
    _nsys(machine.root, "opt/nvidia/nsight-systems/2024.6/target-linux-x64/nsys", "2024.6", "12.6")
    _nsys(machine.root, COMPUTE, NEW, "13.0")
    yield "a newer one that lies here", check_nsys_against_driver(machine, nsys, "580.159.03")


def _of_importer(machine: Machine) -> Found:
    nsys = _nsys(machine.root, COMPUTE, NEW)
    yield "none", check_importer(machine, nsys)
    _file(nsys.path.parent.parent / "host-linux-x64/QdstrmImporter", executable=True)
    yield "whole", check_importer(machine, nsys)
    lacking = replace(machine, lacking=lambda path: ["libdw.so.1", "libelf.so.1"])
    yield "without libraries", check_importer(lacking, nsys)


def _of_nvtx(machine: Machine) -> Found:
    for nvtx, nsys in (
        *((nvtx, OLD) for nvtx in ("0.2.11", "0.2.12", "0.2.17")),
        *(("0.2.17", "2024.6.1"), ("0.2.17", NEW), ("0.2.8", NEW), (None, NEW)),
    ):
        has = replace(machine, package=_packages(**({"nvtx": nvtx} if nvtx else {})))
        yield f"nvtx {nvtx}, nsys {nsys}", check_nvtx(has, Nsys(Path("nsys"), nsys))


def _of_gpus(machine: Machine) -> Found:
    """They are read from the kernel module alone, or from nvidia-smi alone."""
    assert find_driver(machine) is None
    yield "none", check_driver(machine, None)
    answers = {"name": "NVIDIA L4\nNVIDIA T4\n", "driver_version": "550.54.15\n550.54.15\n"}
    asks = replace(machine, output=lambda argv: answers[argv[1].partition("=")[2]])
    _file(machine.root / "dev/dxg")
    yield "by nvidia-smi", check_driver(asks, find_driver(asks))
    machine = _with_gpu(machine)
    yield "by the kernel module", check_driver(machine, find_driver(machine))
    for hidden in ("", "-1"):
        hides = replace(machine, environment={"CUDA_VISIBLE_DEVICES": hidden})
        yield f"hidden by {hidden!r}", check_driver(hides, "580.159.03")
    shutil.rmtree(machine.root / "dev")
    yield "without devices", check_driver(machine, "580.159.03")


def _of_torch(machine: Machine) -> Found:
    for torch, drivers in {
        None: [None],
        "2.13.0+cpu": [None, "580.1"],
        "2.13.0+cu130": ["580.1", "550.1", None],
        "2.13.0+cu128": ["550.1"],
        "2.13.0+rocm6.4": [None],
    }.items():
        has = replace(machine, package=_packages(**({"torch": torch} if torch else {})))
        for driver in drivers:
            yield f"torch {torch}, driver {driver}", check_torch(has, driver)


def _of_disks(machine: Machine) -> Found:
    yield "a folder that is not there", check_disk(replace(machine, temporary_directory=machine.root / "none"))[1]
    for free in (50 * 1024**3, 1024**3, 1024**2):
        usage = type("usage", (), {"free": free})
        with patch("profkit.launch.doctor.shutil.disk_usage", lambda path, usage=usage: usage):
            for found in check_disk(machine):
                yield f"{free:,} bytes free", found


CHECKS = (_of_nsys, _of_nsys_and_driver, _of_importer, _of_nvtx, _of_gpus, _of_torch, _of_disks)


def test_what_is_found_of_machines(tmp_path: Path) -> None:
    text = ""
    for of in CHECKS:
        for name, check in of(_bare(tmp_path / of.__name__)):
            advice = "" if check.advice is None else f" → {check.advice}"
            text += f"{check.check}: {name}\n    {check.state}: {check.found}{advice}\n"
            assert check.advice is None or check.state != "ok"
        text = text.replace(str(tmp_path / of.__name__), "")
    check_text("doctor", text)


def test_an_installed_package_is_read_without_an_import() -> None:
    package = installed_package("nvtx")
    assert package is not None
    assert package.version[0].isdigit()
    assert package.read("no/such/file.py") is None
    assert installed_package("no-such-package-at-all") is None


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

    def test_nothing_can_be_recorded(self, profkit: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        states = {"nsys": "warning", "torch": "failed", "working directory": "ok", "temporary directory": "ok"}
        checks = [Check(name, state, "x") for name, state in states.items()]
        monkeypatch.setattr("profkit.cli.machine.examine", lambda _machine, _nsys: checks)
        done = profkit("doctor")
        assert done.returncode == 3
        assert done.stderr.startswith("profkit: nothing can be recorded here: profkit needs torch or a working nsys")
