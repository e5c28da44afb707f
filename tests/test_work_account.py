"""What ranges do and must move: the rule by examples, and its properties on any run of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from profkit.capture.work.account import Access, Instance, Products, Work, WorkAccount


def _bytes(work: dict[tuple[str, ...], list[Work]], *path: str) -> int:
    (one,) = work[path]
    return one.least_bytes


def _whole(buffer: str, size: int = 100) -> Access:
    return Access(buffer, "whole", size, size)


def test_a_result_that_nobody_reads_and_that_is_gone_is_not_needed() -> None:
    account = WorkAccount()
    account.move(account.step, [_whole("x")], [_whole("y")])
    assert _bytes(account.by_path(lambda _key: False)) == 100


def test_parts_add_up_to_no_more_than_the_buffer() -> None:
    account = WorkAccount()
    for part in ("first half", "second half", "whole"):
        account.move(account.step, [Access("x", part, 100 if part == "whole" else 50, 100)], [])
    assert _bytes(account.by_path(lambda _key: True)) == 100


def test_a_tensor_overwritten_as_a_whole_is_not_read() -> None:
    account = WorkAccount()
    first, second = account.open("first", account.step), account.open("second", account.step)
    account.move(first, [], [_whole("x")])
    account.move(second, [], [_whole("x")])
    work = account.by_path(lambda _key: True)
    assert (_bytes(work, "first"), _bytes(work, "second"), _bytes(work)) == (0, 100, 100)


def test_flops_go_to_all_ranges_around_and_instances_stay_apart() -> None:
    account = WorkAccount()
    outer = account.open("outer", account.step)
    for flops in (1, 2):
        account.add(account.open("inner", outer), Products(flops, "fp32"), other_flops=10)
    work = account.by_path(lambda _key: False)
    assert [one.flops for one in work[("outer", "inner")]] == [{"fp32": 1}, {"fp32": 2}]
    assert work[("outer",)][0] == work[()][0] == Work({"fp32": 3}, 20)


ACCESS = st.tuples(st.integers(0, 5), st.integers(0, 3))
EVENT = st.one_of(
    st.sampled_from(["open", "close"]), st.tuples(st.lists(ACCESS, max_size=3), st.lists(ACCESS, max_size=2))
)
# Part 0 is the whole buffer, the others lie within it.
PART_BYTES = (100, 30, 50, 70)


def _access(pair: tuple[int, int]) -> Access:
    return Access(pair[0], pair[1], PART_BYTES[pair[1]], 100)


def _play(events: list[Any]) -> tuple[WorkAccount, dict[Instance, list[Instance]]]:
    """Run the events; every operator gets an instance of its own, so that it can be told from its range."""
    account = WorkAccount()
    inside: dict[Instance, list[Instance]] = {}
    stack = [account.step]
    for event in events:
        if event == "close":
            stack[1:] = stack[1:-1]
        else:
            child = account.open(f"{len(account.instances)}", stack[-1])
            inside.setdefault(stack[-1], []).append(child)
            if event == "open":
                stack.append(child)
            else:
                account.move(child, map(_access, event[0]), map(_access, event[1]))
    return account, inside


@given(st.lists(EVENT, max_size=30), st.sets(st.integers(0, 5)))
def test_a_range_moves_no_more_than_the_ranges_and_operators_inside_it(events: list[Any], alive: set[int]) -> None:
    account, inside = _play(events)
    is_alive: Callable[[Any], bool] = alive.__contains__
    account.by_path(is_alive)
    for around, children in inside.items():
        assert around.work.least_bytes <= sum(child.work.least_bytes for child in children)


@given(st.lists(EVENT, max_size=30), st.sets(st.integers(0, 5)))
def test_a_buffer_moves_in_and_out_at_most_once(events: list[Any], alive: set[int]) -> None:
    account, _ = _play(events)
    account.by_path(alive.__contains__)
    assert all(0 <= one.work.least_bytes <= 6 * 2 * 100 for one in account.instances)
