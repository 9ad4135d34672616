"""Sets how the threads of OpenMP behave. Torch loads OpenMP, which reads its variables once, at that import."""

import logging
import os
import sys

logger = logging.getLogger(__name__)

# With these OpenMP binds the thread that loads torch to one core, and so all threads that the kernels start there.
_BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def leave_threads_unbound() -> None:
    """Removes the variables that would bind all threads to one core, with a warning."""
    for name in _BINDINGS:
        if os.environ.pop(name, "false").lower() != "false":
            logger.warning(
                "%s is ignored, because it would bind all threads to one core; choose cores with `taskset`", name
            )


def let_idle_threads_sleep() -> bool:
    """Shortens the loop in which GNU OpenMP's idle threads look for work before they sleep, from about 1 ms to 0.1 ms.

    0.1 ms is enough for the next kernel of a step to come; after that another program should have the core. A value
    that the user has set stays. Returns False if it is too late, because torch has been imported.
    """
    if any(name in os.environ for name in _WAITING):
        return True
    os.environ["GOMP_SPINCOUNT"] = "10000"  # also for child processes
    return "torch" not in sys.modules
