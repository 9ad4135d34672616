"""text-generation-router."""

import asyncio
import ctypes
import gc
import logging
import sys

from shared.logging import configure_logging
from shared.settings import fail, read_settings
from tgi_server.router.errors import StartupError
from tgi_server.router.settings import RouterSettings

_PROGRAM = "text-generation-router"
_STARTUP_FAILED = 1
# An option of glibc's mallopt: buffers of this many bytes and more have pages of their own.
_MMAP_THRESHOLD, _LARGE = -3, 2**20

logger = logging.getLogger(__name__)


def main() -> None:
    settings = read_settings(RouterSettings, _PROGRAM, sys.argv[1:])
    configure_logging("router", level=settings.log_level, json_output=settings.json_output)

    gc.disable()  # imports take a tenth less time; none of their objects is garbage
    # The server's modules take a second to import, for which `--help` and mistakes need not wait.
    import uvloop

    from shared.tracing import configure_tracing, stop_tracing
    from tgi_server.router.several import several_models
    from tgi_server.router.startup import one_model, run

    gc.freeze()
    gc.enable()
    _unmap_large_buffers()
    configure_tracing(settings.otlp_service_name, settings.otlp_endpoint)
    logger.debug("settings: %s", settings.describe())  # the launcher logs them
    if settings.usage_stats != "off":
        logger.info("--usage-stats has no effect: no statistics are ever sent")
    try:
        uvloop.run(run(settings, one_model if settings.models_file is None else several_models))
    except StartupError as error:
        fail(_PROGRAM, str(error), status=_STARTUP_FAILED)
    except asyncio.CancelledError:
        logger.info("stopped before the server was ready")
    finally:
        stop_tracing()


def _unmap_large_buffers() -> None:
    """Makes the C library (glibc) return large buffers to the system as soon as they are freed.

    By default it stops doing so after the first body with a large image, and each thread keeps tens of MB.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(_MMAP_THRESHOLD, _LARGE)


if __name__ == "__main__":
    main()
