"""The chat of the page at `/`, in headless Chromium."""

import ast
import asyncio
import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser import CHROMIUM, answered, choose, opened, say, set_options
from tests.image_processors import as_data_url, as_file, photograph
from tests.integration.router.conftest import Router, running_router
from tests.tiny_models import make_llama

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

expect = playwright.expect


class Scripted:
    """A real router in a thread of its own, whose model says what the test decides."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._ready, self._done = threading.Event(), asyncio.Event()
        self._router: Router
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(folder, settings)))
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self, folder: Path, settings: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        async with running_router(folder, {"step_seconds": settings.pop("step_seconds", 0.0)}, **settings) as router:
            self._router, self.url = router, router.url
            self._ready.set()
            await self._done.wait()

    def say(self, text: str) -> None:
        self._router.say(text)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(30)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Any]:
    made: list[Scripted] = []

    def make(**settings: Any) -> Scripted:
        made.append(Scripted(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def requests_of(page) -> list[dict[str, Any]]:
    """The bodies of the requests that the page is going to send."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    return sent


def test_enter_sends_and_shift_enter_breaks_the_line(page) -> None:
    sent = requests_of(page)
    set_options(page, max_tokens=6, temperature=0, seed=3)
    page.focus("#prompt")
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you")
    page.keyboard.press("Enter")
    assert answered(page)
    assert sent[0]["messages"] == [{"role": "user", "content": "Hello\nyou"}]
    assert (sent[0]["max_tokens"], sent[0]["temperature"], sent[0]["seed"]) == (6, 0, 3)
    assert page.input_value("#prompt") == ""
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_a_conversation_is_kept_over_a_reload_and_found_by_its_words(page) -> None:
    sent = requests_of(page)
    set_options(page, system="Be brief.", max_tokens=8, stop="###")
    first = page.locator(".message.assistant .markdown").first
    say(page, "How do I boil an egg?")
    say(page, "And a duck's?")
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert sent[1]["stop"] == ["###"]
    written = first.inner_text()
    page.reload()
    expect(first).to_have_text(written)
    assert page.locator(".message").count() == 4
    page.click("#new-chat")
    say(page, "How do I hang a picture?")
    assert page.locator("#conversations button").count() == 2
    page.fill("#search", "duck")
    expect(page.locator("#conversations button")).to_have_count(1)
    page.click("#conversations button")
    expect(page.locator(".message")).to_have_count(4)
    assert page.input_value("#option-system") == "Be brief."


def test_editing_and_regenerating_make_branches(page) -> None:
    set_options(page, max_tokens=4)
    say(page, "How do I boil an egg?")
    page.click(".message.assistant [data-action=again]")
    answered(page)
    expect(page.locator(".message.assistant .version")).to_have_text("2 / 2")
    page.click(".message.user [data-action=edit]")
    page.keyboard.type(" Quickly.")
    page.keyboard.press("Enter")
    answered(page)
    expect(page.locator(".message.user .text")).to_have_text("How do I boil an egg? Quickly.")
    page.click(".message.user [data-action=earlier]")
    expect(page.locator(".message.user .text")).to_have_text("How do I boil an egg?")
    expect(page.locator(".message.assistant .version")).to_have_text("2 / 2")
    page.click(".message.assistant [data-action=edit]")
    page.fill(".editor textarea", "Six minutes.")
    page.click("text=Save")
    expect(page.locator(".message.assistant .version")).to_have_text("3 / 3")
    expect(page.locator(".message.assistant .markdown")).to_have_text("Six minutes.")


def test_an_answer_that_was_cut_says_so_and_is_continued(page) -> None:
    sent = requests_of(page)
    set_options(page, max_tokens=3, temperature=0)
    begun = say(page, "How do I hang a picture?").partition("\n")[0]
    expect(page.locator(".ending")).to_contain_text("reached the limit of tokens")
    page.click(".ending button")
    answered(page)
    assert sent[1]["messages"][-1]["role"] == "assistant"
    assert sent[1]["continue_final_message"]
    assert page.inner_text(".message.assistant .markdown").startswith(begun)
    assert page.locator(".message").count() == 2


def test_stop_keeps_the_turn(browser, scripted) -> None:
    server = scripted(step_seconds=0.03)
    server.say("Rinse the rice. Then boil it. " * 30)
    with opened(browser, server.url) as page:
        sent = requests_of(page)
        page.fill("#prompt", "How do I cook rice?")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".markdown")
        page.keyboard.press("Escape")
        assert "You stopped the answer." in answered(page)
        kept = page.inner_text(".markdown")
        assert kept
        server.say("Eat it.")
        assert "Eat it." in say(page, "And then?")
        assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
        assert kept.split()[:3] == sent[1]["messages"][1]["content"].split()[:3]
        page.reload()
        expect(page.locator(".message")).to_have_count(4)


@pytest.mark.slow
def test_stop_frees_the_slot(browser, server, tmp_path) -> None:
    never_done = make_llama(tmp_path / "model", max_position_embeddings=32768, eos_token_id=None)
    running = server(f"--model-id={never_done}", "--dtype=float32", "--max-total-tokens=32768").wait_until_ready()
    with opened(browser, running.url) as page:
        set_options(page, plain=True, max_tokens=32000)
        page.fill("#prompt", "Once")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".markdown")
        assert "tgi_batch_current_size 1.0" in httpx.get(f"{running.url}/metrics").text
        page.click("#send[aria-label=Stop]")
        answered(page)
        running.wait_until(lambda: "tgi_batch_current_size 0.0" in httpx.get(f"{running.url}/metrics").text, 10)


def test_thoughts_are_folded_and_markdown_is_safe(browser, scripted) -> None:
    server = scripted(reasoning_parser="qwen3")
    server.say(
        "<think>\nRice, hm.\n</think>\n\n**Bold**\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        '<img src=x onerror="window.hacked=1"> ![pixel](https://example.com/p.png) [bad](javascript:alert(1))'
    )
    with opened(browser, server.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        sent = requests_of(page)
        say(page, "How do I cook rice?")
        assert page.locator(".thoughts[open]").count() == 0
        page.click(".thoughts summary")
        expect(page.locator(".thoughts .markdown")).to_have_text("Rice, hm.")
        answer = page.locator(".body > .markdown")
        expect(answer.locator("strong")).to_have_text("Bold")
        expect(answer.locator("td")).to_have_count(2)
        expect(answer.locator(".hljs-built_in")).to_have_text("print")
        answer.locator("button", has_text="Copy").click()
        assert page.evaluate("navigator.clipboard.readText()") == "print(1)"
        assert '<img src=x onerror="window.hacked=1">' in answer.inner_text()
        assert page.locator("#messages img").count() == 0
        assert answer.locator("a[href^=javascript]").count() == 0
        assert page.evaluate("window.hacked") is None
        say(page, "Again?")
        assert sent[1]["messages"][1]["reasoning_content"].strip() == "Rice, hm."


def test_tool_calls_are_shown_and_get_results(browser, scripted) -> None:
    server = scripted()
    server.say('{"name": "get_weather", "arguments": {"city": "Paris"}}')
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    with opened(browser, server.url) as page:
        sent = requests_of(page)
        set_options(page, tools=json.dumps([tool]))
        expect(page.locator("#active-options")).to_have_text("tools")
        say(page, "How is the weather in Paris?")
        expect(page.locator(".call summary")).to_have_text("Calls get_weather")
        assert json.loads(page.inner_text(".call code")) == {"city": "Paris"}
        server.say("It rains.")
        page.fill(".results textarea", "rain")
        page.click(".results button")
        assert "It rains." in answered(page)
        call, result = sent[1]["messages"][1:]
        assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "rain"}
        assert page.locator(".results").count() == 0


@pytest.mark.parametrize("plain", [False, True])
def test_tokens_by_probability(page, plain) -> None:
    set_options(page, plain=plain, probabilities=True, max_tokens=6)
    say(page, "How do I hang a picture?")
    titles = page.eval_on_selector_all(".token", "tokens => tokens.map(token => token.title)")
    assert len(titles) > 1
    assert all(title.endswith("%") for title in titles)
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    detail = page.inner_text(".token-detail")
    assert page.locator(".token").nth(1).get_attribute("title") in detail
    assert "instead:" in detail
    page.locator(".token").nth(2).click()
    assert "chosen" in page.locator(".token").nth(2).get_attribute("class")
    set_options(page, probabilities=False)
    expect(page.locator(".message.assistant .markdown")).to_be_visible()


def test_drafted_tokens_are_marked(browser, demo_server) -> None:
    tokens = [{"token": text, "logprob": -0.1, "drafted": text == "b"} for text in "abc"]
    chunks = [{"choices": [{"delta": {"content": each["token"]}, "logprobs": {"content": [each]}}]} for each in tokens]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    with opened(browser, demo_server.url) as page:
        info = httpx.get(f"{demo_server.url}/info").json()
        page.route("**/info", lambda route: route.fulfill(json={**info, "speculate": 3}))
        completions = "**/v1/chat/completions"
        page.route(completions, lambda route: route.fulfill(body=body, content_type="text/event-stream"))
        page.reload()
        set_options(page, probabilities=True)
        say(page, "Hello")
        assert page.eval_on_selector_all(".token.drafted", "tokens => tokens.map(token => token.innerText)") == ["b"]
        expect(page.locator(".legend")).to_contain_text("drafted")


def test_the_request_as_code(page) -> None:
    set_options(page, top_k=5, schema='{"type": "object"}')
    page.fill("#prompt", "What is 2 + 2? Don't guess.")
    choose(page, "The request as code")
    curl = page.inner_text("#snippet")
    assert curl.startswith(f"curl {page.url.partition('#')[0].rstrip('/')}/v1/chat/completions")
    body = json.loads(shlex.split(curl.replace("\\\n", " "))[-1])
    assert body["messages"][-1]["content"] == "What is 2 + 2? Don't guess."
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    for language in ("Python", "gRPC"):
        page.select_option("#language", language)
        ast.parse(page.inner_text("#snippet"))


def test_conversations_are_exported_and_imported(page, tmp_path: Path) -> None:
    set_options(page, max_tokens=4)
    say(page, "How do I boil an egg?")
    with page.expect_download() as download:
        page.click("#export-all")
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text())
    assert [message["role"] for message in exported["conversations"][0]["messages"]] == ["user", "assistant"]
    with page.expect_download() as download:
        choose(page, "Export as Markdown")
    assert download.value.suggested_filename == "How-do-I-boil-an-egg.md"
    choose(page, "Delete")
    expect(page.locator("#conversations button")).to_have_count(0)
    page.set_input_files("#import-file", file)
    expect(page.locator("#conversations button")).to_have_text("How do I boil an egg?")
    page.click("#conversations button")
    expect(page.locator(".message")).to_have_count(2)
    exported["conversations"][0]["messages"][0]["parent"] = exported["conversations"][0]["messages"][1]["id"]
    file.write_text(json.dumps(exported))
    page.set_input_files("#import-file", file)
    expect(page.locator("#notice")).to_contain_text("damaged")


def test_a_deleted_conversation_comes_back(page) -> None:
    set_options(page, max_tokens=3)
    say(page, "Hello")
    choose(page, "Delete")
    expect(page.locator("#welcome")).to_be_visible()
    page.click("#notice button")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator("#conversations button")).to_have_count(1)


def test_an_error_is_shown_in_place_and_tried_again(browser, demo_server) -> None:
    with opened(browser, demo_server.url, failures=1) as page:
        assert "2047" in say(page, "word " * 5000)
        expect(page.locator("#messages .failure")).to_contain_text("shorten the message")
        page.click(".message.user [data-action=edit]")
        page.fill(".editor textarea", "Hello")
        page.keyboard.press("Enter")
        answered(page)
        expect(page.locator("#messages .failure")).to_have_count(0)
        set_options(page, schema="{")
        say(page, "And now?")
        expect(page.locator("#messages .failure")).to_contain_text("The JSON schema is not JSON")
        set_options(page, schema="", max_tokens=3)
        page.click("text=Try again")
        answered(page)
        expect(page.locator("#messages .failure")).to_have_count(0)


def test_a_server_with_keys_asks_for_one_and_the_tab_remembers_it(browser, scripted) -> None:
    server = scripted(api_key="s3cret")
    with opened(browser, server.url, failures=2) as page:
        say(page, "Hello")
        expect(page.locator("#messages .failure")).to_contain_text("the API key is missing or wrong")
        for key in ("wrong", "s3cret"):
            page.fill(".key input", key)
            page.press(".key input", "Enter")
            answered(page)
        expect(page.locator("#messages .failure")).to_have_count(0)
        page.reload()
        assert "Rinse" in say(page, "And now?")
        choose(page, "The request as code")
        assert "$API_KEY" in page.inner_text("#snippet")
        assert "s3cret" not in page.inner_text("#snippet")


_GIVE = """([kind, type, text]) => {
    const data = new DataTransfer();
    const bytes = Uint8Array.from(atob(text), each => each.charCodeAt(0));
    data.items.add(new File([bytes], 'photo.png', {type}));
    const event = kind === 'paste' ? new ClipboardEvent(kind, {clipboardData: data, bubbles: true, cancelable: true})
        : new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
    document.getElementById('prompt').dispatchEvent(event);
}"""


def test_images_are_dropped_pasted_and_chosen(browser, demo_server) -> None:
    sent = []

    def answer(route) -> None:
        sent.append(route.request.post_data_json)
        reply = {"choices": [{"delta": {"content": "a chair"}}]}
        route.fulfill(body=f"data: {json.dumps(reply)}\n\n", content_type="text/event-stream")

    urls = [as_data_url(photograph(90, 60, seed)) for seed in range(3)]
    with opened(browser, demo_server.url) as page:
        expect(page.locator("#welcome")).to_be_visible()
        assert page.locator(".attach").is_hidden()  # the model reads text only
        page.evaluate(_GIVE, ["drop", "image/png", urls[0].partition(",")[2]])
        expect(page.locator("#notice")).to_have_text("This model reads text only.")
        info = httpx.get(f"{demo_server.url}/info").json()
        page.route("**/info", lambda route: route.fulfill(json={**info, "reads_images": True}))
        page.route("**/v1/chat/completions", answer)
        page.route("**/generate_stream", answer)
        page.reload()
        expect(page.locator(".attach")).to_be_visible()
        page.evaluate(_GIVE, ["drop", "image/png", urls[0].partition(",")[2]])
        images = page.locator(".images img")
        expect(images).to_have_count(1)
        page.evaluate(_GIVE, ["paste", "image/png", urls[1].partition(",")[2]])
        expect(images).to_have_count(2)
        page.evaluate(_GIVE, ["drop", "text/plain", "aGVsbG8="])
        chosen = {"name": "a.png", "mimeType": "image/png", "buffer": as_file(photograph(90, 60, 2))}
        page.set_input_files("#composer [type=file]", [chosen])
        expect(images).to_have_count(3)
        page.click("button[aria-label='Remove image 2']")
        expect(images).to_have_count(2)
        choose(page, "The request as code")
        assert "data:image/png;base64,..." in page.inner_text("#snippet")
        page.keyboard.press("Escape")
        assert say(page, "What is it?") == "a chair"
        expect(images).to_have_count(0)
        content = sent[-1]["messages"][-1]["content"]
        assert [part.get("image_url", {}).get("url") for part in content] == [urls[0], urls[2], None]
        say(page, "And now?")
        assert sent[-1]["messages"][0]["content"] == content  # the conversation has them still
        expect(page.locator(".pictures img")).to_have_count(2)
        set_options(page, plain=True)
        page.evaluate(_GIVE, ["drop", "image/png", urls[1].partition(",")[2]])
        expect(images).to_have_count(1)
        say(page, "Again?")
        assert sent[-1]["inputs"] == f"![]({urls[1]})Again?"


def test_an_adapter_may_be_chosen(browser, demo_server) -> None:
    with opened(browser, demo_server.url) as page:
        expect(page.locator("#welcome")).to_be_visible()
        assert page.locator("#adapter").is_hidden()
        info = httpx.get(f"{demo_server.url}/info").json()
        adapters = [{"id": "chef", "rank": 8, "ready": True}, {"id": "diy", "rank": 4, "ready": False}]
        page.route("**/info", lambda route: route.fulfill(json={**info, "adapters": adapters}))
        done = "data: [DONE]\n\n"
        for path in ("generate_stream", "v1/chat/completions"):
            page.route(f"**/{path}", lambda route: route.fulfill(body=done, content_type="text/event-stream"))
        page.reload()
        sent = requests_of(page)
        for plain in (False, True):
            set_options(page, plain=plain)
            for chosen in ("diy", ""):
                page.select_option("#adapter", chosen)
                say(page, "Hello")
    assert [body["model"] for body in sent[:2]] == ["diy", "tgi"]
    assert [body["parameters"].get("adapter_id") for body in sent[2:]] == ["diy", None]


def test_a_model_that_another_server_had_is_not_requested(page) -> None:
    page.evaluate("localStorage.setItem('oatmill-options', JSON.stringify({adapter: 'gone', max_tokens: 3}))")
    page.reload()
    sent = requests_of(page)
    say(page, "Hello")
    assert [body["model"] for body in sent] == ["tgi"]
    assert page.locator("#messages .failure").all_inner_texts() == []


def test_models_are_chosen_and_shown_with_their_states(browser, demo_server) -> None:
    info = httpx.get(f"{demo_server.url}/info").json()
    states = {"large": "awake", "small": "asleep", "broken": "failed"}
    names = list(states)
    with opened(browser, demo_server.url, failures=1) as page:
        described = {name: {**info, "models": names, "reads_images": name == "small"} for name in names}
        page.route("**/info", lambda route: route.fulfill(json=described["large"]))
        page.route("**/info?model=*", lambda route: route.fulfill(json=described[route.request.url.partition("=")[2]]))

        def models(route) -> None:
            listed = [{"id": name, "state": state, "reason": "no memory"} for name, state in states.items()]
            route.fulfill(json={"data": listed})

        page.route("**/v1/models", models)
        waiting: list[Any] = []
        page.route("**/v1/chat/completions", lambda route: waiting.append(route))
        page.reload()
        options = page.locator("#adapter option")
        expect(options).to_have_text(["large", "small (asleep)", "broken (failed)"])
        assert options.nth(2).get_attribute("title") == "no memory"
        page.select_option("#adapter", "small")
        expect(page.locator(".attach")).to_be_hidden()
        page.fill("#prompt", "Hello")
        page.press("#prompt", "Enter")
        expect(page.locator(".waiting")).to_have_text("small is asleep, and wakes as soon as there is memory for it")
        states["small"] = "loading"
        expect(page.locator(".waiting")).to_have_text("small is loading")
        states["small"] = "awake"
        expect(page.locator(".waiting")).to_have_text("")
        expect(page.locator(".attach")).to_be_visible()
        expect(options.nth(1)).to_have_text("small")
        waiting[0].fulfill(body="data: [DONE]\n\n", content_type="text/event-stream")
        answered(page)
        page.select_option("#adapter", "broken")
        page.fill("#prompt", "Hello")
        page.press("#prompt", "Enter")
        expect(page.locator(".waiting")).to_have_text("broken has failed, and is loaded again")
        refusal = {"error": {"message": "no memory", "code": "model_unavailable"}, "error_type": "model_unavailable"}
        waiting[1].fulfill(status=503, json=refusal)
        expect(page.locator("#messages .failure")).to_contain_text("Choose another model")
        assert [each.request.post_data_json["model"] for each in waiting] == ["small", "broken"]


def test_a_model_that_generates_has_the_chat_although_the_default_model_embeds(browser, demo_server) -> None:
    info = httpx.get(f"{demo_server.url}/info").json()
    embeds = {**info, "model_pipeline_tag": "feature-extraction", "models": ["small"], "model_id": "embedder"}
    with opened(browser, demo_server.url) as page:
        page.route("**/info", lambda route: route.fulfill(json=embeds))
        page.route("**/info?model=small", lambda route: route.fulfill(json={**info, "models": ["small"]}))
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "small", "state": "awake"}]}))
        done = "data: [DONE]\n\n"
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=done, content_type="text/event-stream"))
        page.reload()
        sent = requests_of(page)
        say(page, "Hello")
        assert [body["model"] for body in sent] == ["small"]


def test_screen_readers_get_a_log_and_names(page) -> None:
    set_options(page, max_tokens=3)
    say(page, "Hello")
    assert page.get_by_role("log", name="Messages").count() == 1
    assert page.get_by_role("article", name="Assistant").get_attribute("aria-busy") == "false"
    assert page.get_by_role("textbox", name="Message", exact=True).count() == 1
    unnamed = """() => [...document.querySelectorAll('button, input, select, textarea')].filter(each => !(
        each.textContent.trim() || each.ariaLabel || each.labels?.length || each.hidden || each.type === 'file'))
        .map(each => each.outerHTML)"""
    assert page.evaluate(unnamed) == []


def test_keys_reach_everything(page) -> None:
    set_options(page, max_tokens=3)
    say(page, "How do I boil an egg?")
    page.keyboard.press("ArrowUp")
    assert page.input_value(".editor textarea") == "How do I boil an egg?"
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#welcome")).to_be_visible()
    page.keyboard.press("Control+K")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(2)
    page.focus("#conversations button")
    page.keyboard.press("Delete")
    expect(page.locator(".message")).to_have_count(0)
