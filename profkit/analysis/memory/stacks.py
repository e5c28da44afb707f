"""Which lines asked for the memory: the stacks of allocations, interned on first use and shortened for people.

A stack is a list of frames, the innermost first. The pickle shares one dictionary among equal frames, so stacks are
compared by the identities of their frames, which is much faster than by names. Where there are Python frames, C++
frames are neither grouped by nor shown. A stack is named by its innermost line that somebody wrote for this program:
the user's, or that of a model's file in an installed package. Code that torch.compile wrote has no such line: its
allocations are grouped under the line that it was made from, which torch puts into the frames, or else the one that
called it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from profkit.allocator.replay import Replay
from profkit.errors import SnapshotError
from profkit.snapshot.columns import MOST_FRAMES, Device, Stack, read_frame

_MOST_MADE_LINES = 2**21
_MOST_FILES = 2**15
NO_FRAMES = "no Python line (backward pass, or before recording)"
NO_OWN_LINE = "no line of yours"
COMPILED = "compiled code"

# profkit's own frames around the user's calls, also where it is installed in editable mode.
_PROFKIT = ("profkit/capture/", "profkit/launch/", "profkit/cli/", "profkit/annotation.py", "profkit/ranges.py")
_TORCH = ("-packages/torch/", "torch/nn/", "torch/optim/", "torch/_")
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", *_TORCH, *_PROFKIT)
# Where the packages that people install keep their models: torchvision/models/resnet.py, transformers/models/….
_MODEL = re.compile(r"^(?>.*?-packages/(?!torch/|profkit/)).*\bmodels/")
_STANDARD = re.compile(r"^(?>.*/lib/python3)(?!.*-packages/)|^<frozen")
# Code that torch.compile wrote: Inductor names its files by the SHA-256 of their content, in base 32
# (torch/_inductor/codecache.py, code_hash), and FX numbers or names the code that it evaluates
# (torch/fx/graph_module.py).
_GENERATED = re.compile(r"(?:^|/)(?:c[a-z2-7]{51}|fx_generated_[^/]*)\.py$|^<eval_with_key>")
_INDUCTORS = re.compile(r"(?:^|/)(c[a-z2-7]{51})\.py$")
# Frames around a compiled call, and around every call that torch.compile does not compile.
_COMPILER = ("torch/_dynamo/", "torch/_inductor/")
_NATIVE_ENDINGS = (".cpp", ".cu", ".cuh", ".h", ".hpp", ".cc", ".c", ".so")
# The allocator's own frames and torch's plumbing around them: every native stack begins with these.
_PLUMBING = (
    "torch::unwind",
    "torch::CapturedTraceback",
    "torch::cuda::",
    "c10::cuda::CUDACachingAllocator",
    "at::detail",
)


@dataclass(frozen=True)
class StackFacts:
    """One stack, split by whose code it is; frames are (function, file, line), innermost first."""

    frames: Stack

    @cached_property
    def python(self) -> Stack:
        return tuple(
            frame for frame in self.frames if frame[1] not in ("", "??") and not frame[1].endswith(_NATIVE_ENDINGS)
        )

    @cached_property
    def user(self) -> Stack:
        return tuple(frame for frame in self.python if not _stands_in(frame[1], _LIBRARIES))

    @cached_property
    def own(self) -> Stack:
        """Frames that name the stack: the user's and those of models' files, or else of packages other than torch."""
        frames = tuple(
            frame for frame in self.python if not _stands_in(frame[1], _LIBRARIES) or _MODEL.search(frame[1])
        )
        nobodys = (*_TORCH, *_PROFKIT)
        return frames or tuple(
            frame for frame in self.python if not _stands_in(frame[1], nobodys) and not _STANDARD.search(frame[1])
        )

    @cached_property
    def is_compiled(self) -> bool:
        """Whether code that torch.compile wrote asked for the memory."""
        return any(_GENERATED.search(file) for _, file, _ in self.python)

    @cached_property
    def generated(self) -> tuple[tuple[str, int], ...]:
        """The lines of Inductor's files: (the file's name without its suffix, line), innermost first."""
        lines = ((_INDUCTORS.search(file), line) for _, file, line in self.python)
        return tuple((match[1], line) for match, line in lines if match)

    @cached_property
    def shown(self) -> Stack:
        """The frames that identify the stack for a person: Python frames, or native ones if there are no others.

        Of compiled code only what called it, which on the autograd thread is nothing.
        """
        if self.is_compiled:
            return self.python[self.python.index(self.own[0]) :] if self.own else ()
        python = tuple(frame for frame in self.python if not _stands_in(frame[1], _PROFKIT))
        return python or self.python or self._native

    @cached_property
    def but_compiler(self) -> Stack:
        """The frames without torch.compile's own: an eager run and a compiled one can both have these."""
        return tuple(frame for frame in self.python or self._native if not _stands_in(frame[1], _COMPILER))

    @property
    def _native(self) -> Stack:
        return tuple(f for f in self.frames if not f[0].startswith(_PLUMBING)) or self.frames

    @cached_property
    def user_first(self) -> tuple[str, ...]:
        """The shown frames as text, those that name the stack before the others, each innermost first."""
        mine = set(self.own)
        ordered = [frame for frame in self.shown if frame in mine] + [f for f in self.shown if f not in mine]
        return tuple(format_frame(frame) for frame in ordered)

    @cached_property
    def label(self) -> str:
        """One line: the innermost frame of `own`, in brackets torch's that it led to, then its callers."""
        if self.is_compiled:
            inner = f" ({COMPILED})"
        elif not self.shown:
            return NO_FRAMES
        else:
            inner = f" ({_short(self.shown[0])})" if self.shown[0] not in self.own[:1] else ""
        if self.own:
            return " ← ".join([_short(self.own[0]) + inner, *map(_short, self.own[1:3])])
        return NO_OWN_LINE + inner if self.python else " ← ".join(map(_short, self.shown[:3]))


class StackBook:
    """The stacks of one device's allocations, numbered as they are first asked for; number 0 has no frames."""

    def __init__(self, device: Device, replay: Replay) -> None:
        self._device = device
        self._replay = replay
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        # A list of frames that a million events share is looked at once.
        self._by_list: dict[int, int] = {}
        self._by_frames: dict[Stack, int] = {(): 0}
        self._by_frame: dict[int, Stack] = {}
        self._made_lines = 0
        self.facts: list[StackFacts] = [StackFacts(())]

    def number_of(self, row: int) -> int:
        raw = self.raw_of(row)
        frames = raw.get("frames") or raw.get("forward_frames")  # the latter from anomaly mode
        if not frames or not isinstance(frames, list):
            return 0
        place = id(frames)
        number = self._by_list.get(place)
        if number is None:
            frames = frames[:MOST_FRAMES]
            key = tuple(map(id, frames))
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = self._intern(frames)
            self._by_list[place] = number
        return number

    def facts_of(self, row: int) -> StackFacts:
        return self.facts[self.number_of(row)]

    def birth_of(self, row: int) -> int:
        """Return the event that began an allocation; negative where that was before the recording."""
        return self._replay.birth.item(row)

    def raw_of(self, row: int) -> dict[str, Any]:
        """Return the pickle's own record of an allocation: its event, or its block at the dump; empty if neither."""
        birth = self.birth_of(row)
        if birth >= 0:
            return self._device.events.raw[birth]
        block = int(self._replay.final_block[row])
        return self._device.blocks.raw[block] if block >= 0 else {}

    def _read(self, frame: dict[str, Any]) -> Stack:
        place = id(frame)
        if place not in self._by_frame:
            self._by_frame[place] = tuple(read_frame(frame))
        return self._by_frame[place]

    def _intern(self, frames: list[dict[str, Any]]) -> int:
        lines = (line for frame in frames if isinstance(frame, dict) for line in self._read(frame))
        stack = tuple(itertools.islice(lines, MOST_FRAMES))
        self._made_lines += max(len(stack) - len(frames), 0)
        if self._made_lines > _MOST_MADE_LINES:
            raise SnapshotError(
                f"the compiled code in its stacks was made from over {_MOST_MADE_LINES:,} lines; no more are read"
            )
        number = self._by_frames.get(stack)
        if number is None:
            number = self._by_frames[stack] = len(self.facts)
            self.facts.append(StackFacts(stack))
        return number


def sum_by_stack(stacks: Iterable[StackFacts], sizes: Iterable[int]) -> list[tuple[StackFacts, int, int]]:
    """Return the stacks of some allocations, each with their bytes and count; stacks that look alike are one."""
    sums: dict[int, tuple[StackFacts, int, int]] = {}
    for facts, size in zip(stacks, sizes, strict=True):
        _, total, count = sums.get(id(facts), (facts, 0, 0))
        sums[id(facts)] = facts, total + size, count + 1
    groups: dict[tuple[Stack, bool], tuple[StackFacts, int, int]] = {}
    for facts, size, some in sums.values():
        key = facts.shown, facts.is_compiled
        stack, total, count = groups.get(key, (facts, 0, 0))
        groups[key] = stack, total + size, count + some
    return list(groups.values())


def format_frame(frame: tuple[str, str, int]) -> str:
    """Return ``file:line function``, the file without the way to the installation's packages."""
    name, file, line = frame
    for mark in ("site-packages/", "dist-packages/"):
        file = file.rpartition(mark)[2]
    return f"{file}:{line} {name}"


def _short(frame: tuple[str, str, int]) -> str:
    name, file, line = frame
    return f"{file.rpartition('/')[2] or file}:{line} {name}"


@lru_cache(_MOST_FILES)
def _stands_in(file: str, places: tuple[str, ...]) -> bool:
    """Return whether a file lies in one of some places, or was written by torch.compile and is nobody's own."""
    return any(place in file for place in places) or _GENERATED.search(file) is not None
