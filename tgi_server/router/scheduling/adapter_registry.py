"""The LoRA adapters that requests may name, and which of them the shards have loaded.

The shards hold at most `max_loras` at once. When a request waits for another one, the least recently used adapter
without running requests is evicted, and the shards load the other one from its folder while steps continue.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tgi_server.router.errors import InvalidRequest, NoSuchAdapter, RouterError
from tgi_server.router.scheduling.shard_client import ShardedClient

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter that was added.

    id: the name that requests use. folder: the folder from which the shards load it. key: the name that the shards use.
    If an id is removed and added again, the new adapter has another key, and so shares nothing in the prefix cache.
    digest: digest of its files, the same after a restart; empty if the files cannot be read.
    rank: largest rank of its layers. bytes: its size in a shard. used: logical time of the last use. ready: True while
    the shards hold it. loading: the task that loads it.
    """

    id: str
    folder: str
    key: str
    digest: str = ""
    rank: int = 0
    bytes: int = 0
    used: int = 0
    ready: bool = False
    loading: "asyncio.Task[None] | None" = field(default=None, repr=False)


class Adapters:
    """Adds and removes adapters, and decides which of them the shards hold.

    on_ready: called when an adapter is ready, or another one could be loaded. on_failure: called with an adapter that
    could not be loaded, and the error. in_use: returns True while the shards may still compute with an adapter.
    """

    def __init__(self, shards: ShardedClient, max_loras: int) -> None:
        """max_loras: maximum number of adapters that the shards hold at once."""
        self.on_ready: Callable[[], None] = lambda: None
        self.on_failure: Callable[[Adapter, RouterError], None] = lambda adapter, error: None
        self.in_use: Callable[[Adapter], bool] = lambda adapter: False
        self._shards = shards
        self.max_loras = max_loras
        self._by_id: dict[str, Adapter] = {}
        self._held: dict[str, Adapter] = {}  # by key: held by the shards, or about to be
        self._adding: set[str] = set()
        self._numbers = count(1)
        self._clock = count(1)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, adapter_id: str) -> Adapter:
        """Returns the adapter with this id. Raises NoSuchAdapter, which lists the known ids."""
        adapter = self._by_id.get(adapter_id)
        if adapter is None:
            raise NoSuchAdapter(adapter_id, list(self._by_id))
        return adapter

    async def add(self, adapter_id: str, folder: str) -> Adapter:
        """Adds an adapter: the shards check it, and keep it loaded if they hold fewer than `max_loras`.

        Raises InvalidRequest if the id is taken or the adapter does not fit the model, and Unhealthy.
        """
        if adapter_id in self._by_id or adapter_id in self._adding:
            raise InvalidRequest(f"there is an adapter {adapter_id!r} already; unload it first", param="lora_name")
        adapter = Adapter(adapter_id, folder, f"{adapter_id}#{next(self._numbers)}", _files_digest(folder))
        self._adding.add(adapter_id)
        hold = len(self._held) < self.max_loras
        if hold:
            self._held[adapter.key] = adapter
        try:
            response = await self._shards.load_adapter(adapter.key, folder, check_only=not hold)
        except BaseException as error:
            self._held.pop(adapter.key, None)
            self.on_ready()
            if isinstance(error, RouterError):
                with suppress(RouterError):  # some of the shards may hold it
                    await self._shards.unload_adapter(adapter.key)
            raise
        finally:
            self._adding.remove(adapter_id)
        adapter.rank, adapter.bytes, adapter.ready = response.rank, response.bytes, hold
        self._by_id[adapter_id] = adapter
        self.on_ready()
        return adapter

    async def remove(self, adapter_id: str) -> None:
        """Removes an adapter. Requests that use it already are completed. Raises NoSuchAdapter and Unhealthy."""
        adapter = self.find(adapter_id)
        del self._by_id[adapter_id]
        adapter.used = 0  # if it is still in use, it will be the first to be evicted
        if adapter.ready and not self.in_use(adapter):
            self._give_up(adapter)
            await self._shards.unload_adapter(adapter.key)

    def prepare(self, adapter: Adapter) -> bool:
        """Returns True if the adapter is ready, so that a request with it may join.

        Otherwise starts to load it, if the shards hold fewer than `max_loras` or another one can be evicted.
        """
        if adapter.ready:
            adapter.used = next(self._clock)
        elif adapter.loading is None:
            leaving = None if len(self._held) < self.max_loras else self._oldest()
            if leaving is not None:
                self._give_up(leaving)
            if len(self._held) < self.max_loras:
                self._held[adapter.key] = adapter
                adapter.used = next(self._clock)
                adapter.loading = asyncio.create_task(self._load(adapter, leaving), name=f"adapter {adapter.id}")
        return adapter.ready

    def missing_bytes(self, places: int) -> int:
        """Returns the bytes that a shard needs for `places` adapters of the largest size, beside the loaded ones."""
        largest = max((each.bytes for each in self), default=0)
        return max(0, min(places, self.max_loras) * largest - sum(each.bytes for each in self._held.values()))

    @property
    def loading(self) -> bool:
        """True while an adapter is being loaded; `on_ready` is called when that has ended."""
        return any(not each.ready for each in self._held.values())

    def close(self) -> None:
        """Stops waiting for adapters that are being loaded."""
        for adapter in list(self._held.values()):
            if adapter.loading is not None:
                adapter.loading.cancel()

    def _oldest(self) -> Adapter | None:
        """Returns the least recently used of the adapters that are ready and not in use; None if there is none."""
        idle = (each for each in self._held.values() if each.ready and not self.in_use(each))
        return min(idle, key=lambda each: each.used, default=None)

    def _give_up(self, adapter: Adapter) -> None:
        adapter.ready = False
        del self._held[adapter.key]

    async def _load(self, adapter: Adapter, leaving: Adapter | None) -> None:
        try:
            if leaving is not None:
                await self._shards.unload_adapter(leaving.key)
            await self._shards.load_adapter(adapter.key, adapter.folder)
        except RouterError as error:
            logger.error("the adapter %s could not be read again: %s", adapter.id, error)
            self._held.pop(adapter.key, None)
            self.on_failure(adapter, error)
        else:
            adapter.ready = True
        finally:
            adapter.loading = None
            self.on_ready()


def _files_digest(place: str) -> str:
    """Returns a digest of the names, sizes and modification times of an adapter's files; "" if they cannot be read."""
    path = Path(place)
    try:
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        facts = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    except OSError:
        return ""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest() if place else ""
