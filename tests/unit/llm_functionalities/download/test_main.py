"""The command on a command line."""

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.llm_functionalities.download.conftest import WHOLE, Model

BASE = 'name = "test"\nbase_path = "models"\n'


def test_the_command(model: Model, tmp_path: Path) -> None:
    sources = [
        {"id": "model", "urls": model.urls, "enabled": True},
        {"id": "off", "urls": [[model.web.url("absent"), "off"]], "enabled": False},
    ]
    config = tmp_path / "downloads.toml"
    lines = [BASE.replace("models", str(model.folder))]
    for source in sources:
        lines.append(f"[[sources]]\nid = {json.dumps(source['id'])}\nenabled = {json.dumps(source['enabled'])}")
        lines.append(f"urls = {json.dumps(source['urls'])}")
    config.write_text("\n".join(lines))

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "llm_functionalities.download", "--config", str(config), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stderr

    status, said = run()
    assert status == 1
    assert "--allow-http" in said
    status, said = run("--allow-http")
    assert status == 0
    assert "model: fetched" in said
    assert "weights.bin: 100%" in said
    assert model.content() == WHOLE
    assert "model: already" in run()[1]
    assert run("off", "--allow-http")[0] == 1
    status, said = run("nobody")
    assert status == 2
    assert said.count("\n") == 1
