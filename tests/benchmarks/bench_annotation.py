"""What profkit costs a training step: its ranges with nobody listening, and its hooks before, in and after a recording.

    python tests/benchmarks/bench_annotation.py [--preset small] [--steps 10] [--rounds 6] [--depths 0,1,2,3]
        [--recorders kineto,nsys] [--smoke]

Nobody listening: the built-in model with its ranges off and on by turns in one process, block by block, so that both
see the same machine; the cost is the median over neighbouring blocks. Recording: the model without ranges of its own,
plain and under ``profkit run``; the script's blocks after the recording tell what being attached costs, the run's
manifest what a recorded step took beside the timed ones before it (a wait for the device in each of both).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

SCRIPT = Path(__file__).with_name("train_preset.py")
RECORDED_STEPS, WARMUP = 3, 6


def bench(script: list[str], steps: int, rounds: int, depths: list[int], recorders: list[str]) -> None:
    """Run all of it and print a line each; ``script`` takes a number of blocks and what its ranges are."""
    turns = blocks_of([*script, str(2 * rounds + 2), "turns"])[2:]
    costs = [on / off - 1 for off, on in zip(turns[::2], turns[1::2], strict=True)]
    print(f"ranges, nobody listening      {spread(costs)}  of a step of {median(turns[::2]) / 1e6:.2f} ms")
    plain = bare_blocks(script, rounds)
    print(f"plain script                  {median(plain) / 1e6:.2f} ms a step")
    for recorder in recorders:
        for ranges in (["--no-annotate"], *(["--depth", str(depth)] for depth in depths)):
            after, manifest = attached(script, steps, rounds, [f"--{recorder}", *ranges])
            before, within = ([s["step_ns"] for s in manifest[part]["steps"]] for part in ("attached", "profiled"))
            label = " ".join([recorder, *(word.removeprefix("--") for word in ranges)])
            print(
                f"{label:<28}  recorded {median(within) / median(before) - 1:+7.1%} of {median(before) / 1e6:.2f} ms; "
                f"after it {median(after) / median(bare_blocks(script, rounds)) - 1:+.1%}"
            )


def bare_blocks(script: list[str], rounds: int) -> list[float]:
    """Return each block's time per step of the script by itself, but for the first two."""
    return blocks_of([*script, str(rounds + 2), "off"])[2:]


def attached(script: list[str], steps: int, rounds: int, options: list[str]) -> tuple[list[float], dict[str, Any]]:
    """Return the script's blocks after a recording, and the run's manifest."""
    # The recording and its warm-up fill the first blocks; one more lets the recorder's own work fade.
    first = (WARMUP + RECORDED_STEPS) // steps + 2
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        limits = ["--warmup", str(WARMUP), "--steps", str(RECORDED_STEPS), "-o", str(run)]
        target = [*script, str(rounds + first), "off"]
        after = blocks_of([sys.executable, "-m", "profkit", "run", *options, *limits, "--", *target])[first:]
        manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return after, manifest


def blocks_of(command: list[str]) -> list[float]:
    """Return the time per step of each block that the script printed, in ns."""
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"ranges"')]
    return [row["step_ns"] for row in rows]


def spread(costs: list[float]) -> str:
    """Return the median, the least and the most."""
    return f"{median(costs):+.2%} ({min(costs):+.2%} to {max(costs):+.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each kind")
    parser.add_argument("--depths", default="0,1,2,3")
    parser.add_argument("--recorders", default="kineto", help="kineto, nsys or both, in this order")
    parser.add_argument("--smoke", action="store_true", help="one short round of short steps")
    options = parser.parse_args()
    preset, context, steps, rounds, depths = (
        ("tiny", 16, 2, 1, [1])
        if options.smoke
        else (options.preset, 256, options.steps, options.rounds, [int(depth) for depth in options.depths.split(",")])
    )
    script = [sys.executable, str(SCRIPT), preset, str(context), str(steps)]
    bench(script, steps, rounds, depths, options.recorders.split(","))


if __name__ == "__main__":
    main()
