"""A shard whose model is a hash, but whose KV blocks are real: a wrong block, copy or grant gives wrong tokens.

The KV entry of a token is a hash of that token and of the entry before it, read from where the block table says that
it is; the next token is a hash of all entries of the sequence, read the same way. So a token tells whether every
block of the sequence held what it should. `expected_tokens` says what comes out when nothing is shared, moved,
preempted or computed in parts.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import (
    GrammarServiceServicer,
    TextGenerationServiceServicer,
    add_GrammarServiceServicer_to_server,
    add_TextGenerationServiceServicer_to_server,
)
from tgi_server.router.submission import PreparedRequest

EOS = 0
VOCABULARY = 24
_MAX_FORCED = 12
_MASK = (1 << 61) - 1


class ProtocolViolation(Exception):
    """The router asked for something that makes no sense."""


def _mix(*values: int) -> int:
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        state ^= state >> 29
    return state


def _adapter(name: str) -> int:
    """name: the adapter's name in a request, or its name in the shards, which ends with "#" and a number."""
    return _mix(*name.partition("#")[0].encode()) if name else 1


def _next_token(entries: Iterable[int], position: int, seed: int) -> int:
    return _mix(sum(entries), position, seed) % VOCABULARY


def expected_tokens(request: PreparedRequest, *, stop_after: int | None = None) -> list[int]:
    """Returns what the request generates. stop_after: the token count at which its sink ends it."""
    entry, entries = _adapter(request.options.adapter_id or ""), []
    tokens = list(request.input_ids)
    for token in tokens:
        entry = _mix(entry, token)
        entries.append(entry)
    generated: list[int] = []
    seed = request.options.sampling.seed if request.options.sampling.do_sample else 0
    while len(generated) < request.options.stopping.max_new_tokens and len(generated) != stop_after:
        token = _next_token(entries, len(entries), seed)
        generated.append(token)
        if token == EOS and not request.options.stopping.ignore_eos:
            break
        entry = _mix(entry, token)
        entries.append(entry)
    return generated


@dataclass(slots=True, eq=False)
class _Row:
    request: pb.Request
    tokens: list[int]
    blocks: list[int]
    computed: int
    state: int
    ended: bool = False

    @property
    def seed(self) -> int:
        return self.request.sampling.seed if self.request.sampling.do_sample else 0

    @property
    def past_prompt(self) -> bool:
        return self.generated > len(self.request.generated_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.input_ids)


@dataclass(slots=True)
class SimulatedShard:
    """Executes calls at once. `paged`: with blocks; otherwise sequences keep their entries to themselves.

    late_end: a sequence that ended takes part, unseen, in the steps that arrive before `collected`, as on a device
    that has started the next step before the tokens of the last one are known.
    broken: requests that fail with their next token. Those that are True get that token all the same.
    speculate: tokens drafted for a sequence in one step, at most. Some are right; what is computed of the others stays
    in the sequence's blocks.
    num_snapshots: of states. Where there are some, entries are made from the sequence's state, which is the entry
    before, and not from what its blocks hold.
    """

    num_blocks: int
    block_size: int
    max_batch_size: int = 256
    paged: bool = True
    late_end: bool = False
    speculate: int = 0
    num_snapshots: int = 0
    batch_id: int | None = None
    rows: dict[int, _Row] = field(default_factory=dict)
    kv: list[list[int]] = field(init=False)
    largest_step: int = 0
    broken: dict[int, bool] = field(default_factory=dict)
    snapshots: dict[int, tuple[int, int]] = field(default_factory=dict)  # length and state

    def __post_init__(self) -> None:
        self.kv = [[-1] * self.block_size for _ in range(self.num_blocks + 1)]

    def prefill(self, call: pb.PrefillRequest) -> pb.StepResponse:
        self._enter(call.batch_id)
        late = self._late_rows()
        for request in call.requests:
            self._join(request)
        self._grant(call.grants)
        self._save(call.saves)
        running = self._running() if call.decode else []
        if not call.chunks:
            raise ProtocolViolation("a prefill without chunks")
        self.largest_step = max(self.largest_step, sum(chunk.tokens for chunk in call.chunks))
        generations = [generation for row in running for generation in self._decode(row)]
        for chunk in call.chunks:
            row = self.rows.get(chunk.request_id)
            if row is None or row.past_prompt:
                raise ProtocolViolation(f"request {chunk.request_id} has no prompt to compute")
            saves = {save.length: save.snapshot for save in call.saves if save.request_id == chunk.request_id}
            generations += self._compute(row, chunk.tokens, saves)
        return self._leave(generations, late)

    def decode(self, call: pb.DecodeRequest) -> pb.StepResponse:
        self._enter(call.batch_id)
        late = self._late_rows()
        self._grant(call.grants)
        self._save(call.saves)
        return self._leave([generation for row in self._running() for generation in self._decode(row)], late)

    def filter_batch(self, call: pb.FilterBatchRequest) -> pb.FilterBatchResponse:
        self._enter(call.batch_id)
        keep = set(call.keep_request_ids)
        self.rows = {request_id: row for request_id, row in self.rows.items() if request_id in keep}
        return pb.FilterBatchResponse()

    def clear_cache(self, call: pb.ClearCacheRequest) -> pb.ClearCacheResponse:
        self.rows.clear()
        self.batch_id = None
        return pb.ClearCacheResponse()

    def collected(self, step: pb.StepResponse) -> None:
        """The step's tokens are known."""
        for generation in step.generations:
            if generation.finish_reason or generation.error:
                self.rows.pop(generation.request_id, None)

    def _enter(self, batch_id: int) -> None:
        if self.rows and self.batch_id != batch_id:
            raise ProtocolViolation(f"batch {self.batch_id} is running, not {batch_id}")
        self.batch_id = batch_id

    def _join(self, request: pb.Request) -> None:
        if request.id in self.rows:
            raise ProtocolViolation(f"request {request.id} is there already")
        if sum(1 for row in self.rows.values() if not row.ended) >= self.max_batch_size:
            raise ProtocolViolation("the batch is full")
        tokens = [*request.input_ids, *request.generated_ids]
        if request.cached_tokens >= len(tokens) or (request.cached_tokens and request.prefill_logprobs):
            raise ProtocolViolation("the last token, and all that are to be reported, must be computed")
        length, state = 0, _adapter(request.adapter_id)
        if request.snapshot:
            length, state = self.snapshots[request.snapshot]
        if self.num_snapshots and length != request.cached_tokens:
            raise ProtocolViolation(f"{request.cached_tokens} cached tokens with the state behind {length}")
        row = _Row(request, tokens, list(request.block_ids), request.cached_tokens, state)
        if request.HasField("copy"):
            copy = request.copy
            self.kv[copy.target][: copy.tokens] = self.kv[copy.source][: copy.tokens]
        if not self.paged:
            if row.blocks:
                raise ProtocolViolation("blocks for a model that has none")
            self.kv.append([-1] * (len(request.input_ids) + request.max_new_tokens))
            row.blocks = [len(self.kv) - 1]
        self.rows[request.id] = row

    def _grant(self, grants: Iterable[pb.Grant]) -> None:
        for grant in grants:
            if row := self.rows.get(grant.request_id):
                row.blocks += grant.block_ids

    def _save(self, saves: Iterable[pb.StateSave]) -> None:
        for save in saves:
            row = self.rows.get(save.request_id)
            if row is None or not (row.past_prompt or row.computed == save.length):
                continue
            if row.computed != save.length:
                raise ProtocolViolation(f"the state behind {save.length} tokens, where {row.computed} are computed")
            self._keep_state(row, save.snapshot)

    def _keep_state(self, row: _Row, snapshot: int) -> None:
        if not 0 < snapshot <= self.num_snapshots:
            raise ProtocolViolation(f"there is no snapshot {snapshot}")
        self.snapshots[snapshot] = row.computed, row.state

    def _running(self) -> list[_Row]:
        return [row for row in self.rows.values() if row.past_prompt and not row.ended]

    def _late_rows(self) -> list[_Row]:
        return [row for row in self.rows.values() if row.ended]

    def _slot(self, row: _Row, position: int) -> tuple[list[int], int]:
        if not self.paged:
            return self.kv[row.blocks[0]], position
        index, offset = divmod(position, self.block_size)
        if index >= len(row.blocks):
            raise ProtocolViolation(f"request {row.request.id} has no block for position {position}")
        if not 0 < row.blocks[index] <= self.num_blocks:
            raise ProtocolViolation(f"there is no block {row.blocks[index]}")
        return self.kv[row.blocks[index]], offset

    def _entry(self, row: _Row, position: int) -> int:
        block, offset = self._slot(row, position)
        return block[offset]

    def _write(self, row: _Row, position: int) -> None:
        before = self._entry(row, position - 1) if position else _adapter(row.request.adapter_id)
        if self.num_snapshots:
            before = row.state
        block, offset = self._slot(row, position)
        block[offset] = row.state = _mix(before, row.tokens[position])

    def _compute(self, row: _Row, tokens: int, saves: Mapping[int, int]) -> list[pb.Generation]:
        if not 0 < tokens <= len(row.tokens) - row.computed:
            raise ProtocolViolation(f"{tokens} tokens of request {row.request.id}: so many are not left")
        if not self.paged and tokens < len(row.tokens):
            raise ProtocolViolation("a part of a prompt for a model that takes whole ones")
        for _ in range(tokens):
            self._write(row, row.computed)
            row.computed += 1
            if row.computed in saves:
                self._keep_state(row, saves[row.computed])
        if row.computed < len(row.tokens):
            return []
        generations = self._yield(row)
        if row.request.prefill_logprobs:
            generations[0].prefill_tokens.ids.extend(row.request.input_ids)
        return generations

    def _decode(self, row: _Row) -> list[pb.Generation]:
        for _ in range(len(row.tokens) - row.computed):
            self._write(row, row.computed)
            row.computed += 1
        return self._yield(row)

    def _yield(self, row: _Row) -> list[pb.Generation]:
        """Computes drafted tokens with the others, then samples for as long as they turn out to be right."""
        drafted = self._drafted(row)
        before = self._entry(row, row.computed - 1)
        for place, token in enumerate(drafted, start=row.computed):
            block, offset = self._slot(row, place)
            before = block[offset] = _mix(before, token)
        generations = [self._sample(row)]
        for token in drafted:
            last = generations[-1]
            if last.finish_reason or last.error or list(last.token_ids) != [token]:
                break
            row.computed += 1
            row.state = self._entry(row, row.computed - 1)
            generations.append(self._sample(row))
        return generations

    def _drafted(self, row: _Row) -> list[int]:
        """Guesses what comes next; each guess is right, or not, for no reason."""
        if not self.speculate or not self.paged:
            return []
        room = min(
            self.speculate,
            len(row.blocks) * self.block_size - len(row.tokens) - 1,
            row.request.max_new_tokens - row.generated - 1,
        )
        entries = [self._entry(row, position) for position in range(row.computed)]
        drafted: list[int] = []
        while len(drafted) < room:
            token = _next_token(entries, len(entries), row.seed)
            drafted.append((token + (_mix(token, len(entries)) % 4 == 0)) % VOCABULARY)
            entries.append(_mix(entries[-1], drafted[-1]))
        return drafted

    def _sample(self, row: _Row) -> pb.Generation:
        entries = [self._entry(row, position) for position in range(row.computed)]
        if (with_token := self.broken.get(row.request.id)) is not None:
            row.ended = True
            row.tokens.append(EOS + 1)
            return pb.Generation(
                request_id=row.request.id, token_ids=row.tokens[-1:] if with_token else [], error="no token fits"
            )
        token = _next_token(entries, row.computed, row.seed)
        tokens = [token, *self._forced(row, entries, token)]
        row.tokens += tokens
        finish = pb.FINISH_REASON_NONE
        if tokens[-1] == EOS and not row.request.ignore_eos:
            finish = pb.FINISH_REASON_EOS_TOKEN
        elif row.generated >= row.request.max_new_tokens:
            finish = pb.FINISH_REASON_LENGTH
        row.ended = bool(finish)
        return pb.Generation(request_id=row.request.id, token_ids=tokens, finish_reason=finish)

    def _forced(self, row: _Row, entries: list[int], token: int) -> list[int]:
        """A request with a grammar gets some tokens at once: those that it would get anyway, as far as it has slots."""
        request = row.request
        if not request.HasField("grammar") or not self.paged:
            return []
        slots = len(row.blocks) * self.block_size - len(row.tokens) - 1
        room = min(slots, request.max_new_tokens - row.generated - 1, _mix(token, row.computed) % _MAX_FORCED)
        forced: list[int] = []
        entries = list(entries)
        while len(forced) < room and (token != EOS or request.ignore_eos):
            entries.append(_mix(entries[-1], token))
            token = _next_token(entries, len(entries), row.seed)
            forced.append(token)
        return forced

    def _leave(self, generations: list[pb.Generation], late: list[_Row]) -> pb.StepResponse:
        for row in late:
            if row.computed // self.block_size < len(row.blocks):
                self._write(row, row.computed)
                row.computed += 1
                row.tokens.append(EOS + 1)
        if not self.late_end:
            self.rows = {request_id: row for request_id, row in self.rows.items() if not row.ended}
        return pb.StepResponse(generations=generations)


class SimulatedShardService(TextGenerationServiceServicer, GrammarServiceServicer):
    """Serves a simulated shard.

    step_seconds: how long a step takes. failing: raised by every step, while it is set. hanging: steps never end.
    ill: Health fails. frozen: it never ends. calls: the methods that were executed, in order. warmups: limits and
    capacity of each. sleepless: why Sleep is refused. drowsy: Wake fails. change_seconds: how long both take. asleep:
    no step may come.
    """

    def __init__(self, shard: SimulatedShard, urls: list[str], step_seconds: float = 0.0) -> None:
        self.shard = shard
        self.step_seconds = step_seconds
        self.failing: Exception | None = None
        self.hanging = False
        self.ill = False
        self.frozen = False
        self.sleepless = ""
        self.drowsy = False
        self.change_seconds = 0.0
        self.asleep = False
        self.calls: list[str] = []
        self.warmups: list[dict[str, Any]] = []
        self._urls = urls

    async def Info(self, request, context):
        return pb.InfoResponse(
            model_id="simulated",
            paged=self.shard.paged,
            block_size=self.shard.block_size,
            eos_token_ids=[EOS],
            vocab_size=VOCABULARY,
            **(self.warmups[-1] if self.warmups else {}),
        )

    async def Compile(self, request, context):
        return pb.CompileResponse()

    async def ServiceDiscovery(self, request, context):
        return pb.ServiceDiscoveryResponse(urls=self._urls, grammar_urls=self._urls)

    async def Health(self, request, context):
        if self.ill:
            await context.abort(grpc.StatusCode.INTERNAL, "the device computes no more")
        if self.frozen:
            await asyncio.sleep(1e6)
        return pb.HealthResponse()

    async def Sleep(self, request, context):
        await asyncio.sleep(self.change_seconds)
        reason = self.sleepless or ("sequences run" if self.shard.rows else "")
        if reason:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        self.asleep = True
        self.shard.kv = [[-1] * self.shard.block_size for _ in self.shard.kv]
        return pb.SleepResponse(released_bytes=1000)

    async def Wake(self, request, context):
        await asyncio.sleep(self.change_seconds)
        if self.drowsy:
            await context.abort(grpc.StatusCode.INTERNAL, "the weights cannot be read")
        self.asleep = False
        return pb.WakeResponse()

    async def Warmup(self, request, context):
        tokens = self.shard.num_blocks * self.shard.block_size
        capacity = pb.WarmupResponse(
            num_blocks=self.shard.num_blocks, max_total_tokens=tokens, max_batch_total_tokens=tokens
        )
        self.warmups.append({"limits": request, "capacity": capacity})
        return capacity

    async def Run(self, calls, context):
        try:
            async for call in calls:
                kind = call.WhichOneof("call")
                yield pb.Answer(**{_ANSWERS[kind]: await self._execute(kind, getattr(call, kind))})
        except (ProtocolViolation, RuntimeError) as error:
            yield pb.Answer(failure=pb.Failure(reason=str(error)))
            await asyncio.Event().wait()

    async def _execute(self, kind, request):
        if _ANSWERS[kind] == "step":
            await asyncio.sleep(1e6 if self.hanging else self.step_seconds)
            if self.failing is not None:
                raise self.failing
            if self.asleep:
                raise ProtocolViolation("a step came while the model slept")
        self.calls.append(kind)
        return getattr(self.shard, kind)(request)


_ANSWERS = {"prefill": "step", "decode": "step", "filter_batch": "filter_batch", "clear_cache": "clear_cache"}


@dataclass(slots=True)
class RunningShards:
    """path: the first shard's socket. services, servers: of all, in rank order."""

    path: str
    services: list[SimulatedShardService]
    servers: list[grpc.aio.Server]


@asynccontextmanager
async def running_shards(*shards: SimulatedShard, step_seconds: float = 0.0) -> AsyncIterator[RunningShards]:
    """Serves each shard on a Unix socket of its own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"shard-{rank}") for rank in range(len(shards))]
        urls = [f"unix://{path}" for path in paths]
        running = RunningShards(paths[0], [], [])
        for shard, url in zip(shards, urls, strict=True):
            # as many pings as the real one allows
            allowed = [("grpc.max_receive_message_length", -1), ("grpc.http2.max_ping_strikes", 0)]
            server = grpc.aio.server(options=allowed)
            service = SimulatedShardService(shard, urls, step_seconds)
            add_TextGenerationServiceServicer_to_server(service, server)
            add_GrammarServiceServicer_to_server(service, server)
            server.add_insecure_port(url)
            await server.start()
            running.services.append(service)
            running.servers.append(server)
        try:
            yield running
        finally:
            await asyncio.gather(*(server.stop(None) for server in running.servers))
