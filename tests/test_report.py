"""The page of a run: its figures are those of the commands, in a real browser without a network."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from markupsafe import escape

from profkit.analysis.memory.places import PartRow
from profkit.analysis.tree.modules import ModuleTime
from profkit.reading import open_capture, open_trace
from profkit.report.document import Column, Table
from profkit.report.page import view_table, without_folders
from profkit.report.page.modules import module_rows
from profkit.report.page.page import render_report
from profkit.report.page.step import MOST_SLICES, slice_median_step
from profkit.report.units import format_bytes, format_ns
from profkit.run.compiled_code import Compilation, GraphBreak, append_records
from tests.browser import draw_first_screen, open_page, read_table
from tests.captures import capture
from tests.conftest import ROOT
from tests.efficiency_runs import change_manifest, make_small_run, write_two_steps
from tests.in_process import check_command, run_command
from tests.nsys_builder import NsysBuilder

pytestmark = pytest.mark.usefixtures("read_once")

SNAPSHOT = ROOT / "traces" / "small-train.snapshot.pickle.gz"
WIDTHS_AND_SCHEMES = [(1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with time, memory, counted work and unprofiled steps."""
    folder = make_small_run(tmp_path_factory.mktemp("small"))
    shutil.copyfile(SNAPSHOT, folder / "snapshot.pickle")
    change_manifest(
        folder,
        argv=["python", "/home/somebody/secret/train.py", "--data=/home/somebody/data/set.bin"],
        started_utc="2026-11-20T10:00:00+00:00",
        environment={"CUDA_VISIBLE_DEVICES": "environment-of-somebody"},
        versions={"torch": "2.11.0"},
        driver="580.1",
        workload={"dtype": "fp32", "steps": 2},
        attached={"steps": [{"step_ns": 33_000_000 + 100_000 * step} for step in range(6)]},
        warnings=["said once", "said once"],
    )
    return folder


@pytest.fixture(scope="module")
def page_file(run: Path) -> Path:
    target = run.parent / "page.html"
    check_command("report", run, "-o", target)
    return target


@pytest.fixture
def page(browser: Any, page_file: Path) -> Iterator[Any]:
    with open_page(browser, page_file) as tab:
        yield tab


def printed(*arguments: str | Path) -> Any:
    return json.loads(run_command(*arguments, "--format", "json", "--full-names").stdout)


# -- the file ---------------------------------------------------------------------------------------------------


def test_the_page_is_one_small_file_that_refers_to_nothing_and_holds_no_folder_or_environment(page_file: Path) -> None:
    text = page_file.read_text()
    assert len(text) < 1_000_000
    assert "default-src 'none'" in text
    assert "http://" not in text
    assert " src=" not in text
    assert "somebody" not in text
    assert "python train.py --data=set.bin" in text
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert text.count("said once") == 1, "a caution, at the head"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/proj/train.py:3 step", "train.py:3 step"),
        ("--data=/mnt/x/y.bin", "--data=y.bin"),
        ("~/secret/train.py", "train.py"),
        ("--out=/home/somebody now", "--out=~ now"),
        ("/usr/lib/python3/site-packages/torch/nn/a.py:5", "torch/nn/a.py:5"),
        ("TFLOP/s, 3 / 4, forward/layer 3", "TFLOP/s, 3 / 4, forward/layer 3"),
        ("void at::f<int>(float*)", "void at::f<int>(float*)"),
    ],
)
def test_absolute_paths_lose_their_folders(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_what_was_not_recorded_is_said_with_the_command_that_records_it(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "lines.jsonl").unlink(missing_ok=True)
    text = render_report(open_capture(tmp_path / "run"))
    assert "lines of source: <code>profkit run" in text[text.index("</header>") :]
    assert 'id="memory"' not in render_report(open_capture(write_two_steps(tmp_path / "alone.sqlite")))


def test_what_torch_compile_did_in_recorded_steps_stands_with_its_line_and_reason(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    change_manifest(folder, processes=[{"process": "7", "pid": 7}])
    append_records(
        folder / "compiled.jsonl",
        [
            Compilation("1", 7, "forward", "model.py:3 forward", 1, True, True, 2_000_000, reason="size mismatch"),
            GraphBreak("2", 7, "Tensor.item()", None, "Do not call it.", ("model.py:9 forward",), 0, False),
        ],
    )
    text = " ".join(re.sub(r"<[^>]*>", " ", render_report(open_capture(folder))).split())
    assert (
        "torch.compile compiled again, which took 0.00 s of recorded step 1: model.py:3 forward (size mismatch)" in text
    )
    assert "graphs break at 1 place, where Python runs instead: model.py:9 forward: Tensor.item()" in text


def test_columns_that_nothing_is_known_of_are_not_drawn(run: Path, tmp_path: Path) -> None:
    shutil.copyfile(run / "manifest.json", tmp_path / "manifest.json")
    builder = NsysBuilder()
    for name, start, end in (("step 0", 0, 1_000), ("forward", 1, 999), ("h.0", 2, 998)):
        builder.range(name, start, end)
    builder.kernel(50, 10)
    builder.write(tmp_path / "trace.sqlite")
    text = render_report(open_capture(tmp_path))
    section = text.partition('<section id="modules"')[2].partition("</section>")[0]
    assert 'data-key="forward_ns"' in section
    for key in ("flops", "forward_peak", "backward_peak", "bytes", "activations"):
        assert f'data-key="{key}"' not in section


def test_names_from_a_capture_are_escaped(tmp_path: Path) -> None:
    trace = write_two_steps(tmp_path / "hostile.sqlite", kernel="</td><script>alert(1)</script>")
    text = render_report(open_capture(trace))
    assert "<script>alert" not in text
    assert text.count("<script") == text.count("</script>")


def test_a_trace_of_cpu_operators_has_a_page() -> None:
    text = render_report(open_capture(ROOT / "traces" / "tiny-train-cpu.kineto.json.gz"))
    assert "time: kernels, ranges, steps" not in text
    assert 'id="timeline"' not in text
    assert 'data-key="total_ns"' in text


def test_the_page_never_overwrites_the_run(run: Path) -> None:
    done = run_command("report", run, "-o", run / "trace.sqlite")
    assert done.returncode == 2
    assert run_command("report", run, "-o", "page.txt").returncode == 2


# -- in a browser -----------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), WIDTHS_AND_SCHEMES)
def test_the_page_fits_every_width_and_passes_the_checks_of_axe(
    browser: Any, page_file: Path, width: int, scheme: str
) -> None:
    with open_page(browser, page_file, width=width, scheme=scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert list_violations(tab) == []


def list_violations(tab: Any) -> list[tuple[str, list[str]]]:
    """Return the rules of axe-core that a page breaks, and the elements that break them."""
    return [
        (rule["id"], [str(node["target"]) for node in rule["nodes"]]) for rule in Axe().run(tab).response["violations"]
    ]


@pytest.mark.browser
def test_the_tables_and_books_are_those_of_the_commands(page: Any, run: Path) -> None:
    kernels, memory = printed("kernels", run), printed("memory", run)
    shown = [(row["name"], int(row["total_ns"]), int(row["count"])) for row in read_table(page, "kernels-3")]
    assert shown == [(row["name"], row["total_ns"], row["count"]) for row in kernels["kernels"]]
    busy = {row["path"]: row["busy_ns"] for row in printed("efficiency", run)["ranges"]}
    assert {row["path"]: int(row["busy_ns"]) for row in read_table(page, "step-2")} == busy
    assert f"All kernel time {kernels['ledger']['total_ns']:,} ns = placed by" in page.inner_text("#kernels")
    assert f"({memory['allocated']['peak_bytes']:,} B), exact" in page.inner_text("#memory")


@pytest.mark.browser
def test_without_javascript_the_tables_are_whole_and_no_button_is_dead(browser: Any, page_file: Path) -> None:
    with open_page(browser, page_file, scripts=False) as tab:
        assert tab.locator("button:visible").count() == 0
        assert tab.locator("#kernels tbody tr").count() > 20
        assert tab.locator("#answer svg rect").count() > 3


@pytest.mark.browser
@pytest.mark.parametrize("size", [0, 512, 7_314_866_176, 3_276_553_216, 1_048_064, 10**13])
def test_the_script_rounds_bytes_as_the_commands_do(page: Any, size: int) -> None:
    """7,314,866,176 B are 6.8125 GiB: a tie, which both round to the even digit."""
    assert page.evaluate("(size) => profkit.formatBytes(size)", size) == format_bytes(size)


@pytest.mark.browser
def test_the_keyboard_sorts_and_searches_a_table(page: Any) -> None:
    head = page.locator("table[data-table='kernels-3'] th[data-key='count'] button")
    head.focus()
    page.keyboard.press("Enter")
    counts = [int(row["count"]) for row in read_table(page, "kernels-3")]
    assert counts == sorted(counts, reverse=True)
    page.keyboard.press("Enter")
    assert [int(row["count"]) for row in read_table(page, "kernels-3")] == sorted(counts)
    page.locator("#kernels input[type=search]").last.fill("gemm")
    visible = page.locator("table[data-table='kernels-3'] tbody tr:not([hidden])")
    assert 0 < visible.count() < len(counts)


@pytest.mark.browser
def test_the_tab_key_reaches_the_figures_first_and_then_every_table(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every((one) => one.tabIndex === 0)")


@pytest.mark.browser
def test_a_table_is_copied_as_csv_with_exact_values(page: Any, run: Path) -> None:
    text = page.evaluate("profkit.csvOf(document.querySelector(\"table[data-table='kernels-3']\"))")
    head, first = text.splitlines()[:2]
    assert head == "share,total_ns,count,mean_ns,category,name"
    assert int(first.split(",")[1]) == printed("kernels", run)["kernels"][0]["total_ns"]


@pytest.mark.browser
def test_the_page_prints_dark_on_white_without_tools_and_with_every_row(browser: Any, page_file: Path) -> None:
    with open_page(browser, page_file, scheme="dark") as page:
        page.emulate_media(media="print")
        assert list_violations(page) == []
        assert_prints_whole(page)


def assert_prints_whole(page: Any) -> None:
    assert not page.locator(".tools").first.is_visible()
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every((one) => one.scrollHeight <= one.clientHeight + 1)"
    )
    assert len(page.pdf()) > 10_000


def test_a_table_with_very_many_rows_says_how_many_it_leaves_out() -> None:
    view = view_table(Table([Column("n", "n")], [{"n": number} for number in range(500)]))
    assert (len(view["rows"]), view["hidden"]) == (400, 100)


# -- the timeline of one step -----------------------------------------------------------------------------------


def timeline_command(tab: Any) -> list[str]:
    """Return the command that the page names as the source of its timeline, without the run's own name."""
    return shlex.split(tab.inner_text("#timeline .source code"))[3:]


@pytest.mark.browser
def test_the_slices_add_up_to_the_kernel_time_that_the_named_command_prints(page: Any, run: Path) -> None:
    told = printed("kernels", run, *timeline_command(page))
    lanes = page.evaluate("profkit.timeline.lanes.filter((one) => one.kind === 'kernels')")
    busy = [sum(lane.get("busy", lane["length"])) for lane in lanes]
    assert sum(busy) == told["kernel_time_ns"]
    assert int(page.get_attribute("[data-fact='timeline-kernels']", "data-value")) == told["kernel_time_ns"]
    assert sum(len(lane["length"]) for lane in lanes) == told["kernel_count"]


@pytest.mark.browser
def test_a_drag_adds_up_the_area_by_category(page: Any, run: Path) -> None:
    by_category = printed("kernels", run, *timeline_command(page), "--by", "category")["kernels"]
    sums = dict(page.evaluate("profkit.timeline.sumArea(0, profkit.timeline.data.span)"))
    told = {row["name"]: {"ns": row["total_ns"], "count": row["count"]} for row in by_category}
    assert {name: sum for name, sum in sums.items() if name != "copies"} == told
    page.locator("#timeline canvas").scroll_into_view_if_needed()
    box = page.locator("#timeline canvas").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 40)
    page.mouse.up()
    assert "on the GPU" in page.inner_text("#timeline-detail strong")
    assert "gemm: " in page.inner_text("#timeline-detail")
    page.click("#timeline-detail button")
    assert page.evaluate("profkit.timeline.state.to - profkit.timeline.state.from < profkit.timeline.data.span / 2")


@pytest.mark.browser
def test_the_keyboard_walks_the_slices_and_shows_where_a_kernel_was_launched(page: Any) -> None:
    page.focus("#timeline canvas")
    lanes = page.evaluate("profkit.timeline.lanes.map((one) => one.kind)")
    for _ in range(lanes.index("kernels") + 1):
        page.keyboard.press("ArrowDown")
    page.keyboard.press(".")
    said = page.inner_text("#timeline-detail")
    assert "launched in: " in said
    assert "from launch to start: " in said
    assert "placed by" in said


def test_many_short_slices_are_merged_and_none_is_lost(tmp_path: Path) -> None:
    builder = NsysBuilder(("step 0", 0, 50_000_000))
    for number in range(9_000):
        builder.kernel(1_000 * number + 1, 300, start=1_000 * number + 100)
    opened = open_trace(builder.write(tmp_path / "many.sqlite"))
    step = slice_median_step(opened.attribution, opened.efficiency().steps)
    (lane,) = [one for one in step.lanes if one.kind == "kernels"]
    assert len(lane.row) <= MOST_SLICES
    assert int(lane.count.sum()) == 9_000
    assert int(lane.busy_ns.sum()) == 9_000 * 300
    assert step.merged >= 9_000 - MOST_SLICES


def test_of_an_even_number_of_steps_the_shorter_middle_one_is_shown(tmp_path: Path) -> None:
    opened = open_trace(write_two_steps(tmp_path / "two.sqlite"))
    steps = opened.efficiency().steps
    step = slice_median_step(opened.attribution, steps)
    assert step.name == min(steps, key=lambda one: (one.gpu.span_ns, one.start_ns)).name
    assert slice_median_step(opened.attribution, ()) is None


# -- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_the_memory_tables_are_those_of_the_command(page: Any, run: Path) -> None:
    told = printed("memory", run)["peak"]
    categories = [(row["category"], int(row["bytes"])) for row in read_table(page, "memory-category")]
    assert categories == [(row["category"], row["bytes"]) for row in told["by_category"]]
    lines = [int(row["bytes"]) for row in read_table(page, "memory-line")]
    assert lines == [row["bytes"] for row in told["by_stack"]]
    modules = {row["name"]: int(row["bytes"]) for row in read_table(page, "memory-module")}
    assert modules == {row["module"]: row["bytes"] for row in told["by_module"]}


@pytest.mark.browser
def test_the_chart_holds_the_peak_and_every_colouring_adds_up_to_it(page: Any, run: Path) -> None:
    told = printed("memory", run)
    sums = page.evaluate(
        """() => {
        const { data, modes, allocated } = profkit.memory;
        const whole = (some) => some.reduce((sum, one) => sum + one.values[data.peak], 0);
        return [allocated[data.peak], ...Object.values(modes).map(whole)];
    }"""
    )
    assert set(sums) == {told["allocated"]["peak_bytes"]}


def test_the_memory_under_other_settings_is_that_of_the_command(page_file: Path, run: Path) -> None:
    today, expandable = printed("whatif", run, "--allocator", "expandable_segments:True")["memory"]["cases"]
    section = page_file.read_text().partition('<section id="whatif"')[2].partition("</section>")[0]
    assert "expandable_segments:True" in section
    assert format_bytes(expandable["reserved_peak_bytes"]) in section
    assert format_bytes(expandable["reserved_peak_bytes"] - today["reserved_peak_bytes"]) in section


# -- the first screen and the modules ---------------------------------------------------------------------------


def test_the_first_screen_says_what_the_summary_says(page_file: Path, run: Path) -> None:
    data, page = printed("summary", run), page_file.read_text()
    first = page.partition('<section id="answer"')[2].partition("</section>")[0]
    assert f'<p class="sentence">{data["answer"]}</p>' in first
    assert re.findall(r"<strong>([^<]*)</strong> <span>a step", first)[0] == "33.25 ms"
    for part in data["step_tree"]["parts"]:
        assert f"{format_ns(part['time_ns'])} (" in first
    for one in data["advice"]:
        assert escape(one["change"]) in first
    assert len(re.findall('<p class="proof">', first)) == len(data["advice"])


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_fits_its_window_and_the_details_are_folded(
    browser: Any, page_file: Path, scheme: str
) -> None:
    with open_page(browser, page_file, width=1280, height=800, scheme=scheme, is_folded=True) as tab:
        box = tab.locator("#answer").bounding_box()
        assert box["y"] + box["height"] <= 800
        assert tab.locator("section details[open]").count() == 0
        tab.evaluate("location.hash = '#memory'")
        tab.wait_for_selector("#memory details[open]")
        assert tab.locator("#chart").bounding_box()["width"] > 300


@pytest.mark.browser
def test_the_picture_of_the_readme_is_small_and_drawn_from_a_run_of_the_repository(
    browser: Any, tmp_path: Path
) -> None:
    draw_first_screen(browser, tmp_path / "page.png")
    drawn, kept = (tmp_path / "page.png").read_bytes(), (ROOT / ".github" / "page.png").read_bytes()
    assert max(len(drawn), len(kept)) <= 300_000
    assert drawn[16:20] == kept[16:20], "its width: `python -m tests.browser .github/page.png` draws it anew"
    assert "(.github/page.png)" in (ROOT / "README.md").read_text()


@pytest.mark.browser
def test_a_change_is_copied_by_its_button_from_the_keyboard(page: Any) -> None:
    copy = page.locator(".tries .copied button").first
    copy.focus()
    page.keyboard.press("Enter")
    page.locator(".tries .copied button", has_text="Copied").wait_for()


@pytest.mark.browser
def test_the_lines_are_those_of_the_summary_and_lead_to_their_sections(page: Any, run: Path) -> None:
    # Commands stand in a type of their own on the page, and in backticks in a terminal; a page names no folders.
    told = without_folders(" ".join(run_command("summary", run, "--all").stdout.split()).replace("`", ""))
    labels = page.locator(".lines dt").all_inner_texts()
    assert labels[:4] == ["STEP", "LIMIT", "GPU", "WORK"]
    for line in page.locator(".lines div").all():
        label, words = line.locator("dt").inner_text(), line.locator("dd p").first.inner_text()
        assert f"{label} {words}" in told
        # What was not recorded has no section.
        if label != "Lacks":
            assert page.locator(line.locator("dt a").get_attribute("href")).count() == 1


@pytest.mark.browser
def test_the_modules_have_the_times_of_the_summary(page: Any, run: Path) -> None:
    told = {one["module"]: one for one in printed("summary", run)["modules"]}
    shown = {row["module"]: row for row in read_table(page, "modules")}
    assert told.keys() == shown.keys()
    for name, one in told.items():
        assert (int(shown[name]["forward_ns"]), int(shown[name]["backward_ns"])) == (
            one["forward_ns"],
            one["backward_ns"],
        )
    flops = {row["name"]: row["flops"] for row in printed("efficiency", run, "--range", "forward")["ranges"]}
    assert int(shown["layer *"]["flops"]) == flops["layer *"]
    peak = printed("memory", run)["peak"]
    held = [row for row in peak["by_module"] if row["module"] in shown]
    assert [int(shown[row["module"]]["bytes"]) for row in held] == [row["bytes"] for row in held]


def test_time_and_memory_of_modules_that_differ_in_a_number_stand_in_one_row() -> None:
    times = [ModuleTime("model", None, 1, 100, 200, 0), ModuleTime("h.*", "model", 2, 60, 120, 5)]
    times += [ModuleTime("head", None, 1, 7, 7, 0), ModuleTime("h.*.mlp", "h.*", 2, 50, 100, 0)]
    sizes = {"model": 700, "h": 600, "h.0": 300, "h.0.mlp": 200, "h.1": 300, "h.1.mlp": 250, "(outside modules)": 50}
    parts = [PartRow(name, (name,), size, 0.1, 1, 1, {"activations": size}, {}) for name, size in sizes.items()]
    memory = SimpleNamespace(composition=SimpleNamespace(by_module=parts))
    capture = SimpleNamespace(trace=None)
    run = SimpleNamespace(
        summary=SimpleNamespace(modules=times, compared=None), memory=memory, efficiency=None, capture=capture
    )
    assert [(row["module"], row["depth"], row.get("bytes"), row["recompute_ns"]) for row in module_rows(run)] == [
        ("model", 0, 700, None),
        ("h.*", 1, 600, 5),
        ("h.*.mlp", 2, 450, None),
        ("head", 0, None, None),
    ]


@pytest.mark.browser
def test_a_module_folds_by_keyboard_and_chooses_what_the_sections_below_show(page: Any) -> None:
    rows = page.locator("table[data-table='modules'] tbody tr")
    before = rows.locator("visible=true").count()
    fold = page.locator("table[data-table='modules'] button.fold").first
    fold.focus()
    page.keyboard.press("Enter")
    assert fold.get_attribute("aria-expanded") == "false"
    assert rows.locator("visible=true").count() < before
    page.keyboard.press("Enter")
    page.locator("table[data-table='modules'] button[title^='Show layer']").first.click()
    assert page.evaluate("profkit.timeline.state.module") == "layer *"
    assert page.locator("tr[aria-selected=true]").count() == 1


def choose(page: Any, module: str, table: str = "modules", key: str = "module") -> dict[str, str]:
    page.evaluate(
        """([name, table]) => [...document.querySelectorAll(`table[data-table='${table}'] tbody tr`)]
            .find((row) => row.cells[0].dataset.value === name).querySelector("button[title]").click()""",
        [module, table],
    )
    return next(row for row in read_table(page, table) if row[key] == module)


@pytest.mark.browser
def test_the_kernels_of_a_chosen_module_add_up_to_its_times(page: Any, run: Path) -> None:
    modules = [one["module"] for one in printed("summary", run)["modules"]]
    for module in modules:
        chosen = choose(page, module)
        rows = read_table(page, "module-kernels") if page.locator("[data-table='module-kernels']").count() else []
        assert not page.locator("#kernels-whole").is_visible()
        for part in ("forward_ns", "backward_ns"):
            assert sum(int(row[part]) for row in rows) == int(chosen[part]), module
        assert sum(int(row["count"]) for row in rows) == int(chosen["kernel_count"]), module
    # The command that the section names prints the same kernels.
    choose(page, "layer *")
    words = shlex.split(page.inner_text("#kernels .choice-of-module code"))
    told = {row["name"]: (row["total_ns"], row["count"]) for row in printed("kernels", run, *words[3:])["kernels"]}
    of_forward = {row["name"]: int(row["forward_ns"]) for row in read_table(page, "module-kernels")}
    assert {name: ns for name, ns in of_forward.items() if ns} == {name: ns for name, (ns, _) in told.items()}
    page.click(".chosen button")
    assert page.locator("#kernels-whole").is_visible()
    assert page.locator("[data-table='module-kernels']").count() == 0


@pytest.mark.browser
def test_the_memory_of_a_chosen_module_adds_up_by_line_and_by_category(page: Any) -> None:
    for row in read_table(page, "memory-module"):
        choose(page, row["name"], "memory-module", "name")
        lines, categories = read_table(page, "module-lines"), read_table(page, "module-categories")
        assert sum(int(one["bytes"]) for one in lines) == int(row["bytes"])
        assert sum(int(one["bytes"]) for one in categories) == int(row["bytes"])
        shown = {one["category"]: int(one["bytes"]) for one in categories}
        assert shown.get("activations", 0) == int(row["activations"] or 0)


@pytest.mark.browser
def test_a_sorted_tree_stays_a_tree(page: Any) -> None:
    page.click("table[data-table='modules'] th[data-key='forward_ns'] button")
    script = """() => [...document.querySelectorAll("table[data-table='modules'] tbody tr")]
        .map((row) => [Number(row.dataset.depth), Number(row.cells[1].dataset.value || -1)])"""
    rows = page.evaluate(script)
    assert rows[0][0] == 0
    assert all(after[0] <= before[0] + 1 for before, after in pairwise(rows))
    for depth in {row[0] for row in rows}:
        run_of: list[float] = []
        for row_depth, value in rows:
            if row_depth < depth:
                run_of = []
            elif row_depth == depth:
                run_of.append(value)
                assert run_of == sorted(run_of, reverse=True)


def test_a_snapshot_of_a_failed_allocation_says_why_it_failed() -> None:
    text = render_report(open_capture(capture("oom.pickle")))
    assert "is unknown; <code>profkit run --memory</code> records whose tensors they are" in text
    assert "Out of memory 1 time" in text
    assert "needed up to" in text or "it needed" in text
