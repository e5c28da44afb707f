"""Pictures in PNG files, and the one way to draw them: names as they are, and a file that is written whole or not."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from profkit.files import write_whole

_DPI = 150


@contextmanager
def draw_png(path: Path, width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """Yield an empty figure of ``width`` by ``height`` inches and its axes; write it to ``path`` when the block ends.

    A dollar sign in a name is a dollar sign, and no formula; a missing glyph is a box.

    Raises:
        OSError: it cannot be written.
    """
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=_DPI, metadata={"Software": "profkit"})
    write_whole(path, picture.getvalue())
