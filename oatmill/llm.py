"""`LLM`: a model within a Python program, with the options and the results of the server's API."""

import asyncio
import json
import logging
import weakref
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import oatmill
from oatmill.pipeline import Pipeline
from shared.settings import InvalidSettings, check_settings
from tgi_server.launcher.errors import LauncherError
from tgi_server.launcher.settings import LauncherSettings
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.router.errors import ContextOverflow, InvalidRequest, NoSuchModel, NotSupported, RouterError
from tgi_server.router.settings import PipelineSettings, RequestSettings, ServingSettings
from tgi_server.shard.settings import ModelSettings

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
# What loading, preparing and scheduling read; the launcher's other settings are of servers and their processes.
_SETTINGS = ({"model_id"} | PipelineSettings.model_fields.keys() | ModelSettings.model_fields.keys()) - (
    ServingSettings.model_fields.keys() - RequestSettings.model_fields.keys()
)
_RESERVED = frozenset({"input", "messages", "prompt", "stream", "stream_options", "encoding_format"})
# Texts that are embedded in one request.
_TEXTS = 64


class LLMError(RuntimeError):
    """The model cannot be loaded, or could not answer."""


class InvalidInput(LLMError, ValueError):
    """A setting, an option, a prompt or a message is wrong."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens. cached_tokens: tokens of the prompt that an earlier prompt had in common with it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer. tool_calls and logprobs are as in the API; `logprobs` is None unless requested."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    index: int = 0

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the next turn of a conversation."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text} | calls


@dataclass(frozen=True, slots=True)
class Result(Choice):
    """The answer to a prompt, or a piece of it as it comes. choices: all answers, with the option `n`."""

    prompt_token_ids: list[int] = field(default_factory=list)
    usage: Usage = Usage(0, 0, 0)
    choices: list[Choice] = field(default_factory=list, repr=False)


class LLM:
    """A model in this process, until it is closed. Any thread may call it, also while an event loop runs."""

    def __init__(self, model: str | PathLike[str] | None = None, **settings: Any) -> None:
        """model: an id of the hub, a folder or a GGUF file; None: the bundled demo model. settings: flags of the
        launcher (docs/reference/flags.md), such as `max_total_tokens`. Environment variables are not read.

        Raises InvalidInput for a wrong setting, and LLMError for a model that cannot be loaded.
        """
        if not oatmill.THREADS_SLEEP:
            logger.warning(
                "torch was imported before oatmill, so its idle threads keep cores busy: beside other programs loading "
                "may take ten times as long. Import oatmill first, or set GOMP_SPINCOUNT=10000"
            )
        try:
            self._pipeline = Pipeline(_settings(model, settings))
        except InvalidSettings as error:
            raise InvalidInput(str(error)) from None
        except (LauncherError, ModelUnavailable, RouterError) as error:
            raise LLMError(str(error) or "the model could not be fetched") from error
        except Exception as error:
            if type(error).__module__.startswith("tgi_server."):  # such as the engine's, which is not imported here
                raise LLMError(str(error)) from error
            raise
        self._close = weakref.finalize(self, self._pipeline.close)

    def close(self) -> None:
        """Stops generating, and frees the model's memory. Called automatically at the end of the program."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, prompts: Any, *, schema: Any = None, progress: bool = True, **options: Any) -> Any:
        """Returns a list of Results in the order of the prompts; for a single prompt, one Result.

        prompts: a text, a list of token ids, or a list of such prompts. schema: a JSON schema, or a pydantic class,
        that the answers match. progress: True shows a progress bar for several prompts. options: fields of requests to
        /v1/completions (docs/reference/options.md).
        """
        several = not isinstance(prompts, str) and not _are_ids(prompts)
        bodies = [_body(options, schema, prompt=each) for each in (prompts if several else [prompts])]
        results = self._all(_COMPLETIONS, bodies, _result, progress=progress and several)
        return results if several else results[0]

    def chat(
        self, messages: Any, *, tools: Any = None, schema: Any = None, progress: bool = True, **options: Any
    ) -> Any:
        """Returns the Result of a conversation, which is a list of messages; for a list of conversations, a list.

        tools: functions that the model may call, as in OpenAI's API. schema, progress: see `generate`. options: fields
        of requests to /v1/chat/completions.
        """
        several = not (messages and isinstance(messages[0], Mapping))
        given = messages if several else [messages]
        bodies = [_body(options, schema, messages=each, tools=tools) for each in given]
        results = self._all(_CHAT, bodies, _result, progress=progress and several)
        return results if several else results[0]

    def stream(self, prompt: Any, *, tools: Any = None, schema: Any = None, **options: Any) -> Iterator[Result]:
        """Yields the pieces of an answer as they are generated. The last piece has the finish reason.

        prompt: a text, a list of token ids, or a conversation. Each piece has the usage so far.
        """
        is_prompt = isinstance(prompt, str) or _are_ids(prompt)
        path, asked = (_COMPLETIONS, {"prompt": prompt}) if is_prompt else (_CHAT, {"messages": prompt, "tools": tools})
        usage = {"include_usage": True, "continuous_usage_stats": True}
        body = _body(options, schema, stream=True, stream_options=usage, **asked)
        pieces: SimpleQueue[bytes | None] = SimpleQueue()
        running = self._pipeline.submit(self._pipeline.stream(path, _encoded(body), pieces.put))
        running.add_done_callback(lambda _: pieces.put(None))
        try:
            while (data := pieces.get()) is not None:
                for line in data.splitlines():
                    event = json.loads(line[5:]) if line.startswith(b"data:") and line[6:] != b"[DONE]" else {}
                    if "error" in event:
                        raise LLMError(event["error"]["message"])
                    if event.get("choices"):
                        yield _result(event)
            _value(running)
        finally:
            running.cancel()

    def embed(self, texts: Any, *, progress: bool = True, **options: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Returns the embeddings of texts as [texts, columns]; of a single text as [columns].

        options: fields of requests to /v1/embeddings.
        """
        import numpy as np

        several = not isinstance(texts, str)
        given = list(texts) if several else [texts]
        parts = [given[start : start + _TEXTS] for start in range(0, len(given), _TEXTS)]
        bodies = [_body(options, None, input=part, encoding_format="base64") for part in parts]
        values = self._all(_EMBEDDINGS, bodies, _rows, progress=progress and several)
        rows = np.frombuffer(b"".join(values), np.float32).reshape(len(given), -1 if given else 0)
        return rows if several else rows[0]

    def _all(self, path: str, bodies: Sequence[Any], convert: Callable[[Any], Any], *, progress: bool) -> list[Any]:
        """Returns the converted responses to some requests, in their order."""
        from tqdm.auto import tqdm

        with tqdm(total=len(bodies), disable=None if progress else True) as bar:
            return _value(self._pipeline.submit(self._answers(path, bodies, convert, bar.update)))

    async def _answers(
        self, path: str, bodies: Sequence[Any], convert: Callable[[Any], Any], answered: Callable[[], object]
    ) -> list[Any]:
        results: list[Any] = [None] * len(bodies)
        numbers = iter(range(len(bodies)))

        async def work() -> None:
            for number in numbers:  # the next one
                try:
                    results[number] = convert(json.loads(await self._pipeline.ask(path, _encoded(bodies[number]))))
                except RouterError as error:
                    raise _explained(error, f"number {number}: " if len(bodies) > 1 else "") from error
                answered()

        workers = [asyncio.ensure_future(work()) for _ in bodies[: self._pipeline.places]]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        return results


def _settings(model: str | PathLike[str] | None, given: Mapping[str, Any]) -> LauncherSettings:
    """Returns the settings of a model. Raises InvalidSettings."""
    values = dict(given)
    if model is not None:
        values["model_id"] = str(Path(model).expanduser()) if Path(model).expanduser().exists() else fspath(model)
    settings = check_settings(LauncherSettings, values)
    if others := sorted(given.keys() - _SETTINGS):
        raise InvalidSettings(f"`{others[0]}` is a setting of servers and their processes; use `oatmill serve` for it")
    if "model_id" not in values and settings.first_encoder:
        return settings.model_copy(update={"model_id": settings.first_encoder})
    return settings


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], int)


def _body(options: Mapping[str, Any], schema: Any, **asked: Any) -> dict[str, Any]:
    """Returns the body of a request. Raises InvalidInput for an option that stands for something else."""
    if taken := sorted(_RESERVED & options.keys()):
        raise InvalidInput(f"`{taken[0]}` is not an option here")
    body = {**options, **{name: value for name, value in asked.items() if value is not None}}
    if "input" not in body:
        body["return_token_ids"] = True
    if schema is not None:
        if "response_format" in options:
            raise InvalidInput("`schema` and `response_format` cannot be combined; give one")
        read = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": read}}
    return body


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _result(answer: Mapping[str, Any]) -> Result:
    choices = [_choice(each) for each in answer["choices"]]
    first, usage = choices[0], answer["usage"]
    prompt = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids") or []
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Result(
        **{name: getattr(first, name) for name in Choice.__slots__},
        prompt_token_ids=prompt,
        usage=Usage(usage["prompt_tokens"], usage["completion_tokens"], cached),
        choices=choices,
    )


def _choice(choice: Mapping[str, Any]) -> Choice:
    """choice: a choice of a chat, of a chunk of a chat, or of a completion."""
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return Choice(
        message.get("content") or "",
        choice["token_ids"],
        choice["finish_reason"],
        message.get("reasoning_content") or "",
        message.get("tool_calls") or [],
        choice["logprobs"],
        choice["index"],
    )


def _rows(answer: Mapping[str, Any]) -> bytes:
    return b"".join(b64decode(each["embedding"]) for each in answer["data"])


def _value(running: "Future[Any]") -> Any:
    """Returns the result of a call in the pipeline, which is cancelled with its caller. Raises LLMError."""
    try:
        return running.result()
    except CancelledError:
        raise LLMError("the LLM was closed before its answer was complete") from None
    except RouterError as error:
        raise _explained(error) from error
    except BaseException:
        running.cancel()
        raise


def _explained(error: RouterError, place: str = "") -> LLMError:
    """Returns the error for the caller. place: the beginning of the message: which of several prompts it is about."""
    kind = InvalidInput if isinstance(error, InvalidRequest | NoSuchModel | NotSupported) else LLMError
    return kind(f"{place}{error.openai_message if isinstance(error, ContextOverflow) else error}")
