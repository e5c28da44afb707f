"""The binned timeline, the picture, and the page, this last in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from profkit import read_snapshot
from profkit.analysis.memory.bins import OTHER_STACKS, Bins, bin_history
from profkit.analysis.memory.device import NOT_SELECTED, Filter
from profkit.analysis.opened import OpenedCapture
from profkit.cli.memory import memory
from profkit.errors import UsageError
from profkit.report.colours import MEMORY, PHASES
from profkit.report.page.modules import build_data
from profkit.report.page.page import render_memory_page
from tests.allocator_reference import MIB
from tests.browser import open_page
from tests.captures import capture
from tests.memory_captures import Training, opened
from tests.run_builder import start_run


def assert_books_close(bins: Bins) -> None:
    for series in (bins.by_category, bins.by_stack, *([bins.by_module] if bins.by_module else [])):
        assert np.array_equal(sum(one.bytes for one in series), bins.allocated)
    assert (bins.lowest <= bins.allocated).all()
    assert (bins.allocated <= bins.reserved).all()
    assert (np.diff(bins.moments) > 0).all()


@pytest.mark.parametrize("bin_count", [1, 7, 60, 8192])
@pytest.mark.parametrize("name", ["small.pickle", "midrun.pickle", "expandable.pickle", "oom.pickle"])
def test_every_sample_adds_up_and_one_of_them_is_the_peak(name: str, bin_count: int) -> None:
    chosen = read_snapshot(capture(name)).device()
    bins = bin_history(chosen, bin_count=bin_count)
    assert_books_close(bins)
    assert len(bins.moments) == min(bin_count, len(chosen.device.events) + 1)
    assert bins.allocated[bins.peak] == chosen.history.allocated_peak_bytes


def test_a_short_history_is_not_binned_and_one_without_events_has_one_sample() -> None:
    chosen = Training().opened().device()
    bins = bin_history(chosen)
    assert np.array_equal(bins.allocated, chosen.history.curves.allocated)
    assert np.array_equal(bins.lowest, bins.allocated)
    found = {one.name: int(one.bytes[bins.peak]) for one in bins.by_category}
    assert (found["activations"], found["gradients"]) == (12 * MIB, 8 * MIB)
    without = bin_history(opened(Training().snapshot() | {"device_traces": []}).device())
    assert (without.allocated.tolist(), without.has_times) == ([24 * MIB], False)
    assert_books_close(without)


def test_the_categories_at_a_sample_equal_those_of_the_account_and_small_stacks_are_others() -> None:
    source = read_snapshot(capture("small.pickle"))
    bins = bin_history(source.device(), bin_count=500)
    sampled = {one.name: int(one.bytes[bins.peak]) for one in bins.by_category}
    account = {row.category: row.bytes for row in source.memory().composition.by_category}
    assert {name: size for name, size in sampled.items() if size} == account
    assert (len(bins.by_stack), bins.by_stack[-1].name) == (13, OTHER_STACKS)


def test_a_filter_adds_up_the_other_allocations_in_one_series() -> None:
    bins = bin_history(Training().opened().device(), Filter(stack="adam.py"))
    assert [one.name for one in bins.by_category] == ["optimizer state", NOT_SELECTED]
    assert_books_close(bins)
    assert {shape.category for shape in bins.shapes} == {"optimizer state"}


def test_an_allocation_has_its_category_size_lifetime_and_stack() -> None:
    bins = bin_history(Training().opened().device())
    (inner, *_) = [shape for shape in bins.shapes if shape.requested_bytes == 3 * MIB]
    assert (inner.category, inner.evidence, inner.stack) == ("temporaries", "lifetime", ())
    assert inner.born_us is not None
    assert inner.freed_us is not None
    assert inner.freed_us > inner.born_us
    states = [shape for shape in bins.shapes if shape.category == "optimizer state"]
    assert len(states) == 4
    assert all(shape.freed_us is None and shape.label.startswith("train.py:44") for shape in states)


# -- files ------------------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(memory, [str(one) for one in arguments])


def test_a_timeline_is_a_picture_or_a_page_and_another_kind_is_refused(tmp_path: Path) -> None:
    snapshot = Training().write(tmp_path)
    for name, sign in (("t.png", b"\x89PNG\r\n\x1a\n"), ("t.html", b"memory-data")):
        assert run(snapshot, "--timeline", tmp_path / name).exit_code == 0
        assert sign in (tmp_path / name).read_bytes()
    assert isinstance(run(snapshot, "--timeline", "t.pdf").exception, UsageError)


def test_the_title_of_the_page_says_which_run_it_is(tmp_path: Path) -> None:
    folder = start_run(tmp_path / "my-run", argv=["python", "train.py"])
    Training().write(folder).rename(folder / "snapshot.pickle")
    assert run(folder, "--timeline", tmp_path / "t.html").exit_code == 0
    text = (tmp_path / "t.html").read_text()
    assert "<title>my-run, device 0: memory over time</title>" in text
    assert "python train.py" in text


def test_no_phase_has_a_hue_that_a_category_could_be_taken_for() -> None:
    for colour in PHASES.values():
        channels = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert max(channels) - min(channels) < 24, colour
    assert not set(PHASES.values()) & set(MEMORY.values())


def test_the_data_in_the_page_are_exact_and_few(tmp_path: Path) -> None:
    source = read_snapshot(capture("small.pickle"))
    bins = bin_history(source.device())
    data = json.loads(json.dumps(build_data(bins, source.device())))
    assert data["unit"] == 512
    assert (np.cumsum(data["allocated"]) * 512).tolist() == bins.allocated.tolist()
    assert sum(np.cumsum(one["values"])[data["peak"]] for one in data["series"]["stack"]) * 512 == 3_073_660_928
    run(capture("small.pickle"), "--timeline", tmp_path / "t.html")
    assert (tmp_path / "t.html").stat().st_size < 1_000_000


# -- in a browser -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("page") / "timeline.html"
    source = Training(steps=6).opened()
    capture = OpenedCapture(Path("made.pickle"), None, None, source)
    target.write_text(render_memory_page(capture, source.device(), source.memory()), encoding="utf-8")
    return target


@pytest.fixture
def page(browser: Any, page_file: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = getattr(request, "param", (1400, "light"))
    with open_page(browser, page_file, width=width, scheme=scheme) as tab:
        tab.wait_for_function("profkit.memory.timing.ready > 0")
        yield tab


def colours(tab: Any) -> list[int]:
    """Return how many pixels of each of the largest colours the chart has."""
    script = """() => {
        const chart = document.querySelector('#chart canvas'), seen = new Map();
        const data = chart.getContext('2d').getImageData(0, 0, chart.width, chart.height).data;
        for (let i = 0; i < data.length; i += 4) {
            const colour = (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
            if (data[i + 3] > 250) seen.set(colour, (seen.get(colour) || 0) + 1);
        }
        return [...seen.entries()].filter((one) => one[1] > 500).map((one) => one[0]);
    }"""
    return tab.evaluate(script)


@pytest.mark.browser
@pytest.mark.parametrize(
    "page", [(1400, "light"), (1400, "dark"), (700, "light"), (390, "light"), (390, "dark")], indirect=True
)
def test_the_page_draws_at_every_size_and_in_both_schemes(page: Any) -> None:
    assert {0x0072B2, 0xE69F00, 0x009E73} <= set(colours(page))  # parameters, activations, optimizer state
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    box = page.locator("#chart canvas").bounding_box()
    assert box["width"] > 300
    assert box["height"] >= 300


@pytest.mark.browser
def test_hovering_shows_the_moment_and_the_stack(page: Any) -> None:
    assert page.inner_text("#moment").startswith("Peak:")
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] - 5)
    assert page.inner_text("#detail strong") == "parameters"
    assert "% of what is allocated at this moment" in page.inner_text("#detail")
    page.click("#mode button[data-value=stack]")
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] - 6)
    assert page.locator("#detail .stack li").count() > 0


@pytest.mark.browser
def test_hovering_over_a_single_allocation_shows_its_details(page: Any) -> None:
    page.click("#mode button[data-value=allocation]")
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] - 5)
    text = page.inner_text("#detail")
    assert "4.000 MiB (4,194,304 B, 4,194,304 B requested)" in text
    assert "parameters (guessed from lifetime)" in text
    assert "to the end" in text


@pytest.mark.browser
def test_the_page_zooms_moves_and_returns_to_the_whole(page: Any) -> None:
    extent = "() => [profkit.memory.plot.scales.x.min, profkit.memory.plot.scales.x.max]"
    whole = page.evaluate(extent)
    page.click("#peak")
    near = page.evaluate(extent)
    assert whole[0] <= near[0] < near[1] < whole[1]
    page.focus("#chart")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(extent)[0] > near[0]
    page.keyboard.press("0")
    assert page.evaluate(extent) == whole
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.focus("#chart")
    page.mouse.wheel(0, -200)
    page.wait_for_function(
        "(whole) => profkit.memory.plot.scales.x.max - profkit.memory.plot.scales.x.min < whole[1] - whole[0]",
        arg=whole,
    )


@pytest.mark.browser
def test_the_axis_can_be_time_or_events(page: Any) -> None:
    page.click("#axis button[data-value=events]")
    events = page.evaluate("profkit.memory.plot.scales.x.max")
    page.click("#axis button[data-value=time]")
    assert events > 100
    assert page.evaluate("profkit.memory.plot.scales.x.max") < 1


def test_an_allocation_has_its_own_stack_and_a_series_only_what_its_stacks_share() -> None:
    bins = bin_history(read_snapshot(capture("small.pickle")).device())
    data = build_data(bins, read_snapshot(capture("small.pickle")).device())
    stacks = [[data["texts"][frame] for frame in stack] for stack in data["stacks"]]
    for shape, number in zip(bins.shapes, data["shapes"]["stack"], strict=True):
        assert stacks[number] == list(shape.stack[:20])
    # One line that two callers reach: neither's frames stand for the other's.
    (shared,) = [one for one in bins.by_stack if one.name.startswith("model_probe.py:18 sdpa")]
    assert shared.stack_count == 2
    of_line = {shape.stack for shape in bins.shapes if shape.label == shared.name}
    assert all(stack[: len(shared.stack)] == shared.stack for stack in of_line)
    assert all(len(shared.stack) < len(stack) for stack in of_line)


@pytest.mark.browser
def test_every_optimizer_step_has_a_band_though_only_the_first_allocates(page: Any) -> None:
    page.click("#axis button[data-value=events]")
    seen = page.evaluate(
        """() => {
        const { plot, data } = profkit.memory, ctx = plot.ctx, wanted = data.colours.phases.optimizer;
        const strip = ctx.getImageData(0, Math.round(plot.bbox.top + 3 * devicePixelRatio), ctx.canvas.width, 1).data;
        return data.phases.filter((one) => one.name === "optimizer").map((one) => {
            const x = plot.valToPos(one.first, "x", true) + 2 * devicePixelRatio;
            const [r, g, b] = strip.slice(4 * Math.round(x), 4 * Math.round(x) + 3);
            return "#" + [r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("").toUpperCase() === wanted;
        });
    }"""
    )
    assert len(seen) == 6
    assert all(seen)


@pytest.mark.browser
@pytest.mark.parametrize("page", [(700, "light"), (1400, "light")], indirect=True)
def test_the_details_of_what_is_pointed_at_are_in_view(page: Any) -> None:
    page.locator("#chart").scroll_into_view_if_needed()
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] - 5)
    found = page.locator("#detail strong").bounding_box()
    assert 0 <= found["y"] < 900 - found["height"]


@pytest.mark.browser
def test_a_pinned_stack_stays_and_can_be_copied(page: Any) -> None:
    page.click("#mode button[data-value=stack]")
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + box["height"] - 6)
    pinned = page.inner_text("#detail strong")
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    assert page.inner_text("#detail strong") == pinned
    assert page.inner_text("#detail button") == "Copy this stack"
    page.focus("#chart")
    page.keyboard.press("Escape")
    assert page.locator("#detail button").count() == 0


@pytest.mark.browser
def test_two_moments_are_compared_by_what_came_and_what_went(page: Any) -> None:
    page.focus("#chart")
    page.keyboard.press("m")  # from the peak
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    assert "Came" in page.inner_text("#detail")
    assert "Went" in page.inner_text("#detail")
    assert "activations" in page.inner_text("#detail")
    told = page.evaluate(
        "profkit.memory.allocated[profkit.memory.state.at] - profkit.memory.allocated[profkit.memory.state.mark]"
    )
    assert told < 0
    assert "−" in page.inner_text("#moment")


@pytest.mark.browser
def test_the_legend_hides_a_series(page: Any) -> None:
    before = set(colours(page))
    assert 0x0072B2 in before
    page.locator("#legend button", has_text="parameters").click()
    assert 0x0072B2 not in colours(page)
    assert page.get_attribute("#legend button[title=parameters]", "aria-pressed") == "false"
    page.locator("#legend button", has_text="parameters").click()
    assert set(colours(page)) == before
