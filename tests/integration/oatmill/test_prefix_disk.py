"""Cached prefixes on disk: what one model has computed, the next one of the same folder continues, bit by bit."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers  # as a whole: `LLM` would import the parts that serving needs

from oatmill import LLM, LLMError, Result
from tests.adapters import make_adapter
from tests.timing import until
from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make, make_tokenizer
from tgi_server.router.scheduling.prefix_loader import PrefixLoader

SENTENCE = "the quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak. "
TEXT = SENTENCE * 20
MODELS = ("llama", "deepseek_v3", "qwen3_5_text", "lfm2")
Load = Callable[..., LLM]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for each in MODELS:
        folder = tmp_path_factory.mktemp(each)
        folders[each] = make(each, folder, vocab_size=TOKENIZER_VOCAB_SIZE, max_position_embeddings=2048)
        make_tokenizer().save(str(folder / "tokenizer.json"))
    return folders


@pytest.fixture
def load(models: dict[str, Path], tmp_path: Path) -> Iterator[Load]:
    """Loads a model with its prefixes in one folder; the last one is closed before."""
    loaded: list[LLM] = []

    def begin(architecture: str = "llama", size: str = "50MB", **settings: Any) -> LLM:
        close()
        disk = {"prefix_cache_disk": f"{size}:{tmp_path / 'disk'}", "dtype": "float32", "max_batch_size": 4}
        loaded.append(LLM(str(models[architecture]), **disk | settings))
        return loaded[-1]

    def close() -> None:
        while loaded:
            loaded.pop().close()

    begin.close = close  # type: ignore[attr-defined]
    yield begin
    close()


def answer(llm: LLM, text: str | list[int] = TEXT, **options: Any) -> Result:
    return llm.generate(text, max_tokens=12, logprobs=3, ignore_eos=True, temperature=0, **options)


def told(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs


def files(tmp_path: Path, kind: str = "blocks") -> list[Path]:
    return sorted((tmp_path / "disk" / "oatmill-prefixes").glob(f"*.{kind}.0"))


@pytest.mark.parametrize("architecture", MODELS)
def test_a_prompt_is_computed_once(load: Load, tmp_path: Path, architecture: str) -> None:
    fresh = answer(load(architecture), cache_salt="a")
    assert fresh.usage is not None
    assert fresh.usage.cached_tokens == 0
    again = load(architecture)
    found = answer(again, cache_salt="a")
    assert told(found) == told(fresh)
    assert found.usage is not None
    assert found.usage.cached_tokens > found.usage.prompt_tokens - 32
    for salt in ("b", None):
        other = answer(again, cache_salt=salt)
        assert told(other) == told(fresh)
        assert other.usage is not None
        assert other.usage.cached_tokens == 0
    longer = answer(again, TEXT + "what came after that?", cache_salt="a")
    assert longer.usage is not None
    assert longer.usage.cached_tokens > found.usage.cached_tokens - 32
    folder = tmp_path / "disk" / "oatmill-prefixes"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert bool(files(tmp_path, "state")) is (architecture in ("qwen3_5_text", "lfm2"))
    load.close()  # type: ignore[attr-defined]
    assert told(answer(load(architecture), TEXT + "what came after that?", cache_salt="a")) == told(longer)


def test_of_a_prompt_of_whole_blocks_the_last_token_is_computed(load: Load) -> None:
    prompt = list(range(3, 3 + 288))
    fresh = answer(load(), prompt, cache_salt="a")
    found = answer(load(), prompt, cache_salt="a")
    assert (told(found), found.usage.cached_tokens) == (told(fresh), 287)


def test_what_memory_gives_up_is_read_again(load: Load) -> None:
    llm = load(max_batch_total_tokens=1024, max_total_tokens=1000)
    fresh = answer(llm, cache_salt="a")
    for number in range(3):
        answer(llm, f"{number} {TEXT}")
    again = answer(llm, cache_salt="a")
    assert again.usage is not None
    assert (told(again), again.usage.cached_tokens > 384) == (told(fresh), True)


def test_files_that_cannot_be_used_cost_no_answer(load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh = answer(load(), cache_salt="a")
    load.close()  # type: ignore[attr-defined]
    (file,) = files(tmp_path)
    content = file.read_bytes()
    llm = load(dtype="bfloat16")  # which is as another version: the file is not for it
    assert answer(llm, cache_salt="a").usage.cached_tokens == 0
    load.close()  # type: ignore[attr-defined]
    assert file.read_bytes() == content
    file.write_bytes(content[:-7] + bytes([content[-7] ^ 1]) + content[-6:])
    llm = load()
    damaged = answer(llm, cache_salt="a")
    assert (told(damaged), damaged.usage.cached_tokens) == (told(fresh), 0)
    assert "its checksums are wrong" in caplog.text
    load.close()  # type: ignore[attr-defined]
    file.write_bytes(content[: len(content) // 2])
    torn = answer(load(), cache_salt="a")
    assert (told(torn), torn.usage.cached_tokens) == (told(fresh), 0)
    assert "1 damaged files" in caplog.text


def test_a_full_disk_costs_no_answer(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    llm = load()
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        first = answer(llm, cache_salt="a")
        load.close()  # type: ignore[attr-defined]
    assert "not written to disk for 60 s: [Errno 28] No space left on device" in caplog.text
    assert [each.name for each in (tmp_path / "disk" / "oatmill-prefixes").iterdir() if each.name != "lock"] == ["key"]
    again = answer(load(), cache_salt="a")
    assert (told(again), again.usage.cached_tokens) == (told(first), 0)


def test_a_folder_of_others_is_not_used(load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "disk" / "oatmill-prefixes"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert answer(load()).usage.cached_tokens == 0
    assert "not stored on disk" in caplog.text
    load.close()  # type: ignore[attr-defined]
    assert list(folder.iterdir()) == []


def test_the_oldest_files_make_room_and_unused_ones_are_deleted(load: Load, tmp_path: Path) -> None:
    llm = load(size="600kB")
    for number in range(8):
        answer(llm, f"{number} {TEXT}")
    load.close()  # type: ignore[attr-defined]
    kept = files(tmp_path)
    assert 0 < sum(file.stat().st_size for file in kept) <= 600_000
    llm = load(size="600kB")
    assert answer(llm, f"7 {TEXT}").usage.cached_tokens == 384
    assert answer(llm, f"0 {TEXT}").usage.cached_tokens == 0
    load.close()  # type: ignore[attr-defined]
    for file in files(tmp_path):
        os.utime(file, (0, file.stat().st_mtime - 86400))
    load(prefix_cache_disk_days=0.5)
    assert files(tmp_path) == []


def test_texts_of_adapters_are_stored_for_their_files(load: Load, models: dict[str, Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(models["llama"], dtype="float32")
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    one, _ = make_adapter(model, tmp_path / "one", **settings)
    adapters = {"lora_adapters": f"a={one}"}
    fresh = answer(load(**adapters), model="a")
    found = answer(load(**adapters), model="a")
    assert (told(found), found.usage.cached_tokens > 350) == (told(fresh), True)
    plain = answer(load(**adapters))
    assert (told(plain) != told(fresh), plain.usage.cached_tokens) == (True, 0)
    make_adapter(model, one, seed=1, **settings)
    assert answer(load(**adapters), model="a").usage.cached_tokens == 0


def test_two_models_at_once_share_a_folder(load: Load, models: dict[str, Path], tmp_path: Path) -> None:
    disk = {"prefix_cache_disk": f"50MB:{tmp_path / 'disk'}", "dtype": "float32"}
    with LLM(str(models["llama"]), **disk) as one, LLM(str(models["llama"]), **disk) as other:
        fresh = answer(one, cache_salt="a")
        until(lambda: len(files(tmp_path)) == 1)
        found = answer(other, cache_salt="a")
        assert (told(found), found.usage.cached_tokens > 350) == (told(fresh), True)
        second = answer(other, f"2 {TEXT}")  # each writes while the other one does not
        until(lambda: len(files(tmp_path)) == 2)
        again = answer(one, f"2 {TEXT}")
        assert (told(again), again.usage.cached_tokens > 350) == (told(second), True)
        for file in files(tmp_path):
            file.unlink()
        assert told(answer(one, f"3 {TEXT}")) == told(answer(other, f"3 {TEXT}"))


def test_what_is_read_more_slowly_than_computed_is_computed(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = answer(load(), cache_salt="a")
    llm = load()
    monkeypatch.setattr(PrefixLoader, "is_worth_it", lambda *_: False)
    again = answer(llm, cache_salt="a")
    assert (told(again), again.usage.cached_tokens) == (told(first), 0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prefix_cache_disk": "much"}, "is not SIZE or SIZE:FOLDER"),
        ({"prefix_cache_disk": "1GB", "prefix_caching": False}, "needs the prefix cache"),
    ],
)
def test_settings_that_make_no_sense_are_refused(load: Load, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(LLMError, match=reason):
        load(**settings)
