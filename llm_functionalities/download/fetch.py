"""Fetches one file over HTTP, and resumes where an earlier attempt stopped."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential
from tqdm import tqdm

from llm_functionalities.download.config import ChecksumError, DownloadError, RemoteFile

ATTEMPTS = 5
LONGEST_PAUSE_SECONDS = 10.0
CONTENT_RANGE_UNSATISFIABLE = 416
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})


class _Interrupted(Exception):
    """The server or the connection failed. Another attempt may resume from here."""


def fetch(
    client: httpx2.Client, file: RemoteFile, target: Path, log: Callable[[str], None], *, allow_http: bool = False
) -> None:
    """Downloads `file` to `target`, whose folder exists, and verifies its checksum if that is known.

    A file without a checksum has to come over https://, redirects included, unless `allow_http`: over http:// anybody
    on the network path could replace it.

    An incomplete download is named `target` plus `.part`. After a failure it is kept, with the server's ETag
    (`.etag`), and the next attempt resumes from it if the server still has that version (RFC 9110, section 13.1.5), or
    if there is a checksum.

    Raises DownloadError.
    """
    if target.exists():
        return
    trusted = allow_http or file.sha256 is not None
    _check_scheme(file, file.url, trusted)

    def tell(state: RetryCallState) -> None:
        log(f"{file.path}: {state.outcome.exception() if state.outcome else ''}; trying again")

    retrying = Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(multiplier=0.5, max=LONGEST_PAUSE_SECONDS),
        retry=retry_if_exception_type(_Interrupted),
        before_sleep=tell,
        reraise=True,
    )
    part = target.with_name(f"{target.name}.part")
    mark = target.with_name(f"{target.name}.etag")
    try:
        retrying(_attempt, client, file, part, mark, trusted)
        _verify(file, part)
    except _Interrupted as error:
        raise DownloadError(f"{file.url}: {error}; run it again to resume the download") from None
    except ChecksumError:
        part.unlink()
        raise
    finally:
        if not part.exists():
            mark.unlink(missing_ok=True)
    part.replace(target)
    mark.unlink(missing_ok=True)


def _attempt(client: httpx2.Client, file: RemoteFile, part: Path, mark: Path, trusted: bool) -> None:
    have = part.stat().st_size if part.exists() else 0
    version = mark.read_text() if mark.exists() else ""
    if have and not version and file.sha256 is None:
        have = 0  # nothing would show if the rest belongs to the same version
    headers = {"accept-encoding": "identity"}
    if have:
        headers["range"] = f"bytes={have}-"
        if version:
            headers["if-range"] = version
    try:
        with client.stream("GET", file.url, headers=headers) as response:
            for each in (*response.history, response):
                _check_scheme(file, str(each.url), trusted)
            if response.status_code == CONTENT_RANGE_UNSATISFIABLE and have:
                if response.headers.get("content-range") == f"bytes */{have}":
                    return  # it was complete already
                part.unlink()
                raise _Interrupted("the partial download does not match the file")
            _check_status(response)
            resumed = response.status_code == 206
            if resumed and not response.headers.get("content-range", "").startswith(f"bytes {have}-"):
                part.unlink()
                raise _Interrupted("the server sent a part that was not requested")
            if not resumed:
                _remember_version(response, mark)
            _receive(response, file, part, have if resumed else 0)
    except httpx2.TimeoutException:
        raise _Interrupted("the server stopped sending") from None
    except (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects) as error:
        raise DownloadError(f"{file.url}: {error}") from None
    except httpx2.TransportError as error:
        raise _Interrupted(str(error) or type(error).__name__) from None


def _check_scheme(file: RemoteFile, url: str, trusted: bool) -> None:
    """Raises DownloadError unless `url` is https://, or `trusted` allows http://."""
    if not trusted and not url.startswith("https://"):
        raise DownloadError(
            f"{file.path} has no sha256, and {url} is not encrypted: use https://, add the sha256, or pass --allow-http"
        )


def _check_status(response: httpx2.Response) -> None:
    if response.status_code in TRANSIENT:
        raise _Interrupted(f"the server responded with {response.status_code}")
    if response.status_code not in (200, 206):
        raise DownloadError(
            f"{response.url}: the server responded with {response.status_code} {response.reason_phrase}"
        )


def _remember_version(response: httpx2.Response, mark: Path) -> None:
    tag = response.headers.get("etag", "")
    if tag and not tag.startswith("W/"):
        mark.write_text(tag)
    else:
        mark.unlink(missing_ok=True)


def _receive(response: httpx2.Response, file: RemoteFile, part: Path, have: int) -> None:
    length = response.headers.get("content-length", "")
    total = have + int(length) if length.isdigit() else None
    with (
        part.open("ab" if have else "wb") as output,
        tqdm(desc=file.path, total=total, initial=have, unit="B", unit_scale=True, mininterval=_refresh()) as bar,
    ):
        for piece in response.iter_raw():  # as received: an incomplete chunk of a fixed size could be lost
            output.write(piece)
            bar.update(len(piece))
    if total is not None and part.stat().st_size != total:
        raise _Interrupted(f"received {part.stat().st_size} of {total} bytes")


def _refresh() -> float:
    """Returns the seconds between two updates of a progress bar. Without a terminal, each update is a line."""
    return 0.1 if sys.stderr.isatty() else 10.0


def _verify(file: RemoteFile, path: Path) -> None:
    if file.sha256 is None:
        return
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != file.sha256:
        raise ChecksumError(f"{file.url}: its SHA-256 is {found}, not {file.sha256}; it was deleted")
