"""The model's tokenizer, and the threads in which it runs."""

import asyncio
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from tgi_server.grammar.added_tokens import add_missing_tokens
from tgi_server.grammar.tokenizer import BYTES
from tgi_server.router.errors import StartupError
from tgi_server.router.text.special_tokens import SpecialTokens
from tgi_server.router.text.tokenizer_config import TokenizerConfig

T = TypeVar("T")

# Tokenizing this many characters takes less time than waking a thread for it (about 0.1 ms).
_SHORT = 1_000
# Texts with more characters use separate threads, so that shorter ones do not wait for them.
_LONG = 32_768
# Texts with more characters per allowed token are first tokenized in pieces, until there are too many tokens.
_PLAUSIBLE = 4
_PIECE = 65_536
# Maximum number of tokens that a cut through a text adds.
_CUT = 128
# Maximum factor by which a tokenizer may lengthen a text. SentencePiece's mark for a space has three bytes: a factor of
# 3.
_MOST_GROWTH = 64
_CONVERSION_SECONDS = 300
_CONVERSION = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
tokenizer.backend_tokenizer.save(sys.argv[2])
"""


_INCOMPLETE = "\ufffd"
# A byte as a token of SentencePiece.
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextTokenizer:
    """The model's tokenizer.

    special_tokens: text of each special token, by id. added_tokens: text of these and of ordinary added tokens, by id.
    vocab_size: highest token id plus 1.
    """

    def __init__(self, tokenizer: Tokenizer, config: TokenizerConfig) -> None:
        """Raises StartupError if the tokenizer could make texts many times as long."""
        _check_growth(tokenizer)
        _obey(tokenizer, config)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_tokens = {token_id: token.content for token_id, token in added.items() if token.special}
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[:1]
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def special_token_guard(self) -> SpecialTokens:
        """Returns a `SpecialTokens`, which tells the chat template's special tokens from those that clients write."""
        return SpecialTokens(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool, offsets: bool = True) -> Encoding:
        """Returns the tokens of a text. offsets: True adds their offsets in the text, which takes longer."""
        if len(text) <= _SHORT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Only the batch methods release the GIL.
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        return encode([text], add_special_tokens=add_special_tokens)[0]

    def with_special_tokens(self, encoding: Encoding) -> Encoding:
        """Adds the tokenizer's special tokens, such as BOS, to tokens that were encoded without them."""
        return self._tokenizer.post_process(encoding, None, True)

    def piece(self, token_id: int) -> str:
        """Returns a token's entry in the vocabulary, such as `Ġworld`; empty for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def exceeds(self, text: str, tokens: int) -> bool:
        """Returns True if a long text has more than `tokens` tokens, without tokenizing much more than that."""
        if len(text) <= max(_PLAUSIBLE * tokens, _PIECE):
            return False
        found = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            found += max(len(self.encode(piece, add_special_tokens=False, offsets=False)) - _CUT, 0)
            if found > tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`, special tokens included. For many tokens, call it in a thread."""
        if len(token_ids) <= _SHORT:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return text

    def decode_one(self, token_id: int) -> str:
        """Returns the text of a single token, special tokens included. Cached."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self.decode([token_id])
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token in the middle of a text; for a special token, its name. Cached."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token in the middle of a text, with U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_name(self, token_id: int) -> str:
        """Returns a token's text; for incomplete characters its bytes as `\\xf0\\x9f`, as OpenAI does."""
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id))

    def _bytes_of(self, token_id: int) -> bytes:
        if (name := self.special_tokens.get(token_id)) is not None:
            return name.encode()
        # Decoders drop a space at the beginning of a text, so the token is decoded after another one.
        before = self.decode(self._anchor)
        text = self.decode([*self._anchor, token_id])
        text = text[len(before) :] if text.startswith(before) else self.decode([token_id])
        piece = self._tokenizer.id_to_token(token_id)
        if _INCOMPLETE not in text or piece is None:
            return text.encode()
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        if BYTES.keys() >= set(piece):
            return bytes(BYTES[character] for character in piece)
        return text.encode()


class TokenizerThreads:
    """Runs tokenization, and other slow work on texts, outside the event loop. Of long texts, the shortest is first."""

    def __init__(self, tokenizer: TextTokenizer, workers: int) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="validation")
        self._free = max(1, workers // 2)
        self._long = ThreadPoolExecutor(max_workers=self._free, thread_name_prefix="validation-long")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: characters, number, turn
        self._numbers = count()

    async def handle_text(self, characters: int, work: Callable[[], T], *, at_once: int = _SHORT) -> T:
        """Runs `work`, whose time is proportional to `characters`: in a thread, or at once for at most `at_once`."""
        return work() if characters <= at_once else await self.run(characters, work)

    async def run(self, characters: int, work: Callable[[], T]) -> T:
        """Runs `work` in a thread. characters: length of its text."""
        loop = asyncio.get_running_loop()
        if characters <= _LONG:
            return await loop.run_in_executor(self._pool, work)
        await self._turn(characters)
        try:
            return await loop.run_in_executor(self._long, work)
        finally:
            self._pass_turn()

    async def _turn(self, characters: int) -> None:
        """Waits until a thread for long texts is free."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (characters, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_turn()
            raise

    def _pass_turn(self) -> None:
        while self._waiting:
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        for pool in (self._pool, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def load_tokenizer(model: Path, config: TokenizerConfig) -> TextTokenizer:
    """Loads `tokenizer.json` of the model's folder, or converts the tokenizer's other files if there is none.

    Raises StartupError if there is no usable tokenizer.
    """
    return TextTokenizer(_found(model), config)


class ReadTokenizer(Protocol):
    """Returns the tokenizer of an embedding or rerank model, as `tokenizer_of` does."""

    def __call__(self, model: Path, /, *, literal: bool = False) -> Tokenizer: ...


def tokenizer_of(model: Path, *, literal: bool = False) -> Tokenizer:
    """Returns the tokenizer of an embedding or rerank model. Raises StartupError.

    literal: True reads special tokens in a text as plain text.
    """
    tokenizer = _found(model)
    _check_growth(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = literal
    return tokenizer


def _found(model: Path) -> Tokenizer:
    file = model / "tokenizer.json"
    if file.is_file():
        tokenizer = _read(file)
        try:
            add_missing_tokens(tokenizer, model)
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot read the tokens that {model} adds to its tokenizer: {error}") from error
        return tokenizer
    with tempfile.TemporaryDirectory() as folder:
        return _read(_convert(model, Path(folder)))


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain exceptions
        raise StartupError(f"cannot read the tokenizer {file}: {error}") from error


def _convert(model: Path, folder: Path) -> Path:
    """Has `transformers` write a `tokenizer.json` to `folder`. Returns its path.

    Uses a separate process, because `transformers` imports torch if it is installed.
    """
    if not model.is_dir():
        raise StartupError(f"{model} is not a folder; --tokenizer-name needs the folder of a downloaded model")
    file = folder / "tokenizer.json"
    command = [sys.executable, "-c", _CONVERSION, str(model), str(file)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERSION_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"converting the tokenizer of {model} took more than {_CONVERSION_SECONDS} s") from error
    if result.returncode != 0 or not file.is_file():
        reason = (result.stderr.strip().splitlines() or ["no tokenizer.json was written"])[-1]
        raise StartupError(f"{model} has no tokenizer.json and its other files could not be converted: {reason}")
    return file


def _check_growth(tokenizer: Tokenizer) -> None:
    """Raises StartupError if the tokenizer's replacements together may make a text too many times as long."""
    for part, name in ((tokenizer.normalizer, "normalizer"), (tokenizer.decoder, "decoder")):
        growth = 1.0 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > _MOST_GROWTH:
            raise StartupError(
                f"the {name} of the tokenizer may make a text {growth:.3g} times as long; at most {_MOST_GROWTH} times "
                "is allowed"
            )


def _growth(part: Any) -> float:
    """Returns the maximum factor by which the replacements in a part of a tokenizer lengthen a text."""
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Replace":
        # A regular expression may match nothing, before each character.
        replaced = len(part["pattern"].get("String", "").encode()) or 0.5
        return max(len(part["content"].encode()) / replaced, 1.0)
    steps = [each for value in part.values() if isinstance(value, list) for each in value]
    return math.prod(map(_growth, steps))


def _obey(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Makes `tokenizer` add BOS and EOS as `tokenizer_config.json` says, if it does."""
    plain = tokenizer.encode("", add_special_tokens=True).ids
    bos = config.bos_token and tokenizer.token_to_id(config.bos_token)
    eos = config.eos_token and tokenizer.token_to_id(config.eos_token)
    has_bos = bool(plain) and plain[0] == bos
    has_eos = bool(plain) and plain[-1] == eos and (bos != eos or len(plain) > 1)
    want_bos = has_bos if config.add_bos_token is None or not isinstance(bos, int) else config.add_bos_token
    want_eos = has_eos if config.add_eos_token is None or not isinstance(eos, int) else config.add_eos_token
    if (want_bos, want_eos) == (has_bos, has_eos):
        return
    before = [(str(config.bos_token), bos)] * want_bos
    after = [(str(config.eos_token), eos)] * want_eos
    single = " ".join([*(name for name, _ in before), "$A", *(name for name, _ in after)])
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=before + after)
