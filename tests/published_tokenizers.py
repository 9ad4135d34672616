"""Tokenizers and chat templates with the shape of published models', small enough for tests.

    published = PUBLISHED["qwen3"]
    published.save(tmp_path)       # tokenizer.json, tokenizer_config.json, chat_template.jinja: enough for a router
    published.save_model(tmp_path)  # and a tiny Llama with random weights: enough for a server

The kinds of vocabularies, normalizers, pre-tokenizers and decoders are those of the published files, and so are the
names of added tokens and which of them are special. The rest is invented: the vocabulary is trained on one sentence,
and each template in `published_templates/` is written anew, with the variables, filters, marks and blanks of the
published one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_TEMPLATES = Path(__file__).with_name("published_templates")
_SENTENCE = (
    'the quick brown fox says {"name": "weather", "arguments": {"place": "Paris", "days": 3}} and thinks: hm, '
    '{"name": "clock", "parameters": {}}. I look it up; the answer is "true", or the table is bold.\n'
)
_WORDS = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
_SPACE = "\u2581"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Models often have embeddings for more ids than their tokenizers know.
_SPARE_IDS = 8


@dataclass(frozen=True)
class Added:
    """An added token. normalized: it is looked for in the normalized text."""

    content: str
    special: bool = True
    normalized: bool = False


@dataclass(frozen=True)
class Published:
    """The files of one model.

    first: added tokens with the lowest ids. last: those after the vocabulary. sentence_piece: its vocabulary is of
    SentencePiece's kind; otherwise byte-level. prefix: a space is put in front of a text. ends: names of the tokens
    that its generation_config.json ends a text with. calls: name of the form in which it calls tools. thinks: its
    template has marks around thoughts.
    """

    name: str
    calls: str
    bos: str | None
    eos: str
    pad: str | None = None
    unk: str | None = None
    first: Sequence[Added] = ()
    last: Sequence[Added] = ()
    sentence_piece: bool = False
    prefix: bool = False
    adds_bos: bool = False
    ignore_merges: bool = False
    ends: Sequence[str] = ()
    thinks: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> str:
        return (_TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; not to be changed."""
        return Tokenizer.from_str(json.dumps(self.definition))

    @cached_property
    def definition(self) -> dict[str, Any]:
        """The content of tokenizer.json."""
        trained = _sentence_piece(prefix=self.prefix) if self.sentence_piece else _byte_level(self)
        content: dict[str, Any] = json.loads(trained.to_str())
        pieces = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
        tokens = [*(each.content for each in self.first), *(_BYTES if self.sentence_piece else ())]
        tokens += [piece for piece in pieces if piece not in tokens]
        content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
        content["model"] |= {
            "ignore_merges": self.ignore_merges,
            "unk_token": self.unk if self.sentence_piece else None,
        }
        added = [*enumerate(self.first), *enumerate(self.last, len(tokens))]
        content["added_tokens"] = [_entry(token_id, each) for token_id, each in added]
        if self.adds_bos:
            bos_id = next(token_id for token_id, each in added if each.content == self.bos)
            processor = processors.TemplateProcessing(single=f"{self.bos} $A", special_tokens=[(str(self.bos), bos_id)])
            content["post_processor"] = json.loads(processor.__getstate__())
        return content

    @property
    def vocab_size(self) -> int:
        """The number of ids that the model has embeddings of."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True) + _SPARE_IDS

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a text, as generation_config.json has them."""
        return [self.token_id(name) for name in self.ends or [self.eos]]

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return self.end_ids[0]

    @property
    def texts(self) -> list[str]:
        """The added tokens that are text, those of marks included, and but for blanks."""
        added = (each.content for each in (*self.first, *self.last) if not each.special)
        return [each for each in added if each.strip("\n" + _SPACE)]

    def token_id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)

    def save(self, folder: Path) -> Path:
        """Writes the files that a router reads, and returns their folder."""
        named = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad, "unk_token": self.unk}
        decoder = {str(each["id"]): {**each} for each in self.definition["added_tokens"]}
        for each in decoder.values():
            del each["id"]
        config = {"added_tokens_decoder": decoder, **named, "clean_up_tokenization_spaces": False, **self.config}
        (folder / "tokenizer.json").write_text(json.dumps(self.definition, ensure_ascii=False), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        return folder

    def save_model(self, folder: Path, **overrides: Any) -> Path:
        """Writes the files of a whole model with random weights. overrides: settings of its config.json."""
        from tests.tiny_models import make_llama  # imports torch, which takes seconds

        bos = None if self.bos is None else self.token_id(self.bos)
        settings = {"vocab_size": self.vocab_size, "bos_token_id": bos, "eos_token_id": self.end, "pad_token_id": None}
        folder.mkdir(exist_ok=True)
        make_llama(folder, **settings | overrides)
        (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": bos, "eos_token_id": self.end_ids}))
        return self.save(folder)


def _entry(token_id: int, each: Added) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": each.normalized}
    return {"id": token_id, "content": each.content, **flags, "special": each.special}


def _byte_level(published: Published) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if published.name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(_WORDS, "isolated"), bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_SENTENCE] * 2, trainer)
    return tokenizer


def _sentence_piece(*, prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([_SENTENCE.replace("\n", "")] * 2, trainer)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _special(*names: str) -> list[Added]:
    return [Added(name) for name in names]


def _plain(*names: str, normalized: bool = False) -> list[Added]:
    return [Added(name, special=False, normalized=normalized) for name in names]


def _wide(*names: str) -> list[str]:
    """The names between DeepSeek's bars, which are wide, as are the spaces in them."""
    return [f"<\uff5c{name.replace(' ', _SPACE)}\uff5c>" for name in names]


_CHATML = _special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|repo_name|>")
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_BOS_DEEPSEEK, _EOS_DEEPSEEK, _PAD_DEEPSEEK = _wide("begin of sentence", "end of sentence", " pad ")
_DEEPSEEK_FIRST = _special(_BOS_DEEPSEEK, _EOS_DEEPSEEK, _PAD_DEEPSEEK)
_DEEPSEEK_LAST = (
    *(Added(name, normalized=True) for name in _wide("place holder no 0", "place holder no 1")),
    *_plain("<think>", "</think>", normalized=True),
    *_plain(*_wide("fim hole", "fim begin", "fim end", "User", "Assistant")),
    Added("<|EOT|>"),
    *_plain(*_wide("tool calls begin", "tool calls end", "tool call begin", "tool call end")),
    *_plain(*_wide("tool outputs begin", "tool outputs end", "tool output begin", "tool output end", "tool sep")),
)
_DEEPSEEK_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    **{
        f"{name}_token": {"__type": "AddedToken", **_entry(0, Added(content, normalized=True))}
        for name, content in (("bos", _BOS_DEEPSEEK), ("eos", _EOS_DEEPSEEK), ("pad", _EOS_DEEPSEEK))
    },
    "tokenizer_class": "LlamaTokenizerFast",
}
_MISTRAL_MARKS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL_RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[IMG]")

PUBLISHED: dict[str, Published] = {
    each.name: each
    for each in (
        Published(
            "qwen2.5",
            "hermes",
            None,
            "<|im_end|>",
            pad="<|endoftext|>",
            last=[*_CHATML, *_plain(*_QWEN_PLAIN)],
            ends=_QWEN_ENDS,
            config={"add_bos_token": False},
        ),
        Published(
            "qwen3",
            "hermes",
            None,
            "<|im_end|>",
            pad="<|endoftext|>",
            last=[*_CHATML, *_plain(*_QWEN_PLAIN, "<tool_response>", "</tool_response>", "<think>", "</think>")],
            ends=_QWEN_ENDS,
            thinks=True,
            config={"add_bos_token": False},
        ),
        Published(
            "deepseek_v3",
            "deepseek_v3",
            _BOS_DEEPSEEK,
            _EOS_DEEPSEEK,
            pad=_EOS_DEEPSEEK,
            first=_DEEPSEEK_FIRST,
            last=_DEEPSEEK_LAST,
            adds_bos=True,
            config=_DEEPSEEK_CONFIG,
        ),
        Published(
            "deepseek_r1",
            "deepseek_v3",
            _BOS_DEEPSEEK,
            _EOS_DEEPSEEK,
            pad=_EOS_DEEPSEEK,
            first=_DEEPSEEK_FIRST,
            last=_DEEPSEEK_LAST,
            adds_bos=True,
            thinks=True,
            config=_DEEPSEEK_CONFIG,
        ),
        Published(
            "deepseek_v3.1",
            "deepseek_v31",
            _BOS_DEEPSEEK,
            _EOS_DEEPSEEK,
            pad=_EOS_DEEPSEEK,
            first=_DEEPSEEK_FIRST,
            last=_DEEPSEEK_LAST,
            adds_bos=True,
            thinks=True,
            config=_DEEPSEEK_CONFIG,
        ),
        Published(
            "glm4.5",
            "glm45",
            None,
            "<|endoftext|>",
            pad="<|endoftext|>",
            last=[
                *_special("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
                *_special("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
                *_plain("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
                *_plain("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
                Added("/nothink"),
            ],
            ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
            thinks=True,
        ),
        Published(
            "glm4.7",
            "glm47",
            None,
            "<|endoftext|>",
            pad="<|endoftext|>",
            last=[
                *_special("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
                *_special("<|observation|>"),
                *_plain("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
                *_plain("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            ],
            ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
            thinks=True,
        ),
        Published(
            "kimi_k2",
            "kimi_k2",
            "[BOS]",
            "[EOS]",
            pad="[PAD]",
            unk="[UNK]",
            last=[
                *_special("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>"),
                *_special("<|end_header_id|>", "[EOT]", "<|im_system|>", "<|im_middle|>", "[UNK]", "[PAD]"),
                *_plain("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
                *_plain("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            ],
            ends=("<|im_end|>", "[EOS]"),
        ),
        Published(
            "gemma4",
            "gemma4",
            "<bos>",
            "<eos>",
            pad="<pad>",
            unk="<unk>",
            first=[
                *_special("<pad>", "<eos>", "<bos>", "<unk>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
                *_special("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>"),
                *_special("<|turn>", "<turn|>"),
                *_plain("\n", "\n\n", _SPACE * 2, _SPACE * 3),
            ],
            sentence_piece=True,
            adds_bos=True,
            ends=("<eos>", "<turn|>", "<|tool_response>"),
            thinks=True,
        ),
        Published(
            "granite3.3",
            "granite",
            "<|end_of_text|>",
            "<|end_of_text|>",
            pad="<|end_of_text|>",
            unk="<|end_of_text|>",
            first=_special("<|end_of_text|>", "<fim_prefix>", "<fim_middle>", "<reponame>"),
            last=_special("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
            thinks=True,
        ),
        Published(
            "olmo3",
            "olmo3",
            None,
            "<|im_end|>",
            pad="<|pad|>",
            last=[
                *_special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"),
                *_plain("<functions>", "</functions>", "<function_calls>", "</function_calls>"),
            ],
            ends=("<|im_end|>", "<|endoftext|>"),
            thinks=True,
        ),
        Published(
            "phi4_mini",
            "phi4_mini",
            "<|endoftext|>",
            "<|endoftext|>",
            pad="<|endoftext|>",
            unk="<|endoftext|>",
            last=[
                *_special("<|endoftext|>", "<|endofprompt|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>"),
                *_plain("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
            ],
            ends=("<|end|>", "<|endoftext|>"),
        ),
        Published(
            "deepseek_v3.2",
            "deepseek_v32",
            _BOS_DEEPSEEK,
            _EOS_DEEPSEEK,
            pad=_EOS_DEEPSEEK,
            first=_DEEPSEEK_FIRST,
            last=[*_DEEPSEEK_LAST, Added("\uff5cDSML\uff5c")],
            adds_bos=True,
            thinks=True,
            config=_DEEPSEEK_CONFIG,
        ),
        Published(
            "seed_oss",
            "seed_oss",
            "<seed:bos>",
            "<seed:eos>",
            pad="<seed:pad>",
            first=[
                *_special("<seed:bos>", "<seed:pad>", "<seed:eos>"),
                *_plain("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"),
                *_plain("<seed:tool_call>", "</seed:tool_call>"),
            ],
            thinks=True,
        ),
        Published(
            "lfm2",
            "lfm2",
            "<|startoftext|>",
            "<|im_end|>",
            pad="<|pad|>",
            first=[
                *_special("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
                *_special("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
                *_special("<|tool_response_start|>", "<|tool_response_end|>"),
            ],
            adds_bos=True,
        ),
        Published(
            "minimax_m2",
            "minimax_m2",
            "]~!b[",
            "[e~[",
            unk="]!d~[",
            last=[
                *_special("]!p~[", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "]!d~[", "]~b]", "]~!b[", "[e~["),
                *_plain("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
            ],
            thinks=True,
        ),
        Published(
            "gpt_oss",
            "harmony",
            "<|startoftext|>",
            "<|return|>",
            pad="<|endoftext|>",
            last=[
                *_special("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
                *_special("<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|endofprompt|>"),
            ],
            ends=("<|return|>", "<|endoftext|>", "<|call|>"),
            thinks=True,
        ),
        Published(
            "llama3.1",
            "llama3_json",
            "<|begin_of_text|>",
            "<|eot_id|>",
            last=[
                *_special("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_pad|>"),
                *_special("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
            ],
            adds_bos=True,
            ignore_merges=True,
            ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ),
        Published(
            "gemma3",
            "tgi",
            "<bos>",
            "<eos>",
            pad="<pad>",
            unk="<unk>",
            first=[
                *_special("<pad>", "<eos>", "<bos>", "<unk>"),
                *_plain("<mask>", "[multimodal]", "<unused0>", "<unused1>"),
                *_special("<start_of_turn>", "<end_of_turn>"),
                *_plain("\n", "\n\n", _SPACE * 2, _SPACE * 3, "<table>", "<b>", "</b>", "<strong>", "<h1>"),
                Added("<image_soft_token>"),
            ],
            sentence_piece=True,
            adds_bos=True,
            ends=("<eos>", "<end_of_turn>"),
            config={"add_bos_token": True, "add_eos_token": False},
        ),
        Published(
            "mistral_v3",
            "mistral",
            "<s>",
            "</s>",
            unk="<unk>",
            first=_special("<unk>", "<s>", "</s>", *_MISTRAL_MARKS, *_MISTRAL_RESULTS, "[control_11]"),
            sentence_piece=True,
            prefix=True,
            adds_bos=True,
            config={"add_bos_token": True, "add_eos_token": False},
        ),
        Published(
            "mistral_v7",
            "mistral",
            "<s>",
            "</s>",
            pad="<pad>",
            unk="<unk>",
            first=[
                *_special("<unk>", "<s>", "</s>", *_MISTRAL_MARKS, *_MISTRAL_RESULTS, "<pad>"),
                *_special("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "<SPECIAL_20>"),
            ],
            adds_bos=True,
            config={"add_bos_token": True, "add_eos_token": False},
        ),
    )
}
