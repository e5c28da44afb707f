"""Read the allocator's settings from a snapshot."""

from __future__ import annotations

from typing import Any

from profkit.snapshot.columns import NO_SPLIT_LIMIT, Settings


def read_settings(entry: Any) -> Settings:
    """Return the settings that the file records, or the defaults, marked as not recorded.

    ``max_split_size`` is -1 where there is no limit (the C++ counts it in size_t); the divisions are keyed by the
    lower end of their interval in MiB (c10/core/AllocatorConfig.h).
    """
    if not isinstance(entry, dict):
        return Settings()
    limit = int(entry.get("max_split_size", -1))
    divisions = entry.get("roundup_power2_divisions") or {}
    ordered = tuple(int(divisions[key]) for key in sorted(divisions, key=int))
    return Settings(
        is_recorded=True,
        expandable_segments=bool(entry.get("expandable_segments", False)),
        max_split_size_bytes=limit if limit > 0 else NO_SPLIT_LIMIT,
        garbage_collection_threshold=float(entry.get("garbage_collection_threshold", 0.0)),
        roundup_power2_divisions=ordered if any(count > 1 for count in ordered) else (),
        text=str(entry.get("PYTORCH_CUDA_ALLOC_CONF", entry.get("PYTORCH_ALLOC_CONF", ""))),
    )
