"""A model on a web server, to be fetched."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from llm_functionalities.download import fetch
from llm_functionalities.download.config import Downloads
from llm_functionalities.download.source import fetch_source
from tests.fakes.web_server import Web

WEIGHTS = os.urandom(300_000)


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield web
        web.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "LONGEST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=2) as client:
        yield client


class Model:
    """A source of two files, in a folder of their own."""

    def __init__(self, web: Web, folder: Path, client: httpx2.Client) -> None:
        self.web = web
        self.folder = folder / "models"
        self.client = client
        web.files |= {"config.json": b'{"a": 1}', "weights": WEIGHTS}
        self.urls = [[web.url("config.json"), "model/config.json"], [web.url("weights"), "model/weights.bin"]]
        self.options: dict[str, Any] = {}
        self.log: list[str] = []
        self.allow_http = True

    def fetch(self, force: bool = False) -> bool:
        source = {"id": "model", "urls": self.urls, **self.options}
        downloads = Downloads.model_validate({"name": "test", "base_path": self.folder, "sources": [source]})
        (parsed,) = downloads.sources
        return fetch_source(
            parsed, downloads.folder(parsed), self.client, force=force, allow_http=self.allow_http, log=self.log.append
        )

    def content(self) -> dict[str, bytes]:
        """Returns the files that a server that looks for models can see."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and ".downloads" not in path.parts
        }


WHOLE = {"model/config.json": b'{"a": 1}', "model/weights.bin": WEIGHTS}


@pytest.fixture
def model(web: Web, tmp_path: Path, client: httpx2.Client) -> Model:
    return Model(web, tmp_path, client)
