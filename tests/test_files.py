"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from profkit.files import write_whole


def test_a_file_is_written_whole_with_the_mode_that_it_had(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    write_whole(path, b"one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o600)
    write_whole(path, b"two")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"two", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_keeps_pointing_and_a_long_name_is_no_obstacle(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 250)
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, b"new")
    assert (link.is_symlink(), target.read_bytes()) == (True, b"new")


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.txt"
    path.write_bytes(b"old")

    def fail(partial: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(partial), None, str(target))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, b"new")
    assert caught.value.filename == str(path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


def test_a_full_disk_is_noticed_before_the_old_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small result stays in the buffer until the file is closed: only then does a full disk show."""
    path = tmp_path / "r.txt"
    path.write_bytes(b"old")
    replaced = []
    real = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (replaced.append(self.read_bytes()), real(self, to)))
    write_whole(path, b"new")
    assert replaced == [b"new"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
