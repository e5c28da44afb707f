"""A shared copy gives the same figures, and holds no text but those that are declared."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from profkit.errors import ProfkitError, TraceError
from profkit.launch.nsys import Nsys, find_nsys, open_session
from profkit.reading import open_trace
from profkit.sharing import share
from profkit.text_kinds import (
    ANY_FILE,
    GPU,
    LEFT_OUT,
    LINE,
    MESSAGE,
    MODULE,
    PROFILER,
    RANGE,
    SOURCE_FILE,
    THREAD,
    UNCOUNTED,
    VERSION,
    WORD,
    Keeper,
    Kind,
)
from tests.captures import CAPTURES
from tests.child import run_in_child
from tests.efficiency_runs import make_small_run
from tests.in_process import names_in, printed, run_command
from tests.nsys_builder import NsysBuilder
from tests.run_builder import start_run

pytestmark = pytest.mark.usefixtures("read_once")

TESTS = Path(__file__).parent
TRACES = TESTS.parent / "traces"


# -- the same figures -------------------------------------------------------------------------------------------------

TIME = (
    ("summary",),
    ("kernels", "--by", "range"),
    ("kernels", "--range", "forward"),
    ("ranges",),
    ("efficiency",),
    ("ranks",),
    ("check", "--max-idle", "50%", "--max-share", "category:gemm=60%"),
)
PLACED = (("kernels", "--by", "range"), ("ranges",))
MEMORY = (("memory", "--by", "module"), ("summary",), ("whatif", "--edit", "zero-grad:none"))
ALIKE = ("small.kineto", "small.nsys2025", "small.pickle", "nanogpt-roundup4", "nanogpt-split64")
"""Captures that hold no text or table which another one does not."""
OF_LINES = ("stack", "label", "lines", "line", "code", "missing", "why_missing")
"""Keys under which a command shows lines of a program, which a copy does not hold, or says that it lacks them."""


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yield where two results differ in anything but texts that the copy leaves out, or stands for by a number."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            if key not in OF_LINES:
                each = (
                    _in_order(one.get(key, "–")) if key == "by_stack" else one.get(key, "–") for one in (before, after)
                )
                yield from differences(*each, f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif before != after and not (isinstance(after, str) and re.search(r"\(left out\)|…", after)):
        yield f"{place}: {before} → {after}"


def _in_order(stacks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return stacks without their lines, by which those of equal size are in order."""
    return sorted(({key: one[key] for key in one if key not in OF_LINES} for one in stacks), key=str)


def assert_same_figures(source: Path, copied: Path, commands: tuple[tuple[str, ...], ...]) -> int:
    """Compare what commands print of both as JSON; return how many printed anything."""
    answered = 0
    for name, *options in commands:
        before, after = (run_command(name, path, *options, "--format", "json") for path in (source, copied))
        assert (after.returncode, name) == (before.returncode, name), after.stderr
        if before.stdout:
            answered += 1
            results = [json.loads(done.stdout) for done in (before, after)]
            for result in results:
                for key in ("run", "trace", "snapshot", "command", "before", "after"):
                    result.pop(key, None)
            assert list(differences(*results)) == [], name
    return answered


ENDS = (".sqlite", ".kineto.json.gz", ".pickle", ".pickle.gz")
ALL_CAPTURES = sorted(
    path
    for folder in (CAPTURES, TRACES)
    for path in folder.glob("*")
    if path.name.endswith(ENDS) and not path.name.startswith(ALIKE)
)


@pytest.mark.parametrize("path", ALL_CAPTURES, ids=lambda path: path.name)
def test_the_copy_of_a_capture_gives_the_same_figures(path: Path, tmp_path: Path) -> None:
    """Of some captures all commands are asked, of the others which kernels lie under which range."""
    share(path, tmp_path / path.name)
    if ".pickle" in path.name:
        commands = MEMORY if path.name.startswith(("small-train", "encoder", "oom")) else MEMORY[:1]
    elif path.name.startswith("ddp"):
        commands = (("ranks",), *PLACED)
    else:
        commands = TIME if path.name.startswith(("small-train.nsys", "tiny")) else PLACED
    assert assert_same_figures(path, tmp_path / path.name, commands)


RUNS = sorted([*(TRACES / "blocks").iterdir(), *list((TESTS / "light_records").iterdir())[::6]])


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_copy_of_a_run_gives_the_same_figures(path: Path, tmp_path: Path) -> None:
    share(path, tmp_path / "copy")
    commands = (("ranks",),) if path.parent.name == "light_records" else (("summary",), *PLACED)
    assert assert_same_figures(path, tmp_path / "copy", commands)


def test_the_copy_of_a_run_keeps_its_work_and_its_peaks(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    share(run, tmp_path / "copy")
    assert_same_figures(run, tmp_path / "copy", (("efficiency",), ("efficiency", "--by", "module")))
    work, copied = (json.loads((folder / "work.json").read_text()) for folder in (run, tmp_path / "copy"))
    assert [one["path"] for one in copied["ranges"]] == [one["path"] for one in work["ranges"]]


def test_the_copy_of_a_run_has_its_operators_lines_only_with_frames(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    work = json.loads((run / "work.json").read_text())
    where = {"file": "/home/me/model.py", "line": 7, "function": "forward"}
    line = {"path": ["forward"], "operator": "mm", "dtype": "float32", **where, "count": 1, "flops": 2, "bytes": 3}
    (run / "work.json").write_text(json.dumps(work | {"lines": [line]}))
    for keep_frames, kept in ((False, []), (True, [{**line, "file": "model.py"}])):
        share(run, tmp_path / f"copy {keep_frames}", keep_frames=keep_frames)
        assert json.loads((tmp_path / f"copy {keep_frames}" / "work.json").read_text())["lines"] == kept


@pytest.mark.parametrize("keep_frames", [False, True])
def test_the_copy_of_a_copy_is_the_same(tmp_path: Path, keep_frames: bool) -> None:
    source = TRACES / "small-train.snapshot.pickle.gz"
    first, second = tmp_path / "a.pickle", tmp_path / "b.pickle"
    share(source, first, keep_frames=keep_frames)
    share(first, second, keep_frames=keep_frames)
    assert second.read_bytes() == first.read_bytes()


# -- rules for texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "kept"),
    [
        (WORD, "bf16", "bf16"),
        (WORD, "/home/ada", LEFT_OUT),
        (WORD, "two words", LEFT_OUT),
        (VERSION, "2.11.0+cu130", "2.11.0+cu130"),
        (VERSION, "ada's build", LEFT_OUT),
        (VERSION, "10.1.22.3", LEFT_OUT),
        (VERSION, "580.159.03", "580.159.03"),
        (WORD, "192.168.0.1", LEFT_OUT),
        (GPU, "NVIDIA H200", "NVIDIA H200"),
        (GPU, "GPU-4bce2eeb/x", LEFT_OUT),
        (THREAD, "pt_autograd_0", "pt_autograd_0"),
        (THREAD, "ada's worker", LEFT_OUT),
        (UNCOUNTED, "compiled code needs --flops", "compiled code needs --flops"),
        (UNCOUNTED, "counting mm failed (OSError: /home/ada)", LEFT_OUT),
        (MESSAGE, "", ""),
        (MESSAGE, "no module ada", f"{LEFT_OUT} 1"),
        (RANGE, "load /data/x", "load /data/x"),
        (LINE, "/home/ada/model.py:12 forward", f"{ANY_FILE}:1 {LEFT_OUT}"),
        (LINE, "Model.forward C:\\my code\\model.py:12", f"{LEFT_OUT} {ANY_FILE}:1"),
        (LINE, "no line", LEFT_OUT),
        (PROFILER, "Not all CUDA events might have been collected.", "Not all CUDA events might have been collected."),
        (PROFILER, "Number of CUDA events collected: \t521.", "Number of CUDA events collected: \t521."),
        (PROFILER, "12 events lost at 10.0.0.1, see /home/ada", "12 events lost … …, see …"),
    ],
)
def test_each_kind_of_text_has_its_rule(kind: Kind, text: str, kept: str) -> None:
    keeper = Keeper()
    assert keeper.text(kind, text) == kept
    assert keeper.left_out_count == (LEFT_OUT in kept)
    assert keeper.names == ({kind.title: {text}} if kind.is_name else {})


@pytest.mark.parametrize(
    ("kind", "text", "kept"),
    [
        (LINE, "/home/ada/my code/model.py:12 forward", "model.py:12 forward"),
        (LINE, "Model.forward C:\\ada\\model.py:12", "Model.forward model.py:12"),
        (LINE, "train.py:9 <lambda>", "train.py:9 <lambda>"),
        (SOURCE_FILE, "/home/ada/m.py", "m.py"),
        (SOURCE_FILE, "C:\\ada\\m.py", "m.py"),
        (SOURCE_FILE, "/s/k=v;m", LEFT_OUT),
    ],
)
def test_a_line_or_file_that_is_kept_has_no_folder(kind: Kind, text: str, kept: str) -> None:
    assert Keeper(keep_frames=True).text(kind, text) == kept


def test_a_mapping_whose_keys_have_no_kind_is_left_out() -> None:
    assert Keeper().record(dict[str, int], {"TOKEN": 1}) == {}


def test_equal_messages_and_lines_stay_equal() -> None:
    keeper = Keeper()
    messages = [keeper.text(MESSAGE, text) for text in ("a", "b", "a")]
    assert messages[0] == messages[2] != messages[1]
    assert keeper.text(LINE, "/a/m.py:1 f") == keeper.text(LINE, "m.py:1 f") != keeper.text(LINE, "m.py:2 f")


def test_a_renamed_word_has_one_number_everywhere_and_profkits_own_stay() -> None:
    keeper = Keeper(rename_ranges=True)
    assert keeper.text(RANGE, "step 3") == "step 3"
    assert keeper.text(RANGE, "secret/forward/layer 0") == "n1/forward/layer 0"
    assert keeper.text(MODULE, "h.0.secret.exp_avg") == "n2.0.n1.exp_avg"
    assert keeper.text(RANGE, "compiled 3f9a1c22e0:12 secret") == "compiled 3f9a1c22e0:12 n1"


# -- what the copy is -------------------------------------------------------------------------------------------------


def shared_snapshot(folder: Path, change: Callable[[Any], None], **options: bool) -> bytes:
    data = pickle.loads(gzip.decompress((TRACES / "small-train.snapshot.pickle.gz").read_bytes()))
    change(data)
    (folder / "s.pickle").write_bytes(pickle.dumps(data))
    share(folder / "s.pickle", folder / "copy.pickle", **options)
    return (folder / "copy.pickle").read_bytes()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    made = NsysBuilder(("forward", 0, 100))
    made.range("layer 3", 10, 20, registered=True)
    made.range("layer 4", 30, 40)
    made.kernel(5, 50, name="gemm<float>(a / b)")
    made.name_thread("alice's thread", 100)
    return made.write(tmp_path / "a.sqlite")


def test_renamed_ranges_give_the_same_figures_in_all_files_of_a_run(tmp_path: Path) -> None:
    run = TRACES / "blocks" / "reduce-overhead"
    share(run, tmp_path / "copy", rename_ranges=True)
    before, after = (printed("ranges", path) for path in (run, tmp_path / "copy"))
    figures = [
        {tuple(row[key] for key in ("kernel_time_ns", "kernel_count")) for row in one["ranges"]}
        for one in (before, after)
    ]
    assert figures[0] == figures[1]
    assert b"transformer" not in (tmp_path / "copy" / "compiled.jsonl").read_bytes()


def test_with_frames_kept_a_snapshot_shows_files_lines_and_functions_without_folders(tmp_path: Path) -> None:
    def change(data: Any) -> None:
        for frame in data["device_traces"][0][0]["frames"]:
            frame.update(name="train_it", filename="/home/alice/secret/train.py", line=7)

    content = shared_snapshot(tmp_path, change, keep_frames=True)
    frames = pickle.loads(content)["device_traces"][0][0]["frames"]
    assert {tuple(frame.values()) for frame in frames} == {("train_it", "/…/train.py", 7)}
    assert b"alice" not in content


def test_a_text_of_two_kinds_is_left_out_where_its_kind_is_and_kept_where_it_is_a_name(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.name_thread("ada", tid=100)
    builder.range("ada", 0, 10, registered=True)
    builder.kernel(5, 1)
    share(builder.write(tmp_path / "t.sqlite"), tmp_path / "copy.sqlite")
    trace = open_trace(tmp_path / "copy.sqlite").trace
    assert "ada" in trace.names
    assert set(trace.thread_names.values()) == {LEFT_OUT}


@pytest.mark.parametrize("metadata", ["tower_of_ada", {"who": "tower_of_ada"}, "profkit:forward:tower_of_ada"])
def test_with_ranges_renamed_the_text_of_an_allocation_is_too(tmp_path: Path, metadata: object) -> None:
    def change(data: Any) -> None:
        data["device_traces"][0][0]["user_metadata"] = metadata

    content = shared_snapshot(tmp_path, change, rename_ranges=True)
    assert pickle.loads(content)["device_traces"][0][0]["user_metadata"]
    assert b"tower_of_ada" not in content


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_trace_keeps_its_times_to_the_nanosecond(tmp_path: Path, ending: str) -> None:
    source, copied = tmp_path / f"trace{ending}", tmp_path / f"copy{ending}"
    row = (
        '{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1700000000000000.123, "dur": 2.5}'
    )
    data = f'{{"traceEvents": [{row}]}}'.encode()
    source.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)
    share(source, copied)
    content = gzip.decompress(copied.read_bytes()) if ending.endswith(".gz") else copied.read_bytes()
    assert b'"ts": 1700000000000000.123, "dur": 2.500' in content


def _with_a_cycle() -> dict[str, Any]:
    data: dict[str, Any] = _one_block()
    data["itself"] = data
    data["segments"][0]["blocks"][0]["user_metadata"] = {"x": data}
    return data


def _doubled(times: int) -> dict[str, Any]:
    inner: Any = ["x"]
    for _ in range(times):
        inner = [inner, inner]
    data = _one_block()
    data["segments"][0]["blocks"][0] |= {"frames": inner, "more": inner}
    return {**data, "more": inner}


def _one_block() -> dict[str, Any]:
    block = {"size": 512, "requested_size": 500, "address": 512, "state": "active_allocated"}
    segment = {"device": 0, "address": 512, "total_size": 512, "stream": 0, "blocks": [block]}
    return {"segments": [segment], "device_traces": []}


@pytest.mark.parametrize("data", [_with_a_cycle(), _doubled(40)], ids=["a cycle", "40 doublings"])
def test_what_a_snapshot_holds_by_reference_is_not_followed(tmp_path: Path, data: dict[str, Any]) -> None:
    source = tmp_path / "s.pickle"
    source.write_bytes(pickle.dumps(data))
    run_in_child(lambda: share(source, tmp_path / "copy.pickle"), cpu_seconds=20, memory_bytes=2**30)
    assert (tmp_path / "copy.pickle").stat().st_size < 1000


def test_a_bomb_is_refused_within_the_readers_limit(tmp_path: Path) -> None:
    source = tmp_path / "bomb.json.gz"
    with gzip.open(source, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [], "x": [')
        for _ in range(100):
            file.write(b'"%s",' % (b"0" * (2**20 - 3)))

    def refuse() -> None:
        with pytest.raises(TraceError, match=r"more than 0\.0625 GiB of JSON"):
            share(source, tmp_path / "copy.json")

    run_in_child(refuse, cpu_seconds=60, memory_bytes=2**31)


class TestCommand:
    def test_it_prints_the_names_that_stay(self, profkit: Callable, export: Path, tmp_path: Path) -> None:
        done = profkit("scrub", export, "-o", "copy.sqlite", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"^range +layer \* +2$", done.stdout, re.MULTILINE)
        assert re.search(r"^kernel +all: --format json lists them +1$", done.stdout, re.MULTILINE)
        assert done.stdout.endswith("profkit opens the copy, and so does nsys stats\n")
        assert b"alice" not in (tmp_path / "copy.sqlite").read_bytes()
        names = printed("scrub", export, "-o", tmp_path / "c")["names"]
        assert names == {"kernel": ["gemm<float>(a / b)"], "range": ["forward", "layer 3", "layer 4"]}

    def test_the_input_and_existing_files_are_not_overwritten(
        self, profkit: Callable, export: Path, tmp_path: Path
    ) -> None:
        before = export.read_bytes()
        (tmp_path / "link").symlink_to(export)
        (tmp_path / "there").write_text("there")
        for name, message in (("a.sqlite", "being read"), ("link", "being read"), ("there", "there: exists;")):
            for force in ([], ["--force"]):
                if (name, force) == ("there", ["--force"]):
                    continue
                done = profkit("scrub", export, "-o", name, *force, cwd=tmp_path)
                assert (done.returncode, done.stdout) == (2, "")
                assert message in done.stderr
        assert (export.read_bytes(), (tmp_path / "there").read_text()) == (before, "there")
        assert profkit("scrub", export, "-o", "there", "--force", cwd=tmp_path).returncode == 0
        assert (tmp_path / "there").read_bytes().startswith(b"SQLite")

    @pytest.mark.parametrize(
        ("source", "output", "status", "said"),
        [
            ("a.nsys-rep", "c.sqlite", 2, "a.nsys-rep: a report cannot be scrubbed"),
            ("a.qdstrm", "c.sqlite", 2, "a.qdstrm: a report cannot be scrubbed"),
            ("a.sqlite", "no/c.sqlite", 1, "no/c.sqlite: "),
            ("a.sqlite", "a.sqlite/c.sqlite", 1, "a.sqlite/c.sqlite: "),
        ],
    )
    def test_what_cannot_be_read_or_written_gets_one_line(
        self, profkit: Callable, export: Path, tmp_path: Path, source: str, output: str, status: int, said: str
    ) -> None:
        if source != export.name:
            (tmp_path / source).write_bytes(b"x")
        done = profkit("scrub", source, "-o", output, cwd=tmp_path)
        assert done.returncode == status
        assert done.stderr.startswith(f"profkit: {said}")
        assert done.stderr.count("\n") == 1

    def test_what_of_a_run_is_not_copied_is_said(self, profkit: Callable, export: Path, tmp_path: Path) -> None:
        run = start_run(tmp_path / "run", gpu="NVIDIA H200", argv=["--token=hunter2"])
        export.rename(run / "trace.sqlite")
        (run / "trace.nsys-rep").write_bytes(b"TOKEN=hunter2")
        (run / "notes.txt").write_text("hunter2")
        (run / "itself").symlink_to(run)
        done = profkit("scrub", run, "-o", "copy", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert names_in(tmp_path / "copy") == ["manifest.json", "trace.sqlite"]
        for name in ("trace.nsys-rep", "notes.txt", "itself"):
            assert f"{name}: not copied" in done.stdout
        assert not [path for path in (tmp_path / "copy").iterdir() if b"hunter2" in path.read_bytes()]


def test_a_run_that_cannot_be_copied_leaves_nothing(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run")
    (run / "snapshot.pickle").write_bytes(b"\x80\x04no")
    with pytest.raises(ProfkitError):
        share(run, tmp_path / "clean")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("content", [b"", b"words", b'{"a": 1}', None])
def test_what_is_no_capture_or_a_pipe_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(ProfkitError, match="not a regular file" if content is None else None):
        share(path, tmp_path / "clean")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- a real nsys ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nsys() -> Nsys:
    found = find_nsys(os.environ)
    assert found, "the marker promises an nsys"
    return found


@pytest.mark.nsys
def test_the_copy_of_a_fresh_export_holds_its_ranges_and_no_environment(nsys: Nsys, tmp_path: Path) -> None:
    code = "import nvtx, sys\nwith nvtx.annotate('forward'):\n    print('the loss is', 3.1, file=sys.stderr)\n"
    environment = {**os.environ, "MY_TOKEN": "hunter2-of-mine", "MY_PLACE": "/home/somebody/else"}
    report, raw, copied = tmp_path / "a.nsys-rep", tmp_path / "a.sqlite", tmp_path / "copy.sqlite"
    with (tmp_path / "log").open("w+b") as log, open_session(nsys, report, log) as session:
        session.start([sys.executable, "-P", "-c", code], environment)
        session.collect()
    assert b"hunter2-of-mine" in raw.read_bytes()
    share(raw, copied)
    data = copied.read_bytes()
    paths = [os.fsencode(path) for path in (tmp_path, Path(sys.executable).parent, Path.home())]
    values = [value.encode() for value in os.environ.values() if len(value) > 7]
    secrets = (b"hunter2", b"MY_TOKEN", b"/home/", b"the loss", *paths, *values)
    assert [word for word in secrets if word in data] == []
    assert_same_figures(raw, copied, (("ranges",),))


@pytest.mark.nsys
@pytest.mark.parametrize("report", ["cuda_gpu_kern_sum", "nvtx_sum", "cuda_api_sum", "nvtx_gpu_proj_sum"])
def test_nsys_stats_says_the_same_of_a_copy(nsys: Nsys, tmp_path: Path, report: str) -> None:
    said = []
    for name in ("original", "copy"):
        path = tmp_path / f"{name}.sqlite"
        source = TRACES / "small-train.nsys2025.sqlite"
        share(source, path) if name == "copy" else path.write_bytes(source.read_bytes())
        done = subprocess.run(
            [nsys.path, "stats", "-q", "-f", "csv", "-r", report, path], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said.append([line.split(",")[:3] for line in done.stdout.splitlines()])
    assert said[0] == said[1]


def test_a_copy_takes_truths_as_the_reader_does(tmp_path: Path) -> None:
    def change(data: Any) -> None:
        data["segments"][0]["is_expandable"] = ["not empty"]

    copied = pickle.loads(shared_snapshot(tmp_path, change))
    assert [segment["is_expandable"] for segment in copied["segments"]][:2] == [True, False]
