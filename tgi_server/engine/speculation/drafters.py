"""The interfaces of drafters, and those that find their drafts in texts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.speculation.last_pass import LastPass

# Numbers of last tokens by which a text is looked up. The longer match comes first, since its continuation is surer.
_LOOKUP_TOKENS = (4, 2)


class Drafter(ABC):
    """Proposes tokens that may come next. Proposals never change a text: right ones save time, wrong ones cost time."""

    @abstractmethod
    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        """Returns drafts for some sequences: tokens that may follow, for each sequence at most its `room`."""


class ModelDrafter(Drafter):
    """A drafter whose proposals take time on the device, so only tokens that are worth it are requested.

    default_most: maximum number of tokens of a draft, if the settings have none.
    """

    default_most = 4

    @abstractmethod
    def warm_up(self, capacity: CacheCapacity, group: ShardGroup | None) -> None:
        """Makes the drafter ready for batches of this capacity, and measures it. It forgets all sequences.

        group: the shards of the model, when this is one of them.
        """

    @abstractmethod
    def seconds(self, tokens: int, sequences: int) -> float:
        """Returns the seconds that drafting `tokens` tokens for each sequence takes."""


class StateDrafter(ModelDrafter):
    """A drafter that reads the hidden states of the model's passes."""

    @abstractmethod
    def follow(self, last: LastPass) -> None:
        """Takes note of a pass whose tokens are not chosen yet."""


class NgramDrafter(Drafter):
    """Proposes the tokens that followed an earlier occurrence of the last few tokens, in the prompt or in the reply.

    Saxena, "Prompt Lookup Decoding", 2023.
    """

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[RunningSequence, TextIndex] = WeakKeyDictionary()

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        return {sequence: self._text_of(sequence).continuation(tokens) for sequence, tokens in room.items()}

    def _text_of(self, sequence: RunningSequence) -> "TextIndex":
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = TextIndex()
            text.extend(sequence.input_ids)
        text.extend(sequence.generated_ids[len(text) - len(sequence.input_ids) :])
        return text


class HistoryDrafter(Drafter):
    """Proposes the reply to an earlier request with the same prompt, as long as both replies are equal."""

    def __init__(self) -> None:
        self._repeated: WeakKeyDictionary[RunningSequence, int] = WeakKeyDictionary()  # tokens, as far as is known

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        return {sequence: self._continuation(sequence, tokens) for sequence, tokens in room.items()}

    def _continuation(self, sequence: RunningSequence, most: int) -> list[int]:
        earlier, written = sequence.earlier_reply, sequence.generated_ids
        if not earlier:
            return []
        repeated = self._repeated.get(sequence, 0)
        if earlier[repeated : len(written)] != written[repeated:]:
            sequence.earlier_reply = []  # from here on it is another reply, and nothing is compared any more
            return []
        self._repeated[sequence] = len(written)
        return earlier[len(written) : len(written) + most]


class TextIndex:
    """A growing text, with an index of the places where its last few tokens have occurred before."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # by neighbouring tokens, the place behind their last occurrence

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens. The time depends on their number, not on the length of the text."""
        before, text = len(self._text), self._text
        text += tokens
        for count in _LOOKUP_TOKENS:
            # The last tokens of the text are left out: nothing follows them yet.
            for end in range(max(before, count), len(text)):
                self._behind[tuple(text[end - count : end])] = end

    def continuation(self, tokens: int) -> list[int]:
        """Returns what followed an earlier occurrence of the last tokens, repeated if it reaches the text's end."""
        for count in _LOOKUP_TOKENS:
            start = self._behind.get(tuple(self._text[-count:]))
            if start is not None:
                period = len(self._text) - start
                return [self._text[start + place % period] for place in range(tokens)]
        return []
