"""A JSON file read piece by piece, so that a large list in it never stands in memory as a whole.

The values themselves are parsed by Python's own decoder. Decimal numbers and C++'s words for what is no number stay
text: ``1700000000000000.123`` has more digits than a double can hold.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_PIECE_BYTES = 2**22
_SPACE = re.compile(r"[ \t\n\r]*+")
_COMMA = re.compile(r"[ \t\n\r]*+,[ \t\n\r]*+")
_SPACES = " \t\n\r"
# Behind the last objects of a piece: within one of them are a few more, and between two a line break and a few spaces.
_MOST_TRIES = 40
_WIDEST_GAP = 40
# Kineto has printed C++'s words inf and nan (a bandwidth over a duration of zero).
_BARE_NON_NUMBER = re.compile(r"(?<=[:,\[\s])-?(?:inf|nan)(?=\s*[,}\]])")
# A value that is reported at its first letter may only be cut off: `tru`, `-Infini`.
_LONGEST_WORD = len("-Infinity")


class JsonError(ValueError):
    """The text is no JSON; the message says where."""


class CutOffError(JsonError):
    """The text ends within a value."""


class JsonStream:
    """A cursor in JSON text; ``read(count)`` returns the next bytes of it, none at the end."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._scan = json.JSONDecoder(parse_float=str, parse_constant=str).scan_once  # type: ignore[attr-defined]
        self._text = ""
        self._at = 0
        self._is_whole = False
        """Whether the rest of the file is in ``_text``."""
        self._lines = self._column = 0
        """Line breaks in what was dropped, and characters after the last one."""

    def next_character(self) -> str:
        """Return the next character that is no space, without taking it; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._fill():
                return self._text[self._at : self._at + 1]

    def take(self, characters: str) -> str:
        """Take the next character, which must be one of these.

        Raises:
            JsonError: it is another.
        """
        character = self.next_character()
        if not character or character not in characters:
            self._refuse(f"Expecting {' or '.join(map(repr, characters))}", self._at)
        self._at += 1
        return character

    def value(self) -> Any:
        """Take and return the next value.

        Raises:
            JsonError: there is none.
            RecursionError: it is nested too deep.
        """
        self.next_character()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except StopIteration as error:
                message, at = "Expecting value", error.value
            except json.JSONDecodeError as error:
                message, at = error.msg, error.pos
            else:
                # A number may go on behind the end of the text, or behind a point of which no digit is there yet.
                if self._text[end : end + 1] not in ("", ".", "e", "E") or not self._fill():
                    self._at = end
                    return value
                continue
            if self._may_go_on(message, at) and self._fill():
                continue
            if _BARE_NON_NUMBER.search(self._text, self._at):
                before = max(self._at - 1, 0)  # the word must stand behind a comma, a colon or a bracket
                self._text, self._at = _BARE_NON_NUMBER.sub("null", self._text[before:]), self._at - before
                continue
            self._refuse(message, at)

    def members(self) -> Iterator[str]:
        """Yield the keys of an object, of which the caller takes each value before the next key."""
        self.take("{")
        if self.next_character() == "}":
            self.take("}")
            return
        while True:
            if self.next_character() != '"':
                self._refuse("Expecting property name enclosed in double quotes", self._at)
            key = self.value()
            self.take(":")
            yield key
            if self.take(",}") == "}":
                return

    def items(self) -> Iterator[Any]:
        """Yield the values of a list."""
        self.take("[")
        if self.next_character() == "]":
            self.take("]")
            return
        while True:
            yield from self._whole_objects()
            # Value after value while they stand whole in the text.
            try:
                while True:
                    value, end = self._scan(self._text, self._at)
                    comma = _COMMA.match(self._text, end)
                    if comma is None:
                        break
                    self._at = comma.end()
                    yield value
            except (StopIteration, json.JSONDecodeError):
                pass  # cut by the end of this piece, or damaged: reading one value below finds out which
            yield self.value()
            if self.take(",]") == "]":
                return

    def _whole_objects(self) -> list[Any]:
        """Take the objects that stand whole in the text, all at once: twice as fast as one by one.

        Returns none if there are none, or if the text is not plainly so: then to read one by one finds out why.
        """
        last, following = self._last_border()
        try:
            whole = f"[{self._text[self._at : last]}]"
            values, end = self._scan(whole, 0) if last > self._at else ([], 0)
        except (StopIteration, json.JSONDecodeError, RecursionError):
            return []
        if end < len(whole):  # the list ends before, and others follow
            return []
        self._at = following
        objects: list[Any] = values
        return objects

    def _last_border(self) -> tuple[int, int]:
        """Return where the last object but one ends, as far as its text shows, and where the one after it begins."""
        begin = len(self._text)
        for _ in range(_MOST_TRIES):
            begin = self._text.rfind("{", self._at, begin)
            if begin < 0:
                break
            before = self._text[max(begin - _WIDEST_GAP, self._at) : begin]
            rest = before.rstrip(_SPACES)
            if rest.endswith(",") and rest[:-1].rstrip(_SPACES).endswith("}"):
                return begin - len(before) + len(rest[:-1].rstrip(_SPACES)), begin
        return self._at, self._at

    def end(self) -> None:
        """Check that nothing follows.

        Raises:
            JsonError: something does.
        """
        if self.next_character():
            self._refuse("Extra data", self._at)

    def _fill(self) -> bool:
        """Read more text, twice as much as is there and not yet taken; return whether there was any."""
        if self._is_whole:
            return False
        # The character before the value tells whether a bare word in it may stand there.
        dropped = self._text[: max(self._at - 1, 0)]
        self._lines += dropped.count("\n")
        self._column = len(dropped) - dropped.rfind("\n") - 1 + (0 if "\n" in dropped else self._column)
        rest = self._text[len(dropped) :]
        piece = self._read(max(_PIECE_BYTES, len(rest)))
        self._is_whole = not piece
        self._text, self._at = rest + self._decoder.decode(piece, final=not piece), self._at - len(dropped)
        return len(self._text) > len(rest) or not self._is_whole

    def _may_go_on(self, message: str, at: int) -> bool:
        """Whether the parser ran out of text, rather than into something that is no JSON."""
        return message.startswith("Unterminated string") or at >= len(self._text.rstrip()) - _LONGEST_WORD

    def _refuse(self, message: str, at: int) -> NoReturn:
        if self._may_go_on(message, at) and not self._fill():
            raise CutOffError(message)
        before = self._text[:at]
        line = self._lines + before.count("\n") + 1
        column = at - before.rfind("\n") if "\n" in before else self._column + at + 1
        raise JsonError(f"line {line}, column {column}: {message}")
