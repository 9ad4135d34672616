"""`oatmill serve`: a model over HTTP, and with --grpc-port the gRPC service beside it, in the foreground."""

import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from oatmill.clients import local_url, variables
from oatmill.services import first_to_end, interrupt_on_signals, llm_functionalities, text_generation_server
from shared.settings import fail, help_groups
from tgi_server.launcher.cli import launcher_settings
from tgi_server.launcher.cli import main as launch
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.machine import check_port
from tgi_server.launcher.settings import LauncherSettings

HTTP_PORT: Final = "8080"
_GRPC_FLAG: Final = "--grpc-port"
_PROGRAM: Final = "oatmill serve"
_USAGE: Final = """\
usage: oatmill serve [MODEL ...] [--grpc-port PORT] [--FLAG VALUE ...]

MODEL is a folder, a GGUF file, or an id of the hub; default: the bundled demo model. Several models
may have names: NAME=MODEL. FILE.toml is a table of models. --grpc-port also starts
llm-functionalities on that port. All other flags are those of text-generation-launcher.
"""


def main(arguments: Sequence[str]) -> int:
    """Serves until a stop signal. Returns the exit code: 0 stopped, 1 failed or ended by itself, 2 wrong usage."""
    if {"-h", "--help"} & set(arguments):
        print(_help(), end="")
        return 0
    flags, grpc_port = _launcher_flags(arguments)
    if grpc_port is not None:
        return _serve_both(flags, grpc_port)
    launch(_PROGRAM, flags, _show_clients)
    return 0


def _help() -> str:
    """Returns the launcher's help, below the usage of this command."""
    from shared.help import help_text  # only then

    text = help_text(LauncherSettings, _PROGRAM, *help_groups(LauncherSettings))
    return _USAGE + text.removeprefix(text.splitlines()[0] + "\n")


def _show_clients(settings: LauncherSettings) -> None:
    """Prints how to point clients at the server, unless the output is for programs."""
    if not settings.json_output and (lines := variables(settings)):
        print(lines, flush=True)


def _launcher_flags(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """Returns the launcher's flags, and the port of the gRPC service; None without `--grpc-port`."""
    flags, grpc_port = list(arguments), None
    models = list(takewhile(lambda argument: not argument.startswith("-"), flags))
    if models:
        several = len(models) > 1 or models[0].endswith(".toml")
        flags[: len(models)] = [f"--models={','.join(models)}" if several else f"--model-id={models[0]}"]
    for place, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        if name == _GRPC_FLAG:
            value = value or "".join(flags[place + 1 : place + 2])
            del flags[place : place + (1 if "=" in flag else 2)]
            if not (value.isascii() and value.isdigit() and 0 < int(value) < 65536):
                fail(_PROGRAM, f"{_GRPC_FLAG} is {value!r}, which is not a port (1 to 65535)")
            grpc_port = int(value)
            break
    return [
        *([] if _value(flags, "--port", "-p") or os.environ.get("PORT") else ["--port", HTTP_PORT]),
        *flags,
    ], grpc_port


def _value(flags: Sequence[str], *names: str) -> str | None:
    """Returns the value of a flag; None if it is missing."""
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in names:
            return value if equals else "".join(flags[place + 1 : place + 2])
    return None


def shared_flags(settings: LauncherSettings) -> list[str]:
    """Returns flags of the gRPC service for the settings that it shares with the launcher."""
    host = settings.hostname
    flags = [f"--listen-address=[{host}]" if ":" in host else f"--listen-address={host}"]
    for name in ("log_level", "max_connections", "otlp_endpoint"):
        if (value := getattr(settings, name)) is not None:
            flags.append(f"--{name.replace('_', '-')}={value}")
    return [*flags, *(["--json-output"] if settings.json_output else [])]


def _check_grpc_port(settings: LauncherSettings, grpc_port: int) -> None:
    """Raises SystemExit(2) for a port that HTTP or metrics have, and SystemExit(1) for one that is in use."""
    for flag, port in (("--port", settings.port), ("--prometheus-port", settings.prometheus_port)):
        if port == grpc_port:
            fail(_PROGRAM, f"{flag} and {_GRPC_FLAG} are both {port}")
    try:
        check_port(settings.hostname, grpc_port, _GRPC_FLAG)
    except CannotStartError as error:
        fail(_PROGRAM, str(error), status=error.status)


def _serve_both(flags: Sequence[str], grpc_port: int) -> int:
    settings = launcher_settings(_PROGRAM, flags)
    _check_grpc_port(settings, grpc_port)
    interrupt_on_signals()
    print(f"starting: HTTP on port {settings.port}, gRPC on port {grpc_port}; Ctrl-C stops both", flush=True)
    key = next((api_key.text for api_key in settings.api_keys), None)
    secrets = {"ENDPOINT_TOKEN": key} if key and not os.environ.get("ENDPOINT_TOKEN") else {}
    services = []
    try:
        services.append(text_generation_server(*flags))
        services.append(
            llm_functionalities(grpc_port, local_url(settings), *shared_flags(settings), environment=secrets)
        )
        ended = first_to_end(services)
        print(f"{ended.name} has ended with exit code {ended.exit_code()}; stopping", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopping", flush=True)
        return 0
    finally:
        for service in reversed(services):
            service.stop()
