from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks.synthetic import SyntheticModel, write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model of a shape that takes no time."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(SyntheticModel(config, ("<unk>", "<s>", "</s>")), folder)
    return folder
