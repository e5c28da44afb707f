"""How nsys is asked to record: what a person may choose, what profkit needs for itself, and what this nsys knows."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from profkit.errors import ToolError, UsageError

GraphTrace = Literal["node", "graph"]

NVTX = "nvtx"

# With these profkit says where a capture goes, when it begins and ends, and in which environment.
_OWN = (
    "--capture-range",
    "--capture-range-end",
    "--command-file",
    "--cuda-graph-trace",
    "--delay",
    "--duration",
    "--env-var",
    "--export",
    "--force-overwrite",
    "--inherit-environment",
    "--nvtx-capture",
    "--output",
    "--start-later",
    "--stats",
    "--stop-on-exit",
    "--trace",
)
_OWN_SHORT = {"-c", "-d", "-e", "-f", "-n", "-o", "-p", "-t", "-x", "-y", "-Y"}
_HAS_AN_OPTION = {"--trace", "--cuda-graph-trace"}


@dataclass(frozen=True)
class Abilities:
    """The options and the values of ``--trace`` that an nsys knows, by its own help; empty where it does not say."""

    options: frozenset[str] = field(default=frozenset())
    traces: frozenset[str] = field(default=frozenset())

    def has(self, option: str) -> bool:
        """Return whether the option is known, or nothing is known of the options at all."""
        return not self.options or option in self.options


@dataclass(frozen=True)
class NsysOptions:
    """What nsys records beside profkit's own wishes.

    ``traces`` are the APIs; ``cuda_graph_trace`` says whether a CUDA graph's kernels are traced one by one or the graph
    as one; ``extra`` are further flags of nsys'; ``keep_report`` False deletes the report once it has been exported.
    """

    traces: tuple[str, ...] = ("cuda", NVTX)
    cuda_graph_trace: GraphTrace = "node"
    extra: tuple[str, ...] = ()
    keep_report: bool = True


def parse_traces(text: str) -> tuple[str, ...]:
    """Return the APIs in ``cuda,nvtx,osrt``.

    Raises:
        UsageError: NVTX is not among them, without which there are no ranges.
    """
    traces = tuple(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))
    if NVTX not in traces:
        raise UsageError(f"--trace {text}: ranges come through NVTX; write --trace {','.join((*traces, NVTX))}")
    return traces


def parse_extra(text: str) -> tuple[str, ...]:
    """Return the flags in ``text``, split as a shell would.

    Raises:
        UsageError: a quote is not closed, a flag is one that profkit sets itself, or a word is no flag's value.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--nsys-args: {error}") from None
    may_be_value = False
    for word in words:
        if not word.startswith("-"):
            if not may_be_value:
                raise UsageError(f"--nsys-args: {word} is no flag of nsys' (it would be taken for the program to run)")
            may_be_value = False
            continue
        name = word.partition("=")[0]
        own = _own_option(name)
        if own is not None:
            cure = f"use profkit's own {own}" if own in _HAS_AN_OPTION else "leave it out"
            raise UsageError(f"--nsys-args: {name} is set by profkit itself; {cure}")
        may_be_value = "=" not in word
    if may_be_value:
        raise UsageError(f"--nsys-args: {words[-1]} lacks its value (nsys would take the program to run for it)")
    return words


def _own_option(name: str) -> str | None:
    """Return which of profkit's own options ``name`` is, also shortened, for nsys takes an unambiguous beginning."""
    if not name.startswith("--"):
        return name[:2] if name[:2] in _OWN_SHORT else None
    return next((own for own in _OWN if own == name or (len(name) > 3 and own.startswith(name))), None)


def read_abilities(nsys: Path) -> Abilities:
    """Return what ``nsys profile --help`` names: each version knows other options and APIs, and says so itself."""
    try:
        done = subprocess.run([nsys, "profile", "--help"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{nsys}: nsys does not start: {error}") from None
    return parse_abilities(done.stdout)


def parse_abilities(text: str) -> Abilities:
    """Return the options and values of ``--trace`` in the text of ``nsys profile --help``."""
    options = re.findall(r"^\s*(?:\(\w+\)\s*)?(?:-\w, )?(--[a-z][\w-]+)(?==|\s*$)", text, re.MULTILINE)
    values = re.search(r"(?:-t, )?--trace=\s+Possible values are(.*?)\.\s*$", text, re.MULTILINE | re.DOTALL)
    return Abilities(frozenset(options), frozenset(re.findall(r"'([\w-]+)'", values[1] if values else "")))


def check_abilities(options: NsysOptions, abilities: Abilities, version: str) -> None:
    """Raise `UsageError` if an nsys of these abilities and this version does not know what is asked of it."""
    unknown = [trace for trace in options.traces if abilities.traces and trace not in abilities.traces]
    if unknown:
        names = ", ".join(sorted(abilities.traces - {"none"}))
        raise UsageError(f"--trace {','.join(unknown)}: nsys {version} knows {names}")
    if options.cuda_graph_trace == "graph" and not abilities.has("--cuda-graph-trace"):
        raise UsageError(f"--cuda-graph-trace graph: nsys {version} does not know it; name a newer one in $NSYS")
