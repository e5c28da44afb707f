"""What a step of somebody's program is: the kinds of steps, and how a person names one (``--step-on``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class StepKind(IntEnum):
    """What makes a step, the weakest first: the strongest that a program shows is what counts."""

    WHOLE = 0
    """The whole program is one step."""
    FUNCTION = 1
    """A call of a function that is decorated with ``annotate``."""
    CALL = 2
    """A call of an outermost module."""
    GENERATE = 3
    """A call of a model's ``generate``."""
    REPLAY = 4
    """A replay of a CUDA graph."""
    BACKWARD = 5
    """A backward pass."""
    OPTIMIZER = 6
    """An optimizer's step."""
    STEP_REPLAY = 7
    """A replay of a CUDA graph that an optimizer's step was captured into."""

    @property
    def word(self) -> str:
        """What ``--step-on`` and the files call it."""
        return _WORDS[self]


_OTHER_WORDS = {"FUNCTION": "call", "STEP_REPLAY": "replay"}
_WORDS = tuple(_OTHER_WORDS.get(kind.name, kind.name.lower()) for kind in StepKind)
"""By the kinds' numbers: a kind as the key of a dict runs Python."""


_NAMED = ("optimizer", "call")
WORDS = (*(f"{word}:NAME" for word in _NAMED), "backward", "replay", "generate", "whole")
"""What ``--step-on`` accepts."""


@dataclass(frozen=True)
class StepChoice:
    """A person's choice of what a step is; ``name`` is that of the optimizer, module or function, None for any."""

    word: str
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> StepChoice:
        """Return the choice that ``text`` names; a word of no kind is the class of an optimizer.

        Raises:
            ValueError: a name is given where none belongs, or is empty.
        """
        word, colon, name = text.partition(":")
        if word in _NAMED and (name or not colon):
            return cls(word, name or None)
        if word in WORDS and not colon:
            return cls(word)
        if colon or not word:
            raise ValueError(f"{text}: write one of {', '.join(WORDS)}")
        return cls("optimizer", word)

    @property
    def is_whole(self) -> bool:
        """Whether the whole program is one step."""
        return self.word == StepKind.WHOLE.word

    def allows(self, kind: StepKind, names: tuple[str | None, ...]) -> bool:
        """Return whether something of this kind, known by these names, is a step."""
        return kind.word == self.word and (self.name is None or self.name in names)


def describe_step(word: str, names: tuple[str, ...] = ()) -> str:
    """Return what a step is, as a person reads it: ``one step of the optimizer AdamW``."""
    of = _joined(names)
    each = " each" if len(names) > 1 else ""
    return {
        "optimizer": f"one step{each} of {_joined(names, 'optimizer') or 'an optimizer'}",
        "backward": "one backward pass",
        "replay": "one replay of a CUDA graph",
        "generate": f"one call of {of}.generate" if len(names) == 1 else "one call of generate",
        "call": f"one call{each} of {of}" if of else "one call",
        "whole": "the whole program",
    }[word]


def _joined(names: tuple[str, ...], kind: str = "") -> str:
    """Return the names as one list, or how many there are; with ``kind``, after that word."""
    if len(names) > _MOST_NAMED:
        return f"{len(names)} {kind or 'module'}s"
    listed = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return f"the {kind}{'s' * (len(names) > 1)} {listed}" if kind and names else listed


_MOST_NAMED = 3
