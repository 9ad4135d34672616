"""`llm-functionalities`: runs the service until it is stopped."""

import asyncio
import gc
import logging
import sys

from llm_functionalities.settings import Settings
from shared.logging import configure_logging
from shared.settings import fail, read_settings
from shared.stop_signals import ignore_stop_signals, on_stop_signal

# Modules for serving are imported only after the settings are read, so that --help and errors come quickly.

PROGRAM = "llm-functionalities"
STARTUP_FAILURE = 1

logger = logging.getLogger(__name__)


def main() -> None:
    settings = read_settings(Settings, PROGRAM, sys.argv[1:])
    configure_logging("llm_functionalities", level=settings.log_level, json_output=settings.json_output)
    from llm_functionalities.errors import CannotStart
    from shared.tracing import configure_tracing, stop_tracing

    configure_tracing(settings.otlp_service_name, settings.otlp_endpoint)
    logger.info("settings: %s", settings.describe())
    try:
        asyncio.run(_serve(settings))
    except CannotStart as error:
        fail(PROGRAM, str(error), status=STARTUP_FAILURE)
    finally:
        stop_tracing()


async def _serve(settings: Settings) -> None:
    from llm_functionalities.server import Server

    asked_to_stop = asyncio.Event()
    on_stop_signal(asked_to_stop.set)
    server = Server(settings)
    port = await server.start()
    # Objects created so far live as long as the process. A garbage collection that visits them stops all threads for
    # 35 ms.
    gc.collect()
    gc.freeze()
    logger.info("listening on %s:%d", settings.listen_address, port)
    await asked_to_stop.wait()
    logger.info("stopping")
    await server.stop()
    ignore_stop_signals()
    logger.info("stopped")
