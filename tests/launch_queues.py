"""Simulates hosts that launch kernels into queues of limited length, and what light records know of them under DDP.

Each launch takes the host some time, and waits while `QUEUE` launches before it are not done; a GPU does them one after
the other. The all-reduce at the end of the backward pass begins when the last rank's GPU gets there, and what follows
waits for its end. Nothing here is profkit's rule: who is late follows from the queues alone. (That a GPU had nothing
to do before a phase, which light records know too, is left out.)
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from profkit.run.light_record import Collectives, Group, LightRecord, StepRecord

MS = 1_000_000
QUEUE = 1024
PHASES = {"forward": (400, 7_000), "loss": (10, 20_000), "backward": (800, 11_000), "optimizer": (3_000, 4_500)}
"""Phase → its launches, and the time of each on the host."""
WIRE_NS = 4 * MS
_BATCH_NS, _PAUSE_NS, _GATHER_NS = 40_000, 60_000, 300_000
_KEPT = 0.7
"""How much of what a host is slower in one step is left in the next one."""


@dataclass
class _Rank:
    """A rank's clocks: when its host and its GPU are done with all so far, and when the last launches were."""

    host_ns: float = 0.0
    gpu_ns: float = 0.0
    done_ns: deque[float] = field(default_factory=lambda: deque([0.0] * QUEUE, QUEUE))
    slower: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)

    def launch(self, count: int, host_ns: float, gpu_ns: float) -> None:
        for _ in range(count):
            self.host_ns = max(self.host_ns, self.done_ns[0]) + host_ns * (1 + self.slower)
            self.gpu_ns = max(self.gpu_ns, self.host_ns) + gpu_ns
            self.done_ns.append(self.gpu_ns)

    def wait_until(self, time_ns: float) -> None:
        self.gpu_ns = max(self.gpu_ns, time_ns)
        self.done_ns.append(self.gpu_ns)


def simulate_queues(
    ranks: int,
    steps: int,
    *,
    delay: str = "",
    delay_ns: float = 0.0,
    kernel_ns: float,
    slower_gpu: float = 1.0,
    noise: float = 0.05,
    seed: int,
) -> list[LightRecord]:
    """Return the light records of ranks of which the second is late in each step.

    Args:
        ranks: how many there are.
        steps: how many steps they record.
        delay: where rank 1 takes longer: ``data``, a phase, ``after`` the optimizer, or ``kernels`` (in forward).
        delay_ns: how much longer.
        kernel_ns: how long each kernel takes; longer than a launch, the GPU sets the pace.
        slower_gpu: how many times as long rank 1's kernels take.
        noise: by what share of their time hosts are slower or faster in a step (standard deviation).
        seed: of the noise.
    """

    def of_rank(rank: int) -> tuple[dict[str, float], float]:
        return ({delay: delay_ns}, kernel_ns * slower_gpu) if rank == 1 else ({}, kernel_ns)

    chance = random.Random(seed)
    all_ranks = [_Rank() for _ in range(ranks)]
    for number in range(steps):
        seen: list[dict[str, list[float]]] = []
        arrived = []
        for rank, one in enumerate(all_ranks):
            late_ns, gpu_ns = of_rank(rank)
            one.slower = _KEPT * one.slower + (1 - _KEPT**2) ** 0.5 * chance.gauss(0, noise)
            when = {"step": [one.host_ns], "data": [one.host_ns]}
            one.host_ns += _BATCH_NS + late_ns.get("data", 0.0)
            when["data"].append(one.host_ns)
            one.host_ns += _PAUSE_NS
            for phase in ("forward", "loss", "backward"):
                _run(one, phase, late_ns, gpu_ns, when)
            arrived.append(max(one.gpu_ns, one.host_ns))
            seen.append(when)
        end_ns = max(arrived) + WIRE_NS
        for rank, (one, when) in enumerate(zip(all_ranks, seen, strict=True)):
            late_ns, gpu_ns = of_rank(rank)
            when["waited"] = [end_ns - arrived[rank]]
            when["called"] = [one.host_ns, one.host_ns + _GATHER_NS]
            one.wait_until(end_ns)
            when["gpu backward"][1] = one.gpu_ns
            one.host_ns += _GATHER_NS
            _run(one, "optimizer", late_ns, gpu_ns, when)
            one.host_ns += late_ns.get("after", 0.0)
            when["step"].append(one.host_ns)
            one.steps.append(_describe(number, when))
    group = Group(0, "0", tuple(range(ranks)), None, "nccl")
    return [
        LightRecord(rank=rank, world_size=ranks, device=rank, groups=(group,), steps=tuple(one.steps))
        for rank, one in enumerate(all_ranks)
    ]


def _run(one: _Rank, phase: str, late_ns: dict[str, float], kernel_ns: float, when: dict[str, list[float]]) -> None:
    """Have a rank do a phase; its delay is in the middle, that of the optimizer before its first launch."""
    count, launch_ns = PHASES[phase]
    before = 0 if phase == "optimizer" else count // 2
    when[phase] = [one.host_ns]
    when[f"gpu {phase}"] = [max(one.host_ns, one.gpu_ns)]
    one.launch(before, launch_ns, kernel_ns)
    one.host_ns += late_ns.get(phase, 0.0)
    if phase == "forward" and "kernels" in late_ns:
        one.launch(1, launch_ns, late_ns["kernels"])
    one.launch(count - before, launch_ns, kernel_ns)
    when[phase].append(one.host_ns)
    when[f"gpu {phase}"].append(max(one.host_ns, one.gpu_ns))


def _describe(number: int, when: dict[str, list[float]]) -> StepRecord:
    """Return what a light record holds of the step."""
    begin, end = when["step"]

    def since(name: str) -> tuple[int, int]:
        return round(when[name][0] - begin), round(when[name][1] - begin)

    collectives = Collectives(
        group=[0, 0],
        sequence=[2 * number, 2 * number + 1],
        kind=["all_reduce", "all_gather"],
        dtype=["float32", "float32"],
        bytes=[27_000_000, 8],
        called_ns=list(since("called")),
        start_ns=[None, None],
        end_ns=[None, None],
        hidden_ns=[None, None],
        exposed_ns=[round(when["waited"][0]), None],
    )
    return StepRecord(
        name=f"step {number}",
        start_ns=round(begin),
        end_ns=round(end),
        phases=tuple((name, *since(name)) for name in ("data", *PHASES)),
        gpu_phases=tuple((name, *since(f"gpu {name}")) for name in PHASES),
        launch_wait_ns=0,
        collectives=collectives,
    )
