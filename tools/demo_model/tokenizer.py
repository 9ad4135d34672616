"""The demo model's tokenizer: byte-level BPE, learned from the corpus."""

from collections.abc import Iterable
from itertools import islice

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo_model.corpus import Split, documents
from tools.demo_model.layout import BOS, SPECIAL_TOKENS

VOCABULARY = 3072
_DOCUMENTS = 20_000
# Words with the space before them, numbers digit by digit, runs of other signs, line breaks.
_WORDS = Regex(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")


def texts(seed: int) -> Iterable[str]:
    """What the merges are learned from: documents without their special tokens."""
    for document in islice(documents(seed, Split.TRAINING), _DOCUMENTS):
        for piece in document:
            text = piece.text
            for token in SPECIAL_TOKENS:
                text = text.replace(token, "")
            if text:
                yield text


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of `VOCABULARY` entries that puts the beginning-of-sequence token in front and knows every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer
