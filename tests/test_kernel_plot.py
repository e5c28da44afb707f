"""The picture of `profkit kernels --plot`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from profkit import read_trace
from profkit.report.kernel_plot import MOST_BARS, _draw, plot_kernels
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


def test_a_plot_of_a_lossy_capture_shows_the_verdict(captures: Path) -> None:
    opened = read_trace(captures / "lossy.nsys2023.sqlite")
    figure = _draw(opened.kernels(), opened.self_check, 5, "total")
    assert figure.get_suptitle() == "SELF-CHECK FAILED: do not trust this capture's totals"


def test_a_plot_has_60_bars_at_most_and_one_for_the_rest(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for number in range(200):
        builder.kernel(10 * number, 5 + number, name=f"k{number}", device=0)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    plot_kernels(opened.kernels(device=0), opened.self_check, tmp_path / "p.png", top=3000)
    figure = _draw(opened.kernels(device=0), opened.self_check, MOST_BARS, "total")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert (len(labels), labels[-1]) == (MOST_BARS + 1, "(140 more)")
    assert figure.axes[0].get_title(loc="left").startswith("part of the capture, device 0 only")
    header = (tmp_path / "p.png").read_bytes()[16:24]
    assert int.from_bytes(header[4:], "big") < 4000
