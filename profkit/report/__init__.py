"""The only place that draws or formats; here text that shows as it is: on a screen, in Markdown, LaTeX, CSV or JSON.

Names come from captures, and a capture from anywhere: an escape sequence in a name must not reach a screen, and a line
break must not tear a table.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from profkit.names import SHARED, is_shared, sharing_modules

WIDTH = 80
_LEAST_WIDTH = 40

_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # At the start of a row it would begin an argument of the line break before it.
    "[": "{[}",
}

# Control characters show as the pictures that Unicode has for them. Halves of pairs, and what reverses the direction of
# a line, show as U+FFFD.
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_UNSHOWABLE = (*range(0x80, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = _PICTURES | dict.fromkeys((*_UNSHOWABLE, *range(0xD800, 0xE000)), 0xFFFD)

# Underscores within a word are plain in GitHub's Markdown, those at its ends are not.
_MARKDOWN_MARKS = re.compile(r"[\\`*<\[|~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")


# Words that every instance of a template family carries, and that tell no two of them apart.
_COMMON_TEXT = """
    void const unsigned signed int long bool char std array at native cuda detail memory anonymous namespace unnamed
    operator lambda instance gpu_kernel_impl gpu_kernel_impl_nocast TensorIteratorBase TrivialOffsetCalculator
    OffsetCalculator LoadWithoutCast StoreWithoutCast func_wrapper_t ReduceOp binary_internal opmath_gpu_kernel
    TensorIterator TensorListMetadata TensorListScalarListMetadata TensorListScalarTensorListMetadata OpMathType
    c10 cutlass cub thrust Params size_t uint32_t int64_t ul false true
"""
_LONGEST_INDENTED = 2000
_LONGEST_NAME = 4096
_COMMON = frozenset(_COMMON_TEXT.split())
_CLAUSE_END = re.compile(r"[,;:] | \(| · ")
_UNNAMED = re.compile(r"(<unnamed>|\(anonymous namespace\))::")
_WORD = re.compile(r"[A-Za-z_]\w*")
_PLACEHOLDER = re.compile(r"T\d+$")
# A product that was split along its inner dimension has a second kernel, which adds up its parts: that word stays.
_GEMM_DETAILS = re.compile(
    r"(?s:_stage\d(?:(?!_split_k_kernel).)*+)|_execute_kernel__\w{1,80}$|(?<=_split_k)_kernel__\w{1,80}$"
)

# What cuDNN's generator puts around the parts that tell two of its kernels apart: direction, precision, tile.
_CUDNN_FRAME = re.compile(
    r"(?<=^cudnn_)generated_[a-z]{1,20}_native_|_sm\d{2,3}_flash(?=_[fb]prop)|_knob_\d{1,4}|(?:_cga\w{1,20})?_kernel\d_\d$"
)


def screen_width() -> int:
    """Return the width of the screen: ``COLUMNS`` if it is set, in a pipe too; else the terminal's, at least 80; or 80.

    No table is narrower than `_LEAST_WIDTH`.
    """
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isdecimal() and int(wanted):
        return max(int(wanted), _LEAST_WIDTH)
    try:
        return max(os.get_terminal_size(sys.stdout.fileno()).columns, WIDTH)
    except (OSError, ValueError, AttributeError):
        # No terminal, or a closed one, or a stream without a file.
        return WIDTH


def make_visible(text: str) -> str:
    """Return text that a terminal takes for plain text: control characters and others that act are replaced."""
    return text.translate(_VISIBLE)


def shorten(text: str, width: int) -> str:
    """Return text of at most ``width`` characters, its middle replaced by an ellipsis; both ends say the most.

    Of the modules that share a line the last parts of their names stay: ``shared: h.* + ln_* + c_fc``.
    """
    text = _with_last_parts(text, width)
    if len(text) <= width:
        return text
    return _keep_ends(text, (width - 1) // 2, width)


def cut_clauses(text: str, width: int, end: str) -> str:
    """Return text of at most ``width`` characters: as many of its clauses as fit, and ``end`` for the rest.

    A clause ends before a comma, a semicolon, a colon or a parenthesis, of which none is cut; the first one between two
    words if it must.
    """
    if len(text) <= width:
        return text
    room = width - len(end)
    ends = [match.start() for match in _CLAUSE_END.finditer(text, 0, room + 2) if _is_closed(text[: match.start()])]
    if not ends or ends[-1] < room // 4:
        ends = [max(text.rfind(" ", 0, room + 1), 0) or room]
    return f"{text[: ends[-1]]}{end}"


def _is_closed(text: str) -> bool:
    return text.count("(") == text.count(")")


def _with_last_parts(text: str, width: int) -> str:
    if len(text) <= width or not is_shared(text.lstrip()):
        return text
    indent = text[: len(text) - len(text.lstrip())]
    return f"{indent}{SHARED}{' + '.join(map(_last_part, sharing_modules(text.lstrip())))}"


def _last_part(module: str) -> str:
    above, _, last = module.rpartition(".")
    return f"{above.rpartition('.')[2]}.{last}" if above and (last == "*" or last.isdecimal()) else last


def shorten_apart(texts: Sequence[str], width: int) -> list[str]:
    """Return texts shortened as by `shorten`, but those that would then read alike keep what tells them apart.

    A forward and a backward kernel may differ in one letter in the middle of a long name; modules of one block in the
    last parts of theirs. Where no way of shortening keeps all of them apart, the one that keeps most does.
    """
    texts = [_with_last_parts(text, width) for text in texts]
    groups: dict[str, set[str]] = {}
    for text in texts:
        groups.setdefault(shorten(text, width), set()).add(text)
    alone = {short for short, group in groups.items() if len(group) == 1}
    shown: dict[str, str] = {text: short for short, group in groups.items() if short in alone for text in group}
    taken = set(alone)
    for short, group in groups.items():
        if short not in alone:
            chosen = max(_ways_to_shorten(sorted(group), width), key=lambda way: len({*way.values()} - taken))
            shown |= chosen
            taken |= {*chosen.values()}
    return [shown[text] for text in texts]


def _ways_to_shorten(texts: Sequence[str], width: int) -> Iterator[dict[str, str]]:
    """Yield ways to shorten some texts: with more of their ends, around the place where they first differ, with little
    more than their ends.

    What begins with spaces, as rows of a tree do, keeps them.
    """
    indent = min(len(text) - len(text.lstrip()) for text in texts)
    middle = max(width // 3, indent)
    for head in range((width - 1) // 2, middle - 1, -1):
        yield {text: _keep_ends(text, head, width) for text in texts}
    at = _first_difference(set(texts))
    yield {text: _shorten_around(text, at, width) for text in texts}
    for head in range(middle - 1, indent - 1, -1):
        yield {text: _keep_ends(text, head, width) for text in texts}


def _keep_ends(text: str, head: int, width: int) -> str:
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def name_within(name: str, parent: str | None) -> str:
    """Return the rest of a module's name behind its parent's: ``mlp`` of ``h.*.mlp`` in ``h.*``.

    It is the whole name where the rest is a number, or ``*`` for several, or where it does not begin with the parent's.
    """
    rest = name.removeprefix(f"{parent}.")
    return rest if rest.strip("*.0123456789") else name


def shortest_end(names: Sequence[str], among: Iterable[Sequence[str]]) -> Sequence[str]:
    """Return the shortest end of a sequence of names that only one of some sequences has; all of it if none is."""
    others = list(among)
    ends = (names[-count:] for count in range(1, len(names)))
    return next((end for end in ends if sum(other[-len(end) :] == end for other in others) == 1), names)


def escape_markdown(text: str) -> str:
    """Return text that GitHub's Markdown shows as it is: ``kernel<float>`` would lose its ``<float>`` as a tag."""
    return _MARKDOWN_MARKS.sub(r"\\\g<0>", make_visible(text))


def escape_latex(text: str) -> str:
    escaped = "".join(_LATEX_ESCAPES.get(character, character) for character in make_visible(text))
    # Two hyphens would be set as a dash.
    return re.sub(r"-(?=-)", "-{}", escaped)


def csv_lines(keys: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return exact values as CSV under their keys; an unknown value is an empty cell."""
    return "\n".join(map(_csv_line, (keys, *rows)))


def json_text(data: Any) -> str:
    """Return data as indented JSON in ASCII, which every terminal, pipe and parser takes.

    An item of a long list of a command's result is one line: Python indents slowly, and holds each word of it at once.
    Half a Unicode pair, which stands for a stray byte in a file's name, becomes U+FFFD.
    """
    if isinstance(data, dict) and any(map(_is_long, data.values())):
        members = (f"  {_json(key)}: {_json_member(value)}" for key, value in data.items())
        text = "{\n" + ",\n".join(members) + "\n}"
    else:
        text = _json(data, indent=2)
    return _BEYOND_ASCII.sub(_escape_json, text)


def _json_member(value: Any) -> str:
    if _is_long(value):
        return "[\n    " + ",\n    ".join(map(_json, value)) + "\n  ]"
    return _json(value, indent=2).replace("\n", "\n  ")


def _is_long(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > _LONGEST_INDENTED


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def simplify_name(name: str) -> str:
    """Return a short name that differs from those of similar kernels: the function and what is special in its template.

    ``void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, …>(…)`` reads
    ``vectorized_elementwise_kernel<CUDAFunctor_add,float>``. For reading only: two kernels may read alike; the full
    name is what counts and what JSON and CSV carry. A name of more than 4,096 characters is returned as it is.
    """
    if len(name) > _LONGEST_NAME:
        return name
    function, _, template = _without_arguments(_UNNAMED.sub("", name)).partition("<")
    if function.startswith("cudnn_"):
        function = _CUDNN_FRAME.sub("", function)
    function = _GEMM_DETAILS.sub("", function.rsplit("::", 1)[-1].removeprefix("void ").strip()).replace("tilesize", "")
    words = dict.fromkeys(
        word for word in _WORD.findall(template) if word not in _COMMON and not _PLACEHOLDER.match(word)
    )
    words.pop(function, None)
    if not function:
        return name
    return f"{function}<{','.join(words)}>" if words else function


def _first_difference(texts: set[str]) -> int:
    first, last = min(texts), max(texts)
    return next((at for at, (left, right) in enumerate(zip(first, last, strict=False)) if left != right), len(first))


def _shorten_around(text: str, at: int, width: int) -> str:
    head = width // 3
    room = width - head - 1
    if room < 3:
        return shorten(text, width)
    rest = text[max(at - room // 3, head) :]
    return f"{text[:head]}…{rest if len(rest) <= room else rest[: room - 1] + '…'}"


def _without_arguments(name: str) -> str:
    if not name.endswith(")"):
        return name
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += (name[at] == ")") - (name[at] == "(")
        if depth == 0:
            return name[:at] if at else name
    return name


def _csv_line(values: Sequence[object]) -> str:
    # The writer quotes a carriage return within a value only where it ends lines with one.
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(values)
    return line.getvalue()[:-2]


def _escape_json(match: re.Match[str]) -> str:
    character = match[0] if not "\ud800" <= match[0] <= "\udfff" else "\ufffd"
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"
