import asyncio
import time

import pytest

from shared.event_loop import watch_event_loop


async def observed(*standstills: float) -> list[float]:
    """The lags that are seen while the loop stands still so often, for so many seconds each time."""
    lags: list[float] = []
    watch = asyncio.create_task(watch_event_loop(lags.append))
    for seconds in standstills:
        await asyncio.sleep(0.15)
        time.sleep(seconds)  # noqa: ASYNC251  # which is what must not happen
    await asyncio.sleep(0.15)
    watch.cancel()
    return lags


async def test_a_standstill_is_seen_and_warned_of(caplog: pytest.LogCaptureFixture):
    lags = await observed(0.6)
    assert max(lags) > 0.4
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the event loop was blocked for" in record.getMessage()


@pytest.mark.slow
async def test_warnings_do_not_flood(caplog: pytest.LogCaptureFixture):
    lags = await observed(0.5, 0.5, 0.5)
    assert sum(lag > 0.25 for lag in lags) >= 3
    assert len(caplog.records) == 1
