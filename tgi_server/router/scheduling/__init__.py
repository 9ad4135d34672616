"""Scheduling: the requests that run, their KV blocks, and the calls to the shards."""
