"""What nvidia-smi says, read from its real formats: with fields it does not have, MIG, other processes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from profkit.launch.gpu_state import (
    GpuState,
    choose_fields,
    parse_gpus,
    parse_mig_parents,
    read_gpu_state,
    used_gpus,
)
from profkit.run.manifest import Gpu

HELP = """\
List of valid properties to query for the switch "--query-gpu":

"index"
Zero based index of the GPU. Can change at each boot.

"gpu_name" or "name"
The official product name of the GPU.

"gpu_uuid" or "uuid"
This value is the globally unique immutable alphanumeric identifier of the GPU.

"pstate"
"memory.used"
"temperature.gpu"
"clocks_event_reasons.active" or "clocks_throttle_reasons.active"
Bitmask of active clock event reasons. See nvml.h for more details.
"clocks_event_reasons_counters.sw_power_cap"
"clocks.current.sm" or "clocks.sm"
"clocks.current.memory" or "clocks.mem"
"""
# In the order of the question.
COLUMNS = [
    *("index", "uuid", "name", "power_state", "sm_clock", "memory_clock", "temperature", "memory_used"),
    *("reasons", "us sw_power_cap"),
]
FIRST, SECOND = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "GPU-7a1be2f5-9fd3-1a2e-0000-9e3d8d2b8a77"
H200 = f"0, {FIRST}, NVIDIA H200, P0, 1980, 3201, 34, 523, 0x0000000000000004, 91403239\n"
BARE = f"1, {SECOND}, NVIDIA GB10, P8, 208, [N/A], [Not Supported], [N/A], [Unknown Error], N/A\n"
APPS = f"{FIRST}, 4711, 2048\n{FIRST}, 4712, 514\n{SECOND}, 99, [N/A]\n"
MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
LISTING = f"""\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: {FIRST})
  MIG 1g.5gb      Device  0: (UUID: {MIG})
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77/8/0)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {SECOND})
  MIG 3g.20gb     Device  0: (UUID: MIG-ba663e8b-9bed-5b25-b243-5985ef7c9beb)
"""


def test_only_what_this_nvidia_smi_knows_is_asked_for() -> None:
    fields = choose_fields(HELP)
    assert list(fields) == COLUMNS
    assert fields["reasons"] == "clocks_event_reasons.active"
    old = HELP.replace('"clocks_event_reasons.active" or ', "").replace(
        '"clocks_event_reasons_counters.sw_power_cap"', ""
    )
    assert choose_fields(old)["reasons"] == "clocks_throttle_reasons.active"
    assert list(choose_fields(old)) == COLUMNS[:-1]
    assert choose_fields("") == {}


def test_a_gpu_that_tells_everything() -> None:
    (gpu,) = parse_gpus(H200, COLUMNS, APPS)
    assert gpu == Gpu(
        index=0,
        uuid=FIRST,
        name="NVIDIA H200",
        power_state="P0",
        sm_clock_mhz=1980,
        memory_clock_mhz=3201,
        temperature_c=34,
        memory_used_bytes=523 * 1024**2,
        throttle_reasons=("sw_power_cap",),
        throttled_us={"sw_power_cap": 91403239},
        process_count=2,
        process_bytes=(2048 + 514) * 1024**2,
    )


def test_what_a_gpu_does_not_tell_is_none() -> None:
    (gpu,) = parse_gpus(BARE, COLUMNS, APPS)
    assert (gpu.memory_clock_mhz, gpu.temperature_c, gpu.memory_used_bytes) == (None, None, None)
    assert (gpu.throttle_reasons, gpu.throttled_us) == (None, {})
    assert (gpu.process_count, gpu.process_bytes) == (1, None)
    assert (gpu.sm_clock_mhz, gpu.power_state) == (208, "P8")


def test_lines_of_another_shape_are_passed_over() -> None:
    assert parse_gpus("No devices were found\n\n1, 2\n", COLUMNS) == ()
    (gpu,) = parse_gpus("warning: infoROM is corrupted\n" + H200, COLUMNS, "a line, of another\nshape\n")
    assert (gpu.index, gpu.process_count, gpu.process_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        ("0x0000000000000000", ()),
        ("0x0000000000000001", ("gpu_idle",)),
        (
            "0x00000000000000E8",
            ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
        ),
        ("0x8000000000000000", ()),  # a reason of tomorrow
        ("Active", None),
    ],
)
def test_the_mask_of_reasons(mask: str, reasons: tuple[str, ...] | None) -> None:
    (gpu,) = parse_gpus(f"0, {mask}", ["index", "reasons"])
    assert gpu.throttle_reasons == reasons


def test_mig_devices_belong_to_the_gpu_above_them() -> None:
    parents = parse_mig_parents(LISTING)
    assert list(parents.values()) == [FIRST, FIRST, SECOND]
    assert parents[MIG] == FIRST


BOTH = GpuState(parse_gpus(H200 + BARE, COLUMNS), parse_mig_parents(LISTING))


@pytest.mark.parametrize(
    ("told", "environment", "indices"),
    [
        ([SECOND], {}, [1]),
        ([FIRST, SECOND, None], {}, [0, 1]),
        (["GPU-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"], {}, [0]),
        ([], {"CUDA_VISIBLE_DEVICES": SECOND}, [1]),
        ([None], {"CUDA_VISIBLE_DEVICES": "GPU-7a1be"}, [1]),
        ([], {"CUDA_VISIBLE_DEVICES": MIG}, [0]),
        ([], {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1]),
        ([], {"CUDA_VISIBLE_DEVICES": "1"}, [0, 1]),  # CUDA's own order need not be nvidia-smi's
        (["GPU-unheard-of"], {}, [0, 1]),
    ],
)
def test_which_gpus_a_run_used(told: list[str | None], environment: dict[str, str], indices: list[int]) -> None:
    assert [gpu.index for gpu in used_gpus(BOTH, told, environment)] == indices


def test_the_questions_and_their_answers() -> None:
    asked: list[Sequence[str]] = []

    def ask(arguments: Sequence[str]) -> str:
        asked.append(arguments)
        return {"--help-query-gpu": HELP, "-L": LISTING}.get(arguments[0], APPS if "apps" in arguments[0] else H200)

    state = read_gpu_state(ask)
    assert [gpu.process_count for gpu in state.gpus] == [2]
    assert state.mig_parents == parse_mig_parents(LISTING)
    assert asked[1][0].startswith(
        "--query-gpu=index,uuid,name,pstate,clocks.sm,clocks.mem,temperature.gpu,memory.used,"
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "nvidia-smi is not on PATH"),
        (
            "print('NVIDIA-SMI has failed because it could not communicate\\nwith the driver'); sys.exit(9)",
            "has failed be",
        ),
        ("sys.exit(3)", "exit status 3"),
    ],
)
def test_why_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, reason: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!{os.path.realpath(sys.executable)}\nimport sys\n{script}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    state = read_gpu_state()
    assert (state.gpus, state.mig_parents) == ((), None)
    assert state.reason is not None
    assert reason in state.reason
    assert "\n" not in state.reason
