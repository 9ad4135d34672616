"""The assistant's workflows. Each has a prompt, a parser for the model's answers and a gRPC service."""
