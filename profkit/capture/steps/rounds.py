"""Things that happen in turn, round after round: which of them a round ends with."""

from __future__ import annotations

from typing import Any
from weakref import ref


class Round:
    """Learns from what happens which things belong to one round; it holds none of them alive.

    The first round ends where one of its things is about to happen again. What happens once between two rounds belongs
    to none; what happens twice there, without any of the round's things in between, takes the round's place, as the
    optimizers of a new epoch do.
    """

    def __init__(self) -> None:
        self.changes = 0
        """How often what belongs to a round may have changed."""
        self._members: list[ref[Any]] = []
        self._others: list[ref[Any]] = []
        self._is_learned = False

    def note(self, one: Any) -> None:
        """``one`` is about to happen."""
        if self._is_learned and not self._others and len(self._members) == 1 and self._members[0]() is one:
            return
        self.changes += 1
        self._members, self._others = _alive(self._members), _alive(self._others)
        at = _index(self._others, one)
        if at is not None:
            self._members, self._others, self._is_learned = self._others[at:], [], True
        elif not self._members:
            self._members, self._others, self._is_learned = [ref(one)], [ref(one)], False
        elif _index(self._members, one) is None:
            self._others.append(ref(one))
        elif self._is_learned:
            self._others = []

    def ends_with(self, one: Any) -> bool:
        """Return whether ``one`` is the last of a round; of the first round, the first that happened is."""
        return bool(self._members) and self._members[-1]() is one

    def happening(self) -> list[Any]:
        """Return the things of a round, and those that have happened since the last one."""
        others = [one for other in self._others if (one := other()) is not None]
        members = self.members()
        return members + [one for one in others if all(one is not member for member in members)]

    def members(self) -> list[Any]:
        """Return the things of a round, in their order."""
        return [one for member in self._members if (one := member()) is not None]


def _alive(refs: list[ref[Any]]) -> list[ref[Any]]:
    return [one for one in refs if one() is not None]


def _index(refs: list[ref[Any]], one: Any) -> int | None:
    return next((at for at, member in enumerate(refs) if member() is one), None)
