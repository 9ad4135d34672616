"""Decisions of the demo model, compared with the forward pass of transformers."""

from concurrent.futures import ThreadPoolExecutor
from math import exp
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.servers import TextGenerationServer
from tgi_server import demo_model

INPUT = "How do I cook rice?"
PREDICATE: dict[str, Any] = {"type": "predicate", "name": "cooking", "instructions": "Is this about cooking?"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "What is it about?",
    "choices": [{"value": "cooking"}, {"value": "DIY", "description": "wood and tools"}, {"value": True}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "instructions": "How hard is it?",
    "levels": [{"label": "easy"}, {"label": "medium"}, {"label": "hard"}],
}
QUESTIONS = [PREDICATE, CHOICE, SCORE]


def post(server: TextGenerationServer, path: str = "/v1/decisions", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def decide(server: TextGenerationServer, given: Any = INPUT, questions: Any = None, **more: Any) -> dict[str, Any]:
    response = post(server, input=given, questions=questions or QUESTIONS, **more)
    assert response.status_code == 200, response.text
    decision: dict[str, Any] = response.json()
    return decision


class Reference:
    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(demo_model.PATH)

    @torch.inference_mode()
    def __call__(self, question: str, labels: list[str], *, length: bool = False) -> tuple[list[float], float]:
        """Returns the probabilities of labels after a question, and the probability of all of them."""
        messages = [{"role": "user", "content": f"{INPUT}\n\n{question}"}]
        chat = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, "enable_thinking": False}
        prompt = self.tokenizer.apply_chat_template(messages, **chat)
        logprobs, lengths = [], []
        for label in labels:
            ids = self.tokenizer(label, add_special_tokens=False)["input_ids"]
            logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            values = torch.log_softmax(logits, -1)
            logprobs.append(sum(values[place, token].item() for place, token in enumerate(ids)))
            lengths.append(len(ids) if length else 1)
        scores = torch.tensor([value / each for value, each in zip(logprobs, lengths, strict=True)])
        return scores.softmax(0).tolist(), sum(map(exp, logprobs))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_probabilities_are_those_of_the_labels_behind_the_generation_prompt(
    demo_server: TextGenerationServer, reference: Reference
) -> None:
    predicate, choice, score = decide(demo_server)["answers"]
    expected, mass = reference("Is this about cooking?\nAnswer Yes or No only.", ["Yes", "No"])
    assert (predicate["type"], predicate["name"]) == ("predicate", "cooking")
    assert predicate["probability"] == pytest.approx(expected[0], abs=1e-4)
    assert predicate["label_mass"] == pytest.approx(mass, abs=1e-4)
    expected, mass = reference(
        "What is it about?\nA. cooking\nB. DIY: wood and tools\nC. true\n"
        "Answer with the letter of the option that fits best (A to C) only.",
        ["A", "B", "C"],
    )
    assert [each["value"] for each in choice["probabilities"]] == ["cooking", "DIY", True]
    assert [each["probability"] for each in choice["probabilities"]] == pytest.approx(expected, abs=1e-4)
    assert choice["label_mass"] == pytest.approx(mass, abs=1e-4)
    assert choice["choice"] == ["cooking", "DIY", True][expected.index(max(expected))]
    assert score["score"] == pytest.approx(sum(each["value"] * each["probability"] for each in score["probabilities"]))
    assert [each["label"] for each in score["probabilities"]] == ["easy", "medium", "hard"]


def test_whole_texts_are_scored_on_request(demo_server: TextGenerationServer, reference: Reference) -> None:
    (choice,) = decide(demo_server, questions=[CHOICE], scoring="sequences")["answers"]
    options = ["cooking", "DIY: wood and tools", "true"]
    question = "What is it about?\n- cooking\n- DIY: wood and tools\n- true\n"
    expected, _ = reference(f"{question}Answer with the text of the option that fits best only.", options, length=True)
    assert [each["probability"] for each in choice["probabilities"]] == pytest.approx(expected, abs=1e-4)


def test_answers_are_the_same_bits_alone_cached_permuted_and_beside_others(demo_server: TextGenerationServer) -> None:
    together = decide(demo_server)["answers"]
    assert [decide(demo_server, questions=[each])["answers"][0] for each in QUESTIONS] == together
    assert decide(demo_server, prompt_cache_key="a new one")["answers"] == together
    assert decide(demo_server, questions=QUESTIONS[::-1])["answers"] == together[::-1]
    with ThreadPoolExecutor(4) as pool:
        inputs = [INPUT, f"{INPUT} And beans?", INPUT, "Which saw cuts metal?"]
        found = list(pool.map(lambda given: decide(demo_server, given)["answers"], inputs))
    assert found[0] == found[2] == together


def test_the_order_of_listing_does_not_count_over_several_orders(demo_server: TextGenerationServer) -> None:
    found = []
    for choices in (CHOICE["choices"], CHOICE["choices"][::-1]):
        (answer,) = decide(demo_server, questions=[CHOICE | {"choices": choices}], normalization="orders")["answers"]
        found.append({str(each["value"]): each["probability"] for each in answer["probabilities"]})
    assert found[0] == found[1]


def test_calibration_takes_a_neutral_input(demo_server: TextGenerationServer) -> None:
    (neutral,) = decide(demo_server, "N/A", [PREDICATE])["answers"]
    (plain,) = decide(demo_server, questions=[PREDICATE])["answers"]
    (calibrated,) = decide(demo_server, questions=[PREDICATE], normalization="calibration")["answers"]
    yes, no = plain["probability"] / neutral["probability"], (1 - plain["probability"]) / (1 - neutral["probability"])
    assert calibrated["probability"] == pytest.approx(yes / (yes + no))


def test_the_input_is_computed_once(demo_server: TextGenerationServer) -> None:
    long = "First wash the rice and then the beans. " * 60
    questions = [PREDICATE | {"instructions": f"Is it about thing {number}?"} for number in range(8)]
    usage = decide(demo_server, long, questions)["usage"]
    one = decide(demo_server, long, questions[:1])["usage"]["input_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert cached > 6 * (one - 200)
    assert usage["input_tokens_details"]["cache_write_tokens"] == usage["input_tokens"] - cached
    assert usage["output_tokens"] == 0


def test_messages_calls_and_json_are_read(demo_server: TextGenerationServer) -> None:
    given = [
        {"role": "system", "content": "You help."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Rice?"}, {"type": "input_json", "data": {"a": 1}}],
        },
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rice"},
        {"type": "custom_tool_call", "call_id": "2", "name": "run", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    instructions = [{"type": "input_text", "text": "Is it so?"}, {"type": "input_json", "data": [{"b": 2}]}]
    assert decide(demo_server, given, [PREDICATE | {"instructions": instructions}])["answers"][0]["probability"]


def test_labels_that_are_unlikely_together_are_a_refusal(demo_server: TextGenerationServer) -> None:
    (answer,) = decide(demo_server, questions=[PREDICATE], min_label_mass=0.999)["answers"]
    assert (answer["type"], answer["name"]) == ("refusal", "cooking")


def test_more_choices_than_letters(demo_server: TextGenerationServer) -> None:
    choices = [{"value": str(number)} for number in range(150)]
    (answer,) = decide(demo_server, questions=[CHOICE | {"choices": choices}])["answers"]
    assert sum(each["probability"] for each in answer["probabilities"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": "rice " * 100_000}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"questions": [CHOICE | {"choices": [{"value": "one"}]}]}, "choices"),
        ({"questions": [CHOICE | {"choices": [{"value": str(each)} for each in range(256)]}]}, "choices"),
        ({"questions": [CHOICE | {"choices": [{"value": "one"}, {"value": "one"}]}]}, "choice"),
        ({"questions": [SCORE | {"levels": [{"label": "one"}]}]}, "levels"),
        ({"questions": [PREDICATE | {"instructions": ""}]}, "instructions"),
        ({"questions": [{"type": "guess", "instructions": "?"}]}, "questions[0].type"),
        ({"normalization": "all"}, "normalization"),
    ],
)
def test_bad_requests_get_400_that_names_the_field(
    changes: dict[str, Any], field: str, demo_server: TextGenerationServer
) -> None:
    response = post(demo_server, **{"input": INPUT, "questions": QUESTIONS} | changes)
    assert response.status_code == 400
    error = response.json()["error"]
    assert field in error["param"]
    assert error["type"] == "invalid_request_error"


def test_choices_of_different_types_are_distinct(demo_server: TextGenerationServer) -> None:
    choices = [{"value": True}, {"value": "true"}]
    assert decide(demo_server, questions=[CHOICE | {"choices": choices}])["answers"]


def test_answers_are_what_the_types_of_openai_say(demo_server: TextGenerationServer) -> None:
    types = pytest.importorskip("openai.types.decision")
    answer = decide(demo_server)
    parsed = types.Decision.model_validate(answer)
    assert [each.type for each in parsed.answers] == ["predicate", "choice", "score"]
    assert parsed.usage.total_tokens == answer["usage"]["input_tokens"]


@pytest.mark.slow
def test_four_hundred_questions(demo_server: TextGenerationServer) -> None:
    questions = [PREDICATE | {"instructions": f"Is it about thing {number}?"} for number in range(400)]
    answers = decide(demo_server, questions=questions)["answers"]
    assert len(answers) == 400
    assert decide(demo_server, questions=questions[399:])["answers"] == answers[399:]
