"""Copies that can be shared: of a trace of either source, of a memory snapshot, and of a whole run directory.

The recorded events stay as they are; what is about the person and the machine goes. `profkit.trace.scrub` holds the
rules for texts and for the tables of an nsys export.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

from profkit.errors import CaptureError, UsageError
from profkit.files import whole_file, write_json
from profkit.reading import kind_of
from profkit.run.directory import MANIFEST, NSYS_EXPORT, Run
from profkit.run.records import read_json
from profkit.snapshot.unpickler import load_data
from profkit.trace.kineto_events import load_chrome_trace
from profkit.trace.scrub import TAKEN, ScrubResult, Taken, clean_text, holds_a_path, scrub_export, what_is_named

_GZIP = b"\x1f\x8b"

# JSON that profkit wrote itself into a run.
_RUN_FILES = ("work.", "ceilings.", "ledger.", "compiled.", "light.")
_COMMAND_LINES = {"command", "argv"}
_LEFT_OUT = ("gpu_uuid", "job")
"""Keys of a manifest: a job's rendezvous names a host."""
_NOT_SHARED = {".nsys-rep": "the report, which holds the environment", ".txt": "the profiler's log"}

# A text in JSON, and the colon after it if it is a key.
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')
# Whatever has none of these is no path, environment or identifier.
_SUSPECT = re.compile(r"[/\\\\=:-]")
_PYTHON_FUNCTION = re.compile(r"(?P<path>[^\s()]+\.py)(?P<line>\(\d+\): .*)", re.DOTALL)
# Of compiled code: "/home/a/model.py:12 forward", or "Model.forward /home/a/model.py:12".
_SOURCE_LINE = re.compile(r"(?P<before>(?:[\w.<>]+ )?)(?P<path>/[^:]+\.py)(?P<line>:\d+(?: [\w.<>]+)?)")
_INSTALLED = re.compile(r".*/(?=(?:site|dist)-packages/|lib/python\d|torchinductor_)")


def scrub(source: Path, output: Path) -> ScrubResult:
    """Write a copy of a trace, a snapshot or a run directory to ``output``, which appears whole or not at all.

    Of a run directory an ``output`` named ``….sqlite`` is a copy of its nsys export; any other is a new directory with
    copies of all files but nsys's report and log.

    Raises:
        CaptureError: the source cannot be read, or is none of these.
        RunError: a directory is no run, or a file of it is damaged.
        OSError: the copy cannot be written.
    """
    if not source.is_dir():
        return _scrub_file(source, output)
    run = Run(source)
    if output.suffix == ".sqlite":
        if run.rank_traces:
            names = ", ".join(path.name for path in run.rank_traces.values())
            raise UsageError(f"{source}: each rank has a trace of its own: name one of {names}, or a new directory")
        return scrub_export(run.find_trace(), output)
    taken, kept = [], 0
    with _whole_folder(output) as partial:
        for path in filter(Path.exists, run.files):
            if path.suffix in _NOT_SHARED:
                taken.append(Taken(_NOT_SHARED[path.suffix], path.name, 1))
                continue
            result = _scrub_file(path, partial / path.name)
            taken += result.taken
            kept += result.kept_path_count
    return ScrubResult(str(source), str(output), tuple(taken), kept)


@contextmanager
def _whole_folder(output: Path) -> Iterator[Path]:
    partial = output.with_name(f".profkit-{os.getpid()}-{output.name}")
    partial.mkdir(mode=0o700, parents=True)
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(output)
    finally:
        if partial.exists():
            for left in partial.iterdir():
                left.unlink()
            partial.rmdir()


def _scrub_file(path: Path, output: Path) -> ScrubResult:
    kind = kind_of(path)
    if kind == "export" or path.name == NSYS_EXPORT:
        return scrub_export(path, output)
    texts = _Texts(path.name)
    if path.name == MANIFEST:
        write_json(output, _scrub_manifest(read_json(path), texts))
    elif kind == "snapshot" or path.name.endswith((".pickle", ".pickle.gz")):
        _scrub_snapshot(path, output, texts)
    elif path.name.startswith(_RUN_FILES):
        _rewrite_lines(path, output, texts)
    elif kind == "chrome":
        load_chrome_trace(path)  # refuses what is none
        _rewrite_lines(path, output, texts)
    else:
        raise CaptureError(f"{path}: no nsys export, torch.profiler trace, memory snapshot or run directory")
    return ScrubResult(str(path), str(output), texts.result(), texts.kept_paths)


_what_is_named = cache(what_is_named)


class _Texts:
    """Cleans texts one by one, and counts what it removed."""

    def __init__(self, file: str) -> None:
        self.kept_paths = 0
        self._file = file
        self._taken: Counter[str] = Counter()
        self._key = ""

    def result(self) -> tuple[Taken, ...]:
        return tuple(Taken(what, self._file, count) for what, count in sorted(self._taken.items()))

    def note(self, what: str, count: int) -> None:
        """Note that ``count`` texts were removed because they were ``what``."""
        if count:
            self._taken[what] += count

    def clean(self, text: str) -> str:
        """Return the text without paths, environment and identifiers."""
        cleaned, what = clean_text(text, None)
        if what is not None:
            self._taken[what] += 1
        return cleaned

    def in_json(self, match: re.Match[str]) -> str:
        """Return a text of a JSON document, cleaned: keys and the names of events stay."""
        literal, colon = match.groups()
        if colon:
            self._key = literal
            return match[0]
        named = _what_is_named(self._key)
        if named is not None and literal:
            self._taken[named] += 1
            return f'"{TAKEN}"'
        if not _SUSPECT.search(literal):
            return match[0]
        text = json.loads(match[0], strict=False)
        source = _SOURCE_LINE.fullmatch(text)
        if source is not None:
            return json.dumps(source["before"] + self.file_name(source["path"]) + source["line"])
        cleaned = self._of_event(text) if self._key == "name" else self.clean(text)
        return match[0] if cleaned == text else json.dumps(cleaned)

    def _of_event(self, name: str) -> str:
        function = _PYTHON_FUNCTION.fullmatch(name)
        if function is not None:  # torch.profiler with stacks: "/home/a/train.py(12): main"
            return self.file_name(function["path"]) + function["line"]
        self.kept_paths += holds_a_path(name)
        return name

    def file_name(self, path: str) -> str:
        """Return a source file's path from the installed package on, else its last name alone."""
        shared = _INSTALLED.sub("", path)
        if shared == path and path.startswith("/"):
            shared = f"{TAKEN}/{Path(path).name}"
        if shared != path:
            self._taken["paths"] += 1
        return shared


def _rewrite_lines(path: Path, output: Path, texts: _Texts) -> None:
    """Copy a JSON file line by line (no text in JSON spans two lines), gzipped if it was."""
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == _GZIP
    opened: Callable[..., IO[bytes]] = gzip.open if is_gzip else open  # type: ignore[assignment]
    with opened(path, "rb") as source, whole_file(output) as partial, opened(partial, "wb") as target:
        for line in source:
            text = line.decode("utf-8", "surrogateescape")
            target.write(_TEXT.sub(texts.in_json, text).encode("utf-8", "surrogateescape"))


def _scrub_manifest(manifest: Any, texts: _Texts) -> Any:
    if isinstance(manifest, dict):
        lines = _COMMAND_LINES if manifest.get("kind") == "model" else {*_COMMAND_LINES, "target"}
        gone = {key: TAKEN if isinstance(manifest[key], str) else [TAKEN] for key in lines & manifest.keys()}
        texts.note("command line", len(gone))
        kept = {key: value for key, value in manifest.items() if key not in _LEFT_OUT}
        return {key: gone.get(key) or _scrub_manifest(value, texts) for key, value in kept.items()}
    if isinstance(manifest, list):
        return [_scrub_manifest(value, texts) for value in manifest]
    return texts.clean(manifest) if isinstance(manifest, str) else manifest


def _scrub_snapshot(path: Path, output: Path, texts: _Texts) -> None:
    """Copy a memory snapshot with file names in its stacks that tell no directory."""
    data = load_data(path)
    if not isinstance(data, dict) or "segments" not in data:
        raise UsageError(f"{path}: a pickle, but not of a memory snapshot")
    names: dict[str, str] = {}
    waiting: list[Any] = [data]
    while waiting:
        one = waiting.pop()
        values = one.values() if isinstance(one, dict) else one
        waiting += [value for value in values if isinstance(value, dict | list)]
        if isinstance(one, dict) and isinstance(one.get("filename"), str):
            name = one["filename"]
            if name not in names:
                names[name] = texts.file_name(name)
            one["filename"] = names[name]
    opened: Callable[..., IO[bytes]] = gzip.open if path.suffix == ".gz" else open  # type: ignore[assignment]
    with whole_file(output) as partial, opened(partial, "wb") as file:
        pickle.dump(data, file, protocol=4)
