"""The tokens that end a text are all that the files of a model name."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PretrainedConfig

from tests.published_tokenizers import PUBLISHED
from tests.tiny_models import TOKENIZER_VOCAB_SIZE, make_llama, make_tokenizer
from tgi_server.contract import FinishReason, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.checkpoint.model_folder import ModelFolder, read_object
from tgi_server.engine.driver import Driver
from tgi_server.engine.end_tokens import end_token_ids

VOCAB = TOKENIZER_VOCAB_SIZE


def folder(path: Path, tokenizer: Tokenizer | None = None, **files: dict[str, Any]) -> Path:
    """Writes files of a model; names of `files` are without .json."""
    (tokenizer or make_tokenizer()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def ends(path: Path, default: object = None, vocab_size: int = VOCAB) -> tuple[int, ...]:
    """default: of a model that has been loaded."""
    config, generation = (read_object(path / name) for name in ("config.json", "generation_config.json"))
    return end_token_ids(ModelFolder(path, config, generation, PretrainedConfig()), default, vocab_size)


EOS = {"content": "</s>", "lstrip": False, "special": True}
A = make_tokenizer().token_to_id("a")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (9,)),
        ({"config": {}, "generation_config": {}, "tokenizer_config": {}}, (9,)),
        ({"config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": [7, 8]}}}, (7, 8)),
        ({"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 6}}, (5, 6)),
        ({"generation_config": {"top_p": 0.9}, "tokenizer_config": {"eos_token": "</s>"}}, (2,)),
        ({"generation_config": {"top_p": 0.9}, "config": {"eos_token_id": 7}}, (7,)),
        ({"tokenizer_config": {"eos_token": EOS}, "config": {"eos_token_id": 7}}, (2, 7)),
        ({"special_tokens_map": {"eos_token": EOS}}, (2,)),
        ({"special_tokens_map": {"eos_token": EOS}, "tokenizer_config": {"eos_token": "a"}}, (A,)),
        ({"special_tokens_map": {"eos_token": EOS}, "tokenizer_config": {"eos_token": None}}, (9,)),
        ({"tokenizer_config": {"eos_token": "a"}, "generation_config": {"eos_token_id": 5}}, (5, A)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": 2}}, (2,)),
        (
            {
                "tokenizer_config": {"eos_token": "beyond the vocabulary"},
                "config": {"vocab_size": 9},
                "generation_config": {"eos_token_id": 5.0},
            },
            (5,),
        ),
        ({"generation_config": {"eos_token_id": [-1, VOCAB, "2", True, None, [3], 2.5]}}, ()),
        ({"generation_config": {"eos_token_id": float("inf")}, "config": {"eos_token_id": 7}}, (7,)),
        ({"tokenizer_config": {"eos_token": ["</s>"]}, "config": {"text_config": None}}, (9,)),
    ],
    ids=str,
)
def test_the_end_tokens_of_all_files_count(files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    assert ends(folder(tmp_path, **files), 9) == expected


def test_files_that_cannot_be_read_name_none(tmp_path: Path) -> None:
    folder(tmp_path, config={"eos_token_id": 7}, tokenizer_config={"eos_token": "</s>"})
    (tmp_path / "tokenizer.json").write_text("{")
    assert ends(tmp_path) == (7,)
    assert ends(tmp_path / "absent") == ()


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=lambda each: each.name)
def test_the_end_tokens_of_published_models(published: Any, tmp_path: Path) -> None:
    """Without generation_config.json, as fine-tunes often are, the tokenizer's own is left."""
    published.save(tmp_path)
    assert ends(tmp_path, vocab_size=published.vocab_size) == (published.token_id(published.eos),)


def test_a_text_ends_with_the_end_token_of_the_tokenizer(tmp_path: Path) -> None:
    """A fine-tune names the end of its turns in the tokenizer only; the class of the model has another default."""
    make_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    folder(tmp_path, config=config, generation_config={"top_p": 0.9}, tokenizer_config={"eos_token": "a"})
    engine = Engine(EngineConfig(tmp_path))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=64, max_total_tokens=64)
    assert engine.info.eos_token_ids == (A,)
    asked = SamplingParameters(logit_bias={A: 1000.0})
    late = SamplingParameters(logit_bias={A: 1000.0}, min_tokens=2, late_tokens=engine.info.eos_token_ids)
    ended, later = Driver(engine).run(
        *(
            RunningSequence(index, [1, 5], StoppingParameters(9, ignore_eos=False), sampling=sampling)
            for index, sampling in enumerate((asked, late))
        )
    )
    assert (ended.tokens, ended.finish_reason) == ([A], FinishReason.EOS_TOKEN)
    assert (len(later.tokens), later.tokens[-1], later.finish_reason) == (3, A, FinishReason.EOS_TOKEN)
