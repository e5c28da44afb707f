"""What every picture needs: names drawn as they are, whatever stands in them, and a file that is whole."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from profkit.files import write_whole

_DPI = 150


@contextmanager
def plain_text() -> Iterator[None]:
    """Draw within this block: a dollar sign in a name is a dollar sign, and no formula; a missing glyph is a box."""
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file.

    Raises:
        OSError: it cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=_DPI, metadata={"Software": "profkit"})
    write_whole(path, picture.getvalue())
