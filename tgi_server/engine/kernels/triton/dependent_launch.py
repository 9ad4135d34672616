"""Programmatic dependent launch: a kernel's programs are started while the kernel before it still runs (CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization").

Each such kernel begins with `wait_for_earlier`, which returns once the kernels before it are done and what they wrote
can be read. So nothing of a kernel but its start overlaps with others, whatever those are: kernels that were launched
in the usual way, such as those of libraries, start when all before them are done.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tgi_server.engine.kernels.triton import variants
from tgi_server.engine.memory import HOST

# Compute capability of the oldest GPUs that can.
_OLDEST = (9, 0)


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Returns the options of a launch on a device: for the launcher, and for the kernel as the constant `pdl`."""
    if "pdl" not in variants() or device == HOST or torch.cuda.get_device_capability(device) < _OLDEST:
        return {}
    return {"pdl": True, "launch_pdl": True}


@triton.jit
def wait_for_earlier():
    """Waits for the kernels before this one, and lets the next one start its programs."""
    gdc_wait()
    gdc_launch_dependents()
