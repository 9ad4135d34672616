"""Every fault under load: answers in time, nothing leaked, service again soon after the fault's end."""

import pytest

from tests.integration.llm_functionalities.faults import FAULTS, TIMEOUT_SECONDS, measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

SLACK_SECONDS = 0.05
RESUME_SECONDS = 2.0


@pytest.mark.parametrize("name", FAULTS)
def test_callers_are_safe_from(name: str) -> None:
    it = measure(name)
    assert it.errors == 0, it
    assert it.calls >= 64, it
    assert it.longest < TIMEOUT_SECONDS + SLACK_SECONDS + it.own_lag, it
    assert it.recovery < RESUME_SECONDS, it
    assert it.all_recovered < RESUME_SECONDS + TIMEOUT_SECONDS, it
    assert it.threads[1] <= it.threads[0], it
    assert it.sockets[1] <= it.sockets[0], it
