"""A text planted in any field of any file is not in the copy, unless the field is declared as a name.

The fields are found by walking the types of the run's files, the tables of exports, and the keys of traces and
snapshots, so that a new one is planted without anybody's thought.
"""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import re
import shutil
import sqlite3
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from profkit.errors import ProfkitError
from profkit.run.directory import FILES, KINETO_TRACE, LINES, LOG, NSYS_EXPORT, NSYS_REPORT, SNAPSHOT, WORK
from profkit.sharing import RUN_FILES, share
from profkit.text_kinds import Kind
from profkit.trace.kineto_events import _ARGUMENTS, RowKind
from profkit.trace.shared_copies import _ROWS, ARGUMENTS
from tests.fuzz.mutants import _chrome, _export, _snapshots
from tests.kineto_builder import row

TRACES = Path(__file__).parent.parent / "traces"

# What a text may look like. None of these is a word, a version or the name of a GPU.
SHAPES = (
    "/home/{}/my code/train.py",
    "~/{}/x",
    "../{}",
    "C:\\Users\\{}\\x.py",
    "https://user:{}@host.corp.example/",
    "TOKEN={}",
    "10.1.2.3 {}!",
    "RuntimeError: {}?",
    "/tmp/torchinductor_{}/k.py:12 forward",
)
CORE = re.compile(rb"zq\d+zq")


@dataclass
class Planter:
    """Hands out texts, each once, and remembers where it put them."""

    places: list[str] = field(default_factory=list)
    names: set[int] = field(default_factory=set)

    def text(self, place: str, kind: Kind | None = None) -> str:
        number = len(self.places)
        self.places.append(place)
        if kind is not None and kind.is_name:
            self.names.add(number)
        return SHAPES[number % len(SHAPES)].format(f"zq{number}zq")

    def found(self, copied: Path) -> set[int]:
        return {int(core[2:-2]) for path in _files(copied) for core in CORE.findall(_content(path))}

    def assert_names_alone(self, copied: Path) -> None:
        found = self.found(copied)
        assert [self.places[number] for number in sorted(found - self.names)] == []
        assert [self.places[number] for number in sorted(self.names - found)] == []


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    return path.name.encode() + (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


# -- files of a run ---------------------------------------------------------------------------------------------------


def sample(kind: Any, place: str, planter: Planter) -> Any:  # noqa: PLR0911  one return a kind
    """Return a value of a type with a text planted in each place for one."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return planter.text(place, inner[1])
    if origin in (Union, types.UnionType):
        return sample(inner[0], place, planter)
    if origin is Literal:
        return inner[0]
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{one.name: sample(hints[one.name], f"{place}.{one.name}", planter) for one in fields(kind)})
    if origin in (tuple, list):
        kinds = inner if origin is tuple and inner[-1] is not Ellipsis else inner[:1]
        return origin(sample(each, place, planter) for each in kinds)
    if origin is dict:
        return {sample(inner[0], f"{place} key", planter): sample(inner[1], f"{place} value", planter)}
    if kind in (int, float, bool):
        return kind(place.endswith(".version") or kind is float)
    return planter.text(place)


def add_undeclared(value: Any, place: str, planter: Planter) -> Any:
    """Return JSON with an unknown key, whose name is planted too, in each object; tables of numbers get a number."""
    if isinstance(value, dict):
        others = [item for item in value.values() if not isinstance(item, str)]
        is_table = len(others) == len(value) == 1 and isinstance(others[0], int | float | dict)
        new = type(others[0])() if is_table else planter.text(f"{place} unknown value")
        added = {planter.text(f"{place} unknown key"): new}
        return {key: add_undeclared(item, f"{place}.{key}", planter) for key, item in value.items()} | added
    if isinstance(value, list):
        return [add_undeclared(item, place, planter) for item in value]
    return value


def _plant_run(folder: Path, planter: Planter) -> None:
    for name, file in RUN_FILES.items():
        path = folder / name
        file.write(path, sample(file.kind, name, planter))
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        records = [json.dumps(add_undeclared(json.loads(line), name, planter)) for line in lines]
        if path.suffix == ".jsonl":
            records += [json.dumps({"kind": planter.text(f"{name} kind"), "x": planter.text(f"{name} other line")})]
            records += ['{"kind": "cut off ' + planter.text(f"{name} cut-off line").replace("\\", "/")]
        path.write_text("\n".join(records))


def test_of_the_files_of_a_run_declared_names_alone_survive(tmp_path: Path) -> None:
    run, planter = tmp_path / "run", Planter()
    run.mkdir()
    _plant_run(run, planter)
    (run / LOG).write_text(
        f"{planter.text('log')}\nErrors occurred while processing the raw events, {planter.text('log')}"
    )
    (run / NSYS_REPORT).write_text(planter.text("report"))
    (run / "notes.txt").write_text(planter.text("another file"))
    (run / f"{planter.text('name').replace('/', '')}.rank1.json").write_text(planter.text("file of a rank"))
    (run / SNAPSHOT).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(pickle.dumps(planter.text("behind a link")))
    made = share(run, tmp_path / "copy")
    # Lines of source are left out as a whole, here and in a file of their own.
    planter.names -= {at for at, place in enumerate(planter.places) if place.startswith(f"{WORK}.lines.")}
    planter.assert_names_alone(tmp_path / "copy")
    assert set(made.files) == {*RUN_FILES, LOG} - {LINES}
    assert (tmp_path / "copy" / LOG).read_text() == "Errors occurred while processing the raw events\n"
    assert len(planter.places) > 150


def test_every_file_of_a_run_is_copied_by_its_type_or_as_a_capture() -> None:
    assert {*RUN_FILES, LOG, NSYS_REPORT, NSYS_EXPORT, KINETO_TRACE, SNAPSHOT} == set(FILES)


# -- captures -----------------------------------------------------------------------------------------------------


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested lists and dictionaries, and one for a new key in each dictionary."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*place, key))
        yield (*place, "an unknown key")
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*place, index))
    else:
        yield place


def planted(data: Any, places: list[tuple[Any, ...]], text: str) -> Any:
    changed = copy.deepcopy(data)
    for place in places:
        inner = changed
        for key in place[:-1]:
            if isinstance(inner[key], tuple):
                inner[key] = list(inner[key])
            inner = inner[key]
        inner[place[-1]] = text
    return changed


MOST_ALIKE = 2
"""A text is planted in this many of the places that are alike, in all of them at once."""


def survivors(data: Any, write: Callable[[Path, Any], None], source: Path, kind_of: Callable[..., str]) -> set[str]:
    """Return the kinds of places from which a text comes into the copy."""
    output = source.with_name(f"copy{''.join(source.suffixes)}")
    places = defaultdict[str, list[tuple[Any, ...]]](list)
    for place in leaves(data):
        places[kind_of(data, place)].append(place)
    found = set()
    for number, (kind, alike) in enumerate(places.items()):
        write(source, planted(data, alike[:MOST_ALIKE], SHAPES[number % len(SHAPES)].format("zq0zq")))
        output.unlink(missing_ok=True)
        with suppress(ProfkitError):  # a text where none can stand: then there is no copy
            share(source, output)
            found |= {kind} if Planter().found(output) else set()
    return found


def _kind_in_trace(trace: Any, place: tuple[Any, ...]) -> str:
    keys = [key for key in place if isinstance(key, str)]
    if keys[0] == "traceEvents" and len(place) > 2:
        event = trace["traceEvents"][place[1]]
        keys[0] = event.get("cat") or event["name"]
    return " ".join(keys)


def _trace() -> dict[str, Any]:
    """Return a trace in which every row has every argument that is read, and others, the header all that is known."""
    trace = _chrome()
    for event in trace["traceEvents"]:
        event["args"] = dict.fromkeys(ARGUMENTS, 1) | {"Input Dims": "x"} | event.get("args", {})
    begin = {"ph": "M", "pid": 100, "tid": 100, "ts": 0}
    for name in ("process_name", "process_labels", "thread_name"):
        trace["traceEvents"].append({**begin, "name": name, "args": {"name": "x", "labels": "x"}})
    trace["traceEvents"].append(row("python_function", "train.py(3): main", 1, 2))
    trace["distributedInfo"] |= {"master_addr": "x", "pg_config": [{"pg_name": "0", "pg_size": 1, "ranks": [0]}]}
    trace["profkit"] = {
        **{"version": "1", "source": "x", "measure": "gpu-kernel", "has_kernel_table": True},
        **{"ranks": {"100": 0}, "diagnostics": [["warning", "x", None]], "notes": ["x"]},
    }
    return {**trace, "traceName": "x", "hostname": "x", "cmdline": "x", "env": {"USER": "x"}}


def test_of_a_trace_names_alone_survive(tmp_path: Path) -> None:
    def write(path: Path, trace: Any) -> None:
        path.write_text(json.dumps(trace))

    rows = ("kernel", "cpu_op", "user_annotation", "gpu_memcpy")
    kept = {f"{row} name" for row in rows}
    kept |= {f"{row} args Process Group Name" for row in (*rows, "cuda_runtime", "fwdbwd")}
    kept |= {"distributedInfo pg_config pg_name"}
    assert survivors(_trace(), write, tmp_path / "trace.json", _kind_in_trace) == kept


def test_what_is_read_of_a_trace_is_declared() -> None:
    assert _ARGUMENTS - {"name"} <= set(ARGUMENTS)
    assert set(get_args(RowKind)) - {"metadata"} == set(_ROWS)


def _snapshot() -> dict[str, Any]:
    data = copy.deepcopy(_snapshots()[0])
    frame = {"name": "f", "filename": "/x/t.py", "line": 1, "fx_original_trace": 'File "/x/t.py", line 3, in f'}
    for record in (*data["device_traces"][0], *(block for segment in data["segments"] for block in segment["blocks"])):
        record |= {"frames": [frame], "forward_frames": [frame], "user_metadata": "x", "compile_context": "x"}
    data["device_traces"][0][2]["user_metadata"] = {"owner": "x"}
    data["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "x", "expandable_segments": False, "last": "x"}
    return data


def test_of_a_snapshot_names_alone_survive(tmp_path: Path) -> None:
    def kind_of(_: Any, place: tuple[Any, ...]) -> str:
        return " ".join(key for key in place if isinstance(key, str))

    def write(path: Path, data: Any) -> None:
        path.write_bytes(pickle.dumps(data))

    kept = {
        "external_annotations name",
        "segments blocks user_metadata",
        "device_traces user_metadata",
        "device_traces user_metadata owner",
        "device_traces user_metadata an unknown key",
    }
    assert survivors(_snapshot(), write, tmp_path / "snapshot.pickle", kind_of) == kept


REAL_TABLES = """
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT);
CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
CREATE TABLE ProcessStreams (globalPid INTEGER, filenameId INTEGER, contentId INTEGER);
INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, 'x', 'Hostname', 1, 'x');
INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'x');
INSERT INTO PROCESSES VALUES (1, 1, 'x');
INSERT INTO ProcessStreams VALUES (1, 1, 1);
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_HOST', 'x');
"""


@pytest.fixture(scope="module", params=["made", "real"])
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "trace.sqlite"
    if request.param == "real":
        shutil.copyfile(TRACES / "tiny-train-cpu.nsys2023.sqlite", path)
    else:
        _export().write(path)
        with closing(sqlite3.connect(path)) as database:
            database.executescript(REAL_TABLES)
    return path


def test_of_an_export_names_alone_survive(export: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(export)) as database:
        columns = database.execute(
            "SELECT m.name, c.name FROM sqlite_master m JOIN pragma_table_info(m.name) c WHERE m.type = 'table'"
        ).fetchall()
    found = set()
    for number, (table, column) in enumerate(columns):
        source, output = tmp_path / "planted.sqlite", tmp_path / "copy.sqlite"
        shutil.copyfile(export, source)
        output.unlink(missing_ok=True)
        with closing(sqlite3.connect(source)) as database, suppress(sqlite3.IntegrityError):
            text = SHAPES[number % len(SHAPES)].format("zq0zq")
            database.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ?', (text,))
            database.commit()
        with suppress(ProfkitError):  # a text where none can stand: then there is no copy
            share(source, output)
            found |= {f"{table}.{column}"} if Planter().found(output) else set()
    assert found <= {"NVTX_EVENTS.text", "StringIds.value"}
    assert found


def test_an_export_loses_what_is_named_by_its_user(export: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(export)) as database:
        strings = "INSERT INTO StringIds VALUES (?, 'zq1zq'), (?, 'zq2zq')"
        database.execute(strings, (10**6, 10**6 + 1))
        database.execute('CREATE TABLE "zq3zq" (start INTEGER, "zq4zq" TEXT)')
        database.execute('ALTER TABLE NVTX_EVENTS ADD COLUMN "zq5zq" TEXT')
        database.execute("INSERT INTO ThreadNames (globalTid, nameId) SELECT globalTid, 1000001 FROM ThreadNames")
        database.commit()
    share(export, tmp_path / "copy.sqlite")
    assert Planter().found(tmp_path / "copy.sqlite") == set()
