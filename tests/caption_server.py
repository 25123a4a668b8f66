"""A stand-in for a captioning server: real HTTP, the OpenAI protocol, scripted faults, measured slots.

It answers with the schema that the request carries. Requests are known by their X-Request-Id, which is
"<clip>.<number>": `script` gives, by clip, the faults of its first, second, ... request (the last one stays).
In a test: `with CaptionServer(script={"clip3": ["cut_chunked", "ok"]}) as server: server.url`. As a process
of its own, which can be killed: `python -m tests.caption_server --port 8001` from the root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from pipeline.caption.prompt import nonce_of

MODEL = "stand-in"


@dataclass
class Seen:
    """One request: its id, times on time.monotonic(), and what it asked."""

    request_id: str
    started: float
    body: dict[str, Any]
    ended: float = 0.0

    @property
    def clip(self) -> str:
        return self.request_id.rpartition(".")[0]


Handler = Callable[["CaptionServer", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
FAULTS: dict[str, Handler] = {}
"""Name -> what it does with a request."""


@dataclass
class CaptionServer:
    """latency_s: time of every good answer. script: faults by clip. keep_bodies: False in benchmarks.
    blind: drawn clips are described as any other. canaries: how many of them were asked for."""

    model: str = MODEL
    root: str = "tests/stand-in"
    latency_s: float = 0.0
    script: Mapping[str, Sequence[str]] = field(default_factory=dict)
    port: int = 0
    keep_bodies: bool = True
    blind: bool = False
    canaries: int = 0
    seen: list[Seen] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)

    # --- life ---

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self.serve(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def serve(self) -> web.AppRunner:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/stand-in/stats", self._stats)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return runner

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- measures ---

    def busy_share(self, slots: int) -> float:
        """Share of slot time in use, from the moment when all slots were first taken until the last request
        came (what follows is the end of the work, not idle slots)."""
        edges = sorted([(s.started, 1) for s in self.seen] + [(s.ended, -1) for s in self.seen if s.ended])
        last, level, full, used, since = max(s.started for s in self.seen), 0, None, 0.0, 0.0
        for at, step in edges:
            if full is not None and at <= last:
                used += min(level, slots) * (at - since)
            level, since = level + step, at
            if full is None and level >= slots:
                full = at
        return used / (slots * (last - full)) if full is not None and last > full else 0.0

    # --- answers ---

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _stats(self, request: web.Request) -> web.Response:
        """For those who run this as a process: /stand-in/stats?slots=64."""
        share = self.busy_share(int(request.query["slots"]))
        return web.json_response({"busy_share": share, "requests": len(self.seen)})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "owned_by": "tests", "root": self.root}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.headers.get("X-Request-Id", ""), time.monotonic(), {})
        if seen.clip.startswith("canary-"):
            return await self._canary(seen.clip, json.loads(await request.read()), request)
        self.seen.append(seen)
        try:
            body = json.loads(await request.read())
            if self.keep_bodies:
                seen.body = body
            steps = self.script.get(seen.clip, ("ok",))
            number = self.counts[seen.clip]
            self.counts[seen.clip] += 1
            answer = await FAULTS[steps[min(number, len(steps) - 1)]](self, request, body)
            self.answered[seen.clip] += 1
            return answer
        finally:
            seen.ended = time.monotonic()

    async def _canary(self, name: str, body: dict[str, Any], request: web.Request) -> web.Response:
        """Answered at once and rightly, unless the server is made blind; never among `seen`."""
        self.canaries += 1
        made = good(body, request.headers["X-Request-Id"])
        if not self.blind:
            made["scene"] = CANARIES[name]
            if name == "canary-vanishing_circle":
                made["events"]["i01"] = {"category": "object_change", "text": "A red circle vanishes."}
        return web.json_response(self.reply(body, json.dumps(made)))

    def reply(self, body: dict[str, Any], content: Any, finish: Any = "stop", **more: Any) -> dict[str, Any]:
        usage = {"prompt_tokens": 1000, "completion_tokens": 200, "total_tokens": 1200}
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
        held = {"id": "x", "object": "chat.completion", "created": 0, "model": self.model}
        return held | {"choices": [choice], "usage": usage} | more


CANARIES = {
    "canary-red_circle": "A plain white picture with a large red circle in the middle.",
    "canary-blue_square": "A plain yellow picture with a blue square in the middle.",
    "canary-green_triangle": "A plain black picture with a green triangle in the middle.",
    "canary-number": "The number 742 in large white digits on a plain blue picture.",
    "canary-vanishing_circle": "A plain black picture without any light.",
}

# --- a good answer ------------------------------------------------------------------------------------------

SOLDIER = "A soldier in a green uniform with a helmet."
DOOR = {"category": "environment_transition", "text": "A grey door opens in the wall."}
SENTENCES = {
    "scene": "A stone hall with grey walls, a wooden floor and warm light from torches on both sides."
}


def good(body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """What a perfect model would answer: the least instance of the schema, with our sentences. The digits of
    the check picture are known from the request's id, as the client drew them."""
    clip, _, number = request_id.rpartition(".")
    schema = body["response_format"]["json_schema"]["schema"]
    return instance(schema, "", schema.get("$defs", {})) | {"nonce": nonce_of(clip, int(number))}


def instance(schema: dict[str, Any], name: str, named: dict[str, Any]) -> Any:
    if "$ref" in schema:
        return instance(named[schema["$ref"].rpartition("/")[2]], name, named)
    if "anyOf" in schema:
        return instance(schema["anyOf"][0], name, named)
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {key: instance(value, key, named) for key, value in schema["properties"].items()}
    return SENTENCES.get(name, "A door opens.")


def _text(request: web.Request, body: dict[str, Any]) -> str:
    return json.dumps(good(body, request.headers["X-Request-Id"]), separators=(",", ":"))


def fault(handler: Handler) -> Handler:
    FAULTS[handler.__name__] = handler
    return handler


def reply_fault(
    name: str, make: Callable[[dict[str, Any], str], Any], finish: Any = "stop", **more: Any
) -> None:
    """A fault of the text alone: make(request body, good text) -> content."""

    async def answer(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = _text(request, body)
        return web.json_response(server.reply(body, make(body, text), finish, **more))

    FAULTS[name] = answer


@fault
async def ok(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(server.latency_s)
    return web.json_response(server.reply(body, _text(request, body)))


# --- faults of the text (spec/faults.md V1, V10, V11 and more) ----------------------------------------------


def _edited(edit: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any], str], str]:
    def make(body: dict[str, Any], text: str) -> str:
        held = json.loads(text)
        made = edit(held)
        return json.dumps(held if made is None else made, separators=(",", ":"), ensure_ascii=False)

    return make


reply_fault("spaces_to_the_limit", lambda b, t: t[:40] + " " * 4000, "length")
reply_fault(
    "repeats_to_the_limit", lambda b, t: t[:-1] + ',"e":[' + '{"text":"a door opens"},' * 60, "length"
)
reply_fault("whole_but_length", lambda b, t: t, "length")
reply_fault("cut_in_an_escape", lambda b, t: t[:60] + "\\u00", "length")
reply_fault("cut_but_stop", lambda b, t: t[: len(t) // 2])
reply_fault("abort", lambda b, t: t[:30], "abort")
reply_fault("content_filter", lambda b, t: t, "content_filter")
reply_fault("tool_finish", lambda b, t: t, "tool_calls")
reply_fault("no_finish", lambda b, t: t, None)
reply_fault("empty_text", lambda b, t: "")
reply_fault("only_spaces", lambda b, t: " " * 400)
reply_fault("prose", lambda b, t: "The video shows a hall.")
reply_fault("refusal", lambda b, t: "I'm sorry, but I cannot help with that.")
reply_fault("fenced", lambda b, t: f"```json\n{t}\n```")
reply_fault("trailing_text", lambda b, t: t + " I hope this helps!")
reply_fault("byte_order_mark", lambda b, t: "\ufeff" + t)
reply_fault("two_objects", lambda b, t: t + t)
reply_fault("a_list", lambda b, t: f"[{t}]")
reply_fault("a_number", lambda b, t: "12345678901234567890")
reply_fault("deep", lambda b, t: "[" * 5000 + "]" * 5000)
reply_fault("lone_surrogate", lambda b, t: t.replace('"', '"\\ud800', 3).replace('"\\ud800', '"', 2))
reply_fault("nan", lambda b, t: t[:-1] + ',"confidence":NaN}')
reply_fault("repeated_key", lambda b, t: "{" + t[1:-1] + "," + t[1:])
reply_fault("extra_key", _edited(lambda r: r | {"start": 0}))
reply_fault("missing_key", _edited(lambda r: dict(list(r.items())[1:])))
reply_fault("nulls", _edited(lambda r: dict.fromkeys(r)))
reply_fault("numbers_for_texts", _edited(lambda r: {k: 5 if isinstance(v, str) else v for k, v in r.items()}))
reply_fault("extra_interval", _edited(lambda r: r["events"].update(i99={"category": "none"})))
reply_fault("missing_interval", _edited(lambda r: r["events"].pop("i00") and None))
reply_fault("swapped_intervals", _edited(lambda r: r["events"].update(i00=r["events"].pop("i00"))))
reply_fault("renamed_interval", _edited(lambda r: r["events"].update({"0-5 s": r["events"].pop("i00")})))
reply_fault("blank_scene", _edited(lambda r: r | {"scene": "   "}))
reply_fault("endless_scene", _edited(lambda r: r | {"scene": r["scene"] * 30}))
reply_fault("invented_character", _edited(lambda r: r | {"character": {"present": "yes", "text": SOLDIER}}))
reply_fault("copied_events", _edited(lambda r: r | {"events": dict.fromkeys(r["events"], DOOR)}))
reply_fault("zero_byte", lambda b, t: t.replace("stone", "st\\u0000ne"))
reply_fault("raw_control", lambda b, t: t.replace("stone", "st\x01ne"))
reply_fault(
    "chinese_scene", lambda b, t: t.replace(SENTENCES["scene"], "石头大厅，灰色的墙壁，木地板，火把的光。")
)
reply_fault(
    "refusal_in_scene", lambda b, t: t.replace(SENTENCES["scene"], "I cannot help with that request.")
)
reply_fault("content_list", lambda b, t: [{"type": "text", "text": t}])
reply_fault("null_content", lambda b, t: None)
reply_fault("usage_missing", lambda b, t: t, usage=None)
reply_fault("usage_negative", lambda b, t: t, usage={"prompt_tokens": -5, "completion_tokens": -1})
reply_fault("usage_huge", lambda b, t: t, usage={"prompt_tokens": 10**15, "completion_tokens": 10**15})
reply_fault("usage_text", lambda b, t: t, usage={"prompt_tokens": "1000", "completion_tokens": True})
reply_fault("wrong_model", lambda b, t: t, model="some-other-model")
reply_fault("no_choices", lambda b, t: t, choices=[])
reply_fault("null_choices", lambda b, t: t, choices=None)
reply_fault("other_nonce", lambda b, t: re.sub(r'(?<="nonce":").', lambda m: "05"[m[0] == "0"], t))
reply_fault("letters_for_nonce", lambda b, t: re.sub(r'(?<="nonce":")....', "zzzz", t))


@fault
async def two_choices(
    server: CaptionServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    answer = server.reply(body, _text(request, body))
    return web.json_response(answer | {"choices": answer["choices"] * 2})


@fault
async def tool_calls(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer = server.reply(body, None, "tool_calls")
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "caption", "arguments": _text(request, body)},
    }
    answer["choices"][0]["message"]["tool_calls"] = [call]
    return web.json_response(answer)


# --- faults of HTTP -----------------------------------------------------------------------------------------


def status_fault(name: str, status: int, message: str, **headers: str) -> None:
    async def answer(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"error": {"message": message, "type": "BadRequestError", "code": status}}
        return web.json_response(error, status=status, headers=headers)

    FAULTS[name] = answer


status_fault(
    "context_too_long", 400, "This model's maximum context length is 4096 tokens; you asked for 90210"
)
status_fault("too_many_images", 400, "At most 8 image(s) may be provided in one prompt.")
status_fault("bad_grammar", 400, "The provided JSON schema contains features not supported by xgrammar.")
status_fault("tiny_image", 422, "height:1 and width:1 must be larger than factor:28")
status_fault("not_found", 404, "The model does not exist.")
status_fault("error_500", 500, "EngineCore encountered an issue. See stack trace for the root cause.")
status_fault("rate_limited", 429, "slow down", **{"Retry-After": "1"})
status_fault("overloaded", 503, "no capacity", **{"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"})
status_fault("redirect", 307, "moved", Location="/elsewhere")


def body_fault(name: str, make: Callable[[bytes], bytes], status: int = 200, **headers: str) -> None:
    """A fault of the body's bytes: make(good body) -> body."""

    async def answer(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = _text(request, body)
        data = json.dumps(server.reply(body, text)).encode()
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        kind = {} if "Content-Type" in named else {"Content-Type": "application/json"}
        return web.Response(body=make(data), status=status, headers=named | kind)

    FAULTS[name] = answer


PAGE = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
body_fault("html_502", lambda d: PAGE, 502, Content_Type="text/html")
body_fault("html_200", lambda d: PAGE, Content_Type="text/html")
body_fault("empty_body", lambda d: b"")
body_fault("no_content_204", lambda d: b"", 204)
body_fault("invalid_utf8", lambda d: d.replace(b"stone", b"st\xff\xfene"))
body_fault("body_list", lambda d: b"[" + d + b"]")
body_fault("body_nan", lambda d: d.replace(b"1200", b"NaN"))
body_fault("body_repeated_key", lambda d: d[:-1] + b',"choices":[]}')
body_fault("body_cut", lambda d: d[: len(d) // 2])
body_fault("endless_body", lambda d: d + b" " * (5 << 20))
body_fault("gzip_garbage", lambda d: b"\x00garbage" + d, Content_Encoding="gzip")
body_fault("gzip_cut", lambda d: gzip.compress(d)[:20], Content_Encoding="gzip")


@fault
async def cut_chunked(
    server: CaptionServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "application/json"})
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    await answer.write(b'{"id":"x","choices":[')
    request.transport.abort()
    return answer


@fault
async def short_body(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Content-Length says more than comes."""
    data = json.dumps(server.reply(body, _text(request, body))).encode()
    answer = web.StreamResponse(headers={"Content-Type": "application/json"})
    answer.content_length = len(data) + 500
    await answer.prepare(request)
    await answer.write(data)
    request.transport.close()
    return answer


@fault
async def closed(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection ends without a byte, as when an engine dies."""
    request.transport.abort()
    return web.Response()


@fault
async def slow_drip(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A byte now and then, for longer than anyone waits."""
    answer = web.StreamResponse(headers={"Content-Type": "application/json"})
    await answer.prepare(request)
    for _ in range(600):
        await answer.write(b" ")
        await asyncio.sleep(0.1)
    return answer


@fault
async def hang(server: CaptionServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--script", default="{}", help="JSON: clip -> list of faults")
    args = parser.parse_args()

    async def forever() -> None:
        server = CaptionServer(
            args.model, latency_s=args.latency, script=json.loads(args.script), port=args.port
        )
        server.keep_bodies = False
        await server.serve()
        print(server.url, flush=True)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(forever())


if __name__ == "__main__":
    main()
