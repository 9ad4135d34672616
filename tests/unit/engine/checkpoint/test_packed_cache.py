"""Packed weights of an earlier start give the same model, and are used for no other."""

import logging
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tgi_server.engine.load_parts as module
from tests.timing import until
from tests.tiny_models import make
from tests.unit.engine.conftest import RanksOf
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine import Engine
from tgi_server.engine.checkpoint.packed_cache import write_packed
from tgi_server.engine.errors import ModelNotFound
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.parallel import ShardGroup

TEXTS = prompts((1, 70, 5, 33))
BFLOAT16 = {"dtype": torch.bfloat16}
# One of each kind of layer; the others are slow.
QUICK = {("llama", "int4"), ("gpt_oss", "int4"), ("jamba", "int4")}
MODELS = [
    *[(name, "int4") for name in ("opt", "llama_dynamic", "gemma3_text", "gpt_oss", "mixtral", "qwen3_moe", "gemma2")],
    *[(name, "int4") for name in ("bamba", "jamba", "lfm2", "qwen3_next", "qwen3_5_text", "olmo_hybrid")],
    *[("llama", quantize) for quantize in ("int4", "int8", "fp8", "bitsandbytes-nf4")],
]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def files_of(cache: Path) -> set[Path]:
    return set((cache / "oatmill-packed-weights").iterdir())


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Loads an engine while no checkpoint can be read."""

    def load(*arguments: object, **settings: object) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr(module, "load_model", lambda *_: pytest.fail("the checkpoint was read"))
            return load_engine(*arguments, **settings)  # type: ignore[arg-type]

    return load


@pytest.mark.parametrize(
    ("architecture", "quantize"),
    [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow) for each in MODELS],
)
def test_a_later_start_computes_the_same_without_the_checkpoint(
    architecture: str, quantize: str, restored: Callable[..., Engine], cache: Path, tmp_path: Path
) -> None:
    folder = make(architecture, tmp_path / "model")
    settings = {"quantize": quantize, "packed_cache": cache, **BFLOAT16}
    first = load_engine(folder, **settings)
    second = restored(folder, **settings)
    assert second.info == first.info
    expected = generate_together(first, TEXTS)
    assert len({token for tokens in expected for token in tokens}) > 5, "a model that says nothing proves nothing"
    assert generate_together(second, TEXTS) == expected


def test_two_shards_store_and_read_one_part_each(ranks_of: RanksOf, cache: Path, tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    settings = {"quantize": "int4", "packed_cache": cache, **BFLOAT16}
    first, second = (ranks_of(2).run(_generate, folder, settings) for _ in range(2))
    assert [outputs for outputs, _ in first] == [outputs for outputs, _ in second]
    assert [read for _, read in (*first, *second)] == [False, False, True, True]
    next(iter(files_of(cache))).unlink()  # then neither shard uses what it has
    assert [read for _, read in ranks_of(2).run(_generate, folder, settings)] == [False, False]


def _generate(group: ShardGroup, folder: Path, settings: dict[str, object]) -> tuple[list[list[int]], bool]:
    """Returns what a shard generates, and True if it did not read the checkpoint."""
    reads, load = [], module.load_model
    module.load_model = lambda *arguments: reads.append(True) or load(*arguments)  # type: ignore[func-returns-value]
    try:
        engine = load_engine(folder, group=group, **settings)  # type: ignore[arg-type]
    finally:
        module.load_model = load
    return generate_together(engine, TEXTS), not reads


def _flipped(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
        weights = archive.read(largest)
    content = bytearray(file.read_bytes())
    content[content.index(weights) + len(weights) // 2] ^= 1
    file.write_bytes(content)


def _cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _writable_by_others(file: Path) -> None:
    file.chmod(0o666)


def _in_a_folder_that_others_write_to(file: Path) -> None:
    file.parent.chmod(0o777)


def _linked(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def _a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _another_pickle(file: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, file)


class _Command:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch ran",)


def _a_command(file: Path) -> None:
    torch.save(_Command(), file)


def _a_function_of_the_package(file: Path) -> None:
    torch.save(load_kernels, file)


HARMS = [_flipped, _cut_off, _emptied, _writable_by_others, _in_a_folder_that_others_write_to, _linked, _a_pipe]


@pytest.mark.parametrize("harm", [*HARMS, _another_pickle, _a_command, _a_function_of_the_package])
def test_a_file_that_cannot_be_trusted_is_made_anew(
    harm: Callable[[Path], None],
    restored: Callable[..., Engine],
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make("llama", tmp_path / "model")
    settings = {"quantize": "int4", "packed_cache": cache, **BFLOAT16}
    expected = generate_together(load_engine(folder, **settings), TEXTS)
    (file,) = files_of(cache)
    harm(file)
    with caplog.at_level(logging.WARNING):
        assert generate_together(load_engine(folder, **settings), TEXTS) == expected
    assert f"{file} cannot be used, so the model is packed anew" in caplog.text
    assert not (tmp_path / "ran").exists()
    file.parent.chmod(0o700)
    assert generate_together(restored(folder, **settings), TEXTS) == expected


def test_other_settings_have_a_file_of_their_own_and_a_changed_checkpoint_replaces_its_file(
    cache: Path, tmp_path: Path
) -> None:
    folder = make("llama", tmp_path / "model")

    def files(dtype: torch.dtype = torch.bfloat16, quantize: str = "int4", **settings: object) -> set[Path]:
        load_engine(folder, dtype, packed_cache=cache, quantize=quantize, **settings)  # type: ignore[arg-type]
        return files_of(cache)

    first = files()
    assert files(image_memory=0) == first  # which changes nothing in the weights
    assert len(files(torch.float32)) == 2
    three = files(quantize="eetq")
    assert len(three) == 3
    os.utime(folder / "model.safetensors")
    changed = files()
    assert three - changed == first
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert changed - files() == changed - three


def test_the_files_that_were_used_last_stay(cache: Path, tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    own = cache / "oatmill-packed-weights"
    own.mkdir(parents=True)
    others = [own / f"other-{number:016x}-{number:016x}.pt" for number in range(9)]
    unfinished = own / "x.unfinished"
    foreign = [cache / f"checkpoint-{number}.pt" for number in range(12)]
    foreign += [own / "pytorch_model-00001-of-00002.pt", own / "my.download.unfinished", cache / "x.unfinished"]
    for age, file in enumerate([*others, unfinished, *foreign]):
        file.touch()
        os.utime(file, (0, 1e9 - age))
    load_engine(folder, packed_cache=cache, quantize="int4")
    assert not unfinished.exists()
    assert [file for file in others if file.exists()] == others[:7]
    assert len(files_of(cache)) == 8 + 2
    assert all(file.exists() for file in foreign), "files that are not the cache's own were deleted"


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO):
        folder = make("llama", tmp_path / "model")
        engine = load_engine(folder, packed_cache=tmp_path / "file" / "packed", quantize="int4")
    assert "packed weights are not stored in" in caplog.text
    assert generate_together(engine, TEXTS)


def test_a_full_disk_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        write_packed(tmp_path / "packed" / "a.pt", [torch.zeros(100_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"packed weights are not stored in {tmp_path / 'packed'}: [Errno 27] File too large" in caplog.text
    assert list((tmp_path / "packed").iterdir()) == []


@pytest.mark.parametrize("fault", ["", "[Errno 20] Not a directory"])
def test_a_large_model_is_written_beside_the_server(
    fault: str, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    if fault:
        cache.touch()
    content = [torch.arange(1_000_000.0)]
    write_packed(cache / "model" / "a.pt", content, beside=True)
    content[0].zero_()  # the file has what there was
    until(lambda: "packed weights are" in caplog.text)
    if fault:
        assert f"packed weights are not stored in {cache / 'model'}: {fault}" in caplog.text
    else:
        assert torch.load(cache / "model" / "a.pt")[0].equal(torch.arange(1_000_000.0))
        assert len(list((cache / "model").iterdir())) == 1


UNTIL_KILLED = """
import sys, time
from pathlib import Path
import torch
from tgi_server.engine.checkpoint.packed_cache import write_packed

write_packed(Path(sys.argv[1]), [torch.ones(20_000_000) for _ in range(40)], beside=True)
print("begun", flush=True)
time.sleep(60)
"""


def test_what_is_written_beside_a_server_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "packed" / "a.pt"
    command = [sys.executable, "-c", UNTIL_KILLED, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "begun\n"
        until(lambda: file.parent.exists() and any(file.parent.iterdir()))
        server.kill()
    until(lambda: not [each for each in file.parent.iterdir() if each.suffix == ".unfinished"])
    assert not file.exists()


def test_a_folder_that_is_not_there_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model folder at"):
        load_engine(tmp_path / "absent", packed_cache=cache)


@pytest.mark.parametrize(("architecture", "quantize"), [("llama", None), ("codegen", "int4")])
def test_dense_models_and_those_in_the_layers_of_transformers_are_not_stored(
    architecture: str, quantize: str | None, cache: Path, tmp_path: Path
) -> None:
    load_engine(make(architecture, tmp_path / "model"), packed_cache=cache, quantize=quantize)
    assert not cache.exists()
