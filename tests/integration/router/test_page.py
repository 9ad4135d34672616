"""The page at `/`, in headless Chromium: what fits the server's models and state. The chat has tests of its own."""

import re

import httpx
import pytest

from tests.browser import CHROMIUM, choose, opened, say
from tests.integration.router.conftest import shard_process
from tests.timing import until
from tests.tiny_encoders import make_embedder, make_ranker
from tgi_server.loading import READING, write_progress

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NOT_SO_QUICK = [(360, "dark"), (768, "light"), (768, "dark"), (1440, "light")]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
expect = playwright.expect


def test_limits_and_load_are_shown(page) -> None:
    choose(page, "Load and limits")
    expect(page.locator("#limits")).to_contain_text("2,048")
    expect(page.locator("#queue polyline").first).to_have_attribute("points", re.compile(" "))
    assert page.inner_text("#queue-now").endswith("running")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (360, "light"),
        (1440, "dark"),
        *(pytest.param(width, scheme, marks=pytest.mark.slow) for width, scheme in NOT_SO_QUICK),
    ],
)
def test_the_page_fits_narrow_and_wide_light_and_dark(browser, demo_server, width, scheme) -> None:
    size = {"width": width, "height": 800}
    with opened(browser, demo_server.url, viewport=size, color_scheme=scheme) as page:
        for question in ("How do I boil an egg?", "How do I hang a picture?", "How do I sharpen a chisel?"):
            say(page, question)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        expect(page.locator(".message.assistant").last).to_be_in_viewport(ratio=0.5)
        expect(page.locator("#prompt")).to_be_in_viewport(ratio=1)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")) / 3
        assert (lightness > 128) == (scheme == "light")


def test_a_theme_that_was_chosen_stays(page) -> None:
    choose(page, "Keyboard and theme")
    page.select_option("#theme", "dark")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"


def test_on_narrow_screens_the_conversations_cover_the_chat(browser, demo_server) -> None:
    with opened(browser, demo_server.url, viewport={"width": 390, "height": 844}) as page:
        expect(page.locator("#sidebar")).to_be_hidden()
        page.click("#toggle-sidebar")
        expect(page.locator("#new-chat")).to_be_visible()
        assert page.evaluate("document.getElementById('page').inert")
        page.keyboard.press("Escape")
        expect(page.locator("#sidebar")).to_be_hidden()


def test_while_the_model_loads_the_page_shows_how_far_it_is(browser, start, flags, tmp_path) -> None:
    url, arguments = flags
    path = tmp_path / "shard-0"
    process = start(*arguments, f"--master-shard-uds-path={path}")

    def listens() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=5).status_code == 503
        except httpx.TransportError:
            return False

    until(listens)
    write_progress(path, 40, READING)
    browsers = {"Accept": "text/html,*/*;q=0.8"}
    while_loading = httpx.get(url, headers=browsers)
    assert (while_loading.status_code, while_loading.headers["retry-after"]) == (503, "5")
    assert while_loading.headers["content-type"].startswith("text/html")
    assert httpx.get(f"{url}/static/chat/composer.js").status_code == 200
    assert httpx.get(f"{url}/static/nothing.js", headers=browsers).headers["content-type"] == "application/json"
    with opened(browser, url, failures=200) as page:
        expect(page.locator("#loading-title")).to_have_text("The model is loading")
        expect(page.locator("#loading-detail")).to_have_text("40 %: reading weights")
        assert page.locator("[data-opens=options-dialog]").is_hidden()
        with shard_process(path):
            process.until_ready(url)
            expect(page.locator("#prompt")).to_be_visible(timeout=20_000)
            expect(page.locator("#loading")).to_be_hidden()


@pytest.mark.slow
def test_models_that_embed_and_rank_get_forms_that_fit(browser, server, tmp_path) -> None:
    embedder, ranker = make_embedder("bert", tmp_path / "embedder"), make_ranker("bert", tmp_path / "ranker")
    labels = make_ranker("bert", tmp_path / "labels", labels=2)
    url = server(f"--model-id={embedder}", f"--rerank-model-id={ranker}").wait_until_ready().url
    with opened(browser, url, failures=1) as page:
        expect(page.locator("#sidebar")).to_be_hidden()
        assert page.locator("#chat").is_hidden()
        for index, text in enumerate(("a quick dog", "a quick dog", "an old oak")):
            page.locator("#similarity textarea").nth(index).fill(text)
        page.press("#similarity textarea >> nth=0", "Enter")
        expect(page.locator("#similarity .scores li")).to_have_count(3)
        assert page.inner_text("#similarity .scores li >> nth=0").split() == ["Texts", "1", "and", "2", "1.000"]
        page.fill("#similarity textarea >> nth=0", "dog " * 3000)
        page.click("#similarity [type=submit]")
        expect(page.locator("#similarity .failure")).to_be_visible()
        page.click("role=tab[name=Ranking]")
        assert page.locator("#similarity").is_hidden()
        page.click("#ranking [type=submit]")
        expect(page.locator("#ranking .scores li")).to_have_count(3)
    url = server(f"--rerank-model-id={labels}").wait_until_ready().url
    with opened(browser, url) as page:
        page.click("#labels [type=submit]")
        expect(page.locator("#labels .scores li")).to_have_count(2)


@pytest.mark.slow
def test_the_description_of_the_api_runs_its_examples(browser, demo_server) -> None:
    with opened(browser, demo_server.url) as page:
        page.goto(f"{demo_server.url}/docs")
        page.locator(".opblock-summary-path", has_text="/v1/chat/completions").first.click(timeout=60_000)
        page.locator(".opblock.is-open .execute").click()
        status = page.locator(".opblock.is-open .live-responses-table tbody td.response-col_status").first
        expect(status).to_contain_text("200", timeout=60_000)


def test_programs_see_no_difference(demo_server) -> None:
    for accept in ("*/*", "application/json"):
        answer = httpx.get(demo_server.url, headers={"Accept": accept})
        assert (answer.status_code, answer.content) == (200, b"")
    page = httpx.get(demo_server.url, headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{demo_server.url}/static/../app.py").status_code == 404
