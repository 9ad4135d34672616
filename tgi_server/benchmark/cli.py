"""The command line `text-generation-benchmark`."""

import asyncio
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shared.settings import fail, read_settings
from shared.stubs import generate_pb2 as pb
from tgi_server.benchmark.bench import Result, ShardBench
from tgi_server.benchmark.report import describe, line, table, write
from tgi_server.benchmark.settings import USUAL_SOCKET, BenchmarkSettings
from tgi_server.router.errors import RouterError, StartupError

PROGRAM = "text-generation-benchmark"
FAILED = 1
INTERRUPTED = 130


def main() -> None:
    """Exit codes: 0 everything was measured, 1 something could not be, 2 a mistake on the command line."""
    settings = read_settings(BenchmarkSettings, PROGRAM, sys.argv[1:])
    try:
        results = asyncio.run(_measure(settings, _socket(settings.sockets())))
    except (RouterError, StartupError) as error:
        fail(PROGRAM, str(error), status=FAILED)
    except OSError as error:
        fail(PROGRAM, f"{settings.output} cannot be written: {error.strerror}", status=FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    print(table(results))
    sys.exit(FAILED if any(result.error for result in results) else 0)


def _socket(sockets: Sequence[Path]) -> str:
    """Returns the only socket that exists. Raises StartupError if there is none, or several to choose from.

    Ignores sockets of killed servers, on which no process listens.
    """
    there = [path for path in sockets if path.is_socket() and (len(sockets) == 1 or _is_listening(path))]
    if len(there) == 1:
        return str(there[0])
    if there:
        raise StartupError(f"several servers run here; choose one: {' '.join(f'-m {path}' for path in there)}")
    looked_for = sockets[0] if len(sockets) == 1 else USUAL_SOCKET
    raise StartupError(
        f"there is no socket {looked_for}; start `text-generation-launcher`, or give the socket of its first shard "
        "with --master-shard-uds-path"
    )


def _is_listening(path: Path) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return True
    return False


async def _measure(settings: BenchmarkSettings, path: str) -> list[Result]:
    """Raises RouterError and StartupError, and OSError when the output cannot be written."""
    if settings.output is not None:
        settings.output.touch()  # better now than when everything has been measured
    bench = await ShardBench.connect(path, settings)
    try:
        if not settings.yes:
            _check_nobody_is_disturbed(bench.info)
        on_terminal = sys.stdin.isatty() and sys.stderr.isatty() and not settings.plain
        results = await (_on_screen(bench, settings) if on_terminal else _in_lines(bench))
    finally:
        await bench.close()
    if settings.output is not None:
        write(settings.output, bench.info, results)
    return results


def _check_nobody_is_disturbed(info: pb.InfoResponse) -> None:
    """Raises StartupError if requests are running, or a router is connected and the user declines to take its place."""
    if info.running_sequences:
        raise StartupError(
            f"{info.running_sequences} requests are running on these shards and would fail; wait, or add --yes"
        )
    if not info.run_is_open:
        return
    taken = "a router is connected to these shards, and its requests will fail meanwhile"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise StartupError(f"{taken}; add --yes to continue")
    print(f"{taken}. Continue? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise StartupError("nothing was measured")


async def _on_screen(bench: ShardBench, settings: BenchmarkSettings) -> list[Result]:
    from tgi_server.benchmark.screen import BenchmarkApp  # imports textual, which takes a moment

    screen = BenchmarkApp(bench, settings.warmups + settings.runs)
    await screen.run_async()
    return screen.results


async def _in_lines(bench: ShardBench) -> list[Result]:
    print(describe(bench.info), file=sys.stderr, flush=True)
    results: list[Result] = []
    async for result in bench.results():
        if not results or results[-1] is not result:
            results.append(result)
        if result.error or result.runs == bench.runs:
            print(line(result), file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    main()
