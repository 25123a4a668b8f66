"""An asynchronous client over any number of OpenAI-protocol endpoints (vLLM and others).

What a request can meet is told apart, because each asks for something else:

  the endpoint is gone, cuts the answer, is slow   it is set aside and probed; the request goes to another one
  429, 503                                         the endpoint rests as long as it says
  other HTTP errors, a body that is no answer      RequestError: an attempt of this request
  no endpoint answers for `patience_s`             NoEndpoint

A request that was on its way when its endpoint went down is sent again at most `LOSSES_MAX` times: it may be
what ends them. Source: DESIGN rule 6, 4; spec/faults.md V1, V5, R6.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError
from pydantic import BaseModel, ConfigDict, Field

from pipeline.caption.completion import BodyError, Completion, Meter, read_body
from pipeline.stage import one_line
from schemas.errors import StopRun
from schemas.strict_json import StrictJsonError, loads

LOSSES_MAX = 3
BODY_BYTES_MAX = 4 << 20  # a reply of 2,000 tokens takes 10 KB; more than this is no reply
CONNECT_S = 5.0
FIRST_S = 15.0
"""Patience before anything has answered at all: an address that is wrong is told soon."""
PROBE_S = (0.5, 15.0)
"""First and longest pause between probes of an endpoint that is set aside; it doubles in between."""
REST_S = (1.0, 60.0)
"""Shortest and longest rest of an endpoint that is overloaded, whatever it asks for."""
LOOK_S = 0.2
OVERLOADED = (429, 503)


class EndpointError(StopRun):
    """An endpoint that cannot be used at all: its address, its model or its key is wrong."""


class NoEndpoint(StopRun):
    """No endpoint answered for as long as we are told to wait."""


class RequestError(Exception):
    """A request that got no answer, by its own fault or its engine's.

    kind: one word: refused (HTTP 4xx), engine (5xx), lost, timeout, overload, model, or what is wrong with
    the body.
    status: of HTTP, or 0. meter: what it took.
    """

    def __init__(self, kind: str, detail: str, endpoint: str, status: int = 0) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail, self.endpoint, self.status = kind, detail, endpoint, status
        self.meter = Meter()


class ProbeError(Exception):
    """An endpoint that is not well: what it answers when it is asked how it is."""


class _TooLong(Exception):
    pass


class _Down(Exception):
    """An endpoint gave no answer. arrived: it had the request, which may be what it died of."""

    def __init__(self, kind: str, why: str, arrived: bool) -> None:
        super().__init__(why)
        self.kind, self.why, self.arrived = kind, why, arrived


class _Overloaded(Exception):
    def __init__(self, status: int, retry_after: str) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.retry_after = status, retry_after


class EndpointConfig(BaseModel):
    """Where the model is served. Nothing here changes a caption."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    endpoints: tuple[str, ...] = Field(
        default=(), description="base URLs of servers, such as http://host:8000"
    )
    in_flight: int = Field(default=64, ge=1, description="most requests in flight, all endpoints together")
    per_endpoint: int = Field(default=64, ge=1, description="most requests in flight at one endpoint")
    timeout_s: float = Field(default=300.0, gt=0, description="longest time of one request")
    patience_s: float = Field(default=300.0, ge=0, description="give up when no endpoint answers for so long")


@dataclass(frozen=True, slots=True)
class Model:
    """What the endpoints serve: the name that requests give, and what it was loaded from (vLLM's `root`)."""

    name: str
    root: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the model draws its reply. All of it is part of the cache key."""

    seed: int = 0
    temperature: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 1024


@dataclass
class Endpoint:
    """load: requests in flight. down: why it is set aside; empty when it answers. rests_until: loop time.
    clock: integral of dt / load: what it grows by during a request is the request's share of the engine."""

    url: str
    load: int = 0
    down: str = "not asked yet"
    rests_until: float = 0.0
    probe: asyncio.Task[None] | None = None
    clock: float = 0.0
    _ticked: float = field(default_factory=time.monotonic)

    def carry(self, more: int) -> None:
        """Take up a request (1), or let it go (-1)."""
        now = time.monotonic()
        self.clock += (now - self._ticked) / self.load if self.load else 0.0
        self._ticked = now
        self.load += more


@dataclass
class Client:
    """Use as `async with Client(config, wanted) as client`; entering waits for the first endpoint.

    wanted: the name that must be served; empty takes what the first endpoint serves. Endpoints that serve
    something else are refused: EndpointError at the start, set aside later.
    before: called with a slot in hand, ahead of each sending; what it raises (a budget) ends the request.
    """

    config: EndpointConfig
    wanted: str = ""
    before: Callable[[], None] = lambda: None
    model: Model = Model("")
    endpoints: list[Endpoint] = field(default_factory=list)
    in_flight: int = 0

    async def __aenter__(self) -> Self:
        if not self.config.endpoints:
            raise EndpointError("no endpoint is given: name one with --endpoint URL, or use --serve")
        self.endpoints = [Endpoint(_base(url)) for url in dict.fromkeys(self.config.endpoints)]
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._waker: asyncio.Task[None] | None = None
        self._heard = time.monotonic()
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0),  # slots are counted here
            trust_env=False,  # a proxy of the environment must not see frames, nor stand before localhost
        )
        try:
            await self._first_model()
            self._waker = asyncio.create_task(self._wake_often())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [e.probe for e in self.endpoints if e.probe] + ([self._waker] if self._waker else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()

    # --- requests ---

    async def complete(
        self, request_id: str, messages: list[Any], schema: dict[str, Any], how: Sampling, avoid: str = ""
    ) -> Completion:
        """Ask once. request_id travels as X-Request-Id into the server's log. avoid: an endpoint that is
        taken only where no other one is free.

        Raises RequestError (an attempt of this request) or NoEndpoint.
        """
        content = json.dumps(request(self.model.name, messages, schema, how)).encode()
        meter = Meter()
        try:
            return await self._through(request_id, content, how.max_tokens, avoid, meter)
        except RequestError as error:
            error.meter = meter
            raise

    async def _through(
        self, request_id: str, content: bytes, max_tokens: int, avoid: str, meter: Meter
    ) -> Completion:
        """Send until an endpoint answers, going around those that are down or overloaded."""
        losses: list[str] = []
        first = time.monotonic()
        while True:
            async with self._lease(avoid, meter) as endpoint:
                self.before()
                try:
                    return await self._once(endpoint, request_id, content, max_tokens, meter)
                except _Overloaded as busy:
                    self._rest(endpoint, busy.retry_after)
                    if (waited := time.monotonic() - first) >= self.config.patience_s:
                        what = f"HTTP {busy.status} for {waited:.0f} s"
                        raise RequestError("overload", what, endpoint.url, busy.status) from None
                except _Down as down:
                    self._set_aside(endpoint, down.why)
                    if down.arrived:
                        losses.append(down.why)
                        avoid = endpoint.url
                    if len(losses) == LOSSES_MAX:
                        what = f"sent {LOSSES_MAX} times: {'; '.join(dict.fromkeys(losses))}"
                        raise RequestError(down.kind, what, endpoint.url) from None

    async def _once(
        self, endpoint: Endpoint, request_id: str, content: bytes, max_tokens: int, meter: Meter
    ) -> Completion:
        """Raises _Down, _Overloaded, RequestError, EndpointError."""
        status, retry_after, body = await self._post(endpoint, content, request_id)
        if status in OVERLOADED:
            raise _Overloaded(status, retry_after)
        self._heard = time.monotonic()
        if status in (401, 403):
            raise EndpointError(f"{endpoint.url} refuses us (HTTP {status}): serve without a key")
        if status != 200:
            kind = "refused" if 400 <= status < 500 else "engine"
            raise RequestError(kind, f"HTTP {status}: {_message(body)}", endpoint.url, status)
        try:
            return read_body(body, self.model.name, max_tokens, endpoint.url, meter)
        except BodyError as error:
            if error.kind == "model":  # another server stands there now
                raise _Down("model", error.detail, arrived=True) from None
            raise RequestError(error.kind, error.detail, endpoint.url, status) from None

    async def _post(self, endpoint: Endpoint, content: bytes, request_id: str) -> tuple[int, str, bytes]:
        """Raises _Down when no whole answer comes in time, RequestError when one is too long or garbled."""
        headers = {"content-type": "application/json", "x-request-id": request_id}
        url = f"{endpoint.url}/v1/chat/completions"
        try:
            async with (
                asyncio.timeout(self.config.timeout_s),
                self._http.post(url, data=content, headers=headers, allow_redirects=False) as response,
            ):
                body = await _read(response)
        except _TooLong:
            what = f"the body is longer than {BODY_BYTES_MAX} bytes"
            raise RequestError("body", what, endpoint.url, response.status) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _Down("lost", one_line(error), arrived=False) from None
        except aiohttp.ClientPayloadError as error:
            if isinstance(error.__cause__, ContentEncodingError):
                what = one_line(error.__cause__)
                raise RequestError("encoding", what, endpoint.url, response.status) from None
            raise _Down("lost", one_line(error), arrived=True) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Down("lost", one_line(error), arrived=True) from None
        except TimeoutError:
            raise _Down("timeout", f"no answer in {self.config.timeout_s:g} s", arrived=True) from None
        return response.status, response.headers.get("retry-after", ""), body

    # --- endpoints ---

    @contextlib.asynccontextmanager
    async def _lease(self, avoid: str, meter: Meter) -> AsyncIterator[Endpoint]:
        """A slot at the least loaded endpoint that answers; its time goes to the meter. Raises NoEndpoint."""
        while (endpoint := self._choose(avoid)) is None:
            self._require_life()
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        endpoint.carry(1)
        self.in_flight += 1
        started, clock = time.monotonic(), endpoint.clock
        try:
            yield endpoint
        finally:
            endpoint.carry(-1)
            self.in_flight -= 1
            meter.seconds += time.monotonic() - started
            meter.engine_seconds += endpoint.clock - clock
            self._wake(1)

    def _choose(self, avoid: str) -> Endpoint | None:
        if self.in_flight >= self.config.in_flight:
            return None
        now = time.monotonic()
        able = [
            e for e in self.endpoints
            if not e.down and e.rests_until <= now and e.load < self.config.per_endpoint
        ]  # fmt: skip
        return min(able, key=lambda e: (e.url == avoid, e.load), default=None)

    def _require_life(self, patience_s: float | None = None) -> None:
        """Raise NoEndpoint when nothing has answered for as long as we wait."""
        silent = time.monotonic() - self._heard
        patience = self.config.patience_s if patience_s is None else patience_s
        if all(e.down for e in self.endpoints) and silent >= patience:
            reasons = "; ".join(f"{e.url}: {e.down}" for e in self.endpoints)
            raise NoEndpoint(f"no endpoint answers for {silent:.0f} s ({reasons}): start them, run again")

    def _set_aside(self, endpoint: Endpoint, why: str) -> None:
        endpoint.down = why
        if endpoint.probe is None:
            endpoint.probe = asyncio.create_task(self._until_it_answers(endpoint))

    def _rest(self, endpoint: Endpoint, retry_after: str) -> None:
        """An overloaded endpoint is alive. Retry-After in seconds; the form with a date counts as none."""
        asked = float(retry_after) if retry_after.isdecimal() else 0.0
        endpoint.rests_until = time.monotonic() + min(max(asked, REST_S[0]), REST_S[1])
        self._heard = time.monotonic()

    async def _until_it_answers(self, endpoint: Endpoint) -> None:
        pause = PROBE_S[0]
        while True:
            try:
                found = await self._serves(endpoint)
            except ProbeError as error:
                endpoint.down = str(error)
            else:
                if found == self.model:
                    endpoint.down = ""
                    endpoint.probe = None  # before anyone else runs, who may set it aside again
                    self._heard = time.monotonic()
                    self._wake(len(self._waiting))
                    return
                endpoint.down = f"serves {found.name} from {found.root or 'an unnamed place'} now"
            await asyncio.sleep(pause)
            pause = min(2 * pause, PROBE_S[1])

    def _wake(self, count: int) -> None:
        """Let waiting requests look for a slot again, the first ones first."""
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                count -= 1

    async def _wake_often(self) -> None:
        """The rest of an endpoint ends, and patience does, without anyone saying so."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._wake(len(self._waiting))

    async def _serves(self, endpoint: Endpoint) -> Model:
        """The model of an endpoint that is well. Raises ProbeError."""
        status, _ = await self._get(f"{endpoint.url}/health")
        if status >= 500:  # servers without this path answer 404
            raise ProbeError(f"HTTP {status} at /health")
        status, body = await self._get(f"{endpoint.url}/v1/models")
        if status != 200:
            raise ProbeError(f"HTTP {status} at /v1/models")
        return read_models(body, self.wanted or self.model.name)

    async def _get(self, url: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(CONNECT_S), self._http.get(url, allow_redirects=False) as response:
                return response.status, await _read(response)
        except TimeoutError:
            raise ProbeError(f"no answer in {CONNECT_S:.0f} s") from None
        except (aiohttp.ClientError, ConnectionError, _TooLong) as error:
            raise ProbeError(one_line(error)) from None

    async def _first_model(self) -> None:
        """Ask every endpoint; those that do not answer are set aside. Waits until one does."""
        found = await asyncio.gather(*map(self._ask_model, self.endpoints))
        while not any(found):
            self._require_life(min(FIRST_S, self.config.patience_s))
            await asyncio.sleep(PROBE_S[0])
            found = await asyncio.gather(*map(self._ask_model, self.endpoints))
        served = {model: e.url for model, e in zip(found, self.endpoints, strict=True) if model}
        if len(served) > 1:
            said = ", ".join(f"{url} {m.name} from {m.root}" for m, url in served.items())
            raise EndpointError(f"endpoints serve different models ({said}): give endpoints of one model")
        (self.model,) = served
        self._heard = time.monotonic()
        for endpoint, model in zip(self.endpoints, found, strict=True):
            if model:
                endpoint.down = ""
            else:
                self._set_aside(endpoint, endpoint.down)

    async def _ask_model(self, endpoint: Endpoint) -> Model | None:
        try:
            found = await self._serves(endpoint)
        except ProbeError as error:
            endpoint.down = str(error)
            return None
        if self.wanted and found.name != self.wanted:
            raise EndpointError(f"{endpoint.url} serves {found.name}, not {self.wanted}: correct one of them")
        return found


def request(model: str, messages: list[Any], schema: dict[str, Any], how: Sampling) -> dict[str, Any]:
    """The body of a request. docs/captions.md says why each setting is what it is."""
    body = {
        "model": model,
        "messages": messages,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "caption", "schema": schema, "strict": True},
        },
        "temperature": how.temperature,
        "seed": how.seed,
        "max_tokens": how.max_tokens,
        "n": 1,
        "stream": False,
    }
    if how.repetition_penalty != 1:  # vLLM's own: servers that do not know it refuse it
        body["repetition_penalty"] = how.repetition_penalty
    return body


def read_models(body: bytes, wanted: str) -> Model:
    """The served model from the body of /v1/models: the one wanted where there are several (adapters).
    Raises ProbeError."""
    try:
        cards = loads(body)["data"]
        models = [Model(str(c["id"]), str(c.get("root") or "")) for c in cards]
    except (StrictJsonError, KeyError, TypeError, AttributeError):
        raise ProbeError("/v1/models gives no list of models") from None
    if not models:
        raise ProbeError("/v1/models lists no model")
    return next((m for m in models if m.name == wanted), models[0])


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body. Raises _TooLong."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise _TooLong(f"a body of more than {BODY_BYTES_MAX} bytes")
    return bytes(body)


def _base(url: str) -> str:
    """The address without a trailing slash or /v1. Raises EndpointError."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        whole = False
    if not whole:
        raise EndpointError(f"endpoint {url!r} is no http address: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _message(body: bytes) -> str:
    """What an error body says, on one line."""
    try:
        held = json.loads(body)
        text = held["error"]["message"] if "error" in held else held["message"]
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:200] or "no message"
