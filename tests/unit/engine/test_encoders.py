"""Values are those of `transformers`, whatever is encoded together."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tiny_encoders import MOST_TOKENS, SETTINGS, make_embedder, make_ranker, make_yes_or_no_ranker
from tgi_server.contract import Task
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.encoders import Encoder, finished
from tgi_server.engine.errors import EngineError, InvalidWeights, UnsupportedModel

TOLERANCE = 1e-4


@dataclass
class Text:
    ids: list[int]
    second: int = 0


LENGTHS = (3, 40, 9, 9, 1, 27, 64)


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[Text]:
    return [
        Text([1, *(7 + (number * 31 + each * 17) % 300 for each in range(length - 2)), 2][-length:])
        for number, length in enumerate(lengths)
    ]


def load(task: Task, folder: Path) -> Encoder:
    return Encoder(task, EngineConfig(folder, device=torch.device("cpu")))


def encoded(encoder: Encoder, given: list[Text], most_tokens: int = 4096) -> Tensor:
    values = torch.empty(len(given), encoder.info.columns)
    for batch in encoder.batches(given, most_tokens):
        values[batch] = encoder.encode([given[each] for each in batch])
    return values


@torch.inference_mode()
def hidden_states(folder: Path, given: list[Text]) -> list[Tensor]:
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    return [model(input_ids=torch.tensor([text.ids])).last_hidden_state[0] for text in given]


def close(values: Tensor, expected: Tensor) -> None:
    assert values.shape == expected.shape
    assert (values - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", SETTINGS)
def test_embeddings_are_those_of_transformers_alone_and_in_batches(kind: str, tmp_path: Path) -> None:
    folder = make_embedder(kind, tmp_path, pooling="lasttoken" if kind == "qwen3" else "mean")
    encoder, given = load("embed", folder), texts()
    pool = (lambda each: each[-1]) if kind == "qwen3" else (lambda each: each.mean(0))
    expected = torch.stack([pool(each) for each in hidden_states(folder, given)])
    close(encoded(encoder, given), expected)
    close(encoded(encoder, given, most_tokens=1), expected)
    assert encoder.info.max_tokens == MOST_TOKENS


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("cls", lambda each: each[0]),
        ("lasttoken", lambda each: each[-1]),
        ("max", lambda each: each.amax(0)),
        ("mean_sqrt_len_tokens", lambda each: each.sum(0) / len(each) ** 0.5),
        (
            "weightedmean",
            lambda each: (each * (w := torch.arange(1.0, len(each) + 1)[:, None])).sum(0) / w.sum(),
        ),
    ],
)
def test_tokens_are_pooled_as_the_files_say(pooling: str, expected, tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path, pooling=pooling)
    close(
        encoded(load("embed", folder), texts()),
        torch.stack([expected(each) for each in hidden_states(folder, texts())]),
    )


def test_dense_layers_come_after_pooling_and_requests_decide_about_the_length(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = make_embedder("bert", tmp_path, dense=16, normalize=True)
    encoder = load("embed", folder)
    weights = load_file(folder / "2_Dense/model.safetensors")
    means = torch.stack([each.mean(0) for each in hidden_states(folder, texts())])
    expected = torch.tanh(means @ weights["linear.weight"].T + weights["linear.bias"])
    assert encoder.info.columns == 16
    close(encoded(encoder, texts()), expected)
    close(finished(expected, 0, unit=True), normalize(expected, dim=1))
    close(finished(expected, 4, unit=True), normalize(expected[:, :4], dim=1))


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert", "qwen3"])
def test_scores_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_ranker(kind, tmp_path, labels=3)
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    given = [Text(text.ids, second=len(text.ids) // 2) for text in texts()]
    types = kind == "bert"
    expected = []
    for text in given:
        inputs = {"input_ids": torch.tensor([text.ids])}
        if types:
            inputs["token_type_ids"] = torch.tensor([[int(0 < text.second <= each) for each in range(len(text.ids))]])
        with torch.inference_mode():
            expected.append(model(**inputs).logits[0])
    encoder = load("rank", folder)
    assert encoder.info.labels == ("label 0", "label 1", "label 2")
    close(encoded(encoder, given), torch.stack(expected))


def test_a_decoder_scores_yes_against_no(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = make_yes_or_no_ranker(tmp_path)
    encoder = load("rank", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    with torch.inference_mode():
        last = torch.stack([model(input_ids=torch.tensor([text.ids])).logits[0, -1] for text in texts()])
    assert encoder.info.answers
    close(encoded(encoder, texts()), (last[:, yes] - last[:, no])[:, None])


def test_batches_pad_little_and_stay_within_their_bound(tmp_path: Path) -> None:
    encoder = load("embed", make_embedder("bert", tmp_path))
    given = texts(tuple(1 + number * 7 % 64 for number in range(200)))
    batches = list(encoder.batches(given, 1024))
    assert sorted(each for batch in batches for each in batch) == list(range(200))
    padded = 0
    for batch in batches:
        lengths = [len(given[each].ids) for each in batch]
        assert len(batch) * max(lengths) <= 1024
        padded += len(batch) * max(lengths) - sum(lengths)
    assert padded < 0.1 * sum(len(text.ids) for text in given)


def test_others_may_compute_before_each_layer(tmp_path: Path) -> None:
    encoder = load("embed", make_embedder("bert", tmp_path))
    pauses: list[int] = []
    encoder.between = lambda: pauses.append(1)
    encoder.encode(texts())
    assert len(pauses) == encoder.layers == 2


def _with_prompt_excluded(folder: Path) -> None:
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))


def _with_unknown_pooling(folder: Path) -> None:
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "median"}))


def _with_unknown_module(folder: Path) -> None:
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.LSTM", "path": "1"}]))


def _without_a_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (_with_prompt_excluded, UnsupportedModel, "without the tokens of the prompt"),
        (_with_unknown_pooling, UnsupportedModel, "'median'"),
        (_with_unknown_module, UnsupportedModel, "LSTM"),
        (_without_a_layer, InvalidWeights, "encoder.layer.2"),
    ],
)
def test_what_is_not_served_is_refused(damage, error: type[EngineError], says: str, tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path)
    damage(folder)
    with pytest.raises(error, match=says):
        load("embed", folder)


def test_a_model_that_does_not_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="does not score texts"):
        load("rank", make_embedder("bert", tmp_path))
