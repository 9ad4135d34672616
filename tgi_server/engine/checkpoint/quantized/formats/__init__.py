"""Readers of quantised checkpoints, one file for each format.

`sources(files, ...)` of each returns the quantised weights that it finds in a checkpoint. files: what `get_slice` of
the open safetensors files returns, by the name of the tensor.
"""
