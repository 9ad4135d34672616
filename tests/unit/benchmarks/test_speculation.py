"""The count of tokens a step in the assistant's workflows."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import speculation as command


def test_prompts_are_those_of_the_workflows() -> None:
    asked = command.prompts(15)
    assert [len(prompts) for prompts in asked.values()] == [15, 15]
    assert all("### Response" in prompt for prompts in asked.values() for prompt in prompts)
    assert all("Replacement: " in prompt for prompt in asked["step rewriting"])


def test_steps_are_counted_with_drafts_and_without(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["speculation", "--requests", "1"])
    command.main()
    for result in json.loads(capsys.readouterr().out.splitlines()[-1]):
        before, after = result["before"], result["after"]
        assert before["tokens"] == before["steps"] == after["tokens"] >= after["steps"] > 0
        assert before["texts"] == after["texts"]


def test_chats_edit_functions_and_quote_paragraphs(tmp_path: Path) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer.json").write_text((command.demo_model.PATH / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    asked = command.chats(tmp_path, 5)
    assert [len(set(prompts)) for prompts in asked.values()] == [5, 5]
    assert all(prompt.startswith("[Add type hints") and "def " in prompt for prompt in asked["edits of code"])


def test_a_folder_without_a_model_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tokenizer.json").write_text((command.demo_model.PATH / "tokenizer.json").read_text())
    monkeypatch.setattr(sys, "argv", ["speculation", "--model", str(tmp_path), "--requests", "1"])
    with pytest.raises(SystemExit, match=r"has no config\.json"):
        command.main()
