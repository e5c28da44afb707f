"""What a reader of a result must know before trusting it, each as a code and a sentence."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from profkit.analysis.attribution import Attribution
from profkit.analysis.kernel_filter import Instances
from profkit.analysis.selection import RangeEvidence, count_in_warmup


@dataclass(frozen=True)
class Caution:
    """A stable ``code`` for programs and a ``message`` for people."""

    code: str
    message: str


def warn_of_instances(attribution: Attribution, instances: Instances | None, row_count: int) -> list[Caution]:
    """Return what is odd about the range that was asked for."""
    if instances is None:
        return []
    request, found = instances.selection.request, []
    warm, name = count_in_warmup(attribution, instances.members)
    if warm:
        found.append(
            Caution(
                "warmup",
                f"{warm} of {len(instances.members)} instances of {request!r} lie inside `{name}`;"
                f" leave them out with --exclude {shlex.quote(name)}",
            )
        )
    if not row_count:
        found.append(Caution("empty-range", f"no kernel was launched under {request!r}"))
    return found


def warn_of_sequence(instances: Instances | None, evidence: RangeEvidence | None) -> list[Caution]:
    """Return that a range holds backward work, placed by its forward operator: its wall time does not cover that."""
    if instances is None or evidence is None or not evidence.sequence_ns:
        return []
    return [
        Caution(
            "sequence",
            f"{evidence.sequence_ns:,} ns under {instances.selection.request!r} are backward work, placed by the"
            " forward operator that it belongs to (evidence: sequence); wall time covers the forward part alone",
        )
    ]


def warn_of_placement(attribution: Attribution) -> list[Caution]:
    """Return what could not be placed."""
    ledger = attribution.ledger
    found = []
    if ledger.ambiguous_ns:
        found.append(
            Caution(
                "ambiguous",
                f"{ledger.ambiguous_ns:,} ns ({ledger.ambiguous_ns / ledger.total_ns:.1%} of all kernel time) were"
                " launched by threads that two or more waiting threads could claim; no range gets them",
            )
        )
    if ledger.no_launch_ns:
        found.append(
            Caution(
                "no-launch",
                f"{ledger.no_launch_ns:,} ns ({ledger.no_launch_ns / ledger.total_ns:.1%} of all kernel time) have no"
                " launch record; no range gets them",
            )
        )
    found += [Caution("reader", note) for note in attribution.trace.notes]
    return found
