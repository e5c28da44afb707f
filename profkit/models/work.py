"""What ``work.json`` says of a run's ranges, as plain data.

`profkit.analysis.efficiency.work` reads it and defines its words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

VERSION = 1

Path = tuple[str, ...]


@dataclass
class Work:
    """What one instance of a range does, the ranges inside it included; ``flops`` by the type in which they are done.

    ``masked_flops`` is the part of the FLOPs that goes into keys which a causal mask hides.
    """

    flops: dict[str, int] = field(default_factory=dict)
    other_flops: int = 0
    masked_flops: int = 0
    least_bytes: int = 0


def work_content(
    source: Literal["formula", "counted"],
    ranges: Iterable[tuple[Path, list[Work]]],
    model_flops: int,
    missing: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the content of ``work.json`` from each path's instances in one step."""
    rows = [_row(path, instances) for path, instances in ranges]
    outermost = min((len(row["path"]) for row in rows), default=0)
    whole: dict[str, int] = next((row["flops_by_dtype"] for row in rows if len(row["path"]) == outermost), {})
    return {
        "version": VERSION,
        "source": source,
        "dtype": max(whole, key=lambda dtype: whole[dtype], default=None),
        "ranges": rows,
        "model_flops": model_flops,
        "missing": sorted(missing),
    }


def _row(path: Path, instances: list[Work]) -> dict[str, Any]:
    count = len(instances)
    dtypes = sorted({dtype for one in instances for dtype in one.flops})
    by_dtype = {dtype: sum(one.flops.get(dtype, 0) for one in instances) // count for dtype in dtypes}
    flops = sum(by_dtype.values())
    return {
        "path": list(path),
        "flops": flops,
        "other_flops": sum(one.other_flops for one in instances) // count,
        "needed_flops": flops - sum(one.masked_flops for one in instances) // count,
        "least_bytes": sum(one.least_bytes for one in instances) // count,
        "flops_by_dtype": by_dtype,
        "instances": count,
        "varies": any(one != instances[0] for one in instances),
    }
