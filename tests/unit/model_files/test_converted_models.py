"""Copies of models whose folders cannot be written to."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from tgi_server.model_files import converted_models, download
from tgi_server.model_files.errors import ModelUnavailable

WEIGHTS = {"weight": torch.arange(6.0)}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that says of itself that it cannot be written to."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "modeling.py", "pytorch_model.bin.index.json", "notes.md"):
        (folder / name).write_text('{"weight_map": {"weight": "pytorch_model.bin"}}')
    torch.save(WEIGHTS, folder / "pytorch_model.bin")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(converted_models.os, "access", lambda path, mode: False)
    return folder


def test_a_shard_finds_the_copy_by_the_name_of_the_model(model: Path) -> None:
    assert download.find_model(str(model), None) == model
    before = sorted(path.name for path in model.iterdir())
    copy = download.download_model(
        str(model), None, extension=".safetensors", auto_convert=True, trust_remote_code=False
    )
    assert download.find_model(str(model), None) == copy != model
    names = ["additional_chat_templates", "config.json", "model.safetensors", "modeling.py", "tokenizer.json"]
    assert sorted(path.name for path in copy.iterdir()) == names
    assert (copy / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert torch.equal(load_file(copy / "model.safetensors")["weight"], WEIGHTS["weight"])
    assert sorted(path.name for path in model.iterdir()) == before
    assert converted_models.convert(model) == copy


def test_a_model_that_has_changed_is_converted_anew(model: Path) -> None:
    copy = converted_models.convert(model)
    torch.save({"weight": torch.zeros(7)}, model / "pytorch_model.bin")
    assert converted_models.converted_copy(model) is None
    assert converted_models.convert(model) != copy


def test_two_processes_do_not_convert_in_one_folder_at_once(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)  # as a process holds it that converts
    with ThreadPoolExecutor() as pool:
        converted = pool.submit(converted_models.convert, tmp_path)
        with pytest.raises(TimeoutError):
            converted.result(timeout=0.2)
        (tmp_path / "model.safetensors").write_text("of the other process")
        os.close(other)
        assert converted.result() == tmp_path
    assert (tmp_path / "model.safetensors").read_text() == "of the other process"


def test_a_copy_that_another_process_made_meanwhile_is_taken(model: Path) -> None:
    copy = converted_models.copy_path("converted", model)
    with converted_models.unfinished_copy(model, copy) as whole:
        (whole / "model.safetensors").touch()
        copy.mkdir()  # by the other process
        (copy / "model.safetensors").touch()
    assert list(copy.parent.iterdir()) == [copy]


def test_of_a_conversion_that_fails_nothing_is_left(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"not tensors")
    with pytest.raises(ModelUnavailable, match="corrupt"):
        converted_models.convert(model)
    assert list((model.parent / "hub" / "converted").iterdir()) == []
    (model.parent / "file").write_text("")
    constants.HF_HUB_CACHE = str(model.parent / "file")
    with pytest.raises(ModelUnavailable, match=r"cannot be made in .*/file/converted: (Not a directory|File exists)$"):
        converted_models.convert(model)


def test_bin_files_that_were_requested_are_what_is_found(model: Path) -> None:
    assert model == download.download_model(
        str(model), None, extension=".bin", auto_convert=True, trust_remote_code=False
    )
