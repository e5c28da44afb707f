"""Read a pickle as data only: no global may be named in it, so nothing in it can run.

A pickle is a program for a small machine. It is dangerous because it may name any importable object and call it. A
snapshot of PyTorch's allocator holds dictionaries, lists, tuples, strings and numbers and names no object, so this
reader stops at the first global, persistent id or extension code.
"""

from __future__ import annotations

import gc
import gzip
import io
import pickle
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from profkit.errors import SnapshotError

MAX_DECOMPRESSED_BYTES = 4 * 2**30
"""A ``.pickle.gz`` may not decompress to more than this."""

_GZIP_MAGIC = b"\x1f\x8b"
# One byte of a pickle can build an empty dictionary of 64 bytes and a pointer to it; real snapshots take a twelfth.
_MAX_MEMORY_PER_BYTE = 80
_MEMORY_SLACK_BYTES = 2**30
# Snapshots repeat themselves and shrink to a twentieth.
_GZIP_RATIO = 32


class _RefusedError(Exception):
    """The pickle asks for something that is no data."""


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise _RefusedError(f"it names the Python object {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _RefusedError("it refers to an object outside itself")


class _BoundedReader(io.RawIOBase):
    """A stream that refuses to yield more than ``limit`` bytes."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self._stream = stream
        self._left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise _RefusedError(f"it decompresses to more than {MAX_DECOMPRESSED_BYTES // 2**30} GiB")
        buffer[: len(data)] = data
        return len(data)


def load_data(path: Path) -> Any:
    """Return the data in a pickle file, plain or gzipped, without running anything in it.

    Raises:
        SnapshotError: the file is missing, unreadable, empty, cut off, no pickle, names a global, or decompresses
            to more than `MAX_DECOMPRESSED_BYTES`.
    """
    try:
        # Opening a pipe blocks until somebody writes to it, and its size is not known.
        if not stat.S_ISREG((status := path.stat()).st_mode) and not stat.S_ISDIR(status.st_mode):
            raise SnapshotError(f"{path}: not a regular file; write the snapshot to a file and give that")
        with path.open("rb") as file:
            head = file.peek(2)[:2]
            if not head:
                raise SnapshotError(f"{path}: empty file; was the dump interrupted?")
            is_gzip = head == _GZIP_MAGIC
            with collector_off(), _bounded_memory(status.st_size * (_GZIP_RATIO if is_gzip else 1)):
                return _load(file, is_gzip)
    except FileNotFoundError:
        raise SnapshotError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise SnapshotError(f"{path}: a directory, not a snapshot") from None
    except PermissionError:
        raise SnapshotError(f"{path}: permission denied") from None
    except _RefusedError as error:
        raise SnapshotError(f"{path}: refused: {error}; a memory snapshot holds data only") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise SnapshotError(f"{path}: cut off or damaged; dump or copy it again") from None
    except MemoryError:
        raise SnapshotError(f"{path}: damaged, or too large for this machine's memory") from None
    except SnapshotError:
        raise
    except Exception as error:
        # Bad input raises whatever the unpickler's operations raise: UnpicklingError, but also ValueError,
        # IndexError, TypeError, KeyError, UnicodeDecodeError, AttributeError, OverflowError.
        if isinstance(error, pickle.UnpicklingError) and "truncated" in str(error):
            raise SnapshotError(f"{path}: cut off; dump or copy it again") from None
        if isinstance(error, OSError):
            raise SnapshotError(f"{path}: {error.strerror or error}") from None
        raise SnapshotError(f"{path}: not a pickle, or a damaged one") from None


def _load(file: IO[bytes], is_gzip: bool) -> Any:
    if not is_gzip:
        return _DataUnpickler(file).load()
    with gzip.GzipFile(fileobj=file) as stream:
        return _DataUnpickler(io.BufferedReader(_BoundedReader(stream, MAX_DECOMPRESSED_BYTES), 2**20)).load()


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch cyclic garbage collection off within this block.

    A snapshot consists of hundreds of thousands of containers and no garbage; each collection would walk them all.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _bounded_memory(pickle_bytes: int) -> Iterator[None]:
    """Let the process grow only by what a healthy pickle of that size can need.

    A damaged pickle can ask for a memo of four billion entries in five bytes. With a limit that is a MemoryError;
    without one it exhausts the machine. Only Linux reports the present size and enforces such a limit.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = in_use + pickle_bytes * _MAX_MEMORY_PER_BYTE + _MEMORY_SLACK_BYTES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
