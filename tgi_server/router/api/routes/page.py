"""The page at `/` for browsers. All of its files come from this server. Other clients do not get it."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.documentation import PAGE_HEADERS
from tgi_server.router.errors import NoSuchRoute

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = PAGE_HEADERS | {"Cache-Control": "no-cache"}
_FOLDER = "/static/"


class _PageFile(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def _files_below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, _PageFile]]:
    """Yields the page's files, by names such as `chat/composer.js`."""
    for entry in folder.iterdir():
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if entry.is_dir():
            yield from _files_below(entry, f"{prefix}{entry.name}/")
        elif media_type is not None:
            content = entry.read_bytes()
            yield prefix + entry.name, _PageFile(content, media_type, f'"{sha256(content).hexdigest()[:20]}"')


_FILES = dict(_files_below(files("tgi_server.router.api") / "static"))


def wants_page(headers: Mapping[str, str]) -> bool:
    """Returns True for a browser: it accepts text/html, which programs do not ask for."""
    return "text/html" in headers.get("accept", "")


def page(status: int = 200) -> Response:
    """Returns the page. status: 503 while the model loads; the page then shows the progress."""
    return _respond("index.html", status=status)


def page_while_loading(method: str, path: str, headers: Headers) -> Response | None:
    """Returns the response to a browser's request for the page or its files while the model loads; else None."""
    if method not in ("GET", "HEAD"):
        return None
    if path == "/" and wants_page(headers):
        return page(503)
    name = "favicon.svg" if path == "/favicon.ico" else path.removeprefix(_FOLDER)
    return _respond(name, headers) if name != path and name in _FILES else None


def page_routes() -> list[Route]:
    """Returns the routes of the page's files."""

    async def static(request: Request) -> Response:
        return _respond(request.path_params.get("name", "favicon.svg"), request.headers)

    return [Route(f"{_FOLDER}{{name:path}}", static), Route("/favicon.ico", static)]


def _respond(name: str, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """Returns a file, or 304 if the browser has it. Raises NoSuchRoute."""
    if name not in _FILES:
        raise NoSuchRoute(f"there is no file {name!r}")
    content, media_type, etag = _FILES[name]
    if headers is not None and headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={**_HEADERS, "ETag": etag})
    return Response(content, status, media_type=media_type, headers={**_HEADERS, "ETag": etag})
