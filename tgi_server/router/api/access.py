"""Access control: with API keys, clients need one; without, requests from web pages of other sites are refused."""

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.addresses import is_ip_address
from tgi_server.router.api.encoding import error_response
from tgi_server.router.errors import Forbidden, RouterError, Unauthorized, UnsupportedMediaType
from tgi_server.router.settings import ApiKey

logger = logging.getLogger(__name__)

_TENANT, _KEY = "tenant", "key"
_ANY = "*"
# Chat templates may have confidential instructions.
_PRIVATE_PATHS = ("/v1/responses/", "/tokenizer_info")
# Content types that web pages may send to other sites without a CORS preflight, and that programs do not use. The third
# such type is allowed: it is curl's default.
_FOREIGN_TYPES = frozenset({"text/plain", "multipart/form-data"})


# Last labels that no public name has: those of container networks and Kubernetes (`tgi.models.svc`,
# `tgi.models.svc.cluster.local`), of clouds, and of home networks (RFC 6761, 6762, 8375; reserved by ICANN).
_PRIVATE = frozenset(
    {"corp", "home", "internal", "intranet", "lan", "local", "localdomain", "localhost", "svc", "test"}
)


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Rules for who may call.

    keys: API keys, one of which each POST needs; empty: none is needed. origins: origins of web pages that may call.
    hosts: names of the server, for requests without a key. only_here: True if the server listens on loopback only.
    secret: key of the hash that derives tenants' names from their API keys.
    """

    keys: Sequence[ApiKey] = ()
    origins: Collection[str] = ()
    hosts: Collection[str] = (_ANY,)
    only_here: bool = False
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


# Called with the error type of each request that is refused.
Refused = Callable[[str], None]


def tenant_of(request: Request) -> str:
    """Returns a name of the request's sender, a hash of its API key; empty if the server has at most one key."""
    tenant: str = request.scope["state"].get(_TENANT, "")
    return tenant


def key_of(request: Request) -> ApiKey | None:
    """Returns the request's API key; None if the server has no keys."""
    key: ApiKey | None = request.scope["state"].get(_KEY)
    return key


def cache_namespace(tenant: str, salt: str | None) -> str:
    """Returns the cache namespace of a tenant and salt: requests with the same one share cached prefixes."""
    if not tenant and salt is None:
        return ""
    return hashlib.sha256(f"{tenant}:{salt or ''}".encode()).hexdigest()


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer KEY` for every POST, for stored responses, and for the tokenizer's settings.

    Health, metrics and information about the model stay open, as in TGI.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules, refused: Refused) -> None:
        self._app = app
        self._refused = refused
        self._secret = rules.secret
        # Keys are compared by an unpredictable hash, so that the time reveals nothing about an almost correct key.
        several = len(rules.keys) > 1
        hashes = {self._hash(key.text.encode()): key for key in rules.keys}
        self._callers = {hashed: (hashed if several else "", key) for hashed, key in hashes.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"] == "POST" or scope["path"].startswith(_PRIVATE_PATHS)):
            caller = self._callers.get(self._hash(_api_key(scope)))
            if caller is None:
                error = Unauthorized("the API key is missing or wrong")
                await _refuse(error, self._refused, scope, receive, send)
                return
            scope["state"][_TENANT], scope["state"][_KEY] = caller
        await self._app(scope, receive, send)

    def _hash(self, key: bytes) -> str:
        return hashlib.blake2b(key, key=self._secret).hexdigest()


class ForeignPageMiddleware:
    """Refuses requests that a web page of another site could make a browser send to a server without API keys.

    These are a POST from another origin, which browsers name; a POST with a content type that needs no CORS preflight;
    and a request with a Host that is not the server's, which would let a page read the responses (DNS rebinding). A
    server on loopback checks the Host of every client, other servers only that of browsers: services may use any name.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules, refused: Refused) -> None:
        self._app = app
        self._refused = refused
        self._rules = rules
        self._last_own = ""  # the last name that was found to be the server's; most requests have the same

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # The first header of a name counts. For several look-ups, a dictionary is much faster than Starlette's
            # type.
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
            fault = self._foreign_host(headers)
            if fault is None and scope["method"] == "POST":
                fault = self._foreign_origin(headers) or _foreign_type(headers)
            if fault is not None:
                await _refuse(fault, self._refused, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _foreign_host(self, headers: Mapping[str, str]) -> RouterError | None:
        """Returns an error for a Host that could be a web site's name for this server (DNS rebinding); else None."""
        host = headers.get("host")
        if host is None or self._is_own(name := _hostname(host)):
            return None
        trusted = _is_private(name) or not _from_browser(headers) or self._allows(headers.get("origin"))
        if trusted and not self._rules.only_here:
            return None
        return Forbidden(
            f"the Host {name[:100]!r} is not a name of this server; add it to --allowed-hosts, or set --api-key"
        )

    def _is_own(self, name: str) -> bool:
        """Returns True for IP addresses, localhost, and names of the server."""
        if name == self._last_own:
            return True
        own = (
            name == "localhost"
            or name.endswith(".localhost")
            or is_ip_address(name)
            or any(host in (_ANY, name) or _covers(host, name) for host in self._rules.hosts)
        )
        if own:
            self._last_own = name
        return own

    def _allows(self, origin: str | None) -> bool:
        """Returns True for an origin whose pages may call."""
        return _ANY in self._rules.origins or origin in self._rules.origins

    def _foreign_origin(self, headers: Mapping[str, str]) -> RouterError | None:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if self._allows(origin):
            return None
        if site is not None:
            foreign = site not in ("same-origin", "none")
        else:
            foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        if not foreign:
            return None
        return Forbidden(
            f"pages of {(origin or 'another site')[:100]!r} may not call this server; --cors-allow-origin can allow it"
        )


async def _refuse(error: RouterError, refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    refused(error.error_type)
    who = (scope.get("client") or ("an unknown address",))[0]
    logger.warning("refused %s %s from %s: %s", scope["method"], scope["path"], who, error)
    await error_response(error, scope["path"], Headers(scope=scope))(scope, receive, send)


def _api_key(scope: Scope) -> bytes:
    """Returns the request's API key; empty if there is none. Anthropic's clients send it as `x-api-key`."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    found: bytes = key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return found.strip()


def _foreign_type(headers: Mapping[str, str]) -> RouterError | None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _FOREIGN_TYPES:
        return None
    return UnsupportedMediaType(f"the content type of a request must be application/json, not {media_type}")


def _hostname(host: str) -> str:
    """Returns the name or address of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _from_browser(headers: Mapping[str, str]) -> bool:
    """Returns True if a browser sent the request, by headers that web pages cannot suppress and few programs send.

    Browsers always send `Accept-Language`, send `Origin` with each POST, and `Sec-Fetch-Site` to hosts that they trust.
    The fetch of Node.js sends `Accept-Language`, too, but also `Sec-Fetch-Mode`, which web pages cannot set.
    """
    if "origin" in headers or "sec-fetch-site" in headers:
        return True
    return "accept-language" in headers and "sec-fetch-mode" not in headers


def _covers(pattern: str, name: str) -> bool:
    """Returns True if the pattern is `*.DOMAIN` and the name is below that domain."""
    return pattern.startswith("*.") and name.endswith(pattern[1:])


def _is_private(name: str) -> bool:
    """Returns True for a name that a public web site cannot have: without a dot, or in a private domain."""
    return "." not in name or name.rpartition(".")[2] in _PRIVATE or name.endswith(".home.arpa")
