"""The way of tokens back to a client: detokenization, stop sequences, the finish reason, and timestamps."""

from collections.abc import Callable, Collection
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.errors import IncompleteGeneration, RouterError
from tgi_server.router.text.detokenizer import Detokenizer
from tgi_server.router.text.stop_sequences import StopSequences
from tgi_server.router.text.tokenizer import TextTokenizer
from tgi_server.wire import finish_reason_from_message

OnEnd = Callable[[RouterError | None], None]


class Formatter(Protocol):
    """Writes a sequence in the format of its route."""

    def token(self, stream: "TokenStream[Formatter]") -> bool | None:
        """Writes the stream's current token. If it is the last one, `stream.finish_reason` is set.

        Returns True to end the sequence here.
        """

    def rest(self, stream: "TokenStream[Formatter]", text: str) -> None:
        """Writes an end that comes without a token. text: text that was held back until now."""


F = TypeVar("F", bound=Formatter, covariant=True)


class TokenStream(Generic[F]):
    """The sink of one sequence: the scheduler pushes tokens, and `output` writes them.

    prefill: the prompt's tokens and logprobs, if requested. cached_tokens: number of prompt tokens from the prefix
    cache.

    Attributes of the last token: token_id. text: the text that it completed, even if that is held back or cut off; for
    a special token, its name. visible: the text that may be shown now. logprob, top: if requested. drafted: True if the
    token was drafted. They are attributes of the stream so that no object has to be created for each token.

    Times are seconds of `perf_counter`.
    """

    __slots__ = (
        "_detokenizer",
        "_last_push_at",
        "_min_tokens",
        "_observe_gap",
        "_on_end",
        "_output",
        "_shown",
        "_special_tokens",
        "_stop_ids",
        "_stops",
        "_tokenizer",
        "cached_tokens",
        "drafted",
        "ended_at",
        "finish_reason",
        "first_token_at",
        "generated_tokens",
        "input_length",
        "logprob",
        "prefill",
        "queued_at",
        "started_at",
        "text",
        "token_id",
        "top",
        "visible",
    )

    def __init__(
        self,
        tokenizer: TextTokenizer,
        input_ids: list[int],
        stops: StopSequences | None,
        output: F,
        on_end: OnEnd,
        *,
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
        shown: Collection[int] = (),
        observe_gap: Callable[[float], None] | None = None,
    ) -> None:
        """input_ids: the prompt, as the text of the first generated token may depend on it.

        stops: stop sequences, if the request has any. stop_ids: tokens that end the text and are not part of it.
        on_end: called once, at the end, with the error if the sequence failed, else None.
        min_tokens: minimum number of tokens before the request's stop sequences and tokens can end the text.
        shown: special tokens that are part of the text.
        observe_gap: called with the seconds between the tokens of two steps.
        """
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._shown = shown
        self._detokenizer = Detokenizer(tokenizer, input_ids)
        self._special_tokens = tokenizer.special_tokens
        self._stops = stops
        self._output = output
        self._on_end = on_end
        self.input_length = len(input_ids)
        self.token_id = 0
        self.text = self.visible = ""
        self.logprob: float | None = None
        self.top: pb.TopTokens | None = None
        self.cached_tokens = 0
        self.drafted = False
        self.generated_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.prefill: pb.PrefillTokens | None = None
        self._observe_gap = observe_gap
        self._last_push_at = 0.0
        self.queued_at = self.started_at = self.first_token_at = self.ended_at = perf_counter()

    @property
    def output(self) -> F:
        """The formatter that writes the sequence."""
        return self._output

    @property
    def stop_sequence(self) -> str | None:
        """The stop sequence that ended the text; None if none did."""
        return self._stops.found if self._stops is not None else None

    def started(self, cached_tokens: int) -> None:
        """Records that the sequence has left the queue."""
        self.started_at = perf_counter()
        self.cached_tokens = cached_tokens

    def push(self, generation: pb.Generation) -> FinishReason | None:
        """Handles the tokens of one step; drops those after the end of the text.

        Returns the finish reason if one of the request's own conditions ends the text; otherwise None.
        """
        if self.finish_reason is not None:
            return self.finish_reason
        if generation.HasField("prefill_tokens"):
            self.prefill = generation.prefill_tokens
        drafted, token_ids = generation.drafted, generation.token_ids
        logprobs, top_tokens = generation.logprobs, generation.top_tokens
        if not drafted:  # drafted tokens come together with the token before them
            self._note_time()
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            self.generated_tokens += 1
            self.token_id = token_id
            self.drafted = drafted and position == 0
            reason = finish_reason_from_message(generation.finish_reason) if position == last else None
            special = token_id in self._special_tokens
            stop_token = token_id in self._stop_ids and self._may_end
            end_token = reason in (FinishReason.EOS_TOKEN, FinishReason.DEADLINE)
            if stop_token or end_token:  # belongs neither to the text nor to a stop sequence
                text, visible, stopped = self._tokenizer.token_text(token_id), "", False
                reason = reason if end_token else FinishReason.EOS_TOKEN
            elif special:
                text, visible, stopped = self._special(token_id)
            else:
                text, visible, stopped = self._plain(token_id)
            if stopped:
                reason = FinishReason.STOP_SEQUENCE
            if reason is not None:
                self.ended_at = perf_counter()
                self.finish_reason = reason
                if not stopped:
                    incomplete = self._detokenizer.flush()
                    visible += self._rest(incomplete)
                    text = text if special or stop_token or end_token else text + incomplete
            self.text, self.visible = text, visible
            self.logprob = logprobs[position] if logprobs else None
            self.top = top_tokens[position] if top_tokens else None
            enough = self._output.token(self)
            if stopped or stop_token:
                return reason
            if enough and reason is None:
                return self._end_here()
        return None

    def _end_here(self) -> FinishReason:
        """Ends the sequence as if the model had generated an end-of-sequence token. Returns the reason."""
        self.ended_at = perf_counter()
        self.finish_reason = FinishReason.EOS_TOKEN
        self._output.rest(self, self._rest(self._detokenizer.flush()))
        return self.finish_reason

    def _note_time(self) -> None:
        now = perf_counter()
        if not self.generated_tokens:
            self.first_token_at = now
        elif self._observe_gap is not None:
            self._observe_gap(now - self._last_push_at)
        self._last_push_at = now

    def finished(self, reason: FinishReason) -> None:
        """Ends the sequence normally; a sequence without any token fails."""
        if self.finish_reason is None:
            if not self.generated_tokens:
                self._on_end(IncompleteGeneration(f"the generation ended ({reason.value}) before its first token"))
                return
            # The last tokens were hidden ones.
            self.ended_at = perf_counter()
            self.finish_reason = reason
            self._output.rest(self, self._rest(self._detokenizer.flush()))
        self._on_end(None)

    def failed(self, error: RouterError) -> None:
        """Ends the sequence with an error."""
        self.ended_at = perf_counter()
        self._on_end(error)

    @property
    def _may_end(self) -> bool:
        """True if the request's own stop sequences and tokens may end the text with this token."""
        return self.generated_tokens > self._min_tokens

    def _plain(self, token_id: int) -> tuple[str, str, bool]:
        text = self._detokenizer.step(token_id)
        if self._stops is None:
            return text, text, False
        visible, stopped = self._stops.feed(text, may_end=self._may_end)
        return text, visible, stopped

    def _special(self, token_id: int) -> tuple[str, str, bool]:
        """Handles a special token, which is not part of the text unless it is shown; a stop sequence may name any."""
        name = self._special_tokens[token_id]
        shown = token_id in self._shown
        incomplete = self._detokenizer.flush()  # bytes that nothing can complete any more
        if self._stops is None:
            return name, incomplete + name if shown else incomplete, False
        if not shown and not self._stops.contain(name):
            visible, stopped = self._stops.feed(incomplete, may_end=self._may_end) if incomplete else ("", False)
            return name, visible, stopped
        visible, stopped = self._stops.feed(incomplete + name, may_end=self._may_end)
        return name, visible if shown or not self._stops.reveal else "", stopped

    def _rest(self, incomplete: str) -> str:
        """Returns the text that was held back. incomplete: the text of tokens without a complete character."""
        if self._stops is None:
            return incomplete
        shown, stopped = self._stops.feed(incomplete, may_end=self._may_end)
        return shown if stopped else shown + self._stops.flush()


AnyStream = TokenStream[Formatter]


class CollectedTokens:
    """A formatter that collects all tokens for a response in one piece. visible: the text that each token added."""

    __slots__ = ("logprobs", "texts", "token_ids", "top_tokens", "visible")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[float | None] = []
        self.top_tokens: list[pb.TopTokens] = []
        self.visible: list[str] = []

    def token(self, stream: AnyStream) -> None:
        self.token_ids.append(stream.token_id)
        self.texts.append(stream.text)
        self.logprobs.append(stream.logprob)
        self.visible.append(stream.visible)
        if stream.top is not None:
            self.top_tokens.append(stream.top)

    def rest(self, stream: AnyStream, text: str) -> None:
        self.visible[-1] += text

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(self.visible)

    def mean_logprob(self) -> float:
        """Returns the mean log-probability of the tokens that have one; minus infinity if none has."""
        known = [value for value in self.logprobs if value is not None]
        return sum(known) / len(known) if known else float("-inf")
