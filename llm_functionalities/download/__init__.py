"""Downloads models to the folder from which the text-generation server loads them, as `downloads.toml` says."""
