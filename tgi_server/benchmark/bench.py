"""Runs batches on shards and measures their steps, through the shards' own gRPC service, as the router would."""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice, product
from time import perf_counter

from shared.stubs import generate_pb2 as pb
from tgi_server.benchmark.prompt import prompt_tokens
from tgi_server.benchmark.settings import BenchmarkSettings
from tgi_server.router.errors import GenerationFailed, RouterError, StartupError
from tgi_server.router.scheduling import calls
from tgi_server.router.scheduling.shard_client import PendingResponse, ShardedClient
from tgi_server.wire import sampling_to_message

USUAL_BATCH_SIZES = (1, 2, 4, 8, 16, 32)

# Prompt tokens of one step of shards that no router has warmed up.
PREFILL_TOKENS = 4096

_BATCH = 1
_CONNECT_SECONDS = 10.0
_CLEAR_SECONDS = 60.0

# A part of a prompt, or all of it: the request that joins with it or None, its id, the tokens that are computed.
PromptPart = tuple[pb.Request | None, int, int]


class DoesNotFit(StartupError):
    """A case is larger than what the shards have room for. The message says which limit it is."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch: the number of prompts, the tokens of each, and the tokens generated for each."""

    batch_size: int
    sequence_length: int
    decode_length: int

    def __str__(self) -> str:
        return f"batch of {self.batch_size}, {self.sequence_length} + {self.decode_length} tokens"


@dataclass(slots=True)
class Result:
    """Times of one case, in seconds. `runs` grows as they are measured.

    prefill: the time for all prompts of the batch, for each run. decode: the time of each step of all runs; a step
    gives each sequence a token. error: why its runs ended early.
    """

    case: Case
    runs: int = 0
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    decoded_tokens: int = 0
    error: str = ""

    @property
    def prefill_throughput(self) -> float:
        """Prompt tokens per second."""
        tokens = self.case.batch_size * self.case.sequence_length * len(self.prefill)
        return tokens / sum(self.prefill) if self.prefill else 0.0

    @property
    def decode_throughput(self) -> float:
        """Tokens per second that all sequences get together once their prompts are computed."""
        return self.decoded_tokens / sum(self.decode) if self.decode else 0.0


class ShardBench:
    """Measures cases one after the other. `info` is what the shards say of their model and their limits."""

    def __init__(self, shards: ShardedClient, info: pb.InfoResponse, settings: BenchmarkSettings) -> None:
        self.info = info
        self.cases: list[Case] = []
        self.runs = settings.runs
        self._shards = shards
        self._settings = settings
        self._prompt: Sequence[int] = ()
        self._ids = count(1)

    @classmethod
    async def connect(cls, socket: str, settings: BenchmarkSettings) -> "ShardBench":
        """Connects to the shards, and warms them up if they are not. Raises RouterError and StartupError."""
        shards = await ShardedClient.connect(socket, timeout_s=_CONNECT_SECONDS)
        try:
            info = await shards.info()
            if not info.HasField("limits"):
                largest = max(settings.batch_size or USUAL_BATCH_SIZES)
                await shards.warmup(pb.WarmupRequest(max_batch_size=largest, max_prefill_tokens=PREFILL_TOKENS))
                info = await shards.info()
            bench = cls(shards, info, settings)
            bench._choose_cases()
            bench._prompt = prompt_tokens(info, settings.tokenizer_name, settings.revision)
        except BaseException:
            await shards.close()
            raise
        return bench

    async def close(self) -> None:
        await self._shards.close()

    async def results(self) -> AsyncIterator[Result]:
        """Yields the result of a case after each of its runs, warm-ups included, then that of the next case."""
        for case in self.cases:
            result = Result(case)
            try:
                for _ in range(self._settings.warmups):
                    await self._run(Result(case))
                    yield result
                for _ in range(self.runs):
                    await self._run(result)
                    result.runs += 1
                    yield result
            except RouterError as error:
                result.error = str(error)
                yield result

    def _choose_cases(self) -> None:
        settings = self._settings
        sizes = settings.batch_size or USUAL_BATCH_SIZES
        for case in (Case(*values) for values in product(sizes, settings.sequence_length, settings.decode_length)):
            try:
                self._check(case)
            except DoesNotFit:
                if settings.batch_size or case.batch_size == USUAL_BATCH_SIZES[0]:
                    raise
            else:
                self.cases.append(case)

    def _check(self, case: Case) -> None:
        """Raises DoesNotFit."""
        limits, capacity = self.info.limits, self.info.capacity
        tokens = case.sequence_length + case.decode_length
        if case.batch_size > limits.max_batch_size:
            raise DoesNotFit(f"a {case} is more than the {limits.max_batch_size} sequences that the server is set to")
        if tokens > capacity.max_total_tokens:
            raise DoesNotFit(f"a {case} is more than the {capacity.max_total_tokens} tokens that a sequence may have")
        if self.info.paged and case.batch_size * self._blocks_of(case) > capacity.num_blocks:
            raise DoesNotFit(
                f"a {case} is more than the KV cache has room for: {capacity.max_batch_total_tokens} tokens"
            )

    def _blocks_of(self, case: Case) -> int:
        """Returns the KV blocks that one sequence needs."""
        return -(-(case.sequence_length + case.decode_length) // self.info.block_size) if self.info.paged else 0

    async def _run(self, result: Result) -> None:
        """Runs a case once. Raises GenerationFailed."""
        await self._shards.send(calls.clear_call(), _CLEAR_SECONDS).response()
        requests = list(self._requests(result.case))
        running = {request.id for request in requests}
        begun = perf_counter()
        steps = [self._send_prefill(chunks) for chunks in self._prefill_steps(requests)]
        for step in steps:
            _take(await step.response(), running)
        result.prefill.append(perf_counter() - begun)
        await self._decode(running, result)
        await self._shards.send(calls.clear_call(), _CLEAR_SECONDS).response()

    async def _decode(self, running: set[int], result: Result) -> None:
        """Decodes until every sequence has ended. One call is sent ahead, as by the router."""
        unsent = result.case.decode_length - 1
        sent: list[PendingResponse] = []
        before = perf_counter()
        while running or sent:
            while running and unsent and len(sent) < 2:
                sent.append(self._shards.send(calls.decode_call(_BATCH, ())))
                unsent -= 1
            if not sent:
                raise GenerationFailed(f"{len(running)} sequences have not ended with their last token")
            tokens = _take(await sent.pop(0).response(), running)
            now = perf_counter()
            if tokens:
                result.decode.append(now - before)
                result.decoded_tokens += tokens
            before = now

    def _requests(self, case: Case) -> Iterator[pb.Request]:
        settings, blocks = self._settings, self._blocks_of(case)
        for place in range(case.batch_size):
            # Each prompt begins elsewhere in the text, so that no two are the same.
            tokens = islice(cycle(self._prompt), place, place + case.sequence_length)
            yield pb.Request(
                id=next(self._ids),
                input_ids=tokens,
                max_new_tokens=case.decode_length,
                ignore_eos=True,
                sampling=sampling_to_message(settings.sampling()),
                top_n_tokens=settings.top_n_tokens,
                block_ids=range(1 + place * blocks, 1 + (place + 1) * blocks),
            )

    def _prefill_steps(self, requests: Sequence[pb.Request]) -> Iterator[list[PromptPart]]:
        """Yields what each step computes of the prompts: as much as the server's limit allows."""
        limit = self.info.limits.max_prefill_tokens
        step: list[PromptPart] = []
        room = limit
        for request in requests:
            joining: pb.Request | None = request
            left = len(request.input_ids)
            while left:
                tokens = min(left, room) if self.info.paged else left
                if step and (not room or tokens > room):
                    yield step
                    step, room = [], limit
                    continue
                step.append((joining, request.id, tokens))
                joining, left, room = None, left - tokens, max(0, room - tokens)
        yield step

    def _send_prefill(self, chunks: Sequence[PromptPart]) -> PendingResponse:
        joining = [(request, None, ()) for request, _, _ in chunks if request is not None]
        parts = [(request_id, tokens) for _, request_id, tokens in chunks]
        return self._shards.send(calls.prefill_call(_BATCH, joining, parts, (), decode=False))


def _take(answer: pb.Answer, running: set[int]) -> int:
    """Takes those that have ended out of `running`. Returns the number of tokens. Raises GenerationFailed."""
    tokens = 0
    for generation in answer.step.generations:
        if generation.error:
            raise GenerationFailed(generation.error)
        tokens += len(generation.token_ids)
        if generation.finish_reason != pb.FINISH_REASON_NONE:
            running.discard(generation.request_id)
    return tokens
