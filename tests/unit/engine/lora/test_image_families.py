"""Adapters of the language model of models that read images, as `peft` makes them, in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from tests.adapters import make_adapter, rewrite
from tests.image_prompts import (
    FAMILIES,
    ImagePrompt,
    expected,
    image_prompt,
    load_image_reference,
    make_image_model,
)
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import InvalidAdapter
from tgi_server.model_files.merged_models import merge

QUICK = ("gemma3", "qwen2_5_vl", "qwen3_5")
NEW = 8
SIZES: list[list[tuple[int, int]]] = [[(2, 3)], []]


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: PreTrainedModel
    prompts: list[ImagePrompt]
    engine: Engine

    @property
    def text_path(self) -> str:
        embeddings = self.reference.get_input_embeddings()
        path = next(path for path, module in self.reference.named_modules() if module is embeddings)
        return path.rpartition(".")[0]

    def linears(self, *, text: bool) -> list[str]:
        """Returns the paths of the linear layers of the language model, or of the part that reads images."""
        head, start = self.reference.get_output_embeddings(), f"{self.text_path}."
        return [
            path
            for path, module in self.reference.named_modules()
            if isinstance(module, nn.Linear) and module is not head and path.startswith(start) is text
            if not path.endswith(".router")  # of experts, where adapters are refused
        ]

    def check(self, adapter: Path, merged: PreTrainedModel) -> None:
        """Checks that the engine answers with an adapter as its merged model, and without it as the base model."""
        self.engine.adapters.put("a", self.engine.adapters.read(adapter))
        answers = [[expected(model, prompt, NEW) for prompt in self.prompts] for model in (merged, self.reference)]
        assert answers[0] != answers[1], "an adapter that changes nothing proves nothing"
        assert [self.answers("a"), self.answers("")] == answers
        self.engine.adapters.drop("a")

    def answers(self, adapter: str) -> list[list[int]]:
        driver = Driver(self.engine)
        for index, prompt in enumerate(self.prompts):
            stopping = StoppingParameters(NEW, ignore_eos=True)
            driver.add(
                RunningSequence(index, prompt.ids, stopping, images=prompt.images, adapter_id=adapter),
                [len(prompt.ids)],
            )
        driver.run()
        return [driver.outputs[index].tokens for index in range(len(self.prompts))]


def make_model(family: str, folder: Path) -> Model:
    make_image_model(family, folder)
    reference = load_image_reference(folder)
    prompts = [image_prompt(reference, sizes, seed=index) for index, sizes in enumerate(SIZES)]
    engine = Engine(EngineConfig(folder))
    engine.warm_up(max_batch_size=4, max_prefill_tokens=128, max_total_tokens=128)
    return Model(folder, reference, prompts, engine)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


def adapter_of(model: Model, folder: Path, **settings: Any) -> tuple[Path, PreTrainedModel]:
    place, merged = make_adapter(model.reference, folder, **{"r": 4, "lora_alpha": 8} | settings)
    merged.generation_config.eos_token_id = None
    return place, merged


def renamed(folder: Path, name: Callable[[str], str]) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    rewrite(folder, {name(key.removeprefix("base_model.model.")): tensor for key, tensor in tensors.items()})
    return folder


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_an_adapter_of_the_language_model_answers_as_peft_does(model: Model, settings: Any, tmp_path: Path) -> None:
    model.check(*adapter_of(model, tmp_path, target_modules=model.linears(text=True), **settings))


@pytest.mark.parametrize("wrapper", ["", "model.", "language_model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("peft", ["", "base_model.model."])
def test_names_may_have_the_prefixes_of_any_wrapper(model: Model, wrapper: str, peft: str, tmp_path: Path) -> None:
    folder, merged = adapter_of(model, tmp_path, target_modules=model.linears(text=True))
    model.check(renamed(folder, lambda name: f"{peft}{wrapper}{name.removeprefix(f'{model.text_path}.')}"), merged)


def test_an_adapter_of_everything_is_refused_by_the_name_of_a_layer_for_images(model: Model, tmp_path: Path) -> None:
    folder, _ = adapter_of(model, tmp_path, target_modules=[*model.linears(text=True), *model.linears(text=False)])
    with pytest.raises(InvalidAdapter, match=r"changes \S+, which is of the part that reads images"):
        model.engine.adapters.read(folder)


def test_layers_for_images_that_were_not_trained_are_left_out(model: Model, tmp_path: Path) -> None:
    """peft begins with matrices of zeros, which stay if the adapter was trained with texts alone."""
    targets = [*model.linears(text=True), *model.linears(text=False)]
    folder, _ = adapter_of(model, tmp_path, target_modules=targets)
    tensors = load_file(folder / "adapter_model.safetensors")
    text = [name for name in tensors if name.removeprefix("base_model.model.").startswith(f"{model.text_path}.")]
    rewrite(folder, {name: tensor if name in text else torch.zeros_like(tensor) for name, tensor in tensors.items()})
    model.check(folder, PeftModel.from_pretrained(load_image_reference(model.folder), folder).merge_and_unload())


def test_an_adapter_of_the_text_model_alone(qwen: Model, tmp_path: Path) -> None:
    text = qwen.reference.get_decoder()
    make_adapter(text, tmp_path, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    merged = load_image_reference(qwen.folder)
    merged.model.language_model = PeftModel.from_pretrained(merged.get_decoder(), tmp_path).merge_and_unload()
    qwen.check(tmp_path, merged)


def test_an_adapter_of_the_head(qwen: Model, tmp_path: Path) -> None:
    folder, merged = adapter_of(qwen, tmp_path, target_modules=["lm_head", "v_proj"])
    qwen.check(renamed(folder, lambda name: name.replace("lm_head", "language_model.lm_head")), merged)


def test_a_merged_copy_has_the_layers_for_images_changed_too(model: Model, tmp_path: Path) -> None:
    targets = [*model.linears(text=True), *model.linears(text=False)]
    adapter, merged = adapter_of(model, tmp_path / "adapter", target_modules=targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        copy = load_image_reference(merge(adapter, model.folder, trust_remote_code=False))
    answers = [[expected(each, prompt, NEW) for prompt in model.prompts] for each in (merged, model.reference, copy)]
    assert answers[0] != answers[1]
    assert answers[2] == answers[0]
