"""A model is found in a local folder or in the hub's cache, and what is missing is reported in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub import ModelInfo
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from tgi_server.model_files import download
from tgi_server.model_files.download import download_model, find_model, find_models
from tgi_server.model_files.errors import ModelUnavailable

WEIGHTS = {"weight": torch.arange(8, dtype=torch.float32)}
RESPONSE = httpx.Response(404, request=httpx.Request("GET", "http://hub"))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Hub:
    """Stands in for the hub's client: writes files into a folder, and notes what was requested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Callable[[Path], Any]] = {}
        self.error: Exception | None = None
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(self, model_id: str, **options: Any) -> str:
        self.calls.append(options)
        if self.error is not None:
            raise self.error
        (self.folder / "config.json").write_text("{}")
        for name, write in self.files.items():
            if any(Path(name).match(pattern) for pattern in options["allow_patterns"]):
                write(self.folder / name)
        return str(self.folder)

    def model_info(self, *_: Any, **__: Any) -> ModelInfo:
        return ModelInfo(id="maker/tiny", siblings=[{"rfilename": name} for name in self.files])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(download, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(download, "model_info", hub.model_info)
    return hub


def fetch(model_id: str = "maker/tiny", **options: Any) -> Path:
    usual = {"extension": ".safetensors", "auto_convert": True, "trust_remote_code": False}
    return download_model(model_id, options.pop("revision", None), **(usual | options))


def test_a_local_folder_needs_no_hub(hub: Hub, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert find_model(str(tmp_path), None) == fetch(str(tmp_path)) == tmp_path
    assert hub.calls == []


def test_a_shard_looks_into_the_cache_and_never_at_the_network(hub: Hub):
    assert find_model("maker/tiny", "v2") == hub.folder
    (call,) = hub.calls
    assert (call["local_files_only"], call["revision"]) == (True, "v2")


@pytest.mark.parametrize("trusted", [False, True])
def test_code_is_fetched_only_if_it_is_trusted(hub: Hub, trusted: bool):
    hub.files = {"model.safetensors": lambda path: save_file(WEIGHTS, path), "modeling_tiny.py": Path.touch}
    folder = fetch(trust_remote_code=trusted)
    assert (folder / "modeling_tiny.py").exists() == trusted
    assert not hub.calls[0]["local_files_only"]


def test_bin_weights_are_fetched_and_converted_where_there_are_no_others(hub: Hub):
    hub.files = {"pytorch_model.bin": lambda path: torch.save(WEIGHTS, path)}
    folder = fetch()
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], WEIGHTS["weight"])
    assert len(hub.calls) == 2


def test_bin_weights_are_not_converted_against_the_users_wish(hub: Hub):
    hub.files = {"pytorch_model.bin": lambda path: torch.save(WEIGHTS, path)}
    with pytest.raises(ModelUnavailable, match=r"^maker/tiny has no \*\.safetensors files"):
        fetch(auto_convert=False)
    assert fetch(extension=".bin", auto_convert=False) == hub.folder


def medusa(folder: Path, base: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "base_model_name_or_path": base}))
    torch.save({"0.0.linear.bias": torch.ones(3)}, folder / "medusa_lm_head.pt")
    return str(folder)


def test_medusa_heads_stand_for_the_model_that_they_were_made_for(hub: Hub, tmp_path: Path):
    hub.files = {"model.safetensors": lambda path: save_file(WEIGHTS, path)}
    heads = medusa(tmp_path / "heads", "maker/tiny")
    assert fetch(heads) == hub.folder
    assert (tmp_path / "heads" / "medusa_lm_head.safetensors").is_file()
    assert find_models(heads, None, None, trust_remote_code=False) == (hub.folder, tmp_path / "heads")
    with pytest.raises(ModelUnavailable, match="heads has Medusa heads, which draft; leave out --speculative-model"):
        find_models(heads, None, "maker/tiny", trust_remote_code=False)
    nameless = medusa(tmp_path / "nameless", None)
    with pytest.raises(ModelUnavailable, match=r"its config\.json must name their base_model_name_or_path"):
        fetch(nameless)


def test_a_draft_model_is_found_beside_the_model(hub: Hub, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert find_models(str(tmp_path), None, None, trust_remote_code=False) == (tmp_path, None)
    assert find_models(str(tmp_path), "v2", "maker/tiny", trust_remote_code=False) == (tmp_path, hub.folder)
    assert hub.calls[-1]["revision"] is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HFValidationError("bad"), "maker/tiny is neither a local folder nor an id of the hub"),
        (GatedRepoError("no", response=RESPONSE), "maker/tiny is gated: request access"),
        (RevisionNotFoundError("no", response=RESPONSE), "the hub has no maker/tiny"),
        (RepositoryNotFoundError("no", response=RESPONSE), "for a private model set HF_TOKEN"),
        (caused(LocalEntryNotFoundError("no"), OfflineModeIsEnabled("off")), "unset HF_HUB_OFFLINE"),
        (LocalEntryNotFoundError("no"), "run `text-generation-server download-weights` first"),
        (caused(LocalEntryNotFoundError("no"), OSError("no route\nto host")), "cannot be reached: no route"),
        (json.JSONDecodeError("no", "<html>", 0), "does not answer like the hub; check HF_ENDPOINT"),
        (KeyError("id"), "does not answer like the hub"),
        (OSError("the disk is full\nat byte 7"), "maker/tiny could not be fetched: the disk is full"),
    ],
)
def test_whatever_the_hub_refuses_is_reported_in_one_line(hub: Hub, error: Exception, message: str):
    hub.error = error
    with pytest.raises(ModelUnavailable) as refusal:
        fetch()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_revision_is_part_of_the_message(hub: Hub):
    hub.error = RevisionNotFoundError("no", response=RESPONSE)
    with pytest.raises(ModelUnavailable, match="the hub has no maker/tiny at revision v3"):
        fetch(revision="v3")


@pytest.mark.parametrize("name", ["/absent/folder", "./absent", "a/b/c"])
def test_a_path_is_not_looked_up_at_the_hub(hub: Hub, name: str):
    with pytest.raises(ModelUnavailable, match="there is no model folder"):
        find_model(name, None)
    assert hub.calls == []


def test_a_folder_that_is_no_model_is_distinguished_from_a_file(hub: Hub, tmp_path: Path):
    with pytest.raises(ModelUnavailable, match=r"has no config\.json"):
        find_model(str(tmp_path), None)
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelUnavailable, match="is a file; give the folder"):
        find_model(str(file), None)
