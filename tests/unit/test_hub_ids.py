"""Addresses of the hub's pages stand for ids, wherever an id is given."""

import pytest

from shared.settings import InvalidSettings, check_settings
from tgi_server.hub_ids import read_hub_id
from tgi_server.launcher.settings import LauncherSettings


@pytest.mark.parametrize(
    ("text", "model_id", "revision"),
    [
        ("maker/model", "maker/model", None),
        ("/models/huggingface.co/model", "/models/huggingface.co/model", None),
        ("https://huggingface.co/maker/model", "maker/model", None),
        ("http://www.huggingface.co/maker/model/", "maker/model", None),
        ("hf.co/maker/model:Q4_K_M", "maker/model:Q4_K_M", None),
        ("https://huggingface.co/gpt2/tree/main", "gpt2", None),
        ("https://hf.co/maker/model/tree/v1.0?library=transformers", "maker/model", "v1.0"),
        ("https://hf.co/maker/model/tree/refs%2Fpr%2F1", "maker/model", "refs/pr/1"),
        ("https://hf.co/maker/model/blob/main/m-Q4_K_M.gguf", "maker/model:m-Q4_K_M", None),
        ("https://hf.co/maker/model/resolve/v2/Q8/m-00001-of-00003.gguf?download=true", "maker/model:Q8/m", "v2"),
    ],
)
def test_an_address_is_an_id_and_a_revision(text: str, model_id: str, revision: str | None):
    assert read_hub_id(text) == (model_id, revision)


@pytest.mark.parametrize(
    "path", ["", "datasets/maker/data", "maker/model/blob/main/config.json", "maker/model/discussions/3"]
)
def test_addresses_of_something_else_are_refused(path: str):
    with pytest.raises(ValueError, match="is not the address of a model, or of a GGUF file; give OWNER/NAME"):
        read_hub_id(f"https://huggingface.co/{path}")


def test_every_setting_that_is_an_id_takes_an_address():
    page = "https://huggingface.co/maker/model"
    ids = ("tokenizer_name", "speculative_model", "embedding_model_id", "rerank_model_id")
    settings = check_settings(
        LauncherSettings,
        {"model_id": f"{page}/tree/v1", "lora_adapters": f"a={page}/tree/v2,{page}", **dict.fromkeys(ids, page)},
    )
    assert (settings.model_id, settings.revision) == ("maker/model", "v1")
    assert [getattr(settings, name) for name in ids] == ["maker/model"] * 4
    assert [str(each) for each in settings.lora_adapters] == ["a=maker/model@v2", "maker/model=maker/model"]


@pytest.mark.parametrize(
    "given",
    [
        {"model_id": "hf.co/maker/model/tree/v1", "revision": "v2"},
        {"speculative_model": "hf.co/maker/model/tree/v1"},
        {"lora_adapters": "a=hf.co/maker/model/blob/main/adapter.gguf"},
    ],
)
def test_what_an_address_says_is_not_dropped(given: dict[str, str]):
    with pytest.raises(InvalidSettings, match=r"revision|OWNER/NAME"):
        check_settings(LauncherSettings, given)
