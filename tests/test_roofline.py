"""`profkit efficiency --plot`: the points, the roofs and the names on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from profkit import read_trace
from profkit.errors import TraceError
from profkit.report.plots import plot_roofline, rate_of
from tests.efficiency_runs import SMALL, make_small_run
from tests.in_process import run_command

PNG = b"\x89PNG\r\n\x1a\n"


def _draw(run: Path, drawn: list[Figure]) -> Figure:
    opened = read_trace(run)
    plot_roofline(opened.efficiency(), run / "r.png")
    figure: Figure = drawn[-1]
    return figure


def test_every_point_lies_at_its_figures_and_under_the_measured_roof(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = _draw(make_small_run(tmp_path), drawn)
    (axes,) = figure.axes
    rows = read_trace(tmp_path).efficiency().ranges
    expected = {(row.intensity, rate_of(row) / 1e12) for row in rows}
    points = {tuple(point) for one in axes.collections for point in one.get_offsets().tolist()}
    assert len(rows) == len(points) == 12
    for point, range_point in zip(sorted(points), sorted(expected), strict=True):
        assert point == pytest.approx(range_point)
    assert {line.get_linestyle() for line in axes.lines} == {"-"}
    assert axes.lines[0].get_ydata()[-1] == 50
    assert axes.lines[0].get_xdata()[1] == pytest.approx(50 / 4)
    assert "peaks measured" in _texts(figure)


def test_every_point_has_a_number_whose_name_stands_beside(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = _draw(make_small_run(tmp_path), drawn)
    (axes,) = figure.axes
    names = dict(line.split("  ", 1) for line in axes.texts[-1].get_text().splitlines())
    rows = {rate_of(row) / 1e12: row.name for row in read_trace(tmp_path).efficiency().ranges}
    numbers = {
        text.get_text(): rows[text.xy[1]] for text in axes.texts if isinstance(text, Annotation) and text.xy[1] in rows
    }
    assert numbers == names
    assert len(names) == 12


def test_roofs_of_the_datasheet_are_dashed_and_say_so(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = _draw(make_small_run(tmp_path, ceilings=False), drawn)
    assert {line.get_linestyle() for line in figure.axes[0].lines} == {"--"}
    assert "peaks from the datasheet" in _texts(figure)


def test_roofs_that_are_close_share_a_label(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = _draw(make_small_run(tmp_path, ceilings=False), drawn)
    assert "bf16 989.5, fp16 989.5 TFLOP/s" in _texts(figure)


def test_a_trace_without_known_bytes_is_refused(tmp_path: Path) -> None:
    opened = read_trace(SMALL)
    with pytest.raises(TraceError, match=r"FLOPs and least bytes of its ranges are unknown.*`profkit run` counts them"):
        plot_roofline(opened.efficiency(dtype="fp32"), tmp_path / "r.png")
    run = make_small_run(tmp_path, ceilings=False)
    manifest = json.loads((run / "manifest.json").read_text()) | {"gpu": "a GPU of no datasheet"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    opened = read_trace(run)
    with pytest.raises(TraceError, match=r"the GPU's peaks are unknown.*`profkit ceilings`"):
        plot_roofline(opened.efficiency(), tmp_path / "r.png")


def test_the_command_writes_a_png(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    done = run_command("efficiency", run, "--numbered", "--plot", tmp_path / "r.png")
    assert done.returncode == 0
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)
    assert run_command("efficiency", run, "--plot", tmp_path / "r.pdf").returncode == 2
    assert run_command("efficiency", run, "--plot", run / "work.json").returncode == 2


def _texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.axes[0].texts)


def test_phases_have_shapes_and_areas_grow_with_time(tmp_path: Path, drawn: list[Figure]) -> None:
    figure = _draw(make_small_run(tmp_path), drawn)
    (axes,) = figure.axes
    rows = {rate_of(row) / 1e12: row for row in read_trace(tmp_path).efficiency().ranges}
    longest = max(row.busy_ns for row in rows.values())
    shapes: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for one in axes.collections:
        for (_, rate), area in zip(one.get_offsets().tolist(), one.get_sizes().tolist(), strict=True):
            row = rows[rate]
            assert area == pytest.approx(max(420 * row.busy_ns / longest, 18))
            for phase, found in shapes.items():
                if phase in row.path.split("/"):
                    found.add(len(one.get_paths()[0].vertices))
    assert len(shapes["forward"]) == len(shapes["backward"]) == 1
    assert shapes["forward"] != shapes["backward"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"forward", "backward", "optimizer"} < set(legend)
    assert legend[-1].startswith("area: GPU time, the largest ")
