"""`downloads.toml`: which files to fetch, and where to put them."""

import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator


class DownloadError(Exception):
    """A download cannot be done. The message says why and what to do."""


class ChecksumError(DownloadError):
    """The bytes that arrived are not the requested file."""


def _inside(text: str) -> str:
    """Returns a relative path unchanged. Raises ValueError if it could lead out of its folder."""
    path = PurePosixPath(text)
    if not path.name or path.is_absolute() or ".." in path.parts or "\\" in text or "\0" in text:
        raise ValueError(f"{text!r} is not a path inside a folder; give a relative path without `..`")
    if path.parts[0].startswith(".downloads"):
        raise ValueError(f"{text!r} is reserved by the downloader; choose another name")
    return str(path)


def _folder_inside(text: str) -> str:
    return _inside(text) if text else text


RelativePath = Annotated[str, AfterValidator(_inside)]


class RemoteFile(BaseModel):
    """One file: in the TOML `[url, local file name]`, or `[url, local file name, sha256 in hexadecimal]`."""

    model_config = ConfigDict(frozen=True)

    url: str
    path: RelativePath
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="before")
    @classmethod
    def _of_list(cls, value: object) -> object:
        if not isinstance(value, list) or len(value) not in (2, 3):
            raise ValueError("give [url, local file name] or [url, local file name, sha256]")
        named = dict(zip(("url", "path", "sha256"), value, strict=False))
        if isinstance(named.get("sha256"), str):
            named["sha256"] = named["sha256"].removeprefix("sha256:").lower()
        return named

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        return url


class Source(BaseModel):
    """Files that belong together, such as those of a model: all of them appear in their folder, or none."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    urls: list[RemoteFile] = Field(min_length=1)
    artefacts: list[tuple[str, RelativePath]] = []
    base_path: Path | None = None
    local_path: Annotated[str, AfterValidator(_folder_inside)] = ""
    enabled: bool = True
    force: bool = False
    decompress: bool = True

    @model_validator(mode="after")
    def _no_two_alike(self) -> "Source":
        paths = [file.path for file in self.urls]
        if repeated := next((path for path in paths if paths.count(path) > 1), None):
            raise ValueError(f"two files have the local name {repeated!r}; choose different names")
        return self


class Downloads(BaseModel):
    """A whole `downloads.toml`. http_timeout: maximum seconds without data from a server."""

    model_config = ConfigDict(extra="forbid")

    name: str
    base_path: Path
    sources: list[Source] = []
    http_timeout: float = Field(30.0, gt=0)
    enabled: bool = True

    @model_validator(mode="after")
    def _no_two_alike(self) -> "Downloads":
        ids = [source.id for source in self.sources]
        if repeated := next((name for name in ids if ids.count(name) > 1), None):
            raise ValueError(f"two sources have the id {repeated!r}")
        return self

    def folder(self, source: Source) -> Path:
        """Returns the folder for the files of a source."""
        return (source.base_path or self.base_path) / source.local_path

    def artefact(self, name: str) -> Path:
        """Returns the path of the artefact `name`, a file or folder. Raises DownloadError if there is none."""
        for source in self.sources:
            for artefact, path in source.artefacts:
                if artefact == name:
                    return self.folder(source) / path
        raise DownloadError(f"there is no artefact {name!r} in the downloads of {self.name}")


def read_downloads(path: Path) -> Downloads:
    """Reads a `downloads.toml`. Raises DownloadError, with one line per mistake."""
    try:
        return Downloads.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DownloadError(f"there is no file {path}; name another with --config") from None
    except OSError as error:
        raise DownloadError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DownloadError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        lines = [f"{_place(detail['loc'])}: {detail['msg'].removeprefix('Value error, ')}" for detail in error.errors()]
        raise DownloadError("\n".join(f"{path}: {line.removeprefix(': ')}" for line in lines)) from None


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)
