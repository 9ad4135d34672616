"""The gRPC service that an assistant's other services call to reach a language model."""
