import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.pickled_weights import convert_weights


def test_every_tensor_arrives_whatever_memory_it_shares(tmp_path: Path) -> None:
    shared = torch.randn(4, 6)
    tensors = {"embed": shared, "head": shared, "slice": shared[:2], "turned": torch.randn(3, 2).T}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    convert_weights(tmp_path, tmp_path)
    converted = load_file(tmp_path / "model.safetensors")
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())


def test_heads_of_medusa_are_converted(tmp_path: Path) -> None:
    torch.save({"0.1.weight": torch.ones(3, 2)}, tmp_path / "medusa_lm_head.pt")
    convert_weights(tmp_path, tmp_path)
    assert load_file(tmp_path / "medusa_lm_head.safetensors").keys() == {"0.1.weight"}


def split_in_two(folder: Path) -> None:
    parts = {"first": "pytorch_model-00001-of-00002.bin", "second": "pytorch_model-00002-of-00002.bin"}
    for tensor, file in parts.items():
        torch.save({tensor: torch.ones(3)}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))


def test_several_files_get_an_index(tmp_path: Path) -> None:
    split_in_two(tmp_path)
    convert_weights(tmp_path, tmp_path)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 24},
        "weight_map": {"first": "model-00001-of-00002.safetensors", "second": "model-00002-of-00002.safetensors"},
    }
    assert load_file(tmp_path / "model-00002-of-00002.safetensors").keys() == {"second"}


def test_nothing_is_written_when_the_last_file_is_broken(tmp_path: Path) -> None:
    split_in_two(tmp_path)
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelUnavailable, match=r"00002\.bin is corrupt"):
        convert_weights(tmp_path, tmp_path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["../secret.bin", "absent.bin"])
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"first": name}}))
    with pytest.raises(ModelUnavailable, match=Path(name).name):
        convert_weights(tmp_path, tmp_path)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._trace), "w")


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"weight": Evil(trace)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match="holds more than tensors; it is not loaded"):
        convert_weights(tmp_path, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(trace), protocol=2))
    with pytest.raises(ModelUnavailable, match="holds more than tensors; it is not loaded"):
        convert_weights(tmp_path, tmp_path)
    assert not trace.exists()


def test_what_is_not_named_tensors_is_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(3)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match="something other than named tensors"):
        convert_weights(tmp_path, tmp_path)


@pytest.mark.parametrize("length", [0, 1, 300])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(99)}, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelUnavailable, match=r"pytorch_model.bin is corrupt"):
        convert_weights(tmp_path, tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"has no pytorch_model\.bin"):
        convert_weights(tmp_path, tmp_path)
