"""Errors of a shard beside those of its engine. `str()` of one is a line that says what to do."""


class ShardError(Exception):
    """Base of the shard's own errors."""


class ModelUnavailable(ShardError):
    """The model's files are not there and cannot be fetched, or are of a kind that is not loaded."""


class GrammarsBusy(ShardError):
    """A grammar cannot be compiled now. The same may be compiled soon."""
