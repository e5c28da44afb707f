"""Writing files so that each appears whole or not at all, and reading large ones: within memory, and without scans."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

HALF_WRITTEN = ".profkit-"
"""How the name of a file begins that is not whole yet."""
PARTIAL = "partial."
"""How the name of a file of a run begins that a process is still writing."""

GZIP_RATIO = 24
"""How many times its size a zipped capture may take in memory for what an unzipped one takes once: real ones shrink to
a tenth or a twentieth."""

LEAST_MEMORY_BYTES = 3 * 2**29
"""Every reader may use this much, however small its file is."""


@contextmanager
def whole_file(path: Path, *, mode: int | None = None) -> Iterator[Path]:
    """Yield a name beside ``path`` to write to; when the block has gone well, that file takes the place of ``path``.

    Whatever happens, a reader sees the old file, the new one, or none. The name keeps the ending of ``path``, which
    some programs insist on. A link is followed: the file that it names is replaced, not the link. Nothing need be
    written: then ``path`` stays as it was. Permissions are by default those of the file that is replaced, else what the
    umask leaves.

    Raises:
        OSError: it cannot be written; ``filename`` is ``path``.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(
        f"{HALF_WRITTEN}{os.getpid()}-{os.urandom(4).hex()}{''.join(target.suffixes[-2:])[-32:]}"
    )
    try:
        try:
            yield partial
            if partial.exists():
                partial.chmod(_mode_of(target) if mode is None else mode)
                partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.filename in (None, str(partial), partial):
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def whole_stream(path: Path) -> Iterator[IO[bytes]]:
    """Yield a stream of bytes that becomes ``path`` as `whole_file` says, gzipped if its name ends so."""
    import gzip

    opened: Any = gzip.open if path.suffix == ".gz" else open
    with whole_file(path) as partial, opened(partial, "wb") as file:
        yield file


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path``, to be filled; when the block has gone well, it becomes ``path``.

    Raises:
        OSError: it cannot be made.
    """
    import shutil

    partial = path.with_name(f"{HALF_WRITTEN}{os.getpid()}-{path.name}")
    partial.mkdir(mode=0o700, parents=True)
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def user_cache(*parts: str) -> Path:
    """Return a place in profkit's folder in the user's cache: all of it may be deleted at any time.

    Of a user without a home, as containers have, nothing can be kept: no such place can be made.
    """
    from platformdirs import user_cache_path  # the analysis seldom needs it

    try:
        folder = user_cache_path("profkit")
    except RuntimeError:  # some versions of platformdirs say so, others return a path in the working directory
        folder = Path()
    return (folder if folder.is_absolute() else Path(os.devnull)).joinpath(*parts)


def write_whole(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write ``data`` to ``path`` as `whole_file` does; a pipe or a device is written to as it is."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with whole_file(path, mode=mode) as partial, partial.open("xb") as file:
        file.write(data)
        file.flush()
        # Without this a power cut could leave the new name on an empty file.
        os.fsync(file.fileno())


def write_json(path: Path, content: Any, *, mode: int | None = None) -> None:
    """Write ``content`` as indented JSON to ``path`` as `whole_file` does, ``mode`` being its permissions."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode(), mode=mode)


def write_new_json(path: Path, content: Any, *, mode: int | None = None) -> None:
    """Write ``content`` as `write_json` does unless ``path`` exists: of several who try at once one succeeds.

    Raises:
        FileExistsError: it does.
        OSError: it cannot be written.
    """
    draft = path.with_name(f"{HALF_WRITTEN}{os.getpid()}-{os.urandom(4).hex()}-{path.name}")
    write_json(draft, content, mode=mode)
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a disk without links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch cyclic garbage collection off within this block: what is read is very many containers and no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def bounded_memory(byte_count: int) -> Iterator[None]:
    """Let the process grow by no more than this, or `LEAST_MEMORY_BYTES`, within the block; then a MemoryError comes.

    A damaged file can ask for any amount in a few bytes, and without a limit it exhausts the machine. Only Linux
    reports the present size and enforces such a limit.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = in_use + max(byte_count, LEAST_MEMORY_BYTES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def clear_partial_files(folder: Path) -> None:
    """Remove from ``folder`` what writers that were killed left half written."""
    for left in folder.glob(f"{HALF_WRITTEN}*"):
        left.unlink(missing_ok=True)


def _mode_of(path: Path) -> int:
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
