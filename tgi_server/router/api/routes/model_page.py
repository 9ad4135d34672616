"""Pages of the list of models, as Anthropic's clients ask for them."""

from collections.abc import Mapping, Sequence

from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.info import AnthropicModel, AnthropicModels

_LIMIT, _MOST = 20, 1000


def models_page(models: Sequence[AnthropicModel], query: Mapping[str, str]) -> AnthropicModels:
    """Returns the models after `after_id`, or before `before_id`; at most `limit`. Raises InvalidRequest."""
    limit = _limit(query.get("limit"))
    if (after := query.get("after_id")) is not None:
        models = models[_index(models, after, "after_id") + 1 :]
    before = query.get("before_id")
    if before is not None:
        models = models[: _index(models, before, "before_id")]
    page = models[-limit:] if before is not None else models[:limit]
    return AnthropicModels(
        data=list(page),
        has_more=len(page) < len(models),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _limit(text: str | None) -> int:
    if text is None:
        return _LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= _MOST):
        raise InvalidRequest.at("limit", f"is {text[:20]!r}; it must be 1 to {_MOST}")
    return int(text)


def _index(models: Sequence[AnthropicModel], name: str, parameter: str) -> int:
    found = next((index for index, model in enumerate(models) if model.id == name), None)
    if found is None:
        raise InvalidRequest.at(parameter, f"is {name[:100]!r}, which is not a model of this server")
    return found
