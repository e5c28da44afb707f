"""What commands print, as transcripts in ``golden/``; ``PROFKIT_GOLDEN=write`` writes them anew, to be read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from profkit.version import __version__
from tests.in_process import run_command


def check_transcript(name: str, calls: Iterable[Sequence[str | Path]]) -> None:
    """Compare what the calls print, in a screen of 80 columns, with the transcript of this name."""
    check_text(name, "\n".join(map(_transcribe, calls)))


def check_text(name: str, text: str) -> None:
    file = Path(__file__).parent / "golden" / f"{name}.txt"
    text = text.replace(f'"profkit": "{__version__}"', '"profkit": "VERSION"')
    if os.environ.get("PROFKIT_GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def _transcribe(words: Sequence[str | Path]) -> str:
    """Return what a call prints in the folder of its first capture: long paths would be wrapped by their length."""
    folders = [word.parent for word in words if isinstance(word, Path)]
    with contextlib.chdir(folders[0]) if folders else contextlib.nullcontext():
        done = run_command(*(os.path.relpath(word) if isinstance(word, Path) else word for word in words))
    asked = " ".join(word.name if isinstance(word, Path) else word for word in words)
    text = f"$ profkit {asked}\n{done.stdout}"
    text += f"-- standard error\n{done.stderr}" if done.stderr else ""
    text += f"-- exit {done.returncode}\n" if done.returncode else ""
    for folder in dict.fromkeys(folders):
        from_first = os.path.relpath(folder, folders[0])
        text = text.replace(f"{folder}/", "") if from_first == "." else text.replace(f"{from_first}/", "")
    return text
