"""What one engine has computed of a prompt continues in another, bit by bit, from files."""

import os
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make
from tests.unit.engine.requests import load_engine, prompts
from tgi_server.contract import ReportParameters, StateSave, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.prefix_store import TensorFiles
from tgi_server.engine.step import Generation
from tgi_server.prefix_files import UnusableFile

CACHED = 64
BEFORE = b"b" * 16
# A dense model, one with windows, latents, and hybrids of three kinds.
ARCHITECTURES = ("llama", "gemma3_text", "deepseek_v3", "qwen3_5_text", "lfm2", "kimi_linear", "granitemoehybrid")


def _engine(folder: Path, dtype: torch.dtype, kv: str | None) -> Engine:
    engine = load_engine(folder, dtype, kv_cache_dtype=kv)
    engine.warm_up(max_batch_size=2, max_prefill_tokens=128, max_batch_total_tokens=512)
    return engine


def _sequence(engine: Engine, **state: int | list[int]) -> RunningSequence:
    (prompt,) = prompts((100,))
    report = ReportParameters(logprobs=True, top_n_tokens=3)
    return RunningSequence(1, prompt, StoppingParameters(12, ignore_eos=True), report=report, **state)


def _computed(engine: Engine, sequence: RunningSequence) -> list[Generation]:
    driver = Driver(engine)
    output = driver.add(sequence)
    while driver.busy:
        driver.step()
    return output.generations


def _stored(engine: Engine, folder: Path) -> tuple[list[bytes], list[Generation]]:
    """Computes a prompt, and stores its first tokens. Returns digests of the blocks, and the answer."""
    size, blocks = engine.info.block_size, list(range(1, 1 + 128 // engine.info.block_size))
    sequence = _sequence(engine, blocks=blocks)
    saves = [StateSave(1, CACHED, 1)] if engine.info.states else []
    step = engine.step(1, [sequence], [(1, 100)], saves=saves)
    answer = [*step.collect().generations]
    while engine.batch:
        answer += engine.step(1).collect().generations
    store, count = engine.prefix_store(), CACHED // size
    digests = [bytes([number]) * 16 for number in range(count)]
    assert store.store(folder / "blocks", BEFORE, digests, blocks[:count], 0) > count * store.blocks.entry_bytes
    if engine.info.states:
        store.store(folder / "snapshot", BEFORE, [b"s" * 16], [], 1)
    return digests, answer


@pytest.mark.parametrize(
    ("architecture", "dtype", "kv"),
    [
        *((each, torch.float32, None) for each in ARCHITECTURES),
        *(("llama", torch.bfloat16, kv) for kv in (None, "fp8_e4m3fn")),
        pytest.param("deepseek_v3", torch.bfloat16, "fp8_e4m3fn", marks=pytest.mark.slow),
    ],
)
def test_another_engine_continues_a_prompt_from_files(
    tmp_path: Path, architecture: str, dtype: torch.dtype, kv: str | None
) -> None:
    folder = make(architecture, tmp_path / "model")
    digests, answer = _stored(_engine(folder, dtype, kv), tmp_path)
    engine = _engine(folder, dtype, kv)
    store, size = engine.prefix_store(), engine.info.block_size
    blocks = list(range(3, 3 + len(digests)))
    half = len(digests) // 2
    store.load(tmp_path / "blocks", 0, digests[:half], blocks[:half], 0)
    store.load(tmp_path / "blocks", half, digests[half:], blocks[half:], 0)
    if engine.info.states:
        store.load(tmp_path / "snapshot", 0, [b"s" * 16], [], 2)
    own = [*blocks, *range(8, 8 + CACHED // size)]
    snapshot = 2 if engine.info.states else 0
    continued = _computed(engine, _sequence(engine, blocks=own, computed=CACHED, snapshot=snapshot))
    assert continued == answer
    assert not list(tmp_path.glob("*.unfinished"))
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("*.0")} == {0o600}


@pytest.fixture
def files() -> tuple[torch.Tensor, TensorFiles]:
    tensor = torch.arange(60, dtype=torch.int32).view(5, 4, 3)
    return tensor, TensorFiles([tensor, torch.zeros(5, 0)])


DIGESTS = [bytes([number]) * 16 for number in range(3)]


def test_rows_are_read_into_other_rows(tmp_path: Path, files: tuple[torch.Tensor, TensorFiles]) -> None:
    tensor, store = files
    expected = tensor.clone()
    store.store(tmp_path / "x", BEFORE, DIGESTS, [4, 0, 2])
    tensor.fill_(-1)
    store.load(tmp_path / "x", 1, DIGESTS[1:], [3, 1])
    assert torch.equal(tensor[[3, 1]], expected[[0, 2]])
    assert (tensor[[0, 2, 4]] == -1).all()


def test_files_that_are_not_those_are_refused(tmp_path: Path, files: tuple[torch.Tensor, TensorFiles]) -> None:
    _, store = files
    file = tmp_path / "x"
    store.store(file, BEFORE, DIGESTS, [4, 0, 2])
    content = file.read_bytes()
    with pytest.raises(UnusableFile, match="another text"):
        store.load(file, 0, DIGESTS[1:], [0, 1])
    with pytest.raises(UnusableFile, match="another model"):
        TensorFiles([torch.zeros(5, 4, 3, dtype=torch.int32)], "other facts").load(file, 0, DIGESTS, [0, 1, 2])
    file.write_bytes(content[:-5] + bytes([content[-5] ^ 4]) + content[-4:])
    with pytest.raises(UnusableFile, match="checksums"):
        store.load(file, 0, DIGESTS, [0, 1, 2])
    store.load(file, 0, DIGESTS[:2], [0, 1])  # each entry has its own
    file.write_bytes(content[:-5])
    with pytest.raises(UnusableFile, match="not as long"):
        store.load(file, 0, DIGESTS, [0, 1, 2])
    os.symlink(file, tmp_path / "link")
    with pytest.raises(OSError, match="symbolic"):
        store.load(tmp_path / "link", 0, DIGESTS, [0, 1, 2])


def test_nothing_remains_of_a_file_that_cannot_be_written(
    tmp_path: Path, files: tuple[torch.Tensor, TensorFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        files[1].store(tmp_path / "x", BEFORE, DIGESTS, [0, 1, 2])
    assert list(tmp_path.iterdir()) == []


def test_models_without_blocks_have_no_files(tmp_path: Path) -> None:
    engine = load_engine(make("t5", tmp_path))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=64)
    with pytest.raises(InvalidCall, match="padded"):
        engine.prefix_store()
