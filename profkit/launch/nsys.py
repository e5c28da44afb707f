"""Nsight Systems from outside: where it and its importer are, what it can do, and how to call it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from profkit.errors import ToolError

GraphTrace = Literal["node", "graph"]

CUPTI = "libcupti.so"


# From the root; of several matches the newest version is taken. Nsight Compute brings an nsys of its own.
_PLACES = (
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "usr/local/cuda*/bin/nsys",
    "usr/lib/nsight-systems/bin/nsys",
    "usr/lib/nsight-systems/target-linux-*/nsys",
    "usr/lib/*/nsight-systems/target-linux-*/nsys",
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys",
)


@dataclass(frozen=True)
class Nsys:
    """An nsys that starts: where it is, its version in its own words (``2023.4.4.54-234433681190v0``), how it records.

    ``cuda_graph_trace`` says whether a CUDA graph's kernels are traced one by one or the graph as one; ``keep_report``
    False deletes the report once it has been exported.
    """

    path: Path
    version: str
    cuda_graph_trace: GraphTrace = "node"
    keep_report: bool = True


def find_nsys(environment: Mapping[str, str], root: Path = Path("/")) -> Nsys | None:
    """Return the nsys to use: ``$NSYS``, the one on PATH, or the newest in the usual places under ``root``; or None.

    Raises:
        ToolError: ``$NSYS`` is no program, or the nsys that was found does not start.
    """
    named = environment.get("NSYS")
    if named is not None:
        program = shutil.which(named, path=environment.get("PATH"))
        if program is None:
            raise ToolError(f"$NSYS is {named}, which cannot be run; correct it or unset it")
        return _started(Path(program))
    on_path = shutil.which("nsys", path=environment.get("PATH", os.defpath))
    if on_path is not None:
        return _started(Path(on_path))
    installed = list_installed(root)
    return _started(installed[0]) if installed else None


def list_installed(root: Path = Path("/")) -> list[Path]:
    """Return every nsys in the usual places under ``root``, the one to use first."""
    installed: list[Path] = []
    for place in _PLACES:
        candidates = [path for path in root.glob(place) if os.access(path, os.X_OK)]
        installed += sorted(candidates, key=_version_in_path, reverse=True)
    return installed


def build_nsys_argv(
    nsys: Nsys,
    report: Path,
    target: Sequence[str],
    *,
    cuda: bool,
    temporary: str = "/tmp",
) -> list[str]:
    """Return the command that profiles ``target`` into ``report`` (a path without suffix).

    With CUDA the capture runs from cudaProfilerStart to cudaProfilerStop; without it CUDA's APIs are not traced, and
    the NVTX ranges are those of the whole process. The CPU is not sampled: it would slow the steps.

    Args:
        temporary: the target's own TMPDIR, for nsys is to be given one that can be thrown away.
    """
    flags = [f"--trace={'cuda,nvtx' if cuda else 'nvtx'}", "--sample=none", "--cpuctxsw=none"]
    if cuda:
        flags.append(f"--cuda-graph-trace={nsys.cuda_graph_trace}")
        flags += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    # In the name of a report % begins a placeholder, for example for the host or the process.
    output = str(report).replace("%", "%%")
    return [str(nsys.path), "profile", *flags, f"--env-var=TMPDIR={temporary}", f"--output={output}", *target]


def build_export_argv(nsys: Path, report: Path, export: Path) -> list[str]:
    """Return the command that exports ``report`` to the SQLite file ``export``."""
    return [str(nsys), "export", "--type=sqlite", "--quiet=true", f"--output={export}", str(report)]


def _started(path: Path) -> Nsys:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{path}: nsys does not start: {error}") from None
    version = re.search(r"version (\d[\w.\-]*)", done.stdout)
    if done.returncode != 0 or version is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolError(f"{path}: nsys does not start: {said[-1] if said else f'exit status {done.returncode}'}")
    return Nsys(path, version[1])


def _version_in_path(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path.parent))]


def cupti_of(nsys: Path) -> str | None:
    """Return the version of the newest CUPTI in an nsys' own folder, or None if there is none.

    Behind a wrapper (``bin/nsys``) the folder is ``target-linux-*`` next to it.
    """
    folder = nsys.resolve().parent
    files = [*folder.glob(f"{CUPTI}.*"), *folder.parent.glob(f"target-linux-*/{CUPTI}.*")]
    versions = [file.name.removeprefix(f"{CUPTI}.") for file in files]
    return max((version for version in versions if re.fullmatch(r"\d+\.\d+", version)), key=numbers, default=None)


def numbers(version: str) -> list[int]:
    """Return the leading numbers of a version: ``2023.4.4.54-23v0`` is [2023, 4, 4, 54]."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return [int(number) for number in leading[0].split(".")] if leading else [0]


def is_before(version: str, other: str) -> bool:
    return numbers(version) < numbers(other)


# Beside nsys' own folder first, then wherever an Nsight tool has a host folder.
_HOST_FOLDERS = (
    "opt/nvidia/nsight-systems*/*/host-linux-*",
    "opt/nvidia/nsight-compute/*/host/*linux*",
    "usr/lib/nsight-systems/host-linux-*",
    "usr/lib/*/nsight-systems/host-linux-*",
    "usr/local/cuda*/nsight-*/host*/*linux*",
)

# Debian's names of the packages with the libraries that a bare machine lacks.
_PACKAGES = {"libdw.so.1": "libdw1", "libelf.so.1": "libelf1", "libssh.so.4": "libssh-4", "libpfm.so.4": "libpfm4"}


def find_importer(nsys: Path, root: Path = Path("/")) -> Path | None:
    """Return the QdstrmImporter nearest to ``nsys``, or None."""
    installation = nsys.resolve().parent.parent
    near = sorted(installation.glob("*/QdstrmImporter"))
    far = [path for place in _HOST_FOLDERS for path in sorted(root.glob(f"{place}/QdstrmImporter"), reverse=True)]
    return next((path for path in near + far if os.access(path, os.X_OK)), None)


def lacking_libraries(program: Path) -> list[str]:
    """Return the libraries that the dynamic loader does not find for a program; what these need it cannot say."""
    environment = {**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False, timeout=60)
    return list(dict.fromkeys(re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE)))


def how_to_install(missing: Sequence[str]) -> str:
    """Return which packages to install for missing libraries, as far as their names are known."""
    packages = [_PACKAGES[library] for library in missing if library in _PACKAGES]
    return f"install {' '.join(packages)}" if packages else "install them"
