"""GGUF files are read, and what is damaged or missing is reported in one line."""

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from tests.gguf_models import finish, make_gguf
from tests.tiny_models import make
from tgi_server.gguf.architectures import config_of
from tgi_server.gguf.file import read_gguf
from tgi_server.gguf.paths import GgufError
from tgi_server.gguf.tokenizer import Vocabulary, tokenizer_config, tokenizer_json

ROWS = np.arange(64, dtype=np.float32).reshape(2, 32)


def write(file: Path, architecture: str = "llama", split: tuple[int, int] | None = None, **tensors: np.ndarray) -> Path:
    """split: the number of the part, from 0, and how many there are."""
    writer = GGUFWriter(file, architecture)
    writer.add_uint32("llama.block_count", 2)
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b\u00e9", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
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


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_under_another_name_is_told(tmp_path: Path, number: int) -> None:
    file = write(tmp_path / "model.gguf", split=(number, 2), tensor=ROWS)
    with pytest.raises(GgufError, match=rf"model\.gguf is part {number + 1} of 2 of a model; .*-00001-of-00002\.gguf"):
        read_gguf(file)


def test_parts_in_another_order_are_told(tmp_path: Path) -> None:
    for number in (1, 2):
        file = tmp_path / f"model-0000{number}-of-00002.gguf"
        write(file, split=(2 - number, 2), **{f"tensor {number}": ROWS})
    with pytest.raises(GgufError, match=r"model-00001-of-00002\.gguf is part 2 of 2 of a model"):
        read_gguf(tmp_path / "model-00001-of-00002.gguf")


@pytest.mark.parametrize("name", ["model-00000-of-00000", "model-00000-of-00002", "model-00003-of-00002"])
def test_parts_with_an_impossible_number_are_told(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / f"{name}.gguf", tensor=ROWS)
    with pytest.raises(GgufError, match=rf"{name}\.gguf has a name that no part of a model has"):
        read_gguf(file)


@pytest.mark.parametrize("kind", [np.uint8, np.float32, str])
def test_arrays_that_would_take_much_memory_are_refused(tmp_path: Path, kind: type) -> None:
    count = (1 << 22) + 1
    values = np.zeros(count, kind).tobytes() if kind is not str else bytes(8) * count
    number = {np.uint8: 0, np.float32: 6, str: 8}[kind]
    name = b"big"
    pair = len(name).to_bytes(8, "little") + name + struct.pack("<IIQ", 9, number, count) + values
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    with pytest.raises(GgufError, match=r"big has 4,194,305 values; at most 4,194,304 of all lists together are read"):
        read_gguf(file)


@pytest.mark.parametrize(("tensors", "pairs", "what"), [(131_073, 0, "tensors"), (0, 131_073, "metadata")])
def test_headers_with_too_many_entries_are_refused(tmp_path: Path, tensors: int, pairs: int, what: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + bytes(24 * 131_073))
    with pytest.raises(GgufError, match=rf"model\.gguf has 131,073 {what}; at most 131,072 are read"):
        read_gguf(file)


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


NAN = float("nan")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__block_count": NAN}, r"llama\.block_count is nan; a number is needed"),
        ({"llama__block_count": 2.5}, r"llama\.block_count is 2\.5; a whole number"),
        ({"llama__block_count": 4_000_000_000}, r"llama\.block_count is 4000000000; a whole number"),
        ({"llama__block_count": 0}, r"llama\.block_count is 0; a whole number"),
        ({"llama__block_count": "2"}, r"llama\.block_count is '2'; a number is needed"),
        ({"llama__attention__head_count": NAN}, r"llama\.attention\.head_count is nan; a number is needed"),
        ({"llama__rope__freq_base": float("inf")}, r"llama\.rope\.freq_base is inf; a number is needed"),
        ({"llama__attention__head_count_kv": [NAN, NAN]}, r"llama\.attention\.head_count_kv is \[nan, nan\]; numbers"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": "2"}, r"factor is '2'; a number"),
        ({"llama__rope__dimension_count": 8}, r"rope\.dimension_count is 8, and a head has 16 .* not served"),
        ({"llama__expert_count": 4, "llama__expert_used_count": None}, r"llama\.expert_used_count is None; a number"),
    ],
)
def test_metadata_that_make_no_model_are_told(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    file, _ = make_gguf(make("llama", tmp_path / "llama"), tmp_path, **metadata)
    with pytest.raises(GgufError, match=message) as error:
        config_of(read_gguf(file))
    assert "\n" not in str(error.value)


def test_damaged_metadata_never_raise_anything_else(tmp_path: Path) -> None:
    content = make_gguf(make("llama", tmp_path / "llama"), tmp_path)[0].read_bytes()
    file = tmp_path / "damaged.gguf"
    for place in range(24, 1_200, 7):
        for value in (b"\0", b"\x06", b"\xff"):
            file.write_bytes(content[:place] + value + content[place + 1 :])
            with suppress(GgufError):
                found = read_gguf(file)
                config_of(found)
                tokenizer_json(Vocabulary(found))
                tokenizer_config(Vocabulary(found))


def test_rotation_of_whole_heads_may_be_spelled_out(tmp_path: Path) -> None:
    file, _ = make_gguf(make("llama", tmp_path / "llama"), tmp_path, llama__rope__dimension_count=16)
    assert config_of(read_gguf(file))["head_dim"] == 16


def test_special_tokens_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    file, _ = make_gguf(make("llama", tmp_path / "llama"), tmp_path, tokenizer__ggml__padding_token_id=1_000_000)
    assert config_of(read_gguf(file))["pad_token_id"] is None
