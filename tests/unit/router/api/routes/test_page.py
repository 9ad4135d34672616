"""A browser that asks for `/` gets a page that loads nothing from elsewhere."""

import posixpath
import re
from importlib.resources import files
from pathlib import Path

import httpx

from tests.fakes.router_service import RouterService

_STATIC = Path(str(files("tgi_server.router.api"))) / "static"


async def test_a_browser_gets_the_page_even_while_the_shards_are_away(router: RouterService, client: httpx.AsyncClient):
    router.shards.well = False
    response = await client.get("/", headers={"accept": "text/html,*/*"})
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in response.headers["content-security-policy"]


async def test_every_file_that_the_page_names_is_served(client: httpx.AsyncClient):
    text = (await client.get("/", headers={"accept": "text/html"})).text
    due = [name for name in re.findall(r'(?:src|href)="([^"#]+)"', text) if name.startswith("static/")]
    seen: set[str] = set()
    while due:
        name = due.pop()
        seen.add(name)
        response = await client.get(f"/{name}")
        assert (response.status_code, response.headers["x-content-type-options"]) == (200, "nosniff"), name
        if name.endswith(".js") and "/vendor/" not in name:
            imports = re.findall(r'^import (?:.* from )?"(\.[^"]+)";', response.text, re.MULTILINE)
            due += {posixpath.normpath(f"{posixpath.dirname(name)}/{each}") for each in imports} - seen
    there = {str(path.relative_to(_STATIC.parent)) for path in _STATIC.rglob("*.js")}
    assert there <= seen


async def test_a_file_that_the_browser_has_is_not_sent_again(client: httpx.AsyncClient):
    response = await client.get("/static/main.js")
    again = await client.get("/static/main.js", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == response.headers["content-security-policy"]


def test_libraries_of_others_come_with_their_licences():
    for library in (_STATIC / "vendor").glob("*.js"):
        assert (library.parent / f"{library.name.split('.')[0]}.LICENSE").stat().st_size > 1000
        assert library.name in (_STATIC / "vendor" / "README.md").read_text()


async def test_an_icon(client: httpx.AsyncClient):
    response = await client.get("/favicon.ico")
    assert (response.status_code, response.headers["content-type"]) == (200, "image/svg+xml")


async def test_a_file_that_the_page_does_not_have_is_not_found(client: httpx.AsyncClient):
    response = await client.get("/static/page.py")
    assert (response.status_code, response.json()["error"]) == (404, "there is no file 'page.py'")
