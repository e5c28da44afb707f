"""The picture of `profkit kernels --plot`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.report.plots import MOST_BARS, plot_kernels
from tests.nsys_builder import NsysBuilder

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_plot_is_a_picture_and_only_a_png(profkit: Run, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "k.png"
    assert profkit("kernels", trace, "--plot", picture).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]
    done = profkit("kernels", trace, "--plot", tmp_path / "k.jpg")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_plot_of_odd_names_gives_no_warning(profkit: Run, oddly_named: Path, tmp_path: Path) -> None:
    done = profkit("kernels", oddly_named, "--range", "forward*", "--plot", tmp_path / "p.png")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plot_of_a_lossy_capture_shows_the_verdict(captures: Path, tmp_path: Path, drawn: list[Any]) -> None:
    opened = read_trace(captures / "lossy.nsys2023.sqlite")
    plot_kernels(opened, opened.kernels(), tmp_path / "p.png", top=5, totals=True)
    figure = drawn[-1]
    assert figure.get_suptitle().startswith("SELF-CHECK FAILED: do not trust this capture's totals\n")


def test_a_plot_has_60_bars_at_most_and_one_for_the_rest(tmp_path: Path, drawn: list[Any]) -> None:
    builder = NsysBuilder()
    for number in range(200):
        builder.kernel(10 * number, 5 + number, name=f"k{number}", device=0)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    plot_kernels(opened, opened.kernels(device=0), tmp_path / "p.png", top=3000)
    figure = drawn[-1]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert (len(labels), labels[-1]) == (MOST_BARS + 1, "(140 more)")
    assert figure.get_suptitle().startswith("t.sqlite\npart of the capture, device 0 only")
    header = (tmp_path / "p.png").read_bytes()[16:24]
    assert int.from_bytes(header[4:], "big") < 4000


def test_bars_are_averages_per_step_under_a_title_of_run_and_gpu(trace: Path, tmp_path: Path, drawn: list[Any]) -> None:
    opened = read_trace(trace)
    result = opened.kernels()
    assert result.steps == 2
    plot_kernels(opened, result, tmp_path / "p.png", top=5)
    figure = drawn[-1]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sum(widths) * 1e6 == pytest.approx(result.total_ns / 2)
    assert figure.axes[0].get_xlabel() == "kernel time, ms per step"
    assert figure.get_suptitle().startswith("t.sqlite\nwhole capture: 4 kernels per step (2 steps), 9.250 µs")
    plot_kernels(opened, result, tmp_path / "p.png", top=5, totals=True)
    figure = drawn[-1]
    assert sum(bar.get_width() for bar in figure.axes[0].patches) * 1e6 == pytest.approx(result.total_ns)


def test_waiting_in_a_collective_is_drawn_apart(tmp_path: Path, drawn: list[Any]) -> None:
    builder = NsysBuilder()
    for device, start in ((0, 1000), (1, 1600)):
        builder.kernel(100, 2000 - start, name="ncclDevKernel_AllReduce", pid=100 + device, device=device, start=start)
        builder.kernel(50, 300, name="gemm", pid=100 + device, device=device, start=200)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    result = opened.kernels()
    assert {row.name: row.waiting_ns for row in result.kernels} == {"ncclDevKernel_AllReduce": 600, "gemm": None}
    plot_kernels(opened, result, tmp_path / "p.png", top=5, totals=True)
    figure = drawn[-1]
    assert [round(bar.get_width() * 1e6) for bar in figure.axes[0].patches] == [800, 600, 600, 0]
    assert "1.400 µs (600 ns waiting)" in figure.axes[0].texts[0].get_text()
    assert "waiting for another rank" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_no_text_leaves_the_axes(tmp_path: Path, drawn: list[Any]) -> None:
    builder = NsysBuilder()
    for number in range(3):
        builder.kernel(10_000 * number, 9_999, name=f"k{number}" + "x" * 90)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    plot_kernels(opened, opened.kernels(), tmp_path / "p.png", top=5, totals=True)
    figure = drawn[-1]
    figure.draw_without_rendering()
    (axes,) = figure.axes
    right = axes.get_window_extent().x1
    assert axes.texts
    assert all(text.get_window_extent().x1 <= right for text in axes.texts)
