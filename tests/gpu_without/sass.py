"""The machine code of a compiled kernel, read for what it costs: its loops, loads that are waited for, blocks."""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SCHEDULERS = 4  # of a multiprocessor; each issues one instruction of a warp in a cycle


@dataclass(frozen=True, slots=True)
class Device:
    """shared: bytes of a multiprocessor. threads: most of one. bandwidth: bytes of device memory that it gets a cycle.
    products: multiplications and additions in 16 bits that its tensor cores do in a cycle, each counted.
    """

    shared: int
    threads: int
    bandwidth: float
    products: int


# A100 (1,555 GB/s, 108 multiprocessors, 1.41 GHz), H100 (3,350, 132, 1.755), RTX 5090 (1,792, 170, 2.41).
DEVICES = {
    80: Device(164 << 10, 2048, 10.2, 2048),
    90: Device(228 << 10, 2048, 14.5, 4096),
    120: Device(100 << 10, 1536, 4.4, 1024),
}


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    name: str
    operands: str

    def starts(self, *names: str) -> bool:
        return self.name.startswith(names)


@dataclass(frozen=True, slots=True)
class Code:
    """instructions: in order. loops: those of each innermost loop. registers: of a thread."""

    instructions: list[Instruction]
    loops: list[list[Instruction]]
    registers: int
    program: Any

    @classmethod
    def of(cls, program: Any, folder: Path) -> "Code":
        binary = folder / "kernel.cubin"
        binary.write_bytes(program.asm["cubin"])
        text, usage = (
            subprocess.run([CUOBJDUMP, option, binary], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
        found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)([^;/&?]*)", text, re.MULTILINE)
        instructions = [Instruction(int(address, 16), name, rest) for address, name, rest in found]
        registers = int(re.findall(r"REG:(\d+)", usage)[-1])
        return cls(instructions, _loops(instructions), registers, program)

    def loop(self, *names: str) -> list[Instruction]:
        """Returns the first of the innermost loops with instructions that start with all these names."""
        return next(loop for loop in self.loops if all(any(each.starts(name) for each in loop) for name in names))

    def cycles(self, loop: Iterable[Instruction]) -> float:
        """Returns the cycles that a block needs to issue a turn of a loop, alone on its multiprocessor."""
        return len(list(loop)) * self.program.metadata.num_warps / SCHEDULERS

    def blocks(self, capability: int) -> int:
        """Returns how many blocks a multiprocessor has at once."""
        device, threads = DEVICES[capability], 32 * self.program.metadata.num_warps
        by_registers = 65536 // (-(-self.registers // 8) * 8 * threads)
        by_shared = device.shared // (self.program.metadata.shared + 1024)
        return min(by_registers, by_shared, device.threads // threads)

    def buffers(self, dtype: str) -> int:
        """Returns the fewest buffers of the tiles of a type that are copied to shared memory ahead of their use."""
        shapes = re.findall(
            r"local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<([\dx]+)x(\w+)", str(self.program.asm["ttgir"])
        )
        return min(int(shape.split("x")[0]) for shape, kind in shapes if kind == dtype)


def waited_for(loop: list[Instruction]) -> list[Instruction]:
    """Returns the loads to registers whose numbers are used soon after them: within half an iteration of the loop."""
    return [
        each
        for index, each in enumerate(loop)
        if each.starts("LDG.") and _used(each, loop[index + 1 : index + 1 + len(loop) // 2])
    ]


def spilled(loop: Iterable[Instruction]) -> bool:
    return any(each.starts("LDL", "STL") for each in loop)


def _loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    index = {each.address: number for number, each in enumerate(instructions)}
    ranges = []
    for number, each in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)", each.operands) if each.starts("BRA") else None
        if target and int(target[1], 16) < each.address and int(target[1], 16) in index:
            ranges.append((index[int(target[1], 16)], number))
    innermost = [
        own for own in ranges if not any(own != other and own[0] <= other[0] and other[1] <= own[1] for other in ranges)
    ]
    return [instructions[first : last + 1] for first, last in sorted(innermost)]


def _used(load: Instruction, behind: Iterable[Instruction]) -> bool:
    """Returns True if an instruction reads a register of the load before another writes it."""
    registers = re.findall(r"\bR\d+", load.operands)
    if not registers:
        return False
    first, width = int(registers[0][1:]), {"128": 4, "64": 2}.get(load.name.rsplit(".", 1)[-1], 1)
    own = {f"R{number}" for number in range(first, first + width)}
    for each in behind:
        named = re.findall(r"\bR\d+", each.operands)
        stores = each.starts("ST", "RED", "LDGSTS", "BRA", "BAR")
        if own & set(named if stores else named[1:]):
            return True
        if named and not stores:
            own.discard(named[0])
    return False
