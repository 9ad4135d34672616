"""Grammars made to harm the server, beside streams that must not notice."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests import hostile_grammars as hostile
from tests.conftest import ServerFactory
from tests.integration.structured.test_generate import GRAMMARS, PROMPT, post
from tests.servers import TextGenerationServer
from tgi_server import demo_model

HOSTILE: dict[str, dict[str, Any]] = {
    "1,000 references": {"type": "json", "value": hostile.references(1_000)},
    "9,000 references": {"type": "json", "value": hostile.references(9_000)},
    "2,750 rules": {"type": "lark", "value": hostile.rules(2_750)},
    "3,000 spans": {"type": "json", "value": hostile.spans(3_000)},
    "mutual definitions": {"type": "json", "value": hostile.mutual(11)},
    "more mutual definitions": {"type": "json", "value": hostile.mutual(12)},
    **{f"optional letters {i}": {"type": "regex", "value": hostile.optional_letters(300_000 + i)} for i in range(4)},
}


def text_of(server: TextGenerationServer) -> str:
    """A long answer to a request without a grammar."""
    return str(server.generate(PROMPT, max_new_tokens=600, ignore_eos=True)["generated_text"])


@pytest.fixture(scope="module")
def alone(demo_server: TextGenerationServer) -> str:
    return text_of(demo_server)


def ask(server: TextGenerationServer, grammar: dict[str, Any]) -> httpx.Response:
    body = {"inputs": PROMPT, "parameters": {"grammar": grammar, "max_new_tokens": 60}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=60)


@pytest.mark.slow
def test_hostile_grammars_are_refused_or_followed_and_others_go_on(
    demo_server: TextGenerationServer, alone: str
) -> None:
    with ThreadPoolExecutor(len(HOSTILE) + 2) as pool:
        neighbours = [pool.submit(text_of, demo_server) for _ in range(2)]
        answers = {name: pool.submit(ask, demo_server, grammar) for name, grammar in HOSTILE.items()}
    for name, answer in answers.items():
        assert answer.result().status_code in (200, 422, 429), (name, answer.result().text[:500])
        assert len(answer.result().content) < 2_000, name
    assert [neighbour.result() for neighbour in neighbours] == [alone, alone]
    grammar, fits = GRAMMARS["json"]
    answer = ask(demo_server, {**grammar, "value": {**grammar["value"], "title": "not seen before"}})
    assert fits(answer.json()["generated_text"]), answer.text


@pytest.mark.parametrize(
    "name",
    [
        "mutual definitions",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("1,000 references", "2,750 rules")),
    ],
)
def test_a_deep_grammar_is_followed_to_its_end(demo_server: TextGenerationServer, name: str) -> None:
    answer = ask(demo_server, HOSTILE[name])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "lark", "value": 'start: text\ntext: text text text | text text | "" | /[a-z]/'},
        {"type": "regex", "value": "(.*a.{12}|.*b.{11}|.*c.{13}){1,50}"},
    ],
    ids=["items of the parser", "states of the lexer"],
)
@pytest.mark.slow
def test_a_grammar_that_fails_after_many_steps_fails_alone(
    demo_server: TextGenerationServer, alone: str, grammar: dict[str, Any]
) -> None:
    parameters = {"grammar": grammar, "max_new_tokens": 500, "ignore_eos": True, "do_sample": True, "seed": 1}
    body = {"inputs": PROMPT, "parameters": {**parameters, "temperature": 5.0}}
    with ThreadPoolExecutor(3) as pool:
        neighbours = [pool.submit(text_of, demo_server) for _ in range(2)]
        failing = pool.submit(post, demo_server, "/generate", body)
    assert failing.result().status_code == 422
    assert "could not be followed" in failing.result().json()["error"]
    assert [neighbour.result() for neighbour in neighbours] == [alone, alone]


def abandon_grammars(server: TextGenerationServer, length: int) -> None:
    """Sends four requests whose grammars take long to compile, and leaves. length: of the first one."""
    for i in range(4):
        grammar = {"type": "regex", "value": hostile.optional_letters(length + i)}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                f"{server.url}/generate",
                json={"inputs": PROMPT, "parameters": {"grammar": grammar}},
                timeout=httpx.Timeout(30, read=0.3),
            )


def test_a_grammar_abandoned_by_its_client_is_ended(demo_server: TextGenerationServer) -> None:
    """The requests end at once, and those who ask after it need not wait for it."""
    left = "/generate failed: the client disconnected"
    before = demo_server.lines().count(left)
    abandon_grammars(demo_server, 290_000)
    demo_server.wait_until(lambda: demo_server.lines().count(left) == before + 4)
    answer = ask(demo_server, {"type": "json", "value": {"enum": [json.dumps(i) for i in range(40)]}})
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_abandoned_grammars_do_not_hold_up_the_end(server: ServerFactory) -> None:
    """Compiled one after the other, in their share of a core, they would take 50 seconds."""
    running = server(f"--model-id={demo_model.PATH}").wait_until_ready()
    abandon_grammars(running, 290_000)
    assert running.stop() == 0
