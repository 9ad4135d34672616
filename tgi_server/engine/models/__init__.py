"""Ways to run a `transformers` model on batches that change at every step."""
