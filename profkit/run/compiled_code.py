"""``compiled.jsonl``: where compiled code comes from, written while torch.compile's code is made or loaded.

A compiled model runs generated code, in which modules are gone. Every process of a run appends what it learns of each
launch in that code: one JSON object a line, written whole or not at all; a last line that was cut off is left out::

    {"kind": "graph", "id": "3f9a1c22e0", "code": "cxyz…", "torch": "2.11.0", "name": "Model.forward model.py:20",
     "is_backward": false, "launches": [{"line": 123, "kernel": "triton_poi_fused_gelu_3", "is_extern": false,
     "modules": ["transformer.h.0.mlp.gelu"], "lines": ["model.py:87 forward"], "operators": ["aten.gelu"]}]}

In a trace each launch of compiled code lies in a range that `profkit.names.launch_range` names: it leads back to the
graph and the line here, and it names the modules by itself, so that a trace can be read without this file.

Python does not run when a CUDA graph is replayed. So the file also says of each graph that was captured which ranges
were open when each of its nodes was made, in the order in which they were made::

    {"kind": "cuda_graph", "id": "9d21c07b4e", "runs": [{"count": 3, "kind": "kernel", "ranges": ["forward", "model"]}],
     "is_chain": true}

A replay lies in a range that `profkit.names.graph_range` names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from profkit.run import decode, read_lines
from profkit.text_kinds import (
    KernelName,
    Message,
    ModuleName,
    OperatorName,
    RangeName,
    SourceLine,
    Version,
    Word,
)

_MOST_NODES = 2**22
FIRST_TORCH = (2, 10)
KNOWN_CODE = "compiled-2"
"""The folder in profkit's cache for what is known of generated code, and the form in which it is written."""
NodeKind = Literal["kernel", "copy", "fill", "other"]
"""What a node of a CUDA graph does when it is replayed; ``other`` leaves no row in a trace."""


@dataclass(frozen=True)
class Launch:
    """One place in generated code that launches: a fused kernel, or a call of a library (``is_extern``).

    ``line`` is that of the generated file. ``modules`` are those that the launch computes for, in the program's order:
    dotted names as ``named_modules`` of the compiled module gives them, ``""`` for that module itself; none where
    Inductor made the launch for no module (copies, layouts). ``lines`` are the program's, as ``file:line function``.
    """

    line: int
    kernel: KernelName
    is_extern: bool
    modules: tuple[ModuleName, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    operators: tuple[OperatorName, ...] = ()
    flops: int | None = None
    """Of its matrix products, attention and convolutions; None where they are not known."""
    dtype: Word | None = None
    """The type in which the products are done, as in ``work.json``; None without products."""
    masked_flops: int = 0
    recomputed_flops: int = 0


@dataclass(frozen=True)
class Holder:
    """What holds memory from a line of the generated file on: the result of one operator of the program.

    ``launch`` is the line of the launch that writes it. ``module`` is whose result it is, by the names of
    ``Launch.modules``, and ``source`` the program's line; None where they are not known.
    """

    line: int
    launch: int | None = None
    module: ModuleName | None = None
    source: SourceLine | None = None
    name: Word = ""
    """The buffer's name in the generated file."""


@dataclass(frozen=True)
class Allocation:
    """Memory that generated code allocates at ``line``, and what holds it one after another: Inductor reuses memory.

    ``line`` is None for memory that the code is given and reuses: what the forward pass saved for a backward pass. The
    first holder then has its name as an input. ``freed`` is the line that frees it; None if the code returns it.
    Several allocations may have one line.
    """

    line: int | None
    holders: tuple[Holder, ...]
    freed: int | None = None


@dataclass(frozen=True)
class CompiledGraph:
    """The generated code of one graph: its forward pass, or its backward.

    ``id`` is made from the content, so that all processes of a run call the same graph the same. ``code`` is the
    generated file's name without its suffix; two graphs whose modules differ may share it.
    """

    id: Word
    code: Word
    torch: Version
    name: SourceLine
    is_backward: bool
    launches: tuple[Launch, ...]
    allocations: tuple[Allocation, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    """First and last lines of the parts of the generated file, in the order in which they run."""
    inputs: tuple[Word, ...] = ()
    """The names of what the code is given. A backward pass is given what the forward pass saved, in its order."""
    outputs: tuple[Word, ...] = ()
    """The names in what the code returns, "" for what is no memory."""


@dataclass(frozen=True)
class NodeRun:
    """``count`` nodes of a CUDA graph, made one after the other in these ``ranges``, outermost first."""

    count: int
    kind: NodeKind
    ranges: tuple[RangeName, ...] = ()


@dataclass(frozen=True)
class CapturedGraph:
    """What was captured into a CUDA graph: all its nodes, in the order in which they were made.

    ``id`` is made from the nodes, so that equal graphs of all processes share a record. A node's ranges are those that
    were opened since the capture began. ``is_chain``: each node waits for the one before it, so that they run in this
    order.
    """

    id: Word
    runs: tuple[NodeRun, ...]
    is_chain: bool = False

    def __post_init__(self) -> None:
        if any(run.count < 0 for run in self.runs) or sum(run.count for run in self.runs) > _MOST_NODES:
            raise ValueError(f"a CUDA graph of less than no nodes, or of more than {_MOST_NODES:,}")
        if sum(len(run.ranges) for run in self.runs) > _MOST_NODES:
            raise ValueError(f"a CUDA graph with more than {_MOST_NODES:,} ranges")

    @staticmethod
    def of(runs: Sequence[NodeRun], *, is_chain: bool = False) -> CapturedGraph:
        content = json.dumps([is_chain, *((run.count, run.kind, run.ranges) for run in runs)])
        return CapturedGraph(sha256(content.encode()).hexdigest()[:10], tuple(runs), is_chain)


@dataclass(frozen=True)
class Compilation:
    """One time that torch.compile worked for a function: ``what`` it made code of, and how long that took.

    ``id`` is unique within a run. ``line`` is the program's, as ``file:line function``, None of a backward
    pass. ``step`` is the number in the range of the step in which it happened, None before the first;
    ``is_recorded`` says whether the trace shows that step. ``reason`` is why the function was compiled again, as far as
    torch says; ``failure`` why no code was made of it, and ``failed_line`` where; ``cudagraphs_skipped`` why its code
    runs without CUDA graphs though they were asked for.
    """

    id: Word
    pid: int
    what: Literal["forward", "backward", "at run time"]
    line: SourceLine | None
    step: int | None
    is_recorded: bool
    is_again: bool
    duration_ns: int | None
    reason: Message | None = None
    failure: Message | None = None
    failed_line: SourceLine | None = None
    cudagraphs_skipped: Message | None = None


@dataclass(frozen=True)
class GraphBreak:
    """A place at which torch.compile ended a graph and left the next operation to Python.

    ``reason`` is the first line of what torch says, ``explanation`` and ``hint`` are what follows, if anything does.
    ``lines`` are the program's, innermost first, as ``file:line function``. The rest is as in `Compilation`.
    """

    id: Word
    pid: int
    reason: Message
    explanation: Message | None
    hint: Message | None
    lines: tuple[SourceLine, ...]
    step: int | None
    is_recorded: bool


def says_origins(torch: str) -> bool:
    """Return whether this version of torch says, at each launch that Inductor writes, what it was made of."""
    version = re.match(r"(\d{1,4})\.(\d{1,4})", torch)
    return version is not None and (int(version[1]), int(version[2])) >= FIRST_TORCH


def append_records(path: Path, records: Sequence[CompiledGraph | CapturedGraph | Compilation | GraphBreak]) -> None:
    with path.open("ab", buffering=0) as file:
        for record in records:
            file.write(json.dumps({"kind": _KINDS[type(record)], **asdict(record)}).encode() + b"\n")


@dataclass(frozen=True)
class CompiledCode:
    """What one process left of its compiled code and its CUDA graphs: each graph once, the rest in order."""

    graphs: tuple[CompiledGraph, ...]
    captured: tuple[CapturedGraph, ...]
    compilations: tuple[Compilation, ...]
    breaks: tuple[GraphBreak, ...]


def read_compiled_code(path: Path) -> CompiledCode:
    """Return what a run knows of compiled code and CUDA graphs; unknown kinds and keys are passed over.

    Raises:
        RunError: it cannot be read, or a line other than the last is damaged.
    """
    records_of: dict[type, dict[str, Any]] = {kind: {} for kind in _KINDS}
    kinds = {name: kind for kind, name in _KINDS.items()}

    def take(entry: dict[str, Any]) -> None:
        kind = kinds.get(entry["kind"])
        if kind is not None:
            record = decode(kind, entry)
            records_of[kind][record.id] = record

    with suppress(FileNotFoundError):  # a run without compiled code has none
        read_lines(path, take, "a line about compiled code")
    return CompiledCode(*(tuple(records.values()) for records in records_of.values()))


_KINDS: dict[type[CompiledGraph | CapturedGraph | Compilation | GraphBreak], str] = {
    CompiledGraph: "graph",
    CapturedGraph: "cuda_graph",
    Compilation: "compilation",
    GraphBreak: "graph_break",
}
"""In the order of `CompiledCode`."""
