"""The synthetic model that reads images: its shape, its special tokens, and the files of its processor."""

from typing import Any

from transformers import Idefics3Config

SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
# The shape of SmolVLM-500M: a SigLIP tower of 93M parameters, and a Llama of 360M.
SMOLVLM_500M = Idefics3Config(
    image_token_id=SPECIAL_TOKENS.index("<image>"),
    scale_factor=4,
    tie_word_embeddings=True,
    pad_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
    vision_config={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
    text_config={
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 960,
        "num_hidden_layers": 32,
        "intermediate_size": 2560,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "pad_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
# Images are scaled to 1024 pixels instead of 2048: five tiles of 64 tokens rather than up to 17, so that a measurement
# on two cores takes minutes. Each tile has 1024 patches, as there.
PROCESSOR: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": 512},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 1024},
    },
    "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 64},
}
