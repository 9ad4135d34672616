"""Makes the bundled demo model: corpus, tokenizer, training and evaluation. See docs/demo-model.md."""
