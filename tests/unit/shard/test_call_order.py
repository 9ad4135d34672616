import asyncio

import pytest

from tgi_server.shard.call_order import CallOrder, OutOfTurn


async def _start(order: CallOrder, sequence: int, started: list[int]) -> None:
    await order.turn(sequence)
    started.append(sequence)


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_calls_start_in_the_order_of_their_numbers_whenever_they_arrive() -> None:
    order, started = CallOrder(), []
    await asyncio.gather(*(_start(order, sequence, started) for sequence in (3, 1, 5, 4, 2)))
    assert started == [1, 2, 3, 4, 5]


async def test_a_call_without_a_number_starts_at_once() -> None:
    order, started = CallOrder(), []
    waiting = asyncio.create_task(_start(order, 2, started))
    await _start(order, 0, started)
    assert started == [0]
    await _start(order, 1, started)
    await waiting
    assert started == [0, 1, 2]


async def test_a_restart_refuses_what_was_sent_before_and_goes_on_after() -> None:
    order, started = CallOrder(), []
    overtaken = asyncio.create_task(_start(order, 3, started))
    later = asyncio.create_task(_start(order, 8, started))
    await _settle()
    order.restart(7)
    await later
    with pytest.raises(OutOfTurn):
        await overtaken
    with pytest.raises(OutOfTurn):
        await order.turn(7)
    await _start(order, 9, started)
    assert started == [8, 9]


async def test_a_new_router_may_count_from_the_beginning_after_a_restart() -> None:
    order, started = CallOrder(), []
    for sequence in range(1, 6):
        await _start(order, sequence, started)
    order.restart(1)
    await _start(order, 2, started)
    assert started[-1] == 2


async def test_a_cancelled_call_is_a_gap_until_the_restart() -> None:
    order, started = CallOrder(), []
    gone = asyncio.create_task(_start(order, 2, started))
    await _settle()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await _start(order, 1, started)
    blocked = asyncio.create_task(_start(order, 3, started))
    await _settle()
    assert started == [1]
    order.restart(2)
    await blocked
    assert started == [1, 3]
