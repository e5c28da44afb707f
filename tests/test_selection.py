"""Choosing ranges: exact names first, globs, paths, escapes, instances, warm-up, and what an unknown name gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.golden import check_transcript
from tests.nsys_builder import NsysBuilder

Build = Callable[[NsysBuilder], None]


def three_steps(builder: NsysBuilder) -> None:
    """A warm-up and two steps, each with forward (two layers with attention), loss and backward."""
    builder.range("warmup", 0, 1000)
    for step, base in enumerate((0, 1000, 2000)):
        if step:
            builder.range(f"step {step - 1}", base, base + 1000)
        builder.range("forward", base + 10, base + 400)
        for layer in range(2):
            start = base + 20 + 100 * layer
            builder.ranges((f"layer {layer}", start, start + 90), ("attention", start + 10, start + 50))
            builder.kernel(start + 20, 10 ** (layer + 1))
        builder.range("loss a/b", base + 420, base + 460)
        builder.kernel(base + 430, 3)
        builder.ranges(("backward", base + 500, base + 900), ("attention", base + 510, base + 550))
        builder.kernel(base + 520, 1000)


def named(*names: str) -> Build:
    """Return ranges of these names, one after the other, with kernels of 1, 10, 100 … ns."""

    def build(builder: NsysBuilder) -> None:
        for at, name in enumerate(names):
            builder.range(name, 20 * at, 20 * at + 10)
            builder.kernel(20 * at + 5, 10**at)

    return build


def two_processes(builder: NsysBuilder) -> None:
    for pid, device in ((100, 0), (200, 1)):
        for base in (0, 1000):
            builder.range("forward", base, base + 100 * (device + 1), pid=pid, tid=pid)
            builder.kernel(base + 10, pid, pid=pid, tid=pid, device=device)


def idle(builder: NsysBuilder) -> None:
    builder.range("idle", 0, 5)
    builder.kernel(10, 5)


def spelled_otherwise(builder: NsysBuilder) -> None:
    for start, name in ((0, "WarmUp"), (200, "step 0")):
        builder.ranges((name, start, start + 100), ("forward", start + 10, start + 90))
        builder.kernel(start + 20, 5)


def on_a_helper_thread(builder: NsysBuilder) -> None:
    """An instance there lies within its host's range."""
    builder.name_thread("pt_autograd_0", 101)
    for start, name in ((0, "warmup"), (1000, "step 0")):
        builder.range(name, start, start + 900)
        builder.kernel(start + 10, 1)
        builder.range("nccl", start + 200, start + 400, tid=101)
        builder.kernel(start + 250, 20, tid=101)
        builder.kernel(start + 300, 30, tid=101)


def nested(builder: NsysBuilder) -> None:
    """Ranges of one name within each other count a kernel once."""
    for base in (0, 1000):
        builder.ranges(("block", base, base + 500), ("block", base + 100, base + 200))
        builder.kernel(base + 10, 5)
        builder.kernel(base + 150, 5)


def in_no_range(builder: NsysBuilder) -> None:
    """By range, lines name the reason where work has none."""
    builder.name_thread("pt_autograd_0", 103)
    for tid in (100, 102):
        builder.range("forward", 0, 300, tid=tid)
        builder.kernel(10, 1, tid=tid)
    builder.kernel(100, 20, tid=103)
    builder.kernel(110, 30, tid=103)
    builder.kernel(None, 400, start=200)
    builder.kernel(900, 5000)


WITHOUT_WARMUP = ("--range", "forward", "--exclude", "warmup")
ASKED: dict[str, tuple[Build, list[tuple[str, ...]]]] = {
    "steps": (
        three_steps,
        [
            *(("--range", name) for name in ("forward", "layer 0", "layer *", "layer ?", "attention")),
            *(("--range", f"forward/{name}") for name in ("layer 1/attention", "layer */attention")),
            *(("--range", name) for name in ("backward/attention", "step 1/forward", "step */forward/layer 0")),
            *(("--range", name) for name in ("loss a/b", "loss a\\/b", "step 0/loss a\\/b")),
            # A path skips no ancestor, and one from the root begins at the top.
            *(("--range", name) for name in ("/step 1/forward", "forward/attention", "/attention")),
            *(("--range", name) for name in ("forwrad", "Attention", "warmup")),
            # Instances are counted from 0, the excluded ones too.
            *(("--range", "forward", "--instance", number) for number in ("0", "3")),
            *(("--range", "step *", "--instance", "1"), ("--instance", "0"), ("--per-instance",)),
            ("--range", "forward", "--per-instance"),
            *((*WITHOUT_WARMUP, "--per-instance"), (*WITHOUT_WARMUP, "--instance", "2", "--per-instance")),
            (*WITHOUT_WARMUP, "--instance", "0", "--per-instance"),
            *(("--range", "forward", "--exclude", name) for name in ("layer 0", "forward")),
            *(("--range", "step 0", "--exclude", "attention"), ("--exclude", "attention")),
        ],
    ),
    # A single ``conv2`` is no kind: the tree shows no ``conv*``. A name that looks like a glob is exact.
    "convolutions": (named("conv2", "convert", "linear"), [("--range", "conv*")]),
    "globs": (named("layer *", "layer 1"), [("--range", "layer *"), ("--range", "layer ?")]),
    "processes": (
        two_processes,
        [
            *(("--range", "forward", *more) for more in ((), ("--process", "200"), ("--device", "0"))),
            # With a device the instances are those with work there.
            ("--range", "forward", "--device", "1", "--per-instance"),
            *(("--process", "7"), ("--device", "7")),
        ],
    ),
    "no-kernels": (lambda builder: builder.range("forward", 0, 10), [("--range", "forward")]),
    "no-ranges": (lambda builder: builder.kernel(10, 5), [("--range", "forward")]),
    "idle": (idle, [("--range", "idle")]),
    "spelled": (spelled_otherwise, [("--range", "forward"), ("--range", "forward", "--exclude", "WarmUp")]),
    "helper": (on_a_helper_thread, [("--range", "nccl", "--exclude", "warmup", "--per-instance")]),
    "nested": (nested, [("--range", "block", "--per-instance"), ("--range", "block", "--format", "json")]),
    "in-no-range": (in_no_range, [("--by", "range")]),
}


def test_each_request_selects_its_ranges_or_is_refused(tmp_path: Path) -> None:
    calls: list[tuple[str | Path, ...]] = []
    for name, (build, requests) in ASKED.items():
        builder = NsysBuilder()
        build(builder)
        path = builder.write(tmp_path / f"{name}.sqlite")
        calls += [("kernels", path, "--totals", *request) for request in requests]
    check_transcript("kernels-selected", calls)
