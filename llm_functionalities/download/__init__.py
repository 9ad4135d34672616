"""Fetches models into the folder that the text-generation server loads them from, as `downloads.toml` says."""
