"""What torch.profiler says of collectives: the arguments of NCCL's kernels, and the process groups in the header."""

from __future__ import annotations

import re
from typing import Any

from profkit.names import kind_of_collective
from profkit.trace.columns import CollectiveCall
from profkit.trace.kineto_events import Event, parse_integer

_ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
}
_DTYPES = {
    **{"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64"},
    **{"Int": "int32", "Long": "int64", "Byte": "uint8", "Char": "int8", "Bool": "bool", "Short": "int16"},
}
_MESH = re.compile(r"^mesh_(.+)$")
_LONGEST_NUMBER = 6
_MOST_RANKS = 2**16


class CollectiveArguments:
    """Collects the collectives of a trace, each once, as its kernels are read."""

    def __init__(self, header: dict[str, Any]) -> None:
        """Note the process groups of ``header``: a kernel's list of ranks may be cut short."""
        self.found: list[CollectiveCall] = []
        self._groups: dict[str, tuple[int, ...]] = {}
        distributed = header.get("distributedInfo")
        groups = distributed.get("pg_config") if isinstance(distributed, dict) else None
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and isinstance(group.get("ranks"), list):
                ranks = tuple(rank for rank in group["ranks"][:_MOST_RANKS] if isinstance(rank, int))
                if len(ranks) == parse_integer(group.get("pg_size", len(ranks))):
                    self._groups[str(group.get("pg_name"))] = ranks

    def add(self, event: Event) -> int:
        """Return the index in ``found`` of the collective that a kernel runs, or -1."""
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            return -1
        name = arguments.get("Collective name")
        kind = kind_of_collective(name) if isinstance(name, str) else None
        if kind is None:
            return -1
        self.found.append(self._read(arguments, kind))
        return len(self.found) - 1

    def _read(self, arguments: dict[str, Any], kind: str) -> CollectiveCall:
        dtype, group = (arguments.get(key) for key in ("dtype", "Process Group Name"))
        counts = [parse_integer(arguments.get(key)) for key in ("In msg nelems", "Out msg nelems")]
        known = [count for count in counts if count is not None]
        size = _ELEMENT_BYTES.get(dtype) if isinstance(dtype, str) else None
        return CollectiveCall(
            kind=kind,
            group=None if group is None else str(group),
            ranks=_ranks(arguments.get("Process Group Ranks")) or self._groups.get(str(group), ()),
            dimension=_dimension(arguments.get("Process Group Description")),
            dtype=_DTYPES.get(dtype, dtype.lower()) if isinstance(dtype, str) else None,
            byte_count=max(known) * size if known and size is not None else None,
            sequence=parse_integer(arguments.get("Seq")),
        )


def _ranks(text: object) -> tuple[int, ...]:
    """Return the ranks of ``[0, 1]``; none if the list was cut short."""
    if not isinstance(text, str) or not (text.startswith("[") and text.endswith("]")):
        return ()
    parts = [part.strip() for part in text[1:-1].split(",")]
    whole = all(part.isdecimal() and len(part) <= _LONGEST_NUMBER for part in parts)
    return tuple(map(int, parts)) if whole else ()


def _dimension(description: object) -> str | None:
    """Return ``dp`` of ``mesh_dp``, as a device mesh describes the groups of its dimensions."""
    match = _MESH.match(description) if isinstance(description, str) else None
    return match[1] if match else None
