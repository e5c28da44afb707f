"""The verdict of the self-check in words."""

from __future__ import annotations

from profkit.analysis.checks.self_check import SelfCheck
from profkit.report.text import make_visible
from profkit.report.units import format_count


def verdict_line(check: SelfCheck) -> str:
    """Return the verdict in one line."""
    failed, warned = len(check.of("failed")), len(check.of("warning"))
    if failed:
        return f"self-check FAILED ({format_count(failed, 'check')})"
    return "self-check passed" + (f" with {format_count(warned, 'warning')}" if warned else "")


def warning_lines(check: SelfCheck) -> list[str]:
    """Return a line for each warning, to stand under the verdict."""
    return [f"  ! {make_visible(finding.message)}" for finding in check.of("warning")]
