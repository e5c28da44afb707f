"""Nsight Systems from outside: where it is, which version, and how it is called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from profkit.errors import ToolError
from profkit.launch.nsys_options import Abilities, NsysOptions

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
    """An nsys that starts: where it is, its version in its own words (``2023.4.4.54-234433681190v0``), its use.

    ``abilities`` are what it knows, ``options`` what it is to do.
    """

    path: Path
    version: str
    abilities: Abilities = field(default_factory=Abilities)
    options: NsysOptions = field(default_factory=NsysOptions)


def find_nsys(environment: Mapping[str, str], root: Path = Path("/")) -> Nsys | None:
    """Return the nsys to use: ``$NSYS``, the one on PATH, or the newest in the usual places under ``root``; or None.

    Raises:
        ToolError: ``$NSYS`` is no program, or the nsys that was found does not start.
    """
    named = environment.get("NSYS")
    if named is not None:
        found = shutil.which(named, path=environment.get("PATH"))
        if found is None:
            raise ToolError(f"$NSYS is {named}, which is no program that can be run; correct it or unset it")
        return _started(Path(found))
    on_path = shutil.which("nsys", path=environment.get("PATH", os.defpath))
    if on_path is not None:
        return _started(Path(on_path))
    installed = list_installed(root)
    return _started(installed[0]) if installed else None


def list_installed(root: Path = Path("/")) -> list[Path]:
    """Return every nsys in the usual places under ``root``, the one to use first."""
    found: list[Path] = []
    for place in _PLACES:
        candidates = [path for path in root.glob(place) if os.access(path, os.X_OK)]
        found += sorted(candidates, key=_version_in_path, reverse=True)
    return found


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
    the NVTX ranges are those of the whole process. The CPU is not sampled: it would slow the steps. Flags that this
    nsys does not know are left out.

    Args:
        temporary: the target's own TMPDIR, for nsys is to be given one that can be thrown away.
    """
    options = nsys.options
    traces = [trace for trace in options.traces if cuda or not trace.startswith("cu")]
    flags = [f"--trace={','.join(traces)}"]
    given = {word.partition("=")[0] for word in options.extra}
    if not given & {"--sample", "-s"}:
        flags.append("--sample=none")
    if "--cpuctxsw" not in given:
        flags.append("--cpuctxsw=none")
    if cuda:
        flags += [f"--cuda-graph-trace={options.cuda_graph_trace}"] if "cuda" in traces else []
        flags += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    flags = [flag for flag in flags if nsys.abilities.has(flag.partition("=")[0])]
    # In the name of a report % stands for the host, the process and the like.
    output = str(report).replace("%", "%%")
    own = [*flags, f"--env-var=TMPDIR={temporary}", f"--output={output}"]
    return [str(nsys.path), "profile", *own, *options.extra, *target]


def build_export_argv(nsys: Path, report: Path, export: Path) -> list[str]:
    """Return the command that exports ``report`` to the SQLite file ``export``."""
    return [str(nsys), "export", "--type=sqlite", "--quiet=true", f"--output={export}", str(report)]


def parse_version(text: str) -> str | None:
    """Return the version in the answer to ``nsys --version``, or None if there is none."""
    found = re.search(r"version (\d[\w.\-]*)", text)
    return found[1] if found else None


def _started(path: Path) -> Nsys:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{path}: nsys does not start: {error}") from None
    version = parse_version(done.stdout)
    if done.returncode != 0 or version is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolError(f"{path}: nsys does not start: {said[-1] if said else f'exit status {done.returncode}'}")
    return Nsys(path, version)


def _version_in_path(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path.parent))]
