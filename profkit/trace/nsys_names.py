"""The strings of an nsys export: StringIds, fetched as they are asked for."""

from __future__ import annotations

import numpy as np

from profkit.trace.columns import Ints
from profkit.trace.sqlite_file import SqliteFile


class Names:
    """The strings that a trace uses, each once, filled from the export's StringIds as they are asked for."""

    def __init__(self, file: SqliteFile) -> None:
        self.strings: list[str] = []
        self._file = file
        self._index: dict[str, int] = {}

    def intern(self, string: str) -> int:
        """Return the index of a string, adding it if it is new."""
        index = self._index.setdefault(string, len(self.strings))
        if index == len(self.strings):
            self.strings.append(string)
        return index

    def indices(self, string_ids: list[int], given: dict[int, str]) -> Ints:
        """Return the index of each string id; ``given`` names the ones that are no StringIds."""
        strings = self.values([i for i in string_ids if i not in given]) | given
        return np.array([self.intern(strings.get(i, f"(unnamed, string id {i})")) for i in string_ids], dtype=np.int64)

    def values(self, string_ids: list[int]) -> dict[int, str]:
        """Return the strings of these ids."""
        found: dict[int, str] = {}
        for start in range(0, len(string_ids), 500):
            some = string_ids[start : start + 500]
            marks = ",".join("?" * len(some))
            found.update(self._file.rows(f"SELECT id, value FROM StringIds WHERE id IN ({marks})", some))
        return {key: str(value) for key, value in found.items()}
