"""Prepares requests for the scheduler: tokenizes the prompt, limits the length, and has the grammar compiled."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from tgi_server.contract import GenerationOptions, Grammar, ThoughtBudget
from tgi_server.router.answers.reasoning import ReasoningTags
from tgi_server.router.errors import ContextOverflow, InvalidRequest, NoSuchAdapter
from tgi_server.router.limits import Limits
from tgi_server.router.media.images import ImageReader
from tgi_server.router.option_reader import check_company
from tgi_server.router.options import Dialect
from tgi_server.router.prompt_source import PromptPart, PromptSource
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.submission import PreparedRequest
from tgi_server.router.text.grammar import token_grammar, with_text
from tgi_server.router.text.special_tokens import RenderedPrompt
from tgi_server.router.text.tokenizer import TextTokenizer, TokenizerThreads
from tgi_server.router.text.truncation import end_characters, tokenised_characters

# Number of last tokens of a prompt among which the beginning of a thought is looked for.
_LAST_TOKENS = 32
_UNLIMITED = -1


class Preparer:
    """Checks requests against the server's limits.

    vocab_size: number of tokens of the model. grammar_refusal: reason for which this server accepts no grammars; None:
    it does. compile_grammar: compiles a grammar in the shards for a client, and returns the constraints that are left
    to the model, one per line; raises InvalidRequest. adapters: adapters that requests can name. end_tokens: tokens
    that end a text. thoughts: the tags around the model's reasoning. images: reader of images; None: the model reads
    none.
    """

    def __init__(
        self,
        limits: Limits,
        threads: TokenizerThreads,
        vocab_size: int,
        grammar_refusal: str | None,
        compile_grammar: Callable[[Grammar, str], Awaitable[tuple[str, ...]]],
        adapters: Adapters,
        end_tokens: Collection[int] = (),
        thoughts: ReasoningTags | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self._images = images
        self._limits = limits
        self._threads = threads
        self._vocab_size = vocab_size
        self._grammar_refusal = grammar_refusal
        self._compile_grammar = compile_grammar
        self._adapters = adapters
        self._end_tokens = frozenset(end_tokens)
        self._thoughts = thoughts
        unseparated = None if thoughts else "this model's reasoning is not separated from its answers"
        lacking = {"grammars": grammar_refusal, "thoughts": unseparated}
        self._lacking = {ability: reason for ability, reason in lacking.items() if reason is not None}

    async def prepare(
        self,
        prompt: RenderedPrompt,
        options: GenerationOptions,
        dialect: Dialect,
        *,
        client: str,
        add_special_tokens: bool = True,
        spans_of: str | None = None,
        size: int = 0,
        thinking: bool = False,
        source: PromptSource | None = None,
    ) -> PreparedRequest:
        """Returns the request for the scheduler. Large requests are prepared outside of the event loop.

        client: name for fair scheduling of the work. spans_of: the text that `x-span` refers to; None: the prompt.
        size: bytes of the whole request. thinking: True if the prompt ends within reasoning. source: the texts of the
        prompt; None: it is one text.

        Raises InvalidRequest with a one-line message.
        """
        if options.adapter_id:
            self._check_adapter(options.adapter_id, dialect)
        if not prompt.text and not prompt.token_ids:
            raise InvalidRequest.at(dialect.prompt, "must not be empty")
        beside = {"grammar": options.grammar, "images": prompt.images}
        check_company(options, dialect, {name for name, value in beside.items() if value}, self._lacking)
        truncate = options.truncate
        made_of = source or PromptSource(parts=(PromptPart(dialect.prompt, "", prompt.text),))
        made_of.text = None if truncate else prompt.text

        def work() -> tuple[Grammar | None, list[int]]:
            grammar = options.grammar
            if options.allowed_token_ids:
                grammar = token_grammar(options.allowed_token_ids, self._end_tokens)
            if grammar:
                grammar = with_text(grammar, spans_of or prompt.text)
                if fault := grammar.too_long():
                    raise InvalidRequest(f"the grammar cannot be used: {fault}", grammar.place)
            made_of.measure()
            return grammar, self._input_ids(prompt, truncate, add_special_tokens=add_special_tokens)

        grammar, input_ids = await self._threads.handle_text(_characters(prompt.text, size, truncate), work)
        if not input_ids:
            raise InvalidRequest.at(dialect.prompt, "has no tokens")
        max_new_tokens = self._max_new_tokens(len(input_ids), options.stopping.max_new_tokens, dialect)
        budget = None
        most = options.thinking_token_budget
        if most is not None and most != _UNLIMITED and self._thoughts is not None:
            budget = _thought_budget(
                most, self._thoughts, self._threads.tokenizer, input_ids, grammar, thinking=thinking
            )
        unenforced = await self._compile(grammar, client)
        prepared = options
        if max_new_tokens != options.stopping.max_new_tokens or grammar is not options.grammar or budget is not None:
            stopping = replace(options.stopping, max_new_tokens=max_new_tokens)
            prepared = replace(options, stopping=stopping, grammar=grammar, thought_budget=budget)
        images = self._images.placed(input_ids, prompt.images) if self._images is not None else ()
        return PreparedRequest(input_ids, prepared, len(prompt.text), unenforced, images, source=made_of)

    def may_add_grammar(self, options: GenerationOptions) -> bool:
        """Returns True if the server may add a grammar of its own to a request with these options."""
        others = options.grammar or options.allowed_token_ids or options.sampling.min_tokens
        return not others and self._grammar_refusal is None

    def _check_adapter(self, adapter_id: str, dialect: Dialect) -> None:
        try:
            self._adapters.find(adapter_id)
        except NoSuchAdapter as error:
            name = "adapter_id" if dialect is Dialect.TGI else "model"
            raise InvalidRequest(f"`{name}`: {error}", param=name) from None

    def _input_ids(self, prompt: RenderedPrompt, truncate: int, *, add_special_tokens: bool) -> list[int]:
        """Returns the prompt's tokens; only the last `truncate`, unless that is 0.

        A text that is truncated, or certainly too long, is not tokenized completely.
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
            ids = prompt.literally(encoding).ids
        if (highest := max(ids, default=0)) >= self._vocab_size:  # a tokenizer may have more tokens than the model
            raise InvalidRequest(
                f"the prompt has the token {highest}; token ids of the model are 0 to {self._vocab_size - 1}"
            )
        return list(ids[-truncate:] if truncate else ids)

    def _max_new_tokens(self, input_length: int, asked: int, dialect: Dialect) -> int:
        """Returns the number of tokens to generate. asked: the number that the request has; 0: as many as fit.

        TGI's interface refuses a request for more tokens than fit. In the others the number is reduced, because their
        clients ask for the longest answer of the model.
        """
        limits = self._limits
        if input_length > limits.max_input_tokens:
            raise ContextOverflow.of_prompt(input_length, limits.max_input_tokens)
        room = limits.max_total_tokens - input_length
        if asked > room and dialect is Dialect.TGI:
            raise ContextOverflow.of_total(input_length, asked, limits.max_total_tokens)
        return min(asked, room) if asked else room

    async def _compile(self, grammar: Grammar | None, client: str) -> tuple[str, ...]:
        """Has the shards compile the grammar. client: name for fair scheduling."""
        if grammar is None:
            return ()
        if self._grammar_refusal is not None:
            raise InvalidRequest(self._grammar_refusal, grammar.place)
        return await self._compile_grammar(grammar, client)


def _characters(text: str, size: int, truncate: int) -> int:
    """Returns how many characters of a request have to be processed. size: bytes of the whole request."""
    tokenised = tokenised_characters(text, truncate) if truncate else len(text)
    return max(size - len(text), 0) + tokenised


def grammar_refusal(*, disabled: bool, supported: bool) -> str | None:
    """Returns why requests with a grammar are refused; None if they are not."""
    if disabled:
        return "grammars are switched off on this server (--disable-grammar-support)"
    if not supported:
        return "grammars are not supported by this server's shards for this model"
    return None


def _thought_budget(
    tokens: int,
    tags: ReasoningTags,
    tokenizer: TextTokenizer,
    prompt: list[int],
    grammar: Grammar | None,
    *,
    thinking: bool = False,
) -> ThoughtBudget | None:
    """Returns the reasoning budget of an answer; None if the grammar allows no thoughts.

    thinking: True if it is known that a thought has begun in the prompt.
    """
    if grammar is not None and not grammar.frame:
        return None
    # With a grammar, its frame determines what follows a thought.
    closing = tags.end if grammar is not None else tags.end + tags.opening
    return ThoughtBudget(
        tokens,
        tags.begin,
        tags.end,
        tuple(tokenizer.encode(closing, add_special_tokens=False).ids),
        open=thinking or tags.open_in(tokenizer.decode(prompt[-_LAST_TOKENS:])),
        repeats=tags.repeats,
    )
