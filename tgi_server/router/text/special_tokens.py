"""Special tokens in conversations: the chat template may write them; in the texts of clients they are plain text.

A template mixes both into one text, so that afterwards nothing tells who wrote what. Therefore a conversation in which
clients use characters that special tokens begin with is rendered twice: once unchanged, and once with these characters
masked, so that all special tokens in it are the template's. Usually both have the same special tokens; then the
unchanged text is the prompt. Otherwise the masked one is: its special tokens are replaced by private spellings, which
only a second tokenizer reads as special tokens, and the masks are removed.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from tokenizers import Encoding, Tokenizer

from tgi_server.grammar.added_tokens import decoded
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.media.images import ProcessedImage
from tgi_server.router.text.truncation import last_ids

logger = logging.getLogger(__name__)

# First private-use characters of Unicode for the tokens' private spellings, and for masks.
_SPELLINGS, _MASKS = 0xF0000, 0x100000
_MOST = 65_000
# Private-use characters, also as escapes of ASCII-only JSON, which a client may write.
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]|\\\\udb[c-f]", re.IGNORECASE)
_LONGEST_PRIVATE = 5
# Characters that are searched at once, as the search keeps the GIL: all other threads wait meanwhile.
_WINDOW = 65_536

# The input of the template: messages, tools, and further variables.
TemplateInput = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Literal:
    """A prompt in which only the template's special tokens count.

    hidden: the prompt with private spellings for these; None if clients use private-use characters themselves.
    token_ids: ids of the template's special tokens, in order. spelled: True if clients write special tokens, too.
    """

    tokens: "SpecialTokens"
    hidden: str | None
    token_ids: list[int]
    spelled: bool

    def describes(self, ids: Iterable[int]) -> bool:
        """Returns True if the special tokens among `ids`, a whole prompt, are exactly the template's."""
        return self.tokens.in_ids(ids, unknown=self.spelled) == self.token_ids

    def ends_with(self, ids: Iterable[int]) -> bool:
        """Returns True if the special tokens among `ids`, the end of a prompt, are the template's last ones."""
        found = self.tokens.in_ids(ids, unknown=self.spelled)
        return found == self.token_ids[len(self.token_ids) - len(found) :]

    def describes_text(self, text: str) -> bool:
        """Returns True if the special tokens in a prompt's text are exactly the template's."""
        return self.tokens.in_text(text) == self.token_ids

    def filled(self, placeholder: str, texts: Sequence[str]) -> "Literal":
        """Replaces the occurrences of a placeholder by `texts`. See RenderedPrompt.with_images."""
        tokens, left, token_ids = self.tokens, iter(texts), []
        for token_id in self.token_ids:
            token_ids += tokens.in_text(next(left, "")) if token_id == tokens.spelled(placeholder) else [token_id]
        hidden = None
        if self.hidden is not None:
            hidden = _filled(self.hidden, tokens.hide(placeholder), list(map(tokens.hide, texts)))
        return replace(self, hidden=hidden, token_ids=token_ids)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as text.

    literal: None if clients' texts cannot contain special tokens. token_ids: the ids of a prompt that came as tokens.
    images: the images whose tokens are in the text.
    """

    text: str
    literal: Literal | None = None
    token_ids: Sequence[int] | None = None
    images: tuple[ProcessedImage, ...] = ()

    def with_images(self, images: Sequence[ProcessedImage]) -> "RenderedPrompt":
        """Replaces the template's image placeholders by the tokens of the images.

        Raises InvalidRequest if there are not as many placeholders as images.
        """
        if not images:
            return self
        placeholder, texts = images[0].placeholder, [image.text for image in images]
        text = _filled(self.text, placeholder, texts)
        literal = None if self.literal is None else self.literal.filled(placeholder, texts)
        if text is None and (literal is None or literal.hidden is None):
            raise InvalidRequest(
                f"the prompt has {self.text.count(placeholder)} image placeholders ({placeholder}) for "
                f"{len(images)} images: the chat template omits images, or a message contains a placeholder"
            )
        return replace(self, text=self.text if text is None else text, literal=literal, images=tuple(images))

    def literally(self, encoding: Encoding) -> Encoding:
        """Returns the tokens of the prompt. encoding: the tokens of its text, used unless clients wrote special tokens.

        Raises InvalidRequest if clients' special tokens cannot be told from the template's.
        """
        literal = self.literal
        if literal is None or literal.describes(encoding.ids):
            return encoding
        return literal.tokens.encode(self._hidden(literal))

    def literal_text(self) -> str:
        """Returns the text to which the offsets of `literally` refer, if it returns other tokens than `encoding`."""
        return self.text if self.literal is None else self.literal.tokens.show(self._hidden(self.literal))

    def last_ids(self, tokens: int, encode: Callable[[str], list[int]]) -> list[int]:
        """Returns the last `tokens` tokens of the prompt. encode: tokenizes a text.

        Raises InvalidRequest if clients' special tokens cannot be told from the template's.
        """
        literal = self.literal
        if literal is None or literal.describes_text(self.text):
            ids = last_ids(encode, self.text, tokens)
            if literal is None or literal.ends_with(ids):
                return ids
        return last_ids(lambda part: literal.tokens.encode(part).ids, self._hidden(literal), tokens)

    def _hidden(self, literal: Literal) -> str:
        if literal.hidden is None:
            raise InvalidRequest(
                "the messages contain special tokens of the model and private-use characters (U+F0000 and above), "
                "which the server needs as placeholders: leave out one of them"
            )
        return literal.hidden


class SpecialTokens:
    """The special tokens of a model, and a tokenizer that recognizes only their private spellings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        spelled = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        self._ids = frozenset(spelled.values())
        self._spelled = spelled
        self._pattern = re.compile(_trie(spelled)) if spelled else None
        self._longest = max(map(len, spelled), default=0)
        firsts = sorted({content[0] for content in spelled})
        self._all_masks = {ord(character): chr(_MASKS + index) for index, character in enumerate(firsts)}
        self._unmasks = {ord(mask): chr(character) for character, mask in self._all_masks.items()}
        self._unmasks_in_ascii = {
            _in_ascii(mask): _in_ascii(chr(character)) for character, mask in self._all_masks.items()
        }
        # Letters and digits are masked only in whole spellings of special tokens, as templates compare words.
        self._masks = {first: mask for first, mask in self._all_masks.items() if not chr(first).isalnum()}
        words = [content for content in spelled if content[0].isalnum()]
        self._suspicious = re.compile("|".join(map(re.escape, [*map(chr, self._masks), *words])))
        self._hidden = {content: chr(_SPELLINGS + index) * len(content) for index, content in enumerate(spelled)}
        self._shown = {hidden[0]: content for content, hidden in self._hidden.items()}
        self._spellings = _spellings(self._hidden.values())
        content = decoded(tokenizer.to_str())
        self._unknown = tokenizer.token_to_id(_unknown_token(content["model"]) or "")
        self._literal = _renamed(tokenizer, content, self._hidden) if 0 < len(spelled) < _MOST else None

    def in_ids(self, ids: Iterable[int], *, unknown: bool = True) -> list[int]:
        """Returns the special tokens among `ids`. unknown: False leaves out the unknown-token."""
        return [token_id for token_id in ids if token_id in self._ids and (unknown or token_id != self._unknown)]

    def render(self, render: Render, conversation: TemplateInput) -> RenderedPrompt:
        """Renders a conversation with `render`, and tells the template's special tokens from those of clients."""
        text = render(*conversation)
        texts = list(_texts(conversation))
        if self._pattern is None or not any(_has(self._suspicious, each, self._longest) for each in texts):
            return RenderedPrompt(text)
        masked = render(*_mapped(conversation, self._masked))
        token_ids = self.in_text(masked)
        spelled = any(_has(self._pattern, each, self._longest) for each in texts)
        if spelled:
            # The fewer characters are masked, the less likely the template is to render the text differently.
            sparing = render(*_mapped(conversation, self._sparingly_masked))
            masked = sparing if self.in_text(sparing) == token_ids else masked
        usable = self._literal is not None and not any(_has(_PRIVATE, each, _LONGEST_PRIVATE) for each in texts)
        return RenderedPrompt(text, Literal(self, self.hide(masked) if usable else None, token_ids, spelled))

    def spelled(self, text: str) -> int | None:
        """Returns the id of the special token with this spelling; None if there is none."""
        return self._spelled.get(text)

    def encode(self, hidden: str) -> Encoding:
        """Returns the tokens of a prompt with private spellings."""
        assert self._literal is not None
        return self._literal.encode_batch([hidden], add_special_tokens=False)[0]

    def show(self, hidden: str) -> str:
        """Replaces private spellings by the special tokens' own spellings."""
        return _replaced(self._spellings, hidden, self._longest, lambda found: self._shown[found[0][0]])

    def in_text(self, text: str) -> list[int]:
        """Returns the special tokens in a text."""
        assert self._pattern is not None
        return [self._spelled[found[0]] for found in _matches(self._pattern, text, self._longest)]

    def hide(self, masked: str) -> str:
        """Replaces special tokens in a masked text by private spellings, then removes the masks."""
        assert self._pattern is not None
        hidden = _replaced(self._pattern, masked, self._longest, lambda found: self._hidden[found[0]])
        if "\\udb" in hidden:  # the template writes JSON of ASCII only
            for mask, character in self._unmasks_in_ascii.items():
                hidden = hidden.replace(mask, character)
        return _translated(hidden, self._unmasks)

    def _masked(self, text: str) -> str:
        return _translated(self._sparingly_masked(text), self._masks)

    def _sparingly_masked(self, text: str) -> str:
        assert self._pattern is not None
        return _replaced(
            self._pattern, text, self._longest, lambda found: self._all_masks[ord(found[0][0])] + found[0][1:]
        )


def _matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """Yields the matches of `pattern.finditer`, but searches one part of the text at a time.

    longest: maximum number of characters of a match.
    """
    start = 0
    while start < len(text):
        end = start + max(_WINDOW, 2 * longest)
        # A match that begins after this may be cut off by the end of the window.
        certain = end - longest if end < len(text) else len(text)
        for match in pattern.finditer(text, start, end):
            if match.start() > certain:
                break
            yield match
            start = match.end()
        start = max(start, certain)


def _spellings(hidden: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of private spellings, each of which is one character repeated."""
    by_length: defaultdict[int, list[str]] = defaultdict(list)
    for each in hidden:
        by_length[len(each)].append(each[0])
    groups = enumerate(by_length.items(), 1)
    return re.compile("|".join(rf"([{''.join(firsts)}])\{group}{{{length - 1}}}" for group, (length, firsts) in groups))


def _has(pattern: re.Pattern[str], text: str, longest: int) -> bool:
    return next(_matches(pattern, text, longest), None) is not None


def _replaced(pattern: re.Pattern[str], text: str, longest: int, change: Callable[[re.Match[str]], str]) -> str:
    """Returns the result of `pattern.sub`, but searches one part of the text at a time."""
    parts: list[str] = []
    start = 0
    for match in _matches(pattern, text, longest):
        parts += (text[start : match.start()], change(match))
        start = match.end()
    return "".join((*parts, text[start:])) if parts else text


def _filled(text: str, placeholder: str, texts: Sequence[str]) -> str | None:
    """Replaces each occurrence of a placeholder by the next of `texts`; None if the numbers differ."""
    between = text.split(placeholder)
    if len(between) != len(texts) + 1:
        return None
    return "".join(part for pair in zip(between, [*texts, ""], strict=True) for part in pair)


def _translated(text: str, table: Mapping[int, str]) -> str:
    """Returns the result of `str.translate`, one part of the text at a time."""
    return "".join(text[start : start + _WINDOW].translate(table) for start in range(0, len(text), _WINDOW))


def _in_ascii(text: str) -> str:
    """Returns the text with the escapes of ASCII-only JSON."""
    return json.dumps(text)[1:-1]


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    """Returns the unknown-token of a model in `tokenizer.json`; None if it has none."""
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def _renamed(tokenizer: Tokenizer, content: dict[str, Any], names: Mapping[str, str]) -> Tokenizer | None:
    """Returns a copy in which some tokens are spelled differently; None if they cannot keep their ids.

    `encode_special_tokens` is not enough: Unigram models, and BPE with `ignore_merges`, find special tokens of a text
    in their vocabulary. Encoding a prompt in parts would not do either: with `prepend_scheme` the tokens differ.

    content: the tokenizer as decoded JSON, which is modified.
    """
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        copy = Tokenizer.from_str(msgspec.json.encode(content).decode())
    except Exception as error:  # the library raises plain exceptions
        logger.warning(
            "the tokenizer cannot be copied, so messages that contain special tokens will be refused: %s", error
        )
        return None
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if copy.token_to_id(names.get(token.content, token.content)) != token_id:
            logger.warning(
                "messages that contain special tokens will be refused: the tokenizer gives %r no id of its own",
                token.content,
            )
            return None
    return copy


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in a value, including the names of members."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield name
            yield from _texts(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _texts(member)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns the value with `change` applied to each string in it, including the names of members."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _mapped(member, change) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(member, change) for member in value]
    return value


def _trie(words: Iterable[str]) -> str:
    """Returns a regular expression that matches the longest of the words and looks at each character once."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _expression(root)


def _expression(node: Mapping[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        prefix += re.escape(character)
    if len(node) == 1:  # the end of a word
        return prefix
    branches = "|".join(re.escape(character) + _expression(child) for character, child in node.items() if character)
    return f"{prefix}(?:{branches}){'?' if '' in node else ''}"
