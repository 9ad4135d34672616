"""Log-probabilities in the form of /v1/completions: four lists with an entry for each token of prompt and answer."""

from collections.abc import Sequence
from itertools import takewhile

from shared.stubs import generate_pb2 as pb
from tgi_server.router.api.encoding import known_logprob
from tgi_server.router.schemas.completions import CompletionLogprobs
from tgi_server.router.text.detokenizer import Detokenizer
from tgi_server.router.text.tokenizer import TextTokenizer


class LogprobEntries:
    """Collects entries until they are written. `top_logprobs` has the token itself and the likeliest alternatives.

    `text_offset` does not grow by tokens without text (special tokens, parts of characters).
    """

    def __init__(self, tokenizer: TextTokenizer, *, show_special: bool, as_text: bool = False) -> None:
        """show_special: True if special tokens are part of the answer's text. as_text: True if the prompt is a text."""
        self._tokenizer = tokenizer
        self._show_special = show_special
        self._as_text = as_text
        self._offset = 0
        self._entries = _no_entries()

    def prompt(self, prefill: pb.PrefillTokens, text: str) -> None:
        """Adds the tokens of a prompt, or of the end of a truncated prompt. text: the prompt as it is echoed.

        Special tokens that the tokenizer added before a text, such as BOS, are left out, as in OpenAI's API: evaluation
        suites count the tokens of a text without them.
        """
        pieces = _pieces(self._tokenizer, prefill.ids)
        added = 0
        if self._as_text:
            special = self._tokenizer.special_tokens
            unwritten = takewhile(lambda token: token in special and not text.startswith(special[token]), prefill.ids)
            added = sum(1 for _ in unwritten)
        if text.endswith(cut := "".join(pieces[added:])):
            self._offset = len(text) - len(cut)
        none = pb.TopTokens()
        tops = prefill.top_tokens or [none] * len(prefill.ids)
        for place, (each, piece, logprob, top) in enumerate(
            zip(prefill.ids, pieces, prefill.logprobs, tops, strict=True)
        ):
            if place < added:
                continue
            shown = piece if text.startswith(piece, self._offset) else ""
            self._add(each, shown, logprob if place else None, top if place else None)
        self._offset = len(text)

    def token(self, token_id: int, piece: str, logprob: float | None, top: pb.TopTokens | None) -> None:
        """Adds a token of the answer."""
        hidden = token_id in self._tokenizer.special_tokens and not self._show_special
        self._add(token_id, "" if hidden else piece, logprob, top or pb.TopTokens())

    def _add(self, token: int, shown: str, logprob: float | None, top: pb.TopTokens | None) -> None:
        """Adds an entry. shown: the text that the token adds. top: None for the first token, without probabilities."""
        name = self._name(token)
        if name == f" {shown}":  # SentencePiece drops the space before the first token of a text
            name = shown
        likeliest: dict[str, float | None] | None = None
        if top is not None:
            likeliest = {}
            for token_id, value in zip(top.ids, top.logprobs, strict=True):
                likeliest.setdefault(name if token_id == token else self._name(token_id), known_logprob(value))
            likeliest.setdefault(name, known_logprob(logprob))
        entries = self._entries
        entries.tokens.append(name)
        entries.token_logprobs.append(known_logprob(logprob))
        entries.top_logprobs.append(likeliest)
        entries.text_offset.append(self._offset)
        self._offset += len(shown)

    def _name(self, token_id: int) -> str:
        """Returns a token's text, or, as OpenAI does, `bytes:\\xf0\\x9f` for a part of a character."""
        name = self._tokenizer.token_name(token_id)
        return name if name.encode() == self._tokenizer.token_bytes(token_id) else f"bytes:{name}"

    def take(self) -> CompletionLogprobs:
        """Returns the entries since the last call."""
        entries, self._entries = self._entries, _no_entries()
        return entries


def _no_entries() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _pieces(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds; for a special token, its name."""
    detokenizer = Detokenizer(tokenizer, ())
    pieces = [tokenizer.special_tokens.get(token_id) or detokenizer.step(token_id) for token_id in token_ids]
    return [*pieces[:-1], pieces[-1] + detokenizer.flush()]
