"""Text to tokens and back: requests are checked and tokenized, answers are detokenized."""
