"""The commands of the documents do what they say, as they stand: each page's in a network of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, to_run

_OWN_NETWORK = ("unshare", "-rn")


@pytest.fixture(scope="module", autouse=True)
def own_network() -> None:
    try:
        subprocess.run([*_OWN_NETWORK, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine lets nobody make a network of their own: {error}")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_succeed(page: Path) -> None:
    command = [*_OWN_NETWORK, sys.executable, "-m", "tests.documents", str(page)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
