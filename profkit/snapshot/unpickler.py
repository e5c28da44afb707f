"""Read a pickle as data only: no global may be named in it, so nothing in it can run.

A pickle is a program for a small machine. It is dangerous because it may name any importable object and call it. A
snapshot of PyTorch's allocator holds dictionaries, lists, tuples, strings and numbers and names no object, so this
reader stops at the first global, persistent id or extension code.

Data alone can do harm too: keys of a dictionary that all hash alike, or a tuple nested in itself as a key, keep the
unpickler busy for years, and nothing in Python can interrupt it. So a small file is first read in a child process that
the kernel stops (`_rehearse`). A large one that was made to harm can still take its time.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import stat
import sys
import warnings
import zlib
from pathlib import Path
from typing import IO, Any, NoReturn

from profkit.errors import SnapshotError
from profkit.files import GZIP_RATIO, bounded_memory, collector_off

MAX_DECOMPRESSED_BYTES = 4 * 2**30
"""A ``.pickle.gz`` may not decompress to more than this."""

_GZIP_MAGIC = b"\x1f\x8b"
# Real snapshots take 7 bytes of memory for each of their own.
_MEMORY_PER_BYTE = 12

_REHEARSED_BYTES = 12 * 2**20
"""A file of up to this size is first read in a child process; that takes as long as reading it."""
_REHEARSAL_CPU_SECONDS = 8
_OUT_OF_MEMORY = 2


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
            with collector_off(), bounded_memory(_MEMORY_PER_BYTE * status.st_size * (GZIP_RATIO if is_gzip else 1)):
                if status.st_size <= _REHEARSED_BYTES:
                    _rehearse(path, is_gzip)
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


def _rehearse(path: Path, is_gzip: bool) -> None:
    """Load the file in a child process that may use so much time; raise if that or the memory did not suffice."""
    if not sys.platform.startswith("linux"):
        return
    import resource

    with warnings.catch_warnings():
        # That of a process with threads, which may leave a lock taken in the child: the child takes none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 0
        try:
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = int(used.ru_utime + used.ru_stime) + _REHEARSAL_CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with path.open("rb") as file:  # a place in the file of the child's own
                _load(file, is_gzip)
        except MemoryError:
            status = _OUT_OF_MEMORY
        finally:
            # Also after any other exception, which the parent will meet itself.
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OUT_OF_MEMORY:
        raise MemoryError
    if os.WIFSIGNALED(status):
        raise _RefusedError("it takes more time or memory to read than its size can need")
