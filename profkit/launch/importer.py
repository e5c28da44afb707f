"""The second half of nsys, called by hand: where its host part was not found, nsys leaves a raw ``.qdstrm``.

Nsight Compute's nsys does so, and so does Debian's layout. QdstrmImporter turns the raw file into the report.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from profkit.errors import ToolError
from profkit.launch.processes import run_tool

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
_NEEDED_BY = {"libdw.so.1": ("libelf.so.1",)}

_TRIES = 3
"""How often a raw file is imported: where six ran at once, that of nsys 2023.4.4 failed in 1 of 300 cases."""


def find_importer(nsys: Path, root: Path = Path("/")) -> Path | None:
    """Return the QdstrmImporter nearest to ``nsys``, or None."""
    installation = nsys.resolve().parent.parent
    near = sorted(installation.glob("*/QdstrmImporter"))
    far = [path for place in _HOST_FOLDERS for path in sorted(root.glob(f"{place}/QdstrmImporter"), reverse=True)]
    return next((path for path in near + far if os.access(path, os.X_OK)), None)


def import_raw(raw: Path, report: Path, nsys: Path, log: IO[bytes]) -> None:
    """Turn ``raw`` (``.qdstrm``) into ``report`` (``.nsys-rep``) and remove it.

    Raises:
        ToolError: there is no importer, libraries that it needs are missing (they and their packages are named), or it
            failed.
    """
    importer = find_importer(nsys)
    if importer is None:
        raise ToolError(f"{nsys} left {raw} and there is no QdstrmImporter to import it; install all of Nsight Systems")
    missing = lacking_libraries(importer)
    if missing:
        cure = how_to_install(missing)
        raise ToolError(f"{importer} lacks {', '.join(missing)}: {cure} and run again; the raw capture is {raw}")
    for _ in range(_TRIES):
        status = run_tool(build_import_argv(importer, raw, report), os.environ, log)
        if status == 0 and report.exists():
            raw.unlink()
            return
        report.unlink(missing_ok=True)
    raise ToolError(f"{importer} could not import {raw} (exit status {status}); its output is in {log.name}")


def build_import_argv(importer: Path, raw: Path, report: Path) -> list[str]:
    """Return the command that imports ``raw`` as ``report``."""
    return [str(importer), f"--input-file={raw}", f"--output-file={report}"]


def lacking_libraries(importer: Path) -> list[str]:
    """Return the libraries that the importer needs and the dynamic loader does not find."""
    return missing_libraries(_loader_listing(importer), _is_here)


def how_to_install(missing: Sequence[str]) -> str:
    """Return which packages to install for missing libraries, as far as their names are known."""
    packages = [_PACKAGES[library] for library in missing if library in _PACKAGES]
    return f"install {' '.join(packages)}" if packages else "install them"


def missing_libraries(listing: str, is_here: Callable[[str], bool]) -> list[str]:
    """Return the libraries that the dynamic loader's listing (what ldd prints) says it did not find.

    The loader cannot look into a library that is missing; what that one needs and lacks is added.
    """
    missing = list(dict.fromkeys(re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE)))
    needed = [inner for library in missing for inner in _NEEDED_BY.get(library, ()) if inner not in missing]
    return missing + [inner for inner in needed if not is_here(inner)]


def _is_here(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _loader_listing(program: Path) -> str:
    environment = {**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    command: Sequence[str] = [str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout
