import math
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tgi_server.engine.sampling import Sampled, logprobs, prompt_logprobs
from tgi_server.engine.sampling.logprobs import PendingTokens, keep_top


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [2**25, 300])
def test_prompt_logprobs(dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", at_once)
    logits = torch.randn(7, 100).to(dtype)
    ids = torch.randint(100, (7,))
    every = logits.float().log_softmax(-1)
    chosen, top = prompt_logprobs(logits, ids, 2)
    torch.testing.assert_close(chosen, every[torch.arange(7), ids])
    best = every.topk(2)
    assert [[token for token, _ in each] for each in top] == best.indices.tolist()
    torch.testing.assert_close(torch.tensor([[value for _, value in each] for each in top]), best.values)
    assert prompt_logprobs(logits, ids)[1] == []


def test_ties_with_the_last_are_kept_and_the_impossible_is_not() -> None:
    ids, values = [5, 9, 2, 7, 1], [-0.5, -1.0, -1.0, -2.0, -math.inf]
    assert keep_top(ids, values, 1) == [(5, -0.5)]
    assert keep_top(ids, values, 2) == [(5, -0.5), (2, -1.0), (9, -1.0)]
    assert keep_top(ids, values, 5) == [(5, -0.5), (2, -1.0), (9, -1.0), (7, -2.0)]
    assert keep_top(ids, values, 50) == [(5, -0.5), (2, -1.0), (9, -1.0), (7, -2.0)]


class Event:
    """Stands in for an event of CUDA, in whose wait nothing of the device can be seen here."""

    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self.recorded = False

    def record(self) -> None:
        self.recorded = True


def test_who_waits_for_a_gpu_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for a device that has died never ends, and must not keep a core busy."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    with FakeTensorMode(allow_non_fake_inputs=True):
        pending = Sampled(torch.zeros(2, dtype=torch.int64, device="cuda")).start_copy()
    assert (pending._done.blocking, pending._done.recorded) == (True, True)


def test_a_thread_waits_on_the_gpu_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA opens a context on GPU 0 for a thread whose first call comes before it chose another one."""
    current, waited = threading.local(), []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "index", device.index))

    class Done:
        def synchronize(self) -> None:
            waited.append(getattr(current, "index", 0))

    tokens = torch.tensor([3])
    pending = PendingTokens(Sampled(tokens), tokens, torch.device("cuda", 2), Done())  # type: ignore[arg-type]
    thread = threading.Thread(target=pending.synchronize)
    thread.start()
    thread.join()
    assert waited == [2]
    assert pending.wait().ids == [3]
