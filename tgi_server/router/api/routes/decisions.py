"""/v1/decisions, OpenAI's, and /v1/systemone, that of `transformers serve`: questions answered by probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.contract import GenerationOptions, ReportParameters, StoppingParameters
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.documentation import OPENAI_ERRORS
from tgi_server.router.api.generation import RequestGeneration
from tgi_server.router.api.post_routes import PostRoutes
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
    NoulQuestion,
    PredicateAnswer,
    PredicateQuestion,
    RefusalAnswer,
    ScoreAnswer,
    ScoreProbability,
    SystemOneChoice,
    SystemOneQuestion,
    SystemOneRequest,
    SystemOneResponse,
    SystemOneUsage,
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

# Sequences of one request that are computed at once, so that other requests' come in between.
_AT_ONCE = 32


def decision_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OPENAI_ERRORS)
    summary = "Probabilities of answers to questions about an input, as OpenAI has them"
    routes.receive("/v1/decisions", summary, DecisionsRequest, _decide, Decision)
    summary = "Probabilities of answers to questions about a state, as transformers has them"
    routes.receive("/v1/systemone", summary, SystemOneRequest, _answer_systemone, SystemOneResponse)
    return routes


@dataclass(slots=True)
class _Ask:
    """One prompt of a question: its options in one order, after the input or a neutral one.

    prepared: None once it is scored. steps: the log-probabilities of the tokens that may follow, by the beginning of a
    label.
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
    generation, settings = RequestGeneration(admission), _settings(admission.service, request, request.prompt_cache_key)
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


async def _answer_systemone(admission: Admission, request: SystemOneRequest) -> Response:
    generation, settings = RequestGeneration(admission), _settings(admission.service, request, None)
    state = request.state if isinstance(request.state, str) else to_json(request.state).decode()
    questions = [_systemone_question(each) for each in request.questions.values()]
    results, streams = await _results(generation, [Turn("user", (state,))], questions, settings)
    answers = {
        name: _systemone_answer(each, result.probabilities)
        for (name, each), result in zip(request.questions.items(), results, strict=True)
    }
    response = SystemOneResponse(
        model=settings.options.adapter_id or admission.service.model.names[0],
        answers=answers,
        usage=SystemOneUsage(input_tokens=sum(stream.input_length for stream in streams), output_tokens=0),
    )
    return generation.respond(response, characters=admission.size, streams=streams)


def _settings(service: Service, request: DecisionsRequest | SystemOneRequest, cache_key: str | None) -> _Settings:
    options = GenerationOptions(
        stopping=StoppingParameters(max_new_tokens=1, ignore_eos=True),
        cache_salt=cache_key,
        adapter_id=named_adapter(service, request.model),
    )
    return _Settings(request.scoring, request.normalization, options)


async def _results(
    generation: RequestGeneration, turns: Sequence[Turn], questions: Sequence[AskedQuestion], settings: _Settings
) -> tuple[list[Probabilities], list[AnyStream]]:
    """Returns a result for each question, and the sequences that were computed. Raises InvalidRequest."""
    orders = [orders_of(each, settings.normalization) for each in questions]
    plans = [(turns, question, order) for question, own in zip(questions, orders, strict=True) for order in own]
    if settings.normalization == "calibration":
        blank = [Turn("user", (NEUTRAL,))]
        plans += [(blank, question, own[0]) for question, own in zip(questions, orders, strict=True)]
    asks: list[_Ask] = []
    streams: list[AnyStream] = []
    while len(asks) < len(plans):  # the first alone: it computes what the others find in the cache
        some = plans[len(asks) : len(asks) + _AT_ONCE] if asks else plans[:1]
        made = [await _ask(generation.admission, *plan, settings) for plan in some]
        streams += await _score(generation, made)
        asks += made
    taken = iter(asks)
    asked = [[next(taken) for _ in own] for own in orders]
    neutral: list[_Ask | None] = [*taken] or [None] * len(questions)
    results = [
        result_of(
            own,
            [each.labels for each in some],
            [each.logprobs for each in some],
            None if usual is None else usual.logprobs,
            settings.scoring,
            generation.service.decisions.temperature.get(question.kind, 1.0),
        )
        for question, own, some, usual in zip(questions, orders, asked, neutral, strict=True)
    ]
    return results, streams


async def _ask(
    admission: Admission, turns: Sequence[Turn], question: AskedQuestion, order: Sequence[int], settings: _Settings
) -> _Ask:
    """Returns a prompt of a question. Raises InvalidRequest."""
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
    """Computes the labels of some prompts, and forgets the prompts. Returns the sequences that were computed."""
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
    """Returns the input as turns. Raises InvalidRequest for the output of a call that is not there."""
    if isinstance(request.input, str):
        return [Turn("user", (request.input,))]
    items = [each.root for each in request.input]
    calls = {each.call_id for each in items if isinstance(each, FunctionCall | ResponsesFreeFormCall)}
    for each in items:
        if isinstance(each, CallOutput) and each.call_id not in calls:
            raise InvalidRequest.at(
                "input", f"has an output of the call {(each.call_id or '')[:100]!r}, which it does not have"
            )
    return input_turns(items)


def _question(question: AnyQuestion) -> AskedQuestion:
    match question:
        case PredicateQuestion():
            return AskedQuestion("predicate", question.text, ("", ""))
        case ChoiceQuestion(choices=choices):
            options = [_listed(_text(each.value), each.description) for each in choices]
            return AskedQuestion("choice", question.text, tuple(options))
        case _:
            levels = [_listed(each.label, each.description) for each in question.levels]
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


def _systemone_question(question: SystemOneQuestion) -> AskedQuestion:
    instructions = _content(question.instructions)
    match question:
        case NoulQuestion(criteria=criteria):
            return AskedQuestion(
                "predicate", instructions, tuple(_content((criteria or {}).get(each)) for each in ("true", "false"))
            )
        case SystemOneChoice(criteria=options):
            return AskedQuestion(
                "choice", instructions, tuple(_listed(name, _content(each)) for name, each in options.items())
            )
        case _:
            return AskedQuestion("score", instructions, tuple(map(_content, question.criteria)))


def _content(value: Any) -> str:
    """Returns a text, or the JSON of what is none."""
    return "" if value is None else value if isinstance(value, str) else to_json(value).decode()


def _systemone_answer(question: SystemOneQuestion, probabilities: list[float]) -> dict[str, Any]:
    match question:
        case NoulQuestion():
            return {"type": "noul", "noul": probabilities[0]}
        case SystemOneChoice(criteria=options):
            by_option = dict(zip(options, probabilities, strict=True))
            best = max(by_option, key=lambda each: by_option[each])
            confidence = choice_confidence(probabilities)
            return {"type": "choice", "choice": best, "confidence": confidence, "probabilities": by_option}
        case _:
            score, confidence = score_of(probabilities)
            return {
                "type": "score",
                "score": score,
                "legend": {str(level): each for level, each in enumerate(question.criteria)},
                "confidence": confidence,
                "probabilities": {str(level): each for level, each in enumerate(probabilities)},
            }
