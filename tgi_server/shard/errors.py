"""Errors of a shard other than those of its engine. `str()` of one is a line that says what to do."""


class GrammarsBusy(Exception):
    """A grammar cannot be compiled now, but perhaps soon."""
