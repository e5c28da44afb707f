"""Starts a built-in model's ranks with torch's own launcher: ``python -m profkit.capture.rank_launcher ORDER``.

What torchrun does for one machine, but a rank that fails is not followed by the launcher's own traceback: the worker
has said why. Exits with the status of the rank that failed first.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from profkit.capture.outputs import take_outputs
from profkit.models.workload import Order


def main() -> None:
    """Run the order on the command line as its workload's ranks."""
    order = take_outputs(Order.from_json(sys.argv[1]))
    # torch's launcher logs each rank that ends badly, and a traceback of its own.
    logging.disable(logging.CRITICAL)
    # As torchrun does: the ranks share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=order.workload.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-P", "-m", "profkit.capture.worker", order.to_json())
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode)


if __name__ == "__main__":
    main()
