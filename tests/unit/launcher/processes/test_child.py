import errno
import io
import json
import math
import os

import pytest

from tests.timing import eventually
from tgi_server.launcher.processes.child import Child, Command, ProcessLog

LINE = "2026-01-02T03:04:05.678Z INFO    shard-0: loaded"
ERROR = "2026-01-02T03:04:05.678Z ERROR   shard-0: no memory"


async def follow(name: str, output: bytes) -> ProcessLog:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.write(write_end, output)
    os.close(write_end)
    log = ProcessLog(name)
    await log.follow(read_end)
    return log


async def test_log_lines_pass_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    log = await follow("shard-0", f"{LINE}\n{ERROR}\n{LINE}\n".encode())
    assert capsys.readouterr().err == f"{LINE}\n{ERROR}\n{LINE}\n"
    assert log.last_error == "no memory"


async def test_json_lines_pass_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"level": "CRITICAL", "service": "router", "message": "lost"})
    log = await follow("router", line.encode())
    assert capsys.readouterr().err == f"{line}\n"
    assert log.last_error == "lost"


async def test_other_lines_get_a_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = await follow("shard-0", b"Killed\n\n{not json}\nout of luck \xff")
    assert caplog.messages == ["shard-0: Killed", "shard-0: {not json}", "shard-0: out of luck \ufffd"]
    assert log.last_error == "out of luck \ufffd"


@pytest.mark.parametrize(
    "line", ['{"level": "ERROR", "message": 3}', '{"level": [], "message": "lost"}', '{"a":' * 10_000]
)
async def test_json_that_is_no_log_line_is_text(line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = await follow("router", f"{line}\nafter\n".encode())
    assert caplog.messages == [f"router: {line}", "router: after"]
    assert log.last_error == "after"


async def test_a_log_that_cannot_be_written_for_a_while_is_read_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Disk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full and text == "\n":
                self.full = False
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk = Disk()
    monkeypatch.setattr("sys.stderr", disk)
    log = await follow("shard-0", f"{ERROR}\n{LINE}\n".encode())
    assert disk.getvalue().endswith(f"{LINE}\n")
    assert log.last_error == "no memory"


async def test_why_a_process_ends_is_left_to_its_exit_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = await follow("shard-0", b"Killed\nshard-0: no config.json\nshard-0: no weights\n")
    assert (caplog.messages, log.last_error) == (["shard-0: Killed"], "no config.json; no weights")
    log = await follow("router", b"text-generation-router: no port\n")
    assert (len(caplog.messages), log.last_error) == (1, "no port")


async def test_a_line_may_be_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await follow("router", b"a" * 65_000)
    assert caplog.messages == ["router: " + "a" * 65_000]


async def test_a_process_that_has_just_ended_is_stopped_as_any_other() -> None:
    """Its output is still read meanwhile, because a process that it has started holds the pipe open."""
    child = await Child.start(Command("shard-0", ["sh", "-c", "setsid sleep 0.5 & sleep 0.1; exit 3"]))
    await eventually(lambda: child.ended_at < math.inf)
    await child.stop(grace=30)
    assert child.exit_message() == "shard-0 ended with exit code 3"
