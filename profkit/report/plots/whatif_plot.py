"""The picture of ``profkit whatif``: today's memory and that of the other cases, over one another."""

from __future__ import annotations

from pathlib import Path, PurePath

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from profkit.allocator.requests import Floats
from profkit.analysis.whatif.answers import CaseCurve, WhatIf
from profkit.report.commands.whatif import changed_cases, name_case
from profkit.report.plots.pictures import draw_png
from profkit.report.text import make_visible
from profkit.report.units import format_bytes

_GIB = 2**30
_INK = "#1b1f24"
_TODAY = "#c9ced6"
# Okabe and Ito's palette, which the colour-blind can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def plot_whatif(result: WhatIf, path: Path) -> None:
    """Write the curves to a PNG file: today's filled, the other cases over it, reserved memory dashed.

    Settings that change nothing are left out, and so are more than five cases.

    Raises:
        OSError: it cannot be written.
    """
    with draw_png(path, 10, 5) as (_, axes):
        _draw(axes, result)


def _draw(axes: Axes, result: WhatIf) -> None:
    today, *others = result.curves
    shown = changed_cases(result)
    x = _shares(today)
    axes.fill_between(x, today.allocated / _GIB, color=_TODAY, linewidth=0, label=_label(today, "today"))
    axes.plot(x, today.reserved / _GIB, color=_INK, linewidth=0.8, linestyle="--")
    for curve, colour in zip([curve for curve in others if curve.case in shown], _COLOURS, strict=False):
        x = _shares(curve)
        axes.plot(x, curve.allocated / _GIB, color=colour, linewidth=1.1, label=_label(curve, name_case(curve.case)))
        axes.plot(x, curve.reserved / _GIB, color=colour, linewidth=0.8, linestyle="--")
    highest = max(int(curve.reserved.max()) for curve in result.curves)
    if result.capacity_bytes is not None and result.capacity_bytes < 2 * highest:
        axes.axhline(result.capacity_bytes / _GIB, color=_INK, linewidth=0.8, linestyle=":", label="capacity")
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.set_xlabel("recorded events of the allocator")
    axes.set_ylabel("GiB (dashed: reserved)")
    axes.set_title(make_visible(f"{PurePath(result.snapshot).name}, device {result.device}"), loc="left")
    axes.legend(loc="upper left", frameon=True, fontsize="small")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])


def _shares(curve: CaseCurve) -> Floats:
    return np.linspace(0, 100, len(curve.allocated))


def _label(curve: CaseCurve, name: str) -> str:
    allocated, reserved = int(curve.allocated.max()), int(curve.reserved.max())
    return make_visible(f"{name}: {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved")
