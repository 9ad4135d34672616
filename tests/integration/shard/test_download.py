"""`text-generation-server download-weights` against a stand-in for the hub."""

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from tests.gguf_models import make_gguf
from tests.hub import COMMIT, Hub, Repository, running_hub
from tests.tiny_models import make_llama

ID = "maker/tiny"
CONFIG = {"config.json": b"{}", "tokenizer.json": b'{"model": {}}'}
WEIGHTS = {"weight": torch.arange(60_000, dtype=torch.float32)}

Download = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        running.models[ID] = Repository(CONFIG | {"model.safetensors": save(WEIGHTS)})
        yield running


@pytest.fixture
def download(hub: Hub, tmp_path: Path) -> Download:
    """Runs the command; keywords are environment variables."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tgi_server.shard.cli", "download-weights", *arguments],
            env={"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url} | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def pickled(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def folder_of(result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


def complaint_of(result: subprocess.CompletedProcess[str]) -> str:
    """The one line on standard error that tells what is wrong."""
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("text-generation-server"))
    return line


def test_a_download_fetches_a_model_and_shows_progress(download: Download) -> None:
    result = download(ID)
    folder = folder_of(result)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], WEIGHTS["weight"])
    assert "100%" in result.stderr


def test_files_that_are_there_are_not_fetched_again(download: Download, hub: Hub) -> None:
    first = folder_of(download(ID))
    hub.requests.clear()
    assert folder_of(download(ID)) == first
    assert hub.fetched() == []


@pytest.mark.slow
def test_the_same_weights_in_other_formats_are_left_alone(download: Download, hub: Hub) -> None:
    others = ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors", "modeling_tiny.py", "logo.png")
    hub.models[ID].files |= dict.fromkeys(others, b"other")
    folder_of(download(ID))
    assert sorted(hub.fetched()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.slow
def test_folders_of_templates_and_of_sentence_transformers_modules_are_fetched(download: Download, hub: Hub) -> None:
    hub.models[ID].files |= {"additional_chat_templates/tool_use.jinja": b"tools", "original/params.json": b"{}"}
    hub.models[ID].files |= {"1_Pooling/config.json": b"{}", "2_Dense/model.safetensors": b"weights"}
    folder = folder_of(download(ID))
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert (folder / "1_Pooling" / "config.json").exists()
    assert (folder / "2_Dense" / "model.safetensors").exists()
    assert not (folder / "original").exists()


@pytest.mark.slow
def test_code_is_fetched_for_those_who_trust_it(download: Download, hub: Hub) -> None:
    hub.models[ID].files["modeling_tiny.py"] = b""
    assert (folder_of(download(ID, "--trust-remote-code")) / "modeling_tiny.py").exists()


def test_a_broken_connection_is_resumed_where_it_broke(download: Download, hub: Hub) -> None:
    content = save({"weight": torch.arange(5_000_000)})
    hub.models[ID].files["model.safetensors"] = content
    hub.break_after = 30_000_000
    folder = folder_of(download(ID))
    assert (folder / "model.safetensors").read_bytes() == content
    (resumed,) = hub.ranges
    assert int(resumed.removeprefix("bytes=").removesuffix("-")) > 1_000_000


@pytest.mark.slow
def test_an_earlier_download_is_found_offline(download: Download, hub: Hub) -> None:
    first = folder_of(download(ID))
    hub.requests.clear()
    assert folder_of(download(ID, HF_HUB_OFFLINE="1")) == first
    assert hub.requests == []


@pytest.mark.slow
def test_a_model_that_is_missing_offline_is_named(download: Download) -> None:
    assert f"{ID} is not complete on this machine; unset HF_HUB_OFFLINE" in complaint_of(
        download(ID, HF_HUB_OFFLINE="1")
    )


@pytest.mark.slow
def test_a_revision_is_fetched_if_the_hub_has_it(download: Download, hub: Hub) -> None:
    hub.models[ID].revisions = ("v2", COMMIT)
    assert folder_of(download(ID, "--revision", "v2")).name == COMMIT
    assert f"the hub has no {ID} at revision v3" in complaint_of(download(ID, "--revision", "v3"))


@pytest.mark.slow
def test_a_private_model_needs_its_token(download: Download, hub: Hub) -> None:
    hub.models[ID].token = "secret"
    assert "for a private model set HF_TOKEN" in complaint_of(download(ID))
    folder_of(download(ID, HF_TOKEN="secret"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("maker/gated", "maker/gated is gated: request access"),
        ("maker/absent", "the hub has no model maker/absent, and there is no such folder here"),
        ("not a name", "not a name is neither a local folder nor an id of the hub"),
        ("/absent/folder", "there is no model folder /absent/folder"),
        ("./absent", "there is no model folder absent"),
    ],
)
def test_what_cannot_be_had_is_told_in_one_line(download: Download, hub: Hub, name: str, complaint: str) -> None:
    hub.models["maker/gated"] = Repository({}, gated=True)
    assert complaint in complaint_of(download(name))


@pytest.mark.parametrize("name", [f"{ID}-GGUF:Q8_0", pytest.param(ID, marks=pytest.mark.slow)])
def test_a_hub_that_is_not_reachable_is_told_at_once(
    download: Download, free_port: Callable[[], int], name: str
) -> None:
    result = download(name, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    line = complaint_of(result)
    assert f"{name.partition(':')[0]} is not on this machine, and the hub cannot be reached" in line
    assert result.stderr == f"{line}\n"


@pytest.mark.slow
def test_bin_weights_are_converted(download: Download, hub: Hub) -> None:
    hub.models[ID].files = CONFIG | {"pytorch_model.bin": pickled(WEIGHTS), "training_args.bin": b"not for us"}
    folder = folder_of(download(ID))
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], WEIGHTS["weight"])
    assert not (folder / "training_args.bin").exists()


@pytest.mark.slow
def test_a_local_folder_is_converted_in_place(download: Download, tmp_path: Path) -> None:
    local = tmp_path / "model"
    local.mkdir()
    (local / "config.json").write_text("{}")
    (local / "pytorch_model.bin").write_bytes(b"not tensors")
    assert "pytorch_model.bin is corrupt, or holds more than tensors" in complaint_of(download(str(local)))
    (local / "pytorch_model.bin").write_bytes(pickled(WEIGHTS))
    assert folder_of(download(str(local))) == local
    assert torch.equal(load_file(local / "model.safetensors")["weight"], WEIGHTS["weight"])


def on_read_only(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command where the folder, and everything below it, cannot be written to by anybody."""
    quoted = shlex.quote(str(folder))
    mount = f"mount --bind {quoted} {quoted} && mount -o remount,bind,ro {quoted}"
    script = f"{mount} || exit 77; exec {shlex.join(command)}"
    result = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if result.returncode == 77 or result.stderr.startswith("unshare:"):
        pytest.skip(f"no folder can be made read-only here: {result.stderr.strip()}")
    return result


@pytest.mark.slow
def test_a_read_only_folder_is_converted_into_the_cache(tmp_path: Path) -> None:
    local, cache = tmp_path / "model", tmp_path / "hub"
    local.mkdir()
    (local / "config.json").write_text("{}")
    (local / "pytorch_model.bin").write_bytes(pickled(WEIGHTS))
    command = (sys.executable, "-m", "tgi_server.shard.cli", "download-weights", str(local))
    folder = folder_of(on_read_only(local, *command, HF_HUB_CACHE=str(cache)))
    assert folder.is_relative_to(cache)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in local.iterdir()) == ["config.json", "pytorch_model.bin"]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder_of(on_read_only(local, *command, HF_HUB_CACHE=str(cache))) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    line = complaint_of(on_read_only(tmp_path, *command, HF_HUB_CACHE=str(tmp_path / "absent")))
    assert f"{local} has .bin weights only, and cannot be written to" in line
    assert f"chown -R 0:0 {tmp_path}/absent" in line


@pytest.fixture
def adapter(hub: Hub, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Tensors of the adapter maker/chef; its base model is maker/base, both on the hub."""
    from transformers import AutoModelForCausalLM

    from tests.adapters import make_adapter
    from tests.tiny_models import make

    base = make("llama", tmp_path / "base")
    folder, merged = make_adapter(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "chef", r=2, target_modules=["q_proj"]
    )
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": "maker/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for path in (base, folder):
        files = {file.name: file.read_bytes() for file in path.iterdir() if file.suffix in (".json", ".safetensors")}
        hub.models[f"maker/{path.name}"] = Repository(files, revisions=("main", "v2", COMMIT))
    return dict(merged.state_dict())


@pytest.mark.slow
def test_an_adapter_is_fetched_alone_or_merged_into_its_base_model(
    download: Download, hub: Hub, adapter: dict[str, torch.Tensor]
) -> None:
    alone = folder_of(download("maker/chef", "--revision=v2"))
    assert (alone / "adapter_model.safetensors").is_file()
    assert not [request for request in hub.requests if "maker/base" in request]
    merged = load_file(folder_of(download("maker/chef", "--merge-lora")) / "model.safetensors")
    assert merged.keys() == adapter.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, adapter[name])
    hub.models["maker/chef"].files["adapter_model.bin"] = pickled(load_file(alone / "adapter_model.safetensors"))
    del hub.models["maker/chef"].files["adapter_model.safetensors"]
    assert any(folder_of(download("maker/chef", HF_HUB_CACHE=f"{alone}-other")).glob("adapter_model.bin"))


@pytest.mark.slow
def test_a_gguf_file_is_fetched_by_its_kind(download: Download, hub: Hub, tmp_path: Path) -> None:
    file, _ = make_gguf(make_llama(tmp_path / "tiny"), tmp_path / "files", "Q8_0")
    names = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "README.md")
    hub.models["maker/tiny-GGUF"] = Repository({name: file.read_bytes() for name in names})
    folder = folder_of(download("maker/tiny-GGUF:q8_0"))
    assert hub.fetched().count("tiny-Q8_0.gguf") == 1
    assert not {"tiny-Q4_K_M.gguf", "README.md"} & set(hub.fetched())
    assert {"config.json", "tokenizer.json", "tiny-Q8_0.gguf"} <= {path.name for path in folder.iterdir()}
    hub.requests.clear()
    assert folder_of(download("maker/tiny-GGUF:Q8_0", HF_HUB_OFFLINE="1")) == folder
    assert folder_of(download("maker/tiny-GGUF:Q8_0", HF_ENDPOINT="http://127.0.0.1:9")) == folder
    assert "maker/other is not complete on this machine; unset HF_HUB_OFFLINE" in complaint_of(
        download("maker/other:Q8_0", HF_HUB_OFFLINE="1")
    )
    assert "has several GGUF files; choose one with --gguf-file: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in complaint_of(
        download("maker/tiny-GGUF")
    )


@pytest.mark.slow
def test_an_adapter_in_a_gguf_file_is_fetched(download: Download, hub: Hub, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.adapters import make_adapter
    from tests.gguf_adapters import write_gguf_adapter

    model = make_llama(tmp_path / "tiny")
    peft, _ = make_adapter(AutoModelForCausalLM.from_pretrained(model), tmp_path / "peft", target_modules=["q_proj"])
    file = write_gguf_adapter(peft, model, tmp_path / "chef.gguf")
    hub.models["maker/chef"] = Repository({"chef.gguf": file.read_bytes(), "README.md": b"# Chef"})
    fetched = folder_of(download("maker/chef", "--no-merge-lora"))
    assert (fetched.name, fetched.read_bytes()) == ("chef.gguf", file.read_bytes())
    assert "chef.gguf is an adapter, not a model" in complaint_of(download("maker/chef", "--merge-lora"))
