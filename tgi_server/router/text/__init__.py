"""From text to tokens and back: what a request says, checked and tokenized, and what the model answers."""
