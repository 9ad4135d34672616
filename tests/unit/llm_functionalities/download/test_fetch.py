"""Files that come in pieces, change on the way, or come over http://."""

import hashlib
from pathlib import Path

import httpx2
import pytest

from llm_functionalities.download import fetch
from llm_functionalities.download.config import DownloadError, Downloads
from llm_functionalities.download.source import fetch_source
from tests.unit.llm_functionalities.download.conftest import WEIGHTS, WHOLE, Model


def test_an_interrupted_download_goes_on_where_it_stopped(model: Model) -> None:
    model.web.break_after = 100_000
    assert model.fetch() is True
    assert model.content() == WHOLE
    assert [wanted for path, wanted in model.web.asked if path == "weights"] == ["", "bytes=100000-", "bytes=200000-"]


def test_another_run_goes_on_where_one_stopped(model: Model) -> None:
    model.web.break_after = 30_000
    with pytest.raises(DownloadError, match="run it again"):
        model.fetch()
    assert model.content() == {}
    model.web.break_after = None
    assert model.fetch() is True
    assert model.content() == WHOLE
    assert model.web.asked[-1] == ("weights", "bytes=150000-")


def test_what_changed_on_the_server_meanwhile_is_fetched_anew(model: Model) -> None:
    model.web.break_after = 30_000
    with pytest.raises(DownloadError):
        model.fetch()
    model.web.break_after = None
    model.web.files["weights"] = WEIGHTS[::-1]
    model.fetch()
    assert model.content()["model/weights.bin"] == WEIGHTS[::-1]


def test_without_a_mark_of_the_version_nothing_is_pieced_together(model: Model) -> None:
    model.web.tags = False
    model.web.break_after = 30_000
    with pytest.raises(DownloadError):
        model.fetch()
    model.web.break_after = None
    model.web.files["weights"] = WEIGHTS[::-1]
    model.fetch()
    assert model.content()["model/weights.bin"] == WEIGHTS[::-1]


def test_a_half_downloaded_model_is_never_seen(model: Model) -> None:
    del model.web.files["weights"]
    with pytest.raises(DownloadError, match="404"):
        model.fetch()
    assert model.content() == {}


def test_a_checksum_is_checked(model: Model) -> None:
    right = hashlib.sha256(WEIGHTS).hexdigest()
    model.urls[1].append("sha256:" + "0" * 64)
    with pytest.raises(DownloadError, match=right):
        model.fetch()
    assert model.content() == {}
    model.urls[1][2] = right.upper()
    assert model.fetch() is True
    assert model.content() == WHOLE


@pytest.mark.parametrize("status", [403, 500])
def test_a_server_that_refuses_is_named(model: Model, status: int) -> None:
    model.web.status = status
    with pytest.raises(DownloadError, match=str(status)):
        model.fetch()
    assert len(model.web.asked) == (1 if status == 403 else fetch.ATTEMPTS)


def test_what_comes_over_http_wants_a_checksum_or_a_flag(model: Model) -> None:
    model.allow_http = False
    with pytest.raises(DownloadError, match=r"config\.json has no sha256.*--allow-http"):
        model.fetch()
    assert model.web.asked == []
    for url in model.urls:
        url.append(hashlib.sha256(model.web.files[url[0].rpartition("/")[2]]).hexdigest())
    assert model.fetch() is True
    assert model.content() == WHOLE


def test_a_redirect_from_https_to_http_wants_a_checksum_too(tmp_path: Path) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.scheme == "https":
            return httpx2.Response(302, headers={"location": "http://host/weights"})
        return httpx2.Response(200, stream=httpx2.ByteStream(b"w"))

    source = {"id": "model", "urls": [["https://host/weights", "weights"]]}
    downloads = Downloads.model_validate({"name": "test", "base_path": tmp_path, "sources": [source]})
    with httpx2.Client(transport=httpx2.MockTransport(answer), follow_redirects=True) as client:
        with pytest.raises(DownloadError, match="is not encrypted"):
            fetch_source(downloads.sources[0], tmp_path, client)
        assert not (tmp_path / "weights").exists()
        assert fetch_source(downloads.sources[0], tmp_path, client, allow_http=True) is True


def test_a_redirect_that_leads_round_in_a_circle_is_named(tmp_path: Path) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(302, headers={"location": "https://host/weights"})

    source = {"id": "model", "urls": [["https://host/weights", "weights"]]}
    downloads = Downloads.model_validate({"name": "test", "base_path": tmp_path, "sources": [source]})
    with (
        httpx2.Client(transport=httpx2.MockTransport(answer), follow_redirects=True) as client,
        pytest.raises(DownloadError, match=r"^https://host/weights: Exceeded maximum allowed redirects"),
    ):
        fetch_source(downloads.sources[0], tmp_path, client)
