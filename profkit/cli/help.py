"""``profkit help``: the guides, and each command's own help."""

from __future__ import annotations

from difflib import get_close_matches

import click

from profkit.errors import UsageError
from profkit.guides import TOPICS, read_guide, title_of


@click.command()
@click.argument("topic", required=False)
def help(topic: str | None) -> None:
    """Show a guide or the help of a command; without a TOPIC, list the guides."""
    root = click.get_current_context().find_root()
    group = root.command
    assert isinstance(group, click.Group)
    if topic is None:
        click.echo("Guides (profkit help TOPIC):\n")
        for name in TOPICS:
            click.echo(f"  {name:<12} {title_of(name)}")
        click.echo("\nEach command: profkit COMMAND --help")
        return
    if topic in TOPICS:
        click.echo_via_pager(read_guide(topic))
        return
    command = group.get_command(root, topic)
    if command is None:
        near = get_close_matches(topic, [*TOPICS, *group.list_commands(root)], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the guides are {', '.join(TOPICS)}"
        raise UsageError(f"no guide and no command {topic!r}; {hint}")
    click.echo(command.get_help(click.Context(command, info_name=topic, parent=root)))
