"""The command line: each command parses, calls and prints.

A command's module is imported only when that command runs, so that ``profkit --help`` loads neither pandas nor torch.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from profkit.errors import ProfkitError, UsageError
from profkit.version import __version__

_COMMANDS = {
    "run": "Record a program: its time, its memory, or both.",
    "summary": "Say what a run spent its time and memory on, and what to try.",
    "kernels": "Show which kernels took the time, in all or in a range.",
    "ranges": "Show the tree of ranges: the names that --range accepts.",
    "efficiency": "Show how well the GPUs were used and what limits each range.",
    "ranks": "Show which rank the others wait for, why, and what communication costs.",
    "memory": "Show the peak of memory and who held it.",
    "report": "Write one HTML page of a run, for a browser.",
    "whatif": "Predict time and memory of a changed program, or the peak under other settings.",
    "try": "Make edits in runs of a program, unchanged, and measure them.",
    "compare": "Show what changed between two captures.",
    "check": "Check a run against budgets; exit 3 if one fails.",
    "ceilings": "Measure the peaks of this machine's GPU.",
    "doctor": "Show what this machine can record, and how to fix what it cannot.",
    "export": "Write a timeline for Perfetto or chrome://tracing.",
    "gather": "Put the runs of several machines into one directory.",
    "scrub": "Copy a capture or a run without private data.",
    "help": "Show a guide; `profkit help start` takes five minutes.",
}

_HOMES = {
    "ceilings": "machine",
    "check": "compare",
    "doctor": "machine",
    "efficiency": "kernels",
    "export": "copies",
    "gather": "copies",
    "ranges": "kernels",
    "ranks": "run_views",
    "report": "run_views",
    "scrub": "copies",
    "summary": "run_views",
    "try": "edits",
    "whatif": "edits",
}
"""The module of each command that has not one of its own name."""

GUIDES = (
    *("start", "scripts", "summary", "ranges", "attribution", "efficiency", "memory"),
    *("whatif", "try", "ranks", "compare", "output", "python", "security"),
)
"""The topics of ``profkit help``, in the order in which a new user needs them; the first line of each is its title."""

_KEPT_BYTES = 1 << 24


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name == "help":
            return help
        home = import_module(f"{__name__}.{_HOMES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(home, "try_" if cmd_name == "try" else cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=text) for name, text in _COMMANDS.items() if name.startswith(incomplete)]
        return names or super().shell_complete(ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # While a shell completes a word, nobody reads an error.
        if args and args[0] not in _COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            hint = _suggest(args[0], _COMMANDS) or "`profkit --help` lists the commands"
            raise UsageError(f"no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def _suggest(name: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else None


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def cli() -> None:
    """Where the time of a training step went and who held its memory, in numbers that add up.

    Commands that show a run take the newest complete one here, or in runs/, if none is named.
    """


def read_guide(topic: str) -> str:
    return (Path(__file__).parents[1] / "guides" / f"{topic}.md").read_text(encoding="utf-8")


@click.command()
@click.argument("topic", required=False)
def help(topic: str | None) -> None:
    """Show a guide or the help of a command; without a TOPIC, list the guides."""
    if topic is None:
        click.echo("Guides (profkit help TOPIC):\n")
        for name in GUIDES:
            title = read_guide(name).partition("\n")[0].removeprefix("# ")
            click.echo(f"  {name:<12} {title}")
        click.echo("\nEach command: profkit COMMAND --help")
    elif topic in GUIDES:
        # Where there is no terminal to turn pages, click 8.4 would close the output.
        show = click.echo_via_pager if sys.stdout is not None and sys.stdout.isatty() else click.echo
        show(read_guide(topic))
    else:
        root = click.get_current_context().find_root()
        command = cli.get_command(root, topic)
        if command is None:
            hint = _suggest(topic, [*GUIDES, *_COMMANDS]) or f"the guides are {', '.join(GUIDES)}"
            raise UsageError(f"no guide and no command {topic!r}; {hint}")
        click.echo(command.get_help(click.Context(command, info_name=topic, parent=root)))


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 usage, 3 a check was not met, 130 Ctrl-C.

    A run's own exit status passes through. The one place where errors become lines.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:
        # A process of its own is short, and the collector would only scan what was just read, again and again.
        gc.disable()
        # Nor need memory go back to the system between two columns: glibc keeps as much as it once saw freed at once.
        bytes(_KEPT_BYTES)
    debug = "--debug" in arguments[:1]
    kept: list[object] = []
    _prepare_streams()
    try:
        code: Any = cli.main(
            args=arguments, prog_name="profkit", standalone_mode=False, obj=kept if argv is None else None
        )
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): this is no error.
        _flush_or_discard()
        sys.exit(0)
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        # click wraps Ctrl-C in an error of its own; the interrupted code may have noted what it left behind.
        notes = getattr(error.__cause__ or error, "__notes__", [])
        _exit_with("; ".join(["interrupted", *notes]), 130)
    except SystemExit as ended:
        # A signal that ends a program came during a run, which says what it kept.
        notes = getattr(ended, "__notes__", [])
        if not notes:
            raise
        _exit_with("; ".join(notes), int(str(ended.code)))
    except Exception as error:
        if debug:
            raise
        _flush_or_discard()
        _exit_with(*_explain(error))
    status = code if isinstance(code, int) else 0
    if kept:
        # The system takes back at once what Python would free object by object.
        atexit._run_exitfuncs()
        if sys.stderr is not None:
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _prepare_streams() -> None:
    """Let no missing character of an encoding stop the output, and no file get the number of a closed stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The next file to be opened, a capture perhaps, would get this number, and children would write to it.
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, ProfkitError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "out of memory", 1
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", 1
    return f"internal error, {type(error).__name__}: {error}; `profkit --debug …` shows where", 1


def _flush_or_discard() -> None:
    """Print what is still buffered; if that fails, keep the interpreter from trying again at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        from profkit.cli.outputs import discard_output

        discard_output()


def _exit_with(message: str, code: int) -> NoReturn:
    from profkit.cli.outputs import say

    say(message)
    sys.exit(code)
