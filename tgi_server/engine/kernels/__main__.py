"""Compiles the kernels ahead of time."""

import logging
import sys

from tgi_server.engine.kernels import load_kernels

if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(message)s")
    sys.exit(0 if load_kernels() else 1)
