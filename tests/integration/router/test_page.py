"""The page at `/`, in headless Chromium."""

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.image_processors import as_data_url, as_file, photograph
from tests.tiny_models import make_llama

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]

NOT_SO_QUICK = [(360, "dark"), (768, "light"), (768, "dark"), (1440, "light")]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@contextmanager
def opened(browser, url: str) -> Iterator:
    """The page, opened; afterwards nothing must have failed, and nothing been asked of another server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    complaints, addresses = [], []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(url)
    yield page
    context.close()
    assert complaints == []
    assert [each for each in addresses if not each.startswith((url, "data:"))] == []


@pytest.fixture
def page(browser, demo_server) -> Iterator:
    with opened(browser, demo_server.url) as page:
        yield page


def answered(page) -> str:
    playwright.expect(page.locator("#generate")).to_be_enabled(timeout=60_000)
    return page.inner_text("#answer")


@pytest.mark.parametrize("mode", ["chat", "plain"])
def test_a_prompt_is_answered_token_by_token_with_probabilities(page, mode) -> None:
    page.select_option("#mode", mode)
    page.fill("#max-new-tokens", "12")
    page.click("#generate")
    assert answered(page).strip()
    titles = page.eval_on_selector_all("#answer .token", "tokens => tokens.map(token => token.title)")
    assert len(titles) > 1
    assert all(title.endswith("%") for title in titles)
    assert page.inner_text("#total").endswith("s")


def test_a_conversation_has_turns_a_system_message_and_code(page) -> None:
    sent = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
    page.fill("#max-new-tokens", "6")
    page.click("#system-field summary")
    page.fill("#system", "Be brief.")
    page.fill("#stop-sequence", "###")
    page.click("#generate")
    first = answered(page)
    page.fill("#prompt", "And a duck's?")
    page.click("#generate")
    answered(page)
    roles = ["system", "user", "assistant", "user"]
    assert [message["role"] for message in sent[1]["messages"]] == roles
    assert sent[1]["messages"][2]["content"] == first
    assert sent[1]["stop"] == ["###"]
    assert page.locator("#turns li").count() == 2
    page.click("#code summary")
    curl = page.inner_text("#snippet")
    assert curl.startswith(f"curl {page.url.rstrip('/')}/v1/chat/completions")
    command = shlex.split(curl.replace("\\\n", " "))
    assert json.loads(command[-1])["messages"][-1]["content"] == "And a duck's?"
    for language in ("Python", "gRPC"):
        page.select_option("#language", language)
        ast.parse(page.inner_text("#snippet"))
    page.click("#forget")
    assert page.locator("#turns li").count() == 0


def test_keys_walk_along_the_probabilities(page) -> None:
    page.fill("#max-new-tokens", "4")
    page.click("#generate")
    answered(page)
    page.focus("#answer")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    second = page.locator("#answer .token").nth(1)
    assert page.inner_text("#token-detail").endswith(second.get_attribute("title"))
    page.locator("#answer .token").first.click()
    assert "chosen" in page.locator("#answer .token").first.get_attribute("class")


def test_without_drafts_nothing_is_said_of_them(page) -> None:
    page.wait_for_selector("#limits dd")
    assert page.locator("#drafted-legend").is_hidden()


@pytest.mark.parametrize("mode", ["chat", pytest.param("plain", marks=pytest.mark.slow)])
def test_drafted_tokens_are_marked(browser, demo_server, mode) -> None:
    tokens = [{"token": text, "text": text, "special": False, "logprob": -0.1} for text in "abc"]
    tokens[1]["drafted"] = True
    contents = [{"delta": {"content": each["text"]}, "logprobs": {"content": [each]}} for each in tokens]
    replies = [{"choices": [each]} for each in contents] if mode == "chat" else [{"token": each} for each in tokens]
    with opened(browser, demo_server.url) as page:
        info = httpx.get(f"{demo_server.url}/info").json()
        page.route("**/info", lambda route: route.fulfill(json={**info, "speculate": 3}))
        body = "".join(f"data: {json.dumps(reply)}\n\n" for reply in replies)
        for path in ("generate_stream", "v1/chat/completions"):
            page.route(f"**/{path}", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
        page.reload()
        page.select_option("#mode", mode)
        page.click("#generate")
        assert answered(page) == "abc"
        assert page.eval_on_selector_all("#answer .drafted", "tokens => tokens.map(token => token.innerText)") == ["b"]
        assert page.locator("#drafted-legend").is_visible()


_GIVE = """([kind, type, text]) => {
    const data = new DataTransfer();
    const bytes = Uint8Array.from(atob(text), each => each.charCodeAt(0));
    data.items.add(new File([bytes], 'photo.png', {type}));
    const event = kind === 'paste' ? new ClipboardEvent(kind, {clipboardData: data, bubbles: true, cancelable: true})
        : new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
    document.getElementById('prompt').dispatchEvent(event);
}"""


@pytest.mark.slow
def test_images_are_dropped_pasted_and_chosen(browser, demo_server) -> None:
    sent = []

    def answer(route) -> None:
        sent.append(route.request.post_data_json)
        reply = {"choices": [{"delta": {"content": "a chair"}, "logprobs": {"content": [{"logprob": -0.1}]}}]}
        route.fulfill(body=f"data: {json.dumps(reply)}\n\n", content_type="text/event-stream")

    urls = [as_data_url(photograph(90, 60, seed)) for seed in range(3)]
    with opened(browser, demo_server.url) as page:
        assert page.locator("#image-field").is_hidden()  # the model reads text only
        info = httpx.get(f"{demo_server.url}/info").json()
        page.route("**/info", lambda route: route.fulfill(json={**info, "reads_images": True}))
        page.route("**/v1/chat/completions", answer)
        page.route("**/generate_stream", answer)
        page.reload()
        playwright.expect(page.locator("#image-field")).to_be_visible()
        page.evaluate(_GIVE, ["drop", "image/png", urls[0].partition(",")[2]])
        playwright.expect(page.locator("#images img")).to_have_count(1)
        page.evaluate(_GIVE, ["paste", "image/png", urls[1].partition(",")[2]])
        playwright.expect(page.locator("#images img")).to_have_count(2)
        page.evaluate(_GIVE, ["drop", "text/plain", "aGVsbG8="])
        page.set_input_files(
            "#image-file", [{"name": "a.png", "mimeType": "image/png", "buffer": as_file(photograph(90, 60, 2))}]
        )
        playwright.expect(page.locator("#images img")).to_have_count(3)
        page.click("#images button[aria-label='Remove image 2']")
        playwright.expect(page.locator("#images img")).to_have_count(2)
        page.locator("#code summary").click()
        assert '"url": "data:image/png;base64,..."' in page.inner_text("#snippet").replace('":"', '": "')
        page.click("#generate")
        assert answered(page) == "a chair"
        playwright.expect(page.locator("#images img")).to_have_count(0)
        content = sent[-1]["messages"][-1]["content"]
        assert [part.get("image_url", {}).get("url") for part in content] == [urls[0], urls[2], None]
        page.fill("#prompt", "And now?")
        page.click("#generate")
        answered(page)
        assert sent[-1]["messages"][0]["content"] == content  # the conversation has them still
        assert sent[-1]["messages"][-1]["content"] == "And now?"
        playwright.expect(page.locator("#turns img")).to_have_count(2)
        page.select_option("#mode", "plain")
        page.evaluate(_GIVE, ["drop", "image/png", urls[1].partition(",")[2]])
        playwright.expect(page.locator("#images img")).to_have_count(1)
        page.click("#generate")
        answered(page)
        assert sent[-1]["inputs"] == f"![]({urls[1]})And now?"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chat", "plain"])
def test_an_adapter_may_be_chosen(browser, demo_server, mode) -> None:
    sent = []

    def answer(route) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body="data: [DONE]\n\n", content_type="text/event-stream")

    with opened(browser, demo_server.url) as page:
        playwright.expect(page.locator("#limits dd").first).to_be_visible()
        assert page.locator("#adapter").is_hidden()
        info = httpx.get(f"{demo_server.url}/info").json()
        adapters = [{"id": "chef", "rank": 8, "ready": True}, {"id": "diy", "rank": 4, "ready": False}]
        page.route("**/info", lambda route: route.fulfill(json={**info, "adapters": adapters}))
        for path in ("generate_stream", "v1/chat/completions"):
            page.route(f"**/{path}", answer)
        page.reload()
        page.select_option("#mode", mode)
        for chosen in ("diy", ""):
            page.select_option("#adapter", chosen)
            page.click("#generate")
            answered(page)
    with_adapter, without = sent
    if mode == "chat":
        assert (with_adapter["model"], without["model"]) == ("diy", "tgi")
    else:
        assert with_adapter["parameters"]["adapter_id"] == "diy"
        assert "adapter_id" not in without["parameters"]


@pytest.mark.slow
def test_stop_frees_the_slot(browser, server, tmp_path) -> None:
    never_done = make_llama(tmp_path / "model", max_position_embeddings=32768, eos_token_id=None)
    running = server(f"--model-id={never_done}", "--dtype=float32", "--max-total-tokens=32768").wait_until_ready()
    with opened(browser, running.url) as page:
        page.select_option("#mode", "plain")
        page.fill("#prompt", "Once")
        page.fill("#max-new-tokens", "32000")
        page.click("#generate")
        page.wait_for_selector("#answer .token", state="attached")
        assert "tgi_batch_current_size 1.0" in httpx.get(f"{running.url}/metrics").text
        page.click("#stop")
        playwright.expect(page.locator("#generate")).to_be_enabled()
        running.wait_until(lambda: "tgi_batch_current_size 0.0" in httpx.get(f"{running.url}/metrics").text, 10)


def test_model_limits_and_load_are_shown(page) -> None:
    page.wait_for_selector("#limits dd")
    assert "2,048" in page.inner_text("#limits")
    playwright.expect(page.locator("#queue polyline").first).to_have_attribute("points", re.compile(" "))
    assert page.inner_text("#health") == "serving"
    assert page.inner_text("#queue-now").endswith("running")


def test_markup_in_prompts_and_answers_is_text(page) -> None:
    page.evaluate(
        """async () => {
            const { generate } = await import('./static/stream.js');
            window.seen = [];
            for await (const token of generate({prompt: '<img src=x onerror="window.hacked=1">', maxNewTokens: 5,
                                                temperature: 0, topP: 1})) window.seen.push(token.text);
        }"""
    )
    page.fill("#prompt", '<img src=x onerror="window.hacked=1">')
    page.fill("#max-new-tokens", "5")
    page.click("#generate")
    answered(page)
    assert page.evaluate("window.seen.length") > 0
    assert page.evaluate("window.hacked") is None
    assert page.eval_on_selector_all("#answer img", "images => images.length") == 0


def test_the_page_tells_what_is_wrong(browser, demo_server) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(demo_server.url)
    page.fill("#prompt", "word " * 5000)
    page.click("#generate")
    assert "2047" in answered(page)
    context.close()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (360, "light"),
        (1440, "dark"),
        *(pytest.param(width, scheme, marks=pytest.mark.slow) for width, scheme in NOT_SO_QUICK),
    ],
)
def test_the_page_fits_narrow_and_wide_light_and_dark(browser, demo_server, width, scheme) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(demo_server.url)
    page.wait_for_selector("#limits dd")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")) / 3
    assert (lightness > 128) == (scheme == "light")
    context.close()


@pytest.mark.slow
def test_the_description_of_the_api_runs_its_examples(browser, demo_server) -> None:
    with opened(browser, demo_server.url) as page:
        page.goto(f"{demo_server.url}/docs")
        page.locator(".opblock-summary-path", has_text="/v1/chat/completions").first.click(timeout=60_000)
        page.locator(".opblock.is-open .execute").click()
        status = page.locator(".opblock.is-open .live-responses-table tbody td.response-col_status").first
        playwright.expect(status).to_contain_text("200", timeout=60_000)


def test_programs_see_no_difference(demo_server) -> None:
    for accept in ("*/*", "application/json"):
        answer = httpx.get(demo_server.url, headers={"Accept": accept})
        assert (answer.status_code, answer.content) == (200, b"")
    page = httpx.get(demo_server.url, headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{demo_server.url}/static/../app.py").status_code == 404
