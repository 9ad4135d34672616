"""GGUF, the files of llama.cpp and Ollama: metadata, tokenizer and where the tensors lie; without torch."""
