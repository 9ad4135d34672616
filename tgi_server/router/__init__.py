"""HTTP API, validation, tokenising, queue, scheduling and KV-block bookkeeping. No torch."""
