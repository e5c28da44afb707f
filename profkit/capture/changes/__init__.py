"""What an edit is in the program's process; and those that are settings of torch, which are made and then held."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from profkit.capture.hooks.module_calls import Watcher
from profkit.capture.line_samples import describe, find_place
from profkit.capture.steps.policy import is_loss_module


class NotMadeError(Exception):
    """An edit was not made, or took no effect; the message says why."""


class Change(Watcher):
    """One edit of the program. It sees what the hooks see, and uses torch's public switches and constructors alone.

    What it cannot make it refuses, and from then on leaves alone. ``place`` is the line of the user's own code that it
    changes, once that is known.
    """

    def __init__(self, argument: str) -> None:
        self.argument = argument
        self.refusal: str | None = None
        self.place: str | None = None

    def begin(self) -> None:
        """The script has imported torch, and has done nothing with it yet."""

    def step_begins(self) -> None:
        """A step begins; the first one before anything of it runs."""

    def prove(self) -> str:
        """Return by what it is seen, after the timed steps, that the edit took effect; NotMadeError if it did not."""
        raise NotImplementedError

    def refuse(self, why: str) -> None:
        """Leave the program as it is from now on; the first reason counts."""
        self.refusal = self.refusal or why

    def require(self, is_so: object, why_not: str) -> None:
        if not is_so:
            raise NotMadeError(self.refusal or why_not)

    def note_place(self) -> None:
        """Note the line of the user's own code that runs now, as the place that is changed."""
        place = find_place(sys._getframe(1))
        if place is not None and self.place is None:
            line = describe(place)
            self.place = f"{line.file}:{line.line} {line.function}"


def is_training_call(module: nn.Module) -> bool:
    """Return whether a call of ``module`` that begins is one of a model in training, and not of a loss."""
    is_training = module.training and torch.is_grad_enabled() and not is_loss_module(module)
    return is_training and any(parameter.requires_grad for parameter in module.parameters())


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


NO_GPU = "the program uses no GPU"
NO_CALL = "no call of a model was seen in training: the script computes in a way of its own"


class _Setting(Change):
    """A setting of torch, made before the first step and again where the script sets it back."""

    what = ""
    _needs_gpu = True
    _steps = 0

    def is_on(self) -> bool:
        raise NotImplementedError

    def turn_on(self) -> None:
        raise NotImplementedError

    def step_begins(self) -> None:
        self._steps += 1
        if self._steps == 1 and self.is_on():
            self.refuse(f"the script does so already ({self.what})")
        elif self.refusal is None and not self.is_on():
            self.turn_on()

    def prove(self) -> str:
        self.require(self.refusal is None and self.is_on(), f"{self.what} did not stay")
        self.require(torch.cuda.is_initialized() or not self._needs_gpu, NO_GPU)
        return f"{self.what} held in {count(self._steps, 'step')}"


class Tf32(_Setting):
    """Products of fp32 matrices in TF32."""

    what = 'float32_matmul_precision "high"'

    def is_on(self) -> bool:
        try:
            return torch.get_float32_matmul_precision() != "highest"
        except RuntimeError as error:  # the script uses torch's newer interface
            self.refuse(f"torch says: {str(error).splitlines()[0]}")
            return False

    def turn_on(self) -> None:
        if torch.cuda.is_initialized() and torch.cuda.get_device_capability() < (8, 0):
            self.refuse("this GPU has no TF32")
        else:
            torch.set_float32_matmul_precision("high")

    def prove(self) -> str:
        held = super().prove()
        self.require(_computes_in_tf32(), "a product of fp32 matrices is still exact to fp32")
        return f"{held}, and a product of fp32 matrices has TF32's error"


_FP32_ERROR = 2e-5
"""The error of a product of 512 × 512 normal numbers, as a share of its norm: 3e-7 in fp32, 3e-4 in TF32."""


def _computes_in_tf32() -> bool:
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        left, right = torch.randn(2, 512, 512, device="cuda", dtype=torch.float32)
        exact = left.double() @ right.double()
        return float((left @ right - exact).norm() / exact.norm()) > _FP32_ERROR


class CudnnBenchmark(_Setting):
    """cuDNN tries its algorithms once for each size of a convolution, and keeps the fastest."""

    what = "cudnn.benchmark"
    _convolves = False

    def is_on(self) -> bool:
        return torch.backends.cudnn.benchmark

    def turn_on(self) -> None:
        torch.backends.cudnn.benchmark = True

    def call_begins(self, module: nn.Module, args: Any, name: str | None) -> None:
        self._convolves = self._convolves or any(map(is_convolution, module.modules()))

    def prove(self) -> str:
        held = super().prove()
        self.require(self._convolves, "no model with a convolution was called")
        return f"{held}, in which convolutions ran"


class NoCudnnAttention(_Setting):
    """`scaled_dot_product_attention` is computed by another implementation than cuDNN's, which plans each size."""

    what = "attention without cuDNN"

    def is_on(self) -> bool:
        return not torch.backends.cuda.cudnn_sdp_enabled()

    def turn_on(self) -> None:
        torch.backends.cuda.enable_cudnn_sdp(False)


def is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)


class Threads(_Setting):
    """How many threads torch computes with on the CPU."""

    _needs_gpu = False

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self.what = f"{argument} threads"

    def begin(self) -> None:
        if not self.argument.isdecimal() or not int(self.argument):
            self.refuse("write threads:8")

    def is_on(self) -> bool:
        return self.refusal is None and torch.get_num_threads() == int(self.argument)

    def turn_on(self) -> None:
        torch.set_num_threads(int(self.argument))


class NoAnomaly(Change):
    """Without autograd's detection of anomalies, also where the script turns it on for each step."""

    _count = 0

    def step_begins(self) -> None:
        self._turn_off()

    def call_begins(self, module: nn.Module, args: Any, name: str | None) -> None:
        self._turn_off()

    def backward_begins(self, tensors: Any) -> None:
        self._turn_off()

    def _turn_off(self) -> None:
        if torch.is_anomaly_enabled():
            self._count += 1
            torch.autograd.set_detect_anomaly(False)

    def prove(self) -> str:
        self.require(self._count, "the script does not turn anomaly detection on")
        return f"anomaly detection was on and has been turned off {self._count} times"


class AllocatorSettings(Change):
    """Settings of the CUDA allocator, which the launcher put into the environment."""

    def prove(self) -> str:
        self.require(torch.cuda.is_initialized(), NO_GPU)
        self.require(os.environ.get(ALLOCATOR_VARIABLE) == self.argument, "the script sets the variable itself")
        return f"CUDA came into use with {ALLOCATOR_VARIABLE}={self.argument}"


ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
