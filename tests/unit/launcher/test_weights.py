"""The model's folder, where it lies on this machine; downloads are tested in tests/integration/shard."""

import json
import pwd
import shutil
from pathlib import Path

import pytest

from shared.settings import read_settings
from tests.gguf_models import make_gguf
from tests.hub import COMMIT, Repository, running_hub
from tests.tiny_models import make_llama
from tgi_server import demo_model
from tgi_server.launcher import commands
from tgi_server.launcher.errors import CannotStartError, ModelMissingError
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.launcher.weights import check_tokenizer, fetch_further_models, find_adapters, find_model, recognized
from tgi_server.model_files.gguf_models import described


def settings(model_id: object) -> LauncherSettings:
    return read_settings(LauncherSettings, "launcher", [f"--model-id={model_id}"])


async def test_a_folder_with_weights_is_the_model() -> None:
    assert await find_model(settings(demo_model.PATH)) == demo_model.PATH


@pytest.mark.slow
async def test_a_folder_of_medusa_heads_stands_for_the_model_that_they_were_made_for(tmp_path: Path) -> None:
    heads = {"medusa_num_heads": 2, "base_model_name_or_path": str(demo_model.PATH)}
    (tmp_path / "config.json").write_text(json.dumps(heads))
    (tmp_path / "medusa_lm_head.safetensors").touch()
    assert await find_model(settings(tmp_path)) == demo_model.PATH


async def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(CannotStartError, match="this user has no home, which downloads need; set HF_HOME"):
        await find_model(settings("maker/model"))


async def test_a_model_that_drafts_has_to_be_there(tmp_path: Path) -> None:
    missing = read_settings(LauncherSettings, "launcher", [f"--speculative-model={tmp_path / 'absent'}"])
    with pytest.raises(ModelMissingError):
        await fetch_further_models(missing)
    await fetch_further_models(settings(demo_model.PATH))


@pytest.mark.parametrize(
    ("kind", "architecture", "modules", "setting"),
    [
        ("bert", "BertModel", False, "embedding_model_id"),
        ("xlm-roberta", "XLMRobertaForMaskedLM", False, "embedding_model_id"),
        ("mpnet", None, True, "embedding_model_id"),
        ("qwen3", "Qwen3ForCausalLM", True, "embedding_model_id"),
        ("bert", "BertForSequenceClassification", True, "rerank_model_id"),
        ("modernbert", "ModernBertForSequenceClassification", False, "rerank_model_id"),
        ("bert", "BertLMHeadModel", False, None),
        ("roberta", "RobertaForCausalLM", False, None),
        ("electra", None, False, "embedding_model_id"),
        ("gpt2", "GPT2LMHeadModel", False, None),
        ("bloom", "BloomModel", False, None),
        ("qwen3", "Qwen3ForCausalLM", False, None),
    ],
)
def test_models_that_embed_or_rank_are_recognized(
    kind: str, architecture: str | None, modules: bool, setting: str | None, tmp_path: Path
) -> None:
    config = {"model_type": kind} | ({"architectures": [architecture]} if architecture else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if modules:
        (tmp_path / "modules.json").write_text("[]")
    found = recognized(settings(tmp_path), tmp_path)
    assert found.generates == (setting is None)
    if setting is not None:
        assert getattr(found, setting) == str(tmp_path)
        other = settings(tmp_path).model_copy(update={setting: "another"})
        with pytest.raises(CannotStartError, match="names another one, another"):
            recognized(other, tmp_path)


async def test_a_folder_that_is_not_there_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(CannotStartError, match=f"^there is no model folder {tmp_path / 'absent'}$"):
        await find_model(settings(tmp_path / "absent"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model.PATH, folder)
    check_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CannotStartError, match=r"has neither a tokenizer\.json"):
        check_tokenizer(folder)


async def test_adapters_are_found_in_their_folders(tmp_path: Path) -> None:
    (tmp_path / "chef").mkdir()
    (tmp_path / "chef" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    asked = [f"chef={tmp_path}/chef", f"{tmp_path}/empty"]
    found = await find_adapters(read_settings(LauncherSettings, "launcher", [f"--lora-adapters={asked[0]}"]))
    assert [(each.id, each.path) for each in found] == [("chef", tmp_path / "chef")]
    with pytest.raises(CannotStartError, match=r".*/empty: .*/empty has neither an adapter_config.json nor a GGUF"):
        await find_adapters(read_settings(LauncherSettings, "launcher", [f"--lora-adapters={','.join(asked)}"]))
    with pytest.raises(CannotStartError, match=r"--lora-adapters: x: there is no folder .*/absent"):
        await find_adapters(read_settings(LauncherSettings, "launcher", [f"--lora-adapters=x={tmp_path}/absent"]))


async def test_adapters_are_found_in_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "chef.gguf").touch()
    for place in ("chef.gguf", "."):
        flags = [f"--lora-adapters=chef={tmp_path}/{place}"]
        (found,) = await find_adapters(read_settings(LauncherSettings, "launcher", flags))
        assert found.path == tmp_path / "chef.gguf"
    (tmp_path / "poet.gguf").touch()
    with pytest.raises(CannotStartError, match=r"chef: .* has several GGUF files; name one of them: chef.gguf, poet.g"):
        await find_adapters(read_settings(LauncherSettings, "launcher", flags))
    with pytest.raises(CannotStartError, match=r"--lora-adapters: x: there is no file .*absent\.gguf"):
        await find_adapters(read_settings(LauncherSettings, "launcher", ["--lora-adapters=x=absent.gguf"]))


@pytest.mark.slow
async def test_the_folder_of_an_adapter_is_not_ready_to_be_served(tmp_path: Path) -> None:
    """Its base model has to be found first, and the adapter merged, which this one does not say enough for."""
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelMissingError):
        await find_model(settings(tmp_path))


@pytest.mark.slow
async def test_adapters_of_the_hub_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    with running_hub() as hub:
        hub.models["maker/chef"] = Repository(files, revisions=("v2", COMMIT))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        flags = ["--lora-adapters=chef=maker/chef@v2", f"--huggingface-hub-cache={tmp_path}"]
        (found,) = await find_adapters(read_settings(LauncherSettings, "launcher", flags))
        assert found.path is not None
        assert {file.name: file.read_bytes() for file in found.path.iterdir()} == files
        with pytest.raises(ModelMissingError):
            await find_adapters(read_settings(LauncherSettings, "launcher", ["--lora-adapters=maker/absent"]))


async def test_a_gguf_file_that_is_not_there_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(CannotStartError, match=r"there is no file .*model-Q4_K_M\.gguf"):
        await find_model(settings(tmp_path / "model-Q4_K_M.gguf"))


async def test_a_gguf_file_that_was_described_before_needs_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    file = make_gguf(make_llama(tmp_path / "llama"), tmp_path)[0]
    folder = described(file)
    monkeypatch.setattr(commands, "download", None)
    assert await find_model(settings(file)) == folder
    with pytest.raises(TypeError):  # a process is started for another cache
        await find_model(settings(file).model_copy(update={"huggingface_hub_cache": tmp_path}))
    (tmp_path / "tokenizer.json").write_text("{}")  # which would be used in place of the file's
    with pytest.raises(TypeError):
        await find_model(settings(file))
