"""Attempts and accounts: only the last seconds can be lost, nothing counts twice, and a sample foretells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.caption.accounts import Accounts, Budget, BudgetReached, Prices, estimate, per_clip, totals
from pipeline.caption.attempts import FOLDER, Attempt, AttemptLog, merge, read_attempts, segments, storable
from pipeline.store import Store, StoreError


def attempt(log: AttemptLog, clip: str = "a", **more: object) -> Attempt:
    values = {
        "id": log.next_id(), "key": "k", "clip_id": clip, "number": 1, "change": "first", "parts": "scene",
        "endpoint": "http://h", "model": "m", "status": 200, "finish": "stop", "faults": "", "at": 1.0,
        "tokens_in": 1000, "tokens_out": 100, "bound_tokens": 5000, "seconds": 2.0, "engine_seconds": 0.5,
        "reply": "{}",
    }  # fmt: skip
    return Attempt(**values | more)


@pytest.fixture
def corpus(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_attempts_come_back_as_they_were_made(corpus):
    log = AttemptLog(corpus)
    made = [attempt(log, tokens_in=None), attempt(log, "b", reply="石 \n", caption="{}")]
    log.add("p1", made[0])
    log.add("p2", made[1])
    log.flush()
    assert sorted(read_attempts(corpus), key=lambda a: a.clip_id) == made
    assert list(read_attempts(corpus, "p2")) == made[1:]
    log.flush()
    assert len(segments(corpus)) == 2


def test_a_reply_that_utf8_cannot_hold_is_stored_written_out(corpus):
    log = AttemptLog(corpus)
    log.add("p", attempt(log, reply=storable("a\ud800b")))
    log.flush()
    assert next(read_attempts(corpus)).reply == "a\\ud800b"


def test_the_first_accepted_caption_of_a_key_wins_whichever_process_made_it(corpus):
    one, two = AttemptLog(corpus), AttemptLog(corpus)
    assert one.accepted("p", "k") == []
    two.add("p", attempt(two, at=7.0, caption="second"))
    two.flush()
    one.add("p", attempt(one, at=9.0, caption="third"))
    assert [a.caption for a in one.accepted("p", "k")] == ["second", "third"]
    two.add("p", attempt(two, at=5.0, caption="first"))
    two.add("p", attempt(two, at=4.0))
    two.flush()
    assert [a.caption for a in one.accepted("p", "k")] == ["first", "second", "third"]
    assert one.accepted("p", "other") == [] and one.accepted("p9", "k") == []


def test_captions_of_many_partitions_do_not_pile_up_in_memory(corpus):
    log = AttemptLog(corpus)
    for i in range(9):
        log.add(f"p{i}", attempt(log, caption="c"))
        log.flush()
        assert len(log.accepted(f"p{i}", "k")) == 1
    assert len(log._held) <= 4 and len(log.accepted("p0", "k")) == 1


def test_merging_keeps_every_attempt_once_also_when_it_is_killed_half_way(corpus, monkeypatch):
    log = AttemptLog(corpus)
    for i in range(20):
        log.add("p", attempt(log, f"c{i}"))
        log.flush()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "remove", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            merge(corpus)
    assert len(segments(corpus)) == 21 and totals(read_attempts(corpus)).requests == 20
    assert merge(corpus) == 21 and len(segments(corpus)) == 1
    assert totals(read_attempts(corpus)).requests == 20
    assert merge(corpus) == 0


def test_attempts_that_cannot_be_published_are_kept_for_the_next_time(corpus, monkeypatch):
    log = AttemptLog(corpus)
    log.add("p", attempt(log))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", lambda *_: (_ for _ in ()).throw(StoreError("disk full")))
        with pytest.raises(StoreError):
            log.flush()
    log.add("p", attempt(log, "b"))
    log.flush()
    assert [a.clip_id for a in read_attempts(corpus)] == ["a", "b"]


def test_a_writer_killed_at_any_time_leaves_whole_segments_alone(corpus):
    code = (
        "import sys; from tests.pipeline.test_caption_attempts import attempt, AttemptLog, Store\n"
        "log = AttemptLog(Store(sys.argv[1]))\n"
        "while True:\n"
        "    [log.add('p', attempt(log, reply='x' * 8000)) for _ in range(200)]\n"
        "    log.flush(); print('.', flush=True)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, corpus.url], cwd=root, stdout=subprocess.PIPE, env={**os.environ}
    )
    assert process.stdout is not None and process.stdout.readline()
    time.sleep(0.15)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = list(read_attempts(corpus))
    assert len(found) >= 200 and len(found) % 200 == 0 and len({a.id for a in found}) == len(found)


def test_a_damaged_segment_is_named_with_what_to_do(corpus):
    corpus.write(f"{FOLDER}/p/segment-00000001-0a.parquet", b"PAR1 half")
    with pytest.raises(StoreError, match="damaged: delete it"):
        list(read_attempts(corpus))


def test_tokens_that_were_not_counted_are_taken_for_the_most_they_can_be(corpus):
    log = AttemptLog(corpus)
    total = totals([attempt(log), attempt(log, tokens_in=None, tokens_out=None)])
    assert (total.tokens_in, total.unmetered, total.bound_tokens) == (1000, 1, 5000)
    assert total.money(Prices(million_tokens_in=1, million_tokens_out=2)) == pytest.approx(
        (1000 * 1 + 100 * 2 + 5000 * 2) / 1e6
    )


@pytest.mark.parametrize(
    "budget, after",
    [
        (Budget(), None),
        (Budget(tokens=2200), 2),
        (Budget(tokens=2201), 3),
        (Budget(money=0.0029), 3),
        (Budget(engine_hours=1.5 / 3600), 3),
        (Budget(tokens=0), 0),
    ],
)
def test_a_budget_is_reached_with_the_attempt_that_uses_it_up(corpus, budget, after):
    log = AttemptLog(corpus)
    accounts = Accounts(Prices(million_tokens_in=1), budget)
    for i in range(6):
        if i == after:
            with pytest.raises(BudgetReached, match="run again to go on"):
                accounts.require()
            return
        accounts.require()
        accounts.total.add(attempt(log))
    assert after is None


def test_processes_share_a_budget():
    assert Budget(tokens=100, money=3.0).part(4) == Budget(tokens=25, money=0.75)
    assert Budget().part(4) == Budget()


def test_an_estimate_covers_what_a_run_then_takes(corpus):
    """From samples of 40 clips of a run of 2,000, drawn 200 times: 9 in 10 within two spreads."""
    log = AttemptLog(corpus)
    rng = np.random.default_rng(7)
    tokens = rng.gamma(9.0, 700.0, 2000).astype(int) * rng.choice([1, 2, 3], 2000, p=[0.85, 0.1, 0.05])
    rows = [attempt(log, f"c{i}", tokens_in=int(n), engine_seconds=n / 1e4) for i, n in enumerate(tokens)]
    within = 0
    for _ in range(200):
        sample = [rows[i] for i in rng.choice(2000, 40, replace=False)]
        found = estimate(sample, 2000)["tokens_in"]
        within += abs(found.total - tokens.sum()) <= 2 * found.spread
    assert within >= 180
    found = estimate(rows, 2000, Prices(million_tokens_in=2, engine_hour=3))
    assert found["tokens_in"].mean == pytest.approx(tokens.mean())
    assert found["money"].total == pytest.approx(tokens.sum() * 2e-6 + tokens.sum() / 1e4 / 3600 * 3)


def test_an_estimate_counts_clips_and_not_requests(corpus):
    log = AttemptLog(corpus)
    rows = [attempt(log, "a"), attempt(log, "a", number=2), attempt(log, "b"), attempt(log, "b", number=2)]
    assert estimate(rows, 10)["requests"].total == 20 and estimate(rows, 10)["requests"].spread == 0
    assert per_clip(rows)["a"].retries == 1


def test_an_estimate_from_one_clip_is_refused(corpus):
    with pytest.raises(ValueError, match="sample of two clips"):
        estimate([attempt(AttemptLog(corpus))], 10)
