"""Other services' routes: `/` (Hugging Face endpoints), /invocations (SageMaker), /vertex (Vertex AI)."""

from dataclasses import replace

from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import GENERATION_ERRORS
from tgi_server.router.api.generation import RequestGeneration
from tgi_server.router.api.routes.chat import answer_chat
from tgi_server.router.api.routes.chat_prompt import Asked, prepare_chat, requested_chat
from tgi_server.router.api.routes.completions import complete
from tgi_server.router.api.routes.generate import generate_whole, prepare_tgi, stream_generation, with_logprobs
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.compatibility import (
    GenerateVertexInstance,
    SagemakerRequest,
    VertexRequest,
    VertexResponse,
)
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import (
    CompatGenerateRequest,
    GenerateParameters,
    StreamResponse,
)
from tgi_server.router.service import Service
from tgi_server.router.submission import PreparedRequest


def compatibility_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, GENERATION_ERRORS)
    summary = "Generate text, in one piece or as server-sent events"
    routes.receive("/", summary, CompatGenerateRequest, _generate, "GeneratedList", StreamResponse)
    summary = "Generate text as SageMaker asks for it"
    routes.receive("/invocations", summary, SagemakerRequest, _invoke, "SagemakerResponse", "SagemakerStreamResponse")
    routes.receive("/vertex", "Generate texts as Vertex AI asks for them", VertexRequest, _predict, VertexResponse)
    return routes


async def _generate(admission: Admission, request: CompatGenerateRequest) -> Response:
    if request.stream:
        return await stream_generation(admission, request)
    return await generate_whole(admission, request, in_list=True)


async def _invoke(admission: Admission, body: SagemakerRequest) -> Response:
    match body.root:
        case CompatGenerateRequest() as request:
            return await _generate(admission, request)
        case ChatRequest() as request:
            return await answer_chat(admission, request)
        case CompletionRequest() as request:
            return await complete(admission, request)


async def _predict(admission: Admission, request: VertexRequest) -> Response:
    instances = request.instances
    admission.reserve(len(instances) - 1)
    sequences: list[PreparedRequest] = []
    for index, instance in enumerate(instances):
        try:
            sequences.append(await _prepare(admission, instance.root))
        except InvalidRequest as error:
            error.move_below(f"instances[{index}]")
            raise
    generation = RequestGeneration(admission)
    streams = await generation.collect(sequences)
    response = VertexResponse(predictions=[stream.output.text for stream in streams])
    characters = sum(sequence.characters for sequence in sequences)
    return generation.respond(response, characters=characters, streams=streams)


async def _prepare(admission: Admission, instance: GenerateVertexInstance | ChatRequest) -> PreparedRequest:
    """Returns the request for a prediction, which is a text, with its stop sequence. Raises InvalidRequest."""
    if isinstance(instance, ChatRequest):

        def requested() -> Asked:
            conversation, options = requested_chat(admission, instance)
            if conversation.use.tools or options.n > 1:
                raise InvalidRequest("a prediction is one text: it has no calls of `tools`, and `n` is 1")
            return conversation, options

        _, prepared = await prepare_chat(admission, Dialect.CHAT, requested)
    else:
        prepared = await prepare_tgi(admission, instance.inputs, instance.parameters or GenerateParameters())
    return with_logprobs(replace(prepared, options=replace(prepared.options, include_stop=True)), logprobs=False)
