"""`make screenshots`: pictures of the page, for the documents. Needs Chromium."""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from playwright.sync_api import expect, sync_playwright

from oatmill.services import is_ready, text_generation_server
from tgi_server.launcher.machine import free_port

FOLDER = Path(__file__).parents[1] / "docs" / "images"
_START_SECONDS, _ANSWER_SECONDS = 120, 60
_PROMPT = "How do I hang a picture?"
_PICTURES: dict[str, Literal["light", "dark"]] = {"page": "light", "page-dark": "dark"}


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
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme=_PICTURES[name])
        page.goto(url)
        page.fill("#prompt", _PROMPT)
        page.click("#generate")
        expect(page.locator("#generate")).to_be_enabled(timeout=_ANSWER_SECONDS * 1000)
        page.screenshot(path=FOLDER / f"{name}.png")
        browser.close()
    print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
