"""The page that a browser sees at `/`. Everything on it comes from this server; programs see no difference."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tgi_server.router.errors import NoSuchRoute

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = {
    file.name: (file.read_bytes(), _TYPES[file.name.rpartition(".")[2]])
    for file in (files("tgi_server.router.api") / "static").iterdir()
    if file.name.rpartition(".")[2] in _TYPES
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def wants_page(request: Request) -> bool:
    """Returns True if a browser asks: it names text/html, which programs do not."""
    return "text/html" in request.headers.get("accept", "")


def page() -> Response:
    return _file("index.html")


def page_routes() -> APIRouter:
    """Serves the files that the page consists of."""
    router = APIRouter()

    @router.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        return _file(name)

    @router.get("/favicon.ico", include_in_schema=False)
    async def favicon() -> Response:
        return _file("favicon.svg")

    return router


def _file(name: str) -> Response:
    if name not in _FILES:
        raise NoSuchRoute(f"there is no file {name!r}")
    content, media_type = _FILES[name]
    return Response(content, media_type=media_type, headers=_HEADERS)
