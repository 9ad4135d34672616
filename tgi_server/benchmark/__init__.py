"""`text-generation-benchmark`: how fast the shards of a model compute, without router and HTTP. No torch."""
