"""Which threads compute passes in which kernels alternate with operators of torch."""

from collections.abc import Iterator

import pytest
import torch

from tests.tiny_models import make
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.backends import cpu
from tgi_server.engine.backends.threads import kernel_threads
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.offline import generate

pytestmark = pytest.mark.skipif(not load_kernels(), reason="the kernels cannot be compiled here")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads, own = torch.get_num_threads(), torch.ops.oatmill.set_own_threads(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    torch.ops.oatmill.set_own_threads(own)


def threads() -> tuple[int, int]:
    """Returns the threads of torch's operators, and those of the kernels' own pool."""
    own = torch.ops.oatmill.set_own_threads(0)
    torch.ops.oatmill.set_own_threads(own)
    return torch.get_num_threads(), own


def test_kernels_have_all_threads_until_the_pass_ends_or_fails() -> None:
    with kernel_threads():
        assert threads() == (1, 2)
    assert threads() == (2, 0)
    with pytest.raises(ValueError, match="fails"), kernel_threads():
        raise ValueError("the pass fails")
    assert threads() == (2, 0)


def test_decoding_in_layers_of_transformers_leaves_torch_one_thread(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_small_layers", lambda model: False)  # which would have one thread
    engine = Engine(EngineConfig(make("deepseek_v32", tmp_path), torch.float32, torch.device("cpu")))
    seen: list[tuple[int, tuple[int, int]]] = []
    embedding = engine._runner.backend.source.get_input_embeddings()
    embedding.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].numel(), threads())))
    generate(engine, [[1, 2, 3] * 30], StoppingParameters(4, ignore_eos=True))
    decoding = {found for tokens, found in seen if tokens == 1}
    prompts = {found for tokens, found in seen if tokens == 90}
    assert decoding == {(1, 2)}
    assert prompts == {(2, 0)}
    assert threads() == (2, 0)
