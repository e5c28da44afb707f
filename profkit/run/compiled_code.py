"""``compiled.jsonl``: where compiled code comes from, written while torch.compile's code is made or loaded.

A compiled model runs generated code, in which modules are gone. This file says of each launch in that code which
modules, lines and operators of the program it computes. Every process of a run appends to it what it learns; one JSON
object a line, written whole or not at all, each with ``kind``; a last line that was cut off is left out::

    {"kind": "graph", "id": "3f9a1c22e0", "code": "cxyz…", "torch": "2.11.0", "name": "Model.forward model.py:20",
     "is_backward": false, "launches": [{"line": 123, "kernel": "triton_poi_fused_gelu_3", "is_extern": false,
     "modules": ["transformer.h.0.mlp.gelu"], "lines": ["model.py:87 forward"], "operators": ["aten.gelu"],
     "buffers": [118]}]}

In a trace each launch of compiled code lies in a range that `launch_range` names: it leads back to the graph and the
line here, and it names the modules by itself, so that a trace can be read without this file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profkit.errors import RunError
from profkit.run.records import WrongRecord, decode, read_text

PREFIX = "compiled "
SHARED = "shared: "
SEPARATOR = " / "


@dataclass(frozen=True)
class Launch:
    """One place in generated code that launches: a fused kernel, or a call of a library (``is_extern``).

    ``line`` is that of the generated file. ``modules`` are those that the launch computes for, in the program's order:
    dotted names as ``named_modules`` of the compiled module gives them, ``""`` for that module itself; none where
    Inductor made the launch for no module (copies, layouts). ``lines`` are the program's, as ``file:line function``.
    ``buffers`` are the lines of the generated file that allocate what this launch writes.
    """

    line: int
    kernel: str
    is_extern: bool
    modules: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    buffers: tuple[int, ...] = ()
    flops: int | None = None
    """Of its matrix products, attention and convolutions; None where they are not known."""
    dtype: str | None = None
    """The type in which the products are done, as in ``work.json``; None without products."""
    masked_flops: int = 0
    recomputed_flops: int = 0


@dataclass(frozen=True)
class CompiledGraph:
    """The generated code of one graph: its forward pass, or its backward.

    ``id`` is made from the content, so that all processes of a run call the same graph the same. ``code`` is the
    generated file's name without its suffix; two graphs whose modules differ may share it.
    """

    id: str
    code: str
    torch: str
    name: str
    is_backward: bool
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class LaunchPlace:
    """What the range around a launch of compiled code says: where it stands, and under which modules.

    ``path`` are the modules around it, outermost first, by the names of their ranges. ``shared`` are those that a fused
    kernel computes for together, below the last of ``path``; none for a launch of one module.
    """

    graph: str
    line: int
    path: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


def launch_range(place: LaunchPlace) -> str:
    """Return the name of the range around a launch: ``compiled 3f9a1c22e0:123 model / h.0 / shared: h.0.a + h.0.b``."""
    last = (SHARED + " + ".join(place.shared),) if place.shared else ()
    return f"{PREFIX}{place.graph}:{place.line} {SEPARATOR.join((*place.path, *last))}".rstrip()


def read_launch_range(name: str) -> LaunchPlace | None:
    """Return what a range's name says of a launch of compiled code; None if it is another range."""
    head, _, rest = name.removeprefix(PREFIX).partition(" ")
    graph, _, line = head.partition(":")
    if not name.startswith(PREFIX) or not graph or not line.isdecimal() or len(line) > 9:
        return None
    path = rest.split(SEPARATOR) if rest else []
    shared = path.pop().removeprefix(SHARED).split(" + ") if path and path[-1].startswith(SHARED) else []
    return LaunchPlace(graph, int(line), tuple(path), tuple(shared))


def append_records(path: Path, records: Sequence[CompiledGraph]) -> None:
    """Add records to the file, each in one write.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        for record in records:
            file.write(json.dumps({"kind": _KINDS[type(record)], **asdict(record)}).encode() + b"\n")


def read_compiled_code(path: Path) -> tuple[CompiledGraph, ...]:
    """Return what a run knows of its compiled code, each graph once; unknown kinds and keys are passed over.

    Raises:
        RunError: it cannot be read, or a line other than the last is damaged.
    """
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        return ()
    except UnicodeDecodeError:
        raise RunError(f"{path}: not UTF-8 text") from None
    found: dict[str, CompiledGraph] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = _read_record(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            what = f" ({error})" if isinstance(error, WrongRecord) else ""
            raise RunError(f"{path}:{number}: not a line about compiled code{what}; was it edited?") from None
        if record is not None:
            found[record.id] = record
    return tuple(found.values())


_KINDS: dict[type, str] = {CompiledGraph: "graph"}


def _read_record(entry: Any) -> CompiledGraph | None:
    if not isinstance(entry, dict) or entry.get("kind") not in _KINDS.values():
        return None
    graph: CompiledGraph = decode(CompiledGraph, entry)
    return graph
