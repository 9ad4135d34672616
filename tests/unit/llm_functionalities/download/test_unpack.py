"""Archives, honest and hostile ones."""

import bz2
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_functionalities.download import unpack
from llm_functionalities.download.config import DownloadError
from tests.unit.llm_functionalities.download.conftest import Model


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
    monkeypatch.setattr(unpack, "MAX_MEMBERS", 100)
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
    "hard, of a link": links(("a", "b", tarfile.SYMTYPE), ("b", "a", tarfile.LNKTYPE)),
    "device": links(("a", "", tarfile.CHRTYPE)),
    "pipe": links(("a", "", tarfile.FIFOTYPE)),
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


def test_a_hard_link_is_the_file_that_it_names(model: Model) -> None:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:gz") as archive:
        folder, file, link = (tarfile.TarInfo(name) for name in ("./", "./model/weights.bin", "./model/again.bin"))
        folder.type, file.size, file.mode = tarfile.DIRTYPE, 1, 0o4777
        link.type, link.linkname = tarfile.LNKTYPE, "./model/weights.bin"
        for member in (folder, file, link):
            archive.addfile(member, io.BytesIO(b"w"))
    model.web.files["archive"] = output.getvalue()
    model.urls = [[model.web.url("archive"), "model.tar.gz"]]
    model.fetch()
    assert model.content() == {"model/weights.bin": b"w", "model/again.bin": b"w"}
