"""The text files of a model's folder: tokenizer, chat template, and defaults of options."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tgi_server.router.text.chat_template import ChatTemplate
from tgi_server.router.text.decisions import DecisionConfig, read_decision_config
from tgi_server.router.text.generation_config import read_sampling_defaults
from tgi_server.router.text.special_tokens import SpecialTokens
from tgi_server.router.text.tokenizer import ReadTokenizer, TextTokenizer, load_tokenizer, tokenizer_of
from tgi_server.router.text.tokenizer_config import TokenizerConfig, read_tokenizer_config


@dataclass(frozen=True, slots=True)
class FolderTexts:
    """The parsed files.

    special_tokens: tokens that only the chat template may write; None: messages may, too. sampling: defaults of
    sampling options. encoders: reads the tokenizers of embedding and rerank models, each once. For the others see
    `service.TextParts` and `Service`.
    """

    config: TokenizerConfig
    template: ChatTemplate
    tokenizer: TextTokenizer
    special_tokens: SpecialTokens | None
    sampling: dict[str, float]
    decisions: DecisionConfig
    encoders: ReadTokenizer


def read_texts(
    folder: Path,
    override: Path | None = None,
    *,
    guard_special_tokens: bool = True,
    own_sampling: bool = True,
    encodes: bool = False,
) -> FolderTexts:
    """Reads the files of a model's folder, which takes up to five seconds. Raises StartupError.

    The library parses a tokenizer in one call that keeps the GIL, so that no other thread runs for up to a second.
    Therefore call this only while no requests are served.

    override: as in `read_tokenizer_config`. guard_special_tokens: True if messages may not write special tokens.
    own_sampling: True uses the folder's sampling defaults. encodes: True for an embedding or rerank model.
    """
    config = read_tokenizer_config(folder, override)
    tokenizer = load_tokenizer(folder, config)
    encoders = cache(tokenizer_of)
    if encodes:
        encoders(folder)
    return FolderTexts(
        config,
        ChatTemplate(config),
        tokenizer,
        tokenizer.special_token_guard() if guard_special_tokens else None,
        read_sampling_defaults(folder) if own_sampling else {},
        read_decision_config(folder),
        encoders,
    )
