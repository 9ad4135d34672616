"""Checks what a client asks for against every limit, and makes the prompt tokens."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from tgi_server.contract import Grammar, SamplingParameters
from tgi_server.router.errors import ContextOverflow, InvalidRequest, NoSuchAdapter
from tgi_server.router.request import Limits
from tgi_server.router.scheduling.adapters import Adapters
from tgi_server.router.schemas.generate import GenerateParameters
from tgi_server.router.text.detokenizer import StopSequences
from tgi_server.router.text.grammar import requested_grammar, with_text
from tgi_server.router.text.parameters import (
    check_amounts,
    check_best_of,
    check_streaming,
    sampling_parameters,
)
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.tokenizer import TokenizerThreads
from tgi_server.router.text.truncation import end_characters


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A prompt and parameters that keep every rule.

    input_ids: the prompt, cut to `truncate`.
    prefill_top_n: most likely tokens to report in the place of each token of the prompt.
    unenforced: constraints of the grammar that are left to the model, each as a line.
    seed: what `details` reports; None when tokens are not sampled.
    """

    input_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParameters
    stop: Sequence[str]
    top_n_tokens: int
    prefill_logprobs: bool
    ignore_eos: bool
    grammar: Grammar | None
    cache_salt: str | None
    adapter_id: str | None = None
    prefill_top_n: int = 0
    unenforced: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    show_special: bool = False

    @property
    def seed(self) -> int | None:
        return self.sampling.seed if self.sampling.do_sample else None

    def stop_sequences(self, *, reveal: bool) -> StopSequences | None:
        """Returns what watches the text; None without stop sequences. reveal: a stop sequence is part of the text."""
        return StopSequences(self.stop, reveal=reveal) if self.stop else None

    def times(self, sequences: int) -> "list[CheckedRequest]":
        """Returns the request so many times over, each with a seed of its own: the request's, and those after it."""
        seeds = ((self.sampling.seed + index) % 2**64 for index in range(sequences))
        return [replace(self, sampling=replace(self.sampling, seed=seed)) for seed in seeds]


class Validator:
    """Checks requests against the server's limits.

    vocab_size: tokens that the model can generate.
    grammar_refusal: why this server takes no grammars; None when it does.
    compile_grammar: has the shards compile a grammar, and returns the constraints that are left to the model, each as
    a line; raises InvalidRequest for one that cannot be used.
    adapters: that requests may name. end_tokens: that the model ends a text with.
    """

    def __init__(
        self,
        limits: Limits,
        threads: TokenizerThreads,
        vocab_size: int,
        grammar_refusal: str | None,
        compile_grammar: Callable[[Grammar], Awaitable[tuple[str, ...]]],
        adapters: Adapters,
        end_tokens: Sequence[int] = (),
    ) -> None:
        self._limits = limits
        self._threads = threads
        self._vocab_size = vocab_size
        self._grammar_refusal = grammar_refusal
        self._compile_grammar = compile_grammar
        self._adapters = adapters
        self._end_tokens = tuple(end_tokens)

    async def check(
        self,
        prompt: RenderedPrompt,
        parameters: GenerateParameters,
        *,
        add_special_tokens: bool = True,
        streaming: bool = False,
        grammar: Grammar | None = None,
        spans_of: str | None = None,
        size: int = 0,
        limits: Limits | None = None,
    ) -> CheckedRequest:
        """Returns what the scheduler takes. Work on a large request leaves the event loop.

        grammar: in place of the parameters' own. spans_of: the text that `x-span` takes spans of; None: the prompt.
        size: bytes of the whole request. limits: other amounts than those of TGI's routes.

        Raises InvalidRequest with one line that says what is wrong.
        """
        if streaming:
            check_streaming(parameters)
        sampling = sampling_parameters(parameters, self._vocab_size, self._end_tokens)
        check_amounts(parameters, limits or self._limits)
        check_best_of(parameters, sampling, self._limits)
        if parameters.adapter_id:
            self._check_adapter(parameters.adapter_id)
        if not prompt.text and not prompt.token_ids:
            raise InvalidRequest("`inputs` must not be empty")

        def prepare() -> tuple[Grammar | None, list[int]]:
            wanted = grammar or requested_grammar(parameters.grammar)
            if parameters.min_tokens and wanted:
                raise InvalidRequest("`min_tokens` cannot be used with a grammar, which says when the text ends")
            if wanted:
                wanted = with_text(wanted, spans_of or prompt.text)
                if fault := wanted.too_long():
                    raise InvalidRequest(f"the grammar cannot be used: {fault}")
            return wanted, self._input_ids(prompt, parameters.truncate, add_special_tokens=add_special_tokens)

        prepared, input_ids = await self._threads.handle_text(_work(prompt.text, size, parameters.truncate), prepare)
        max_new_tokens = self._max_new_tokens(len(input_ids), parameters.max_new_tokens)
        unenforced = await self._compile(prepared)
        return CheckedRequest(
            input_ids=input_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=parameters.stop,
            top_n_tokens=parameters.top_n_tokens or 0,
            prefill_logprobs=parameters.decoder_input_details,
            ignore_eos=parameters.ignore_eos,
            grammar=prepared,
            cache_salt=parameters.cache_salt,
            adapter_id=parameters.adapter_id or None,
            unenforced=unenforced,
            stop_token_ids=frozenset(parameters.stop_token_ids or ()),
            show_special=not parameters.skip_special_tokens,
        )

    def _check_adapter(self, adapter_id: str) -> None:
        try:
            self._adapters.find(adapter_id)
        except NoSuchAdapter as error:
            raise InvalidRequest(f"`adapter_id`: {error}") from None

    def _input_ids(self, prompt: RenderedPrompt, truncate: int | None, *, add_special_tokens: bool) -> list[int]:
        """Returns the prompt's tokens, cut to `truncate`. A text that cannot fit, or is cut, is not tokenised as
        a whole.
        """
        tokenizer, most = self._threads.tokenizer, self._limits.max_input_tokens
        if prompt.token_ids is not None:
            ids = prompt.token_ids
        elif truncate and len(prompt.text) > end_characters(truncate):

            def encode(text: str) -> list[int]:
                return tokenizer.encode(text, add_special_tokens=add_special_tokens, offsets=False).ids

            ids = prompt.last_ids(truncate, encode)
        else:
            if not truncate and tokenizer.exceeds(prompt.text, most):
                raise ContextOverflow.of_prompt(most + 1, most, at_least=True)
            encoding = tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens, offsets=False)
            ids = prompt.checked(encoding)[1].ids
        if (highest := max(ids, default=0)) >= self._vocab_size:  # a tokenizer may have more tokens than the model
            raise InvalidRequest(f"the prompt has the token {highest}; the model knows 0 to {self._vocab_size - 1}")
        return list(ids[-truncate:] if truncate else ids)

    def _max_new_tokens(self, input_length: int, asked: int | None) -> int:
        limits = self._limits
        if not input_length:
            raise InvalidRequest("`inputs` has no tokens")
        if input_length > limits.max_input_tokens:
            raise ContextOverflow.of_prompt(input_length, limits.max_input_tokens)
        if asked is None:
            return limits.max_total_tokens - input_length
        if input_length + asked > limits.max_total_tokens:
            raise ContextOverflow.of_total(input_length, asked, limits.max_total_tokens)
        return asked

    async def _compile(self, grammar: Grammar | None) -> tuple[str, ...]:
        """Has the shards compile the grammar: the request waits for it, and for nobody else's."""
        if grammar is None:
            return ()
        if self._grammar_refusal is not None:
            raise InvalidRequest(self._grammar_refusal)
        return await self._compile_grammar(grammar)


def _work(text: str, size: int, truncate: int | None) -> int:
    """Returns how many characters of a request are worked on. size: bytes of the whole request."""
    tokenised = min(len(text), 2 * end_characters(truncate)) if truncate else len(text)
    return max(size - len(text), 0) + tokenised


def grammar_refusal(*, disabled: bool, supported: bool) -> str | None:
    """Returns why requests with a grammar are refused; None if they are not."""
    if disabled:
        return "grammars are switched off on this server (--disable-grammar-support)"
    if not supported:
        return "grammars are not supported by this server's shards for this model"
    return None
