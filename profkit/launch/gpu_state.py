"""The state of the GPUs before and after a run, in nvidia-smi's words: clocks, temperature, who else is there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from profkit.run.manifest import Gpu

_MIB = 1024**2
_QUIET_S = 30

# What nvidia-smi is asked for, by the name it has here; drivers before 535 spell the reasons differently.
_FIELDS = {
    "index": ("index",),
    "uuid": ("uuid",),
    "name": ("name",),
    "power_state": ("pstate",),
    "sm_clock": ("clocks.sm",),
    "memory_clock": ("clocks.mem",),
    "temperature": ("temperature.gpu",),
    "memory_used": ("memory.used",),
    "reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    **{
        f"us {reason}": (f"clocks_event_reasons_counters.{reason}",)
        for reason in ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
    },
}

# nvml.h, nvmlClocksEventReasons: why the clocks are not as high as they were asked to be.
_REASONS = {
    0x01: "gpu_idle",
    0x02: "applications_clocks_setting",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}

Ask = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class GpuState:
    """All GPUs that nvidia-smi sees, and the GPU of each MIG device by UUID; ``reason`` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    mig_parents: Mapping[str, str] | None = None
    reason: str | None = None


class _Unasked(Exception):
    """nvidia-smi could not be asked."""


def read_gpu_state(ask: Ask | None = None) -> GpuState:
    """Return the state of the GPUs now; it takes nvidia-smi some tenths of a second where there is one.

    Args:
        ask: runs nvidia-smi with arguments and returns what it prints.
    """
    ask = ask or _ask_nvidia_smi
    try:
        fields = choose_fields(ask(["--help-query-gpu"]))
        query = ",".join(fields.values())
        gpus = ask([f"--query-gpu={query}", "--format=csv,noheader,nounits"])
        processes = ask(["--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"])
        return GpuState(parse_gpus(gpus, list(fields), processes), parse_mig_parents(ask(["-L"])))
    except _Unasked as error:
        return GpuState(reason=str(error))


def choose_fields(help_text: str) -> dict[str, str]:
    """Return what to ask for, by the names here: what ``nvidia-smi --help-query-gpu`` lists.

    One field that it does not know spoils a whole query.
    """
    known = set(re.findall(r'"([\w.]+)"', help_text))
    chosen = {name: next((one for one in spellings if one in known), None) for name, spellings in _FIELDS.items()}
    return {name: field for name, field in chosen.items() if field is not None}


def parse_gpus(text: str, fields: Sequence[str], processes: str = "") -> tuple[Gpu, ...]:
    """Return the GPUs in the answer to ``--query-gpu`` (CSV without header and units); other lines are passed over.

    Args:
        fields: the names here of the columns, in order.
        processes: the answer to ``--query-compute-apps=gpu_uuid,pid,used_memory``.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    found = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
    return tuple(_gpu(one, processes) for one in found)


def parse_mig_parents(listing: str) -> dict[str, str]:
    """Return MIG device → GPU, by UUID, from the answer to ``nvidia-smi -L``, which has the devices under their GPU."""
    parents, gpu = {}, ""
    for line in listing.splitlines():
        uuid = re.search(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)", line)
        if uuid and line.lstrip().startswith("MIG"):
            parents[uuid[1]] = gpu
        elif uuid:
            gpu = uuid[1]
    return parents


def used_gpus(state: GpuState, uuids: Iterable[str | None], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that a run used: by the UUIDs its processes told, else by CUDA_VISIBLE_DEVICES, else all.

    Numbers in CUDA_VISIBLE_DEVICES are nvidia-smi's only under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; a UUID may be cut
    short there, and a MIG device stands for the GPU that it is a part of.
    """
    parents = state.mig_parents or {}
    # CUDA tells a MIG device's own UUID, without what kind of device it is.
    told = {parents.get(f"MIG-{uuid.removeprefix('GPU-')}", uuid) for uuid in uuids if uuid is not None}
    found = tuple(gpu for gpu in state.gpus if gpu.uuid in told)
    if found:
        return found
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    wanted = [word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    wanted = [parents.get(word, word) for word in wanted]
    named = tuple(
        gpu
        for gpu in state.gpus
        if any(_names(word, gpu.uuid) or (by_bus and word == str(gpu.index)) for word in wanted)
    )
    return named or state.gpus


def _names(word: str, uuid: str | None) -> bool:
    return word.startswith("GPU-") and uuid is not None and uuid.startswith(word)


def _gpu(cells: Mapping[str, str], processes: str) -> Gpu:
    uuid = _text(cells.get("uuid"))
    used = _number(cells.get("memory_used"))
    counters = {
        name.removeprefix("us "): counted
        for name, cell in cells.items()
        if name.startswith("us ") and (counted := _number(cell)) is not None
    }
    count, process_bytes = _processes_on(uuid, processes)
    return Gpu(
        index=_number(cells.get("index")),
        uuid=uuid,
        name=_text(cells.get("name")),
        power_state=_text(cells.get("power_state")),
        sm_clock_mhz=_number(cells.get("sm_clock")),
        memory_clock_mhz=_number(cells.get("memory_clock")),
        temperature_c=_number(cells.get("temperature")),
        memory_used_bytes=None if used is None else used * _MIB,
        throttle_reasons=_reasons(cells.get("reasons")),
        throttled_us=counters,
        process_count=count,
        process_bytes=process_bytes,
    )


def _processes_on(uuid: str | None, text: str) -> tuple[int | None, int | None]:
    """Return how many compute processes a GPU has, and how many bytes they hold; the latter None unless all tell it."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    if uuid is None:
        return None, None
    held = [_number(row[2]) for row in rows if len(row) == 3 and row[0] == uuid]
    told = [mib * _MIB for mib in held if mib is not None]
    return len(held), sum(told) if len(told) == len(held) else None


def _reasons(cell: str | None) -> tuple[str, ...] | None:
    """Return the reasons in a mask such as ``0x0000000000000004``."""
    if cell is None or not re.fullmatch(r"0x[0-9a-fA-F]+", cell):
        return None
    mask = int(cell, 16)
    return tuple(name for bit, name in _REASONS.items() if mask & bit)


def _number(cell: str | None) -> int | None:
    """Return a whole number; ``[N/A]``, ``[Not Supported]``, ``[Unknown Error]`` and the like are none."""
    return int(cell) if cell is not None and re.fullmatch(r"-?\d+", cell) else None


def _text(cell: str | None) -> str | None:
    return None if not cell or cell == "N/A" or cell.startswith("[") else cell


def _ask_nvidia_smi(arguments: Sequence[str]) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=_QUIET_S)
    except FileNotFoundError:
        raise _Unasked("nvidia-smi is not on PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unasked(f"nvidia-smi does not answer: {error}") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise _Unasked(f"nvidia-smi failed: {said[0] if said else f'exit status {done.returncode}'}")
    return done.stdout
