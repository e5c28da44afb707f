"""A copy of an nsys export without data about the person and the machine; the recorded events stay as they are.

nsys stores the environment of its target and, in StringIds, that of every other process that it may look at, and also
the machine's process list, the command line, the program's output and absolute paths. Three rules find them: what a
row is (known tables), what its name says (tables of names and values), and what a text looks like (all others, which
covers tables of future versions). Names of kernels, API calls and ranges are the events themselves: they are kept, and
counted if they look like a path.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profkit.errors import TraceError
from profkit.trace.sqlite import SqliteFile

_STRINGS = "StringIds"
_PROCESSES = "PROCESSES"
_THREADS = "ThreadNames"
_PROCESS_MASK = ~0xFFFFFF
TAKEN = "(scrubbed)"
_HARMLESS = frozenset({b"", b"0", b"1", b"true", b"false", b"{}", TAKEN.encode()})

# What the target wrote to its standard output and error, and the paths of these files.
PROGRAM_OUTPUT = frozenset({"ProcessStreams", "ANALYSIS_FILE"})

# Rows of these tables do not make a process a recorded one: they list the whole machine, or messages of nsys itself.
OUTSIDERS = frozenset({"PROCESSES", "ThreadNames", "SCHED_EVENTS", "COMPOSITE_EVENTS", "DIAGNOSTIC_EVENT"})

# Where the names of events stand: columns of a table, and (True, column): of every CUPTI_ table.
EVENT_NAMES: frozenset[tuple[str | bool, str]] = frozenset(
    {
        ("NVTX_EVENTS", "text"),
        ("NVTX_EVENTS", "textId"),
        ("NVTX_EVENTS", "jsonText"),
        ("NVTX_EVENTS", "jsonTextId"),
        ("NVTX_EVENTS", "binaryData"),
        (True, "nameId"),
        (True, "demangledName"),
        (True, "shortName"),
        (True, "mangledName"),
    }
)

# Facts about the product that wrote an export (GLOB patterns of names): they contain no host name.
KEPT_METADATA = {"META_DATA_EXPORT": ("EXPORT_PRODUCT_*", "EXPORT_SCHEMA_*", "EXPORT_PLATFORM", "EXPORT_ARCH")}

# The rows of META_DATA_CAPTURE, META_DATA_EXPORT and TARGET_INFO_SYSTEM_ENV that 2023.4 and 2025.3 write, and similar
# names that later versions may use.
_BY_NAME = (
    ("environment", re.compile(r"environ", re.IGNORECASE)),
    ("command line", re.compile(r"command|argument|arg_\d|package_name", re.IGNORECASE)),
    ("host name", re.compile(r"host|display_?name|nicinfo|mac_?addr|ip_?addr|domain_?name", re.IGNORECASE)),
    ("user name", re.compile(r"user(?!_?mode)|login|e_?mail", re.IGNORECASE)),
    ("paths", re.compile(r"path|dir(?!ect)|_FILE(_|$)|folder", re.IGNORECASE)),
    ("identifiers", re.compile(r"uuid|uid$|serial|session_id", re.IGNORECASE)),
)

_HOST_NAMES = re.compile(r"^(EXPORT_HOST|Hostname|DEVICE_DISPLAY_NAME)$", re.IGNORECASE)
_USER_NAMES = re.compile(r"(^EXPORT_USER|USER_NAME)$", re.IGNORECASE)
_IN_ENVIRONMENT = re.compile(
    r"(?:^|[\0;\n])(?:USER|LOGNAME|USERNAME|SUDO_USER|HOSTNAME|HOST|CONTAINER_NAME)=\"?([^\0;\n\"]+)"
)

# NAME=value, alone or one of many: nsys separates them by NUL or by semicolons.
_ENVIRONMENT = re.compile(r"^[A-Za-z_]\w*=(?!=)|[\0;\n][A-Za-z_]\w*=(?!=)")

# A path within a text begins at its start or after a space, a quote or a similar character; JSON may write \/ for /.
# Drive letters and shares are Windows paths, file:// is a path too.
_PATH = re.compile(
    r"(?:(?<![^\s\"'=:;,(\[{<|@])|(?<=file:/)|(?<=file://))(?:~?\\?/|[A-Za-z]:\\|\\\\\w)[^\s\"';,:|)\]}>\0]+"
)
_STARTS_AS_PATH = re.compile(r"~?/[^/]|[A-Za-z]:\\|\\\\\w")
_LIBRARY = re.compile(r"^[^/\\]+\.(?:so(?:\.[\w.]{1,30})?|dll)$")

# UUIDs (of GPUs, sessions, machines) and the addresses of network cards.
_IDENTIFIER = re.compile(
    r"\b(?:[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}|(?:[\da-f]{2}:){5}[\da-f]{2})\b", re.IGNORECASE
)

_REFERENCE = r"\b{}\b[^\n]*REFERENCES\s+StringIds"
_REFERRING = re.compile(r"^(?:\w*[nN]ame(?:Id)?|\w*[tT]ext(?:Id)?|symbol|module|contentId|filenameId|\w*[sS]tringId)$")

Words = re.Pattern[str] | None


@dataclass(frozen=True)
class Taken:
    """From ``row_count`` rows of ``table`` ``what`` was removed, or the whole row if it held nothing else."""

    what: str
    table: str
    row_count: int


@dataclass(frozen=True)
class ScrubResult:
    """What was removed, and how many names of events were kept although they look like a path."""

    trace: str
    output: str
    taken: tuple[Taken, ...]
    kept_path_count: int


def scrub_export(path: Path, output: Path) -> ScrubResult:
    """Write a scrubbed copy of the nsys export ``path`` to ``output``, which appears whole or not at all.

    The copy is rebuilt at the end (VACUUM), so that no freed page keeps what was removed.

    Raises:
        TraceError: the export cannot be read, is none, or has triggers, which nsys does not write.
        OSError: the copy cannot be written.
    """
    partial = output.with_name(f".profkit-{os.getpid()}-{os.urandom(4).hex()}.sqlite")
    try:
        with SqliteFile(path) as file:
            if _STRINGS not in file.tables():
                raise TraceError(f"{path}: a SQLite database, but no Nsight Systems export (it has no StringIds table)")
            # Until it is scrubbed, nobody else may read the copy.
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            shutil.copyfile(path, partial)
            taken, kept = _scrub(path, partial)
        partial.chmod(0o666 & ~_umask())
        partial.replace(output)
    except OSError as error:
        error.filename, error.filename2 = str(output), None
        raise
    finally:
        with suppress(OSError):  # if it could not be made, its folder is missing or not writable
            partial.unlink(missing_ok=True)
    return ScrubResult(str(path), str(output), taken, kept)


def _scrub(path: Path, partial: Path) -> tuple[tuple[Taken, ...], int]:
    try:
        with closing(sqlite3.connect(partial, isolation_level=None)) as connection:
            # Nobody else has this file, and it is deleted if anything fails; removed data must not reach a journal.
            for pragma in ("trusted_schema=OFF", "journal_mode=DELETE", "journal_mode=OFF", "synchronous=OFF"):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute("PRAGMA secure_delete=ON")
            connection.execute("PRAGMA temp_store=MEMORY")
            copy = _Copy(path, connection)
            copy.scrub()
            # Now there is nothing to hide, and the copy that VACUUM makes may be larger than memory.
            connection.execute("PRAGMA temp_store=FILE")
            connection.execute("VACUUM")
    except sqlite3.Error as error:
        cure = "free disk space" if "full" in str(error) else "export it again from the .nsys-rep"
        raise TraceError(f"{path}: cannot be scrubbed, SQLite says: {error}; {cure}") from None
    return tuple(Taken(what, table, count) for (what, table), count in sorted(copy.taken.items())), copy.kept_paths


@dataclass
class _Copy:
    """The copy being scrubbed."""

    path: Path
    connection: sqlite3.Connection
    taken: Counter[tuple[str, str]] = field(default_factory=Counter)
    kept_paths: int = 0

    def __post_init__(self) -> None:
        if self._rows("PRAGMA encoding")[0][0] != "UTF-8":
            raise TraceError(f"{self.path}: its text is not UTF-8, and nsys only writes UTF-8; export it again")
        from sqlite_utils import Database  # loads pandas where that is installed, so only once it is needed

        # Plugins could write.
        database = Database(self.connection, execute_plugins=False)
        self.columns: dict[str, dict[str, str]] = {
            name: {column.name: column.type.upper() for column in database[name].columns}
            for name in database.table_names()
            if not name.startswith("sqlite_")
        }

    def scrub(self) -> None:
        with self._in_one_go():
            words = self._people_and_hosts()
            for table in self.columns.keys() & PROGRAM_OUTPUT:
                self._delete("the program's output", table)
            self._take_other_processes()
            for table in self.columns:
                if {"name", "value"} <= self.columns[table].keys() and table != _STRINGS:
                    self._take_named_values(table)
            self._take_unnamed_strings()
            protected = self._referred(events=True)
            self._clean_strings(protected, words)
            for table, columns in self.columns.items():
                if table != _STRINGS and not table.startswith("ENUM_"):
                    for column in columns:
                        self._clean_column(table, column, words)

    def _people_and_hosts(self) -> Words:
        """Return the names of host and user as words to look for everywhere."""
        texts: list[tuple[str, str]] = []
        for table, columns in self.columns.items():
            if {"name", "value"} <= columns.keys():
                rows = self._rows(f"SELECT CAST(name AS BLOB), CAST(value AS BLOB) FROM {_quoted(table)}")
                texts += [(_text(name), _text(value)) for name, value in rows]
        texts += [("", _text(value)) for (value,) in self._rows("SELECT CAST(value AS BLOB) FROM StringIds")]
        return people_and_hosts(texts)

    def _take_other_processes(self) -> None:
        """Delete the names of processes and threads that recorded nothing."""
        recorded = self._recorded_processes()
        for table, column, what in (
            (_PROCESSES, "globalPid", "other processes' names"),
            (_THREADS, "globalTid", "other processes' threads"),
        ):
            if column not in self.columns.get(table, {}):
                continue
            self.connection.execute("CREATE TEMP TABLE recorded (process INTEGER PRIMARY KEY)")
            self.connection.executemany("INSERT INTO recorded VALUES (?)", [(process,) for process in recorded])
            self._delete(what, table, f"({column} & {_PROCESS_MASK}) NOT IN (SELECT process FROM recorded)")
            self.connection.execute("DROP TABLE recorded")

    def _recorded_processes(self) -> set[int]:
        found: set[int] = set()
        for table, columns in self.columns.items():
            if table in OUTSIDERS:
                continue
            for column in columns.keys() & {"globalTid", "globalPid", "endGlobalTid"}:
                sql = f"SELECT DISTINCT {column} & {_PROCESS_MASK} FROM {_quoted(table)} WHERE {column} IS NOT NULL"
                found.update(process for (process,) in self._rows(sql))
        return found

    def _take_named_values(self, table: str) -> None:
        """Remove the value of every row with a name that means data about the person or the machine."""
        cells = "CAST(name AS BLOB), CAST(value AS BLOB)"
        rows = self._rows(f"SELECT DISTINCT {cells} FROM {_quoted(table)} WHERE typeof(value) IN ('text', 'blob')")
        for name, value in rows:
            what = what_is_named(_text(name))
            if what is not None and value not in _HARMLESS:
                sql = f"UPDATE {_quoted(table)} SET value = ? WHERE CAST(name AS BLOB) = ? AND CAST(value AS BLOB) = ?"
                self.taken[what, table] += self.connection.execute(sql, (TAKEN, name, value)).rowcount

    def _referred(self, *, events: bool) -> set[int]:
        """Return the ids of the strings that rows refer to; with ``events``, only of those that name events."""
        found: set[int] = set()
        for table, columns in self.columns.items():
            if table == _STRINGS:
                continue
            sql = self._rows("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", table)[0][0]
            for column, kind in columns.items():
                if "INT" not in kind or not names_string(column, sql):
                    continue
                if not events or (table, column) in EVENT_NAMES or (table.startswith("CUPTI_"), column) in EVENT_NAMES:
                    rows = self._rows(f"SELECT DISTINCT {_quoted(column)} FROM {_quoted(table)}")
                    found.update(value for (value,) in rows if isinstance(value, int))
        return found

    def _take_unnamed_strings(self) -> None:
        """Delete the strings that no row refers to any more, such as the environments of all processes."""
        referred = self._referred(events=False)
        there = [i for (i,) in self._rows("SELECT id FROM StringIds")]
        gone = [(i,) for i in there if i not in referred]
        self.connection.executemany("DELETE FROM StringIds WHERE id = ?", gone)
        if gone:
            self.taken["strings that no row refers to", _STRINGS] += len(gone)

    def _clean_strings(self, protected: set[int], words: Words) -> None:
        rows = self._rows("SELECT id, CAST(value AS BLOB) FROM StringIds")
        self.kept_paths += sum(holds_a_path(_text(value)) for i, value in rows if i in protected)
        for i, value in rows:
            cleaned, what = (value, None) if i in protected else _clean(value, words)
            if what is not None:
                self.connection.execute("UPDATE StringIds SET value = CAST(? AS TEXT) WHERE id = ?", (cleaned, i))
                self.taken[what, _STRINGS] += 1

    def _clean_column(self, table: str, column: str, words: Words) -> None:
        """Clean the texts in a column; if its name says that they are personal data, remove them whole."""
        if self.columns[table][column] in ("INTEGER", "REAL") or not self._has_text(table, column):
            return
        cell, name = f"CAST({_quoted(column)} AS BLOB)", _quoted(table)
        where = f"typeof({_quoted(column)}) IN ('text', 'blob')"
        if table in KEPT_METADATA and {"name", "value"} <= self.columns[table].keys():
            where += f" AND NOT ({' OR '.join(f'name GLOB {pattern!r}' for pattern in KEPT_METADATA[table])})"
        values = [value for (value,) in self._rows(f"SELECT DISTINCT {cell} FROM {name} WHERE {where}")]
        if (table, column) in EVENT_NAMES:
            self.kept_paths += sum(holds_a_path(_text(value)) for value in values)
            return
        by_kind: dict[str, list[tuple[bytes, bytes]]] = {}
        named = what_is_named(column)
        for value in values:
            cleaned, what = _clean(value, words) if named is None else (TAKEN.encode(), named)
            if what is not None and value not in _HARMLESS:
                by_kind.setdefault(what, []).append((value, cleaned))
        for what, pairs in by_kind.items():
            self.connection.execute("CREATE TEMP TABLE cleaned (old BLOB PRIMARY KEY, new BLOB)")
            self.connection.executemany("INSERT INTO cleaned VALUES (?, ?)", pairs)
            sql = (
                f"UPDATE {name} SET {_quoted(column)} = (SELECT CASE typeof({_quoted(column)}) WHEN 'blob' THEN new"
                f" ELSE CAST(new AS TEXT) END FROM cleaned WHERE old = {cell})"
                f" WHERE {where} AND {cell} IN (SELECT old FROM cleaned)"
            )
            self.taken[what, table] += self.connection.execute(sql).rowcount
            self.connection.execute("DROP TABLE cleaned")

    def _has_text(self, table: str, column: str) -> bool:
        sql = f"SELECT 1 FROM {_quoted(table)} WHERE typeof({_quoted(column)}) IN ('text', 'blob') LIMIT 1"
        return bool(self._rows(sql))

    def _delete(self, what: str, table: str, where: str = "1") -> None:
        count = self.connection.execute(f"DELETE FROM {_quoted(table)} WHERE {where}").rowcount
        if count:
            self.taken[what, table] += count

    def _rows(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self.connection.execute(sql, parameters).fetchall()

    @contextmanager
    def _in_one_go(self) -> Iterator[None]:
        self.connection.execute("BEGIN")
        yield
        self.connection.execute("COMMIT")


def _clean(value: bytes, words: Words) -> tuple[bytes, str | None]:
    cleaned, what = clean_text(_text(value), words)
    return cleaned.encode("utf-8", "surrogateescape"), what


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "surrogateescape")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def what_is_named(name: str) -> str | None:
    """Return which data about the person or the machine a row of this name holds, or None."""
    return next((what for what, pattern in _BY_NAME if pattern.search(name)), None)


def people_and_hosts(rows: Iterable[tuple[str, str]]) -> Words:
    """Return a pattern of the host's and the user's names, given (name, value) rows and bare texts (name empty)."""
    found: set[str] = set()
    for name, value in rows:
        if _HOST_NAMES.search(name) or _USER_NAMES.search(name):
            found.add(value)
        found.update(_IN_ENVIRONMENT.findall(value))
    named = sorted((word for word in found if len(word) > 1 and word != TAKEN), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, named))})(?!\w)") if named else None


def clean_text(text: str, words: Words) -> tuple[str, str | None]:
    """Return the text without personal data, and what that was (None: nothing).

    An environment is removed whole. Of a path to a shared library the file name stays, because call stacks name their
    modules by it; any other path is removed whole.
    """
    if _ENVIRONMENT.search(text):
        return TAKEN, "environment"
    cleaned = _without_path(text) if _STARTS_AS_PATH.match(text) else _PATH.sub(lambda m: _without_path(m[0]), text)
    what = "paths" if cleaned != text else None
    for pattern, kind in ((_IDENTIFIER, "identifiers"), (words, "host or user name")):
        if pattern is not None and pattern.search(cleaned):
            cleaned, what = pattern.sub(TAKEN, cleaned), what or kind
    return cleaned, what


def holds_a_path(text: str) -> bool:
    """Return whether the name of an event holds what looks like an absolute path."""
    return _PATH.search(text) is not None


def names_string(column: str, sql: str) -> bool:
    """Return whether an integer column refers to StringIds: its comment in CREATE TABLE says so, or its name does."""
    return bool(re.search(_REFERENCE.format(re.escape(column)), sql) or _REFERRING.match(column))


def _without_path(path: str) -> str:
    library = _LIBRARY.search(re.split(r"[/\\]", path)[-1])
    return library[0] if library else TAKEN
