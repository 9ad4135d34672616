"""Log lines: one event is one line, whatever a client has put into it."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from shared.logging import LONGEST_MESSAGE, configure_logging, one_line
from tests.timing import SECONDS

FORGED = "2026-01-01T00:00:00.000Z INFO    router: all is well"
HOSTILE = f"name\n{FORGED}\r\x1b[31m\x00\u2028\x85"


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


BOTH_FORMATS = pytest.mark.parametrize("json_output", [False, True], ids=["text", "json"])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The log lines, split at everything that any program takes for the end of a line."""
    return capsys.readouterr().err.splitlines()


def message(line: str, *, json_output: bool) -> str:
    return str(json.loads(line)["message"]) if json_output else line


@pytest.mark.parametrize(
    ("service", "level", "shown"),
    [
        ("router", "warn", "warning"),
        ("router", "trace", "debug info warning"),
        ("router", "off", ""),
        ("router", "info,text_generation_router=debug", "debug info warning"),
        ("launcher", "info,text_generation_router=debug", "info warning"),
        ("shard-0", "error,text_generation_server=warn", "warning"),
        ("router", "text_generation_launcher=debug", "info warning"),
        ("router", "debug,test=info", "info warning"),
        ("llm_functionalities", "error,llm_functionalities=debug", "debug info warning"),
    ],
)
def test_severities_by_process(service: str, level: str, shown: str, capsys: pytest.CaptureFixture[str]):
    configure_logging(service, level=level)
    log = logging.getLogger("test")
    for severity in (logging.DEBUG, logging.INFO, logging.WARNING):
        log.log(severity, logging.getLevelName(severity).lower())
    log.setLevel(logging.NOTSET)
    assert [line.rsplit(" ", 1)[1] for line in lines(capsys)] == shown.split()


@BOTH_FORMATS
def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str], json_output: bool):
    configure_logging("router", json_output=json_output)
    logging.getLogger("test").info("refused: %s", HOSTILE, extra={"reason": HOSTILE})
    (line,) = lines(capsys)
    assert line.isprintable()
    said = message(line, json_output=json_output)
    assert said.isprintable()
    assert "name\\n2026" in said


@BOTH_FORMATS
def test_lines_are_bounded(capsys: pytest.CaptureFixture[str], json_output: bool):
    configure_logging("router", json_output=json_output)
    logging.getLogger("test").info("refused: %s", "x" * 2_000_000, extra={"reason": "y" * 2_000_000})
    (line,) = lines(capsys)
    assert len(line) < 2 * LONGEST_MESSAGE
    assert "more characters" in message(line, json_output=json_output)


def test_an_exception_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]):
    configure_logging("router")
    try:
        raise ValueError(f"bad\n{FORGED}\r{FORGED}" + "z" * 2_000_000)
    except ValueError:
        logging.getLogger("test").exception("it failed")
    head, *traceback = lines(capsys)
    assert head.endswith("it failed")
    assert all(line.startswith("  ") for line in traceback)
    assert any("ValueError: bad" in line for line in traceback)
    assert sum(map(len, traceback)) < 40_000


def test_numbers_stay_numbers_in_json(capsys: pytest.CaptureFixture[str]):
    configure_logging("router", json_output=True)
    logging.getLogger("test").info("answered", extra={"tokens": 3, "seconds": 0.5})
    entry: dict[str, Any] = json.loads(lines(capsys)[0])
    assert (entry["tokens"], entry["seconds"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("plain text, even é and 你", 100, "plain text, even é and 你"),
        ("a\nb\ud800", 100, "a\\nb\\ud800"),
        ("abcdef", 4, "abcd... (2 more characters)"),
    ],
)
def test_one_line(text: str, limit: int, expected: str):
    assert one_line(text, limit) == expected


def program(source: str, stderr: IO[bytes] | int = subprocess.PIPE, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that has configured its logging."""
    source = f"import logging, os, sys\nfrom shared.logging import *\nconfigure_logging('router')\n{source}"
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=stderr, **options)


def read_until(file: IO[bytes], part: bytes) -> list[bytes]:
    read = [file.readline()]
    while read[-1] and part not in read[-1]:
        read.append(file.readline())
    return read


@pytest.mark.parametrize(
    "end", ["raise RuntimeError", pytest.param("flush_log(); os._exit(1)", marks=pytest.mark.slow)]
)
def test_a_reader_that_stands_still_does_not_stop_the_process(end: str):
    more_than_a_pipe_holds = "for _ in range(100): logging.error('x' * 1000); print('y' * 1000, file=sys.stderr)\n"
    with program(more_than_a_pipe_holds + end) as running:
        assert running.wait(SECONDS) == 1


def test_dropped_lines_are_counted_once_their_reader_goes_on():
    more_than_is_kept = "for number in range(12_000): logging.error('%d %s', number, 'x' * 1000)\n"
    then = "print('logged', flush=True); sys.stdin.read(); logging.error('after')"
    with program(more_than_is_kept + then, stdin=subprocess.PIPE) as running:
        assert running.stdin
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline() == b"logged\n"
        *read, notice = read_until(running.stderr, b" were dropped")
        running.stdin.close()
        after = running.stderr.read().splitlines()
    numbers = [int(line.split()[3]) for line in read]
    assert numbers == list(range(len(numbers)))
    assert f"WARNING router: {12_000 - len(numbers)} lines of the log were dropped".encode() in notice
    assert [line.split()[-1] for line in after] == [b"after"]


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("", []),
        ("raise ValueError('third')", ["ValueError: third"]),
        ("sys.exit('third')", ["third"]),
        ("flush_log(); os._exit(1)", []),
        ("if os.fork(): os.wait()\nelse: logging.error('third'); os._exit(0)", ["third"]),
    ],
)
def test_last_lines_are_written_in_order(end: str, last: list[str]):
    with program(f"logging.error('first')\nprint('second', file=sys.stderr)\n{end}") as running:
        _, errors = running.communicate(timeout=SECONDS)
    lines = [line for line in errors.decode().splitlines() if not line.startswith(("Traceback", "  "))]
    assert lines[0].endswith("ERROR   router: first")
    assert [line.rpartition("router: ")[2] for line in lines[1:]] == ["second", *last]


def test_a_disk_that_is_full_for_a_while_costs_the_lines_of_that_while(tmp_path: Path):
    log = tmp_path / "log"
    source = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
bounds = resource.getrlimit(resource.RLIMIT_FSIZE)
logging.error('first')
flush_log()
resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(2).st_size, bounds[1]))
for _ in range(3):
    logging.error('lost')
    flush_log()
resource.setrlimit(resource.RLIMIT_FSIZE, bounds)
logging.error('last')
"""
    with log.open("wb") as file, program(source, stderr=file) as running:
        assert running.wait(SECONDS) == 0
    first, last, notice = log.read_text().splitlines()
    assert (first.split()[-1], last.split()[-1]) == ("first", "last")
    assert "3 lines of the log were dropped" in notice


@pytest.mark.parametrize("order_seconds", [0.0, 0.2])
def test_lines_of_several_processes_are_put_in_order(order_seconds: float):
    """Those of another process come a little later, through a pipe."""
    program = f"""
import logging, sys, time
from shared.logging import _iso, configure_logging
configure_logging("launcher", order_seconds={order_seconds})
early = time.time()
time.sleep(0.02)
logging.info("second")
print(_iso(early), "INFO    shard-0: first", file=sys.stderr)
print('{{"timestamp": "' + _iso(early - 0.01) + '", "message": "zeroth"}}', file=sys.stderr)
time.sleep(0.5)
logging.info("last")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    words = [
        word for line in result.stderr.splitlines() for word in ("zeroth", "first", "second", "last") if word in line
    ]
    ordered = ["zeroth", "first", "second", "last"]
    assert (words == ordered) is bool(order_seconds)
    assert sorted(words) == sorted(ordered)
