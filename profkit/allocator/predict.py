"""Predict peaks: one simulation, or several that show what the unknown base addresses of segments change."""

from __future__ import annotations

from dataclasses import dataclass

from profkit.allocator.heap import Limit
from profkit.allocator.requests import Requests
from profkit.allocator.simulate import Failure, Simulation, simulate
from profkit.snapshot.columns import Settings

_MOST_DRAWS = 8
_LEAST_DRAWS = 3
_DRAWN_REQUESTS = 400_000
"""About this many requests are simulated for all draws together: more would only take time."""

Range = tuple[int, int | None]
"""The lowest and the highest value; None where there is no bound."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """The simulations of one request stream under some settings: the first, and the ranges over all of them."""

    simulation: Simulation
    allocated_range_bytes: tuple[int, int]
    reserved_range_bytes: tuple[int, int]
    exact: bool
    fits: bool | None
    failed: Failure | None


def predict(requests: Requests, settings: Settings, capacity_bytes: int | None = None) -> Prediction:
    """Simulate a request stream; several times where base addresses or the state before the history decide.

    Args:
        capacity_bytes: what PyTorch may reserve. Where that is too little without releasing cached memory, the peaks
            are those with it if the program survives, and else those that it would need.
    """
    found, exact = _simulate_all(requests, settings, None)
    fits: bool | None = None
    failed = None
    if found[0].failed is not None:
        fits, failed = False, found[0].failed  # more than any GPU has
    elif capacity_bytes is not None:
        fits = max(one.reserved_peak_bytes for one in found) <= capacity_bytes
        if not fits:
            limited, _ = _simulate_all(requests, settings, Limit(capacity_bytes))
            failures = [one.failed for one in limited if one.failed is not None]
            failed = failures[0] if failures else None
            fits = None if 0 < len(failures) < len(limited) else not failures
            found = limited if fits else found
    allocated, reserved = ([getattr(one, f"{kind}_peak_bytes") for one in found] for kind in ("allocated", "reserved"))
    ranges = (min(allocated), max(allocated)), (min(reserved), max(reserved))
    return Prediction(found[0], *ranges, exact, fits, failed)


def _simulate_all(requests: Requests, settings: Settings, limit: Limit | None) -> tuple[list[Simulation], bool]:
    """Return one simulation, or several that show what the unknown changes; and whether the one is exact."""
    found = [simulate(requests, settings, limit=limit)]
    if found[0].bases_decide:
        draws = min(max(_DRAWN_REQUESTS // max(len(requests), 1), _LEAST_DRAWS), _MOST_DRAWS)
        found += [simulate(requests, settings, limit=limit, draw=draw) for draw in range(1, draws)]
    if requests.start:
        found.append(simulate(requests, settings, limit=limit, keeps_start=False))
    return found, len(found) == 1 and all(release.by_program for release in requests.releases)
