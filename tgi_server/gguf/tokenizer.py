"""The tokenizer of a GGUF file's metadata, as the content of tokenizer.json and tokenizer_config.json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tgi_server.gguf.control_tokens import ends_of_generation, looks_like_control
from tgi_server.gguf.file import Gguf
from tgi_server.gguf.paths import GgufError

# Types of tokens in `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_SPACES_BACK = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}

# How texts are split before pairs are merged, by the kinds of `tokenizer.ggml.pre`. Each expression splits what the
# ones before it have left.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORDS}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORDS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHES}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_WORDS = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
    r"\s+$",
    r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+", r"\p{N}")
_DIGITS = (r"\p{N}", _GPT2)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_OLDEST = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_SPACES_BY_POWERS = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = _LLAMA3.replace(r"|\s+(?!\S)|\s+", rf"{_SPACES_BY_POWERS}|\s{{1,2}}(?!\S)|\s")
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXAONE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_KIMI = rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?(?:(?!\p{{Han}})\p{{L}})+{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_WORDS}"
_THREES_FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_AFMOE = (
    _THREES_FROM_THE_END,
    r"[\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0E7F"
    r"\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+",
    _DEEPSEEK3[-1],
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
SPLITS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "gigachat", "mellum"), (_GPT2,)),
    **dict.fromkeys(("a.x-4.0", "granite-docling", "modern-bert", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5", "midm-2.0", "jina-v5-nano"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2"), (_QWEN2,)),
    **dict.fromkeys(("kormo", "f2llmv2", "solar-open"), (_QWEN2,)),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
    "ufakzeka": (_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie", "granite-embed-multi-97m"), (_GPT4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": (*(pattern.replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]") for pattern in _DEEPSEEK3), r"\p{N}"),
    "deepseek-llm": _DEEPSEEK_WORDS,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "mellum2": _DIGITS,
    "falcon": _FALCON,
    "jais-2": (_JAIS2,),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "seed-coder": (_SEED,),
    "exaone-moe": (_EXAONE,),
    "kimi-k2": (_KIMI,),
    "superbpe": (_THREES_FROM_THE_END,),
    "chameleon": _CHAMELEON,
    "afmoe": _AFMOE,
    "default": _OLDEST,
}
# Kinds that first compose characters, as Unicode's NFC does. Files do not say so, and llama.cpp does not compose.
_COMPOSED = {"qwen2", "qwen35", "command-r", "olmo", "mpt"}
# Kinds whose tokens are texts, and not bytes as characters; spaces are SentencePiece's.
_RAW = {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}
# Kinds that do not split a word that is a token; and kinds that begin texts with a token by default.
_WHOLE_WORDS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano"),
    *("tekken", "glm4", "glm5", "minicpm5", "granite-embed-multi-97m"),
}
_BEGINS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano"),
    "tekken",
}


class Vocabulary:
    """The tokens of a file. Raises GgufError for metadata without any, or that do not fit together."""

    def __init__(self, file: Gguf) -> None:
        self.path, self.metadata = file.path, file.metadata
        self.model = self.get("model")
        self.pre = "gemma4" if self.model == "gemma4" else str(self.get("pre", "default"))
        self.tokens: list[str] = self._texts("tokens")
        kinds = self.get("token_type") or [1] * len(self.tokens)
        if not self.tokens or len(kinds) != len(self.tokens):
            raise GgufError(f"{file.path} has {len(self.tokens)} tokens and {len(kinds)} types of them")
        kinds = [_type_of(text, kind) for text, kind in zip(self.tokens, kinds, strict=True)]
        self.special = [token_id for token_id, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL)]
        self.user_defined = [token_id for token_id, kind in enumerate(kinds) if kind == _USER_DEFINED]
        # Phi-3's special tokens include the spaces after them.
        self.rstrip = self.model == "llama" and file.architecture == "phi3"
        self.embeds = f"{file.architecture}.pooling_type" in file.metadata

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token that has a name, such as bos; None if there is none in the vocabulary."""
        token_id = self.get(f"{name}_token_id")
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def token(self, name: str) -> str | None:
        """Returns the text of a token that has a name; None if there is none."""
        token_id = self.token_id(name)
        return None if token_id is None else self.tokens[token_id]

    def merges(self) -> list[tuple[str, str]]:
        """Returns the pairs that are merged, the first ones first."""
        if self.model in ("gpt2", "gemma4"):
            # A space stands between the two, and neither is empty: one may begin with a space.
            pairs = ((text, text.find(" ", 1)) for text in self._texts("merges"))
            return [(text[:space], text[space + 1 :]) for text, space in pairs]
        scores = self.get("scores")
        if not scores or len(scores) != len(self.tokens):
            raise GgufError(f"{self.path} has no tokenizer.ggml.scores for its tokens")
        return _merges_of_scores(self.tokens, scores, {*self.special, *self.user_defined})

    def end_ids(self) -> list[int]:
        """Returns the tokens that end a reply, the one of the metadata first."""
        named = [self.token_id(name) for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
        ends = ends_of_generation({self.tokens[token_id] for token_id in self.special})
        found = [token_id for token_id in self.special if self.tokens[token_id] in ends]
        return list(dict.fromkeys(token for token in (*named, *found) if token is not None))

    def _texts(self, name: str) -> list[str]:
        found = self.get(name)
        if not isinstance(found, list) or not all(isinstance(token, str) for token in found):
            raise GgufError(f"{self.path} has no tokenizer.ggml.{name}; name a tokenizer with --tokenizer-name")
        return found


def _type_of(text: str, kind: int) -> int:
    """Returns the type of a token: the file's, unless its text shows that it is a control token."""
    if kind not in (_UNKNOWN, _BYTE) and looks_like_control(text, added=kind == _USER_DEFINED):
        return _CONTROL
    return kind


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float], without: set[int]) -> list[tuple[str, str]]:
    """Returns the pairs that SentencePiece merges: pairs whose texts form a token, by the token's score."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token_id, token in enumerate(tokens):
        if token_id in without or vocab[token] != token_id:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[token_id], vocab[left], vocab[right], (left, right)))
    found.sort()
    return [pair for *_, pair in found]


def tokenizer_json(words: Vocabulary) -> dict[str, Any]:
    """Returns the content of tokenizer.json. Raises GgufError for a kind of tokenizer that is not read."""
    if words.model in ("gpt2", "gemma4"):
        own = _raw_pairs(words) if words.pre in _RAW else _byte_level(words)
    elif words.model == "bert":
        own = _word_piece(words)
    elif words.model == "llama":
        own = _sentence_piece(words)
    else:
        raise GgufError(
            f"{words.path} has a tokenizer of the kind {words.model!r}, which is not read; name a tokenizer "
            "with --tokenizer-name"
        )
    added = [*((token_id, True) for token_id in words.special), *((token_id, False) for token_id in words.user_defined)]
    return {
        "version": "1.0",
        "added_tokens": [_added(words, token_id, special=special) for token_id, special in sorted(added)],
        "post_processor": _word_pair(words) if words.model == "bert" else _ends(words),
        **own,
    }


def _ends(words: Vocabulary) -> dict[str, Any] | None:
    """Returns the post-processor that adds tokens to embedded texts. For others tokenizer_config.json names them."""
    added = {name: words.token(name) for name in ("bos", "eos") if words.embeds and words.get(f"add_{name}_token")}
    marks = {token: words.token_id(name) for name, token in added.items() if token is not None}
    if not marks:
        return None
    before = [(token, 0)] if (token := added.get("bos")) is not None else []
    after = [(token, 0)] if (token := added.get("eos")) is not None else []
    return _template([*before, ("A", 0), *after], [*before, ("A", 0), *after, ("B", 0), *after], marks)


def _word_pair(words: Vocabulary) -> dict[str, Any]:
    """Returns the post-processor that puts BERT's tokens around texts and pairs of texts."""
    names = {"[CLS]": ("cls", "bos"), "[SEP]": ("seperator", "eos")}
    ids = {
        mark: next(filter(None, map(words.token_id, keys)), words.tokens.index(mark) if mark in words.tokens else None)
        for mark, keys in names.items()
    }
    if None in ids.values():
        raise GgufError(f"{words.path} has no tokens [CLS] and [SEP]; name a tokenizer with --tokenizer-name")
    (begin, _), (end, _) = found = [
        (words.tokens[token_id], token_id) for token_id in ids.values() if token_id is not None
    ]
    single = [(begin, 0), ("A", 0), (end, 0)]
    return _template(single, [*single, ("B", 1), (end, 1)], dict(found))


def _template(
    single: Sequence[tuple[str, int]], pair: Sequence[tuple[str, int]], ids: Mapping[str, int | None]
) -> dict[str, Any]:
    """Returns a post-processor. single, pair: texts A and B and the tokens beside them, each with its type."""

    def parts(of: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        return [{"SpecialToken" if name in ids else "Sequence": {"id": name, "type_id": kind}} for name, kind in of]

    tokens = {name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in ids.items()}
    return {"type": "TemplateProcessing", "single": parts(single), "pair": parts(pair), "special_tokens": tokens}


def tokenizer_config(words: Vocabulary) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json: special tokens, and the chat templates."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    begins = bool(words.get("add_bos_token", words.model == "llama" or words.pre in _BEGINS))
    marks = {*words.special, *words.user_defined}
    found: dict[str, Any] = {
        f"{name}_token": words.token(key)
        for name, key in names.items()
        # A named token is never shown, so ordinary text is none, unless texts begin with it.
        if words.token_id(key) in marks or (begins and name == "bos")
    }
    if words.model != "bert":  # whose texts have marks around them in any case
        found["add_bos_token"] = begins and found.get("bos_token") is not None
        found["add_eos_token"] = bool(words.get("add_eos_token", False))
    if templates := _templates(words.metadata):
        found["chat_template"] = templates
    return {name: value for name, value in found.items() if value is not None}


def _templates(metadata: Mapping[str, Any]) -> list[dict[str, str]]:
    prefix = "tokenizer.chat_template"
    named = {name.removeprefix(f"{prefix}."): text for name, text in metadata.items() if name.startswith(f"{prefix}.")}
    if isinstance(own := metadata.get(prefix), str):
        named["default"] = own
    return [{"name": name, "template": text} for name, text in named.items() if isinstance(text, str)]


def _added(words: Vocabulary, token_id: int, *, special: bool) -> dict[str, Any]:
    rstrip = words.rstrip and special and words.tokens[token_id] not in ("<unk>", "<s>", "<|endoftext|>")
    flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False, "special": special}
    return {"id": token_id, "content": words.tokens[token_id], **flags}


def _bpe(words: Vocabulary, **own: Any) -> dict[str, Any]:
    vocab = {token: token_id for token_id, token in reversed(list(enumerate(words.tokens)))}
    # Leaves out pairs whose parts or result are not tokens: they are never merged, and the library would refuse them.
    merges = [pair for pair in words.merges() if pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab]
    plain = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, "vocab": vocab, "merges": merges, **own}


def _byte_level(words: Vocabulary) -> dict[str, Any]:
    if words.pre not in SPLITS:
        raise GgufError(
            f"{words.path}: tokenizer.ggml.pre is {words.pre!r}, which is not read; name a tokenizer with "
            "--tokenizer-name"
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in SPLITS[words.pre]
    ]
    return {
        "normalizer": {"type": "NFC"} if words.pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": _bpe(words, ignore_merges=words.pre in _WHOLE_WORDS),
    }


def _raw_pairs(words: Vocabulary) -> dict[str, Any]:
    """Pairs of texts are merged within lines. Text that is not a token is encoded byte by byte."""
    lines = {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": _SPACES,
        "pre_tokenizer": lines,
        "decoder": {"type": "Sequence", "decoders": [_SPACES_BACK, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(words, unk_token=words.token("unknown"), fuse_unk=True, byte_fallback=True),
    }


def _word_piece(words: Vocabulary) -> dict[str, Any]:
    """Words of BERT, cut into the longest pieces. Files mark the first piece of a word, where others mark the rest."""
    special = {*words.special, *words.user_defined}
    pieces = {
        token
        if token_id in special
        else token.removeprefix(_SPACE)
        if token.startswith(_SPACE)
        else f"##{token}": token_id
        for token_id, token in reversed(list(enumerate(words.tokens)))
    }
    lower = bool(words.get("normalizer.lowercase", True))
    accents = bool(words.get("normalizer.strip_accents", lower))
    unknown = words.token("unknown") or "[UNK]"
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": accents,
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": pieces,
        },
    }


def _sentence_piece(words: Vocabulary) -> dict[str, Any]:
    prefix = bool(words.get("add_space_prefix", True))
    steps: Iterable[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}, _SPACES] if prefix else [_SPACES]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": list(steps)},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [_SPACES_BACK, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(words, unk_token=words.token("unknown") or "<unk>", fuse_unk=True, byte_fallback=True),
    }
