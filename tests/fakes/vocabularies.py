"""Tokenizers of the two families that detokenise differently, small enough to be looked through."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tgi_server.router.text.tokenizer import TextTokenizer
from tgi_server.router.text.tokenizer_config import TokenizerConfig

BOS, EOS = "<s>", "</s>"
CONFIG = TokenizerConfig({"bos_token": BOS, "eos_token": EOS})


def byte_level() -> TextTokenizer:
    """One token for each byte, and a few words; like GPT-2's and Llama 3's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [BOS, EOS, *alphabet, "he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld", "Ġworld"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or")]
    merges += [("l", "d"), ("Ġwor", "ld")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer, CONFIG)


def sentence_piece() -> TextTokenizer:
    """Words begin with a mark for the space; unknown characters are spelled in bytes; like Llama 2's."""
    pieces = [BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", *"abcdehlorw"]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token=None)
    )
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return TextTokenizer(tokenizer, CONFIG)
