"""Tokens from text: the model's tokenizer, and the threads that it runs in."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from tgi_server.router.errors import StartupError
from tgi_server.router.special_tokens import SpecialTokens
from tgi_server.router.tokenizer_config import TokenizerConfig

T = TypeVar("T")

# Tokenising this many characters takes less time than waking a thread for it (about 0.1 ms).
_SHORT = 1_000
_CONVERSION_SECONDS = 300


class TextTokenizer:
    """The model's tokenizer. `special_tokens` maps the ids of special tokens to their text."""

    def __init__(self, tokenizer: Tokenizer, config: TokenizerConfig) -> None:
        _obey(tokenizer, config)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }

    def special_token_guard(self) -> SpecialTokens:
        """Returns what tells special tokens of the chat template from those that clients spell."""
        return SpecialTokens(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        if len(text) <= _SHORT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Only the method for batches lets other threads run meanwhile.
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """A token's text, looked at alone."""
        return self.special_tokens.get(token_id) or self.decode([token_id])


class TokenizerThreads:
    """Runs tokenising, and what else takes time, outside the event loop."""

    def __init__(self, tokenizer: TextTokenizer, workers: int) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="validation")

    async def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        return await self.handle_text(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def handle_text(self, characters: int, work: Callable[[], T]) -> T:
        """Runs what takes time in proportion to a text; of a short one, at once."""
        return work() if characters <= _SHORT else await self.run(work)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def load_tokenizer(model: Path, config: TokenizerConfig) -> TextTokenizer:
    """Loads `tokenizer.json` of the model folder; where there is none, makes one of the files that there are.

    Raises StartupError when there is no tokenizer that can be used.
    """
    file = model / "tokenizer.json"
    if file.is_file():
        return TextTokenizer(_read(file), config)
    with tempfile.TemporaryDirectory() as folder:
        return TextTokenizer(_read(_convert(model, Path(folder))), config)


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain exceptions
        raise StartupError(f"cannot read the tokenizer {file}: {error}") from error


def _convert(model: Path, folder: Path) -> Path:
    """Has `transformers` write a `tokenizer.json` into `folder`.

    In a process of its own, because `transformers` loads torch as soon as it is there.
    """
    if not model.is_dir():
        raise StartupError(f"{model} is not a folder; --tokenizer-name wants the folder of a downloaded model")
    command = [sys.executable, "-m", "tgi_server.router.tokenizer_conversion", str(model), str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERSION_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"converting the tokenizer of {model} took more than {_CONVERSION_SECONDS} s") from error
    file = folder / "tokenizer.json"
    if result.returncode != 0 or not file.is_file():
        reason = (result.stderr.strip().splitlines() or ["no tokenizer.json came out"])[-1]
        raise StartupError(f"{model} has no tokenizer.json and none could be made of its other files: {reason}")
    return file


def _obey(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Makes `tokenizer` add BOS and EOS as `tokenizer_config.json` says, where it says so."""
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
