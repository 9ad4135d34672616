"""Writes KV blocks and snapshots of states into files, and reads them back, beside the steps of a model."""

import hashlib
import os
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.model_digest import model_digests
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.load_parts import LoadedModel
from tgi_server.engine.memory import HOST
from tgi_server.engine.runners.base import Runner
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.prefix_files import DIGEST_BYTES, Header, UnusableFile, file_of

# Pieces of memory that the system reads or writes in one call (IOV_MAX of Linux).
_MOST_PIECES = 1024


class TensorFiles:
    """Stores rows of tensors in files. Entry `i` of a file contains the i-th of the stored rows, from all tensors.

    While rows are stored or loaded nothing else may use them; other rows may be in use.
    """

    def __init__(self, tensors: Sequence[Tensor], facts: object = ()) -> None:
        """tensors: [rows, ...] each, in host memory, contiguous. facts: everything that the contents depend on."""
        tensors = [tensor for tensor in tensors if tensor[:1].numel()]
        shapes = [(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors]
        self.layout = hashlib.blake2b(repr((facts, shapes)).encode(), digest_size=DIGEST_BYTES).digest()
        self._rows = [(tensor[0].nbytes, _bytes_of(tensor)) for tensor in tensors]
        self.entry_bytes = sum(size for size, _ in self._rows)

    def store(self, path: Path, before: bytes, digests: Sequence[bytes], rows: Sequence[int]) -> int:
        """Writes rows into a new file, which gets its name once it is complete. Returns its size. Raises OSError.

        before, digests: see `Header`. Only the user of this process can read the file.
        """
        checksums = tuple(map(self._checksum, rows))
        header = Header(self.layout, before, tuple(digests), self.entry_bytes, checksums)
        descriptor, unfinished = tempfile.mkstemp(suffix=".unfinished", prefix="", dir=path.parent)
        try:
            try:
                _write(descriptor, [memoryview(header.packed())])
                for row in rows:
                    _write(descriptor, self._pieces(row))
            finally:
                os.close(descriptor)
            os.replace(unfinished, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(unfinished)
            raise
        return header.file_bytes

    def load(self, path: Path, first: int, digests: Sequence[bytes], rows: Sequence[int]) -> int:
        """Reads the entries from number `first` on into rows. Returns their bytes.

        Raises OSError, and UnusableFile if the file is damaged or its entries have other digests. The contents of the
        rows are undefined after an error.
        """
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            header = Header.read(file)
            if header.layout != self.layout or header.entry_bytes != self.entry_bytes:
                raise UnusableFile("another model, or another version, has written it")
            if header.digests[first : first + len(rows)] != tuple(digests):
                raise UnusableFile("it has another text")
            for entry, row in enumerate(rows, start=first):
                _read(file, self._pieces(row), header.offset(entry))
                if self._checksum(row) != header.checksums[entry]:
                    raise UnusableFile("its checksums are wrong")
        finally:
            os.close(file)
        return len(rows) * self.entry_bytes

    def _pieces(self, row: int) -> list[memoryview]:
        return [memory[row * size : (row + 1) * size] for size, memory in self._rows]

    def _checksum(self, row: int) -> int:
        checksum = 0
        for piece in self._pieces(row):
            checksum = zlib.crc32(piece, checksum)
        return checksum


class PrefixStore:
    """Files with KV blocks of the running model, and files with snapshots of its states.

    blocks: files whose rows are KV blocks. snapshots: files whose rows are slots; None: sequences have no states.
    """

    def __init__(self, runner: Runner, info: LoadedModel) -> None:
        """runner: a warmed-up runner. Raises InvalidCall for a model whose prefixes cannot be stored in files."""
        if not isinstance(runner, PagedRunner):
            raise InvalidCall(f"{info.model_type} models run in padded batches, of which nothing is cached")
        if runner.model.attention.device != HOST:
            raise InvalidCall("prefixes are stored on disk by models on CPUs only")
        if runner.companion_bytes:
            raise InvalidCall("prefixes are not stored on disk beside a draft model with keys and values of its own")
        computed_by = info.dtype, info.kv_cache_dtype, info.linear_kernels, info.forward_pass
        facts = model_digests(runner.backend.config), computed_by
        group = runner.backend.group
        self._rank = 0 if group is None else group.rank
        self._runner = runner
        self.blocks = TensorFiles(runner.model.attention.block_tensors(), facts)
        self.snapshots = TensorFiles(runner.states.slot_tensors(), facts) if runner.states is not None else None

    def store(self, path: Path, before: bytes, digests: Sequence[bytes], blocks: Sequence[int], snapshot: int) -> int:
        """Writes blocks, or a snapshot if that is not 0, into a file. Returns its bytes.

        path: the file; the rank is added to its name. Raises OSError, and InvalidCall for blocks that do not exist.
        """
        files, rows = self._rows(blocks, snapshot)
        return files.store(file_of(path, self._rank), before, digests, rows)

    def load(self, path: Path, first: int, digests: Sequence[bytes], blocks: Sequence[int], snapshot: int) -> int:
        """Reads blocks, or a snapshot if that is not 0, from a file. Returns their bytes.

        Raises UnusableFile, OSError, and InvalidCall for blocks that do not exist.
        """
        files, rows = self._rows(blocks, snapshot)
        return files.load(file_of(path, self._rank), first, digests, rows)

    def _rows(self, blocks: Sequence[int], snapshot: int) -> tuple[TensorFiles, Sequence[int]]:
        if snapshot:
            if self.snapshots is None or self._runner.states is None:
                raise InvalidCall("the model has no states beside keys and values")
            return self.snapshots, [self._runner.states.slot_of(snapshot)]
        self._runner.check_blocks(blocks)
        return self.blocks, blocks


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns a view of a contiguous tensor's bytes, which keeps the tensor alive."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _write(file: int, pieces: Sequence[memoryview]) -> None:
    pending = list(pieces)
    while pending:
        written = os.writev(file, pending[:_MOST_PIECES])
        pending = _rest(pending, written)


def _read(file: int, pieces: Sequence[memoryview], offset: int) -> None:
    pending = list(pieces)
    while pending:
        read = os.preadv(file, pending[:_MOST_PIECES], offset)
        if not read:
            raise UnusableFile("it ends early")
        offset += read
        pending = _rest(pending, read)


def _rest(pieces: list[memoryview], done: int) -> list[memoryview]:
    """Returns the pieces after the first `done` bytes."""
    for number, piece in enumerate(pieces):
        if done < len(piece):
            return [piece[done:], *pieces[number + 1 :]]
        done -= len(piece)
    return []
