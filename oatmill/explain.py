"""`oatmill explain`: explains in plain words why the prefix cache did not have the whole prompt of a request."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from oatmill.server_client import DEFAULT_URL, NotAnswered, client_of, opened

_CAUSES: Final = {
    None: "all of it was found; the last token is always computed",
    "never_seen": "the text is new",
    "changed": "a text changed, and the known text after it had to be computed again",
    "template": "the request has the same texts, but the chat template renders them differently",
    "evicted": "it was cached, but the memory was needed for other prompts, or the model was restarted",
    "no_state": "the keys and values are cached, but no snapshot of the model's state at that point",
    "below_block": "the known text ends inside a block, and hybrids and files continue from whole blocks only",
    "other_salt": "it is cached under another `cache_salt`, and salts share nothing",
    "other_adapter": "it is cached for another adapter, or for the model without one",
}


def main(arguments: Sequence[str]) -> int:
    """Prints the explanation. Returns 0; 1 if the server gave none, 2 after wrong usage."""
    parser = argparse.ArgumentParser(
        prog="oatmill explain", description="Explains why the prefix cache did not have a whole prompt."
    )
    parser.add_argument("request_id", help="the `x-request-id` of the response, as in the server's log")
    parser.add_argument(
        "url", nargs="?", default=DEFAULT_URL, help=f"the server's URL, or its port (default: {DEFAULT_URL})"
    )
    parser.add_argument("--cache-salt", help="the salt of the request, if it had one")
    options = parser.parse_args(arguments)
    body = {"request_id": options.request_id, "cache_salt": options.cache_salt}
    try:
        with client_of(options.url) as client, opened(client, "POST", "/v1/explain", body) as response:
            lines = list(_lines(json.loads(response.read())))
    except NotAnswered as error:
        print(f"oatmill explain: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _lines(answer: dict[str, Any]) -> Iterator[str]:
    prefix = answer["prefix"]
    found, whole, missing = answer["cached_tokens"], answer["prompt_tokens"], prefix["missing_tokens"]
    yield f"{found:,} of {whole:,} prompt tokens were found in the prefix cache, {missing:,} were missing"
    yield f"cause: {prefix['cause'] or 'none'}: {_CAUSES.get(prefix['cause'], 'see the documentation')}"
    if difference := prefix["difference"]:
        offset = difference["offset"]
        at = "" if offset is None else f", character {offset:,}"
        yield f"first difference to the nearest earlier prompt: {difference['place']}{at}"
        if difference["here"] or difference["earlier"]:
            yield f"  this prompt:    {difference['before'] + difference['here']!r}"
            yield f"  earlier prompt: {difference['before'] + difference['earlier']!r}"
    if movable := prefix["movable_tokens"]:
        yield f"{movable:,} known tokens follow the difference; they would be found if the changed text came last"
