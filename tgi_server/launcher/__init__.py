"""Starts shards and router, watches over them, and stops them in order. No torch, no HTTP."""
