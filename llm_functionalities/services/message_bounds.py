"""Checks a message's lists before it is parsed, because parsing megabytes of tiny entries takes long.

The format is that of https://protobuf.dev/programming-guides/encoding/.
"""

from collections import Counter

from google.protobuf.descriptor import Descriptor

from llm_functionalities.errors import InvalidArgument

# The most fields of a message for each entry that its lists may have. Messages of `llm.proto` have far fewer.
FIELDS_PER_ENTRY = 64

# A Python caller that gives a string instead of a list of strings sends a list of its characters. A list with this many
# entries, all of one character and not all the same, is taken for such a string.
CHARACTERS_OF_A_STRING = 4

_VARINT, _FIXED_64, _BYTES, _GROUP_BEGIN, _GROUP_END, _FIXED_32 = range(6)


def check_fields(message: bytes, kind: Descriptor, max_entries: int) -> None:
    """Raises InvalidArgument if a list of the message has more than `max_entries` entries, or was given as a string.

    Stops without an error where the bytes are not a message, because parsing them will fail there. kind: the type of
    the message.
    """
    try:
        _Check(message, max_entries).walk(kind, 0, len(message), "")
    except IndexError:
        return


class _Check:
    """Walks through the fields of one message."""

    def __init__(self, message: bytes, max_entries: int) -> None:
        self._message = message
        self._max_entries = max_entries
        self._left = FIELDS_PER_ENTRY * (max_entries + 1)

    def walk(self, kind: Descriptor, at: int, end: int, place: str) -> None:
        """Checks the fields between bytes `at` and `end` of the message. Raises IndexError if the bytes are not fields.

        kind: the type of these fields' message. place: the field that holds them, "" or "a.b.", for error messages.
        """
        entries: Counter[str] = Counter()
        # For each list of texts: its characters, or None if not all entries are single characters.
        characters: dict[str, set[bytes] | None] = {}
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise InvalidArgument("the request has too many fields; send less in one call")
            tag, at = self._varint(at)
            begin, at = self._skip(tag & 7, at)
            field = kind.fields_by_number.get(tag >> 3)
            if field is None or tag & 7 != _BYTES:
                continue
            if field.is_repeated:
                entries[field.name] += 1
                if field.type == field.TYPE_STRING and not place:
                    self._note_character(characters, field.name, begin, at)
                if entries[field.name] > self._max_entries:
                    _refuse_strings(characters, entries)
                    raise InvalidArgument(
                        f"`{place}{field.name}` has more than {self._max_entries} entries, the maximum of one "
                        "call; send several calls, or start the service with a larger --max-batch-prompts"
                    )
            if field.message_type is not None:
                self.walk(field.message_type, begin, min(at, end), f"{place}{field.name}.")
        _refuse_strings(characters, entries)

    def _note_character(self, characters: dict[str, set[bytes] | None], field: str, begin: int, end: int) -> None:
        seen = characters.setdefault(field, set())
        if seen is None:
            return
        # The first byte of a character in UTF-8 says how many bytes it has.
        if begin < end == begin + _bytes_of_character(self._message[begin]):
            seen.add(self._message[begin:end])
        else:
            characters[field] = None

    def _skip(self, wire_type: int, at: int) -> tuple[int, int]:
        """Returns where the value of a field begins and ends, for a field whose tag ends at `at`."""
        if wire_type == _VARINT:
            return at, self._varint(at)[1]
        if wire_type == _BYTES:
            length, at = self._varint(at)
            return at, at + length
        return at, at + {_FIXED_64: 8, _FIXED_32: 4}.get(wire_type, 0)

    def _varint(self, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = self._message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7


def _bytes_of_character(first: int) -> int:
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _refuse_strings(characters: dict[str, set[bytes] | None], entries: Counter[str]) -> None:
    for field, seen in characters.items():
        if entries[field] >= CHARACTERS_OF_A_STRING and seen is not None and len(seen) > 1:
            raise InvalidArgument(
                f"`{field}` has {entries[field]} entries of one character each: a string was given "
                "instead of a list; give a list, such as [text]"
            )
