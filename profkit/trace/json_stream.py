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
_BORDER = re.compile(r"\}[ \t\n\r]*+,[ \t\n\r]*+(?=\{)")
_LONGEST_TAIL = 2**16
"""The last border between two objects in a piece is looked for in so many characters."""
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
        self._dropped = 0
        """How many characters before ``_text`` were taken and dropped."""
        self._is_new = True
        """Whether text was read since objects were last taken all at once."""

    def next_character(self) -> str:
        """Return the next character that is no space, without taking it; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._fill():
                return self._text[self._at : self._at + 1]

    def take(self, characters: str) -> str:
        """Take the next character; JsonError if it is none of these."""
        character = self.next_character()
        if not character or character not in characters:
            self._refuse(f"Expecting {' or '.join(map(repr, characters))}", self._at)
        self._at += 1
        return character

    def value(self) -> Any:
        """Take and return the next value; JsonError if there is none, RecursionError if it is nested too deep."""
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
                self._dropped += before
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
        self.take("[")
        if self.next_character() == "]":
            self.take("]")
            return
        while True:
            if self._is_new:
                self._is_new = False
                yield from self._whole_objects()
            yield self.value()
            if self.take(",]") == "]":
                return

    def _whole_objects(self) -> list[Any]:
        """Take the objects that stand whole in the text, all at once: twice as fast as one by one.

        Returns none if there are none, or if the text is not plainly so: then to read one by one finds out why.
        """
        borders = list(_BORDER.finditer(self._text, max(self._at, len(self._text) - _LONGEST_TAIL)))
        if not borders:
            return []
        border = borders[-1]
        whole = f"[{self._text[self._at : border.start() + 1]}]"
        try:
            values, end = self._scan(whole, 0)
        except (StopIteration, json.JSONDecodeError, RecursionError):
            return []
        if end < len(whole):  # the list ends before, and others follow
            return []
        self._at = border.end()
        objects: list[Any] = values
        return objects

    def end(self) -> None:
        """Check that nothing follows; JsonError if something does."""
        if self.next_character():
            self._refuse("Extra data", self._at)

    def _fill(self) -> bool:
        if self._is_whole:
            return False
        # The character before the value tells whether a bare word in it may stand there.
        taken = max(self._at - 1, 0)
        rest = self._text[taken:]
        piece = self._read(max(_PIECE_BYTES, len(rest)))
        self._is_whole, self._is_new = not piece, True
        self._text, self._at = rest + self._decoder.decode(piece, final=not piece), self._at - taken
        self._dropped += taken
        return len(self._text) > len(rest) or not self._is_whole

    def _may_go_on(self, message: str, at: int) -> bool:
        return message.startswith("Unterminated string") or at >= len(self._text.rstrip()) - _LONGEST_WORD

    def _refuse(self, message: str, at: int) -> NoReturn:
        if self._may_go_on(message, at) and not self._fill():
            raise CutOffError(message)
        raise JsonError(f"character {self._dropped + at + 1:,}: {message}")
