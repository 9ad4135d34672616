"""The running stack, through its gRPC services, at LLM_FUNCTIONALITIES_URL: `docker compose run tester`."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from llm_functionalities.errors import NotServed
from llm_functionalities.model.empty_responses import SAID_NOTHING, UNUSABLE
from shared.stubs import llm_pb2
from shared.stubs.llm_pb2_grpc import LLMRunnerStub
from tests.timing import until

URL = os.environ.get("LLM_FUNCTIONALITIES_URL")
PROMPT = "### Instruction:\nHow long do I boil an egg?\n\n### Response:\n"
# For any call, on a machine that has much else to do.
SECONDS = 180

METHODS = {
    f"{service.name}/{method.name}": method
    for service in llm_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
STEP = llm_pb2.ExecutionStep(unique_id="1", response=llm_pb2.OutputInteraction(speech_text="Melt the butter in a pan."))
PAIR = llm_pb2.ReplacedIngredient(
    original=llm_pb2.Ingredient(name="butter"), replacement=llm_pb2.Ingredient(name="margarine")
)
TASK = llm_pb2.TaskMap(title="Cake", steps=[STEP], replaced_ingredients=[PAIR])
SESSION = llm_pb2.Session(task=llm_pb2.Task(phase=llm_pb2.Task.VALIDATING, taskmap=TASK))
PROMPTED = llm_pb2.ModelRequest(formatted_prompt=PROMPT, max_tokens=40, timeout=SECONDS * 1000)
TEXT = "Boil the eggs for ten minutes."

# A request for each method, and what its response is like, whatever the model says.
CALLS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "LLMRunner/call_model": (PROMPTED, lambda response: bool(response.text)),
    "LLMRunner/stream_model": (PROMPTED, lambda response: bool(response.text or response.finish_reason)),
    "LLMRunner/batch_call_model": (
        llm_pb2.ModelBatchRequest(formatted_prompts=[PROMPT] * 3, max_tokens=20, timeout=SECONDS * 1000),
        lambda response: len(response.text) == 3 and all(response.text),
    ),
    "LLMRunner/generate_summary": (
        llm_pb2.TGISummaryRequest(input_text=TEXT),
        lambda response: bool(response.summary_text),
    ),
    "LLMRunner/generate_summaries": (
        llm_pb2.TGIMultipleSummaryRequest(input_text=[TEXT, ""]),
        lambda response: response.summary_text[0] != "" == response.summary_text[1],
    ),
    "LLMChitChat/generate_chit_chat": (llm_pb2.LLMChitChatRequest(user_question="How are you?"), lambda response: True),
    "LLMSummaryGeneration/generate_summary": (
        llm_pb2.SummaryGenerationRequest(task_title="Eggs", step_text=TEXT),
        lambda response: True,
    ),
    "LLMSummaryGeneration/generate_summaries": (
        llm_pb2.MultipleSummaryGenerationRequest(task_title=["Eggs"] * 2, step_text=[TEXT] * 2),
        lambda response: len(response.summary) == 2,
    ),
    "LLMDescriptionGeneration/generate_description": (
        llm_pb2.LLMDescriptionGenerationRequest(task_title="Carrot soup"),
        lambda response: True,
    ),
    "LLMDescriptionGeneration/generate_descriptions": (
        llm_pb2.LLMMultipleDescriptionGenerationRequest(
            task_title=["Carrot soup", "Shelf"], domains=["COOKING", "DIY"]
        ),
        lambda response: len(response.description) == 2,
    ),
    "LLMProactiveQuestionGeneration/generate_proactive_question": (
        llm_pb2.ProactiveQuestionGenerationRequest(task_title=["Eggs"], current_step=[TEXT]),
        lambda response: len(response.questions) == 1,
    ),
    "LLMReplacementGeneration/generate_replacement": (
        llm_pb2.IngredientReplacementRequest(original_ingredient=llm_pb2.Ingredient(name="butter", amount="100 g")),
        lambda response: True,
    ),
    "LLMReplacementGeneration/rewrite_steps": (
        llm_pb2.AdjustedStepGenerationRequest(task_title="Cake", step=[STEP], ingredient=[PAIR]),
        lambda response: list(response.ids) == ["1"],
    ),
    "LLMReplacementGeneration/adjust_step_texts": (
        SESSION,
        lambda response: response.task.taskmap.replaced_ingredients[0] == PAIR,
    ),
    "LLMExecutionSearchManager/generate_decision": (
        llm_pb2.ExecutionSearchRequest(taskmap=TASK, user_question="I want to make pizza", timeout=SECONDS * 1000),
        lambda response: True,
    ),
    "LLMDecisions/Decide": (
        llm_pb2.DecisionRequest(
            input=TEXT, questions=[llm_pb2.DecisionQuestion(instructions="It is about eggs.")], timeout=SECONDS * 1000
        ),
        lambda response: len(response.answers) == 1 and len(response.answers[0].probabilities) == 1,
    ),
    "LLMEmbeddings/Embed": (llm_pb2.EmbedRequest(texts=[TEXT]), lambda response: not response.embeddings),
    "LLMEmbeddings/Rerank": (llm_pb2.RerankRequest(query="eggs", texts=[TEXT]), lambda response: not response.ranking),
    "LLMPrefixCache/Warm": (
        llm_pb2.WarmRequest(formatted_prompt=PROMPT, timeout=SECONDS * 1000),
        lambda response: response.prompt_tokens > 0,
    ),
}
# The stack's model generates, and does not embed.
REFUSED = {"LLMEmbeddings/Embed", "LLMEmbeddings/Rerank"}


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    if not URL:
        pytest.skip("LLM_FUNCTIONALITIES_URL does not say where the stack runs")
    with grpc.insecure_channel(URL) as channel:
        runner = LLMRunnerStub(channel)
        # The service may still be finding out that the model is back.
        until(lambda: bool(runner.call_model(PROMPTED, timeout=SECONDS, wait_for_ready=True).text), SECONDS)
        yield channel


def test_every_method_has_a_call() -> None:
    assert CALLS.keys() == METHODS.keys()


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("name", METHODS)
def test_llm_answers_in_every_method(channel: grpc.Channel, name: str) -> None:
    """The model may have nothing of use to say; that it was not there, or refused what it can do, is no excuse."""
    request, is_sound = CALLS[name]
    kind = GetMessageClass(METHODS[name].output_type)
    call = channel.unary_stream(
        f"/{name}", request_serializer=type(request).SerializeToString, response_deserializer=kind.FromString
    )(request, timeout=SECONDS)
    responses = list(call)
    reasons = dict(call.trailing_metadata()).get("empty-reason", UNUSABLE)
    assert set(reasons.split(",")) <= ({NotServed.reason} if name in REFUSED else {SAID_NOTHING, UNUSABLE})
    assert all(map(is_sound, responses))
    assert len(responses) >= 1


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_llm_answers_a_batch_in_order(channel: grpc.Channel) -> None:
    prompts = [PROMPT, "### Instruction:\nSay hello.\n\n### Response:\n", PROMPT]
    request = llm_pb2.ModelBatchRequest(formatted_prompts=prompts, max_tokens=20, timeout=SECONDS * 1000)
    reply = LLMRunnerStub(channel).batch_call_model(request, timeout=SECONDS)
    assert reply.text[0] == reply.text[2] != reply.text[1]
    assert not any(prompt in text for prompt, text in zip(prompts, reply.text, strict=True))
