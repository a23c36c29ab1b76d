"""The line in front of the worker, by itself."""

from __future__ import annotations

import asyncio

import pytest
from reflex_sidecar.errors import ApiError
from reflex_sidecar.turns import Turns


async def take(
    turns: Turns, name: str, order: list[str], hold: asyncio.Event | None = None, timeout_s: float = 60
):
    async with turns.turn(timeout_s):
        order.append(name)
        if hold is not None:
            await hold.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served():
    turns, order, hold = Turns(10), [], asyncio.Event()
    tasks = [asyncio.create_task(take(turns, "a", order, hold))]
    await settle()
    tasks += [asyncio.create_task(take(turns, name, order)) for name in "bcd"]
    await settle()
    assert (order, turns.waiting, turns.busy) == (["a"], 3, True)
    hold.set()
    await asyncio.gather(*tasks)
    assert (order, turns.waiting, turns.busy) == (["a", "b", "c", "d"], 0, False)


async def test_who_leaves_the_line_is_passed_over():
    turns, order, hold = Turns(10), [], asyncio.Event()
    first = asyncio.create_task(take(turns, "a", order, hold))
    await settle()
    leaver = asyncio.create_task(take(turns, "b", order))
    stayer = asyncio.create_task(take(turns, "c", order))
    await settle()
    leaver.cancel()
    hold.set()
    await asyncio.gather(first, stayer)
    assert order == ["a", "c"] and not turns.busy


async def test_who_is_called_and_leaves_at_once_passes_the_turn_on():
    turns, order, hold = Turns(10), [], asyncio.Event()
    first = asyncio.create_task(take(turns, "a", order, hold))
    await settle()
    called = asyncio.create_task(take(turns, "b", order))
    last = asyncio.create_task(take(turns, "c", order))
    await settle()
    hold.set()
    await first  # b's future is set now, b has not run yet
    called.cancel()
    await last
    await asyncio.gather(called, return_exceptions=True)
    assert order in (["a", "c"], ["a", "b", "c"]) and not turns.busy and turns.waiting == 0


async def test_leaving_and_the_end_of_a_turn_at_the_same_time_give_one_turn():
    """A turn given out twice would put two requests into the worker at once."""
    turns, order, hold = Turns(10), [], asyncio.Event()
    first = asyncio.create_task(take(turns, "a", order, hold))
    await settle()
    leaver = asyncio.create_task(take(turns, "b", order))
    await settle()
    holding = asyncio.Event()
    second = asyncio.create_task(take(turns, "c", order, holding))
    third = asyncio.create_task(take(turns, "d", order))
    await settle()
    leaver.cancel()
    hold.set()
    await settle()
    await settle()
    assert order == ["a", "c"] and turns.waiting == 1
    holding.set()
    await asyncio.gather(first, second, third)
    assert order == ["a", "c", "d"]


async def test_patience_ends():
    turns, order, hold = Turns(10), [], asyncio.Event()
    first = asyncio.create_task(take(turns, "a", order, hold))
    await settle()
    with pytest.raises(TimeoutError):
        await take(turns, "b", order, timeout_s=0.01)
    assert turns.waiting == 0
    hold.set()
    await first
    assert not turns.busy


async def test_a_full_line_turns_away():
    turns, order, hold = Turns(1), [], asyncio.Event()
    first = asyncio.create_task(take(turns, "a", order, hold))
    await settle()
    second = asyncio.create_task(take(turns, "b", order))
    await settle()
    with pytest.raises(ApiError) as e:
        await take(turns, "c", order)
    assert e.value.status == 429 and int(e.value.headers["retry-after"]) >= 1
    hold.set()
    await asyncio.gather(first, second)


async def test_an_exception_in_a_turn_ends_it():
    turns = Turns(1)
    with pytest.raises(ValueError, match="x"):
        async with turns.turn(1):
            raise ValueError("x")
    assert not turns.busy


def test_the_pace_is_that_of_recent_turns():
    turns = Turns(1)
    assert turns.retry_after_s() == 1
    turns.mean_turn_s = 12.3
    assert turns.retry_after_s() == 13
