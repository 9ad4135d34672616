"""A mistake on the command line is answered with one clear line and the right exit code."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FreePort, ServerFactory
from tests.hub import Repository, running_hub

USAGE, FAILED = 2, 1


def launch(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tgi_server.launcher.cli", "--hostname=127.0.0.1", "--prometheus-port=0", *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def complaint(result: subprocess.CompletedProcess[str], status: int) -> str:
    """Returns the only line that is not a log line."""
    assert result.returncode == status, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("text-generation-"))
    return line


def test_an_unknown_flag() -> None:
    line = complaint(launch("--no-such-flag=1"), USAGE)
    assert line == (
        "text-generation-launcher: unrecognized arguments: --no-such-flag=1; see text-generation-launcher --help"
    )


@pytest.mark.slow
def test_a_value_that_cannot_be() -> None:
    assert complaint(launch("--quantize=exl2"), USAGE).startswith("text-generation-launcher: --quantize (or QUANTIZE):")


@pytest.mark.slow
def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert complaint(launch(f"--model-id={tmp_path}"), FAILED).endswith(
        f"{tmp_path} has no config.json; is it a model folder in transformers format?"
    )


@pytest.mark.slow
def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert f"{tmp_path} has neither a tokenizer.json" in complaint(launch(f"--model-id={tmp_path}"), FAILED)


def test_env_tells_what_a_bug_report_needs_before_anything_can_fail(tmp_path: Path) -> None:
    result = launch("--env", f"--model-id={tmp_path}/absent")
    assert complaint(result, FAILED).endswith(f"there is no model folder {tmp_path}/absent")
    for name in ("revision: ", "system: Linux", "python: 3.", "torch: 2.", "transformers: 5.", "cpu: ", "nvidia-smi: "):
        assert f" launcher: {name}" in result.stderr


@pytest.mark.slow
def test_a_variable_env_is_not_the_flag(tmp_path: Path) -> None:
    result = launch(f"--model-id={tmp_path}/absent", ENV="production")
    assert result.returncode == FAILED
    assert "nvidia-smi" not in result.stderr


@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_and_served(server: ServerFactory, llama_folder: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.models["maker/tiny"] = Repository({file.name: file.read_bytes() for file in llama_folder.iterdir()})
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        flags = ("--model-id=maker/tiny", f"--huggingface-hub-cache={tmp_path / 'cache'}")
        running = server(*flags, environment=environment).wait_until_ready()
        assert running.generate("the quick", max_new_tokens=3, details=True)["details"]["generated_tokens"] == 3
        assert (tmp_path / "cache" / "models--maker--tiny").is_dir()
        assert running.stop() == 0
        complaint_of_absent = launch("--model-id=maker/absent", HF_ENDPOINT=hub.url)
    assert "the hub has no model maker/absent" in complaint(complaint_of_absent, FAILED)


@pytest.mark.slow
def test_a_download_can_be_interrupted(server: ServerFactory, tmp_path: Path, free_port: FreePort) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):  # takes connections, and never answers
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
        running = server("--model-id=maker/tiny", environment=environment)
        running.wait_until(lambda: "settings" in running.lines())
        running.terminate()
        assert running.wait(10) == 0


@pytest.mark.slow
def test_an_embedding_model_in_several_shards(tmp_path: Path) -> None:
    from tests.tiny_encoders import make_embedder

    folder = make_embedder("bert", tmp_path)
    line = complaint(launch(f"--embedding-model-id={folder}", "--num-shard=2"), FAILED)
    assert line.endswith("embedding and rerank models run in one shard; leave --num-shard and --num-nodes out")
