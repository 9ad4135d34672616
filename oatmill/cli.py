"""The command line `oatmill`."""

import signal
import sys
from importlib import import_module
from typing import Final

USAGE: Final = """\
usage: oatmill serve [MODEL ...] [--grpc-port PORT] [FLAGS]
                                                          serve a model, or several, over HTTP, on port 8080
       oatmill chat [URL]                                 chat with a server in this terminal
       oatmill explain REQUEST_ID [URL]                   explain why the prefix cache did not have a prompt
       oatmill demo                                       start both services, make calls, stop them
       oatmill doctor                                     check this machine, and say how to fix problems

MODEL is a folder, a GGUF file, or a hub id; without it, the bundled demo model is served. Several models may have names
(NAME=MODEL); the `model` of a request selects one. FLAGS are the flags of text-generation-launcher; `oatmill serve
--help` lists them.

`serve` runs text-generation-launcher, and with --grpc-port also llm-functionalities. Version: oatmill --version
"""


COMMANDS: Final = ("serve", "chat", "explain", "demo", "doctor")


def main() -> None:
    """Runs a command. The exit code is that of the command; 2 if there is no such command.

    While the command is imported, Ctrl-C ends the process without a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shared.settings import fail, package_version

    given = sys.argv[1:]
    if given[:1] == ["help"] and given[1:]:
        given = [given[1], "--help"]
    match given:
        case ["-h" | "--help" | "help"]:
            print(USAGE, end="")
        case ["-V" | "--version" | "version"]:
            print(f"oatmill {package_version()}")
        case [command, *arguments] if command in COMMANDS:
            # Only what the command needs is imported.
            run = import_module(f"oatmill.{command}").main
            if command != "serve":  # serve handles Ctrl-C as soon as there is anything to stop
                signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.exit(run(arguments))
        case [command, *_]:
            fail("oatmill", f"there is no command {command!r}; there are {', '.join(COMMANDS)}")
        case _:
            print(USAGE, end="", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
