"""A voice assistant built with pipecat. Its answers, decisions and search queries are calls to llm_functionalities.

    python examples/assistant/assistant.py [--service HOST:PORT] [--models large,small] [--deadline SECONDS]

Speech recognition and synthesis are not included: a line of stdin is an utterance of the user, and sentences for
synthesis are printed. A line that comes while the assistant answers interrupts it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from loguru import logger
from pipecat.frames.frames import (
    EndFrame,
    Frame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    ProposedUserStartedSpeakingFrame,
    ProposedUserStoppedSpeakingFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TTSService
from pipecat.turns.user_turn_strategies import ExternalUserTurnStrategies
from pipecat.workers.runner import WorkerRunner

sys.path.append(str(Path(__file__).parents[2] / "proto"))
llm, services = grpc.protos_and_services("llm.proto")

SYSTEM = "You are the voice of a smart home. Answer in one to three short sentences, without lists or formatting."
KINDS = {
    "search": "asks for facts that have to be looked up: news, weather, opening hours, prices, recipes",
    "command": "wants a device to do something: lights, heating, music, a timer",
    "small talk": "talks, greets, or asks for an opinion, advice or a story",
}
FORMS: dict[str, dict[str, dict[str, object]]] = {  # enforced by the model server
    "search": {"query": {"type": "string", "maxLength": 80}},
    "command": {"device": {"enum": ["light", "heating", "music", "timer"]}, "action": {"enum": ["on", "off"]}},
}
TASKS = {
    "search": "Write the words to search the web for, to answer what the user says last. Answer in JSON: query.",
    "command": "Say what device is to do what, as the user wants it. Answer in JSON: device, action.",
}
# Shares of the turn's remaining time for a decision, and for a search or command; minimum confidence of a decision.
DECISION_SHARE, TASK_SHARE, MIN_CONFIDENCE = 0.25, 0.4, 0.1


def prompt(messages: list[dict[str, str]]) -> str:
    """Returns a conversation in ChatML, the format of Qwen and others. Texts cannot contain ChatML's special tokens."""
    turns = [f"<|im_start|>{turn['role']}\n{turn['content'].replace('<|', '< |')}<|im_end|>\n" for turn in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def search(query: str) -> str:
    """Stands in for a search service."""
    print(f"searches: {query}", flush=True)
    return f"Results for '{query}': the first page says that it is open from 9 to 18 h, and costs 5 euros."


def do(command: dict[str, str]) -> str:
    """Stands in for the service of the devices."""
    print(f"does: {command['device']} {command['action']}", flush=True)
    return f"The {command['device']} has been told: {command['action']}."


class Dialogue(FrameProcessor):
    """Answers each turn of the user by its deadline. An interruption cancels the generation."""

    def __init__(self, channel: grpc.aio.Channel, models: str, seconds: float) -> None:
        """models: names of models, such as "large,small"; empty: the service's default. seconds: deadline of a turn."""
        super().__init__()
        self._runner = services.LLMRunnerStub(channel)
        self._decisions = services.LLMDecisionsStub(channel)
        self._metadata = (("models", models),) if models else ()
        self._seconds = seconds

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        await self.push_frame(LLMFullResponseStartFrame())
        try:
            async for text in self._reply([dict(message) for message in frame.context.messages]):
                await self.push_frame(LLMTextFrame(text))
        except asyncio.CancelledError:
            print("interrupted", flush=True)
            raise
        except grpc.aio.AioRpcError as error:
            await self.push_error(f"the language service failed: {error.details()}", error)
        await self.push_frame(LLMFullResponseEndFrame())

    async def _reply(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """Yields the answer in pieces. The time-out of each call is the rest of the turn's time, in milliseconds."""
        end = time.monotonic() + self._seconds

        def left(share: float = 1.0) -> int:
            return max(1, int(1000 * share * (end - time.monotonic())))

        messages = [{"role": "system", "content": SYSTEM}, *messages]
        kind = await self._kind(messages[-1]["content"], left(DECISION_SHARE))
        if kind in FORMS:
            task = await self._task(kind, messages, left(TASK_SHARE))
            if task:
                messages[0]["content"] += f" {search(task['query']) if kind == 'search' else do(task)} Tell the user."
        request = llm.ModelRequest(formatted_prompt=prompt(messages), max_tokens=120, timeout=left())
        call, answer = self._runner.stream_model(request, metadata=self._metadata), ""
        try:
            async for piece in call:
                answer += piece.text
                yield piece.text
        finally:
            call.cancel()  # stops the generation; no effect on a call that has ended
        metadata = dict(await call.trailing_metadata() or ())
        print(f"answered by: {metadata.get('model', 'the only model')}", flush=True)
        if not answer.strip():
            yield f"One moment, please. ({metadata.get('empty-reason')})"

    async def _kind(self, utterance: str, timeout_ms: int) -> str:
        """Returns a key of KINDS; small talk if the model is not sure or not available."""
        choices = [llm.DecisionOption(label=label, description=text) for label, text in KINDS.items()]
        question = llm.DecisionQuestion(instructions="What does the user want?", choices=choices)
        request = llm.DecisionRequest(input=utterance, questions=[question], timeout=timeout_ms)
        answers = (await self._decisions.Decide(request, metadata=self._metadata)).answers
        sure = bool(answers) and answers[0].confidence >= MIN_CONFIDENCE
        print(
            f"decides: {answers[0].label} ({answers[0].confidence:.2f})" if answers else "decides: nothing", flush=True
        )
        return str(answers[0].label) if sure else "small talk"

    async def _task(self, kind: str, messages: list[dict[str, str]], timeout_ms: int) -> dict[str, str]:
        """Returns the model's search query or command; empty if there is none within the time-out."""
        schema = {"type": "object", "properties": FORMS[kind], "required": list(FORMS[kind])}
        task = prompt([{"role": "system", "content": TASKS[kind]}, *messages[-1:]])
        grammar = {"json_schema": json.dumps(schema | {"additionalProperties": False})}
        request = llm.ModelRequest(formatted_prompt=task, max_tokens=60, timeout=timeout_ms, grammar=grammar)
        text = (await self._runner.call_model(request, metadata=self._metadata)).text
        try:
            return dict(json.loads(text))
        except ValueError:  # empty, or cut off
            return {}


class PrintedVoice(TTSService):
    """Stands in for speech synthesis. pipecat passes it each sentence as soon as it is complete."""

    async def run_tts(self, text: str, context_id: str) -> AsyncIterator[Frame]:
        print(f"says: {text.strip()}", flush=True)
        yield TTSAudioRawFrame(bytes(2 * 1600), 16000, 1, context_id=context_id)


async def listen(worker: PipelineWorker, reader: asyncio.StreamReader) -> None:
    """Stands in for speech recognition: reports the beginning, the text and the end of an utterance."""
    while line := (await reader.readline()).decode().strip():
        text = TranscriptionFrame(line, "user", time.strftime("%FT%TZ", time.gmtime()), finalized=True)
        await worker.queue_frames([ProposedUserStartedSpeakingFrame(), text, ProposedUserStoppedSpeakingFrame()])
    await worker.queue_frame(EndFrame())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", default="127.0.0.1:8000", help="llm_functionalities (default: %(default)s)")
    parser.add_argument("--models", default="", help="models of --ladder-models, from the largest to the smallest")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds for a turn (default: %(default)s)")
    arguments = parser.parse_args()
    logger.configure(handlers=[{"sink": sys.stderr, "level": "WARNING"}])
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with grpc.aio.insecure_channel(arguments.service) as channel:
        turns = LLMUserAggregatorParams(user_turn_strategies=ExternalUserTurnStrategies())
        context = LLMContextAggregatorPair(LLMContext(), user_params=turns)
        dialogue = Dialogue(channel, arguments.models, arguments.deadline)
        voice = PrintedVoice(push_start_frame=True, settings=TTSSettings(model=None, voice=None, language=None))
        pipeline = Pipeline([context.user(), dialogue, voice, context.assistant()])
        worker = PipelineWorker(pipeline, idle_timeout_secs=None)
        runner = WorkerRunner()
        await runner.add_workers(worker)
        listener = asyncio.create_task(listen(worker, reader))
        await runner.run()
        await listener


if __name__ == "__main__":
    asyncio.run(main())
