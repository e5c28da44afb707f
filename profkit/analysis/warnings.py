"""What a reader of a result must know before trusting it, each as a code and a sentence."""

from __future__ import annotations

import shlex

from profkit.analysis.attribution import Attribution
from profkit.analysis.selection import Instances, count_in_warmup
from profkit.findings import Finding


def warn_of_instances(attribution: Attribution, instances: Instances | None, row_count: int) -> list[Finding]:
    """Return what is odd about the range that was asked for."""
    if instances is None:
        return []
    request, found = instances.request, []
    members = instances.members[instances.present]
    warm, name = count_in_warmup(attribution, members)
    if warm:
        found.append(
            Finding(
                "warmup",
                f"{warm} of {len(members)} instances of {request!r} lie inside `{name}`;"
                f" leave them out with --exclude {shlex.quote(name)}",
            )
        )
    if not row_count:
        found.append(Finding("empty-range", f"no kernel was launched under {request!r}"))
    return found


def warn_of_placement(attribution: Attribution) -> list[Finding]:
    """Return what could not be placed."""
    ledger = attribution.ledger
    found = []
    if ledger.ambiguous_ns:
        found.append(
            Finding(
                "ambiguous",
                f"{ledger.ambiguous_ns:,} ns ({ledger.ambiguous_ns / ledger.total_ns:.1%} of all kernel time) were"
                " launched by threads that two or more waiting threads could claim; no range gets them",
            )
        )
    if ledger.no_launch_ns:
        found.append(
            Finding(
                "no-launch",
                f"{ledger.no_launch_ns:,} ns ({ledger.no_launch_ns / ledger.total_ns:.1%} of all kernel time) have no"
                " launch record; no range gets them",
            )
        )
    found += [Finding("reader", note) for note in attribution.trace.notes]
    return found
