"""Compiles the kernels ahead of time."""

import argparse
import logging
import os
import sys

from tgi_server.engine.kernels.build import NATIVE, TARGETS, prepare


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tgi_server.engine.kernels", description=__doc__)
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help=f"kinds of CPUs: {', '.join(TARGETS)}; all: all of these; {NATIVE}: this machine, the default",
    )
    parser.add_argument("--low-priority", action="store_true", help="leave the CPU to other processes that want it")
    options = parser.parse_args()
    targets = options.targets or [NATIVE]
    if targets == ["all"]:
        targets = list(TARGETS)
    if unknown := [target for target in targets if target not in (NATIVE, *TARGETS)]:
        parser.error(f"no such target: {', '.join(unknown)}")
    if options.low_priority:
        os.nice(19)
    logging.basicConfig(level="INFO", format="%(message)s")
    sys.exit(0 if prepare(targets) else 1)


if __name__ == "__main__":
    main()
