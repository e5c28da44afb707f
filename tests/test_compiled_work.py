"""Matrix products of compiled code in a counted step: of each launch once, under the modules that it computes for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from profkit.annotation import annotate  # noqa: E402
from profkit.capture.compiled.watch import loaded  # noqa: E402
from profkit.capture.work.counter import WorkCounter  # noqa: E402
from profkit.capture.work.operator_work import GraphPart, GraphWork, replay_observers  # noqa: E402
from profkit.names import LaunchPlace, graph_range, launch_range  # noqa: E402
from profkit.run.compiled_code import Launch  # noqa: E402
from profkit.run.work import FUSED, RangeWork, RunWork  # noqa: E402

PRODUCT = 2 * 3 * 4 * 5


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    torch._dynamo.utils.counters.clear()
    loaded["f000000000"] = {
        1: Launch(1, "extern_kernels.mm", True, flops=PRODUCT, dtype="bf16", masked_flops=7, recomputed_flops=20),
        2: Launch(2, "triton_poi_fused_gelu_0", False, flops=0),
        3: Launch(3, "extern_kernels.mm", True),
        4: Launch(4, "triton_tem_fused_mm_1", False),
        5: Launch(5, "extern_kernels.copy", True, flops=0),
    }
    yield
    del loaded["f000000000"]


def _launch(line: int, *path: str, shared: tuple[str, ...] = (), multiplies: bool = True) -> None:
    with annotate(launch_range(LaunchPlace("f000000000", line, path, shared))):
        if multiplies:
            torch.mm(torch.ones(3, 4), torch.ones(4, 5))


class _Counted:
    """Counts what runs within it."""

    def __enter__(self) -> _Counted:
        self._counter = WorkCounter()
        self._counter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._counter.stop()
        self.content: RunWork = self._counter.content()

    def __getitem__(self, path: str) -> RangeWork:
        found = self.content.find(tuple(path.split("/")) if path else ())
        assert found is not None
        return found


def test_a_launch_counts_once_by_its_record_under_its_modules() -> None:
    with _Counted() as counted, annotate("forward"), annotate("model"):
        _launch(1, "model", "h.0", "h.0.mlp")
    for path in ("", "forward", "forward/model", "forward/model/h.0", "forward/model/h.0/h.0.mlp"):
        one = counted[path]
        assert (one.flops_by_dtype, one.needed_flops, one.recomputed_flops) == ({"bf16": PRODUCT}, PRODUCT - 7, 20)
    assert counted.content.model_flops == PRODUCT - 20
    assert counted.content.missing == ()


def test_a_module_with_the_name_of_the_one_around_it_has_its_own_place() -> None:
    with _Counted() as counted, annotate("forward"), annotate("model"):
        _launch(1, "model", "model", "model.layers.0")
    assert counted["forward/model/model/model.layers.0"].flops == PRODUCT


def test_launches_in_a_row_share_instances_until_another_range_comes_between() -> None:
    with _Counted() as counted, annotate("forward"):
        _launch(1, "h.0", "h.0.a")
        _launch(5, "h.0", "h.0.b", multiplies=False)
        _launch(1, "h.0", "h.0.b")
        _launch(1, shared=("h.0", "h.1"))
        with annotate("aside"):
            pass
        _launch(1, shared=("h.0", "h.1"))
    assert (counted["forward/h.0"].instances, counted["forward/h.0"].flops) == (1, 2 * PRODUCT)
    assert (counted["forward/h.0/h.0.b"].instances, counted["forward/h.0/h.0.b"].flops) == (1, PRODUCT)
    assert counted["forward/shared: h.0 + h.1"].instances == 2
    assert counted["forward"].flops == 4 * PRODUCT


def test_the_flops_of_unequal_instances_are_kept_exactly() -> None:
    with _Counted() as counted, annotate("forward"):
        _launch(1, "h.0")
        _launch(5, "h.1", multiplies=False)
        _launch(1, "h.0")
        _launch(5, "h.1", multiplies=False)
        _launch(5, "h.0", multiplies=False)
    one = counted["forward/h.0"]
    assert (one.instances, one.varies, one.flops_in_step) == (3, True, {"bf16": 2 * PRODUCT})
    assert one.flops_of(6) == {"bf16": 4 * PRODUCT}


def test_products_that_are_not_known_from_the_code_count_as_they_run() -> None:
    with _Counted() as counted:
        _launch(3, "h.0")
    assert counted["h.0"].flops_by_dtype == {"fp32": PRODUCT}
    assert counted.content.missing == ()


def test_what_was_not_counted_of_compiled_code_is_said() -> None:
    with _Counted() as counted:
        _launch(2, "h.0", multiplies=False)
    assert counted.content.missing == (FUSED,)
    with _Counted() as counted:
        _launch(4, "h.0", multiplies=False)
    assert "compiled code" in counted.content.missing
    torch._dynamo.utils.counters["stats"]["unique_graphs"] = 1
    with _Counted() as counted:
        pass
    assert counted.content.missing == (), "its launches are known, and none ran"
    known = dict(loaded)
    loaded.clear()
    with _Counted() as counted:
        pass
    loaded.update(known)
    assert counted.content.missing == ("compiled code",)


def _replay(work: GraphWork | None) -> None:
    with annotate(graph_range("0123456789")):
        for observer in replay_observers:
            observer(work)


def test_a_replay_does_the_launches_that_were_captured_under_their_modules() -> None:
    first, second = (launch_range(LaunchPlace("f000000000", 1, ("model", name))) for name in ("h.0", "h.1"))
    copy = launch_range(LaunchPlace("f000000000", 5, ("model", "h.1")))
    with _Counted() as counted, annotate("forward"), annotate("model"):
        for _ in range(2):
            _replay(GraphWork((GraphPart(2, (first,)), GraphPart(2, (second,)), GraphPart(1, (copy,))), {}))
    assert (counted["forward/model/h.0"].flops, counted["forward/model/h.0"].instances) == (PRODUCT, 2)
    assert (counted["forward/model/h.1"].flops, counted["forward/model/h.1"].instances) == (PRODUCT, 2)
    assert counted["forward/model"].flops == 4 * PRODUCT
    assert counted["forward/model"].recomputed_flops == 80
    assert counted.content.missing == ()


def test_a_replay_of_a_graph_that_nobody_saw_captured_is_said_not_to_count() -> None:
    with _Counted() as counted:
        _replay(None)
    assert counted.content.missing == ("replayed CUDA graphs",)
