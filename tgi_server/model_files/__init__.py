"""A model's files on disk, before any process serves them: fetching, converting, merging adapters, quantizing."""
