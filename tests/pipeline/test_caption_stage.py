"""The caption stage on real clips, against a stand-in server: every clip ends captioned, or named."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caption_server import FAULTS, SENTENCES, CaptionServer
from recordings import find, pack_map

from pipeline.caption.accounts import Budget, BudgetReached, Prices, per_clip, totals
from pipeline.caption.attempts import AttemptLog, read_attempts, segments
from pipeline.caption.client import EndpointError, NoEndpoint
from pipeline.caption.frames import FramePlan, Limits, pictures
from pipeline.caption.stage import CAPTION, Caption, CaptionConfig, ServeConfig, read_unit_caption
from pipeline.ingest import Ingest, IngestConfig
from pipeline.media import read_frames
from pipeline.sources import SourceConfig
from pipeline.stage import Receipt, Result, Unit, config_digest, is_fresh, run_unit
from pipeline.store import Store
from schemas.caption import StructuredCaption, read_caption
from schemas.clip import Perspective
from schemas.quality import Status

FEW = Limits(per_interval=1, long_side=160)
"""One small picture an interval: what is tested here does not depend on how many."""


@pytest.fixture(scope="module")
def unit(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Unit:
    """event01 of the pack (10.2 s: three intervals), ingested, and its actions taken for made."""
    tmp = tmp_path_factory.mktemp("captions")
    _, clip = find(Store(str(footage)), "event01_door_map01.mp4", pack_map(tmp))
    path = footage / clip.source_path
    clip = clip.model_copy(update={"sha256": _sha256(path), "perspective": Perspective.FIRST})
    bare = Unit(clip, "g0000-p00000", Store(str(footage)), Store(str(tmp / "corpus")))
    ingest = run_unit(Ingest(IngestConfig()), bare)
    assert ingest.status is Status.OK, ingest.reasons
    actions = Receipt(clip_id="", stage="actions", config="", inputs="", status=Status.OK, content="a")
    return replace(bare, receipts={"ingest": ingest, "actions": actions})


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The many clips of a test are one video: its pictures are read once."""
    held: dict[tuple[int, ...], list[bytes]] = {}

    def read(unit: Unit, plan: FramePlan) -> list[bytes]:
        if plan.frames not in held:
            held[plan.frames] = pictures(unit, plan)
        return held[plan.frames]

    monkeypatch.setattr("pipeline.caption.stage.pictures", read)


@pytest.fixture
def corpus(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "captions-only"))


def named(unit: Unit, name: str) -> Unit:
    """The same clip under another id."""
    return replace(unit, clip=unit.clip.model_copy(update={"clip_id": name}))


def stage(*servers: CaptionServer, serve: dict[str, Any] | None = None, **config: Any) -> Caption:
    settings = {"timeout_s": 2.0, "patience_s": 2.0} | (serve or {})
    return Caption(
        CaptionConfig(**{"source": "vlm", "limits": FEW} | config),
        SourceConfig(),
        ServeConfig(endpoints=tuple(s.url for s in servers), **settings),
    )


def caption_all(made: Caption, units: list[Unit], corpus: Store, scratch: Path) -> dict[str, Any]:
    """Results, or what was raised, by clip; all clips at once in one session."""

    async def one(unit: Unit) -> Result:
        folder = scratch / unit.clip.clip_id
        folder.mkdir(exist_ok=True, parents=True)
        return await made.caption(unit, folder)

    async def work() -> list[Any]:
        async with made.session(AttemptLog(corpus)):
            return await asyncio.gather(*map(one, units), return_exceptions=True)

    got = asyncio.run(work())
    return {u.clip.clip_id: r for u, r in zip(units, got, strict=True)}


def held(result: Result) -> StructuredCaption:
    assert result.verdict.status is Status.OK, result.verdict
    return read_caption(result.files[CAPTION].read_bytes())


# --- the three sources --------------------------------------------------------------------------------------


def test_without_a_source_a_caption_is_empty_and_has_no_provenance(unit):
    receipt = run_unit(stage(source="none"), unit)
    assert receipt.status is Status.OK
    assert receipt.facts == {"provenance": "", "intervals": 3, "events": 0, "advised": ""}
    caption = read_unit_caption(replace(unit, receipts={"caption": receipt}))
    assert caption.scene == caption.provenance == "" and len(caption.events) == 3


def test_a_log_names_its_events_and_says_that_it_is_a_log(unit, tmp_path):
    made = Caption(CaptionConfig(source="log"), pack_map(tmp_path), ServeConfig())
    caption = held(made.run(unit, tmp_path))
    assert caption.provenance == "log" and caption.scene == "" and len(caption.events) == 3
    assert any(e.text for e in caption.events)


def test_a_vlm_caption_carries_the_name_of_its_model_and_nothing_of_its_cost(unit):
    with CaptionServer("qwen3-vl-8b") as server:
        receipt = run_unit(stage(server, revision="abc123"), unit)
    assert receipt.status is Status.OK, receipt.reasons
    assert receipt.facts == {"provenance": "qwen3-vl-8b@abc123", "intervals": 3, "events": 0, "advised": ""}
    caption = read_unit_caption(replace(unit, receipts={"caption": receipt}))
    assert caption.scene == SENTENCES["scene"] and caption.provenance == "qwen3-vl-8b@abc123"


def test_a_caption_that_took_retries_has_the_same_bytes_as_one_that_took_none(unit, tmp_path, corpus):
    with CaptionServer(script={unit.clip.clip_id: ["error_500", "chinese_scene", "ok"]}) as server:
        hard = caption_all(stage(server), [unit], corpus, tmp_path / "hard")[unit.clip.clip_id]
        assert len(server.seen) == 3
    with CaptionServer() as server:
        easy = caption_all(stage(server), [unit], Store(str(tmp_path / "b")), tmp_path / "easy")
    easy = easy[unit.clip.clip_id]
    assert hard.files[CAPTION].read_bytes() == easy.files[CAPTION].read_bytes() and hard.facts == easy.facts


def test_pictures_are_labelled_with_their_true_times(unit, tmp_path, corpus):
    with CaptionServer() as server:
        caption_all(stage(server, limits=Limits(per_interval=4)), [unit], corpus, tmp_path)
    content = server.seen[0].body["messages"][-1]["content"]
    labels = [a["text"] for a, b in pairwise(content) if b["type"] == "image_url"][1:]
    seconds = [float(re.fullmatch(r"interval i0(\d), ([\d.]+) s", text)[2]) for text in labels]
    times = read_frames(unit).seconds
    assert len(seconds) == 9 and max(np.abs(times - s).min() for s in seconds) <= 0.01
    assert [int(text[9:12][1:]) for text in labels] == [int(s // 5) for s in seconds]


# --- one bad clip among good ones ---------------------------------------------------------------------------

POISON = {
    "row07": ("bad_grammar", Status.FAILED, "no_answer: refused: HTTP 400"),
    "row21": ("context_too_long", Status.FAILED, "no_answer: refused: HTTP 400"),
    "row40": ("tiny_image", Status.FAILED, "no_answer: refused: HTTP 422"),
    "row63": ("abort", Status.REJECTED, "caption_invalid: finish"),
}


def test_sixty_four_clips_with_four_poison_ones_give_sixty_captions_and_four_names(
    unit, tmp_path, corpus, decoded_once
):
    units = [named(unit, f"row{i:02d}") for i in range(64)]
    with CaptionServer(script={name: [fault] for name, (fault, _, _) in POISON.items()}) as server:
        got = caption_all(stage(server), units, corpus, tmp_path)
    bad = {name: r.verdict for name, r in got.items() if r.verdict.status is not Status.OK}
    assert bad.keys() == POISON.keys()
    for name, (_, status, reason) in POISON.items():
        assert bad[name].status is status and bad[name].reasons[0].startswith(reason), bad[name]
        assert server.counts[name] == 4
    assert sum(held(r).scene == SENTENCES["scene"] for n, r in got.items() if n not in POISON) == 60
    assert all(server.counts[n] == 1 for n in got if n not in POISON)
    tries = per_clip(read_attempts(corpus))
    assert {n: t.requests for n, t in tries.items()} == {n: 4 if n in POISON else 1 for n in got}


def test_every_kind_of_fault_ends_its_own_clip_alone(unit, tmp_path, corpus, decoded_once):
    slow = {"slow_drip", "hang", "rate_limited", "overloaded", "endless_body"}
    faults = sorted(set(FAULTS) - {"ok"} - slow)
    names = {fault.replace("_", "-"): [fault] for fault in faults}
    units = [named(unit, n) for n in [*names, "good-1", "good-2"]]
    with CaptionServer(script=names) as server:
        got = caption_all(stage(server, attempts=2), units, corpus, tmp_path)
    ok = {n for n, r in got.items() if r.verdict.status is Status.OK}
    assert ok == {"good-1", "good-2", *(n for n in names if n.startswith("usage"))}
    assert not [
        r for r in got.values() if r.verdict.status is not Status.OK and (r.files or not r.verdict.reasons)
    ]


# --- canaries -----------------------------------------------------------------------------------------------


def test_a_model_that_does_not_see_is_refused_before_it_writes_a_caption(unit, tmp_path, corpus):
    with CaptionServer(blind=True) as server:
        with pytest.raises(EndpointError, match="describes 5 of 5 drawn clips wrongly"):
            caption_all(stage(server), [unit], corpus, tmp_path)
        assert not server.seen
        got = caption_all(stage(server, content_checks="advise"), [unit], corpus, tmp_path)
        assert held(got[unit.clip.clip_id])
    assert all("canary of" in a.faults for a in read_attempts(corpus, "canaries"))


def test_canaries_are_asked_for_once_a_model(unit, tmp_path, corpus):
    with CaptionServer() as server:
        caption_all(stage(server), [unit], corpus, tmp_path)
        caption_all(stage(server), [unit], corpus, tmp_path)
        assert server.canaries == 5
        caption_all(stage(server, revision="2"), [unit], corpus, tmp_path)
        assert server.canaries == 10


# --- asked once ---------------------------------------------------------------------------------------------


def test_an_accepted_caption_is_found_again_and_never_asked_for_twice(unit, tmp_path, corpus):
    units = [named(unit, f"clip{i}") for i in range(4)]
    with CaptionServer() as server:
        first = caption_all(stage(server), units, corpus, tmp_path / "1")
        again = caption_all(stage(server), units, corpus, tmp_path / "2")
        assert len(server.seen) == 4
        assert all(
            first[n].files[CAPTION].read_bytes() == again[n].files[CAPTION].read_bytes() for n in first
        )
        caption_all(
            stage(server, limits=Limits(per_interval=2, long_side=160)), units, corpus, tmp_path / "3"
        )
        assert len(server.seen) == 8
        caption_all(stage(server, revision="r2"), units, corpus, tmp_path / "4")
        assert len(server.seen) == 12


def test_what_was_accepted_as_advice_is_asked_again_once_it_counts(unit, tmp_path, corpus):
    name = unit.clip.clip_id
    with CaptionServer(script={name: ["chinese_scene", "ok"]}) as server:
        lax = caption_all(stage(server, content_checks="advise"), [unit], corpus, tmp_path / "1")[name]
        assert lax.facts["advised"] == "language of scene" and held(lax).scene.startswith("石")
        strict = caption_all(stage(server), [unit], corpus, tmp_path / "2")[name]
        assert held(strict).scene == SENTENCES["scene"] and len(server.seen) == 2


def test_settings_that_change_no_caption_leave_receipts_fresh(unit):
    with CaptionServer() as server:
        made = stage(server)
        receipt = run_unit(made, unit)
    receipts = {**unit.receipts, "caption": receipt}
    elsewhere = stage(serve={"in_flight": 3, "budget": Budget(tokens=1), "prices": Prices(engine_hour=2)})
    assert is_fresh(elsewhere, unit.clip, receipts)
    for change in ({"model": "m"}, {"attempts": 2}, {"content_checks": "advise"}, {"limits": Limits()}):
        assert config_digest(stage(**change)) != config_digest(made), change


def test_the_stage_travels_to_a_worker():
    made = pickle.loads(pickle.dumps(stage()))
    assert config_digest(made) == config_digest(stage()) and len(pickle.dumps(made)) < 4096


# --- endpoints ----------------------------------------------------------------------------------------------


def die_holding(server: CaptionServer, requests: int) -> None:
    """End a server as soon as it has been asked so often."""
    while len(server.seen) < requests:
        time.sleep(0.01)
    server.__exit__()


def test_an_engine_that_dies_loses_no_clip_and_captions_none_twice(unit, tmp_path, corpus, decoded_once):
    units = [named(unit, f"clip{i:02d}") for i in range(32)]
    first = CaptionServer(latency_s=0.3).__enter__()
    with CaptionServer(latency_s=0.1) as second:
        ending = threading.Thread(target=die_holding, args=(first, 3))
        ending.start()
        got = caption_all(stage(first, second, serve={"in_flight": 8}), units, corpus, tmp_path)
        ending.join()
    assert all(r.verdict.status is Status.OK for r in got.values())
    accepted = Counter(a.clip_id for a in read_attempts(corpus) if a.caption and a.clip_id)
    assert accepted == {u.clip.clip_id: 1 for u in units}
    assert sum(second.answered.values()) >= 29


def test_without_any_endpoint_left_the_run_ends_and_no_clip_has_an_outcome(unit, tmp_path, corpus):
    units = [named(unit, f"clip{i}") for i in range(4)]
    server = CaptionServer(latency_s=30).__enter__()
    threading.Thread(target=die_holding, args=(server, 4)).start()
    got = caption_all(stage(server, serve={"patience_s": 1.0, "timeout_s": 60}), units, corpus, tmp_path)
    assert all(isinstance(r, NoEndpoint) and "start them, run again" in str(r) for r in got.values())


def test_a_server_of_the_wrong_model_ends_the_run(unit, tmp_path, corpus):
    with CaptionServer("other") as server, pytest.raises(EndpointError, match="serves other, not qwen"):
        caption_all(stage(server, model="qwen"), [unit], corpus, tmp_path)


def test_a_clip_that_no_request_can_hold_is_rejected_before_it_is_sent(unit, tmp_path, corpus):
    with CaptionServer() as server:
        made = stage(server, limits=Limits(context=2000))
        got = caption_all(made, [unit], corpus, tmp_path)[unit.clip.clip_id]
        assert got.verdict.status is Status.REJECTED and not server.seen
    assert got.verdict.reasons[0].startswith("caption_frames: 3 intervals")


# --- what it costs ------------------------------------------------------------------------------------------


def test_a_budget_stops_new_requests_and_a_later_run_goes_on(unit, tmp_path, corpus, decoded_once):
    units = [named(unit, f"clip{i:02d}") for i in range(20)]
    serve = {"in_flight": 4, "budget": Budget(tokens=(5 + 9) * 1200)}
    with CaptionServer(latency_s=0.05) as server:
        first = caption_all(stage(server, serve=serve), units, corpus, tmp_path / "1")
        done = [n for n, r in first.items() if isinstance(r, Result)]
        left = [r for r in first.values() if not isinstance(r, Result)]
        assert 9 <= len(done) <= 9 + 4 and {type(e) for e in left} == {BudgetReached}
        assert "of 16800" in str(left[0])
        assert all(held(first[n]) for n in done)
        caption_all(stage(server), units, corpus, tmp_path / "2")
        assert server.counts == {u.clip.clip_id: 1 for u in units}


def test_accounts_hold_every_request_and_what_it_took(unit, tmp_path, corpus):
    units = [named(unit, n) for n in ("easy", "hard", "lost")]
    script = {"hard": ["spaces_to_the_limit", "chinese_scene", "ok"], "lost": ["abort"]}
    with CaptionServer(latency_s=0.05, script=script) as server:
        caption_all(stage(server), units, corpus, tmp_path)
    clips = per_clip(read_attempts(corpus))
    assert {n: (t.requests, t.retries, t.captions, t.tokens_in, t.tokens_out) for n, t in clips.items()} == {
        "easy": (1, 0, 1, 1000, 200),
        "hard": (3, 2, 1, 3000, 600),
        "lost": (4, 3, 0, 4000, 800),
    }
    total = totals(a for a in read_attempts(corpus) if a.clip_id)
    assert (total.requests, total.captions) == (8, 2) and total.engine_seconds <= total.request_seconds
    prices = Prices(million_tokens_in=1, million_tokens_out=10)
    assert total.money(prices) == pytest.approx((8000 * 1 + 1600 * 10) / 1e6)


def test_attempts_lie_in_few_files_beside_the_shards_and_show_what_was_said(
    unit, tmp_path, corpus, decoded_once
):
    units = [named(unit, f"clip{i:02d}") for i in range(30)]
    with CaptionServer(script={"clip07": ["refusal_in_scene", "ok"]}) as server:
        caption_all(stage(server), units, corpus, tmp_path)
    assert len(segments(corpus)) <= 4
    assert {s.path.split("/")[0] for s in corpus.list()} == {"captions"}
    rows = sorted((a for a in read_attempts(corpus) if a.clip_id == "clip07"), key=lambda a: a.number)
    assert [(a.number, a.change, a.parts) for a in rows] == [
        (1, "first", "scene,character,ui,events,flags"),
        (2, "seed, temperature", "scene"),
    ]
    assert rows[0].faults.startswith("refusal of scene") and "cannot help" in rows[0].reply
    assert not rows[0].caption and "stone hall" in rows[1].caption


def test_many_clips_at_once_keep_the_slots_of_a_server_busy(unit, tmp_path, corpus, decoded_once):
    """A small form of benchmarks.captions."""
    units = [named(unit, f"clip{i:03d}") for i in range(48)]
    with CaptionServer(latency_s=0.5, keep_bodies=False) as server:
        started = time.monotonic()
        caption_all(stage(server, serve={"in_flight": 8, "timeout_s": 20}), units, corpus, tmp_path)
        assert server.busy_share(8) >= 0.9, (server.busy_share(8), time.monotonic() - started)


def test_a_run_that_captions_nothing_keeps_what_was_captioned(unit: Unit) -> None:
    """`wp2 curate` after `wp2 caption`: captions stay, bytes and all, and so do verdicts against a clip."""
    log = run_unit(Caption(CaptionConfig(source="log"), pack_map_of(unit), ServeConfig()), unit)
    assert log.status is Status.OK
    after = replace(unit, receipts={**unit.receipts, "caption": log})
    plain = Caption(CaptionConfig(), SourceConfig(), ServeConfig())
    kept = run_unit(plain, after)
    assert kept.content == log.content and kept.config == config_digest(plain)
    assert read_unit_caption(replace(unit, receipts={**unit.receipts, "caption": kept})).provenance == "log"
    refused = log.model_copy(update={"status": Status.REJECTED, "reasons": ("caption_invalid: json",)})
    kept = run_unit(plain, replace(unit, receipts={**unit.receipts, "caption": refused}))
    assert kept.status is Status.REJECTED and kept.reasons == refused.reasons
    failed = log.model_copy(update={"status": Status.FAILED, "reasons": ("no_answer",)})
    kept = run_unit(plain, replace(unit, receipts={**unit.receipts, "caption": failed}))
    assert kept.status is Status.FAILED and kept.reasons == failed.reasons and kept.usable
    for held in (log, refused, failed):
        told = held.model_copy(update={"inputs": kept.inputs})
        assert is_fresh(plain, unit.clip, {**unit.receipts, "caption": told})


def pack_map_of(unit: Unit) -> SourceConfig:
    return pack_map(Path(unit.corpus.root).parent)
