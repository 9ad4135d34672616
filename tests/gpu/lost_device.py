"""A plugin of pytest for machines with a GPU: the test that broke the device is the only one that fails for it.

After an illegal access every later call of the process fails. So once a test has left the device like that, its process
ends: a process of several is replaced by another one, which runs the tests that are left.
"""

import os
from collections.abc import Generator

import pytest
import torch

LOST = 70


def device_fault() -> str | None:
    """Returns why the GPU computes no more, in words; None if it does, or was not used yet."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.ones(2, device="cuda").sum().item()
    except RuntimeError as error:
        # other processes may have all memory, which is no fault of the device
        return None if "out of memory" in str(error) else str(error).partition("\n")[0]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    done = yield
    if fault := device_fault():
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(LOST)  # the controller names the test that ran
        pytest.exit(f"the GPU computes no more after {item.nodeid}: {fault}", LOST)
    return done
