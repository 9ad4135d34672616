"""Prompts with images: token for token equal to `transformers`, in float32."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.image_prompts import (
    FAMILIES,
    IMAGE_TOKEN,
    ImagePrompt,
    as_image,
    expected,
    image_prompt,
    image_tensors,
    load_image_reference,
    make_image_model,
)
from tests.unit.engine.conftest import RanksOf
from tgi_server.contract import BlockCopy, Image, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import InvalidCall, InvalidImage
from tgi_server.engine.offline import generate
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.vision.tower import VisionTower

NEW = 10
# Sizes of the images of each prompt; the last one is text alone.
SIZES: list[list[tuple[int, int]]] = [[(2, 3)], [(1, 2), (3, 2)], [(2, 2), (2, 3), (1, 2)], [(2, 3)], []]
# Of the text model, by a name for it.
VARIANTS: dict[str, dict[str, Any]] = {"gemma4": {"use_bidirectional_attention": "vision"}}
QUICK = ("gemma3", "qwen3_vl")

Prompts = tuple[Path, list[ImagePrompt], list[list[int]]]


def families(quick: Iterable[str]) -> list[object]:
    """Returns the names as parameters; those that are not chosen are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in FAMILIES]


def load(folder: Path, **settings: Any) -> Engine:
    engine = Engine(EngineConfig(folder, **settings))
    engine.warm_up(max_batch_size=8, max_prefill_tokens=256, max_total_tokens=256)
    return engine


def sequence(index: int, prompt: ImagePrompt, new: int = NEW, **state: Any) -> RunningSequence:
    stopping = StoppingParameters(new, ignore_eos=True)
    return RunningSequence(index, prompt.ids, stopping, images=prompt.images, **state)


def prompts_and_answers(family: str, folder: Path, **text: Any) -> Prompts:
    make_image_model(family, folder, **text)
    reference = load_image_reference(folder)
    prompts = [image_prompt(reference, sizes, seed=index) for index, sizes in enumerate(SIZES)]
    answers = [expected(reference, prompt, NEW) for prompt in prompts]
    assert len({token for answer in answers for token in answer}) > 10, "a model that says nothing proves nothing"
    return folder, prompts, answers


@pytest.fixture(scope="module", params=families(QUICK))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return prompts_and_answers(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(family: Prompts) -> Engine:
    return load(family[0])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return prompts_and_answers("qwen3_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def qwen_engine(qwen: Prompts) -> Engine:
    return load(qwen[0])


def overlap(engine: Engine, prompts: Sequence[ImagePrompt], chunk: int | None = None) -> list[list[int]]:
    """Has a prompt join in each step. chunk: tokens of a prompt that a step computes; None: all.

    A chunk grows to the end of an image if the model wants images whole.
    """
    driver = Driver(engine)
    for index, prompt in enumerate(prompts):
        driver.add(sequence(index, prompt), chunks_of(prompt, chunk, whole=engine.info.whole_images))
        driver.step()
    driver.run()
    return [driver.outputs[index].tokens for index in range(len(prompts))]


def chunks_of(prompt: ImagePrompt, chunk: int | None, *, whole: bool) -> list[int]:
    chunks, start, total = [], 0, len(prompt.ids)
    while start < total:
        end = total if chunk is None else min(start + chunk, total)
        for image in prompt.images if whole else ():
            if image.start < end < image.start + image.length:
                end = image.start + image.length
        chunks.append(end - start)
        start = end
    return chunks


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list that grows by the digest of each image that is computed from now on."""
    computed: list[bytes] = []
    own = VisionTower._compute
    monkeypatch.setattr(
        VisionTower, "_compute", lambda tower, image: (computed.append(image.digest), own(tower, image))[1]
    )
    return computed


def test_overlapping_requests_get_the_tokens_of_transformers(family, engine) -> None:
    _, prompts, answers = family
    assert engine.info.paged
    assert engine.info.images
    assert overlap(engine, prompts) == answers


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(64, marks=pytest.mark.slow)]
)
def test_prompts_in_chunks(family, engine, chunk) -> None:
    _, prompts, answers = family
    assert overlap(engine, prompts, chunk) == answers


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, tmp_path) -> None:
    folder, prompts, answers = prompts_and_answers(name, tmp_path, **VARIANTS[name])
    engine = load(folder)
    assert engine.info.whole_images
    assert overlap(engine, prompts) == answers
    assert overlap(engine, prompts, 3) == answers


@pytest.mark.slow
def test_plain_torch(family) -> None:
    folder, prompts, answers = family
    assert overlap(load(folder, custom_kernels=False), prompts, 7) == answers


def test_a_preempted_request_goes_on_and_computes_no_image_again(family, engine, monkeypatch) -> None:
    _, prompts, answers = family
    driver = Driver(engine)
    driver.add(sequence(0, prompts[2]))
    for _ in range(4):
        driver.step()
    driver.leave(0)
    done = driver.outputs[0].tokens
    computed = counted(engine, monkeypatch)
    (rest,) = driver.run(sequence(0, prompts[2], generated_ids=done))
    assert 0 < len(done) < NEW
    assert done + rest.tokens == answers[2]
    assert not computed


def test_a_cached_prefix_needs_no_pixels(qwen, qwen_engine) -> None:
    """The blocks of an image are shared up to the middle of the image's tokens, and up to its end."""
    _, prompts, answers = qwen
    prompt, size = prompts[1], qwen_engine.info.block_size
    bare = [without_pixels(image) for image in prompt.images]
    last = prompt.images[-1]
    for cached in (last.start + 2, last.start + last.length):
        driver = Driver(qwen_engine)
        blocks = list(range(1, 1 + -(-len(prompt.ids) // size) + 1))
        driver.run(sequence(0, prompt, blocks=blocks))
        whole, rest = divmod(cached, size)
        own = [*blocks[:whole], 41, 42, 43]
        copy = BlockCopy(blocks[whole], 41, rest) if rest else None
        images = [bare[0], last if cached < last.start + last.length else bare[1]]
        again = sequence(1, replace(prompt, images=images), blocks=own, computed=cached, copy=copy)
        (output,) = driver.run(again)
        assert output.tokens == answers[1], cached


def without_pixels(image: Image) -> Image:
    return replace(image, tensors=tuple(each for each in image.tensors if each.name != "pixel_values"))


def test_an_image_is_computed_once_for_all_requests(qwen, qwen_engine, monkeypatch) -> None:
    _, prompts, answers = qwen
    qwen_engine.tower.clear()
    computed = counted(qwen_engine, monkeypatch)
    assert overlap(qwen_engine, [prompts[0], prompts[0], prompts[1]], 7) == [answers[0], answers[0], answers[1]]
    assert sorted(computed) == sorted({image.digest for prompt in prompts[:2] for image in prompt.images})


def test_the_images_used_last_are_those_that_are_cached(qwen, monkeypatch) -> None:
    folder, prompts, _ = qwen
    first, second, third = prompts[2].images
    engine = load(folder)
    sizes = {image.digest: engine.tower.encode(image).nbytes for image in (first, second, third)}
    engine.tower.clear()
    engine.tower.memory = sum(sizes.values()) - 1
    computed = counted(engine, monkeypatch)
    for image in (first, second, first, third, first, second):
        engine.tower.encode(image)
    assert computed == [first.digest, second.digest, third.digest, second.digest]


def test_images_that_are_too_large_for_the_cache(qwen) -> None:
    folder, prompts, answers = qwen
    assert overlap(load(folder, image_memory=1), prompts, 7) == answers


def test_without_memory_for_images_they_are_refused(qwen) -> None:
    folder, prompts, answers = qwen
    engine = load(folder, image_memory=0)
    assert not engine.info.images
    driver = Driver(engine)
    refused, text = driver.run(sequence(0, prompts[0]), sequence(1, prompts[-1]))
    assert refused.error == engine.info.no_images
    assert text.tokens == answers[-1]


def test_a_model_of_text_reads_no_images() -> None:
    from tgi_server import demo_model

    engine = load(demo_model.PATH)
    assert not engine.info.images
    assert not engine.info.no_images


@pytest.mark.parametrize("fault", ["pixels", "shape", "bytes", "grid", "tokens", "place"])
def test_what_is_wrong_with_an_image_fails_its_request_alone(fault, qwen, qwen_engine) -> None:
    _, prompts, answers = qwen
    own = image_tensors("qwen3_vl", 2, 2, seed=7)
    wrong = as_image(own, 3, 4)
    if fault == "pixels":
        wrong = without_pixels(wrong)
    elif fault == "shape":
        wrong = as_image(own | {"pixel_values": own["pixel_values"][:-1]}, 3, 4)
    elif fault == "bytes":
        wrong = replace(wrong, tensors=tuple(replace(each, data=each.data[:-1]) for each in wrong.tensors))
    elif fault == "grid":
        wrong = replace(wrong, tensors=wrong.tensors[:1])
    elif fault == "place":
        wrong = replace(wrong, length=40)
    count = 3 if fault == "tokens" else 4
    prompt = ImagePrompt([5, 6, 7, *[IMAGE_TOKEN] * count, 8, 9], [wrong], [])
    failed, right = Driver(qwen_engine).run(sequence(0, prompt), sequence(1, prompts[0]))
    assert failed.error
    assert "image" in failed.error or "pixel_values" in failed.error
    assert right.tokens == answers[0]


def test_tensors_that_are_no_image(qwen_engine) -> None:
    image = as_image(image_tensors("qwen3_vl", 2, 2, seed=8), 0, 4)
    for wrong in (without_pixels(image), replace(image, tensors=(replace(image.tensors[0], dtype="complex64"),))):
        with pytest.raises(InvalidImage):
            qwen_engine.tower.encode(wrong)


def test_a_chunk_that_ends_inside_an_image_is_refused_if_its_tokens_attend_to_each_other(tmp_path) -> None:
    _, prompts, _ = prompts_and_answers("gemma3", tmp_path)
    engine = load(tmp_path)
    driver = Driver(engine)
    driver.add(sequence(0, prompts[0]), [prompts[0].images[0].start + 1])
    with pytest.raises(InvalidCall, match="inside an image"):
        driver.step()


def test_images_offline(qwen, qwen_engine) -> None:
    _, prompts, answers = qwen
    images = [prompt.images for prompt in prompts]
    stopping = StoppingParameters(NEW, ignore_eos=True)
    assert generate(qwen_engine, [prompt.ids for prompt in prompts], stopping, images=images) == answers
    qwen_engine.warm_up(max_batch_size=8, max_prefill_tokens=256, max_total_tokens=256)


@pytest.mark.slow
def test_drafts_behind_images(qwen) -> None:
    folder, prompts, answers = qwen
    assert overlap(load(folder, speculate=3), prompts, 7) == answers


def shard(group: ShardGroup, folder: Path, prompts: Sequence[ImagePrompt]) -> list[list[int]]:
    return overlap(load(folder, group=group), prompts, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "llava_next", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"])
def test_two_shards(name, ranks_of: RanksOf, tmp_path) -> None:
    folder, prompts, answers = prompts_and_answers(name, tmp_path)
    bare = [replace(prompt, tensors=[]) for prompt in prompts]
    assert ranks_of(2).run(shard, folder, bare) == [answers, answers]
