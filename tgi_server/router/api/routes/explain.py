"""/v1/explain: explains why the prefix cache did not have the whole prompt of a request."""

from starlette.responses import Response
from starlette.routing import Route

from tgi_server.router.api.access import cache_namespace
from tgi_server.router.api.admission import Admission, PostRoutes
from tgi_server.router.api.documentation import OPENAI_ERRORS
from tgi_server.router.api.routes.openai import explanation_of
from tgi_server.router.api.values import respond_with_tokens
from tgi_server.router.errors import NoSuchRequest
from tgi_server.router.schemas.explain import ExplainRequest, ExplainResponse
from tgi_server.router.service import Service


def explain_routes(service: Service) -> list[Route]:
    routes = PostRoutes(service, OPENAI_ERRORS)
    summary = "Explain why the prefix cache did not have the whole prompt of an earlier request"
    routes.receive("/v1/explain", summary, ExplainRequest, _explain, ExplainResponse)
    return routes


async def _explain(admission: Admission, body: ExplainRequest) -> Response:
    """Explains a request to clients with the same API key and salt. Raises NoSuchRequest."""
    namespace = cache_namespace(admission.tenant, body.cache_salt)
    miss = admission.service.explained.get(namespace, body.request_id)
    if miss is None:
        raise NoSuchRequest(body.request_id)
    response = ExplainResponse(
        request_id=body.request_id,
        prompt_tokens=miss.prompt_tokens,
        cached_tokens=miss.found_tokens,
        prefix=explanation_of(miss),
    )
    return await respond_with_tokens(admission, response, 0)
