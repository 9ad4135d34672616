"""HTTP API, validation, tokenizing, queue, scheduling and KV-block bookkeeping. No torch."""
