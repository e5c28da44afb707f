"""Every text in a file that profkit reads has a declared kind, and each kind a rule for a copy that is shared.

A field is declared where it is read: in the dataclasses of `profkit.run` by its type (``name: RangeName``), in the
tables of `profkit.trace` and `profkit.snapshot` by a kind beside its key. A text without a kind is not in a copy: what
nobody declared cannot leak. Numbers, truths and `Literal` words are declared by their types.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import profkit.names

LEFT_OUT = "(left out)"
"""Stands in a copy for a text that is not in it."""
ANY_FILE = "….py"


@dataclass(frozen=True)
class Kind:
    """A kind of text: one stays if ``shape`` matches all of it, a name that somebody chose (``is_name``) always."""

    title: str
    shape: str = ""
    is_name: bool = False


RANGE = Kind("range", is_name=True)
MODULE = Kind("module or tensor", is_name=True)
KERNEL = Kind("kernel", is_name=True)
OPERATOR = Kind("operator", is_name=True)
LABEL = Kind("label of memory", is_name=True)
GROUP = Kind("process group", is_name=True)
# An address of a machine has the shape of a version, and of a word.
_NO_ADDRESS = r"(?!\d{1,3}(\.\d{1,3}){3}$)"
WORD = Kind("word", _NO_ADDRESS + r"[\w.+-]{0,64}")
VERSION = Kind("version", _NO_ADDRESS + r"v?\d[\w.+-]{0,60}")
GPU = Kind("GPU", r"[A-Z][\w ().+-]{1,80}")
MOMENT = Kind("moment", r"\d{4}-[\d:.TZ+-]{1,40}")
RUN_FILE = Kind("file of a run", r"[a-z]{1,12}(\.rank\d{1,6})?(\.[a-z]{1,12}){1,2}")
ALLOCATOR = Kind("allocator settings", r"(\w+:[\w.>\[\],:]+,?)*")
PRODUCT = Kind(
    "profiler",
    r"(NVIDIA )?Nsight Systems( [\w.+-]{1,40})?( \(export schema [\w.]{1,20}\))?|PyTorch Kineto( \([\w., ]{1,80}\))?",
)
THREAD = Kind("thread", r"pt_\w{1,12}|python[\d.]{0,5}|cuda[\da-f]{6,12}")
STATE = Kind("state", r"complete|cut short|not reached")
REASON = Kind("reason of a clock", r"[a-z_]{1,30}( [a-z_]{1,30}){0,3}")
BACKEND = Kind("backend", r"[\w:,+]{0,60}")
UNCOUNTED = Kind("why no step was counted", r"[A-Za-z ,'-]{1,100}")
EDIT = Kind("edit", r"(?!checkpoint|no-|drop|kernels)[a-z\d-]{1,20}(:[×a-z\d-]{1,30})?")
LINE = Kind("source line")
SOURCE_FILE = Kind("source file")
FUNCTION = Kind("function", r"[\w.<>…\[\]]{0,200}")
MESSAGE = Kind("message")
PROFILER = Kind("profiler's words")

RangeName = Annotated[str, RANGE]
ModuleName = Annotated[str, MODULE]
KernelName = Annotated[str, KERNEL]
OperatorName = Annotated[str, OPERATOR]
GroupName = Annotated[str, GROUP]
Word = Annotated[str, WORD]
Version = Annotated[str, VERSION]
GpuName = Annotated[str, GPU]
Moment = Annotated[str, MOMENT]
RunFile = Annotated[str, RUN_FILE]
SourceLine = Annotated[str, LINE]
SourceFile = Annotated[str, SOURCE_FILE]
FunctionName = Annotated[str, FUNCTION]
State = Annotated[str, STATE]
Reason = Annotated[str, REASON]
Backend = Annotated[str, BACKEND]
EditName = Annotated[str, EDIT]
Uncounted = Annotated[str, UNCOUNTED]
Message = Annotated[str, MESSAGE]

_RENAMED = (RANGE, MODULE, LABEL)
_TOKEN = re.compile(r"\w+")
_LONGEST_NUMBER = 6
# What profkit and torch call things themselves; the id of a graph is made from its content.
_OWN_TOKENS = frozenset(
    token for value in vars(profkit.names).values() if isinstance(value, str) for token in _TOKEN.findall(value)
) | {
    "layer",
    "ProfilerStep",
    "Optimizer",
    "zero_grad",
    "compiled",
    "CUDA",
    "graph",
    "profkit",
    "exp_avg",
    "exp_avg_sq",
    "start",
    "dump",
}
_GRAPH_ID = re.compile(r"[0-9a-f]{10}")

_FILE_LINE = re.compile(r"((?:[\w.<>]+ )?)(.+):(\d{1,9})((?: [\w.<>]+)?)", re.DOTALL)
_SEPARATORS = r"[/\\]"
_FILE = re.compile(r"[\w.<>+ -]{1,200}")

# All words of the messages in which nsys speaks of itself; any other word in one is somebody's.
_PROFILERS_WORD = re.compile(
    r"""a | about | after | all | any | api | are | application | backtrace | backtraces | be | been | before | buffers
    | by | call | called | collect | collected | collection | common | configuration | control | count | cpu | cuda
    | cudagraph | cudaprofilerstart | cudaprofilerstop | cupti | data | device | discarded | domain | does | drop |
    dropped | due | dwarf | effective | enabling | error | errors | event | events | every | failed | first | flush
    | flushed | for | found | from | function | generating | graph | have | holding | id | ignored | in | incomplete
    | initialized | injection | invoked | ip | is | launch | launched | library | loaded | lost | may | might |
    missing | no | not | note | number | nvtx | occurred | of | on | only | open | or | output | overflow |
    overflowed | pair | period | process | processes | processing | produced | profiler | profiling | program |
    range | ranges | raw | report | requested | row | rows | sample | samples | sampling | see | settings | some |
    start | started | stop | stopped | successfully | that | the | their | this | times | to | trace | tree |
    trigger | unable | use | used | was | were | when | while | will | with | without | wrong | argument |
    nvtxdomaindestroy | clock | sw | times | impossible | left | out | launches | but | work | holds | operators |
    measured""",
    re.VERBOSE | re.IGNORECASE,
)
_PROFILERS_TOKEN = re.compile(r"[^\s,;:()'\"?]+")


class Keeper:
    """Applies the rules to the texts of one copy, and notes the names that it keeps."""

    def __init__(self, *, keep_frames: bool = False, rename_ranges: bool = False) -> None:
        self.keep_frames = keep_frames
        self.names: dict[str, set[str]] = {}
        """Title of a kind → the names that stay."""
        self.left_out_count = 0
        self._is_renaming = rename_ranges
        self._numbers: dict[str, str] = {}
        self._messages: dict[str, int] = {}
        self._lines: dict[tuple[str, int, str], int] = {}

    def text(self, kind: Kind, text: str) -> str:
        kept = self._apply(kind, text)
        self.left_out_count += LEFT_OUT in kept
        if kind.is_name and kept:
            self.names.setdefault(kind.title, set()).add(kept)
        return kept

    def text_or_none(self, kind: Kind, value: object) -> str | None:
        """Return the same of what may be no text; None where it is none."""
        return self.text(kind, value) if isinstance(value, str) else None

    def record(self, kind: Any, value: Any) -> Any:  # noqa: PLR0911  one return a kind
        """Return a value of a declared type as the copy holds it, of that type again.

        What has the type `object` is left out, and so are the entries of a mapping whose keys have no kind.
        """
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.text(inner[1], value)
        if origin in (Union, types.UnionType):
            return None if value is None else self.record(_alternative(inner, value), value)
        if is_dataclass(kind):
            return self._fields(kind, value)
        if origin in (tuple, list):
            kinds = inner if origin is tuple and inner[-1] is not Ellipsis else inner[:1] * len(value)
            return origin(self.record(each, item) for each, item in zip(kinds, value, strict=True))
        if origin in (Mapping, dict):
            kept = {} if inner[0] is str else value
            return {self.record(inner[0], key): self.record(inner[1], item) for key, item in kept.items()}
        if origin is Literal or kind in (bool, int, float, types.NoneType):
            return value
        self.left_out_count += 1
        return LEFT_OUT if kind is str else None

    def _fields(self, kind: Any, value: Any) -> Any:
        return kind(**{name: self.record(hint, getattr(value, name)) for name, hint in _hints(kind).items()})

    def number_of_line(self, file: str, line: int, name: str) -> int:
        """Return the number that stands for a line of a program in all files of the copy."""
        return self._lines.setdefault((re.split(_SEPARATORS, file)[-1], line, name), len(self._lines) + 1)

    def _line(self, text: str) -> str:
        """Return ``file:line function`` without folders; if lines are not kept, a number alone."""
        match = _FILE_LINE.fullmatch(text)
        if match is None:
            return LEFT_OUT
        before, file, line, name = match.groups()
        if self.keep_frames:
            return f"{before}{base_name(file)}:{line}{name}"
        number = self.number_of_line(file, int(line), (before or name).strip())
        return f"{before and LEFT_OUT + ' '}{ANY_FILE}:{number}{name and ' ' + LEFT_OUT}"

    def _apply(self, kind: Kind, text: str) -> str:
        if kind is LINE:
            return self._line(text)
        if kind is SOURCE_FILE:
            return base_name(text) if self.keep_frames else LEFT_OUT
        if kind is MESSAGE:
            number = self._messages.setdefault(text, len(self._messages) + 1)
            return text and f"{LEFT_OUT} {number}"
        if kind is PROFILER:
            return keep_profilers_words(text)
        if kind.is_name:
            return _TOKEN.sub(self._number, text) if self._is_renaming and kind in _RENAMED else text
        is_kept = self.keep_frames or kind is not FUNCTION
        return text if is_kept and re.fullmatch(kind.shape, text) else LEFT_OUT

    def _number(self, token: re.Match[str]) -> str:
        word = token[0]
        is_short_number = word.isdecimal() and len(word) <= _LONGEST_NUMBER
        if is_short_number or word in _OWN_TOKENS or _GRAPH_ID.fullmatch(word):
            return word
        return self._numbers.setdefault(word, f"n{len(self._numbers) + 1}")


def base_name(path: str) -> str:
    name = re.split(_SEPARATORS, path)[-1]
    return name if _FILE.fullmatch(name) else LEFT_OUT


def keep_profilers_words(text: str) -> str:
    """Return a message of nsys with ``…`` for each word that is not the profiler's own: a path, a name, an address."""

    def kept(match: re.Match[str]) -> str:
        token = match[0].rstrip(".")
        is_number = token.isdecimal() and len(token) <= _LONGEST_NUMBER
        return match[0] if is_number or all(map(_PROFILERS_WORD.fullmatch, token.split("-"))) else "…"

    return _PROFILERS_TOKEN.sub(kept, text)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _alternative(kinds: tuple[Any, ...], value: object) -> Any:
    for kind in kinds:
        plain = get_args(kind)[0] if get_origin(kind) is Annotated else get_origin(kind) or kind
        if plain is object or (isinstance(plain, type) and isinstance(value, plain)):
            return kind
    return object
