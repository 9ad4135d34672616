"""Images in requests: each way in which they come becomes the tokens of the family's own processor."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from shared.stubs import generate_pb2 as pb
from tests.image_processors import FAMILIES, as_data_url, photograph, save_processor, tokenizer_of
from tests.integration.router.conftest import Router, RouterFactory, in_one_loop, running_router
from tests.timing import SECONDS

FAMILY = "qwen2_5_vl"
# What a family's own processor makes of a conversation, in a process without torch.
_OWN = """
import json, sys
from pathlib import Path
from tests.image_processors import photograph
from tgi_server.router.media.worker import load_processor
processor = load_processor(Path(sys.argv[1]))
messages, sizes = json.loads(sys.argv[2])
text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
images = [photograph(*size) for size in sizes]
form = "np" if sys.modules["torch"] is None else "pt"
made = processor(text=[text], images=images, add_special_tokens=False, return_tensors=form)
shapes = {name: made[name].shape for name in made if name.startswith(("pixel", "image", "spatial"))}
print(json.dumps([made["input_ids"][0].tolist(), shapes]))
"""


def part(*size: int, **members: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_data_url(photograph(*size)), **members}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def own_ids(folder: Path, messages: list[dict[str, Any]], sizes: list[tuple[int, ...]]) -> tuple[list[int], Any]:
    command = [sys.executable, "-c", _OWN, str(folder), json.dumps([messages, sizes])]
    ids, shapes = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return ids, shapes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """One router for all tests of this file that leave it as it is."""
    folder = save_processor(FAMILY, tmp_path_factory.mktemp("model"))
    async with running_router(
        tmp_path_factory.mktemp("router"),
        {"images": True},
        tokenizer_name=folder,
        validation_workers=1,
        max_image_pixels=1_000_000,
    ) as running:
        running.say("a chair")
        yield running


async def chat(router: Router, *content: Any, **fields: Any) -> httpx.Response:
    return await router.post("/v1/chat/completions", messages=[{"role": "user", "content": list(content)}], **fields)


@in_one_loop
async def test_another_image_explains_a_miss_of_the_prefix_cache(router: Router):
    question = text("What can be seen here, in a few words, and what is it used for in a house with a garden?")
    for width, cause, place in ((84, "never_seen", None), (112, "changed", "messages[0].content[1]")):
        answer = await chat(router, text("Look: "), part(width, 84), question, cache_salt="miss", explain_prefix=True)
        shown = answer.json()["usage"]["prompt_tokens_details"]["prefix"]
        assert (shown["cause"], shown["difference"] and shown["difference"]["place"]) == (cause, place)


def newest(router: Router) -> pb.Request:
    return router.shard.received[-1]


def shown(router: Router, request: pb.Request) -> str:
    """The prompt as text, each image as its placeholder once for every token."""
    return router.service.text.tokenizer.decode(list(request.input_ids))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
async def test_a_prompt_has_the_tokens_that_the_familys_processor_gives(
    model_type: str, routers: RouterFactory, tmp_path: Path
) -> None:
    folder = save_processor(model_type, tmp_path)
    router = await routers(shard={"images": True}, tokenizer_name=folder, validation_workers=1)
    router.say("a chair")
    router.http.timeout = httpx.Timeout(SECONDS * 4)  # a process that imports torch takes long where others compute
    sizes = [(100, 60), (30, 90, 1), (200, 200, 2)]
    parts = [part(*size) for size in sizes]
    turns = [
        {"role": "user", "content": [text("What is\n\n"), parts[0], text("\nand "), parts[1], text("?")]},
        {"role": "assistant", "content": "Chairs."},
        {"role": "user", "content": [parts[2], text("And this?")]},
    ]
    response = await router.post("/v1/chat/completions", messages=turns)
    assert response.status_code == 200, response.text
    as_image = json.loads(
        json.dumps(turns), object_hook=lambda each: {"type": "image"} if "image_url" in each else each
    )
    ids, shapes = own_ids(folder, as_image, sizes)
    received = newest(router)
    assert list(received.input_ids) == ids
    assert response.json()["usage"]["prompt_tokens"] == len(ids)
    token = tokenizer_of(model_type).token_to_id(FAMILIES[model_type].token)
    spans = [(image.start, image.start + image.length) for image in received.images]
    assert len(spans) == 3
    assert all(ids[start] == ids[end - 1] == token for start, end in spans)
    assert sum(ids[start:end].count(token) for start, end in spans) == ids.count(token)
    assert {tensor.name for tensor in received.images[0].tensors} == set(shapes)
    assert all(len(image.digest) == 32 for image in received.images)


@in_one_loop
async def test_the_second_turn_hits_and_carries_no_pixels(router: Router) -> None:
    first = {"role": "user", "content": [part(300, 200, 3), text("What is it? " + "x" * 200)]}
    await router.post("/v1/chat/completions", messages=[first])
    before = newest(router)
    assert [image.digest for image in router.shard.encoded if image.digest == before.images[0].digest]
    computed = len(router.shard.encoded)
    second = [first, {"role": "assistant", "content": "a chair"}, {"role": "user", "content": "Really?"}]
    response = await router.post("/v1/chat/completions", messages=second)
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    after = newest(router)
    assert after.cached_tokens >= after.images[0].start + after.images[0].length
    assert [tensor.name for tensor in after.images[0].tensors] == ["image_grid_thw"]
    assert {tensor.name for tensor in before.images[0].tensors} == {"image_grid_thw", "pixel_values"}
    assert len(router.shard.encoded) == computed
    assert (after.images[0].digest, after.images[0].start) == (before.images[0].digest, before.images[0].start)


@in_one_loop
async def test_two_images_of_one_size_share_nothing(router: Router) -> None:
    await chat(router, text("one "), part(100, 60, 4), text("What is it?"))
    await chat(router, text("one "), part(100, 60, 5), text("What is it?"))
    assert newest(router).cached_tokens == newest(router).images[0].start
    await chat(router, text("one "), part(100, 60, 4), text("What is that?"))
    assert newest(router).cached_tokens > newest(router).images[0].start + newest(router).images[0].length


@in_one_loop
async def test_images_of_tool_results(router: Router) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "camera", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [part(40, 40), text("taken")]},
    ]
    assert (await router.post("/v1/chat/completions", messages=turns)).status_code == 200
    assert len(newest(router).images) == 1
    assert "tool: <|vision_start|><|image_pad|>" in shown(router, newest(router))


@in_one_loop
async def test_every_route_takes_images(router: Router) -> None:
    url = as_data_url(photograph(100, 60))
    data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    image = {"type": "image", "source": data}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    calls: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/messages", {"messages": [{"role": "user", "content": [image, text("What?")]}], "max_tokens": 5}, 1),
        ("/v1/messages", {"messages": [{"role": "user", "content": [result, image]}], "max_tokens": 5}, 2),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": [image | {"source": {"type": "url", "url": url}}]}],
                "max_tokens": 5,
            },
            1,
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}, 1),
        (
            "/v1/decisions",
            {
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
                "questions": [{"type": "predicate", "instructions": "A chair?"}],
            },
            1,
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "What?", "images": [data["data"]] * 2}]}, 2),
        ("/api/generate", {"prompt": "What is it?", "images": [data["data"]], "stream": False}, 1),
        ("/generate", {"inputs": f"![]({url})What is it?"}, 1),
        ("/generate_stream", {"inputs": f"One ![]({url})\nand ![]({url})?"}, 2),
        ("/invocations", {"inputs": f"![]({url})"}, 1),
        ("/vertex", {"instances": [{"inputs": f"![]({url})"}]}, 1),
        ("/v1/completions", {"prompt": f"![]({url})What is it?"}, 1),
        ("/v1/completions", {"prompt": ["Hello", f"One ![]({url})\nand ![]({url})?"]}, 2),
        ("/v1/warm", {"prompt": f"![]({url})What is it? Say."}, 1),
    ]
    for path, body, images in calls:
        response = await router.post(path, **body)
        assert response.status_code == 200, (path, response.text)
        received = newest(router)
        assert len(received.images) == images, path
        assert list(received.input_ids).count(tokenizer_of(FAMILY).token_to_id("<|image_pad|>")) == 8 * images
        assert "<|vision_start|><|image_pad|>" in shown(router, received)


@in_one_loop
async def test_tokens_are_counted_with_those_of_images(router: Router) -> None:
    url = as_data_url(photograph(100, 60))
    image = {"type": "image", "source": {"type": "url", "url": url}}
    messages = [{"role": "user", "content": [image, text("What?")]}]
    counted = (await router.post("/v1/messages/count_tokens", messages=messages)).json()["input_tokens"]
    body = {"messages": [{"role": "user", "content": [part(100, 60), text("What?")]}]}
    tokens = (await router.post("/chat_tokenize", **body)).json()["tokenize_response"]
    await router.post("/v1/chat/completions", **body)
    assert counted == len(tokens) == len(newest(router).input_ids)
    tokens = (await router.post("/tokenize", inputs=f"![]({url})What?")).json()
    await router.post("/generate", inputs=f"![]({url})What?")
    assert [token["id"] for token in tokens] == list(newest(router).input_ids)


@in_one_loop
async def test_a_stored_response_with_an_image_goes_on(router: Router) -> None:
    url = as_data_url(photograph(100, 60, 7))
    first = await router.post(
        "/v1/responses", input=[{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    )
    digest = newest(router).images[0].digest
    await router.post("/v1/responses", input="Really?", previous_response_id=first.json()["id"])
    assert [image.digest for image in newest(router).images] == [digest]


@in_one_loop
@pytest.mark.parametrize("url", ["file:///etc/passwd", "data:image/png;base64,!!!!", "data:,A A", "a b"])
async def test_an_image_in_markdown_that_cannot_be_read_is_refused(router: Router, url: str) -> None:
    for path, field in (("/generate", "inputs"), ("/v1/completions", "prompt"), ("/tokenize", "inputs")):
        refused = await router.post(path, **{field: f"Look: ![]({url})"})
        assert refused.status_code in (400, 422), (path, refused.text)
        assert f"`{field}`: the image cannot be used" in refused.text


@in_one_loop
async def test_what_clients_spell_is_no_image(router: Router) -> None:
    response = await chat(router, text("<|image_pad|> is how <|vision_start|> "), part(100, 60), text(" begins"))
    assert response.status_code == 200, response.text
    (image,) = newest(router).images
    token = tokenizer_of(FAMILY).token_to_id("<|image_pad|>")
    assert list(newest(router).input_ids).count(token) == image.length == 8
    refused = await router.post("/generate", inputs=f"<|image_pad|>![]({as_data_url(photograph(100, 60))})")
    assert refused.status_code == 422
    assert "9 image tokens" in refused.json()["error"]


@in_one_loop
@pytest.mark.parametrize(
    ("content", "place", "reason"),
    [
        ([text("a"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}], 1, "not a JPEG"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}], 0, "--allowed-media-domains"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], 0, "must begin with"),
        ([part(1001, 1000)], 0, "--max-image-pixels"),
        ([part(30, 30), {"type": "image_url", "image_url": {"url": "x"}}], 1, "must begin with"),
    ],
)
async def test_an_image_that_cannot_be_used_is_named(
    content: list[Any], place: int, reason: str, router: Router
) -> None:
    response = await chat(router, *content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == f"messages[0].content[{place}]"
    assert f"`messages[0].content[{place}]`" in error["message"]
    assert reason in error["message"]


@in_one_loop
async def test_fields_that_cannot_be_honoured_are_refused(router: Router) -> None:
    assert (await chat(router, part(30, 30, detail="best"))).status_code == 400
    assert (await chat(router, part(30, 30, detail="low"))).status_code == 200
    file = {"type": "input_image", "file_id": "file-1", "image_url": "data:,"}
    response = await router.post("/v1/responses", input=[{"role": "user", "content": [file]}])
    assert (response.status_code, "file_id" in response.text) == (400, True)
    response = await router.post(
        "/generate", inputs=f"![]({as_data_url(photograph(30, 30))})", parameters={"truncate": 3}
    )
    assert "`parameters.truncate` cannot be used with images" in response.json()["error"]
    response = await router.post("/v1/completions", prompt=f"![]({as_data_url(photograph(30, 30))})", echo=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")


@in_one_loop
async def test_images_are_counted(router: Router) -> None:
    names = (
        "image_count_total",
        "image_known_count_total",
        'image_failure_total{err="validation"}',
        "image_length_sum",
    )
    names += ("image_decode_duration_count", "image_encode_duration_count")

    async def counted() -> list[float]:
        return [await router.metric(f"tgi_{name}") for name in names]

    before = await counted()
    for _ in range(2):
        await chat(router, part(100, 60, 8), text("What?"))
    assert (await chat(router, {"type": "image_url", "image_url": {"url": "data:,"}})).status_code == 400
    assert [now - then for now, then in zip(await counted(), before, strict=True)] == [3, 1, 1, 16, 1, 1]


@pytest.mark.slow
async def test_shards_may_refuse_an_image(routers: RouterFactory, tmp_path: Path) -> None:
    router = await routers(shard={"images": True}, tokenizer_name=save_processor(FAMILY, tmp_path))
    router.shard.image_error = "the tower has no place for it"
    response = await chat(router, part(30, 30))
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the tower has no place for it")


@pytest.mark.slow
async def test_no_chunk_ends_in_an_image_that_is_computed_whole(routers: RouterFactory, tmp_path: Path) -> None:
    router = await routers(
        shard={"images": True, "whole_images": True},
        tokenizer_name=save_processor(FAMILY, tmp_path),
        max_batch_prefill_tokens=16,
    )
    chunks: list[pb.Chunk] = []
    prefill = router.shard._prefill
    router.shard._prefill = lambda call: (chunks.extend(call.chunks), prefill(call))[1]  # type: ignore[method-assign]
    router.say("a chair")
    response = await chat(router, text("x" * 20), part(100, 60), text("y" * 20), part(60, 60), text("z" * 20))
    assert response.status_code == 200, response.text
    end, ends = 0, []
    for chunk in chunks:
        end += chunk.tokens
        ends.append(end)
    assert len(ends) > 4
    for image in newest(router).images:
        assert not [each for each in ends if image.start < each < image.start + image.length]
    refused = await chat(router, part(300, 200))
    assert "an image may have 16" in refused.json()["error"]["message"]


@pytest.mark.slow
async def test_images_of_a_client_count_as_its_memory(routers: RouterFactory, tmp_path: Path) -> None:
    router = await routers(
        shard={"images": True},
        tokenizer_name=save_processor(FAMILY, tmp_path),
        max_client_memory=1,
        validation_workers=1,
    )
    response = await chat(router, part(20, 30), part(300, 200), part(300, 200, 1))
    assert response.status_code == 413
    assert "--max-client-memory" in response.json()["error"]["message"]


@pytest.mark.slow
async def test_a_client_that_leaves_ends_the_decoding_of_its_images(routers: RouterFactory, tmp_path: Path) -> None:
    router = await routers(
        shard={"images": True}, tokenizer_name=save_processor(FAMILY, tmp_path), validation_workers=1
    )
    router.http.timeout = httpx.Timeout(SECONDS * 4)
    assert (await chat(router, part(30, 30))).status_code == 200
    reader = router.service.text.images
    (worker,) = reader._workers._all
    os.kill(worker._process.pid, signal.SIGSTOP)  # so that it decodes for ever
    url = as_data_url(photograph(40, 30))
    asking = [
        asyncio.create_task(chat(router, part(50, 30))),
        asyncio.create_task(chat(router, part(60, 30))),
        asyncio.create_task(router.post("/generate", inputs=f"![]({url})")),
    ]
    await router.until(lambda: len(reader._running) >= 2)
    assert router.service.capacity.in_flight >= 2, "they keep their places"
    for task in asking:
        task.cancel()
    await router.until(lambda: not reader._running and not router.service.capacity.in_flight)
    assert (await chat(router, part(50, 30))).status_code == 200


async def test_a_model_that_reads_text_only_says_so(routers: RouterFactory) -> None:
    router = await routers()
    response = await chat(router, part(30, 30))
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "images are not supported: this model reads text only"
    refused = await router.post("/generate", inputs=f"![]({as_data_url(photograph(2, 2))})")
    assert (refused.status_code, "this model reads text only" in refused.text) == (422, True)
    await router.post("/generate", inputs="Write ![](http://a/b.png).")  # TGI has it be text
    assert "![](http://a/b.png)" in shown(router, newest(router))
