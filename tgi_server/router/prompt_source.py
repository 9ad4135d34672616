"""The texts of a prompt, and the result of its lookup in the prefix cache. From these, misses are explained.

The API records the texts of a request, the scheduler records the lookup in the cache, and `text/prefix_miss.py` finds
the cause for which the rest had to be computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from sys import getsizeof

# Bytes of a part beside its text.
_PART_BYTES = 200


class MissCause(StrEnum):
    """The cause for which most of the missing tokens of a prompt had to be computed."""

    NEVER_SEEN = "never_seen"
    CHANGED = "changed"
    TEMPLATE = "template"
    EVICTED = "evicted"
    NO_STATE = "no_state"
    BELOW_BLOCK = "below_block"
    OTHER_SALT = "other_salt"
    OTHER_ADAPTER = "other_adapter"


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A text of a request that the prompt shows.

    place: the field of the request, such as `messages[2].content[0]`. role: the role of its message. beside: the other
    fields of the message, such as its calls, as JSON. thoughts: True if the message has reasoning, which templates may
    leave out.
    """

    place: str
    role: str
    text: str
    beside: bytes = b""
    thoughts: bool = False


@dataclass(slots=True, eq=False)
class KnownPrompt:
    """A prompt whose keys and values were cached, with the tokens that were generated after it.

    owner: the name of the API key, if there are several. space: its space in the prefix cache. tokens: 4 bytes each, as
    in the prefix cache. prompt_tokens: number of tokens of the prompt. cached: number of tokens that have been cached.
    """

    request_id: int
    owner: str
    space: tuple[str, str]
    tokens: bytes
    prompt_tokens: int
    cached: int
    source: "PromptSource"

    @property
    def size(self) -> int:
        """The approximate size in bytes."""
        return len(self.tokens) + self.source.size


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """The result of looking up a prompt in the prefix cache when it was admitted.

    tokens: tokens of the prompt, as in the cache. found: number of tokens that need not be computed. held: number of
    cached tokens; more than `found` if the states after them are missing. known: number of tokens that have been cached
    before, according to remembered prompts. similar: the prompts with most tokens in common, and, if these are few, the
    latest prompts. elsewhere: number of tokens that are known with another salt or adapter, if these are more.
    other_adapter: True if it is another adapter. images: first token and number of tokens of each image. block_size: in
    tokens.
    """

    tokens: bytes
    found: int
    held: int
    known: int
    block_size: int
    similar: Sequence[KnownPrompt] = ()
    elsewhere: int = 0
    other_adapter: bool = False
    images: Sequence[tuple[int, int]] = ()


@dataclass(slots=True, eq=False)
class PromptSource:
    """The prompt of a request before it is tokenized.

    text: the whole prompt; None if the beginning of the text may be cut. parts: in the order of the prompt. images: the
    places of images. tools: each as JSON. settings: settings of the template, as JSON. shared: True if the request
    shares cached prefixes with others, so that explanations are limited. lookup: None until the request is admitted.
    """

    text: str | None = None
    parts: Sequence[PromptPart] = ()
    images: Sequence[str] = ()
    tools: Sequence[bytes] = ()
    settings: bytes = b""
    shared: bool = True
    lookup: PrefixLookup | None = None
    size: int = field(init=False, default=0)

    def measure(self) -> "PromptSource":
        """Counts the bytes of what does not change any more. Returns the source itself."""
        texts = [part.text for part in self.parts]
        self.size = sum(map(getsizeof, [self.text or "", *texts, *self.tools, self.settings]))
        self.size += _PART_BYTES * len(texts)
        return self
