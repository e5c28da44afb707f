"""A copy to share of a run, a trace or a snapshot: each file written anew from what its typed reader returns.

What may be in a copy is declared where it is read (`profkit.text_kinds`); this room walks the files. A file that no
reader knows, and what a reader does not return, does not exist in the copy.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profkit.analysis.self_check import LOSS_IN_LOG
from profkit.errors import CaptureError, UsageError
from profkit.files import whole_folder
from profkit.reading import Kind, kind_of, read_trace_file
from profkit.run import read_text, write_record
from profkit.run.compiled_code import CompiledCode, append_records, read_compiled_code
from profkit.run.directory import CEILINGS, COMPILED, FILES, LIGHT, LINES, LOG, MANIFEST, OWNERS, TRIALS, WORK, Run
from profkit.run.edits import RunTrials, read_trials, write_trials
from profkit.run.light_columns import read_light
from profkit.run.light_record import LightRecord, write_light_record
from profkit.run.lines import RunLines, read_run_lines, write_lines
from profkit.run.manifest import Manifest, read_manifest
from profkit.run.owners import Owners, read_owners, write_owners
from profkit.run.work import Ceilings, RunWork, read_ceilings, read_work
from profkit.snapshot.shared_copy import write_shared_snapshot
from profkit.text_kinds import Keeper
from profkit.trace.shared_copies import write_shared_export, write_shared_kineto

_WRITERS: dict[Kind, Callable[[Path, Path, Keeper], None]] = {
    "export": write_shared_export,
    "chrome": write_shared_kineto,
    "snapshot": write_shared_snapshot,
}
_OF_RANK = re.compile(r"\.rank\d+(?=\.)")
_NOT_COPIED = {".nsys-rep": "nsys's own report, which holds the environment; its export is copied"}


@dataclass(frozen=True)
class TypedFile:
    """A JSON file of a run: its type, whose texts are declared, its reader and its writer."""

    kind: type
    read: Callable[[Path], Any]
    write: Callable[[Path, Any], None]


def _write_compiled(path: Path, code: CompiledCode) -> None:
    append_records(path, [*code.graphs, *code.captured, *code.compilations, *code.breaks])


RUN_FILES = {
    MANIFEST: TypedFile(Manifest, read_manifest, write_record),
    WORK: TypedFile(RunWork, read_work, write_record),
    CEILINGS: TypedFile(Ceilings, read_ceilings, write_record),
    OWNERS: TypedFile(Owners, read_owners, write_owners),
    COMPILED: TypedFile(CompiledCode, read_compiled_code, _write_compiled),
    LINES: TypedFile(RunLines, read_run_lines, write_lines),
    TRIALS: TypedFile(RunTrials, read_trials, write_trials),
    LIGHT: TypedFile(LightRecord, read_light, write_light_record),
}
"""The name of a file, without its rank → how it is copied. Captures and the log are copied by rules of their own."""


@dataclass(frozen=True)
class SharedCopy:
    """What was written, and what of a run was not and why; by their kind the names that stay.

    ``captures`` are the kinds of captures in the copy.
    """

    source: str
    output: str
    files: tuple[str, ...]
    captures: tuple[Kind, ...]
    left_out_files: dict[str, str]
    names: dict[str, tuple[str, ...]]
    left_out_text_count: int


def share(source: Path, output: Path, *, keep_frames: bool = False, rename_ranges: bool = False) -> SharedCopy:
    """Write a copy of a trace, a snapshot or a run directory to ``output``, which appears whole or not at all.

    Of a run directory an ``output`` named ``….sqlite`` is a copy of its nsys export; any other is a new directory. The
    source is only read, and no link in it is followed. ``keep_frames`` keeps the file's last name, the line and the
    function of frames and source lines; ``rename_ranges`` puts numbers in place of the words in names of ranges,
    modules and tensors.

    Raises:
        CaptureError: the source cannot be read, or is none of these.
        RunError: a directory is no run, or a file of it is damaged.
        OSError: the copy cannot be written.
    """
    writer = _Writer(Keeper(keep_frames=keep_frames, rename_ranges=rename_ranges))
    if not source.is_dir():
        writer.write(source, output)
    elif output.suffix == ".sqlite":
        writer.write(_only_export(Run(source)), output)
    else:
        writer.write_run(Run(source), output)
    names = {title: tuple(sorted(names)) for title, names in sorted(writer.keeper.names.items())}
    return SharedCopy(
        str(source),
        str(output),
        tuple(writer.files),
        tuple(dict.fromkeys(writer.captures)),
        writer.left_out,
        names,
        writer.keeper.left_out_count,
    )


def _only_export(run: Run) -> Path:
    if run.rank_traces:
        names = ", ".join(path.name for path in run.rank_traces.values())
        raise UsageError(f"{run.path}: each rank has a trace of its own: name one of {names}, or a new directory")
    return run.find_trace()


class _Writer:
    """Writes the files of one copy, and notes which."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.files: list[str] = []
        self.captures: list[Kind] = []
        self.left_out: dict[str, str] = {}

    def write_run(self, run: Run, output: Path) -> None:
        with whole_folder(output) as partial:
            for path in sorted(run.path.iterdir()):
                why = self._why_not_copied(path)
                if why is None:
                    self.write(path, partial / path.name)
                else:
                    self.left_out[path.name] = why

    def _why_not_copied(self, path: Path) -> str | None:
        name = _OF_RANK.sub("", path.name)
        if name not in FILES:
            return "no file that a command reads"
        if not stat.S_ISREG(path.lstat().st_mode):
            return "no regular file"
        if name == LINES and not self.keeper.keep_frames:
            return "lines of source, which --keep-frames keeps"
        return _NOT_COPIED.get(path.suffix)

    def write(self, path: Path, output: Path) -> None:
        name = _OF_RANK.sub("", path.name)
        if name in RUN_FILES:
            file = RUN_FILES[name]
            file.write(output, self.keeper.record(file.kind, file.read(path)))
        elif name == LOG:
            # All that is read of it is whether it tells of a loss.
            losses = LOSS_IN_LOG.finditer(read_text(path, errors="replace"))
            output.write_text("".join(match[0] + "\n" for match in losses))
        else:
            self._write_capture(path, output)
        self.files.append(path.name)

    def _write_capture(self, path: Path, output: Path) -> None:
        kind = kind_of(path)
        if kind is None:
            raise CaptureError(f"{path}: no nsys export, torch.profiler trace, memory snapshot or run directory")
        if kind != "snapshot":
            read_trace_file(path)  # refuses what no command reads
        _WRITERS[kind](path, output, self.keeper)
        self.captures.append(kind)
