"""Requests that generate nothing: what is computed for them, and how they are answered."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

from shared.stubs import generate_pb2 as pb
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.encoding import json_response, to_json
from tgi_server.router.text.encoder import ServedEncoder, Values

# Bytes of a token that is embedded or ranked, and of a number that comes of it as an object; its characters in JSON.
_INPUT_BYTES, _VALUE_BYTES = 16, 24
_NUMBER_CHARACTERS = 12


def served_encoder(admission: Admission, task: str, model: str | None) -> ServedEncoder:
    """Returns the model that embeds or ranks. model: its name in the request. Raises NoSuchModel."""
    service = admission.service
    encoder = service.encoders.get(task, model, service.model.names if service.generates else ())
    admission.record.note_model(encoder.name)
    return encoder


async def encode(
    admission: Admission, encoder: ServedEncoder, inputs: Sequence[pb.EncodeInput], **options: Any
) -> Values:
    """Returns what the model computes for texts, whose memory is counted. options: of `ServedEncoder.values`.

    Raises Overloaded, PayloadTooLarge and Unhealthy.
    """
    admission.record.read_tokens = tokens = sum(len(each.ids) for each in inputs)
    columns = min(options.get("dimensions") or encoder.info.columns, encoder.info.columns)
    admission.lease.hold(_INPUT_BYTES * tokens + _VALUE_BYTES * len(inputs) * columns)
    async with admission.service.in_use():
        return await encoder.values(inputs, **options)


async def respond_with_values(admission: Admission, make: Callable[[], Any], *, size: int) -> Response:
    """Returns a response with what `make` returns, in a thread. size: numbers that it has."""
    service, record = admission.service, admission.record
    content = await service.text.threads.handle_text(_NUMBER_CHARACTERS * size, lambda: to_json(make()))
    headers = {
        "x-compute-type": service.model.compute_type,
        "x-total-time": f"{record.total_time * 1000:.0f}",
        "x-prompt-tokens": str(record.read_tokens),
    }
    return json_response(content, headers | record.headers)


async def respond_with_tokens(admission: Admission, content: Any, tokens: int) -> Response:
    """Returns the response to a request that only has the tokens of a text counted, or shown."""
    admission.record.read_tokens = tokens
    return await respond_with_values(admission, lambda: content, size=tokens)
