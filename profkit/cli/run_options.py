"""The options of ``profkit run``: which of them most people use, and which kinds of target each is for."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from profkit.cli.options import FILE, POSITIVE, Quantity, together
from profkit.errors import ToolError, UsageError
from profkit.launch.nsys import GraphTrace, Nsys, find_nsys
from profkit.models import CompileMode, Device, Dtype, Passes
from profkit.run.manifest import Kind
from profkit.run.recording import MEMORY_ENTRIES, Stacks

Function = TypeVar("Function", bound=Callable[..., Any])
Parsed = TypeVar("Parsed")

_MODEL: tuple[Kind, ...] = ("model",)
_COMMAND: tuple[Kind, ...] = ("command",)

# An option that is not named here is for every kind.
_MEANT_FOR = {
    **dict.fromkeys(("batch", "contexts", "passes", "dtype", "compile_mode", "seed", "device"), _MODEL),
    **dict.fromkeys(("depth", "annotate", "flops", "operators"), _COMMAND),
    **dict.fromkeys(("stop", "step_on", "memory_only", "oom", "full_ranks", "lines"), _COMMAND),
    "ranks": ("model", "command"),
}
_KIND_NAMES = {
    "model": "the built-in models",
    "command": "commands (-- python train.py)",
}
_FOR_NSYS = ("graph_trace", "keep_report")
_COMMON = ("output", "with_nsys", "memory", "oom", "warmup", "steps", "step_on", "depth", "flops", "ranks", "help_all")
"""What ``--help`` shows; ``--help-all`` shows the others too."""


def _parse_contexts(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    contexts = [int(word) for word in words if word.isdecimal()]
    if len(set(contexts) - {0}) < len(words):
        raise ValueError(f"{text!r} is not one number of tokens or several, none twice, such as 128,256")
    return tuple(contexts)


class RunCommand(click.Command):
    """``profkit run``: all that follows a script is the script's, and few of the options fill its help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a script that is no program is started by `_python_of_scripts`."""
        at = self.first_word(args)
        if at < len(args) and args[at].endswith(".py"):
            is_program = shutil.which(args[at]) is not None
            if not is_program and not Path(args[at]).is_file():
                raise UsageError(f"{args[at]}: no such file")
            args = [*args[:at], "--", *([] if is_program else [_python_of_scripts()]), *args[at:]]
        return super().parse_args(ctx, args)

    def first_word(self, args: Sequence[str]) -> int:
        """Return where the first word stands that is neither an option nor the value of one."""
        takes_value = {
            name
            for option in self.params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-"):
            at += 2 if args[at] in takes_value else 1
        return at if "--" not in args[:at] else len(args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that most people use, or all."""
        shown = [option for option in self.get_params(ctx) if ctx.meta.get(_ALL) or option.name in (*_COMMON, "help")]
        with formatter.section("Options"):
            formatter.write_dl([record for option in shown if (record := option.get_help_record(ctx)) is not None])


def _python_of_scripts() -> str:
    """Return the Python that profkit runs in, where torch is installed: its environment need not be activated.

    Elsewhere, and where it is the one on PATH, ``python``.
    """
    on_path = shutil.which("python")
    is_own = on_path is not None and Path(on_path).parent == Path(sys.executable).parent
    return "python" if is_own or find_spec("torch") is None else sys.executable


_ALL = "profkit shows all options"


def _show_all(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _choice(name: str, values: Any, default: str, text: str) -> Callable[[Function], Function]:
    return click.option(name, type=click.Choice(get_args(values)), default=default, show_default=True, help=text)


add_options = together(
    click.option("-o", "output", type=FILE, help="The run directory to create  [default: runs/TIME-TARGET]"),
    click.option(
        "--nsys/--kineto",
        "with_nsys",
        default=False,
        help="Record with Nsight Systems, or with torch.profiler (the default). Nsight Systems copies the whole "
        "process environment into its report: remove secrets from the environment first.",
    ),
    click.option(
        "--memory", is_flag=True, help="Also record the CUDA allocator in a separate process: who held the memory."
    ),
    click.option(
        "--oom",
        is_flag=True,
        help="Keep the allocator's last events, at about 2 µs an allocation, and save them only if one fails. "
        "Nothing else is recorded unless you add --kineto, --nsys or --memory.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        help="Steps before the measured ones  [default: 2 for built-in models, 14 for commands]",
    ),
    click.option("--steps", type=POSITIVE, default=3, show_default=True, help="Measured steps."),
    click.option(
        "--step-on",
        metavar="KIND",
        help="What a step is, if profkit finds the wrong one: optimizer:NAME, call:NAME (class, variable "
        "or decorated function), backward, replay (of a CUDA graph), generate, or whole (the whole program); "
        "'optimizer*4' makes a step of four.",
    ),
    click.option(
        "--depth",
        type=click.IntRange(min=0),
        help="A module of your model gets a range if its dotted name has at most this many parts  [default: the "
        "block that the model repeats, its parts and their parts]",
    ),
    click.option(
        "--flops/--no-flops",
        default=None,
        help="Count each range's FLOPs and least bytes in the step after the measured ones: by default of programs "
        "without compiled code, CUDA graphs and several ranks, with --flops of these too.",
    ),
    click.option(
        "--operators",
        is_flag=True,
        help="Also record the CPU operators that launch kernels, for `profkit kernels --by operator`, in the same "
        "recorded steps. These take about twice as long as unprofiled ones on a GPU, so idle times are estimated less "
        "well: leave it out for all other questions.",
    ),
    click.option(
        "--lines/--no-lines",
        default=True,
        help="Find the lines of source that the steps spend their time in, in the steps after the measured ones (up to "
        "60, for a second).",
    ),
    click.option(
        "--nproc-per-node",
        "ranks",
        type=POSITIVE,
        default=1,
        metavar="N",
        help="Start N processes on this machine with torch's launcher. A built-in model is then trained with "
        "DistributedDataParallel; each rank has its own batch.",
    ),
    click.option(
        "--cuda-graph-trace",
        "graph_trace",
        type=click.Choice(get_args(GraphTrace)),
        default="node",
        show_default=True,
        help="With --nsys: node traces each kernel of a CUDA graph, so ranges and tables see it, but every graph "
        "launch becomes slower; graph traces a whole launch as one row at little cost.",
    ),
    click.option(
        "--keep-report/--no-keep-report",
        default=True,
        help="With --nsys: keep the .nsys-rep next to its export. It holds the environment and cannot be scrubbed.",
    ),
    click.option("--batch", type=POSITIVE, default=4, show_default=True, help="Sequences per batch."),
    click.option(
        "--context",
        "contexts",
        type=Quantity("integer[,…]", _parse_contexts),
        default="256",
        show_default=True,
        help="Tokens per sequence. With several (128,256,512) each length runs its own steps, under 'context N'.",
    ),
    _choice("--passes", Passes, "train", "What a step does."),
    _choice("--dtype", Dtype, "fp32", "tf32: fp32 with matrix products in TF32; bf16: autocast with fp32 weights."),
    click.option(
        "--compile",
        "compile_mode",
        type=click.Choice(get_args(CompileMode)),
        default="none",
        show_default=True,
        help="torch.compile's mode. Compiled layers, attention and ffn keep their ranges.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights and the tokens."),
    _choice("--device", Device, "auto", "auto: CUDA if there is a GPU, otherwise the CPU."),
    click.option(
        "--memory-only",
        is_flag=True,
        help="Record a command's allocator and no trace. The command then runs once; with --memory it runs twice.",
    ),
    _choice("--memory-stacks", Stacks, "python", "Stack of each allocation: Python frames, or all with C++ (slower)."),
    click.option(
        "--memory-entries",
        type=POSITIVE,
        default=MEMORY_ENTRIES,
        show_default=True,
        help="Keep at most this many allocator events (300 B to 1 KB of host memory each); older ones are lost.",
    ),
    click.option(
        "--annotate/--no-annotate",
        default=True,
        help="Open ranges for phases and modules automatically, or not. Your own ranges always show.",
    ),
    click.option(
        "--stop", is_flag=True, help="End the command after its last measured step instead of letting it finish."
    ),
    click.option(
        "--ranks",
        "full_ranks",
        metavar="LIST|first-per-node",
        help="Of several ranks record these in full (0,7,8-15; the first of each machine). All others leave only their "
        "light record.",
    ),
    click.option(
        "--redact",
        metavar="GLOB",
        multiple=True,
        help="Leave the values of options whose names match GLOB out of the manifest. Those of *token, *key, *secret, "
        "*password, *passwd and *credential* are always left out.",
    ),
    click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Show all options: of nsys, ranks, the allocator and the built-in models too.",
    ),
)


def parse_option(option: str, parse: Callable[[str], Parsed], text: str) -> Parsed:
    """Return what ``parse`` makes of an option's text; where it refuses that, raise `UsageError`."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}") from None


def refuse_options_of_other_kinds(kind: Kind) -> None:
    """Raise `UsageError` if an option was given that means nothing to this kind of target, or nothing without nsys."""
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        if ctx.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
            continue
        said_no = parameter.secondary_opts and ctx.params[parameter.name or ""] is False
        name = (parameter.secondary_opts if said_no else parameter.opts)[0]
        kinds = _MEANT_FOR.get(parameter.name or "", (kind,))
        if kind not in kinds:
            raise UsageError(f"{name} is for {' and '.join(_KIND_NAMES[kind] for kind in kinds)}; leave it out")
        if parameter.name in _FOR_NSYS and not ctx.params["with_nsys"]:
            raise UsageError(f"{name} goes with --nsys")
        if parameter.name == "with_nsys" and ctx.params["memory_only"]:
            raise UsageError(f"{name} records a trace and --memory-only none; --memory records both")


def names_recorder() -> bool:
    """Return whether the recorder of the trace was named on the command line."""
    return click.get_current_context().get_parameter_source("with_nsys") is ParameterSource.COMMANDLINE


def require_nsys(graph_trace: GraphTrace, keep_report: bool) -> Nsys:
    """Return the nsys to record with; raise `ToolError` if there is none."""
    nsys = find_nsys(os.environ)
    if nsys is None:
        raise ToolError(
            "there is no Nsight Systems here: install it (nsight-systems-cli), put nsys on PATH or name "
            "it in $NSYS; or leave --nsys out to record with torch.profiler"
        )
    return replace(nsys, cuda_graph_trace=graph_trace, keep_report=keep_report)
