"""A browser that asks for `/` gets a page that loads nothing from elsewhere."""

import re

import httpx

from tests.fakes.router_service import RouterService


async def test_a_browser_gets_the_page_even_while_the_shards_are_away(router: RouterService, client: httpx.AsyncClient):
    router.shards.well = False
    response = await client.get("/", headers={"accept": "text/html,*/*"})
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in response.headers["content-security-policy"]


async def test_every_file_that_the_page_names_is_served(client: httpx.AsyncClient):
    text = (await client.get("/", headers={"accept": "text/html"})).text
    names = re.findall(r'(?:src|href)="([^"#]+)"', text)
    files = [name for name in names if "static/" in name]
    assert files
    for name in files:
        response = await client.get(f"/{name.lstrip('/')}")
        assert response.status_code == 200
        assert response.headers["x-content-type-options"] == "nosniff"


async def test_an_icon(client: httpx.AsyncClient):
    response = await client.get("/favicon.ico")
    assert (response.status_code, response.headers["content-type"]) == (200, "image/svg+xml")


async def test_a_file_that_the_page_does_not_have_is_not_found(client: httpx.AsyncClient):
    response = await client.get("/static/page.py")
    assert (response.status_code, response.json()["error"]) == (404, "there is no file 'page.py'")
