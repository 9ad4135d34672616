"""The downloader against a web server of our own."""

import bz2
import gzip
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from llm_functionalities.download import fetch, unpack
from llm_functionalities.download.__main__ import CONFIG
from llm_functionalities.download.config import Downloads, read_downloads
from llm_functionalities.download.errors import DownloadError
from llm_functionalities.download.source import fetch_source

WEIGHTS = os.urandom(300_000)


class Web(http.server.ThreadingHTTPServer):
    """Serves `files` (path -> bytes), with ranges; `break_after` cuts each answer off after so many bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.break_after: int | None = None
        self.status = 200
        self.tags = True

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Web
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        wanted = self.headers.get("range", "")
        self.server.asked.append((self.path[1:], wanted))
        content = self.server.files.get(self.path[1:])
        if content is None or self.server.status != 200:
            self.send_error(404 if content is None else self.server.status)
            return
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if self.headers.get("if-range", tag) != tag:
            start = 0
        if start >= len(content) > 0:
            self.send_response(416)
            self.send_header("content-range", f"bytes */{len(content)}")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.server.tags:
            self.send_header("etag", tag)
        self.send_header("content-length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        self.wfile.write(body[: self.server.break_after])
        if self.server.break_after is not None and len(body) > self.server.break_after:
            self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


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
        """What a server that looks for models can see."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and ".downloads" not in path.parts
        }


WHOLE = {"model/config.json": b'{"a": 1}', "model/weights.bin": WEIGHTS}


@pytest.fixture
def model(web: Web, tmp_path: Path, client: httpx2.Client) -> Model:
    return Model(web, tmp_path, client)


def test_files_appear_where_they_are_wanted_and_are_not_fetched_twice(model: Model) -> None:
    assert model.fetch() is True
    assert model.content() == WHOLE
    asked = len(model.web.asked)
    assert model.fetch() is False
    assert len(model.web.asked) == asked


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


def tar(members: dict[str, bytes], mode: str = "w:gz", **links: str) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode=mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return output.getvalue()


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return output.getvalue()


UNPACKED = {"model/config.json": b"{}", "model/weights.bin": b"w" * 1000}
ARCHIVES = {
    "model.tar.gz": tar(UNPACKED),
    "model.tgz": tar(UNPACKED),
    "model.tar.bz2": tar(UNPACKED, "w:bz2"),
    "model.tar": tar(UNPACKED, "w:"),
    "model.zip": zipped(UNPACKED),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_are_unpacked(model: Model, name: str) -> None:
    model.web.files["archive"] = ARCHIVES[name]
    model.urls = [[model.web.url("archive"), name]]
    model.options["artefacts"] = [["weights", "model/weights.bin"]]
    assert model.fetch() is True
    assert model.content() == UNPACKED
    assert model.fetch() is False


@pytest.mark.parametrize(("name", "compress"), [("w.bin.gz", gzip.compress), ("w.bin.bz2", bz2.compress)])
def test_packed_files_are_unpacked(model: Model, name: str, compress: Callable[[bytes], bytes]) -> None:
    model.web.files["packed"] = compress(b"w")
    model.urls = [[model.web.url("packed"), name]]
    model.fetch()
    assert model.content() == {"w.bin": b"w"}


def test_an_archive_stays_one_when_it_is_not_to_be_unpacked(model: Model) -> None:
    model.web.files["archive"] = ARCHIVES["model.zip"]
    model.urls = [[model.web.url("archive"), "model.zip"]]
    model.options["decompress"] = False
    model.fetch()
    assert model.content() == {"model.zip": ARCHIVES["model.zip"]}


ESCAPES = {
    "up.tar.gz": tar({"../../escaped": b"x"}),
    "absolute.tar": tar({"/tmp/escaped": b"x"}, "w:"),  # the leading slash is dropped, and it stays inside
    "link.tar.gz": tar({}, out="../.."),
    "through.tar.gz": tar({"a": b""}, out="/etc"),
    "up.zip": zipped({"../../escaped": b"x"}),
    "windows.zip": zipped({"..\\..\\escaped": b"x"}),
    "root.zip": zipped({"/escaped": b"x"}),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_no_archive_escapes_its_folder(model: Model, name: str, tmp_path: Path) -> None:
    model.web.files["archive"] = ESCAPES[name]
    model.urls = [[model.web.url("archive"), name]]
    if name == "absolute.tar":
        model.fetch()
        assert model.content() == {"tmp/escaped": b"x"}
    else:
        with pytest.raises(DownloadError, match="outside of its folder"):
            model.fetch()
        assert model.content() == {}
    assert not [path for path in tmp_path.rglob("escaped") if not path.is_relative_to(model.folder)]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip", "a.gz", "a.bz2", "a.tar"])
@pytest.mark.parametrize(
    "content", [b"", b"no archive at all", ARCHIVES["model.tar.gz"][:60]], ids=["empty", "text", "cut"]
)
def test_a_broken_archive_is_named(model: Model, name: str, content: bytes) -> None:
    model.web.files["archive"] = content
    model.urls = [[model.web.url("archive"), name]]
    if name == "a.gz" and not content:
        return  # an empty file is an empty archive to gzip
    with pytest.raises(DownloadError, match=r"a\."):
        model.fetch()
    assert model.content() == {}


def many_members(count: int) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:") as archive:
        for number in range(count):
            archive.addfile(tarfile.TarInfo(f"m/{number}"))
    return output.getvalue()


def long_header(size: int) -> bytes:
    """A tar file that says that the name of its first member has `size` characters."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, size
    return header.tobuf(tarfile.GNU_FORMAT) + bytes(size)


def links(*members: tuple[str, str, bytes]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:gz") as archive:
        for name, target, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
        payload = tarfile.TarInfo(members[-1][0] + "/x")
        payload.size = 1
        archive.addfile(payload, io.BytesIO(b"x"))
    return output.getvalue()


ZEROS = bytes(90 << 20)
BOMBS: dict[str, Callable[[], bytes]] = {
    "zeros.gz": lambda: gzip.compress(ZEROS, 1),
    "zeros.bz2": lambda: bz2.compress(ZEROS, 1),
    "zeros.tar.gz": lambda: tar({"model/weights.bin": ZEROS}),
    "zeros.zip": lambda: zipped({"model/weights.bin": ZEROS}, zipfile.ZIP_DEFLATED),
    "name.tar.gz": lambda: gzip.compress(long_header(60 << 20), 1),
    "many.tar.gz": lambda: gzip.compress(many_members(101)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_archive_that_unpacks_to_far_more_than_a_model_is_refused(
    model: Model, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "MOST_MEMBERS", 100)
    model.web.files["archive"] = BOMBS[name]()
    model.urls = [[model.web.url("archive"), name]]
    with pytest.raises(DownloadError, match=r"unpacks to more than|has a header of|has more than 100 members"):
        model.fetch()
    assert model.content() == {}


LINKS = {
    "through a link": links(("a", ".", tarfile.SYMTYPE)),
    "upwards": links(("a/b", "../..", tarfile.SYMTYPE)),
    "upwards later": links(("a/b/c", "../..", tarfile.SYMTYPE), ("v", "a/b/c/../..", tarfile.SYMTYPE)),
    "hard": links(("a", "../../../etc/passwd", tarfile.LNKTYPE)),
    "device": links(("a", "", tarfile.CHRTYPE)),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_and_devices_of_an_archive_lead_nowhere(model: Model, name: str) -> None:
    model.web.files["archive"] = LINKS[name]
    model.urls = [[model.web.url("archive"), "a.tar.gz"]]
    with pytest.raises(DownloadError, match="outside of its folder"):
        model.fetch()
    assert model.content() == {}


def test_a_link_that_stays_inside_is_kept(model: Model) -> None:
    model.web.files["archive"] = tar({"model/blobs/1": b"w"}, **{"model/weights.bin": "blobs/1"})
    model.urls = [[model.web.url("archive"), "model.tar.gz"]]
    model.fetch()
    assert model.content() == {"model/blobs/1": b"w", "model/weights.bin": b"w"}


def test_what_comes_over_http_wants_a_checksum_or_a_flag(model: Model) -> None:
    model.allow_http = False
    with pytest.raises(DownloadError, match=r"config\.json would come over http://.*--allow-http"):
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
        with pytest.raises(DownloadError, match="would come over http://"):
            fetch_source(downloads.sources[0], tmp_path, client)
        assert not (tmp_path / "weights").exists()
        assert fetch_source(downloads.sources[0], tmp_path, client, allow_http=True) is True


def test_a_missing_artefact_is_named(model: Model) -> None:
    model.options["artefacts"] = [["tokenizer", "model/tokenizer.json"]]
    with pytest.raises(DownloadError, match=r"tokenizer.*model/tokenizer\.json"):
        model.fetch()
    assert model.content() == {}


BASE = 'name = "test"\nbase_path = "models"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name = ", "not TOML"),
        ('name = "test"', "base_path"),
        (BASE + "typo = 1", "typo"),
        (BASE + '[[sources]]\nid = "a"\nurls = []', "urls"),
        (BASE + '[[sources]]\nid = ""\nurls = [["http://x/a", "a"]]', "id"),
        (BASE + '[[sources]]\nid = "a"\nurls = ["http://x/a"]', "local file name"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["s3://x/a", "a"]]', "s3://x/a"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["http://x/a", "../a"]]', "inside a folder"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["http://x/a", "/etc/a"]]', "inside a folder"),
        (BASE + '[[sources]]\nid = "a"\nlocal_path = "/etc"\nurls = [["http://x/a", "a"]]', "inside a folder"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["http://x/a", "a", "123"]]', "sha256"),
        (BASE + '[[sources]]\nid = "a"\nurls = [["http://x/a", "a"], ["http://x/b", "a"]]', "'a'"),
        (BASE + 2 * '[[sources]]\nid = "a"\nurls = [["http://x/a", "a"]]\n', "id 'a'"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "downloads.toml"
    path.write_text(text)
    with pytest.raises(DownloadError, match=complaint) as failure:
        read_downloads(path)
    assert str(path) in str(failure.value)


def test_what_is_shipped_can_be_read() -> None:
    downloads = read_downloads(CONFIG)
    assert not [source for source in downloads.sources if source.enabled]
    assert downloads.artefact("smollm2").name == "smollm2"


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
