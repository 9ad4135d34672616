"""`make screenshots`: pictures of the page, for the documents. Needs Chromium."""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image
from playwright.sync_api import expect, sync_playwright

from oatmill.services import is_ready, text_generation_server
from shared.addresses import free_port

FOLDER = Path(__file__).parents[1] / "docs" / "images"
_START_SECONDS, _ANSWER_SECONDS = 120, 60
_QUESTIONS = ("How do I make pear and almond muffins?", "How do I sharpen a chisel?", "How do I hang a picture?")
_COLOURS = 64


class _Picture(NamedTuple):
    """A picture of the page: the window's size in pixels, and the colour scheme."""

    width: int
    height: int
    scheme: Literal["light", "dark"]


_PICTURES = {
    "page": _Picture(1280, 800, "light"),
    "page-dark": _Picture(1280, 800, "dark"),
    "page-phone": _Picture(390, 844, "light"),
    "page-phone-dark": _Picture(390, 844, "dark"),
}


def main() -> int:
    """Returns 0, or 1 where Chromium is missing or no server starts."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("screenshots: install Chromium first, such as with apt-get install chromium", file=sys.stderr)
        return 1
    url = f"http://127.0.0.1:{(port := free_port())}"
    with tempfile.TemporaryFile("w") as log:
        server = text_generation_server(f"--port={port}", "--hostname=127.0.0.1", "--prometheus-port=0", output=log)
        try:
            end = time.monotonic() + _START_SECONDS
            while not is_ready(url):
                if server.exit_code() is not None or time.monotonic() > end:
                    print("screenshots: the demo model could not be served", file=sys.stderr)
                    return 1
                time.sleep(0.2)
            for name in _PICTURES:
                _take(chromium, url, name)
        finally:
            server.stop()
    return 0


def _take(chromium: str, url: str, name: str) -> None:
    width, height, scheme = _PICTURES[name]
    file = FOLDER / f"{name}.png"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(url)
        page.click("[data-opens=options-dialog]")
        page.fill("#option-temperature", "0")
        page.keyboard.press("Escape")
        for question in _QUESTIONS:
            page.fill("#prompt", question)
            page.press("#prompt", "Enter")
            expect(page.locator("#send")).to_have_attribute("aria-label", "Send", timeout=_ANSWER_SECONDS * 1000)
        page.mouse.move(width / 2, height / 2)
        page.screenshot(path=file)
        browser.close()
    Image.open(file).convert("RGB").quantize(_COLOURS).save(file, optimize=True)
    print(file)


if __name__ == "__main__":
    sys.exit(main())
