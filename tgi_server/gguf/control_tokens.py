"""Control tokens of GGUF files by their texts: files give some of them the type of ordinary text."""

import re

# Tokens that end a reply even if the metadata do not say so: those of llama.cpp, and Command R's.
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<eos>", "</s>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
}
# Tokens after which a fill-in-the-middle model would continue with another file.
_FILE_ENDS = {
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
}
_FILE_PARTS = {
    *(f"<{name}>" for name in ("fim-prefix", "fim-suffix", "fim-middle", "fim_prefix", "fim_suffix", "fim_middle")),
    *(f"{space}<{name}>" for space in ("", "\u2581") for name in ("PRE", "SUF", "MID")),
}
END_OF_GENERATION = frozenset(_ENDS | _FILE_ENDS)
# Tags of HTML are text, unless the file says that they are control tokens.
_MARKS = (END_OF_GENERATION | _FILE_PARTS | {"<start_of_turn>"}) - {"</s>"}
_BARS = re.compile("<[|\uff5c][^<>|\uff5c\\s]+[|\uff5c]?>|<[^<>|\uff5c\\s]+[|\uff5c]>")
# Tokens that do not end replies of some models, although they end those of others; by tokens that identify the models.
_CONTINUED = (
    ({"<|return|>", "<|call|>"}, {"<|end|>", "<|endoftext|>"}),  # gpt-oss
    ({"<|calls|>", "<|flush|>"}, {"<|end|>"}),  # Solar Open
    ({"<|tool_response>"}, {"</s>"}),  # Gemma 4, where it is a tag of HTML
)


def looks_like_control(text: str, *, added: bool) -> bool:
    """Returns True for the text of a control token. added: it is one of the texts that were added to a vocabulary."""
    if added:  # such as `<|tool_call>`, which clients are to see
        return text in END_OF_GENERATION & _MARKS
    return text in _MARKS or (text.startswith("<") and _BARS.fullmatch(text) is not None)


def ends_of_generation(texts: set[str]) -> set[str]:
    """Returns the control tokens of a model that end a reply."""
    found = texts & END_OF_GENERATION
    for signs, continued in _CONTINUED:
        if signs <= texts:
            found -= continued
    return found
