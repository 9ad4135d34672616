"""Mixed load on llm_functionalities over gRPC, from a process of its own, which times the answers.

`python -m tests.integration.soak.front_load HOST:PORT SECONDS` prints what became of the calls, as JSON. With
`COUNT SEED` in place of the seconds it makes so many calls; those of one seed are the same each time.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from shared.stubs import llm_pb2
from tests.integration.soak.delays import Delays
from tests.integration.soak.tally import Tally
from tests.integration.soak.turns import Turn, turns, turns_until
from tests.integration.structured.test_generate import PROMPT, REGEX, SCHEMA

WORKERS = 16
PAUSE_SECONDS = 0.4
# Share of the calls that are cancelled at some time before their deadline.
CANCELLED = 0.15
# The service's `--default-timeout`.
DEFAULT_SECONDS = 2.0
SLACK_SECONDS = 0.05
# No gRPC deadline, which the service would take for one.
GUARD_SECONDS = 30.0
# Deadlines of calls, in milliseconds.
TIMEOUTS = (100, 300, 1000, 2000, 5000)

OK, REFUSED = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
STEP = "Melt the butter in a pan, then add the milk and the sugar."


@dataclass(frozen=True)
class Call:
    """A method, a message for it, and the status that it has to end with. timed: the message may set a `timeout`.

    whole: checks a response for which no reason to be empty is given.
    """

    method: str
    message: Any
    status: grpc.StatusCode = OK
    timed: bool = False
    share: int = 4
    whole: Callable[[Any], bool] = bool


def _steps(count: int, ingredients: int) -> llm_pb2.AdjustedStepGenerationRequest:
    spoken = llm_pb2.OutputInteraction(speech_text=STEP)
    pair = llm_pb2.ReplacedIngredient(
        original=llm_pb2.Ingredient(name="butter"), replacement=llm_pb2.Ingredient(name="margarine")
    )
    return llm_pb2.AdjustedStepGenerationRequest(
        step=[llm_pb2.ExecutionStep(unique_id=str(number), response=spoken) for number in range(count)],
        ingredient=[pair] * ingredients,
    )


def _prompt(**fields: Any) -> llm_pb2.ModelRequest:
    return llm_pb2.ModelRequest(formatted_prompt=PROMPT, max_tokens=40, **fields)


def _of(count: int, field: str) -> Callable[[Any], bool]:
    return lambda response: len(getattr(response, field)) == count


_SCHEMA = llm_pb2.Grammar(json_schema=json.dumps(SCHEMA))
_EGGS = {"task_title": "Eggs", "step_text": STEP, "more_details": "Use a timer."}
CALLS = {
    "call_model": Call("LLMRunner/call_model", _prompt(), timed=True, share=16),
    "call_model, schema": Call("LLMRunner/call_model", _prompt(grammar=_SCHEMA), timed=True),
    "call_model, regex": Call("LLMRunner/call_model", _prompt(grammar=llm_pb2.Grammar(regex=REGEX)), timed=True),
    "batch_call_model": Call(
        "LLMRunner/batch_call_model",
        llm_pb2.ModelBatchRequest(formatted_prompts=[PROMPT] * 8, max_tokens=20),
        timed=True,
        whole=_of(8, "text"),
    ),
    "stream_model": Call("LLMRunner/stream_model", _prompt(), timed=True, share=12),
    "stream_model, read slowly": Call("LLMRunner/stream_model", _prompt(), timed=True),
    "shorten": Call("LLMRunner/generate_summary", llm_pb2.TGISummaryRequest(input_text=STEP)),
    "shorten several": Call("LLMRunner/generate_summaries", llm_pb2.TGIMultipleSummaryRequest(input_text=[STEP] * 3)),
    "chit chat": Call(
        "LLMChitChat/generate_chit_chat", llm_pb2.LLMChitChatRequest(user_question="How are you?"), timed=True
    ),
    "summary": Call("LLMSummaryGeneration/generate_summary", llm_pb2.SummaryGenerationRequest(**_EGGS)),
    "summaries": Call(
        "LLMSummaryGeneration/generate_summaries",
        llm_pb2.MultipleSummaryGenerationRequest(**{name: [value] * 3 for name, value in _EGGS.items()}),
    ),
    "description": Call(
        "LLMDescriptionGeneration/generate_description", llm_pb2.LLMDescriptionGenerationRequest(task_title="Soup")
    ),
    "descriptions": Call(
        "LLMDescriptionGeneration/generate_descriptions",
        llm_pb2.LLMMultipleDescriptionGenerationRequest(task_title=["Soup", "Cake"], domains=["COOKING"] * 2),
    ),
    "question": Call(
        "LLMProactiveQuestionGeneration/generate_proactive_question",
        llm_pb2.ProactiveQuestionGenerationRequest(task_title=["Soup"], previous_steps=[STEP], current_step=[STEP]),
    ),
    "replacement": Call(
        "LLMReplacementGeneration/generate_replacement",
        llm_pb2.IngredientReplacementRequest(original_ingredient=llm_pb2.Ingredient(name="butter", amount="100 g")),
    ),
    "rewrite_steps": Call("LLMReplacementGeneration/rewrite_steps", _steps(3, 1)),
    "decision": Call(
        "LLMExecutionSearchManager/generate_decision",
        llm_pb2.ExecutionSearchRequest(user_question="I want to make pizza instead"),
        timed=True,
    ),
    "decide": Call(
        "LLMDecisions/Decide",
        llm_pb2.DecisionRequest(input=STEP, questions=[llm_pb2.DecisionQuestion(instructions="It is sweet.")] * 4),
        timed=True,
        whole=lambda response: len(response.answers) == 4 and all(each.probabilities for each in response.answers),
    ),
    "embed": Call(
        "LLMEmbeddings/Embed", llm_pb2.EmbedRequest(texts=[STEP] * 8), timed=True, whole=_of(8, "embeddings")
    ),
    "warm": Call(
        "LLMPrefixCache/Warm",
        llm_pb2.WarmRequest(formatted_prompt=PROMPT, ttl_seconds=2),
        timed=True,
        whole=lambda response: response.prompt_tokens > 0,
    ),
    "bad: batch of 300,000": Call(
        "LLMRunner/batch_call_model", llm_pb2.ModelBatchRequest(formatted_prompts=[""] * 300_000), REFUSED, share=1
    ),
    "bad: many steps": Call("LLMReplacementGeneration/rewrite_steps", _steps(250, 250), share=1),
    "bad: 600 ingredients": Call("LLMReplacementGeneration/rewrite_steps", _steps(600, 600), REFUSED, share=1),
    "bad: grammar": Call("LLMRunner/call_model", _prompt(grammar=llm_pb2.Grammar(json_schema="[1")), REFUSED, share=1),
    "bad: message": Call("LLMRunner/call_model", b"\x0a\x05ab", REFUSED, share=1),
    "bad: long prompt": Call(
        "LLMRunner/call_model", llm_pb2.ModelRequest(formatted_prompt="rice " * 700_000), timed=True, share=1
    ),
}


@dataclass
class Report:
    """Times in seconds, beyond the deadlines."""

    outcomes: dict[str, dict[str, int]]
    wrong: list[str]
    # Those that nobody cancelled.
    calls: int
    # Calls that were answered more than 50 ms after their deadline, as their caller saw it.
    late: int
    # The latest answer; below 0 when all came before.
    worst: float
    # The same less what the machine and this process delayed it by.
    worst_but_delays: float
    # The five latest: how late in milliseconds, less those delays, and the kind.
    latest: list[str]
    # The longest time that an idle thread of this process waited for the processor.
    worst_delay: float


class FrontLoad:
    """Workers that each make one call after the other."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.tally = Tally()
        self.delays = Delays()
        self._channel = channel
        # The kind of a call, when it was made, by how much its answer was late, and when that came.
        self._times: list[tuple[str, float, float, float]] = []

    async def run(self, given: Iterator[Turn]) -> Report:
        async with self.delays.watched():
            await asyncio.gather(*(self._work(given) for _ in range(WORKERS)))
        past = sorted(
            ((late, self._delay(begun, late, ended), kind) for kind, begun, late, ended in self._times), reverse=True
        )
        return Report(
            outcomes={kind: dict(outcomes) for kind, outcomes in self.tally.outcomes.items()},
            wrong=self.tally.wrong,
            calls=len(past),
            late=sum(late > SLACK_SECONDS for late, _, _ in past),
            worst=past[0][0],
            worst_but_delays=max(late - delay for late, delay, _ in past),
            latest=[f"{late * 1000:.0f} ({(late - delay) * 1000:.0f}) {kind}" for late, delay, kind in past[:5]],
            worst_delay=self.delays.worst(),
        )

    def _delay(self, begun: float, late: float, ended: float) -> float:
        """Returns for how long others can have kept a late call from the service, and its answer from this process."""
        if late <= 0:
            return 0.0
        return self.delays.between(begun, begun + late) + self.delays.between(ended - late, ended)

    async def _work(self, given: Iterator[Turn]) -> None:
        calls = list(CALLS.items())
        shares = [call.share for _, call in calls]
        for turn in given:
            ((kind, call),) = turn.choices(calls, shares)
            await self._make(kind, call, turn)
            await asyncio.sleep(turn.uniform(0, PAUSE_SECONDS))

    async def _make(self, kind: str, call: Call, turn: Turn) -> None:
        message, seconds = call.message, DEFAULT_SECONDS
        if call.timed:
            timeout = turn.choice(TIMEOUTS)
            message, seconds = type(message)(), timeout / 1000
            message.CopyFrom(call.message)
            message.timeout = timeout
        sent = message if isinstance(message, bytes) else message.SerializeToString()
        cancelled, whole = turn.random() < CANCELLED, True
        begun = time.monotonic()
        try:
            async with asyncio.timeout(turn.uniform(0, seconds) if cancelled else GUARD_SECONDS):
                outcome, whole = await self._answer(call, sent, turn if "slowly" in kind else None)
        except TimeoutError:
            if cancelled:
                self.tally.note(kind, "cancelled")
            else:
                self.tally.fault(kind, f"no answer within {GUARD_SECONDS} s")
            return
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name
            if error.code() != call.status:
                self.tally.fault(kind, f"{outcome} {error.details()}")
                return
        if not whole:
            self.tally.fault(kind, "neither a whole answer nor a reason for an empty one")
        if "slowly" not in kind:
            ended = time.monotonic()
            self._times.append((kind, begun, ended - begun - seconds, ended))
        self.tally.note(kind, outcome)

    async def _answer(self, call: Call, sent: bytes, slowly: Turn | None) -> tuple[str, bool]:
        """Returns "answered", or why the answer is empty; and False if it is neither whole nor said to be empty."""
        whole = False
        if "stream" in call.method:
            stream = self._channel.unary_stream(f"/{call.method}")(sent)
            async for received in stream:
                whole = whole or self._is_whole(call, received)
                await asyncio.sleep(0 if slowly is None else slowly.uniform(0, 0.5))
            trailing = await stream.trailing_metadata()
        else:
            unary = self._channel.unary_unary(f"/{call.method}")(sent)
            whole = self._is_whole(call, await unary)
            trailing = await unary.trailing_metadata()
        reason = dict(trailing).get("empty-reason", "")
        return (f"empty: {reason}", True) if reason else ("answered", whole)

    @staticmethod
    def _is_whole(call: Call, received: bytes) -> bool:
        service, method = call.method.split("/")
        described = llm_pb2.DESCRIPTOR.services_by_name[service].methods_by_name[method]
        return call.whole(GetMessageClass(described.output_type).FromString(received))


async def main() -> None:
    gc.collect()
    gc.freeze()  # a collection that walks what was imported takes 35 ms, which would be the service's delay
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        amount, *seed = sys.argv[2:]
        given = turns(int(amount), int(seed[0])) if seed else turns_until(time.monotonic() + float(amount))
        report = await FrontLoad(channel).run(given)
    print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
