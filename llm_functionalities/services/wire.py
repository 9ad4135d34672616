"""Counts the entries of a message's lists before it is parsed, because parsing megabytes of tiny entries takes long.

The format is that of https://protobuf.dev/programming-guides/encoding/.
"""

from collections import Counter

from google.protobuf.descriptor import Descriptor

from llm_functionalities.errors import InvalidArgument

# A message may have this many fields for each entry that its lists may have: far more than any of `llm.proto` has.
FIELDS_PER_ENTRY = 64

_VARINT, _FIXED_64, _BYTES, _GROUP_BEGIN, _GROUP_END, _FIXED_32 = range(6)


def check_fields(message: bytes, kind: Descriptor, max_entries: int) -> None:
    """Raises InvalidArgument when a list in the message, which is of `kind`, has more than `max_entries` entries.

    Stops where the bytes are no message, because parsing them will fail at the same place.
    """
    try:
        _Check(message, max_entries).walk(kind, 0, len(message), "")
    except IndexError:
        return


class _Check:
    """One walk through the fields of a message."""

    def __init__(self, message: bytes, max_entries: int) -> None:
        self._message = message
        self._max_entries = max_entries
        self._left = FIELDS_PER_ENTRY * (max_entries + 1)

    def walk(self, kind: Descriptor, at: int, end: int, place: str) -> None:
        """Counts the fields between two positions of the message. Raises IndexError where the bytes are no fields."""
        entries: Counter[str] = Counter()
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
                if entries[field.name] > self._max_entries:
                    raise InvalidArgument(
                        f"`{place}{field.name}` has more than {self._max_entries} entries, which is the most that "
                        "one call may have; send several calls, or start the service with a larger --max-batch-prompts"
                    )
            if field.message_type is not None:
                self.walk(field.message_type, begin, min(at, end), f"{place}{field.name}.")

    def _skip(self, wire_type: int, at: int) -> tuple[int, int]:
        """Returns the positions where a field's value begins and ends."""
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
