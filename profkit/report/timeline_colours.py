"""The colours of allocation timelines, the same on the page and in the picture.

Okabe and Ito's palette, which the colour-blind can tell apart, lightened or darkened for the rarer categories; all of
them stand out from white and from near black.
"""

from __future__ import annotations

from profkit.analysis.memory.composition import NOT_SELECTED
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER

CATEGORY_COLOURS = {
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

STACK_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#7E6BAD",
    "#B58B5A",
    "#66A61E",
    "#A6341B",
    "#4B6BDB",
    "#D9A8C7",
    "#A3ABB5",
)

REST_COLOUR = "#A3ABB5"

PHASE_COLOURS = {FORWARD: "#1F77B4", LOSS: "#7E6BAD", BACKWARD: "#B3541E", OPTIMIZER: "#2E7D4F"}

OTHER_PHASE_COLOUR = "#6E7781"
