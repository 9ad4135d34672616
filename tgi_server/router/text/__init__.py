"""From text to tokens and back: what a request says, checked and tokenised, and what the model answers."""
