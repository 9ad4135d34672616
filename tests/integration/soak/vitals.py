"""The resources that a service holds: processes, their file descriptors, threads and memory."""

from dataclasses import dataclass

import psutil

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Vitals:
    """One process."""

    descriptors: int
    threads: int
    resident: int  # MiB

    @staticmethod
    def of(process: psutil.Process) -> "Vitals":
        return Vitals(process.num_fds(), process.num_threads(), process.memory_info().rss // MEBIBYTE)


def vitals(roots: dict[str, psutil.Process]) -> dict[str, Vitals]:
    """Returns the resources of each process by its name, and of its children's children by what they run."""
    found: dict[str, Vitals] = {}
    for name, root in roots.items():
        found[name] = Vitals.of(root)
        for number, child in enumerate(sorted(root.children(recursive=True), key=lambda each: each.pid)):
            if child.pid not in [each.pid for each in roots.values()]:
                found[f"{name}'s {_role(child)} {number}"] = Vitals.of(child)
    return found


def _role(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[command.index("-m") + 1].split(".")[-1] if "-m" in command else process.name()


def table(before: dict[str, Vitals], after: dict[str, Vitals]) -> str:
    lines = ["| process | file descriptors | threads | memory, MiB |", "|---|--:|--:|--:|"]
    for name in sorted(before | after):
        a, b = before.get(name), after.get(name)
        pairs = [f"{getattr(a, key, '-')} -> {getattr(b, key, '-')}" for key in ("descriptors", "threads", "resident")]
        lines.append(f"| {name} | {' | '.join(pairs)} |")
    return "\n".join(lines)
