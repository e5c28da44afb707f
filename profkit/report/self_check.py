"""Print what the self-check found."""

from __future__ import annotations

from typing import Any

from profkit.analysis.self_check import SelfCheck


def failure_lines(check: SelfCheck) -> list[str]:
    """Return the lines that must head any output of a capture that failed, none if it passed."""
    if not check.failed:
        return []
    lines = ["SELF-CHECK FAILED: do not trust this capture's totals"]
    return lines + [f"  ✗ {finding.message}" for finding in check.of("failed")]


def verdict_line(check: SelfCheck) -> str:
    """Return the verdict in one line."""
    failed, warned = len(check.of("failed")), len(check.of("warning"))
    if failed:
        return f"self-check FAILED ({failed} check{'s' if failed != 1 else ''})"
    return "self-check passed" + (f" with {warned} warning{'s' if warned != 1 else ''}" if warned else "")


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
