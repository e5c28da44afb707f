"""The colours of all pictures and pages: one a category of kernels or of memory, one a phase, the same everywhere.

A palette that the colour-blind can tell apart: Okabe and Ito's, lightened or darkened for the rarer categories.
"""

from __future__ import annotations

from profkit.analysis.memory.device import NOT_SELECTED
from profkit.analysis.step_replay.limits import Limit
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER

KERNELS = {
    "gemm": "#0072B2",
    "attention": "#56B4E9",
    "softmax": "#009E73",
    "normalization": "#66C2A5",
    "elementwise": "#E69F00",
    "reduction": "#F0C75E",
    "copy/cast": "#999999",
    "embedding/index": "#B58B5A",
    "optimizer": "#D55E00",
    "loss": "#A6341B",
    "communication": "#CC79A7",
    "random": "#7E6BAD",
    "graph": "#333333",
    "other": "#CCCCCC",
}
REST_OF_KERNELS = "#EEEEEE"

STEP = {
    "matmul": KERNELS["gemm"],
    "attention": KERNELS["attention"],
    "other": KERNELS["elementwise"],
    "communication": KERNELS["communication"],
    "copies": "#66A61E",
    "data": "#7A5195",
    "launching": "#8C959F",
    "synchronising": "#59636E",
    "outside": "#B1BAC4",
}
"""The parts of a step on the page."""

LIMITS: dict[str, str] = {
    Limit.COMPUTING: "matmul",
    Limit.PREPARING: "launching",
    Limit.PYTHON: "outside",
    Limit.WAITING: "synchronising",
    Limit.COMMUNICATING: "communication",
    Limit.COPYING: "copies",
    Limit.ALLOCATING: "other",
}
"""What a step waits for → the part of `STEP` whose colour it has."""

MEMORY = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#009E73",
    "activations": "#E69F00",
    "temporaries": "#CC79A7",
    "inputs": "#F0E442",
    "buffers": "#4B6BDB",
    "communication": "#A6341B",
    "autocast copies": "#B58B5A",
    "workspace": "#56B4E9",
    "unknown": "#8C959F",
    NOT_SELECTED: "#C4C9CF",
}
REST_OF_MEMORY = "#A3ABB5"

STACKS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#7E6BAD"),
    *("#B58B5A", "#66A61E", "#A6341B", "#4B6BDB", "#D9A8C7", "#A3ABB5"),
)

PHASES = {FORWARD: "#6B737C", LOSS: "#8A929B", BACKWARD: "#3F464D", OPTIMIZER: "#16191D"}
"""Greys: white text can be read on each but the lightest, where the script writes in black."""

OTHER_PHASE = "#A8AFB7"
