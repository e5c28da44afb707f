"""How what torch.profiler leaves becomes the traces of a run, once the program has ended.

Each process leaves a plain Chrome trace, and, where CUDA's activities alone were recorded, its log of ranges beside it.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

from profkit.errors import RunError
from profkit.files import PARTIAL, collector_off, whole_file
from profkit.run.directory import LOG
from profkit.run.range_log import RangeLogError, join_ranges, read_range_log

_PLAIN, _LOG = ".json", ".ranges"
_LEVEL = 6
"""How hard traces are zipped: the highest level takes three times as long for 2 % of the size."""


def plain_beside(path: Path) -> Path:
    """Return where a process leaves the plain trace that becomes ``path``."""
    return path.with_name(f"{PARTIAL}{path.name}{_PLAIN}")


def log_beside(path: Path) -> Path:
    """Return where a process leaves the log of ranges that belongs to it."""
    return path.with_name(f"{PARTIAL}{path.name}{_LOG}")


def finish_traces(run: Path) -> dict[str, str]:
    """Make the traces that processes left unfinished, for they were killed.

    Return why there is no trace, by the name that it would have, for each that was refused.

    Raises:
        RunError: a trace cannot be written.
    """
    refused: dict[str, str] = {}
    for plain in sorted(run.glob(f"{PARTIAL}trace.*{_PLAIN}")):
        path = plain.with_name(plain.name.removeprefix(PARTIAL).removesuffix(_PLAIN))
        try:
            finish_trace(path)
        except RangeLogError as error:
            refused[path.name] = str(error)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; free some space, or name another directory with -o") from None
    return refused


def finish_trace(path: Path) -> None:
    """Make the trace ``path`` of what a process left for it, and say in the run's log how clocks fit, if there are two.

    Raises:
        RangeLogError: the trace and the log of ranges do not fit together.
        OSError: the trace cannot be written; ``filename`` is ``path``.
    """
    plain, log = plain_beside(path), log_beside(path)
    try:
        if log.exists():
            _join(plain, log, path)
        else:
            with whole_file(path) as partial, plain.open("rb") as source, gzip.open(partial, "wb", _LEVEL) as target:
                shutil.copyfileobj(source, target)
    finally:
        plain.unlink()
        log.unlink(missing_ok=True)


def _join(plain: Path, log: Path, path: Path) -> None:
    with collector_off():
        trace = json.loads(plain.read_bytes())
        fit = join_ranges(trace, read_range_log(log))
        with whole_file(path) as partial, gzip.open(partial, "wt", _LEVEL, encoding="utf-8") as target:
            json.dump(trace, target)
    with path.with_name(LOG).open("a", encoding="utf-8") as said:
        said.write(f"{path.name}: {fit}\n")
