"""What in an nsys export tells of the person or the machine: the rules of `profkit.trace.scrub`, pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable

TAKEN = "(scrubbed)"

# What the target wrote to its standard output and error, and the paths of these files.
PROGRAM_OUTPUT = frozenset({"ProcessStreams", "ANALYSIS_FILE"})

# Tables whose rows make no process a recorded one: they list the whole machine, or what nsys says of itself.
OUTSIDERS = frozenset({"PROCESSES", "ThreadNames", "SCHED_EVENTS", "COMPOSITE_EVENTS", "DIAGNOSTIC_EVENT"})

# Where the names of events stand: columns of a table, and (True, column): of every CUPTI_ table.
EVENT_NAMES: frozenset[tuple[str | bool, str]] = frozenset(
    {
        ("NVTX_EVENTS", "text"),
        ("NVTX_EVENTS", "textId"),
        ("NVTX_EVENTS", "jsonText"),
        ("NVTX_EVENTS", "jsonTextId"),
        ("NVTX_EVENTS", "binaryData"),
        (True, "nameId"),
        (True, "demangledName"),
        (True, "shortName"),
        (True, "mangledName"),
    }
)

# What an export says of the product that wrote it (GLOB patterns of names): a word of it is nobody's host.
KEPT_METADATA = {"META_DATA_EXPORT": ("EXPORT_PRODUCT_*", "EXPORT_SCHEMA_*", "EXPORT_PLATFORM", "EXPORT_ARCH")}

# The rows of META_DATA_CAPTURE, META_DATA_EXPORT and TARGET_INFO_SYSTEM_ENV that 2023.4 and 2025.3 write, and what
# later versions would call the like.
_BY_NAME = (
    ("environment", re.compile(r"environ", re.IGNORECASE)),
    ("command line", re.compile(r"command|argument|arg_\d|package_name", re.IGNORECASE)),
    ("host name", re.compile(r"host|display_?name|nicinfo|mac_?addr|ip_?addr|domain_?name", re.IGNORECASE)),
    ("user name", re.compile(r"user(?!_?mode)|login|e_?mail", re.IGNORECASE)),
    ("paths", re.compile(r"path|dir(?!ect)|_FILE(_|$)|folder", re.IGNORECASE)),
    ("identifiers", re.compile(r"uuid|uid$|serial|session_id", re.IGNORECASE)),
)

_HOST_NAMES = re.compile(r"^(EXPORT_HOST|Hostname|DEVICE_DISPLAY_NAME)$", re.IGNORECASE)
_USER_NAMES = re.compile(r"(^EXPORT_USER|USER_NAME)$", re.IGNORECASE)
_IN_ENVIRONMENT = re.compile(
    r"(?:^|[\0;\n])(?:USER|LOGNAME|USERNAME|SUDO_USER|HOSTNAME|HOST|CONTAINER_NAME)=\"?([^\0;\n\"]+)"
)

# NAME=value, alone or one of many: nsys separates them by NUL or by semicolons.
_ENVIRONMENT = re.compile(r"^[A-Za-z_]\w*=(?!=)|[\0;\n][A-Za-z_]\w*=(?!=)")

# A path within a text begins after its start, a space, a quote or the like; JSON may write \/ for /. Drive letters and
# shares are Windows' paths, file:// is a path too.
_PATH = re.compile(
    r"(?:(?<![^\s\"'=:;,(\[{<|@])|(?<=file:/)|(?<=file://))(?:~?\\?/|[A-Za-z]:\\|\\\\\w)[^\s\"';,:|)\]}>\0]+"
)
_STARTS_AS_PATH = re.compile(r"~?/[^/]|[A-Za-z]:\\|\\\\\w")
_LIBRARY = re.compile(r"[^/\\]+\.(?:so(?:\.[\w.]+)?|dll)$")

# UUIDs (of GPUs, sessions, machines) and the addresses of network cards.
_IDENTIFIER = re.compile(
    r"\b(?:[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}|(?:[\da-f]{2}:){5}[\da-f]{2})\b", re.IGNORECASE
)

_REFERENCE = r"\b{}\b[^\n]*REFERENCES\s+StringIds"
_REFERRING = re.compile(r"^(?:\w*[nN]ame(?:Id)?|\w*[tT]ext(?:Id)?|symbol|module|contentId|filenameId|\w*[sS]tringId)$")

Words = re.Pattern[str] | None


def what_is_named(name: str) -> str | None:
    """Return what a row of this name tells of the person or the machine, or None."""
    return next((what for what, pattern in _BY_NAME if pattern.search(name)), None)


def people_and_hosts(rows: Iterable[tuple[str, str]]) -> Words:
    """Return a pattern of the host's and the user's names, given (name, value) rows and bare texts (name empty)."""
    found: set[str] = set()
    for name, value in rows:
        if _HOST_NAMES.search(name) or _USER_NAMES.search(name):
            found.add(value)
        found.update(_IN_ENVIRONMENT.findall(value))
    named = sorted((word for word in found if len(word) > 1 and word != TAKEN), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, named))})(?!\w)") if named else None


def clean_text(text: str, words: Words) -> tuple[str, str | None]:
    """Return the text without what it gives away, and what that was (None: nothing).

    An environment goes whole. Of a path to a shared library its file name stays, for call stacks name their modules
    by it; any other path goes whole.
    """
    if _ENVIRONMENT.search(text):
        return TAKEN, "environment"
    cleaned = _without_path(text) if _STARTS_AS_PATH.match(text) else _PATH.sub(lambda m: _without_path(m[0]), text)
    what = "paths" if cleaned != text else None
    for pattern, kind in ((_IDENTIFIER, "identifiers"), (words, "host or user name")):
        if pattern is not None and pattern.search(cleaned):
            cleaned, what = pattern.sub(TAKEN, cleaned), what or kind
    return cleaned, what


def holds_a_path(text: str) -> bool:
    """Return whether the name of an event holds what looks like an absolute path."""
    return _PATH.search(text) is not None


def names_string(column: str, sql: str) -> bool:
    """Return whether an integer column refers to StringIds: its comment in CREATE TABLE says so, or its name does."""
    return bool(re.search(_REFERENCE.format(re.escape(column)), sql) or _REFERRING.match(column))


def _without_path(path: str) -> str:
    library = _LIBRARY.search(path)
    return library[0] if library else TAKEN
