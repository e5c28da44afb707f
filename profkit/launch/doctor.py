"""What this machine can record, and how to fix what it cannot: each check a pure function of a `Machine`.

torch is looked at from outside (its metadata and the text of torch/version.py), because importing it takes seconds
and may start CUDA.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from profkit.launch.gpu_state import cuda_of_driver, driver_version
from profkit.launch.nsys import (
    CUPTI,
    NO_ROOM_BYTES,
    Nsys,
    cupti_of,
    find_importer,
    how_to_install,
    is_before,
    lacking_libraries,
    list_installed,
    numbers,
)

State = Literal["ok", "note", "warning", "failed"]

# A capture of ten minutes of a large model under nsys takes gigabytes, and the export takes them again.
_LITTLE_BYTES = 5 * 1024**3

# Tried: nsys 2023.4.4 does not see the ranges of nvtx 0.2.12 and later, nsys 2025.3.1 does; none between was tried.
_FIRST_UNSEEN_NVTX = "0.2.12"
_FIRST_SEEING_NSYS = "2025.3"


@dataclass(frozen=True)
class Check:
    """What one check found; ``advice`` is the one thing to do, None where nothing is."""

    check: str
    state: State
    found: str
    advice: str | None = None


@dataclass(frozen=True)
class Package:
    """An installed Python package: its version, and how to read the text of one of its files (None: not there)."""

    version: str
    read: Callable[[str], str | None]


def installed_package(name: str) -> Package | None:
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return None

    def read(file: str) -> str | None:
        path = Path(str(installed.locate_file(file)))
        return path.read_text(encoding="utf-8") if path.is_file() else None

    return Package(installed.version, read)


def output_of(argv: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class Machine:
    """What the checks look at, so that a test can give them another machine."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    working_directory: Path = field(default_factory=Path.cwd)
    temporary_directory: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    package: Callable[[str], Package | None] = installed_package
    output: Callable[[Sequence[str]], str | None] = output_of
    lacking: Callable[[Path], list[str]] = lacking_libraries

    def text(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None


def examine(machine: Machine, nsys: Nsys | str | None) -> list[Check]:
    """Return all findings; ``nsys`` is the one in use, why it does not start, or None where there is none."""
    driver = find_driver(machine)
    of_nsys: list[Check] = []
    if isinstance(nsys, Nsys):
        of_nsys = [
            check_nsys_against_driver(machine, nsys, driver),
            check_importer(machine, nsys),
            check_nvtx(machine, nsys),
        ]
    return [
        check_nsys(machine, nsys),
        *of_nsys,
        check_driver(machine, driver),
        check_torch(machine, driver),
        *check_disk(machine),
    ]


def can_record(findings: Iterable[Check]) -> bool:
    state = {finding.check: finding.state for finding in findings}
    has_room = "failed" not in (state["working directory"], state["temporary directory"])
    return has_room and (state["nsys"] == "ok" or state["torch"] != "failed")


def check_nsys(machine: Machine, nsys: Nsys | str | None) -> Check:
    if nsys is None:
        install = "install nsight-systems-cli, put nsys on PATH, or name it in $NSYS; torch.profiler works without it"
        return Check("nsys", "warning", "not found on PATH, in $NSYS or in the usual places", install)
    if isinstance(nsys, str):
        return Check("nsys", "failed", nsys, "reinstall it, or name one that starts in $NSYS")
    others = [path for path in list_installed(machine.root) if path.resolve() != nsys.path.resolve()]
    also = f"; also here: {', '.join(map(str, others))}" if others else ""
    return Check("nsys", "ok", f"{nsys.version}: {nsys.path}{also}")


def check_nsys_against_driver(machine: Machine, nsys: Nsys, driver: str | None) -> Check:
    """Say whether nsys knows the driver's CUDA: the newest CUPTI next to it must be of the driver's CUDA major version.

    nsys loads the libcupti.so.X.Y in its own folder; X.Y is the CUDA version that it was made for. With an older major
    version kernels go missing without an error: nsys 2023.4.4 (CUPTI 12.4) under driver 580 (CUDA 13.0) kept 6 % of a
    long run's kernels and exited 0, nsys 2025.3.1 (CUPTI 13.0) kept all. An older minor version is a note: CUDA's
    minor versions are compatible. The driver's CUDA is `profkit.launch.gpu_state.cuda_of_driver`.
    """
    check = "nsys and driver"
    if driver is None:
        return Check(check, "ok", "no NVIDIA driver here: ranges can be recorded, kernels cannot")
    cuda, cupti = cuda_of_driver(driver), cupti_of(nsys.path)
    if cuda is None or cupti is None:
        unknown = f"no {CUPTI} next to nsys" if cupti is None else f"profkit does not know driver {driver}"
        return Check(
            check, "note", f"cannot be compared: {unknown}", "record, and see whether the capture passes its self-check"
        )
    said = f"CUPTI {cupti}, driver {driver} knows CUDA {cuda}"
    if numbers(cupti)[0] < numbers(cuda)[0]:
        installed = ((path, cupti_of(path)) for path in list_installed(machine.root))
        newer = next((path for path, other in installed if other and numbers(other)[0] >= numbers(cuda)[0]), None)
        cure = f"set NSYS={newer}" if newer else f"install an Nsight Systems made for CUDA {numbers(cuda)[0]}"
        return Check(check, "warning", f"{said}: nsys is too old and may lose kernels without an error", cure)
    if is_before(cupti, cuda):
        return Check(check, "note", f"{said}: same major version", "if a capture fails its self-check, update nsys")
    return Check(check, "ok", said)


def check_importer(machine: Machine, nsys: Nsys) -> Check:
    importer = find_importer(nsys.path, machine.root)
    if importer is None:
        found = "no QdstrmImporter: nsys will leave a raw .qdstrm that nothing here can read"
        return Check("importer", "warning", found, "install all of Nsight Systems, not only its target part")
    missing = machine.lacking(importer)
    if missing:
        return Check("importer", "warning", f"{importer} lacks {', '.join(missing)}", how_to_install(missing))
    return Check("importer", "ok", str(importer))


def check_nvtx(machine: Machine, nsys: Nsys) -> Check:
    nvtx = machine.package("nvtx")
    if nvtx is None:
        return Check("nvtx", "warning", "not installed: no ranges", "pip install 'nvtx<0.2.12'")
    if is_before(nvtx.version, _FIRST_UNSEEN_NVTX) or not is_before(nsys.version, _FIRST_SEEING_NSYS):
        return Check("nvtx", "ok", f"{nvtx.version}: nsys {_short(nsys)} sees its ranges")
    found = f"{nvtx.version}: nsys 2023.4.4 does not see its ranges, 2025.3.1 does; this is {_short(nsys)}"
    return Check("nvtx", "warning", found, "pip install 'nvtx<0.2.12', then `profkit run --nsys model.tiny`")


def _short(nsys: Nsys) -> str:
    return ".".join(map(str, numbers(nsys.version)[:3]))


def find_driver(machine: Machine) -> str | None:
    version = driver_version(machine.root)
    if version is not None:
        return version
    said = machine.output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return said.strip().splitlines()[0].strip() if said and said.strip() else None


def check_driver(machine: Machine, driver: str | None) -> Check:
    if driver is None:
        return Check("GPU", "note", "no NVIDIA driver", "kernels need a GPU; ranges and CPU operators do not")
    said = machine.output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    information = [
        machine.text(str(path)) or "" for path in sorted(machine.root.glob("proc/driver/nvidia/gpus/*/info*"))
    ]
    names = said.strip().splitlines() if said else re.findall(r"^Model:\s*(.+)$", "\n".join(information), re.MULTILINE)
    gpus = ", ".join(f"{names.count(name)} × {name.strip()}" for name in dict.fromkeys(names)) or "no GPU"
    found = f"{gpus}, driver {driver}"
    if not names or (not list(machine.root.glob("dev/nvidia[0-9]*")) and not (machine.root / "dev/dxg").exists()):
        return Check("GPU", "warning", f"{found}: no /dev/nvidia0 here", "start the container with --gpus all")
    if machine.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return Check("GPU", "warning", f"{found}: hidden", "unset CUDA_VISIBLE_DEVICES")
    return Check("GPU", "ok", found)


def check_torch(machine: Machine, driver: str | None) -> Check:
    torch = machine.package("torch")
    if torch is None:
        return Check("torch", "failed", "not installed: no model can be run; captures can be read", "pip install torch")
    text = torch.read("torch/version.py") or ""
    build = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    hip = re.search(r"^hip\b[^=\n]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    if hip:
        found = f"{torch.version}, ROCm {hip[1]}: profkit records only NVIDIA GPUs"
        return Check("torch", "warning", found, "install a CUDA build of torch")
    if build is None:
        found = f"{torch.version}, without CUDA"
        if driver is None:
            return Check("torch", "ok", found)
        return Check("torch", "warning", f"{found}: the GPU stays unused", "install a CUDA build of torch")
    found = f"{torch.version}, CUDA {build[1]}"
    cuda = cuda_of_driver(driver) if driver else None
    if cuda is not None and numbers(build[1])[0] > numbers(cuda)[0]:
        cure = f"update the driver, or install a torch built for CUDA {numbers(cuda)[0]}"
        return Check("torch", "warning", f"{found}: driver {driver} knows CUDA {cuda} at most", cure)
    return Check("torch", "ok", found)


def check_disk(machine: Machine) -> list[Check]:
    return [
        _check_room("working directory", machine.working_directory, "work in another directory or name one with -o"),
        _check_room("temporary directory", machine.temporary_directory, "point TMPDIR to another disk"),
    ]


def _check_room(check: str, directory: Path, cure: str) -> Check:
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return Check(check, "failed", f"{directory}: {error.strerror}", cure)
    found = f"{_gib(free)} free in {directory}"
    if not os.access(directory, os.W_OK):
        return Check(check, "failed", f"{directory}: no permission to write", cure)
    if free < NO_ROOM_BYTES:
        return Check(check, "failed", found, f"free some space, or {cure}")
    return Check(check, "warning" if free < _LITTLE_BYTES else "ok", found, cure if free < _LITTLE_BYTES else None)


def _gib(byte_count: int) -> str:
    return f"{byte_count / 1024**3:.1f} GiB" if byte_count >= 0.1 * 1024**3 else f"{byte_count / 1024**2:.1f} MiB"
