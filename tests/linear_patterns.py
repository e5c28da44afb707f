"""Whether a regular expression takes time in proportion to the text, read off its parse tree; nothing is timed.

Python's engine tries a pattern at every place, and at each place every length of every repeat. Each unbounded repeat
that can begin at many places, or that follows another, multiplies the steps by the length of the text. A pattern is
linear if that happens at most once: one unbounded repeat that starts at one place, or none that starts at every place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from re import _compiler, _parser  # type: ignore[attr-defined]
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

_MOST_BOUNDED = 200
"""Bounded repeats count as constant if their bounds multiply to no more than this."""

Item = tuple[Any, Any]
_ASCII = [chr(code) for code in range(128)]
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
_SINGLE = (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY)


def explain_not_linear(pattern: str, flags: int = 0) -> str | None:
    """Return why matching ``pattern`` may take longer than in proportion to the text; None if it may not."""
    tree = _parser.parse(pattern, flags)
    for whole in _branches(list(tree)):
        branch = whole[:-1] if whole and _ends_freely(whole[-1]) else whole
        try:
            degree, bounded = _degree(branch)
        except _NestedError as error:
            return str(error)
        if bounded > _MOST_BOUNDED:
            return f"bounded repeats multiply to {bounded}"
        if degree + (not _starts_once(branch)) > 1:
            return f"{degree} unbounded repeats, and it may start {'once' if _starts_once(branch) else 'anywhere'}"
    return None


class _NestedError(Exception):
    pass


def _branches(items: list[Item]) -> Iterable[list[Item]]:
    """Return the alternatives of a whole pattern; groups around all of it are opened."""
    if len(items) == 1 and items[0][0] is sre.SUBPATTERN:
        yield from _branches(list(items[0][1][-1]))
    elif len(items) == 1 and items[0][0] is sre.BRANCH:
        for branch in items[0][1][1]:
            yield from _branches(list(branch))
    else:
        yield items


def _degree(items: list[Item]) -> tuple[int, int]:
    """Return how many unbounded repeats can follow one another in a sequence, and the product of its bounded ones."""
    choices = most = 0
    bounded = 1
    for kind, argument in items:
        inner, times = 0, 1
        if kind in _REPEATS:
            _, high, body = argument
            inner, times = _degree(list(body))
            if high is sre.MAXREPEAT:
                if inner or times > 1 or _width(body) > 1:
                    raise _NestedError("an unbounded repeat of something of several lengths; make it possessive")
                inner = 1
            elif high > 1 and argument[0] != high:
                times *= high
        elif kind in (sre.POSSESSIVE_REPEAT, sre.ATOMIC_GROUP, sre.ASSERT, sre.ASSERT_NOT):
            body = argument if kind is sre.ATOMIC_GROUP else argument[-1]
            inside, _ = _degree(list(body))
            if kind is sre.POSSESSIVE_REPEAT and argument[1] is sre.MAXREPEAT:
                if inside:
                    raise _NestedError("an unbounded repeat within a possessive one")
                inside = 1
            # Run through once from each place, and never entered again.
            most = max(most, choices + inside)
            continue
        elif kind is sre.SUBPATTERN:
            inner, times = _degree(list(argument[-1]))
        elif kind is sre.BRANCH:
            found = [_degree(list(branch)) for branch in argument[1]]
            inner, times = max(one for one, _ in found), max(one for _, one in found)
        choices, bounded = choices + inner, bounded * times
        most = max(most, choices)
    return most, bounded


def _ends_freely(item: Item) -> bool:
    """Return whether this is a repeat at a pattern's end: nothing can fail after it, and a search goes on behind it."""
    kind, argument = item
    if kind is sre.SUBPATTERN and argument[-1]:
        return _ends_freely(argument[-1][-1])
    return kind in (*_REPEATS, sre.POSSESSIVE_REPEAT) and not _degree(list(argument[-1]))[0]


def _width(body: Any) -> int:
    low, high = body.getwidth()
    return 1 if low == high else int(min(high, 2))


def _starts_once(items: list[Item]) -> bool:
    """Return whether the unbounded repeats of a pattern run through each part of the text from one start alone.

    True of a pattern that is tied to the start of the text; of one that begins with letters of which one stops its
    repeats; and of one that cannot begin within what its repeats run through (a word, after ``\\b``).
    """
    items = [item for item in items if item[0] is not sre.ASSERT or item[1][0] == 1]  # not what stands before
    kind, argument = items[0] if items else (None, None)
    if kind is sre.AT and argument in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return True
    repeated = _repeated(items)
    if kind is sre.AT and argument is sre.AT_BOUNDARY:
        return all(character.isalnum() or character == "_" for character in repeated)
    if kind is sre.ASSERT_NOT and argument[0] == -1:
        return repeated <= _characters(list(argument[1]))
    beginning = list(itertools.takewhile(lambda item: item[0] in _SINGLE, items))
    return any(not repeated & _characters([item]) for item in beginning) or not repeated & _characters(items)


def _repeated(items: Iterable[Item]) -> set[str]:
    """Return the ASCII characters that an unbounded repeat of a pattern may run through."""
    found: set[str] = set()
    for kind, argument in items:
        if kind in (*_REPEATS, sre.POSSESSIVE_REPEAT) and argument[1] is sre.MAXREPEAT:
            found |= _characters(list(argument[2]))
        elif kind in (*_REPEATS, sre.SUBPATTERN, sre.POSSESSIVE_REPEAT, sre.ASSERT, sre.ASSERT_NOT):
            found |= _repeated(argument[-1])
        elif kind is sre.ATOMIC_GROUP:
            found |= _repeated(argument)
        elif kind is sre.BRANCH:
            for branch in argument[1]:
                found |= _repeated(branch)
    return found


def _characters(items: list[Item]) -> set[str]:
    """Return the ASCII characters that the first of these items may match; all of them if that is not plain."""
    if not items:
        return set(_ASCII)
    kind, argument = items[0]
    if kind in _SINGLE:
        one = _compiler.compile(_parser.SubPattern(_parser.State(), [items[0]]), re.DOTALL)
        return {character for character in _ASCII if one.match(character) or one.match(character.lower())}
    if kind in _REPEATS:
        found = _characters(list(argument[2])) | (_characters(items[1:]) if argument[0] == 0 else set())
    elif kind is sre.SUBPATTERN:
        found = _characters(list(argument[-1]))
    elif kind is sre.BRANCH:
        found = set().union(*(_characters(list(branch)) for branch in argument[1]))
    elif kind is sre.AT:
        # What is tied to the start of the text begins there alone, with no letter.
        found = set() if argument is sre.AT_BEGINNING else _characters(items[1:])
    else:
        found = set(_ASCII)
    return found
