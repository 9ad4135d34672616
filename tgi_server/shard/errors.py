"""Errors of a shard beside its engine's. `str()` of one is a line that says what to do."""


class GrammarsBusy(Exception):
    """A grammar cannot be compiled now. The same may be compiled soon."""
