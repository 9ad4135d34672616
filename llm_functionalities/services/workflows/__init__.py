"""The assistant's workflows: each a prompt, a parser for what the model makes of it, and a gRPC service."""
