"""``profkit whatif``: the peak under other settings of the allocator, before anyone runs them."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import output_options
from profkit.cli.outputs import print_document, refuse_overwriting
from profkit.cli.progress import shown_after_a_second
from profkit.cli.quantities import Size
from profkit.reading import open_snapshot
from profkit.report.document import Format
from profkit.report.whatif import build_whatif_document
from profkit.snapshot.unpickler import collector_off


@click.command()
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.option(
    "--allocator",
    "allocators",
    multiple=True,
    metavar="SETTINGS",
    help="Settings to try, as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,max_split_size_mb:128.",
)
@click.option(
    "--capacity",
    type=Size(),
    help="Memory that PyTorch may reserve, such as 24GiB (default: that of the recorded GPU).",
)
@click.option("--device", type=int, metavar="N", help="Show this GPU (default: the one with the highest peak).")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Show this rank (default: the one with the highest peak)."
)
@output_options
def whatif(
    snapshot: Path,
    allocators: tuple[str, ...],
    capacity: int | None,
    device: int | None,
    rank: int | None,
    style: Format,
    output: Path | None,
    full_names: bool,
) -> None:
    """Predict the peak of memory under other settings of the allocator.

    SNAPSHOT is a file by torch.cuda.memory._dump_snapshot, or a run directory. profkit simulates the allocator on the
    recorded requests. First it proves itself: with the recorded settings it must choose every recorded address.
    """
    refuse_overwriting([snapshot], [output])
    click.get_current_context().with_resource(collector_off())
    with shown_after_a_second(f"replaying {snapshot.name}"):
        opened = open_snapshot(snapshot, rank=rank)
    with shown_after_a_second("simulating the allocator"):
        result = opened.whatif(allocators=allocators, device=device, capacity_bytes=capacity)
    print_document(build_whatif_document(result), style, output, full_names=full_names)
