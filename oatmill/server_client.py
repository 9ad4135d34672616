"""A client of a server, for commands: its URL, its key, and advice if it does not answer."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx2

DEFAULT_URL: Final = "http://127.0.0.1:8080"
_KEY_VARIABLES: Final = ("OATMILL_API_KEY", "OPENAI_API_KEY")
_CONNECT_SECONDS: Final = 5.0
# How the message of a server begins that loads its model, and the seconds until the next try.
_LOADING: Final = "Loading model"
_POLL_SECONDS: Final = 0.5


class NotAnswered(Exception):
    """A question was not answered; `str()` of it says why, and what to do."""


class Refused(NotAnswered):
    """The server responded with an error."""


def client_of(url: str) -> httpx2.Client:
    """Returns a client with the key that the environment has. url: the server's URL, or its port."""
    key = next((os.environ[name] for name in _KEY_VARIABLES if os.environ.get(name)), None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
    return httpx2.Client(base_url=_base_url(url), headers=headers, timeout=timeout)


def _base_url(given: str) -> str:
    """Returns the server's URL for a port, a host, or the base URL of OpenAI's clients, which ends with /v1."""
    if given.isdecimal():
        given = f"127.0.0.1:{given}"
    return (given if "://" in given else f"http://{given}").rstrip("/").removesuffix("/v1")


@contextlib.contextmanager
def opened(
    client: httpx2.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> Iterator[httpx2.Response]:
    """Yields the response to a request, once the server has loaded its model. Raises NotAnswered."""
    shown = ""
    try:
        while True:
            with client.stream(method, path, json=body) as response:
                status = response.status_code
                if status == 200:
                    yield response
                    return
                reason = refusal(status, response.read().decode(errors="replace"))
            if status != 503 or not reason.startswith(_LOADING):
                raise Refused(reason)
            if reason != shown:
                print(reason, file=sys.stderr)
                shown = reason
            time.sleep(_POLL_SECONDS)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise NotAnswered(
            f"no answer from {client.base_url}: {error}; `oatmill serve` starts a server there; "
            "the URL of another may be given"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise NotAnswered(f"{client.base_url} did not return what such a server returns; is the URL right?") from None


def refusal(status: int, body: str) -> str:
    """Returns the message of an error response, and advice."""
    try:
        error = json.loads(body)["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, LookupError, TypeError):
        message = body.strip()[:200] or "no reason given"
    hint = f"; set {_KEY_VARIABLES[0]} to a key of the server" if status in (401, 403) else ""
    return f"{message} (status {status}){hint}"
