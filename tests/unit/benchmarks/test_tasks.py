"""Tasks: what counts as right, and how the answers of a server are asked for and added up."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.tasks import __main__ as command
from benchmarks.tasks import bfcl, calls, choices, extraction, functions
from benchmarks.tasks.case import DECISIONS, TaskAnswer, TaskCall, TaskCase, TaskVerdict, chat, matches, user
from benchmarks.tasks.choices import named_option
from benchmarks.tasks.functions import code_of, passes
from benchmarks.tasks.results import AnswersFile, ask, rows


@asynccontextmanager
async def serving(answer: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def saying(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, "finish_reason": finish_reason}]}


def calling(*made: tuple[str, Any]) -> TaskAnswer:
    return TaskAnswer({}, calls=[TaskCall(name, json.dumps(arguments)) for name, arguments in made])


@pytest.mark.parametrize(
    ("expected", "got", "right"),
    [
        ("Paris", " paris.", True),
        ("Paris", "Rome", False),
        (21, 21.0, True),
        (True, 1, False),
        ({"any": ["a", None]}, None, True),
        ({"any": "anything"}, {"x": 1}, True),
        ({"a": 1, "b": {"any": [None, 2]}}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, {"any": [2, 3]}], [3, 1], True),
        ([1, 1], [1, 2], False),
        ({"a": 1}, "a", False),
    ],
)
def test_values_that_match(expected: Any, got: Any, right: bool) -> None:
    assert matches(expected, got) is right


def test_every_family_has_thirty_to_sixty_cases() -> None:
    made = (calls.cases(), extraction.cases(), extraction.span_cases(), functions.cases())
    assert [30 <= len(each) <= 60 for each in made] == [True] * 4
    families = [case.family for case in choices.cases()]
    assert all(30 <= families.count(each) <= 60 for each in families)


def test_calls_are_right_in_any_order_and_valid_by_their_schemas() -> None:
    (case,) = [each for each in calls.cases() if "hall and in the bathroom" in json.dumps(each.body)]
    hall, bathroom = ({"room": room, "on": False} for room in ("hall", "Bathroom"))
    assert case.score(calling(("set_light", bathroom), ("set_light", hall))) == TaskVerdict(1.0, True)
    assert case.score(calling(("set_light", hall))) == TaskVerdict(0.0, True)
    assert case.score(calling(("set_light", {"room": "hall"}))) == TaskVerdict(0.0, False)
    assert case.score(calling(("no_such_tool", {}))) == TaskVerdict(0.0, False)
    assert case.score(TaskAnswer({}, "They are off.")) == TaskVerdict(0.0, None)


def test_no_call_is_right_where_none_fits_and_a_result_has_to_be_told() -> None:
    none = next(each for each in calls.cases() if each.family == "calls: none")
    assert none.score(TaskAnswer({}, "Canberra")).score == 1
    assert none.score(calling(("set_light", {"room": "hall", "on": True}))).score == 0
    result = next(each for each in calls.cases() if "Bergen" in json.dumps(each.body))
    assert result.score(TaskAnswer({}, "It rains at 7 degrees.")).score == 1
    assert result.score(TaskAnswer({}, "It is sunny.")).score == 0


def test_right_members_of_a_record_count_one_by_one() -> None:
    case = extraction.cases()[0]
    right = {"name": "Maria Keller", "age": 34, "city": "Hamburg", "occupation": "architect"}
    assert case.score(TaskAnswer({}, json.dumps(right))) == TaskVerdict(1.0, True)
    assert case.score(TaskAnswer({}, json.dumps(right | {"age": 35}))) == TaskVerdict(0.75, True)
    assert case.score(TaskAnswer({}, json.dumps({"name": "Maria Keller"}))) == TaskVerdict(0.25, False)
    assert case.score(TaskAnswer({}, "Maria")) == TaskVerdict(0.0, False)


def test_a_span_is_a_piece_of_the_text() -> None:
    case = extraction.span_cases()[0]
    assert case.score(TaskAnswer({}, '{"answer": "180 degrees"}')) == TaskVerdict(1.0, True)
    assert case.score(TaskAnswer({}, '{"answer": "200 degrees"}')) == TaskVerdict(0.0, False)
    assert case.score(TaskAnswer({}, '{"answer": "round tin"}')) == TaskVerdict(0.0, True)


def test_free_text_names_one_option() -> None:
    options = ["urgent", "not urgent", "billing"]
    assert named_option("**Not urgent**.", options) == "not urgent"
    assert named_option("It is urgent!", options) == "urgent"
    assert named_option("urgent or billing", options) is None
    assert named_option("urgently", options) is None


def test_decisions_are_scored_by_the_likeliest_option_and_the_loss_of_the_right_one() -> None:
    case = next(each for each in choices.cases() if each.family == "choice: decisions, labels, none")
    assert case.path == DECISIONS
    probabilities = [
        {"value": each["value"], "probability": 0.7 if each["value"] == "billing" else 0.1}
        for each in case.body["questions"][0]["choices"]
    ]
    verdict = case.score(TaskAnswer({"answers": [{"type": "choice", "probabilities": probabilities}]}))
    assert (verdict.score, verdict.loss) == (1.0, pytest.approx(0.3567, abs=1e-4))


@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("def f(n):\n    return n + 1", True),
        ("def f(n):\n    return n", False),
        ("def f(", False),
        ("raise SystemExit(0)", False),
        ("f = lambda n: 'x' * 10 ** 10", False),
        ("print('x', file=open('file', 'w'), flush=True)\ndef f(n):\n    return n + 1", False),
    ],
)
def test_functions_are_run_within_limits(code: str, right: bool) -> None:
    assert passes(code, ["f(1) == 2", "f(2) == 3"]) is right


def test_code_is_taken_out_of_its_fence() -> None:
    assert code_of("Here:\n```python\nx = 1\n```\nDone.") == "x = 1\n"
    assert code_of("```\nx = 1") == "x = 1"
    assert code_of("x = 1") == "x = 1"


def write_bfcl(folder: Path) -> None:
    data = folder / "bfcl_eval" / "data"
    (data / "possible_answer").mkdir(parents=True)
    function = {"name": "area.of", "description": "d", "parameters": {"type": "dict", "properties": {}}}
    for category in ("simple_python", "multiple", "parallel", "irrelevance"):
        lines = [{"id": f"{category}_{n}", "question": [[user("q")]], "function": [function]} for n in range(50)]
        truth = [{"id": line["id"], "ground_truth": [{"area.of": {"a": [1], "unit": ["", "cm"]}}]} for line in lines]
        for place, content in ((data, lines), (data / "possible_answer", truth)):
            text = "".join(json.dumps(each) + "\n" for each in content)
            (place / f"BFCL_v4_{category}.json").write_text(text)


def test_a_hundred_cases_of_bfcl_are_read_from_the_package(tmp_path: Path) -> None:
    write_bfcl(tmp_path)
    folder = bfcl.data_folder(tmp_path)
    assert folder is not None
    cases = bfcl.cases(folder)
    assert len(cases) == 100
    assert cases[0].body["tools"][0]["function"]["parameters"]["type"] == "object"
    assert cases[0].score(calling(("area_of", {"a": 1}))).score == 1
    assert cases[0].score(calling(("area_of", {"a": 1, "unit": "CM"}))).score == 1
    assert cases[0].score(calling(("area_of", {"a": 2}))).score == 0
    assert cases[-1].score(calling()).score == 1
    with pytest.raises(ValueError, match="is not a wheel or a folder of bfcl-eval"):
        bfcl.data_folder(tmp_path / "bfcl_eval" / "data" / "possible_answer")


async def test_answers_are_asked_for_scored_and_added_up(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        asked = (await request.json())["messages"][0]["content"]
        if asked == "fail":
            return web.json_response({"error": "too busy"}, status=500)
        return web.json_response(saying(asked, "length" if asked == "long" else "stop"))

    def case(family: str, asked: str) -> TaskCase:
        return TaskCase(
            family, asked, "/v1/chat/completions", chat([user(asked)], 5), lambda got: TaskVerdict(got.text == "yes")
        )

    cases = [case("a: x", "yes"), case("a: x", "fail"), case("a: y", "long")]
    decision = TaskCase("b", "1", DECISIONS, {}, lambda _: TaskVerdict(1.0))
    answers = AnswersFile(tmp_path / "answers.jsonl")
    async with serving(answer) as url:
        results = await ask(url, "m", [*cases, decision], 2, 10, lambda result: answers.append("server", result))
    all_, x, y = rows(results)
    assert (all_.family, all_.cases, all_.cut_off, all_.failed) == ("a", 3, 1, 1)
    assert (x.score, y.score, y.cut_off) == (0.5, 0.0, 1)
    assert not results[-1].offered, "a route that the server does not have is left out"
    assert sorted(each.name for each in answers.read()["server"]) == sorted(each.name for each in results)
    assert answers.read()["server"][0].verdict in [each.verdict for each in results]


async def test_earlier_answers_are_shown_beside(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "answers.jsonl"
    flags = ["--family", "spans", "--first", "2", "--users", "1"]

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(saying('{"answer": "180 degrees"}'))

    async with serving(answer) as url:
        for more in (["--answers", str(file)], ["--beside", str(file)]):
            monkeypatch.setattr(sys, "argv", ["tasks", "--url", url, *flags, *more])
            cases = command.chosen_cases(command.all_cases(None), ["spans"], 2)
            arguments = command._arguments()
            sides = await command._run(arguments, cases) + command._earlier(arguments.beside, {"spans"})
    assert [(name, [each.verdict.score for each in results]) for name, results in sides] == [
        ("server", [1.0, 0.0]),
        ("server, earlier", [1.0, 0.0]),
    ]
    command.print_tables(sides)
    assert "score, % server, earlier" in capsys.readouterr().out
    file.write_text("{}")
    with pytest.raises(ValueError, match="has no answers"):
        command._earlier([file], {"spans"})


async def test_an_overloaded_server_is_asked_again() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["messages"][0]["content"])
        if len(asked) == 1:
            return web.json_response({"error": "overloaded"}, status=429)
        return web.json_response(saying("yes"))

    case = TaskCase("a", "1", "/v1/chat/completions", chat([user("q")], 5), lambda got: TaskVerdict(got.text == "yes"))
    async with serving(answer) as url:
        (result,) = await ask(url, "m", [case], 1, 10, lambda _: None)
    assert (asked, result.verdict.score, result.failure) == (["q", "q"], 1.0, None)
