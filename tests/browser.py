"""Headless Chromium for tests of the page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
_ANSWER_MS = 60_000


@contextmanager
def opened(browser: Any, url: str, *, failures: int = 0, **context_options: Any) -> Iterator[Any]:
    """The page, opened; afterwards nothing must have failed, and nothing been asked of another server.

    failures: how many requests may fail, which Chromium reports as an error each.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context_options})
    page = context.new_page()
    complaints: list[str] = []
    addresses: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(url)
    yield page
    context.close()
    refused = [each for each in complaints if each.startswith("Failed to load resource")]
    assert len(refused) <= failures, complaints
    assert [each for each in complaints if each not in refused] == []
    assert [each for each in addresses if not each.startswith((url, "data:", "blob:"))] == []


def say(page: Any, text: str) -> str:
    """Sends a message with Enter, and returns the whole answer."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    return answered(page)


def answered(page: Any) -> str:
    """Returns the last answer when it is whole."""
    page.wait_for_selector("#send[aria-label=Send]", timeout=_ANSWER_MS)
    text: str = page.inner_text(".message.assistant >> nth=-1 >> .body")
    return text


def set_options(page: Any, **options: Any) -> None:
    """Sets options of the conversation in their dialog."""
    page.click("[data-opens=options-dialog]")
    for name, value in options.items():
        control = f"#option-{name}"
        if isinstance(value, bool):
            page.set_checked(control, value)
        elif name == "reasoning_effort":
            page.select_option(control, value)
        else:
            page.fill(control, str(value))
    page.keyboard.press("Escape")


def choose(page: Any, name: str) -> None:
    """Chooses an entry of the menu by its text."""
    page.click("[popovertarget=menu]")
    page.click(f"#menu >> text={name}")
