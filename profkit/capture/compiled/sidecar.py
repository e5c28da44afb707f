"""What is known of a generated file, kept for later processes, which load the file from Inductor's cache.

It lies next to the file, where all who share that cache find it, and in profkit's own cache under the code's content.
So a cache that was filled without profkit, or that was moved, has its modules as soon as the same code was compiled
with profkit anywhere.

One generated file may serve graphs of several modules. What was recorded names those of the graph that was compiled
first. Another graph's are found by the operators' places: both have the same operators in the same order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from profkit.capture.compiled.dynamo_graphs import Operator
from profkit.capture.compiled.origins import Origin, Record
from profkit.capture.node_work import NodeWork
from profkit.files import user_cache, whole_file
from profkit.run.compiled_code import KNOWN_CODE


@dataclass(frozen=True)
class Known:
    """What was recorded when a file was generated, and the operators of the graph that it was generated for."""

    records: tuple[Record, ...]
    is_backward: bool
    operators: tuple[Operator, ...]


class Sidecars:
    """What is known of generated files, in this process and in others."""

    def __init__(self) -> None:
        self._here: dict[Path, list[Known]] = {}

    def keep(self, code: Path, text: str, known: Known) -> None:
        """Keep what is known of the file ``code`` with ``text``; where nothing can be written, for this process."""
        self._here.setdefault(code, []).insert(0, known)
        content = json.dumps({"version": KNOWN_CODE, **asdict(known)}).encode()
        for place in _places(code, text):
            with suppress(OSError):
                place.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(_sidecar(place, known.operators)) as partial:
                    partial.write_bytes(content)

    def find(self, code: Path, text: str, operators: tuple[Operator, ...]) -> Known | None:
        """Return what is known of a generated file, for a graph with these operators; None if nothing is."""
        found = (translate(known, operators) for known in self._all(code, text, operators))
        return next((known for known in found if known is not None), None)

    def _all(self, code: Path, text: str, operators: tuple[Operator, ...]) -> Iterator[Known]:
        yield from sorted(self._here.get(code, ()), key=lambda known: known.operators != operators)
        for place in _places(code, text):
            with suppress(OSError):
                for path in (_sidecar(place, operators), *sorted(place.parent.glob(f"{place.name}.profkit-*.json"))):
                    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                        yield _decode(json.loads(path.read_text()))


_KERNELS_PLACE = re.compile(r"^# kernel path: .*\n", re.MULTILINE)
"""A comment with which Inductor names the file of a kernel: of equal code, it alone differs from cache to cache."""


def _places(code: Path, text: str) -> tuple[Path, Path]:
    """Return where what is known of a generated file lies, but for the end of the names."""
    content = sha256(_KERNELS_PLACE.sub("", text).encode()).hexdigest()
    return code.with_suffix(""), user_cache(KNOWN_CODE, "known", content[:2], content[:32])


def translate(known: Known, operators: tuple[Operator, ...]) -> Known | None:
    """Return ``known`` with the modules and lines of a graph of other operators; None if the two do not match."""
    if known.operators == operators:
        return known
    if len(known.operators) != len(operators):
        return None
    meaning: dict[Operator, Operator | None] = {}
    for before, now in zip(known.operators, operators, strict=True):
        meaning[before] = now if meaning.get(before, now) == now else None
    if None in meaning.values():
        return None
    modules = {before[0]: now[0] for before, now in meaning.items() if now is not None}
    if any(now is not None and modules[before[0]] != now[0] for before, now in meaning.items()):
        return None

    def one(origin: Origin) -> Origin:
        now = meaning.get((origin.modules, origin.line))
        if now is not None:
            return replace(origin, modules=now[0], line=now[1])
        return replace(origin, modules=modules.get(origin.modules, ()), line="")

    return replace(
        known,
        operators=operators,
        records=tuple(
            replace(
                record,
                origins=tuple(map(one, record.origins)),
                buffers={name: one(origin) for name, origin in record.buffers.items()},
            )
            for record in known.records
        ),
    )


def _sidecar(place: Path, operators: tuple[Operator, ...]) -> Path:
    which = sha256(json.dumps(operators).encode()).hexdigest()[:10]
    return place.with_name(f"{place.name}.profkit-{which}.json")


def _decode(content: dict[str, object]) -> Known:
    if content["version"] != KNOWN_CODE:
        raise ValueError(content["version"])
    return Known(
        tuple(map(_record, content["records"])),  # type: ignore[call-overload]
        bool(content["is_backward"]),
        tuple((tuple(modules), line) for modules, line in content["operators"]),  # type: ignore[attr-defined]
    )


def _record(content: dict[str, object]) -> Record:
    return Record(
        str(content["kernel"]),
        bool(content["is_extern"]),
        tuple(map(_origin, content["origins"])),  # type: ignore[call-overload]
        {name: _origin(origin) for name, origin in content["buffers"].items()},  # type: ignore[attr-defined]
        None if content["work"] is None else NodeWork(**content["work"]),  # type: ignore[arg-type]
    )


def _origin(content: dict[str, object]) -> Origin:
    return Origin(tuple(content["modules"]), str(content["line"]), str(content["operator"]))  # type: ignore[arg-type]
