"""A copy to share of a run, a trace or a snapshot: each file written anew from what its typed reader returns.

What may be in a copy is declared where it is read (`profkit.text_kinds`); this room walks the files. A file that no
reader knows, and what a reader does not return, does not exist in the copy.

Of a snapshot commands ask whose code a frame is and which allocations share one, so a frame stays even where its text
does not: of its path the words of `_PATH_WORD` that a rule looks for, of its name the beginnings in `_NAMES`, and for
its line a number of its own. With frames kept the file's last name, the function and the line are the recorded ones.
"""

from __future__ import annotations

import pickle
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profkit.analysis.self_check import LOSS_IN_LOG
from profkit.errors import CaptureError, UsageError
from profkit.files import collector_off, whole_folder, whole_stream
from profkit.names import MEMORY_TEXT
from profkit.reading import Kind as CaptureKind
from profkit.reading import kind_of, read_trace_file
from profkit.run import read_text, write_record
from profkit.run.compiled_code import CompiledCode, append_records, read_compiled_code
from profkit.run.directory import CEILINGS, COMPILED, FILES, LIGHT, LINES, LOG, MANIFEST, OWNERS, TRIALS, WORK, Run
from profkit.run.edits import Trials, read_trials, write_trials
from profkit.run.light_columns import read_light
from profkit.run.light_record import LightRecord, write_light_record
from profkit.run.lines import RunLines, read_run_lines, write_lines
from profkit.run.manifest import Manifest, read_manifest
from profkit.run.owners import Owners, read_owners, write_owners
from profkit.run.work import Ceilings, RunWork, read_ceilings, read_work
from profkit.snapshot.columns import MOST_FRAMES, read_frame, read_pool, write_frame
from profkit.snapshot.reader import build_snapshot
from profkit.snapshot.unpickler import load_data
from profkit.text_kinds import ALLOCATOR, LABEL, LEFT_OUT, MODULE, RANGE, WORD, Keeper, Kind, base_name
from profkit.trace.shared_copies import write_shared_export, write_shared_kineto

_NUMBER = (int, float)

# Which folders and files of torch, profkit and Python the rules for stacks look for (`profkit.analysis.memory`).
_PATH_WORD = re.compile(
    r"""site-packages | dist-packages | lib | torch | nn | optim | modules | linear | conv | sparse | normalization |
    parameter | parallel | distributed | distributed_c10d | _functional_collectives | _fully_shard | _fsdp_collectives |
    module | _dynamo | _inductor | models | profkit | capture | launch | cli | annotation | ranges | """
    r"c[a-z2-7]{51} |",
    re.VERBOSE,
)
_PYTHON = re.compile(r"python3[\d.]{0,4}t?")
_FROZEN = "<frozen"
_ENDING = re.compile(r"\.(?:py|cpp|cu|cuh|h|hpp|cc|c|so)$")
_INDUCTORS_FILE = re.compile(r"c[a-z2-7]{51}")
_ANY_WORD = "…"
_NAMES = (
    *("_init_group", "__init__", "_make_grads", "_ddp_init_helper", "_apply", "_call_impl", "empty_cache"),
    *("torch::autograd::AccumulateGrad", "c10d::", "at::cuda::getCUDABlas", "at::cuda::getCurrentCUDABlas"),
    *("at::cuda::setWorkspaceForHandle", "at::autocast::cached_cast"),
    *("torch::unwind", "torch::CapturedTraceback", "torch::cuda::", "c10::cuda::CUDACachingAllocator", "at::detail"),
)


def write_shared_snapshot(path: Path, output: Path, keeper: Keeper) -> None:
    """Write what profkit reads of the snapshot ``path`` to ``output``, gzipped if its name says so."""
    data = load_data(path)
    build_snapshot(path, data)  # refuses what no command reads
    if isinstance(data, list):
        data = {"segments": data}
    with collector_off():
        copy = _SnapshotCopy(keeper).take(_SNAPSHOT, data)
    with whole_stream(output) as file:
        pickle.dump(copy, file, protocol=4)


class _SnapshotCopy:
    """Copies records by what is declared of them; frames that many stacks share stay shared."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._frames: dict[int, dict[str, Any]] = {}
        self._lists: dict[int, list[dict[str, Any]]] = {}

    def take(self, declared: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        copy = {}
        for key, kind in declared.items():
            value = record.get(key)
            if isinstance(kind, Kind):
                value = self.keeper.text_or_none(kind, value)
            elif isinstance(kind, type | tuple):
                value = value if isinstance(value, kind) else None
            else:
                value = kind(self, value)
            if value is not None:
                copy[key] = value
        return copy

    def frames(self, frames: object) -> list[dict[str, Any]]:
        if not isinstance(frames, list):
            return []
        if id(frames) not in self._lists:
            some = frames[:MOST_FRAMES]
            self._lists[id(frames)] = [self._frame(frame) for frame in some if isinstance(frame, dict)]
        return self._lists[id(frames)]

    def _frame(self, frame: dict[str, Any]) -> dict[str, Any]:
        place = id(frame)
        if place not in self._frames:
            self._frames[place] = write_frame([self._line(*line) for line in read_frame(frame)])
        return self._frames[place]

    def _line(self, name: str, file: str, line: int) -> tuple[str, str, int]:
        folders, _, last = file.rpartition("/")
        if self.keeper.keep_frames:
            return name, "/".join([*_known_words(folders), base_name(last)]) if last not in ("", "??") else last, line
        known = next((beginning for beginning in _NAMES if name.startswith(beginning)), LEFT_OUT)
        is_inductors = _INDUCTORS_FILE.fullmatch(last.removesuffix(".py")) is not None
        return known, _known_path(file), line if is_inductors else self.keeper.number_of_line(file, line, name)


def _known_path(file: str) -> str:
    if file in ("", "??"):
        return file
    ending = _ENDING.search(file)
    stem = file[: ending.start()] if ending else file
    return "/".join(_known_words(stem)) + (ending[0] if ending else "")


def _known_words(path: str) -> list[str]:
    words: list[str] = []
    for word in path.split("/"):
        known = _known_word(word)
        if known != _ANY_WORD or words[-1:] != [_ANY_WORD]:
            words.append(known)
    return words


def _known_word(word: str) -> str:
    if _PATH_WORD.fullmatch(word):
        return word
    if _PYTHON.fullmatch(word):
        return "python3"
    beginnings = (_FROZEN, "fx_generated_", "<eval_with_key>", "_")
    return next((beginning for beginning in beginnings if word.startswith(beginning)), _ANY_WORD)


def _metadata(copy: _SnapshotCopy, value: object) -> str | dict[str, str] | None:
    """Return the text that an allocation carries: profkit's own names a phase and a module."""
    keeper = copy.keeper
    if isinstance(value, dict):
        pairs = ((key, text) for key, text in value.items() if isinstance(key, str) and isinstance(text, str))
        return {keeper.text(LABEL, key): keeper.text(LABEL, text) for key, text in pairs}
    if not isinstance(value, str):
        return None
    if not value.startswith(MEMORY_TEXT):
        return keeper.text(LABEL, value)
    phase, colon, module = value.removeprefix(MEMORY_TEXT).partition(":")
    return f"{MEMORY_TEXT}{keeper.text(RANGE, phase)}{colon}{keeper.text(MODULE, module)}"


def _truth(_: _SnapshotCopy, value: object) -> bool:
    return bool(value)


def _divisions(_: _SnapshotCopy, value: object) -> dict[str, int]:
    pairs = value.items() if isinstance(value, dict) else ()
    return {key: count for key, count in pairs if isinstance(key, str) and key.isdecimal() and isinstance(count, int)}


def _records(declared: Mapping[str, Any]) -> Callable[[_SnapshotCopy, Any], list[dict[str, Any]]]:
    def copy_records(copy: _SnapshotCopy, records: object) -> list[dict[str, Any]]:
        listed = records if isinstance(records, list) else []
        return [copy.take(declared, record) for record in listed if isinstance(record, dict)]

    return copy_records


# Key → the kind of its text, the type of its number, or what makes the copy of anything else.
_STACKS: Mapping[str, Any] = {
    "frames": _SnapshotCopy.frames,
    "forward_frames": lambda copy, value: copy.frames(value) or None,
}
_EVENT: Mapping[str, Any] = {
    "action": WORD,
    **dict.fromkeys(("addr", "device_free", "size", "stream", "time_us"), int),
    "pool_id": lambda _, value: read_pool(value),
    "user_metadata": _metadata,
    **_STACKS,
}
_BLOCK: Mapping[str, Any] = {
    **dict.fromkeys(("address", "size", "requested_size"), int),
    "state": WORD,
    "user_metadata": _metadata,
    **_STACKS,
}
_SEGMENT: Mapping[str, Any] = {
    **dict.fromkeys(("device", "address", "total_size", "stream"), int),
    "segment_type": WORD,
    "is_expandable": _truth,
    "segment_pool_id": lambda _, value: read_pool(value),
    "blocks": _records(_BLOCK),
}
_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), ALLOCATOR),
    "expandable_segments": _truth,
    "max_split_size": int,
    "garbage_collection_threshold": _NUMBER,
    "roundup_power2_divisions": _divisions,
}
_MARK: Mapping[str, Any] = {
    "stage": lambda _, value: value if value == "START" else "END",
    "name": RANGE,
    "time_us": int,
    "device": int,
}
_SNAPSHOT: Mapping[str, Any] = {
    "segments": _records(_SEGMENT),
    "device_traces": lambda copy, traces: [_records(_EVENT)(copy, trace) for trace in traces or ()],
    "allocator_settings": lambda copy, value: copy.take(_SETTINGS, value) if isinstance(value, dict) else None,
    "external_annotations": _records(_MARK),
}


_WRITERS: dict[CaptureKind, Callable[[Path, Path, Keeper], None]] = {
    "export": write_shared_export,
    "chrome": write_shared_kineto,
    "snapshot": write_shared_snapshot,
}
_OF_RANK = re.compile(r"\.rank\d+(?=\.)")
_NOT_COPIED = {".nsys-rep": "nsys's own report, which holds the environment; its export is copied"}


@dataclass(frozen=True)
class TypedFile:
    """A JSON file of a run: its type, whose texts are declared, its reader and its writer."""

    kind: Any
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
    TRIALS: TypedFile(tuple[Trials, ...], read_trials, write_trials),
    LIGHT: TypedFile(LightRecord, read_light, write_light_record),
}
"""The name of a file, without its rank → how it is copied. Captures and the log are copied by rules of their own."""


@dataclass(frozen=True)
class SharedCopy:
    """What was written, and what of a run was not and why; the kinds of ``captures``; by their kind the names that
    stay.
    """

    source: str
    output: str
    files: tuple[str, ...]
    captures: tuple[CaptureKind, ...]
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
    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.files: list[str] = []
        self.captures: list[CaptureKind] = []
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
            record = file.read(path)
            if name == WORK and not self.keeper.keep_frames:
                record = replace(record, lines=())
            file.write(output, self.keeper.record(file.kind, record))
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
