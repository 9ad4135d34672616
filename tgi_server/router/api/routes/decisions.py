"""/v1/decisions: questions about an input, answered by probabilities."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.routing import Route

from tgi_server.contract import GenerationOptions, ReportParameters, StoppingParameters
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS
from tgi_server.router.api.generation import RequestGeneration
from tgi_server.router.api.routes.chat_prompt import render
from tgi_server.router.api.routes.openai import named_adapter
from tgi_server.router.api.routes.prompt_images import with_images
from tgi_server.router.api.routes.response_request import input_turns
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.decisions import (
    AnyQuestion,
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    Decision,
    DecisionsRequest,
    DecisionUsage,
    DecisionUsageDetails,
    PredicateAnswer,
    PredicateQuestion,
    RefusalAnswer,
    ScoreAnswer,
    ScoreProbability,
)
from tgi_server.router.schemas.response_input import CallOutput, FunctionCall, ResponsesFreeFormCall
from tgi_server.router.service import Service
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.conversation import Conversation, Turn, thinking_switches
from tgi_server.router.text.decisions import (
    NEUTRAL,
    AskedQuestion,
    Labels,
    Normalization,
    Probabilities,
    Scoring,
    Tokens,
    choice_confidence,
    labels_of,
    orders_of,
    prompt_of,
    result_of,
    score_of,
    with_question,
)
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.token_stream import AnyStream

T = TypeVar("T")

# Maximum number of a request's sequences that are computed at once, so that those of other requests can come between.
_AT_ONCE = 32


def decision_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OPENAI_ERRORS)
    summary = "Probabilities of answers to questions about an input, as OpenAI has them"
    routes.receive("/v1/decisions", summary, DecisionsRequest, _decide, Decision)
    return routes


@dataclass(slots=True)
class _Ask:
    """One prompt of a question: its options in one order, after the input or a neutral input.

    prepared: None once it is scored. steps: log-probabilities of the tokens that may follow each prefix of a label.
    """

    prepared: PreparedRequest | None
    labels: Labels
    steps: dict[Tokens, dict[int, float]] = field(default_factory=dict)

    @property
    def logprobs(self) -> list[float]:
        return self.labels.logprobs(self.steps)


@dataclass(frozen=True, slots=True)
class _Settings:
    scoring: Scoring
    normalization: Normalization
    options: GenerationOptions


async def _decide(admission: Admission, request: DecisionsRequest) -> Response:
    turns = _turns(request)
    generation, settings = RequestGeneration(admission), _settings(admission.service, request)
    questions = list(map(_question, request.questions))
    results, streams = await _results(generation, turns, questions, settings)
    answers = [
        RefusalAnswer(name=each.name, label_mass=result.label_mass)
        if result.label_mass < request.min_label_mass
        else _answer(each, result)
        for each, result in zip(request.questions, results, strict=True)
    ]
    read = sum(stream.input_length for stream in streams)
    cached = sum(stream.cached_tokens for stream in streams)
    usage = DecisionUsage(
        input_tokens=read,
        input_tokens_details=DecisionUsageDetails(cached_tokens=cached, cache_write_tokens=read - cached),
        output_tokens=0,
        output_tokens_details={"reasoning_tokens": 0},
        total_tokens=read,
    )
    model = settings.options.adapter_id or admission.service.model.names[0]
    decision = Decision(answers=answers, model=model, usage=usage)
    return generation.respond(decision, characters=admission.size, streams=streams)


def _settings(service: Service, request: DecisionsRequest) -> _Settings:
    options = GenerationOptions(
        stopping=StoppingParameters(max_new_tokens=1, ignore_eos=True),
        cache_salt=request.prompt_cache_key,
        adapter_id=named_adapter(service, request.model),
    )
    return _Settings(request.scoring, request.normalization, options)


async def _results(
    generation: RequestGeneration, turns: Sequence[Turn], questions: Sequence[AskedQuestion], settings: _Settings
) -> tuple[list[Probabilities], list[AnyStream]]:
    """Returns a result for each question, and the sequences that were computed. Raises InvalidRequest."""
    orders = [orders_of(question, settings.normalization) for question in questions]
    prompts = [(index, turns, order) for index, listed in enumerate(orders) for order in listed]
    if settings.normalization == "calibration":
        neutral = [Turn("user", (NEUTRAL,))]
        prompts += [(index, neutral, listed[0]) for index, listed in enumerate(orders)]
    asks: list[list[_Ask]] = [[] for _ in questions]
    streams: list[AnyStream] = []

    async def make(first: int, last: int) -> list[tuple[int, _Ask]]:
        return [
            (index, await _ask(generation.admission, said, questions[index], order, settings))
            for index, said, order in prompts[first:last]
        ]

    # The first one runs alone, so that the others find its tokens in the prefix cache. They are prepared meanwhile.
    starts = [0, *range(1, len(prompts), _AT_ONCE), len(prompts)]
    made = await make(*starts[:2])
    for step in pairwise([*starts[1:], len(prompts)]):
        async with _beside(make(*step)) as following:
            streams += await _score(generation, [ask for _, ask in made])
            for index, ask in made:
                asks[index].append(ask)
            made = await following
    temperatures = generation.service.decisions.temperature
    results = []
    for question, listed, scored in zip(questions, orders, asks, strict=True):
        of_input, of_neutral = scored[: len(listed)], scored[len(listed) :]
        results.append(
            result_of(
                listed,
                [ask.labels for ask in of_input],
                [ask.logprobs for ask in of_input],
                of_neutral[0].logprobs if of_neutral else None,
                settings.scoring,
                temperatures.get(question.kind, 1.0),
            )
        )
    return results, streams


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Runs `work` as a task concurrently with the block, and cancels it at the block's end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()


async def _ask(
    admission: Admission, turns: Sequence[Turn], question: AskedQuestion, order: Sequence[int], settings: _Settings
) -> _Ask:
    """Prepares a prompt of a question. Raises InvalidRequest."""
    service = admission.service

    def prepare() -> tuple[Labels, RenderedPrompt, Conversation]:
        own = service.decisions.labels.get(question.kind, ())
        labels = labels_of(question, order, settings.scoring, service.text.tokenizer, own)
        text = prompt_of(question, order, labels, settings.scoring)
        conversation = Conversation(with_question(turns, text), variables=thinking_switches(on=False))
        return labels, render(service, conversation), conversation

    labels, prompt, conversation = await service.text.threads.run(admission.size, prepare)
    prompt = await with_images(admission, prompt, conversation.images, settings.options.cache_salt)
    deepest = max(map(len, labels.tokens))
    stopping = replace(settings.options.stopping, max_new_tokens=deepest)
    options = replace(settings.options, stopping=stopping)
    prepared = await service.preparer.prepare(
        prompt, options, Dialect.RESPONSES, client=admission.owner, add_special_tokens=False, size=admission.size
    )
    return _Ask(replace(prepared, options=settings.options), labels)


async def _score(generation: RequestGeneration, asks: Sequence[_Ask]) -> list[AnyStream]:
    """Computes the log-probabilities of labels, and drops the prompts. Returns the sequences that were computed."""
    work = [(ask, beginning, tokens) for ask in asks for beginning, tokens in ask.labels.steps.items()]
    streams: list[AnyStream] = []
    for start in range(0, len(work), _AT_ONCE):
        now = work[start : start + _AT_ONCE]
        done = await generation.collect([_sequence(*each) for each in now])
        for (ask, beginning, tokens), stream in zip(now, done, strict=True):
            (scored,) = stream.output.top_tokens
            ask.steps[beginning] = dict(zip(tokens, scored.logprobs, strict=True))
        streams += done
    for ask in asks:
        ask.prepared = None
    return streams


def _sequence(ask: _Ask, beginning: Tokens, tokens: Tokens) -> PreparedRequest:
    assert ask.prepared is not None  # it has not been scored
    options = replace(ask.prepared.options, report=ReportParameters(scored_token_ids=tokens))
    return replace(ask.prepared, input_ids=[*ask.prepared.input_ids, *beginning], options=options)


def _turns(request: DecisionsRequest) -> list[Turn]:
    """Returns the input as turns. Raises InvalidRequest for the output of a call that the input does not have."""
    if isinstance(request.input, str):
        return [Turn("user", (request.input,))]
    items = [each.root for each in request.input]
    calls = {item.call_id for item in items if isinstance(item, FunctionCall | ResponsesFreeFormCall)}
    for item in items:
        if isinstance(item, CallOutput) and item.call_id not in calls:
            raise InvalidRequest.at(
                "input", f"has an output of the call {(item.call_id or '')[:100]!r}, which it does not have"
            )
    return input_turns(items)


def _question(question: AnyQuestion) -> AskedQuestion:
    match question:
        case PredicateQuestion():
            return AskedQuestion("predicate", question.text, ("", ""))
        case ChoiceQuestion(choices=choices):
            options = [_listed(_text(choice.value), choice.description) for choice in choices]
            return AskedQuestion("choice", question.text, tuple(options))
        case _:
            levels = [_listed(level.label, level.description) for level in question.levels]
            return AskedQuestion("score", question.text, tuple(levels))


def _text(value: str | bool) -> str:
    return value if isinstance(value, str) else "true" if value else "false"


def _listed(name: str, description: str | None) -> str:
    return f"{name}: {description}" if description else name


def _answer(question: AnyQuestion, result: Probabilities) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    name, mass, probabilities = question.name, result.label_mass, result.probabilities
    match question:
        case PredicateQuestion():
            return PredicateAnswer(name=name, probability=probabilities[0], label_mass=mass)
        case ChoiceQuestion(choices=choices):
            best = max(range(len(choices)), key=lambda each: probabilities[each])
            return ChoiceAnswer(
                name=name,
                choice=choices[best].value,
                confidence=choice_confidence(probabilities),
                probabilities=[
                    ChoiceProbability(value=each.value, probability=probability)
                    for each, probability in zip(choices, probabilities, strict=True)
                ],
                label_mass=mass,
            )
        case _:
            score, confidence = score_of(probabilities)
            return ScoreAnswer(
                name=name,
                score=score,
                confidence=confidence,
                probabilities=[
                    ScoreProbability(label=level.label, value=value, probability=probability)
                    for value, (level, probability) in enumerate(zip(question.levels, probabilities, strict=True))
                ],
                label_mass=mass,
            )
