"""All files of a source appear, or none, beside those of others."""

import os
from pathlib import Path

import pytest

from llm_functionalities.download.config import DownloadError
from tests.unit.llm_functionalities.download.conftest import WHOLE, Model


def test_files_appear_where_they_are_wanted_and_are_not_fetched_twice(model: Model) -> None:
    assert model.fetch() is True
    assert model.content() == WHOLE
    asked = len(model.web.asked)
    assert model.fetch() is False
    assert len(model.web.asked) == asked


def test_force_replaces_the_whole_folder(model: Model) -> None:
    model.fetch()
    model.web.files["weights"] = b"new"
    model.urls[0] = [model.web.url("config.json"), "model/other.json"]
    assert model.fetch(force=True) is True
    assert model.content() == {"model/other.json": b'{"a": 1}', "model/weights.bin": b"new"}


def test_force_leaves_what_others_put_there(model: Model) -> None:
    model.fetch()
    (model.folder / "model/notes.txt").write_text("mine")
    model.web.files["weights"] = b"new"
    model.fetch(force=True)
    assert model.content() == {**WHOLE, "model/weights.bin": b"new", "model/notes.txt": b"mine"}


def test_changed_urls_are_fetched(model: Model) -> None:
    model.fetch()
    model.web.files["weights-2"] = b"second"
    model.urls[1] = [model.web.url("weights-2"), "model/weights.bin"]
    assert model.fetch() is True
    assert model.content()["model/weights.bin"] == b"second"


def test_a_model_put_there_by_hand_is_left_alone(model: Model) -> None:
    (model.folder / "model").mkdir(parents=True)
    (model.folder / "model/config.json").write_bytes(b"mine")
    (model.folder / "model/weights.bin").write_bytes(b"mine too")
    assert model.fetch() is False
    assert not model.web.asked


def test_a_missing_artefact_is_named(model: Model) -> None:
    model.options["artefacts"] = [["tokenizer", "model/tokenizer.json"]]
    with pytest.raises(DownloadError, match=r"tokenizer.*model/tokenizer\.json"):
        model.fetch()
    assert model.content() == {}


def test_a_folder_that_cannot_be_written_to_is_named_with_the_command_that_helps(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(
        DownloadError, match=rf"model: .*; run `sudo chown -R {os.getuid()}:{os.getgid()} {model.folder}`"
    ):
        model.fetch()
