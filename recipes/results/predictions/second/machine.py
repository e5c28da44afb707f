"""Where the programs run: on the GPU, or tiny on the CPU to try them (TINY=1)."""

import os

import torch

TINY = bool(os.environ.get("TINY"))
DEVICE = "cpu" if TINY else "cuda"


def size(full, tiny):
    return tiny if TINY else full


def nothing():
    pass


def run(main):
    """Run a program as a script: unedited, or with the edit that EDIT names made by hand."""
    torch.manual_seed(0)
    main(os.environ.get("EDIT", ""), int(os.environ.get("STEPS", "200")), nothing)
