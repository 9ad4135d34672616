"""The table of several models: what it says, what is refused by name, and what fits into memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from shared.settings import read_settings
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.model_table import ModelEntry, read_models, within_memory
from tgi_server.launcher.settings import LauncherSettings

GIB = 1 << 30


def models(*flags: str) -> list[ModelEntry]:
    return read_models(read_settings(LauncherSettings, "launcher", flags))


def table(folder: Path, text: str, *flags: str) -> list[ModelEntry]:
    file = folder / "models.toml"
    file.write_text(text)
    return models(f"--models={file}", *flags)


def test_models_of_the_command_line() -> None:
    large, other = models("--models=large=maker/model,maker/other", "--quantize=int4", "--max-total-tokens=512")
    assert (large.label, large.settings.model_id, large.settings.served_model_name) == (
        *("large", "maker/model"),
        ["large"],
    )
    assert (other.label, other.settings.served_model_name) == ("maker/other", [])
    assert {each.settings.quantize for each in (large, other)} == {"int4"}
    assert large.settings.max_total_tokens == 512
    assert large.settings.models == []


def test_a_table_has_settings_of_each_model(tmp_path: Path) -> None:
    text = """
    [[model]]
    id = "https://huggingface.co/maker/model/tree/v2"
    name = "large"
    pinned = true
    max-total-tokens = 4096
    quantize = "int8"

    [[model]]
    id = "maker/small"
    served_model_name = ["small", "tiny"]
    idle-seconds = 60
    priority = 1
    cpu-memory = "1GiB"
    """
    large, small = table(tmp_path, text, "--quantize=int4", "--max-concurrent-requests=7")
    assert (large.label, large.pinned, large.idle_seconds, large.priority) == ("large", True, None, 0)
    assert (large.settings.model_id, large.settings.revision) == ("maker/model", "v2")
    assert (large.settings.max_total_tokens, large.settings.quantize) == (4096, "int8")
    assert (small.label, small.pinned, small.idle_seconds, small.priority) == ("small", False, 60, 1)
    assert (small.settings.quantize, small.settings.cpu_memory, small.settings.max_total_tokens) == ("int4", GIB, None)
    assert small.settings.max_concurrent_requests == 7


def test_embedding_and_rerank_models_are_models_of_the_table() -> None:
    _, embedder, ranker = models("--models=maker/model", "--embedding-model-id=maker/e", "--rerank-model-id=maker/r")
    assert (embedder.label, ranker.label) == ("maker/e", "maker/r")
    assert embedder.settings.embedding_model_id is None  # until its files say so


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--models=a=x,b=", "--models: 'b=' is not MODEL or NAME=MODEL"),
        ("--models=a=x,a=y", "--models: two models are called 'a'; name them: --models a=MODEL,b=MODEL"),
        ("--models=x,y.toml", "--models: y.toml is a table of models; it must be the only argument"),
        ("--models=x --model-id=y", "--model-id (or MODEL_ID) and --models are both set; leave one of them out"),
        ("--models=x --revision=main", "--revision (or REVISION) is a flag of one model, and --models names several"),
        ("--models=missing.toml", "missing.toml cannot be read as TOML: No such file or directory"),
    ],
)
def test_mistakes_on_the_command_line(flags: str, told: str) -> None:
    with pytest.raises(CannotStartError) as error:
        models(*flags.split())
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[model]\n", "cannot be read as TOML"),
        ("", "has no models; each begins with the line [[model]]"),
        ('[large]\nid = "x"', "`large` is unknown; each model begins with the line [[model]]"),
        ("[[model]]\npinned = true", "model 1: `id` is missing"),
        ('[[model]]\nid = "x"\npined = true', "model 1: `pined` is unknown; did you mean `pinned`?"),
        ('[[model]]\nid = "x"\nquantise = "int4"', "`quantise` is unknown; did you mean `quantize`?"),
        ('[[model]]\nid = "x"\nport = 1', "`port` is a setting of the whole server; give it as the flag --port"),
        ('[[model]]\nid = "x"\nquantize = "int3"', "model 1: --quantize (or QUANTIZE): must be one of"),
        ('[[model]]\nid = "x"\nmax-total-tokens = "many"', "--max-total-tokens (or MAX_TOTAL_TOKENS): Input should be"),
        ('[[model]]\nid = "x"\nidle-seconds = "often"', "`idle-seconds` is 'often'; it must be a number of seconds"),
        ('[[model]]\nid = "x"\nidle-seconds = 0', "`idle-seconds` is 0; it must be more than 0"),
        ('[[model]]\nid = "x"\npinned = "no"', "`pinned` is 'no'; it must be true or false"),
        ('[[model]]\nid = "x"\nname = 3', "`name` is 3, which is not a name"),
    ],
)
def test_mistakes_in_the_table(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(CannotStartError) as error:
        table(tmp_path, text)
    assert told in str(error.value)


def test_memory_for_models_needs_models() -> None:
    with pytest.raises(SystemExit):
        models("--models-memory=1GiB")


def test_kv_caches_share_a_part_of_the_memory() -> None:
    first, second = (replace(each, weight_bytes=GIB) for each in models("--models=a=x,b=y"))
    sized, most = within_memory([first, second], 10 * GIB)
    assert most == 10 * GIB
    assert [each.settings.cpu_memory for each in sized] == [int(1.5 * GIB)] * 2
    assert sized[0].bytes == int(2.5 * GIB)


def test_by_default_models_leave_memory_for_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_server.launcher.model_table.available_ram", lambda: 10 * GIB)
    entries = [replace(each, weight_bytes=GIB) for each in models("--models=a=x,b=y")]
    assert within_memory(entries, None)[1] == int(0.8 * 8.5 * GIB)


def test_a_model_that_cannot_fit_is_refused() -> None:
    first, second = (replace(each, weight_bytes=GIB) for each in models("--models=a=x,b=y"))
    with pytest.raises(CannotStartError, match=r"^a needs 1.15 GiB .+, and the limit of all models is 1.00 GiB"):
        within_memory([first, second], GIB)
    with pytest.raises(CannotStartError, match=r"^b needs 1.30 GiB .+ beside 1.30 GiB of pinned models"):
        within_memory([replace(first, pinned=True), second], 2 * GIB)
