"""Replicas of the text-generation server behind Ray Serve, on any Ray cluster.

    python deploy/ray_serve.py --gpus-per-replica 1 --max-replicas 8 -- --model-id OWNER/NAME --quantize int8

Every replica runs `text-generation-launcher`, which has to be on the PATH of every node; what follows `--` goes to it.
Ray's own Python needs nothing but `ray[serve]`: what this script imports of the project, whose clone it runs from,
reaches the nodes with it. The variable API_KEY of this command reaches the replicas, in no command line and no log.

    client --HTTP--> Ray's proxy -> Front -> Server (one for each replica) --HTTP on loopback--> launcher's router
"""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import ray
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shared.addresses
import shared.logging
import shared.prefix_affinity
import shared.processes
from shared.addresses import free_port, is_loopback
from shared.prefix_affinity import PrefixAffinity
from shared.processes import die_with_parent
from tgi_server.router import errors

for module in (shared.addresses, shared.logging, shared.prefix_affinity, shared.processes, errors):
    ray.cloudpickle.register_pickle_by_value(module)

logger = logging.getLogger("ray.serve")

POLL_SECONDS = 0.1
# More than the server's own /health may take.
HEALTH_SECONDS = 15.0
LAST_WORDS_SECONDS = 3.0
REPLICA_DIED = "the replica that had the request died"
RETRY_SECONDS = 60.0
# The replica with most of a prompt's beginning may have so many more requests than the least busy one: it has less to
# compute.
KNOWN_PREFIX_BOUND = 4
# Statuses of the server whose shards fail, be it once or for good.
UNHEALTHY = frozenset({424, 503})
HOP_BY_HOP = frozenset({"connection", "content-length", "keep-alive", "te", "trailer", "transfer-encoding"})
# Headers of responses that Ray's proxy adds by itself.
PROXY = frozenset({"date", "server"})


class Options(BaseModel):
    """Runs replicas of the text-generation server behind Ray Serve. What follows -- goes to their launchers."""

    model_config = ConfigDict(extra="forbid")

    address: str | None = Field(
        None, description="Ray cluster, such as auto or HOST:6379; default: one of its own, here"
    )
    host: str = Field("0.0.0.0", description="address that Ray's proxies listen on")
    port: int = Field(8080, gt=0, lt=65536, description="their port")
    cpus_per_replica: float = Field(1, ge=0, description="CPUs that Ray sets aside for a replica")
    gpus_per_replica: float = Field(0, ge=0, description="GPUs of a replica; from 2 on, so many shards")
    min_replicas: int = Field(1, ge=1, description="replicas that there always are")
    max_replicas: int = Field(4, ge=1, description="replicas that there are under load")
    target_requests: float = Field(
        32, gt=0, description="requests for each replica, running and waiting, from which more replicas are started"
    )
    max_requests: int = Field(128, gt=0, description="requests that a replica computes at a time; more wait")
    max_waiting: int = Field(1024, gt=0, description="requests that wait for a replica; more get status 429")
    payload_limit: int = Field(2_000_000, gt=0, description="bytes of a request's body; larger ones get status 413")
    client_timeout: float = Field(75, gt=0, description="seconds in which a request's body has to have come")
    upscale_delay: float = Field(30, ge=0, description="seconds of load after which a replica is added")
    downscale_delay: float = Field(900, ge=0, description="seconds of quiet after which a replica is ended")
    start_timeout: float = Field(3600, gt=0, description="seconds for fetching and loading the model")
    drain_timeout: float = Field(90, ge=0, description="seconds for running requests when a replica is ended")
    launcher: str = Field("text-generation-launcher", description="the server's command, on every node")
    launcher_flags: list[str] = []
    api_key: SecretStr | None = None
    detach: bool = Field(False, description="leave the replicas running on the cluster, and return")

    @model_validator(mode="after")
    def _consistent(self) -> "Options":
        if self.max_replicas < self.min_replicas:
            raise ValueError("--max-replicas is less than --min-replicas")
        if self.gpus_per_replica > 1 and self.gpus_per_replica % 1:
            raise ValueError("--gpus-per-replica: a share of a GPU, or whole ones")
        if self.detach and self.address is None:
            raise ValueError("--detach needs --address: a cluster that stays")
        if any(flag.partition("=")[0] == "--api-key" for flag in self.launcher_flags):
            raise ValueError("--api-key can be read by every user of a node; set the variable API_KEY instead")
        if self.api_key is not None and not self.api_key.get_secret_value().strip():
            raise ValueError("API_KEY is set, but empty; give it a value, or unset it to serve without a key")
        return self

    def command(self, port: int) -> list[str]:
        """Returns the launcher's. It takes in all that Ray sends it, so what waits, waits in front of the replicas.

        It listens on loopback, where it would know no names but localhost; its clients call it by the proxies' names.
        """
        shards = int(self.gpus_per_replica)
        return [
            *(self.launcher, f"--max-concurrent-requests={self.max_requests}"),
            *((f"--num-shard={shards}",) if shards > 1 else ()),
            f"--graceful-termination-timeout={self.drain_timeout}",
            *(("--allowed-hosts=*",) if not is_loopback(self.host) else ()),
            *self.launcher_flags,
            *("--hostname=127.0.0.1", f"--port={port}", "--prometheus-port=0", f"--payload-limit={self.payload_limit}"),
        ]

    def environment(self) -> dict[str, str]:
        """Returns the launcher's variables: this process's, and the key of the one that deployed it.

        Where the home folder is read-only, Triton gets another place for its kernels.
        """
        environment = {name: value for name, value in os.environ.items() if name != "API_KEY"}
        if self.api_key is not None:
            environment["API_KEY"] = self.api_key.get_secret_value()
        if not os.access(os.path.expanduser("~"), os.W_OK):
            environment.setdefault("TRITON_HOME", tempfile.mkdtemp(prefix="oatmill-triton-"))
        return environment


class Call(BaseModel):
    """A client's request. path: with its query. No log shows its headers and its body."""

    method: str
    path: str = Field(repr=False)
    headers: list[tuple[str, str]] = Field(repr=False)
    body: bytes = Field(b"", repr=False)

    @classmethod
    def of(cls, request: Request) -> "Call":
        """Returns the request without its body."""
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        return cls(method=request.method, path=path, headers=headers)


class TooSlow(errors.RouterError):
    """The request did not come in time."""

    status = 408
    error_type = "timeout"


async def read_body(request: Request, limit: int) -> bytes:
    """Returns the request's body, or a little more than `limit` bytes of it, which the server refuses."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk[: limit + 1 - len(body)]
        if len(body) > limit:
            break
    return bytes(body)


class Part(BaseModel):
    """A part of a replica's response to a call: `accepted`, then `head`, then any number of `body`.

    away: nothing was sent to its server, which is gone. broken: the server failed while it had the request.
    """

    kind: Literal["accepted", "head", "body", "away", "broken"]
    status: int = 0
    headers: list[tuple[str, str]] = []
    data: bytes = b""


class Server:
    """A replica: a launcher, and the way to it. It lives as long as the launcher does."""

    async def __init__(self, options: Options) -> None:
        """Returns once the server is healthy. Raises RuntimeError when it cannot be started."""
        self._options = options
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ill = False
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        # A connection for each request: what cannot be connected has not been sent.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            read_bufsize=2**20,
        )
        self._process = await self._start(options.command(port))
        await self._until_ready()
        self._watch = asyncio.create_task(self._end_with_the_server())

    async def forward(self, call: Call) -> AsyncIterator[Part]:
        self._calls += 1
        self._idle.clear()
        try:
            if not await self._serves():
                yield Part(kind="away")
                return
            yield Part(kind="accepted")
            async for part in self._ask(call):
                yield part
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def check_health(self) -> None:
        """Raises RuntimeError when the server is ill; Ray then ends the replica and starts another one."""
        if not await self._is_healthy():
            raise RuntimeError(f"the server at {self._url} is not healthy")

    async def __del__(self) -> None:
        self._watch.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()

    async def _start(self, command: list[str]) -> asyncio.subprocess.Process:
        program = shutil.which(command[0])
        if program is None:
            raise RuntimeError(f"there is no {command[0]} on the PATH of {socket.gethostname()}; see --launcher")
        logger.info("starting %s", " ".join(command))
        return await asyncio.create_subprocess_exec(
            program,
            *command[1:],
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
            env=self._options.environment(),
        )

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + self._options.start_timeout
        while not await self._is_healthy():
            if self._process.returncode is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}; its last line says why")
            if time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the server was not ready after {self._options.start_timeout} s")
            await asyncio.sleep(POLL_SECONDS)

    async def _serves(self) -> bool:
        """Returns False when the server has ended. While it is ill, callers wait until it recovers or ends."""
        while self._ill and self._process.returncode is None:
            self._ill = not await self._is_healthy()
            await asyncio.sleep(POLL_SECONDS)
        return self._process.returncode is None

    async def _is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self._http.get(f"{self._url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def _ask(self, call: Call) -> AsyncIterator[Part]:
        try:
            async with self._http.request(
                call.method, self._url + call.path, headers=call.headers, data=call.body, allow_redirects=False
            ) as response:
                if response.status in UNHEALTHY and call.method == "POST" and not await self._is_healthy():
                    self._ill = True
                    yield Part(kind="broken")
                    return
                dropped = HOP_BY_HOP | PROXY
                headers = [(name, value) for name, value in response.headers.items() if name.lower() not in dropped]
                yield Part(kind="head", status=response.status, headers=headers)
                async for data in response.content.iter_any():
                    yield Part(kind="body", data=data)
        except aiohttp.ClientConnectorError:
            yield Part(kind="away")
        except (aiohttp.ClientError, OSError):
            self._ill = True
            yield Part(kind="broken")

    async def _end_with_the_server(self) -> None:
        """Ends this process, for a replica whose process has ended is replaced at once, and is sent nothing more."""
        status = await self._process.wait()
        logger.error("the server ended with %s; this replica ends", status)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), LAST_WORDS_SECONDS)
        os._exit(1)


class PrefixRouter(RequestRouter):
    """Chooses the replica that was sent most of a request's beginning before, unless that one is much busier.

    Others get what they do not know by load.
    """

    def initialize_state(self) -> None:
        self._affinity = PrefixAffinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns ranks of replicas; the least busy one of the first rank gets the request if it has room for it."""
        known = self._affinity.known(_prompt(pending_request)) if pending_request is not None else {}
        loads = {each: self.replica_queue_len_cache.get(each.replica_id) or 0 for each in candidate_replicas}
        most = min(loads.values(), default=0) + KNOWN_PREFIX_BOUND
        ranks: dict[int, list[RunningReplica]] = {}
        for replica, load in loads.items():
            length = known.get(str(replica.replica_id), 0)
            ranks.setdefault(length if load <= most else -1, []).append(replica)
        return [ranks[length] for length in sorted(ranks, reverse=True)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._affinity.sent(_prompt(pending_request), str(replica_id))


def _prompt(request: PendingRequest) -> bytes:
    """Returns the body of a call, which begins as an earlier one does if its prompt does."""
    return next((each.body for each in request.args if isinstance(each, Call)), b"")


class Front:
    """Passes requests to replicas. A request that a replica has not begun when it dies is given to another one.

    A request that a server had when it died is sent once more if nothing of its answer was passed on yet: the second
    server that dies of it is the last one.
    """

    def __init__(self, server: DeploymentHandle, payload_limit: int, client_timeout: float) -> None:
        """payload_limit: bytes of a request's body. client_timeout: seconds in which it has to have come."""
        self._server = server.options(stream=True)
        self._payload_limit = payload_limit
        self._client_timeout = client_timeout

    async def __call__(self, request: Request) -> Response:
        call = Call.of(request)
        try:
            async with asyncio.timeout(self._client_timeout):
                call.body = await read_body(request, self._payload_limit)
        except TimeoutError:
            return _error(
                TooSlow(f"the request took more than {self._client_timeout:g} s to come (--client-timeout)"), call
            )
        deadline = time.monotonic() + RETRY_SECONDS
        losses = 0
        while losses < 2 and time.monotonic() < deadline:
            try:
                parts = self._server.forward.remote(call)
                head = await _head(parts)
            except BackPressureError:
                return _error(errors.Overloaded("too many requests wait for a replica"), call, {"retry-after": "1"})
            if head.kind == "head":
                response = StreamingResponse(_body(parts, call), status_code=head.status)
                response.raw_headers = [(name.lower().encode(), value.encode()) for name, value in head.headers]
                return response
            losses += head.kind == "broken"
            await asyncio.sleep(POLL_SECONDS)
        return _error(errors.GenerationFailed(REPLICA_DIED), call)


async def _head(parts: Any) -> Part:
    """Returns the first part that tells the outcome: `head`, `away` or `broken`."""
    accepted = False
    try:
        async for part in parts:
            if part.kind != "accepted":
                return part
            accepted = True
    except (ActorDiedError, ActorUnavailableError):
        pass
    return Part(kind="broken" if accepted else "away")


async def _body(parts: Any, call: Call) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            if part.kind == "broken":
                yield _cut(call)
                return
            yield part.data
    except (ActorDiedError, ActorUnavailableError):
        yield _cut(call)
    finally:
        parts.cancel()


def _cut(call: Call) -> bytes:
    """Returns the last event of a stream that broke off."""
    return b"data:" + _error(errors.GenerationFailed(REPLICA_DIED), call).body + b"\n\n"


def _error(error: errors.RouterError, call: Call, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(errors.error_body(error, call.path), errors.shown_status(error, call.path), headers)


def application(options: Options) -> serve.Application:
    """Returns the application for `serve.run`."""
    server = serve.deployment(
        name="server",
        ray_actor_options={"num_cpus": options.cpus_per_replica, "num_gpus": options.gpus_per_replica},
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests,
            "upscale_delay_s": options.upscale_delay,
            "downscale_delay_s": options.downscale_delay,
        },
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        max_ongoing_requests=options.max_requests,
        max_queued_requests=options.max_waiting,
        health_check_period_s=5,
        health_check_timeout_s=HEALTH_SECONDS + 5,
        graceful_shutdown_timeout_s=options.drain_timeout + 20,
        max_constructor_retry_count=3,
    )(Server)
    front = serve.deployment(
        name="front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=options.max_waiting + options.max_replicas * options.max_requests,
    )(Front)
    return front.bind(server.bind(options), options.payload_limit, options.client_timeout)


def read_options(arguments: list[str]) -> Options:
    """Returns the options of a command line. Raises SystemExit(2) after one line for each mistake.

    Not by `shared.settings`: it needs pydantic-settings, which does not come with `ray[serve]`.
    """
    own, flags = arguments, []
    if "--" in arguments:
        end = arguments.index("--")
        own, flags = arguments[:end], arguments[end + 1 :]
    parser = argparse.ArgumentParser(description=Options.__doc__, allow_abbrev=False)
    for name, field in Options.model_fields.items():
        if name in ("launcher_flags", "api_key"):
            continue
        flag, text = f"--{name.replace('_', '-')}", (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            shown = "" if field.default is None else f" (default: {field.default})"
            parser.add_argument(flag, metavar="", default=field.default, help=text + shown)
    try:
        return Options(**vars(parser.parse_args(own)), launcher_flags=flags, api_key=os.environ.get("API_KEY"))
    except ValidationError as error:
        for detail in error.errors():
            name = "--" + str(detail["loc"][0]).replace("_", "-") + ": " if detail["loc"] else ""
            print(f"ray_serve.py: {name}{detail['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    options = read_options(sys.argv[1:])
    if options.address is None:
        ray.init(address="local", include_dashboard=False)
    else:
        ray.init(address=options.address)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # not before: Ray sets a handler of its own
    serve.start(proxy_location="EveryNode", http_options={"host": options.host, "port": options.port})
    try:
        serve.run(application(options), name="oatmill", route_prefix="/")
        print(f"ready on http://{options.host}:{options.port}", flush=True)
        if options.detach:
            return
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        if not options.detach:
            serve.shutdown()
    print("stopped", flush=True)


if __name__ == "__main__":
    main()
