"""Print what the self-check found."""

from __future__ import annotations

from typing import Any

from profkit.analysis.checks.self_check import SelfCheck
from profkit.report.text import make_visible
from profkit.report.units import format_count

UNTRUSTED = "SELF-CHECK FAILED: do not trust this capture's totals"


def failure_lines(check: SelfCheck) -> list[str]:
    """Return the lines that must head any output of a capture that failed, none if it passed."""
    if not check.failed:
        return []
    return [UNTRUSTED, *(f"  ✗ {make_visible(finding.message)}" for finding in check.of("failed"))]


def warning_lines(check: SelfCheck) -> list[str]:
    """Return a line for each warning, to stand under the verdict."""
    return [f"  ! {make_visible(finding.message)}" for finding in check.of("warning")]


def verdict_line(check: SelfCheck) -> str:
    """Return the verdict in one line."""
    failed, warned = len(check.of("failed")), len(check.of("warning"))
    if failed:
        return f"self-check FAILED ({format_count(failed, 'check')})"
    return "self-check passed" + (f" with {format_count(warned, 'warning')}" if warned else "")


def check_to_dict(check: SelfCheck) -> dict[str, Any]:
    """Return the verdict as JSON-ready data."""
    return {"passed": not check.failed, "findings": [finding.__dict__ for finding in check.findings]}


def check_warnings(check: SelfCheck) -> list[dict[str, str]]:
    """Return failures and warnings in the form of a result's ``warnings``."""
    return [
        {"code": f"self-check-{finding.code}", "message": finding.message}
        for finding in check.findings
        if finding.verdict != "note"
    ]
