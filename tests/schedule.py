"""Shares out the tests of a run among its processes: file by file, and files that share a server all to one process."""

from functools import cache

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Fixtures that start processes for all tests of a run, and take seconds in each process of the run that asks for them.
SHARED = ("demo_server", "ranks_of")


class FilesTogether(LoadFileScheduling):
    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._scope_of_file = cache(self._scope)

    def _split_scope(self, nodeid: str) -> str:
        return self._scope_of_file(super()._split_scope(nodeid))

    def _scope(self, file: str) -> str:
        """Returns the fixture that the file names, or else the file."""
        text = (self.config.rootpath / file).read_text()
        return next((fixture for fixture in SHARED if fixture in text), file)
