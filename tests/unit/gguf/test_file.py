"""GGUF files are read, and what is damaged or missing is reported in one line."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from tgi_server.gguf.architectures import config_of
from tgi_server.gguf.file import read_gguf
from tgi_server.gguf.paths import GgufError

ROWS = np.arange(64, dtype=np.float32).reshape(2, 32)


def write(file: Path, architecture: str = "llama", **tensors: np.ndarray) -> Path:
    writer = GGUFWriter(file, architecture)
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b\u00e9", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", one=ROWS, two=ROWS[0].astype(np.float16))
    found = read_gguf(file)
    assert found.architecture == "llama"
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "b\u00e9", ""]
    assert found.metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert [(each.kind.name, each.shape) for each in found.tensors.values()] == [("F32", (2, 32)), ("F16", (32,))]
    np.testing.assert_array_equal(found.tensors["one"].raw.view(np.float32), ROWS)
    assert read_gguf(file, texts=False).metadata["tokenizer.ggml.tokens"] == []


def test_parts_are_one_model(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"model-0000{number}-of-00002.gguf", **{f"tensor {number}": ROWS * number})
    for number in (1, 2):
        found = read_gguf(tmp_path / f"model-0000{number}-of-00002.gguf")
        assert sorted(found.tensors) == ["tensor 1", "tensor 2"]
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(GgufError, match=r"there is no file .*model-00002-of-00002\.gguf; download all parts"):
        read_gguf(tmp_path / "model-00001-of-00002.gguf")


def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", tensor=ROWS).read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (*range(0, len(whole) - ROWS.nbytes, 7), len(whole) - ROWS.nbytes, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(GgufError, match=r"cut\.gguf (cannot be read|is not a GGUF|is incomplete)") as error:
            read_gguf(file)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"GGML", "is not a GGUF file: it begins with b'GGML'"),
        (4, b"\0\0\0\x03", "is big-endian"),
        (4, b"\x01\0\0\0", "has version 1 of the format"),
        (8, b"\xff" * 8, "its header ends"),
        (16, b"\xff" * 8, "its header ends"),
        (24, b"\xff" * 8, "its header ends"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, place: int, value: bytes, message: str) -> None:
    content = bytearray(write(tmp_path / "model.gguf", tensor=ROWS).read_bytes())
    content[place : place + len(value)] = value
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(GgufError, match=message):
        read_gguf(tmp_path / "model.gguf")


def test_damaged_bytes_of_the_header_never_raise_anything_else(tmp_path: Path) -> None:
    content = write(tmp_path / "model.gguf", tensor=ROWS).read_bytes()
    file = tmp_path / "damaged.gguf"
    for place in range(0, len(content) - ROWS.nbytes, 17):
        for value in (0, 0x7F, 0xFF):
            file.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            with suppress(GgufError):
                read_gguf(file)


def test_an_architecture_that_is_not_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"general\.architecture is 'rwkv6', which is not served .*gemma3, .*qwen3moe"):
        config_of(read_gguf(write(tmp_path / "model.gguf", "rwkv6", tensor=ROWS)))
