"""Section 1: what was run, on what, and the cautions. Never the environment, the host or the user."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from profkit.analysis.opened import OpenedCapture
from profkit.findings import Finding
from profkit.report.page.markup import without_folders
from profkit.report.text import make_visible
from profkit.report.units import format_count
from profkit.run.manifest import Manifest
from profkit.trace.columns import distinct_values

_NOT_RECORDED = "not recorded"
_REVISION = 12


def build_head(capture: OpenedCapture, findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the command, the facts as pairs of name and value, and the cautions, each once, failures first."""
    manifest = Manifest() if capture.run is None else capture.run.manifest
    command = shlex.join(map(without_folders, manifest.argv)) if manifest.argv else manifest.target
    chips = {one.message: one.verdict for one in findings if one.verdict != "note"}
    chips |= dict.fromkeys(_of_run(manifest), "warning") if capture.run is not None else {}
    return {
        "name": capture.path.resolve().name,
        "command": make_visible(command),
        "facts": list(_facts(capture, manifest)),
        "chips": sorted(
            ((verdict, make_visible(message)) for message, verdict in chips.items()), key=lambda one: one[0] != "failed"
        ),
    }


def _of_run(manifest: Manifest) -> Iterator[str]:
    if manifest.status != "complete":
        yield f"this run is {manifest.status}: {manifest.ending}"
    yield from manifest.warnings


def _facts(capture: OpenedCapture, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield what is known of the run; what a run should say and does not is said to be missing."""
    trace = capture.trace
    names = sorted(set(trace.trace.gpus)) if trace is not None else []
    names = names or ([manifest.gpu] if manifest.gpu else [])
    # A trace names all GPUs of the machine, also those on which nothing ran.
    count = 1 if trace is None else max(len(distinct_values(trace.trace.work.device)), 1)
    yield "GPU", f"{count} × {', '.join(names)}" if names else _NOT_RECORDED
    ranks = 0 if trace is None else len(trace.ranks.members)
    if ranks > 1:
        yield "ranks", str(ranks)
    versions = manifest.versions
    yield "torch", versions.get("torch") or _NOT_RECORDED
    yield "precision", _precision(manifest) or _NOT_RECORDED
    if manifest.workload.steps is not None:
        yield "recorded", format_count(manifest.workload.steps, "step")
    yield "git revision", (manifest.git_revision or _NOT_RECORDED)[:_REVISION]
    yield "date", _date(manifest.started_utc)


def _precision(manifest: Manifest) -> str:
    conditions = manifest.conditions
    autocast = () if conditions is None else conditions.autocast_dtypes
    if autocast:
        return f"{', '.join(autocast)} autocast"
    if manifest.workload.dtype:
        return manifest.workload.dtype
    float32 = manifest.float32_matmul_precision or (conditions and conditions.float32_matmul_precision)
    return f"float32 products: {float32}" if float32 else ""


def _date(started_utc: str | None) -> str:
    try:
        return f"{datetime.fromisoformat(started_utc or ''):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return _NOT_RECORDED
