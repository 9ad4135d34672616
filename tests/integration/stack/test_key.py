"""The running stack, through TGI_URL: with a key, it answers only callers who have it."""

import os

import httpx
import pytest

URL, KEY = os.environ.get("TGI_URL"), os.environ.get("TGI_API_KEY")
BODY = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (URL and KEY), reason="TGI_URL and TGI_API_KEY do not say where the stack runs"),
]


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)])
def test_key_opens_the_server(headers: dict[str, str], status: int) -> None:
    assert httpx.post(f"{URL}/generate", json=BODY, headers=headers, timeout=120).status_code == status


def test_key_is_not_asked_for_health() -> None:
    assert httpx.get(f"{URL}/health", timeout=120).status_code == 200
