"""SageMaker, Vertex, health, info, metrics, models, the API's description, and who may call."""

import asyncio
from typing import Any

import pytest
from packaging.version import Version

from tests.integration.router.conftest import Router, RouterFactory, events
from tests.timing import eventually
from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling import health

TEXT = "Rinse the rice. Then boil it."
HELLO = [{"role": "user", "content": "Hello"}]


async def test_the_root_answers_with_a_list_or_a_stream(router: Router):
    assert (await router.post("/", inputs="Hello")).json() == [{"generated_text": TEXT}]
    response = await router.post("/", inputs="Hello", stream=True)
    assert TEXT in events(response.text)[-1]


@pytest.mark.parametrize(
    ("body", "mark"),
    [
        ({"inputs": "Hello"}, "generated_text"),
        ({"messages": HELLO}, "chat.completion"),
        ({"prompt": "Hello"}, "text_completion"),
    ],
)
async def test_sagemaker(router: Router, body: dict[str, Any], mark: str):
    response = await router.post("/invocations", **body)
    assert response.status_code == 200
    assert mark in response.text
    streamed = await router.post("/invocations", **body, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert len(events(streamed.text)) > 2


@pytest.mark.parametrize("content", ["{}", "[]", "nothing", '{"inputs": 3}'])
async def test_what_sagemaker_does_not_get(router: Router, content: str):
    response = await router.http.post("/invocations", content=content)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"


async def test_vertex(router: Router):
    instances = [{"inputs": "Hello", "parameters": {"max_new_tokens": 3}}, {"messages": HELLO}]
    response = await router.post("/vertex", instances=instances)
    assert response.json()["predictions"][1] == TEXT
    assert TEXT.startswith(response.json()["predictions"][0])
    assert (await router.post("/vertex", instances=[])).status_code == 422


async def test_health(router: Router):
    for path in ("/health", "/ping", "/"):
        assert (await router.http.get(path)).status_code == 200
        assert (await router.http.head(path)).status_code == 200
    router.shard.fail = "the device is lost"
    for path in ("/health", "/ping", "/"):
        response = await router.http.get(path)
        assert response.status_code == 503
        assert response.json()["error_type"] == "healthcheck"


async def test_steps_that_are_answered_show_health_before_the_shards_find_time_for_the_question(routers: RouterFactory):
    router = await routers(shard={"step_seconds": 0.02})
    router.say("Rinse the rice.", end=False)
    router.shard.health.clear()
    generating = asyncio.create_task(router.post("/generate", inputs="Hello", parameters={"max_new_tokens": 100}))
    response = await router.http.get("/health")
    assert response.status_code == 200
    assert not generating.done()
    assert (await generating).status_code == 200


async def test_shards_that_answer_nothing_are_not_well(router: Router, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "HEALTH_SECONDS", 0.5)
    router.shard.health.clear()
    response = await router.http.get("/health")
    assert response.status_code == 503
    assert "did not answer in time" in response.json()["error"]
    router.shard.health.set()
    assert (await router.http.get("/health")).status_code == 200


async def test_shards_that_have_lost_a_step_are_not_well(routers: RouterFactory, monkeypatch: pytest.MonkeyPatch):
    """They answer health checks, but never the step."""
    monkeypatch.setattr(health, "HEALTH_SECONDS", 0.5)
    router = await routers(shard={"step_seconds": 60})
    generating = asyncio.create_task(router.post("/generate", inputs="Hello", parameters={"max_new_tokens": 5}))
    await eventually(lambda: len(router.shard.received) == 1)
    assert (await router.http.get("/health")).status_code == 200
    await asyncio.sleep(0.6)
    response = await router.http.get("/health")
    assert response.status_code == 503
    assert "the shards answer, but have computed no step for" in response.json()["error"]
    generating.cancel()


async def test_info(routers: RouterFactory):
    router = await routers(max_input_tokens=100, max_total_tokens=200, revision="abc", max_best_of=3)
    info = (await router.http.get("/info")).json()
    assert info == {
        "model_id": "instant",
        "model_sha": "abc",
        "model_pipeline_tag": "text-generation",
        "model_device_type": "cpu",
        "model_dtype": "float32",
        "paged": True,
        "max_concurrent_requests": 128,
        "max_best_of": 3,
        "max_stop_sequences": 4,
        "max_input_tokens": 100,
        "max_total_tokens": 200,
        "validation_workers": 2,
        "max_client_batch_size": 4,
        "speculate": 0,
        "router": "text-generation-router",
        "version": info["version"],
        "sha": None,
        "docker_label": None,
        "quantization": None,
        "kv_cache_dtype": None,
        "max_batch_total_tokens": info["max_batch_total_tokens"],
        "linear_kernels": None,
        "forward_pass": None,
        "fallbacks": [],
        "encoders": [],
        "adapters": [],
        "reads_images": False,
    }


async def test_what_is_computed_in_a_slower_way_is_told(routers: RouterFactory):
    reasons = [
        "attention runs in plain torch, which is slow: PermissionError",
        "decoding runs without CUDA graphs: why",
    ]
    router = await routers(shard={"fallbacks": reasons})
    assert (await router.http.get("/info")).json()["fallbacks"] == reasons
    assert await router.metric("tgi_engine_fallbacks") == 2


async def test_models(router: Router):
    (model,) = (await router.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"]) == ("instant", "model")
    assert (await router.http.get("/v1/models/instant")).json() == model
    absent = await router.http.get("/v1/models/other/model")
    assert absent.status_code == 404
    assert "other/model" in absent.json()["error"]["message"]


async def test_metrics_count_what_happens(router: Router):
    length = router.say(TEXT)
    await router.post("/generate", inputs="Hello")
    await router.post("/generate", inputs="")
    assert await router.metric("tgi_request_count") == 2
    assert await router.metric("tgi_request_success") == 1
    assert await router.metric('tgi_request_failure{err="validation"}') == 1
    assert await router.metric("tgi_request_generated_tokens_sum") == length
    assert await router.metric("tgi_request_duration_count") == 1
    assert await router.metric('tgi_batch_inference_success{method="prefill"}') == 1
    response = await router.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_a_path_that_is_not_there(router: Router):
    response = await router.http.get("/nothing")
    assert response.status_code == 404
    assert response.json() == {"error": "GET /nothing: Not Found; /docs lists the routes", "error_type": "not_found"}


async def test_a_method_that_a_path_does_not_have(router: Router):
    for path, method, allowed in (
        ("/generate", "GET", "POST"),
        ("/info", "POST", "GET, HEAD"),
        ("/", "PUT", "GET, HEAD, POST"),
    ):
        response = await router.http.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == allowed
        assert response.json()["error_type"] == "not_found"


async def test_the_headers_alone_of_what_may_be_read(router: Router):
    for path in ("/", "/health", "/info", "/metrics", "/v1/models", "/version", "/openapi.json", "/docs"):
        headers, whole = [await router.http.request(method, path) for method in ("HEAD", "GET")]
        assert (headers.status_code, headers.content) == (200, b"")
        assert headers.headers.get("content-type") == whole.headers.get("content-type")
    assert (await router.http.head("/v1/models/absent")).status_code == 404
    assert (await router.http.head("/generate")).status_code == 405


async def test_a_context_that_is_too_long_in_the_words_that_clients_look_for(routers: RouterFactory):
    router = await routers(max_input_tokens=10, max_total_tokens=20)
    for inputs, parameters, told in (
        ("Rinse the rice. " * 5, {}, "`inputs` must have less than 11 tokens. Given: "),
        (
            "Rinse",
            {"max_new_tokens": 50},
            "`inputs` tokens + `max_new_tokens` must be <= 20. Given: 2 `inputs` tokens and 50",
        ),
    ):
        response = await router.post("/generate", inputs=inputs, parameters=parameters)
        assert response.status_code == 422
        assert response.json()["error"].startswith(f"Input validation error: {told}")
    long = [{"role": "user", "content": "Rinse the rice. " * 5}]
    for stream in (False, True):
        response = await router.post("/v1/chat/completions", messages=long, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert error["message"].startswith("This model's maximum context length is ")


async def test_names_of_the_model(routers: RouterFactory):
    router = await routers(served_model_name=["mine", "alias"], model_id="hub/model")
    assert [model["id"] for model in (await router.http.get("/v1/models")).json()["data"]] == ["mine", "alias"]
    assert (await router.http.get("/v1/models/alias")).json()["id"] == "alias"
    assert (await router.http.get("/v1/models/hub/model")).json()["error"]["code"] == "model_not_found"
    assert (await router.post("/v1/completions", prompt="Hello", max_tokens=1)).json()["model"] == "mine"
    assert (await router.http.get("/info")).json()["model_id"] == "hub/model"


async def test_versions(router: Router):
    version = (await router.http.get("/version")).json()["version"]
    told = Version((await router.http.get("/info")).json()["version"])
    assert told >= Version("3.3")
    assert version in str(told)


async def test_a_prompt_is_computed_again_without_a_prefix_cache(routers: RouterFactory):
    prompt = "Rinse the rice. Then boil it. " * 10
    for caching in (True, False):
        router = await routers(prefix_caching=caching)
        for _ in range(2):
            await router.post("/generate", inputs=prompt, parameters={"max_new_tokens": 1})
        cached = [request.cached_tokens > 0 for request in router.shard.received]
        assert cached == [False, caching]


async def test_without_parameters_it_samples_as_tgi_does(router: Router):
    await router.post("/generate", inputs="Hello")
    await router.post("/generate", inputs="Hello", parameters={})
    assert [request.sampling.do_sample for request in router.shard.received] == [True, False]


async def test_the_page_needs_nothing_from_elsewhere(router: Router):
    response = await router.http.get("/docs")
    page = response.text
    assert "default-src 'none'; script-src 'self'" in response.headers["content-security-policy"]
    assert "//" not in page.replace("<!doctype html>", "")
    for name in ("swagger-ui.css", "swagger-ui-bundle.js", "start.js"):
        assert f'"docs/{name}"' in page
        assert (await router.http.get(f"/docs/{name}")).status_code == 200
    for path in ("/openapi.json", "/api-doc/openapi.json"):
        assert (await router.http.get(path)).json()["openapi"] == "3.0.3"


async def test_an_api_key(routers: RouterFactory):
    router = await routers(api_key="secret")
    body = {"inputs": "Hello", "messages": HELLO, "tokens": [5]}
    for path in ("/generate", "/generate_stream", "/", "/tokenize", "/chat_tokenize", "/detokenize"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = await router.http.post(path, json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error_type"] == "unauthorized"
        allowed = await router.http.post(path, json=body, headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200
    for path in ("/health", "/info", "/metrics", "/v1/models"):
        assert (await router.http.get(path)).status_code == 200


async def test_browsers_of_other_origins(routers: RouterFactory):
    origin = {"origin": "http://page"}
    closed = await routers()
    assert "access-control-allow-origin" not in (await closed.http.get("/info", headers=origin)).headers
    opened = await routers(cors_allow_origin=["http://page"])
    allowed = await opened.http.post("/generate", json={"inputs": "Hello"}, headers=origin)
    assert allowed.headers["access-control-allow-origin"] == "http://page"
    other = await opened.http.post("/generate", json={"inputs": "Hello"}, headers={"origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in other.headers


async def test_prompts_are_not_logged(routers: RouterFactory, caplog: pytest.LogCaptureFixture):
    router = await routers()
    caplog.set_level("INFO")
    await router.post("/generate", inputs="a secret prompt")
    await router.post("/generate", inputs="a secret prompt", parameters={"temperature": 0})
    lines = [record for record in caplog.records if record.name.startswith("tgi_server.router")]
    assert len(lines) == 2
    assert "secret" not in caplog.text
    answered = vars(lines[0])
    for name in ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token"):
        assert str(answered[name]).endswith("ms")


async def test_no_series_is_named_by_a_client(router: Router):
    async def series() -> set[str]:
        lines = (await router.http.get("/metrics")).text.splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}

    async def odd_requests(number: int) -> None:
        headers = {"x-odd": f"{number}", "traceparent": f"00-{number:032x}-{number:016x}-01", "user-agent": f"{number}"}
        await router.http.post(f"/odd/{number}", headers=headers)
        await router.http.get(f"/v1/models/{number}", headers=headers)
        await router.http.request(f"ODD{number}", "/generate", headers=headers)
        await router.http.post("/generate", json={"inputs": "Hello", "parameters": {"top_k": -number}}, headers=headers)
        body = {"messages": HELLO, "model": f"odd-{number}", "cache_salt": f"{number}", "max_tokens": 1}
        assert (await router.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200

    await odd_requests(1)
    before = await series()
    for number in range(2, 20):
        await odd_requests(number)
    assert await series() == before


async def test_metrics_that_many_ask_for_are_written_for_all_of_them(router: Router, monkeypatch: pytest.MonkeyPatch):
    written: list[bytes] = []
    expose = Metrics.expose

    def counted(metrics: Metrics) -> bytes:
        written.append(expose(metrics))
        return written[-1]

    monkeypatch.setattr(Metrics, "expose", counted)
    answers = await asyncio.gather(*(router.http.get("/metrics") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(written) < 25
    before = await router.metric("tgi_request_success")
    for number in range(1, 6):
        await router.post("/generate", inputs="Hello", parameters={"max_new_tokens": 1})
        assert await router.metric("tgi_request_success") == before + number
