"""Which requests run, on which KV blocks, and what the shards are told; nothing here does I/O."""
