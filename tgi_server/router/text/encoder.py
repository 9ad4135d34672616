"""Embedding and rerank models in the router: tokenizes their texts, and has the shards compute the values."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Encoding, Tokenizer

from shared.stubs import generate_pb2 as pb
from tgi_server.router.errors import InvalidRequest, NoSuchModel
from tgi_server.router.scheduling.shard_client import ShardedClient
from tgi_server.router.text.tokenizer import ReadTokenizer, TokenizerThreads, tokenizer_of
from tgi_server.router.text.tokenizer_config import read_object

T = TypeVar("T")

# Maximum characters that are tokenized at once, and maximum tokens that are sent to a shard at once.
_PIECE_CHARACTERS, _PIECE_TOKENS = 2**18, 2**16
_KINDS = {"embed": "embedding", "rank": "rerank"}
# The conversation in which Qwen3-Reranker judges a document.
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEFORE = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Fitting:
    """The treatment of texts that are too long.

    name: the field of the request, for errors. cut: True truncates a text at its end; False refuses the request. left:
    True truncates at the beginning instead. most: maximum tokens of a text, if fewer than the model's.
    """

    name: str
    cut: bool = False
    left: bool = False
    most: int | None = None


class Values:
    """Rows of numbers: embeddings, or logits. Read them in a thread, as there may be millions."""

    def __init__(self, values: bytes, columns: int) -> None:
        """values: float32, little-endian."""
        self._values, self._row = values, 4 * columns

    @property
    def size(self) -> int:
        """Number of values in all rows together."""
        return len(self._values) // 4

    def __iter__(self) -> Iterator[bytes]:
        """Yields the bytes of each row."""
        return (self._values[start : start + self._row] for start in range(0, len(self._values), self._row))

    def numbers(self) -> Iterator[list[float]]:
        """Yields the rows, rounded to the 9 digits of a float32 below 1."""
        return ([round(value, 9) for value in array("f", row)] for row in self)


class ServedEncoder:
    """One embedding or rerank model. name: its name in requests and responses; requests may also use its model id."""

    def __init__(
        self,
        name: str,
        info: pb.Encoder,
        shards: ShardedClient,
        threads: TokenizerThreads,
        target_gap_ms: float | None,
        read: ReadTokenizer = tokenizer_of,
    ) -> None:
        """read: reads the tokenizer of the model's folder. Raises StartupError if the tokenizer cannot be used."""
        folder = Path(info.folder)
        self.name = name
        self.info = info
        self._shards = shards
        self._threads = threads
        self._target_gap_ms = target_gap_ms or 0
        self._tokenizer = read(folder)
        if info.answers:
            self._user_tokenizer = read(folder, literal=True)  # special tokens in documents are text
        described = read_object(folder / "config_sentence_transformers.json")
        self._prompts: dict[str, Any] = described.get("prompts") or {}
        self._default_prompt = described.get("default_prompt_name")
        self._lowercase = bool(read_object(folder / "sentence_bert_config.json").get("do_lower_case"))

    def is_named(self, name: str) -> bool:
        return name in (self.name, self.info.model_id)

    def prompt(self, name: str | None) -> str:
        """Returns the prompt of this name, which is put before each text. Raises InvalidRequest for an unknown name."""
        name = name if name is not None else self._default_prompt
        if name is None:
            return ""
        if name not in self._prompts:
            known = ", ".join(map(repr, self._prompts)) or "none"
            raise InvalidRequest.at("prompt_name", f"is {name[:80]!r}; this model has {known}")
        return str(self._prompts[name])

    async def of_texts(self, texts: Sequence[str], fitting: Fitting, *, prompt: str = "") -> list[pb.EncodeInput]:
        """Tokenizes texts. Raises InvalidRequest for a text that is too long."""

        def tokenize() -> list[pb.EncodeInput]:
            prompted = (prompt + (text.lower() if self._lowercase else text) for text in texts)
            encodings = _encodings(self._tokenizer, prompted)
            return [self._input(index, each, None, fitting) for index, each in enumerate(encodings)]

        return await self._threads.run(sum(map(len, texts)) + len(prompt) * len(texts), tokenize)

    async def of_tokens(self, texts: Sequence[Sequence[int]], fitting: Fitting) -> list[pb.EncodeInput]:
        """Checks texts that came as token ids. Raises InvalidRequest for one that is too long, or an unknown token."""
        return await self._threads.handle_text(sum(map(len, texts)), lambda: self._of_tokens(texts, fitting))

    def _of_tokens(self, texts: Sequence[Sequence[int]], fitting: Fitting) -> list[pb.EncodeInput]:
        most = min(self.info.max_tokens, fitting.most or self.info.max_tokens)
        inputs = []
        for index, ids in enumerate(texts):
            if max(ids) >= self.info.vocab_size:
                raise InvalidRequest.at(
                    fitting.name,
                    f"has the token {max(ids)} in text {index}; ids are 0 to {self.info.vocab_size - 1}",
                )
            if len(ids) > most and not fitting.cut:
                raise _too_long(fitting, index, len(ids), most)
            inputs.append(pb.EncodeInput(ids=ids[-most:] if fitting.left else ids[:most]))
        return inputs

    async def of_pairs(
        self, pairs: Sequence[tuple[str, str]], fitting: Fitting, *, instruction: str | None = None
    ) -> list[pb.EncodeInput]:
        """Tokenizes pairs of texts; only the second text may be truncated.

        instruction: for a model that answers yes or no. Raises InvalidRequest for a pair that is too long.
        """
        firsts = dict.fromkeys(first for first, _ in pairs)  # usually one, which is tokenized once
        make = self._conversations if self.info.answers else self._pairs

        def tokenize() -> list[pb.EncodeInput]:
            return make(list(firsts), pairs, fitting, instruction or _INSTRUCTION)

        return await self._threads.run(sum(map(len, firsts)) + sum(len(second) for _, second in pairs), tokenize)

    def _pairs(
        self, firsts: list[str], pairs: Sequence[tuple[str, str]], fitting: Fitting, _: str
    ) -> list[pb.EncodeInput]:
        def encoded(texts: Iterable[str]) -> Iterator[Encoding]:
            return _encodings(self._tokenizer, (text.lower() if self._lowercase else text for text in texts))

        known = dict(zip(firsts, encoded(firsts), strict=True))
        seconds = encoded(second for _, second in pairs)
        return [
            self._input(index, known[first], second, fitting)
            for index, ((first, _), second) in enumerate(zip(pairs, seconds, strict=True))
        ]

    def _conversations(
        self, firsts: list[str], pairs: Sequence[tuple[str, str]], fitting: Fitting, instruction: str
    ) -> list[pb.EncodeInput]:
        # Tokenizers split a text before a blank. So what precedes a document and its blank is tokenized once.
        before, after = (self._tokenizer.encode(each, add_special_tokens=False).ids for each in (_BEFORE, _AFTER))
        room = self.info.max_tokens - len(before) - len(after)
        queries = (f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:" for query in firsts)
        known = dict(zip(firsts, (each.ids for each in _encodings(self._user_tokenizer, queries)), strict=True))
        for ids in known.values():
            if len(ids) >= room:
                raise _no_room(len(ids) + self.info.max_tokens - room, self.info.max_tokens)
        inputs = []
        documents = _encodings(self._user_tokenizer, (f" {text}" for _, text in pairs))
        for index, ((query, _), document) in enumerate(zip(pairs, documents, strict=True)):
            asked = known[query]
            if len(asked) + len(document) > room and not fitting.cut:
                raise _too_long(fitting, index, len(asked) + len(document), room)
            inputs.append(pb.EncodeInput(ids=[*before, *asked, *document.ids[: room - len(asked)], *after]))
        return inputs

    def _input(self, index: int, first: Encoding, second: Encoding | None, fitting: Fitting) -> pb.EncodeInput:
        """Returns the tokens of a text or pair with special tokens. Raises InvalidRequest if there are too many."""
        most = self.info.max_tokens
        added = self._tokenizer.num_special_tokens_to_add(second is not None)
        room = most - added - (len(first) if second is not None else 0)
        if second is not None and room < 1:
            raise _no_room(len(first), most)
        last = first if second is None else second
        if fitting.most is not None:
            room = min(room, max(fitting.most - (added if second is None else 0), 1))
        if len(last) > room:
            if not fitting.cut:
                raise _too_long(fitting, index, len(last) + most - room, most)
            last.truncate(room, direction="left" if fitting.left else "right")
        whole = self._tokenizer.post_process(first, second, add_special_tokens=True)
        if not whole.ids:
            raise InvalidRequest.at(fitting.name, f"has no tokens in text {index}")
        return pb.EncodeInput(ids=whole.ids, second=whole.type_ids.index(1) if 1 in whole.type_ids else 0)

    async def values(self, inputs: Sequence[pb.EncodeInput], *, dimensions: int = 0, normalize: bool = False) -> Values:
        """Returns a row for each input. Raises Unhealthy.

        Many inputs are sent in pieces, so that other requests' texts can come between them.
        """
        values, columns = [], 1
        for piece in _pieces(inputs, _PIECE_TOKENS, lambda text: len(text.ids)):
            request = pb.EncodeRequest(
                task=self.info.task,
                inputs=piece,
                dimensions=dimensions,
                normalize=normalize,
                target_gap_ms=self._target_gap_ms,
            )
            response = await self._shards.encode(request)
            values.append(response.values)
            columns = response.columns
        return Values(b"".join(values), columns)


@dataclass(frozen=True, slots=True)
class Encoders:
    """The embedding and rerank models of a server, by task."""

    by_task: dict[str, ServedEncoder] = field(default_factory=dict)

    def get(self, task: str, model: str | None, generating: Sequence[str] = ()) -> ServedEncoder:
        """Returns the model of a task. model: the name in the request. generating: names of the text-generation model.

        If no other model is served, any name is accepted, because clients often send the name of another server's
        model. Raises NoSuchModel.
        """
        found = self.by_task.get(task)
        if found is None:
            raise NoSuchModel("this server has no {} model; --{}-model-id loads one".format(*[_KINDS[task]] * 2))
        others = [*generating, *(each.name for each in self.by_task.values() if each is not found)]
        if not model or not others or found.is_named(model):
            return found
        if model in others:
            raise NoSuchModel(f"{model[:100]!r} is not the {_KINDS[task]} model, which is {found.name!r}")
        raise NoSuchModel(
            f"there is no model {model[:100]!r} here; there are {', '.join(map(repr, (found.name, *others)))}"
        )

    def named(self, model: str) -> ServedEncoder | None:
        """Returns the model of that name; None if there is none."""
        return next((each for each in self.by_task.values() if each.is_named(model)), None)


def _encodings(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[Encoding]:
    """Yields the tokens of texts, a few texts at a time, since an Encoding takes a hundred bytes per token."""
    for piece in _pieces(texts, _PIECE_CHARACTERS, len):
        yield from tokenizer.encode_batch_fast(piece, add_special_tokens=False)


def _pieces(items: Iterable[T], most: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields the items in lists with a total size of at most `most`, unless a single item is larger."""
    piece: list[T] = []
    held = 0
    for item in items:
        if piece and held + size(item) > most:
            yield piece
            piece, held = [], 0
        piece.append(item)
        held += size(item)
    if piece:
        yield piece


def _no_room(tokens: int, most: int) -> InvalidRequest:
    return InvalidRequest.at(
        "query", f"has {tokens} tokens; the model reads at most {most} of a query and a text together"
    )


def _too_long(fitting: Fitting, index: int, tokens: int, most: int) -> InvalidRequest:
    return InvalidRequest.at(
        fitting.name,
        f"has {tokens} tokens in text {index}; the model reads at most {most}; shorten it, or have it truncated",
    )
