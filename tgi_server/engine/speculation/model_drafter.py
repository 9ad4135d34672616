"""The interface of drafters that compute on the device."""

from abc import abstractmethod

from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.speculation.drafters import Drafter
from tgi_server.engine.speculation.last_pass import LastPass


class ModelDrafter(Drafter):
    """A drafter whose proposals take the device's time, so that only tokens which are worth it are asked for.

    default_most: tokens of a draft at most, where nothing else is said.
    """

    default_most = 4

    @abstractmethod
    def warm_up(self, capacity: CacheCapacity, group: ShardGroup | None) -> None:
        """Makes the drafter ready for batches of this capacity, and measures it. It forgets all sequences.

        group: the shards of the model, when this is one of them.
        """

    @abstractmethod
    def seconds(self, tokens: int, sequences: int) -> float:
        """Returns how long it takes to draft `tokens` tokens for each of so many sequences."""


class StateDrafter(ModelDrafter):
    """A drafter that reads the hidden states of the model's passes."""

    @abstractmethod
    def follow(self, last: LastPass) -> None:
        """Takes note of a pass whose tokens are not chosen yet."""
