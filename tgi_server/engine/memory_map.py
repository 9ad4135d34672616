"""The mappings of this process's memory, as Linux lists them."""

import re
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)")


@dataclass(slots=True)
class Mapping:
    """A mapping, from its first byte to behind its last one.

    path: of a file; else empty, or a name in brackets. private: what is written stays in this process. changed: pages
    of a file were written by this process. huge_pages: it was asked for them.
    """

    first: int
    last: int
    private: bool
    writable: bool
    path: str
    changed: bool = False
    huge_pages: bool = False

    @property
    def is_anonymous(self) -> bool:
        return self.private and (not self.path or self.path == "[heap]" or self.path.startswith("[anon"))


class Mappings:
    """The mappings at one time, in order."""

    def __init__(self, lines: Iterable[str]) -> None:
        """lines: of /proc/PID/smaps (proc_pid_smaps(5))."""
        self._mappings: list[Mapping] = []
        for line in lines:
            if head := _HEAD.match(line):
                first, last, access, _, path = head.groups()
                mapping = Mapping(int(first, 16), int(last, 16), access[3] == "p", access[1] == "w", path)
                self._mappings.append(mapping)
            elif line.startswith("Anonymous:"):
                self._mappings[-1].changed = int(line.split()[1]) > 0
            elif line.startswith("VmFlags:"):
                self._mappings[-1].huge_pages = "hg" in line.split()
        self._starts = [mapping.first for mapping in self._mappings]

    @classmethod
    def now(cls) -> "Mappings":
        """Reads the mappings of this process. Raises OSError on other systems than Linux."""
        with Path("/proc/self/smaps").open() as lines:
            return cls(lines)

    def anonymous(self, address: int, size: int) -> Mapping | None:
        """Returns the mapping in which bytes begin that are this process's alone; None for those of a file."""
        number = bisect(self._starts, address) - 1
        found, end = None, address
        while 0 <= number < len(self._mappings) and end < address + size:
            mapping = self._mappings[number]
            if not (mapping.is_anonymous and mapping.writable and mapping.first <= end < mapping.last):
                return None
            found, end, number = found or mapping, mapping.last, number + 1
        return found

    def is_unchanged_file(self, address: int, size: int) -> bool:
        """Returns True for bytes of a mapped file that would be read again from it."""
        number = bisect(self._starts, address) - 1
        if number < 0 or address + size > self._mappings[number].last:
            return False
        mapping = self._mappings[number]
        return mapping.path.startswith("/") and not mapping.changed and (mapping.private or not mapping.writable)
