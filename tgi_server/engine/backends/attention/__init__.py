"""Attention over the paged KV cache: one interface, one file per implementation."""
