"""A scrubbed copy holds the same events and nothing of the person, the machine or the environment."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from profkit.cli import cli
from profkit.errors import ProfkitError, TraceError
from profkit.launch.nsys import find_nsys
from profkit.launch.nsys_session import open_session
from profkit.sharing import scrub
from profkit.trace.scrub import TAKEN, Taken, clean_text, names_string, people_and_hosts, scrub_export, what_is_named
from tests.nsys_builder import NsysBuilder, process_of

TRACES = Path(__file__).parent.parent / "traces"
SECRETS = (
    b"hunter2",
    b"alice",
    b"gpunode07",
    b"/home/",
    b"/opt/secret",
    b"firefox",
    b"--token",
    b"the loss is",
    b"corp.example",
)

_REAL_TABLES = """
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT);
CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
CREATE TABLE ProcessStreams (globalPid INTEGER, filenameId INTEGER, contentId INTEGER);
CREATE TABLE OSRT_CALLCHAINS (id INTEGER, symbol INTEGER, module INTEGER);
CREATE TABLE NEWER_HOST (hostName TEXT, cores TEXT);
CREATE TABLE NEWER_TABLE (start INTEGER, remark TEXT, anything, label INTEGER -- REFERENCES StringIds(id)
);
"""


def _export(path: Path) -> Path:
    """Write an export with one secret in each place where the real ones have them."""
    made = NsysBuilder()
    made.range("forward", 0, 100)
    made.range("layer /x", 10, 20, registered=True)
    made.range("load /data/x", 30, 40)
    made.kernel(5, 50, name="gemm<float>(a / b)")
    made.name_thread("python", 100)
    made.name_thread("firefox", 900, pid=900)
    made.add("DIAGNOSTIC_EVENT", timestamp=1, severity=1, text="see /home/alice/out.log on gpunode07, or (/opt/secret)")
    made.rows["META_DATA_EXPORT"] += [
        {"name": "EXPORT_HOST", "value": "gpunode07"},
        {"name": "EXPORT_USER", "value": "alice"},
        {"name": "EXPORT_PARAM_OUTUPT_PATH_ABS", "value": "/home/alice/a b.sqlite"},
    ]
    ids = [
        made.string(text)
        for text in (
            "/home/alice/out.log",
            "the loss is 3.1",
            "/home/alice/lib/libx.so.1",
            "open(/home/alice/secret)",
            "of alice",
        )
    ]
    made.string("TOKEN=hunter2\0HOME=/home/alice\0USER=alice")
    made.write(path)
    connection = sqlite3.connect(path)
    connection.executescript(_REAL_TABLES)
    rows: dict[str, list[tuple[object, ...]]] = {
        "TARGET_INFO_SYSTEM_ENV": [
            (1, "alice@gpunode07", "Hostname", 619, "gpunode07"),
            (1, "Local (CLI)", "DeviceEnvironment", 610, "A=1;TOKEN=hunter2"),
            (1, "Local (CLI)", "CpuCores", 1, "32"),
            (1, "Local (CLI)", "Unheard", 9999, '{"where":"/home/alice/x","n":1}'),
        ],
        "META_DATA_CAPTURE": [
            ("PROCESS_0:COMMAND", "train"),
            ("PROCESS_0:ARGUMENT_0", "--token=hunter2"),
            ("PROCESS_0:ENVIRONMENT_VARIABLE", 'TOKEN="hunter2"'),
            ("PROCESS_0:USER_NAME", "alice"),
            ("PROCESS_0:COLLECT_CUDA_TRACE", "true"),
            ("DOMAIN_NAME", "corp.example"),
        ],
        "NEWER_HOST": [("node-of-corp.example", "32")],
        "PROCESSES": [(process_of(100), 100, "/home/alice/bin/python"), (process_of(900), 900, "firefox")],
        "ProcessStreams": [(process_of(100), ids[0], ids[1])],
        "OSRT_CALLCHAINS": [(1, ids[3], ids[2])],
        "NEWER_TABLE": [
            (1, "MY_TOKEN=hunter2", b"/home/alice/\xff", ids[4]),
            (2, "plain", "file:///home/alice/y", None),
            (3, "a/b and/or c", 4.5, None),
        ],
    }
    for table, values in rows.items():
        connection.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(values[0]))})", values)
    connection.commit()
    connection.close()
    return path


def _rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def _said(command: str, path: Path, *options: str) -> tuple[object, str]:
    done = CliRunner().invoke(cli, [command, str(path), "--format", "json", *options])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.replace(str(path), ""))
    return {**result, "trace": None}, done.stderr.replace(str(path), "")


def _assert_same_events(path: Path, clean: Path, commands: tuple[str, ...] = ("kernels", "ranges")) -> None:
    for command in commands:
        assert _said(command, path) == _said(command, clean)
    connection = sqlite3.connect(path)
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()]
    for name in names:
        if name.startswith(("CUPTI_", "NVTX_EVENTS", "OSRT_API", "ENUM_", "TARGET_INFO_CUDA")):
            sql = f"SELECT * FROM {name} ORDER BY rowid"
            assert connection.execute(sql).fetchall() == _rows(clean, sql), name
    connection.close()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return _export(tmp_path / "a.sqlite")


class TestMadeExport:
    def test_the_fixture_holds_every_secret(self, export: Path) -> None:
        data = export.read_bytes()
        assert [secret for secret in SECRETS if secret not in data] == []

    def test_no_secret_is_left_in_the_bytes(self, export: Path, tmp_path: Path) -> None:
        scrub_export(export, tmp_path / "clean.sqlite")
        data = (tmp_path / "clean.sqlite").read_bytes()
        assert [secret for secret in SECRETS if secret in data] == []

    def test_the_copy_has_the_same_events(self, export: Path, tmp_path: Path) -> None:
        scrub_export(export, tmp_path / "clean.sqlite")
        _assert_same_events(export, tmp_path / "clean.sqlite")
        assert _said("kernels", export, "--range", "forward") == _said(
            "kernels", tmp_path / "clean.sqlite", "--range", "forward"
        )

    def test_the_result_names_what_was_removed(self, export: Path, tmp_path: Path) -> None:
        result = scrub_export(export, tmp_path / "clean.sqlite")
        assert set(result.taken) >= {
            Taken("environment", "TARGET_INFO_SYSTEM_ENV", 1),
            Taken("environment", "META_DATA_CAPTURE", 1),
            Taken("command line", "META_DATA_CAPTURE", 2),
            Taken("user name", "META_DATA_EXPORT", 1),
            Taken("host name", "META_DATA_EXPORT", 1),
            Taken("paths", "META_DATA_EXPORT", 1),
            Taken("paths", "DIAGNOSTIC_EVENT", 1),
            Taken("paths", "TARGET_INFO_SYSTEM_ENV", 1),
            Taken("other processes' names", "PROCESSES", 1),
            Taken("other processes' threads", "ThreadNames", 1),
            Taken("the program's output", "ProcessStreams", 1),
            Taken("environment", "NEWER_TABLE", 1),
            Taken("host name", "NEWER_HOST", 1),
            Taken("paths", "NEWER_TABLE", 2),
            Taken("host or user name", "StringIds", 1),
            Taken("strings that no row refers to", "StringIds", 4),
        }

    def test_other_texts_stay(self, export: Path, tmp_path: Path) -> None:
        clean = tmp_path / "clean.sqlite"
        result = scrub_export(export, clean)
        assert _rows(clean, "SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'CpuCores'") == [("32",)]
        assert _rows(clean, "SELECT value FROM META_DATA_CAPTURE WHERE name LIKE '%TRACE'") == [("true",)]
        assert _rows(clean, "SELECT remark, anything FROM NEWER_TABLE WHERE start = 3") == [("a/b and/or c", 4.5)]
        assert _rows(clean, "SELECT s.value FROM OSRT_CALLCHAINS c JOIN StringIds s ON s.id = c.module") == [
            ("libx.so.1",)
        ]
        assert _rows(clean, "SELECT text FROM DIAGNOSTIC_EVENT") == [(f"see {TAKEN} on {TAKEN}, or ({TAKEN})",)]
        assert _rows(clean, "SELECT * FROM NEWER_HOST") == [(TAKEN, "32")]
        assert result.kept_path_count == 2

    def test_the_input_is_not_written(self, export: Path, tmp_path: Path) -> None:
        before = hashlib.sha256(export.read_bytes()).digest(), export.stat().st_mtime_ns
        scrub_export(export, tmp_path / "clean.sqlite")
        assert (hashlib.sha256(export.read_bytes()).digest(), export.stat().st_mtime_ns) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.sqlite", "clean.sqlite"]

    def test_scrubbing_a_copy_removes_nothing_more(self, export: Path, tmp_path: Path) -> None:
        scrub_export(export, tmp_path / "clean.sqlite")
        assert scrub_export(tmp_path / "clean.sqlite", tmp_path / "again.sqlite").taken == ()

    def test_freed_pages_and_a_wal_header_hide_nothing(self, export: Path, tmp_path: Path) -> None:
        connection = sqlite3.connect(export)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA secure_delete=OFF")
        connection.execute("CREATE TABLE old (x TEXT)")
        connection.execute("INSERT INTO old VALUES (?)", ("leftover-" * 5000,))
        connection.commit()
        connection.execute("DROP TABLE old")
        connection.commit()
        connection.close()
        assert b"leftover-" in export.read_bytes()
        scrub_export(export, tmp_path / "clean.sqlite")
        data = (tmp_path / "clean.sqlite").read_bytes()
        assert b"leftover-" not in data
        assert data[18:20] == b"\x01\x01", "a copy in WAL mode would want a file beside it when it is opened"

    @pytest.mark.parametrize(
        ("sql", "message"),
        [
            ("DROP TABLE StringIds", "no Nsight Systems export"),
            ("CREATE TRIGGER t AFTER DELETE ON PROCESSES BEGIN SELECT 1; END", "holds triggers"),
        ],
    )
    def test_a_file_that_is_no_export_is_refused(self, export: Path, tmp_path: Path, sql: str, message: str) -> None:
        connection = sqlite3.connect(export)
        connection.execute(sql)
        connection.commit()
        connection.close()
        with pytest.raises(TraceError, match=message):
            scrub_export(export, tmp_path / "clean.sqlite")
        assert [path.name for path in tmp_path.iterdir()] == ["a.sqlite"]

    def test_a_failure_leaves_no_copy(self, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr("profkit.trace.scrub._Copy.scrub", refuse)
        with pytest.raises(ProfkitError, match=r"disk is full; free disk space$"):
            scrub_export(export, tmp_path / "clean.sqlite")
        assert [path.name for path in tmp_path.iterdir()] == ["a.sqlite"]


class TestRules:
    @pytest.mark.parametrize(
        ("text", "cleaned"),
        [
            ("/home/a b/c", TAKEN),
            ("/usr/lib/libc.so.6", "libc.so.6"),
            ("C:\\Users\\a\\x.dll", "x.dll"),
            ("~/x", TAKEN),
            ("dlopen(/a/b.so)", "dlopen(b.so)"),
            ('{"p":"\\/home\\/a"}', f'{{"p":"{TAKEN}"}}'),
            ("cfg:/data/x", f"cfg:{TAKEN}"),
            ("A=1\0B=2", TAKEN),
            ("http_proxy=x", TAKEN),
            ('{"Uuid":"4bce2eeb-1a3c-8c30-3731-651978f9b7a3"}', f'{{"Uuid":"{TAKEN}"}}'),
            ("mac 00:1A:2b:3c:4d:5e", f"mac {TAKEN}"),
            ("0000:00:06.0", "0000:00:06.0"),
            ("kworker/0:1", "kworker/0:1"),
            ("50 MB/s", "50 MB/s"),
            ("a == b", "a == b"),
            ("operator==(a)", "operator==(a)"),
            ("/", "/"),
            ("", ""),
        ],
    )
    def test_a_text_loses_paths_environments_and_identifiers(self, text: str, cleaned: str) -> None:
        assert clean_text(text, None)[0] == cleaned
        assert (clean_text(text, None)[1] is None) == (cleaned == text)

    @pytest.mark.parametrize(
        ("name", "what"),
        [
            ("PROCESS_0:ENVIRONMENT_VARIABLE", "environment"),
            ("PROCESS_12:ARGUMENT_3", "command line"),
            ("PROCESS_0:WORKING_DIR", "paths"),
            ("EXPORT_PARAM_INPUT_FILE", "paths"),
            ("DEVICE_DISPLAY_NAME", "host name"),
            ("SystemUID", "identifiers"),
            ("CpuDescription", None),
            ("EXPORT_SCHEMA_VERSION", None),
            ("OsDescription", None),
        ],
    )
    def test_a_name_says_which_data_its_value_holds(self, name: str, what: str | None) -> None:
        assert what_is_named(name) == what

    def test_names_of_users_and_hosts_are_found_as_whole_words(self) -> None:
        words = people_and_hosts([("EXPORT_HOST", "vm"), ("", "A=1\0USER=al.x\0B=2")])
        assert clean_text("vm, kvm and al.x; alox", words)[0] == f"{TAKEN}, kvm and {TAKEN}; alox"
        assert people_and_hosts([("EXPORT_USER", "")]) is None

    def test_a_column_refers_to_strings_by_comment_or_name(self) -> None:
        sql = "CREATE TABLE t (odd INTEGER, -- REFERENCES StringIds(id)\n other INTEGER, -- REFERENCES ENUM_X(id)\n)"
        assert [names_string(column, sql) for column in ("odd", "other", "nameId", "start")] == [
            True,
            False,
            True,
            False,
        ]


class TestCommand:
    def test_it_prints_what_it_removed(self, profkit: Callable, export: Path, tmp_path: Path) -> None:
        done = profkit("scrub", export, "-o", "clean.sqlite", cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (0, 1)
        assert done.stderr.startswith("warning: 2 names of ranges or kernels look like a path; the copy keeps them")
        assert "command line                   META_DATA_CAPTURE" in done.stdout
        assert done.stdout.endswith("clean.sqlite holds the recorded events and nothing of the above\n")
        assert max(map(len, done.stdout.splitlines())) <= 80

    @pytest.mark.parametrize("style", ["json", "csv", "markdown", "latex"])
    def test_every_format_holds_what_was_removed(self, export: Path, tmp_path: Path, style: str) -> None:
        done = CliRunner().invoke(cli, ["scrub", str(export), "-o", str(tmp_path / "c"), "--format", style])
        assert done.exit_code == 0
        if style == "json":
            assert {"what": "command line", "table": "META_DATA_CAPTURE", "row_count": 2} in json.loads(done.stdout)[
                "taken"
            ]
        else:
            assert "command line" in done.stdout

    def test_the_input_and_existing_files_are_not_overwritten(
        self, profkit: Callable, export: Path, tmp_path: Path
    ) -> None:
        before = export.read_bytes()
        (tmp_path / "link").symlink_to(export)
        (tmp_path / "there").write_text("there")
        for name, message in (
            ("a.sqlite", "being read"),
            ("link", "being read"),
            ("there", "there: exists;"),
        ):
            for force in ([], ["--force"]):
                if (name, force) == ("there", ["--force"]):
                    continue
                done = profkit("scrub", export, "-o", name, *force, cwd=tmp_path)
                assert (done.returncode, done.stdout) == (2, "")
                assert message in done.stderr
        assert (export.read_bytes(), (tmp_path / "there").read_text()) == (before, "there")
        assert profkit("scrub", export, "-o", "there", "--force", cwd=tmp_path).returncode == 0
        assert (tmp_path / "there").read_bytes().startswith(b"SQLite")

    @pytest.mark.parametrize("name", ["a.nsys-rep", "a.qdstrm"])
    def test_a_report_gets_one_line(self, profkit: Callable, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"x")
        done = profkit("scrub", name, "-o", "c.sqlite", cwd=tmp_path)
        assert done.returncode == 2
        assert f"profkit: {name}: a report cannot be scrubbed" in done.stderr
        assert done.stderr.count("\n") == 1

    @pytest.mark.parametrize("output", ["no/c.sqlite", "a.sqlite/c.sqlite"])
    def test_an_output_that_cannot_be_written_gets_one_line(
        self, profkit: Callable, export: Path, tmp_path: Path, output: str
    ) -> None:
        done = profkit("scrub", export, "-o", output, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith(f"profkit: {output}: ")
        assert done.stderr.count("\n") == 1


NSYS_CAPTURES = (
    "small.nsys2023",
    "small.nsys2025",
    "ddp.nsys2025",
    "graph_nodes.nsys2023",
    "graph_whole.nsys2023",
    "lossy.nsys2023",
    "hooks.nsys2025",
)


@pytest.mark.parametrize("name", NSYS_CAPTURES)
def test_a_real_capture_has_the_same_events_after_scrubbing(captures: Path, tmp_path: Path, name: str) -> None:
    path, clean = captures / f"{name}.sqlite", tmp_path / "clean.sqlite"
    result = scrub_export(path, clean)
    assert {taken.what for taken in result.taken} >= {"command line", "host name", "other processes' names", "paths"}
    _assert_same_events(path, clean)
    data = clean.read_bytes()
    assert [word for word in (b"/usr/lib", b"/opt/nvidia", b"kworker", b"model_probe") if word in data] == []


@pytest.mark.nsys
def test_a_fresh_export_loses_the_environment(tmp_path: Path) -> None:
    nsys = find_nsys(os.environ)
    assert nsys, "the marker promises an nsys"
    code = "import nvtx, sys\nwith nvtx.annotate('forward'):\n    print('the loss is', 3.1, file=sys.stderr)\n"
    target = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "MY_TOKEN": "hunter2-of-mine", "MY_PLACE": "/home/somebody/else"}
    report, raw, clean = tmp_path / "a.nsys-rep", tmp_path / "a.sqlite", tmp_path / "clean.sqlite"
    with (tmp_path / "log").open("w+b") as log, open_session(nsys, report, log) as session:
        session.start(target, environment)
        session.collect()
    assert b"hunter2-of-mine" in raw.read_bytes()
    result = scrub_export(raw, clean)
    assert {taken.what for taken in result.taken} >= {"environment", "the program's output", "paths"}
    data = clean.read_bytes()
    paths = [os.fsencode(path) for path in (tmp_path, Path(sys.executable).parent, Path.home())]
    values = [value.encode() for value in os.environ.values() if len(value) > 7]
    assert [word for word in (b"hunter2", b"MY_TOKEN", b"/home/", b"the loss", *paths, *values) if word in data] == []
    _assert_same_events(raw, clean, ("ranges",))
    names = _rows(clean, "SELECT s.value FROM NVTX_EVENTS n JOIN StringIds s ON s.id = n.textId WHERE n.eventType = 59")
    assert names == [("forward",)]


STACKS = {
    "deviceProperties": [{"name": "NVIDIA H200"}],
    "hostname": "gpunode07",
    "traceEvents": [
        {"ph": "X", "cat": "python_function", "name": "/home/alice/train.py(3): main", "ts": 1.001, "dur": 2.5},
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::add",
            "ts": 1.5,
            "dur": 1.0,
            "args": {"file": "/home/alice/data.bin"},
        },
        {"ph": "X", "cat": "user_annotation", "name": "load /data/x", "ts": 1.5, "dur": 0.5},
    ],
    "traceName": "/home/alice/runs/trace.json",
}


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_torch_profiler_trace_keeps_its_events_and_loses_its_paths(tmp_path: Path, ending: str) -> None:
    source, output = tmp_path / f"trace{ending}", tmp_path / f"clean{ending}"
    data = json.dumps(STACKS).encode()
    source.write_bytes(gzip.compress(data) if ending == ".json.gz" else data)
    result = scrub(source, output)
    copied = output.read_bytes()
    clean = gzip.decompress(copied) if ending == ".json.gz" else copied
    assert not [secret for secret in SECRETS if secret in clean]
    events = json.loads(clean)["traceEvents"]
    assert [event["name"] for event in events] == ["(scrubbed)/train.py(3): main", "aten::add", "load /data/x"]
    assert [(event["ts"], event["dur"]) for event in events] == [(1.001, 2.5), (1.5, 1.0), (1.5, 0.5)]
    assert result.kept_path_count == 1


def test_a_snapshot_keeps_its_bytes_and_shows_no_directory(tmp_path: Path) -> None:
    source, output = tmp_path / "home" / "alice" / "s.pickle", tmp_path / "clean.pickle"
    source.parent.mkdir(parents=True)
    data = pickle.loads(gzip.decompress((TRACES / "small-train.snapshot.pickle.gz").read_bytes()))
    frames = [frame for trace in data["device_traces"] for event in trace for frame in event.get("frames", [])]
    for frame in frames:
        if "site-packages" not in frame["filename"]:
            frame["filename"] = "/home/alice/model.py"
    source.write_bytes(pickle.dumps(data))
    scrub(source, output)
    copied = output.read_bytes()
    assert not [secret for secret in SECRETS if secret in copied]
    before, after = (json.loads(memory_json(path)) for path in (source, output))
    before["snapshot"] = after["snapshot"] = ""
    assert json.dumps(before).replace("/home/alice/", "(scrubbed)/") == json.dumps(after)


def memory_json(path: Path) -> str:
    done = CliRunner().invoke(cli, ["memory", str(path), "--format", "json"])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_of_a_run_every_file_is_copied_but_the_report_and_the_log(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "clean"
    run.mkdir()
    _export(run / "trace.sqlite")
    (run / "trace.nsys-rep").write_bytes(b"TOKEN=hunter2")
    (run / "log.txt").write_bytes(b"/home/alice")
    manifest = {"status": "complete", "argv": ["/home/alice/train.py", "--token=hunter2"], "gpu": "NVIDIA H200"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    done = CliRunner().invoke(cli, ["scrub", str(run), "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in output.iterdir()) == ["manifest.json", "trace.sqlite"]
    assert json.loads((output / "manifest.json").read_text())["gpu"] == "NVIDIA H200"
    for path in output.iterdir():
        assert not [secret for secret in (*SECRETS,) if secret in path.read_bytes()]
    assert "the report, which holds the environment" in done.stdout


@pytest.mark.parametrize(
    ("written", "shared"),
    [
        ("/home/ada/model.py:12 forward", f"{TAKEN}/model.py:12 forward"),
        ("Model.forward /home/ada/my code/model.py:12", f"Model.forward {TAKEN}/model.py:12"),
        ("/opt/lib/python3.12/site-packages/timm/vit.py:9 <lambda>", "site-packages/timm/vit.py:9 <lambda>"),
        ("model.py:12 forward", "model.py:12 forward"),
    ],
)
def test_a_line_of_compiled_code_keeps_its_file_and_loses_the_folders(
    tmp_path: Path, written: str, shared: str
) -> None:
    source, copy = tmp_path / "compiled.jsonl", tmp_path / "copy.jsonl"
    source.write_text(json.dumps({"kind": "graph", "name": written, "lines": [written]}) + "\n")
    scrub(source, copy)
    assert json.loads(copy.read_text()) == {"kind": "graph", "name": shared, "lines": [shared]}


def test_a_run_that_cannot_be_copied_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text('{"status": "complete"}')
    (run / "snapshot.pickle").write_bytes(b"\x80\x04no")
    with pytest.raises(ProfkitError):
        scrub(run, tmp_path / "clean")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("content", [b"", b"words", b'{"a": 1}'])
def test_what_is_no_capture_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ProfkitError):
        scrub(tmp_path / "file", tmp_path / "clean")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pipe_is_refused_before_anybody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="not a regular file"):
        scrub(tmp_path / "pipe", tmp_path / "clean")
