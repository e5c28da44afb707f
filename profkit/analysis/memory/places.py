"""Where in the program memory was allocated: in which module, and in which phase of the step; and the sums of each.

The module of an allocation, the best evidence first: ``identity``, the name of the tensor that the run recorded;
``code``, what the run knows of the compiled code that asked for it; ``metadata``, what profkit's hooks wrote into the
event; ``range``, profkit's ranges that were open at that time, where torch is too old for such a text; ``none``. Of
what autograd saved, code or text says which module made it, and its name counts only without them.

Ranges in a snapshot do not say on which thread they were open. Where several devices' autograd threads ran at a time,
and in older torch, which keeps the ranges of one thread alone, they prove nothing of the backward pass.

A module's bytes are its own and those of the modules in it. What is in no module, or in none that is known, stands next
to the tree, so that the top rows add up to all that was allocated. A storage of several modules' tensors is split where
the run recorded whose bytes are where; the rest stands at the module that holds them all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, takewhile

from profkit.analysis.memory import Part, read_text, shown_module
from profkit.analysis.memory.generated_memory import Held, ReplayedDevice
from profkit.errors import SnapshotError
from profkit.names import BACKWARD, MODEL, RECOMPUTE, kind_of, name_shared
from profkit.snapshot.columns import Annotation

OUTSIDE = ""
"""The module of what was allocated outside all modules."""

PLACE_EVIDENCE = ("identity", "code", "metadata", "range", "none")

# How many parts of its name a tensor's role adds to its module's.
_OWN_PARTS = {"parameter": 1, "gradient": 1, "buffer": 1, "optimizer_state": 2}

# How the ledger's names of what belongs to no module begin.
_NO_MODULE = "("


@dataclass(frozen=True)
class Place:
    """The modules that an allocation belongs to, each with its own bytes, and how they are known.

    Normally it is one module, or `OUTSIDE`, or none where that is not known. Tensors of several modules may lie in one
    storage; their bytes are None if the run did not record them, or if they overlap as those of tied weights do.
    """

    modules: tuple[tuple[str, int | None], ...]
    evidence: str
    shared: str | None = None
    """Within the one module, the line of its own for what several modules share."""


class Places:
    def __init__(self, memory: ReplayedDevice) -> None:
        self._memory, self._timeline, self._stacks = memory, memory.timeline, memory.stacks

    def place_of(self, row: int, held: Held | None) -> Place:
        """Return the module of an allocation (a row of the replay) that in compiled code ``held`` holds."""
        owner = self._memory.owners.get(row)
        if owner is not None and owner.role in _OWN_PARTS:
            return Place(_modules_of(owner.parts, _OWN_PARTS[owner.role]), "identity")
        if owner is not None and owner.role == "input":
            return Place(((OUTSIDE, None),), "identity")
        text = read_text(self._stacks.raw_of(row))
        if text is not None:
            module, evidence = text.module, "metadata"
        elif owner is not None and owner.role == "saved" and owner.name:
            module, evidence = owner.name, "identity"
        else:
            opened = self._open_module(self._stacks.birth_of(row))
            if opened is None:
                return Place((), "none")
            module, evidence = opened, "range"
        return Place(((module, None),), evidence) if held is None else _place_in_code(held, module)

    def phase_of(self, row: int) -> str | None:
        """Return the phase in which an allocation was made; None outside all phases and before the first event."""
        text = read_text(self._stacks.raw_of(row))
        if text is not None and text.phase:
            return text.phase
        birth = self._stacks.birth_of(row)
        return RECOMPUTE if self._timeline.recomputation_at(birth) else self._timeline.phase_at(birth)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules with tensors of their own, in the order of their definition, as the run's ledger has them."""
        owned = self._memory.recorded.owned if self._memory.recorded else ()
        names = (entry.name for entry in owned if entry.role in ("parameter", "buffer"))
        return tuple(dict.fromkeys(_module_of(name, 1) for name in names))

    def _open_module(self, birth: int) -> str | None:
        if birth < 0 or not self._ranges or not len(self._timeline.times_us):
            return None
        if not self._knows_backward and self._timeline.phase_at(birth) == BACKWARD:
            return None
        borders, innermost = self._stretches
        at = bisect_right(borders, int(self._timeline.times_us[birth]))
        return innermost[at] if 0 < at < len(borders) else None

    @cached_property
    def _knows_backward(self) -> bool:
        """Whether the ranges of the autograd thread are there, and no other device has such a thread."""
        passes = [span for span in self._timeline.phases if span.name == BACKWARD]
        starts = [span.start_us for span in self._ranges]
        return self._memory.is_only_device and any(
            bisect_left(starts, span.start_us) < bisect_left(starts, span.end_us) for span in passes
        )

    @cached_property
    def _stretches(self) -> tuple[list[int], list[str]]:
        last = int(self._timeline.times_us[-1]) + 1
        marks = [(annotation.start_us, 1, number) for number, annotation in enumerate(self._ranges)]
        marks += [
            (last if annotation.end_us is None else annotation.end_us, 0, number)
            for number, annotation in enumerate(self._ranges)
        ]
        borders: list[int] = []
        innermost = [OUTSIDE]
        is_open: dict[int, str] = {}
        for time, begins, number in sorted(marks):
            if begins:
                is_open[number] = self._ranges[number].name
            else:
                is_open.pop(number, None)
            borders.append(time)
            innermost.append(next(reversed(is_open.values()), OUTSIDE))
        return borders, innermost

    @cached_property
    def _ranges(self) -> list[Annotation]:
        """A program has ranges of its own: a module's is known by the first part of its name, which the ledger has."""
        tops = {name.partition(".")[0] for name in self.modules} | {MODEL}
        named = (
            annotation for annotation in self._memory.device.annotations if annotation.name.partition(".")[0] in tops
        )
        return [annotation for annotation in named if annotation.end_us != annotation.start_us]


def _place_in_code(held: Held, compiled: str) -> Place:
    names = [_below(compiled, module) for module in held.modules]
    if len(names) <= 1:
        return Place(((names[0] if names else compiled, None),), "code")
    ancestor = ".".join(common_start(name.split(".") for name in names)) or compiled
    shown = [shown_module(name) or MODEL for name in names]
    shared = name_shared(shown) if held.is_decided else f"one of: {', '.join(shown)}"
    return Place(((ancestor, None),), "code", shared)


def common_start(paths: Iterable[Sequence[str]]) -> tuple[str, ...]:
    same = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return tuple(names[0] for names in same)


def _below(compiled: str, module: str) -> str:
    if not module or compiled in (OUTSIDE, MODEL):
        return module or compiled
    return compiled + module if compiled.endswith("/") else f"{compiled}.{module}"


def _modules_of(parts: tuple[Part, ...], own_parts: int) -> tuple[tuple[str, int | None], ...]:
    sizes: dict[str, int] = {}
    extents = []
    for part in parts:
        extents.append((part.offset or 0, part.bytes or 0))
        module = _module_of(part.name, own_parts)
        sizes[module] = sizes.get(module, 0) + (part.bytes or 0)
    extents.sort()
    are_apart = all(begin + size <= then for (begin, size), (then, _) in pairwise(extents))
    is_known = are_apart and all(part.offset is not None and part.bytes is not None for part in parts)
    return tuple((module, size if is_known else None) for module, size in sizes.items())


def _module_of(name: str, own_parts: int) -> str:
    """Return a tensor's module: its name without its own parts. The outermost module's tensors have no other parts."""
    if name.startswith(_NO_MODULE):
        return OUTSIDE
    root, slash, inner = name.rpartition("/")
    module = ".".join(inner.split(".")[:-own_parts])
    return root + slash + module or MODEL


OUTSIDE_MODULES = "(outside modules)"
NO_MODULE_KNOWN = "(no module known)"
IN_NO_PHASE = "(in no phase)"
BEFORE_RECORDING = "(before recording)"

Path = tuple[str, ...]

_DEEPEST = 50
"""Names come from a file, and every level of a name is a row: what is deeper stays one name."""


_MOST_MODULES = 2**18
"""Ten times as many as the largest models have."""


@dataclass(frozen=True)
class PartRow:
    """One module with the modules in it, or one phase."""

    name: str
    """The module's dotted name, the phase, or one of the names in brackets above."""
    path: Path
    """Where it stands in the tree: names from the top."""
    bytes: int
    share: float
    count: int
    """Allocations; one that is split counts at the module that holds its parts."""
    own_bytes: int
    """What is in none of the modules in it."""
    categories: dict[str, int]
    evidence: dict[str, int]
    """How the module is known; empty for a phase."""
    number: int = 1
    """How many siblings this row stands for: ``h.*`` for ``h.0`` to ``h.11``."""


@dataclass(frozen=True)
class Piece:
    bytes: int
    category: str
    place: Place
    phase: str
    evidence: str = "none"
    """How the category is known (`categories.EVIDENCE`)."""


@dataclass
class _Sum:
    bytes: int = 0
    count: int = 0
    own_bytes: int = 0
    categories: Counter[str] = field(default_factory=Counter)
    evidence: Counter[str] = field(default_factory=Counter)

    def add(self, piece: Piece, size: int, count: int) -> None:
        self.bytes += size
        self.count += count
        self.categories[piece.category] += size
        self.evidence[piece.place.evidence] += size

    def row(self, path: Path, total: int) -> PartRow:
        share = self.bytes / total if total else 0.0
        kinds = dict(self.categories), dict(self.evidence)
        return PartRow(_name(path), path, self.bytes, share, self.count, self.own_bytes, *kinds)


def sum_by_phase(pieces: Iterable[Piece], total: int) -> tuple[PartRow, ...]:
    sums = defaultdict[str, _Sum](_Sum)
    for piece in pieces:
        sums[piece.phase].add(piece, piece.bytes, 1)
    rows = [replace(phase.row((name,), total), own_bytes=phase.bytes, evidence={}) for name, phase in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.name)))


def sum_by_module(pieces: Iterable[Piece], total: int, known: Sequence[str]) -> tuple[PartRow, ...]:
    """Return the tree of modules, depth first; ``known`` are modules in the order in which they are defined."""
    sums: dict[Path, _Sum] = {}
    for piece in pieces:
        for path, size, count in _places(piece):
            for depth in range(1, len(path) + 1):
                if path[:depth] not in sums and len(sums) >= _MOST_MODULES:
                    raise SnapshotError(
                        f"the texts of its allocations name more than {_MOST_MODULES:,} modules; that many are not read"
                    )
                sums.setdefault(path[:depth], _Sum()).add(piece, size, count)
            sums[path].own_bytes += size
    order: dict[Path, int] = {}
    for path in [*map(path_of, known), *sums]:
        for depth in range(1, len(path) + 1):
            order.setdefault(path[:depth], len(order))
    paths = sorted(sums, key=lambda path: (not _is_module(path), [order[path[: n + 1]] for n in range(len(path))]))
    return tuple(sums[path].row(path, total) for path in paths)


def fold(rows: Iterable[PartRow]) -> tuple[PartRow, ...]:
    """Return a tree with siblings that differ only in a number as one row, as the tree of ranges shows them.

    A module that holds one other and nothing of its own shares a row with it.
    """
    rows = tuple(rows)
    kinds: dict[Path, set[str]] = {}
    for row in rows:
        kinds.setdefault((*row.path[:-1], kind_of(row.path[-1])), set()).add(row.path[-1])
    folded: dict[Path, list[PartRow]] = {}
    names: dict[Path, Path] = {(): ()}
    for row in rows:
        kind = (*row.path[:-1], kind_of(row.path[-1]))
        name = kind[-1] if len(kinds[kind]) > 1 else row.path[-1]
        names[row.path] = (*names[row.path[:-1]], name)
        folded.setdefault(names[row.path], []).append(row)
    # Children of siblings that became one come one after another.
    order = {path: place for place, path in enumerate(folded)}
    paths = sorted(folded, key=lambda path: [order[path[: depth + 1]] for depth in range(len(path))])
    return tuple(_join_chains([_add(path, folded[path]) for path in paths]))


def names_modules(rows: Iterable[PartRow]) -> bool:
    return any(_is_module(row.path) for row in rows)


def path_of(module: str) -> Path:
    """Return where a module stands in the tree; before a slash stands the model, if there are several."""
    root, _, inner = module.rpartition("/")
    return (root or MODEL, *inner.split(".", _DEEPEST)) if inner and module != MODEL else (root or MODEL,)


def _places(piece: Piece) -> Iterator[tuple[Path, int, int]]:
    modules = piece.place.modules
    if len(modules) <= 1:
        path = _place(piece, modules[0][0] if modules else None)
        shared = (piece.place.shared,) if piece.place.shared and _is_module(path) else ()
        yield path + shared, piece.bytes, 1
        return
    paths = [(OUTSIDE_MODULES, piece.phase) if module == OUTSIDE else path_of(module) for module, _ in modules]
    above = common_start(paths) or (NO_MODULE_KNOWN,)
    sizes = [size or 0 for _, size in modules]
    if sum(sizes) > piece.bytes:
        sizes = [0] * len(sizes)
    yield above, piece.bytes - sum(sizes), 1
    yield from ((path, size, 0) for path, size in zip(paths, sizes, strict=True) if size)


def _place(piece: Piece, module: str | None) -> Path:
    """A library's workspace serves all modules, whichever was the first to need it, and the buckets of a wrapper that
    were made before any module ran serve them all too.
    """
    if piece.category == "workspace" or (piece.category == "communication" and not module):
        return OUTSIDE_MODULES, piece.category
    if module is None:
        return (NO_MODULE_KNOWN,)
    return (OUTSIDE_MODULES, piece.phase) if module == OUTSIDE else path_of(module)


def _name(path: Path) -> str:
    if len(path) == 1 or not _is_module(path):
        return path[-1]
    return ("" if path[0] == MODEL else f"{path[0]}/") + ".".join(path[1:])


def _is_module(path: Path) -> bool:
    return not path[0].startswith("(")


def _add(path: Path, rows: list[PartRow]) -> PartRow:
    if len(rows) == 1 and path == rows[0].path:
        return rows[0]
    categories, evidence = Counter[str](), Counter[str]()
    for row in rows:
        categories.update(row.categories)
        evidence.update(row.evidence)
    return PartRow(
        name=_name(path),
        path=path,
        bytes=sum(row.bytes for row in rows),
        share=sum(row.share for row in rows),
        count=sum(row.count for row in rows),
        own_bytes=sum(row.own_bytes for row in rows),
        categories=dict(categories),
        evidence=dict(evidence),
        number=len(rows),
    )


def _join_chains(rows: list[PartRow]) -> Iterator[PartRow]:
    joined: dict[Path, Path] = {(): ()}
    children = Counter(row.path[:-1] for row in rows)
    part = ""
    for row in rows:
        name = part + row.path[-1]
        above = joined[row.path[:-1]]
        if len(row.path) > 1 and _is_module(row.path) and not row.own_bytes and children[row.path] == 1:
            part, joined[row.path] = f"{name}.", above
            continue
        part, joined[row.path] = "", (*above, name)
        yield replace(row, path=joined[row.path])
