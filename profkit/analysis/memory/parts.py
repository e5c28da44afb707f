"""What was allocated, by module or by phase of the step: sums over allocations, split by category.

The modules are a tree: a module's bytes are its own and those of the modules in it. What is in no module, and what is
in none that is known, stand next to it, so that the rows at the top add up to all that was allocated. A storage of
several modules' tensors is split where the run recorded whose bytes are where, with the rest (alignment, rounding) at
the module that holds them all; else it stands there as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from profkit.analysis.memory.places import OUTSIDE, Place
from profkit.errors import SnapshotError
from profkit.names import MODEL, kind_of

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
    """One allocation, and where it belongs."""

    bytes: int
    category: str
    place: Place
    phase: str


@dataclass
class _Sum:
    bytes: int = 0
    count: int = 0
    own_bytes: int = 0
    categories: Counter[str] = field(default_factory=Counter)
    evidence: Counter[str] = field(default_factory=Counter)

    def add(self, size: int, count: int, category: str, evidence: str | None = None) -> None:
        self.bytes += size
        self.count += count
        self.categories[category] += size
        if evidence is not None:
            self.evidence[evidence] += size


def sum_by_phase(pieces: Iterable[Piece], total: int) -> tuple[PartRow, ...]:
    """Return what was allocated in each phase, the most bytes first."""
    sums: dict[str, _Sum] = {}
    for piece in pieces:
        sums.setdefault(piece.phase, _Sum()).add(piece.bytes, 1, piece.category)
    for one in sums.values():
        one.own_bytes = one.bytes
    rows = [_row((phase,), one, total) for phase, one in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.name)))


def sum_by_module(pieces: Iterable[Piece], total: int, known: Sequence[str]) -> tuple[PartRow, ...]:
    """Return the tree of modules, depth first; ``known`` are modules in the order in which they are defined.

    Raises:
        SnapshotError: there are more than `_MOST_MODULES`.
    """
    sums: dict[Path, _Sum] = {}
    for piece in pieces:
        for path, size, count in _places(piece):
            for depth in range(1, len(path) + 1):
                if path[:depth] not in sums and len(sums) >= _MOST_MODULES:
                    raise SnapshotError(
                        f"the texts of its allocations name more than {_MOST_MODULES:,} modules; that many are not read"
                    )
                one = sums.setdefault(path[:depth], _Sum())
                one.add(size, count, piece.category, piece.place.evidence)
            sums[path].own_bytes += size
    order: dict[Path, int] = {}
    for path in [*map(path_of, known), *sums]:
        for depth in range(1, len(path) + 1):
            order.setdefault(path[:depth], len(order))
    paths = sorted(sums, key=lambda path: (not _is_module(path), [order[path[: n + 1]] for n in range(len(path))]))
    return tuple(_row(path, sums[path], total) for path in paths)


def other_row(name: str, size: int, count: int, total: int) -> PartRow:
    """Return a row for allocations that were not looked at."""
    return PartRow(name, (name,), size, size / total if total else 0.0, count, size, {}, {})


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
    """Return whether any module is known."""
    return any(_is_module(row.path) for row in rows)


def path_of(module: str) -> Path:
    """Return where a module stands in the tree; before a slash stands the model, if there are several."""
    root, _, inner = module.rpartition("/")
    return (root or MODEL, *inner.split(".", _DEEPEST)) if inner and module != MODEL else (root or MODEL,)


def _places(piece: Piece) -> Iterator[tuple[Path, int, int]]:
    """Yield where a piece's bytes stand, how many, and whether the allocation counts there."""
    modules = piece.place.modules
    if len(modules) <= 1:
        path = _place(piece, modules[0][0] if modules else None)
        shared = (piece.place.shared,) if piece.place.shared and _is_module(path) else ()
        yield path + shared, piece.bytes, 1
        return
    paths = [(OUTSIDE_MODULES, piece.phase) if module == OUTSIDE else path_of(module) for module, _ in modules]
    same = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    above = tuple(names[0] for names in same) or (NO_MODULE_KNOWN,)
    sizes = [size or 0 for _, size in modules]
    if sum(sizes) > piece.bytes:
        sizes = [0] * len(sizes)
    yield above, piece.bytes - sum(sizes), 1
    yield from ((path, size, 0) for path, size in zip(paths, sizes, strict=True) if size)


def _place(piece: Piece, module: str | None) -> Path:
    """Return where an allocation of one module, or of none that is known, stands.

    A library's workspace serves all modules, whichever was the first to need it, and the buckets of a wrapper that were
    made before any module ran serve them all too.
    """
    if piece.category == "workspace" or (piece.category == "communication" and not module):
        return OUTSIDE_MODULES, piece.category
    if module is None:
        return (NO_MODULE_KNOWN,)
    return (OUTSIDE_MODULES, piece.phase) if module == OUTSIDE else path_of(module)


def _row(path: Path, one: _Sum, total: int) -> PartRow:
    share = one.bytes / total if total else 0.0
    categories, evidence = dict(one.categories), dict(one.evidence)
    return PartRow(_name(path), path, one.bytes, share, one.count, one.own_bytes, categories, evidence)


def _name(path: Path) -> str:
    if len(path) == 1 or not _is_module(path):
        return path[-1]
    return ("" if path[0] == MODEL else f"{path[0]}/") + ".".join(path[1:])


def _is_module(path: Path) -> bool:
    return not path[0].startswith("(")


def _add(path: Path, rows: list[PartRow]) -> PartRow:
    """Return rows of one kind as one row."""
    first = rows[0]
    if len(rows) == 1 and path == first.path:
        return first
    categories: Counter[str] = Counter()
    evidence: Counter[str] = Counter()
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
    """Yield the rows with each module that holds one other and nothing of its own joined to that one."""
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
