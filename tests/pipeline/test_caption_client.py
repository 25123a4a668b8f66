"""The caption client against real HTTP: what a server can do to a request, told apart."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from caption_server import CaptionServer

from pipeline.caption.client import (
    LOSSES_MAX,
    Client,
    EndpointConfig,
    EndpointError,
    NoEndpoint,
    RequestError,
    Sampling,
    request,
)
from pipeline.caption.completion import Completion
from schemas.caption import reply_schema

SCHEMA = reply_schema(2)
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "What is there?"}]}]


def config(*servers: CaptionServer | str, **more: Any) -> EndpointConfig:
    urls = tuple(s if isinstance(s, str) else s.url for s in servers)
    return EndpointConfig(endpoints=urls, **{"timeout_s": 1.5, "patience_s": 2.0} | more)


def using(settings: EndpointConfig, work: Callable[[Client], Awaitable[Any]], model: str = "") -> Any:
    async def go() -> Any:
        async with Client(settings, model) as client:
            return await work(client)

    return asyncio.run(go())


def ask(client: Client, clip: str, number: int = 1, **more: Any) -> Awaitable[Completion]:
    return client.complete(f"{clip}.{number}", MESSAGES, SCHEMA, Sampling(seed=number), **more)


def ask_once(fault: str, *later: str, **more: Any) -> Completion:
    with CaptionServer(script={"a": [fault, *later]}) as server:
        return using(config(server, **more), lambda client: ask(client, "a"))


# --- what is asked ------------------------------------------------------------------------------------------


def test_a_request_carries_schema_and_sampling_and_no_setting_that_only_some_servers_know():
    body = request("m", MESSAGES, SCHEMA, Sampling(seed=3, temperature=0.5, max_tokens=77))
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (body["seed"], body["temperature"], body["max_tokens"], body["n"]) == (3, 0.5, 77, 1)
    assert "repetition_penalty" not in body
    assert request("m", MESSAGES, SCHEMA, Sampling(repetition_penalty=1.1))["repetition_penalty"] == 1.1


def test_an_answer_comes_with_its_tokens_and_times():
    with CaptionServer(latency_s=0.1) as server:
        got = using(config(server), lambda client: ask(client, "a"))
    assert (got.finish_reason, got.tokens_in, got.tokens_out, got.endpoint) == ("stop", 1000, 200, server.url)
    assert 0.1 <= got.meter.seconds < 1 and got.meter.engine_seconds == pytest.approx(
        got.meter.seconds, abs=0.01
    )
    assert server.seen[0].body["model"] == "stand-in"


def test_shares_of_engine_time_add_up_to_the_time_in_which_the_engine_worked():
    async def many(client: Client) -> list[Completion]:
        return await asyncio.gather(*(ask(client, f"c{i}") for i in range(8)))

    with CaptionServer(latency_s=0.3) as server:
        got = using(config(server), many)
    worked = max(s.ended for s in server.seen) - min(s.started for s in server.seen)
    assert sum(c.meter.engine_seconds for c in got) == pytest.approx(worked, rel=0.5)
    assert sum(c.meter.seconds for c in got) > 2.3


# --- answers that are none ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault, kind",
    [
        ("context_too_long", "refused"),
        ("too_many_images", "refused"),
        ("bad_grammar", "refused"),
        ("tiny_image", "refused"),
        ("not_found", "refused"),
        ("error_500", "engine"),
        ("html_502", "engine"),
        ("redirect", "engine"),
        ("no_content_204", "engine"),
        ("html_200", "body"),
        ("empty_body", "body"),
        ("body_list", "body"),
        ("body_nan", "body"),
        ("body_repeated_key", "body"),
        ("body_cut", "body"),
        ("endless_body", "body"),
        ("invalid_utf8", "body"),
        ("gzip_garbage", "encoding"),
        ("gzip_cut", "body"),
        ("no_choices", "choices"),
        ("null_choices", "choices"),
        ("two_choices", "choices"),
        ("no_finish", "choices"),
        ("null_content", "content"),
        ("content_list", "content"),
        ("tool_calls", "content"),
    ],
)
def test_what_is_no_answer_is_named_once_and_not_asked_again(fault, kind):
    with CaptionServer(script={"a": [fault]}) as server:
        with pytest.raises(RequestError) as caught:
            using(config(server), lambda client: ask(client, "a"))
        assert caught.value.kind == kind and caught.value.endpoint == server.url
        assert server.counts["a"] == 1
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("fault", ["usage_missing", "usage_negative", "usage_huge", "usage_text"])
def test_tokens_that_cannot_be_true_are_unknown(fault):
    got = ask_once(fault)
    assert (got.tokens_in, got.tokens_out) == (None, None) and got.finish_reason == "stop"


# --- endpoints that go away ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["closed", "cut_chunked", "short_body"])
def test_a_cut_answer_is_asked_for_again_and_is_nobodys_fault(fault):
    with CaptionServer(script={"a": [fault, "ok"]}) as server:
        got = using(config(server), lambda client: ask(client, "a"))
        assert got.finish_reason == "stop" and server.counts["a"] == 2


@pytest.mark.parametrize(
    "fault, kind",
    [
        ("closed", "lost"),
        ("cut_chunked", "lost"),
        ("short_body", "lost"),
        ("slow_drip", "timeout"),
        ("hang", "timeout"),
        ("wrong_model", "model"),
    ],
)
def test_a_request_that_never_gets_through_is_given_up(fault, kind):
    with CaptionServer(script={"a": [fault]}) as server:
        with pytest.raises(RequestError) as caught:
            using(config(server, timeout_s=0.3), lambda client: ask(client, "a"))
        assert caught.value.kind == kind and server.counts["a"] == LOSSES_MAX


def test_requests_of_an_endpoint_that_dies_go_to_another_one():
    async def work(client: Client) -> list[Completion]:
        asked = [asyncio.create_task(ask(client, f"c{i}")) for i in range(16)]
        await asyncio.sleep(0.15)
        await asyncio.to_thread(first.__exit__)
        return await asyncio.gather(*asked)

    first = CaptionServer(latency_s=0.5).__enter__()
    with CaptionServer(latency_s=0.1) as second:
        got = using(config(first, second), work)
    assert {c.endpoint for c in got} == {second.url} and len(got) == 16
    assert first.seen and not sum(first.answered.values())
    assert all(second.answered[f"c{i}"] == 1 for i in range(16))


def test_an_endpoint_that_cuts_many_answers_at_once_is_not_set_aside_for_good():
    """Answers are cut while the probe of the same endpoint ends."""

    async def work(client: Client) -> list[Completion]:
        return await asyncio.gather(*(ask(client, f"c{i}") for i in range(48)))

    with CaptionServer(script={f"c{i}": ["cut_chunked", "closed", "ok"] for i in range(0, 48, 2)}) as server:
        assert len(using(config(server, patience_s=1.0), work)) == 48
        assert server.answered["c0"] == 3


def test_an_endpoint_that_comes_back_is_used_again():
    async def work(client: Client) -> None:
        await asyncio.to_thread(first.__exit__)
        await ask(client, "while away")
        again = await asyncio.to_thread(CaptionServer(port=first.port).__enter__)
        try:
            for _ in range(100):
                if not any(e.down for e in client.endpoints):
                    break
                await asyncio.sleep(0.1)
            await asyncio.gather(*(ask(client, f"c{i}") for i in range(4)))
            assert len(again.seen) == 2
        finally:
            await asyncio.to_thread(again.__exit__)

    first = CaptionServer().__enter__()
    with CaptionServer(latency_s=0.1) as second:
        using(config(first, second), work)


def test_an_endpoint_that_comes_back_with_another_model_is_not_used():
    async def work(client: Client) -> str:
        await asyncio.to_thread(first.__exit__)
        other = await asyncio.to_thread(CaptionServer("other", port=first.port).__enter__)
        try:
            got = await asyncio.gather(*(ask(client, f"c{i}") for i in range(4)))
            got += await asyncio.gather(*(ask(client, f"d{i}") for i in range(4)))
            assert {c.endpoint for c in got} == {second.url}
            assert not any(s.clip.startswith("d") for s in other.seen)
            return next(e.down for e in client.endpoints if e.url != second.url)
        finally:
            await asyncio.to_thread(other.__exit__)

    first = CaptionServer().__enter__()
    with CaptionServer() as second:
        assert "serves other" in using(config(first, second), work)


def test_no_endpoint_for_too_long_ends_every_waiting_request_by_name():
    async def work(client: Client) -> list[Any]:
        await asyncio.to_thread(server.__exit__)
        return await asyncio.gather(*(ask(client, f"c{i}") for i in range(8)), return_exceptions=True)

    server = CaptionServer().__enter__()
    started = time.monotonic()
    got = using(config(server, patience_s=1.0), work)
    assert {type(e) for e in got} == {NoEndpoint} and time.monotonic() - started < 4
    assert server.url in str(got[0])


def test_an_overloaded_endpoint_rests_as_long_as_it_says_and_others_take_its_requests():
    with CaptionServer(script={"a": ["rate_limited", "ok"]}) as server:
        started = time.monotonic()
        using(config(server), lambda client: ask(client, "a"))
        assert time.monotonic() - started >= 1.0 and server.counts["a"] == 2
    script = {f"c{i}": ["rate_limited"] for i in range(8)}
    with CaptionServer(script=script) as busy, CaptionServer() as free:

        async def work(client: Client) -> list[Completion]:
            return await asyncio.gather(*(ask(client, f"c{i}") for i in range(8)))

        assert {c.endpoint for c in using(config(busy, free), work)} == {free.url}


def test_a_server_that_is_always_overloaded_is_not_waited_for_without_end():
    with pytest.raises(RequestError, match="overload: HTTP 503"):
        ask_once("overloaded", patience_s=1.5)


# --- models and addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(EndpointError):
        using(config(url), lambda client: ask(client, "a"))


def test_no_endpoint_at_all_is_refused():
    with pytest.raises(EndpointError, match="--endpoint"):
        using(config(), lambda client: ask(client, "a"))


def test_an_address_may_end_in_v1():
    with CaptionServer() as server:
        assert using(config(f"{server.url}/v1/"), lambda client: ask(client, "a")).endpoint == server.url


def test_a_server_of_another_model_is_refused_by_name():
    with CaptionServer("llama") as server, pytest.raises(EndpointError, match="serves llama, not qwen"):
        using(config(server), lambda client: ask(client, "a"), model="qwen")


def test_endpoints_of_two_models_are_refused():
    with (
        CaptionServer("a") as one,
        CaptionServer("b") as two,
        pytest.raises(EndpointError, match="different"),
    ):
        using(config(one, two), lambda client: ask(client, "a"))


def test_a_run_starts_when_one_of_its_endpoints_answers():
    with CaptionServer() as server:
        got = using(config("http://127.0.0.1:9", server), lambda client: ask(client, "a"))
        assert got.endpoint == server.url


def test_a_run_does_not_start_without_any_endpoint():
    with pytest.raises(NoEndpoint, match=r"127\.0\.0\.1:9"):
        using(config("http://127.0.0.1:9", patience_s=0.5), lambda client: ask(client, "a"))


# --- slots --------------------------------------------------------------------------------------------------


def most_at_once(servers: Sequence[CaptionServer]) -> int:
    edges = sorted(
        [(s.started, 1) for v in servers for s in v.seen] + [(s.ended, -1) for v in servers for s in v.seen]
    )
    level = most = 0
    for _, step in edges:
        level += step
        most = max(most, level)
    return most


@pytest.mark.parametrize("limits, most", [({"in_flight": 6}, 6), ({"per_endpoint": 4}, 8)])
def test_requests_in_flight_are_limited_and_shared_evenly(limits, most):
    async def work(client: Client) -> list[Completion]:
        return await asyncio.gather(*(ask(client, f"c{i}") for i in range(32)))

    with CaptionServer(latency_s=0.05) as one, CaptionServer(latency_s=0.05) as two:
        got = using(config(one, two, **limits), work)
        assert most_at_once([one, two]) <= most
    shares = Counter(c.endpoint for c in got)
    assert shares[one.url] + shares[two.url] == 32 and min(shares.values()) >= 12
