import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tgi_server.engine.backends.lora import LoraDelta
from tgi_server.engine.lora.loaded import LoadedAdapters, ReadAdapter, RecentAdapters


def test_adapters_that_were_used_last_are_not_read_again() -> None:
    recent, read = RecentAdapters(most_bytes=250), []

    def reader(name: str, floats: int = 25) -> Callable[[], ReadAdapter]:
        def made() -> ReadAdapter:
            read.append(name)
            return ReadAdapter(1, {0: LoraDelta(torch.zeros(1, floats), [], [], None, None)})

        return made

    first = recent.get("a", reader("a"))
    for name in "bab":
        recent.get(name, reader(name))
    assert recent.get("a", reader("a")) is first
    assert read == ["a", "b"]
    for name in "cab":  # c takes the place of b, and that the one of c
        recent.get(name, reader(name))
    assert read == ["a", "b", "c", "b"]
    assert recent.get("large", reader("large", 100)).nbytes == 400
    recent.get("a", reader("a"))
    assert read[4:] == ["large", "a"]


def test_a_thread_that_fetches_adapters_copies_them_on_the_gpu_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    current, copied = threading.local(), []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "index", device.index))

    class Read:
        def to(self, device: torch.device) -> None:
            copied.append((device.index, getattr(current, "index", 0)))

    adapters = cast(Any, object.__new__(LoadedAdapters))
    adapters._model = SimpleNamespace(device=torch.device("cuda", 2))
    adapters._recent = SimpleNamespace(get=lambda *_: Read())
    thread = threading.Thread(target=adapters.fetch, args=("a", Path("/nowhere")))
    thread.start()
    thread.join()
    assert copied == [(2, 2)]
