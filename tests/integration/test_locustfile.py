"""benchmarks/locustfile.py, run by Locust in an environment of its own."""

import csv
from pathlib import Path

import pytest

from tests.integration.router.foreign_clients.environments import Environment
from tests.servers import TextGenerationServer


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_every_kind_of_user_gets_replies(
    pytestconfig: pytest.Config, demo_server: TextGenerationServer, tmp_path: Path
) -> None:
    root = pytestconfig.rootpath
    environment = Environment(root / ".pytest_cache" / "client-environments" / "locust", ["locust>=2.40"])
    code, output = await environment.run(
        "locust",
        *("-f", str(root / "benchmarks" / "locustfile.py"), "--host", demo_server.url, "--headless"),
        *("-u", "3", "-r", "3", "-t", "8s", "--stop-timeout", "20", "--words", "16", "--new-tokens", "8"),
        *("--csv", str(tmp_path / "load")),
    )
    assert code == 0, output
    with (tmp_path / "load_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    streams = ("/generate_stream", "/v1/chat/completions")
    kinds = {("POST", "/generate"), *(("POST", path) for path in streams), *(("first token", path) for path in streams)}
    assert set(rows) - {("", "Aggregated")} == kinds
    for kind in kinds:
        assert int(rows[kind]["Request Count"]) > 0, output
        assert int(rows[kind]["Failure Count"]) == 0, output
    for path in streams:
        assert float(rows["first token", path]["Min Response Time"]) <= float(rows["POST", path]["Max Response Time"])
