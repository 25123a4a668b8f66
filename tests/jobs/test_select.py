"""`wp2 select` on a corpus with shards: tiers in the index, no tar and no receipt written, kills healed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jobs import select as jobs_select
from jobs.select import run_calibrate, run_select, show
from pipeline.ledger import Ledger
from pipeline.quality.facts import read_facts
from pipeline.shards import tiers as shard_tiers
from pipeline.shards.inventory import index_path, inventory_path, read_inventory
from pipeline.shards.read import read_index
from pipeline.shards.tiers import heal
from pipeline.shards.verify import verify
from pipeline.shards.write import write_root
from pipeline.store import Store, StoreError
from schemas.policy import Policy
from schemas.quality import Status
from schemas.sample import UNSELECTED
from tests.pipeline.selection_corpus import STAGES, Made, make
from tests.pipeline.shards_corpus import CONFIG, PARTITION, put, samples, snapshot

STRICT = Policy(floor={"noise": 0.5})
CONSOLE = Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def _stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_select, "CLIP_STAGES", STAGES)


@pytest.fixture
def corpus(tmp_path: Path) -> Store:
    """Twelve real samples in shards with noise scores 0.30, 0.35, ... 0.85, and a clip that was refused."""
    made = [
        Made(f"c{i:02}", scores={"noise": 0.3 + 0.05 * i}, clip_id=s.sample_id)
        for i, s in enumerate(samples())
    ]
    refused = Made("refused", ends=("gates", Status.REJECTED, "frozen: one picture"))
    corpus = make(str(tmp_path / "corpus"), [*made, refused])
    put(corpus, PARTITION, samples(), CONFIG)
    write_root(corpus)
    return corpus


def select(corpus: Store, policy: Policy = STRICT) -> Any:
    return run_select(corpus.url, policy, {}, CONSOLE)


def stamps(corpus: Store) -> dict[str, int]:
    root = Path(corpus.root)
    return {str(p.relative_to(root)): p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}


def tiers(corpus: Store) -> dict[str, tuple[str, str]]:
    rows = read_index(corpus, ["sample_id", *UNSELECTED]).to_pylist()
    return {r["sample_id"]: (r["tier"], r["tier_reasons"]) for r in rows}


def test_the_index_holds_the_tiers_and_stays_verified(corpus: Store) -> None:
    assert {t for t, _ in tiers(corpus).values()} == {"pending"}
    report = select(corpus)
    found = list(tiers(corpus).values())
    assert [t for t, _ in found] == ["out"] * 4 + ["high"] * 8
    assert found[0] == ("out", "noise: 0.300 under 0.500 (floor)") and found[-1] == ("high", "")
    assert verify(corpus) == []
    assert report.tiers == {"high": 8, "base": 0}
    assert report.steps[-1].left == {"noise": 4}
    assert report.clips == 13 == 8 + sum(n for s in report.steps for n in s.left.values())


def test_another_threshold_rewrites_no_tar_and_no_receipt(corpus: Store) -> None:
    select(corpus)
    before, files = stamps(corpus), snapshot(corpus)
    select(corpus, Policy(floor={"noise": 0.6}))
    after = stamps(corpus)
    assert set(after) == set(before)
    changed = {p for p in after if after[p] != before[p]} - {".lock"}
    assert changed == {
        *(f"index/{name}" for name in (f"{PARTITION}.parquet", f"{PARTITION}.json", "root.json")),
        *(f"selection/{name}" for name in (f"{PARTITION}.parquet", "policy.json")),
    }
    assert [t for t, _ in tiers(corpus).values()] == ["out"] * 6 + ["high"] * 6
    assert verify(corpus) == []
    select(corpus)
    assert snapshot(corpus) == files


def test_the_same_policy_again_writes_nothing_but_the_root(corpus: Store) -> None:
    select(corpus)
    before = stamps(corpus)
    assert select(corpus).written == 0
    after = stamps(corpus)
    assert {p for p in after if after[p] != before[p]} <= {".lock", "index/root.json"}


def test_shards_that_are_written_again_get_their_tiers_back(corpus: Store) -> None:
    select(corpus)
    files = snapshot(corpus)
    put(corpus, PARTITION, samples(), CONFIG)
    assert {t for t, _ in tiers(corpus).values()} == {"pending"}
    select(corpus)
    assert snapshot(corpus) == files


@pytest.mark.parametrize("again", ["heal", "select", "other policy"])
def test_a_kill_between_index_and_inventory_is_healed(
    corpus: Store, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    select(corpus)
    files = snapshot(corpus)
    looser = Policy(floor={"noise": 0.4})

    def killed(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shard_tiers, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            select(corpus, looser)
    with pytest.raises(StoreError, match="is not what its inventory names"):
        read_index(corpus)
    if again == "heal":
        assert heal(corpus) == 1
        assert [t for t, _ in tiers(corpus).values()] == ["out"] * 2 + ["high"] * 10
    select(corpus, looser if again == "select" else STRICT)
    assert verify(corpus) == []
    if again != "select":
        assert snapshot(corpus) == files


def test_an_index_that_was_changed_otherwise_is_refused(corpus: Store) -> None:
    select(corpus)
    other = read_inventory(corpus, PARTITION)
    put(corpus, PARTITION, samples()[1:], CONFIG)
    data = corpus.read(index_path(PARTITION))
    put(corpus, PARTITION, samples(), CONFIG)
    assert read_inventory(corpus, PARTITION).identity == other.identity
    corpus.write(index_path(PARTITION), data)
    before = corpus.read(inventory_path(PARTITION))
    assert heal(corpus) == 0 and corpus.read(inventory_path(PARTITION)) == before
    with pytest.raises(StoreError, match="wp2 verify"):
        select(corpus)


def test_calibration_freezes_a_version_draws_it_and_leaves_the_tiers(corpus: Store, tmp_path: Path) -> None:
    select(corpus)
    before = tiers(corpus)
    version, levels = run_calibrate(corpus.url, Policy(min_clips=5), {}, None, tmp_path / "out/quality.png")
    assert version == 2 and tiers(corpus) == before and verify(corpus) == []
    assert levels.groups["doom"]["noise"].distribution.n == 12
    assert (tmp_path / "out/quality.png").read_bytes().startswith(b"\x89PNG")


def test_the_funnel_is_shown_with_its_reasons(corpus: Store) -> None:
    console = Console(file=io.StringIO(), width=200)
    show(select(corpus), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("recordings", "1 rejected: frozen", "4 noise", "high", "floors alone"):
        assert part in text


def test_a_clip_that_is_in_no_shard_is_counted_there(corpus: Store) -> None:
    put(corpus, PARTITION, samples()[:10], CONFIG)
    report = select(corpus)
    assert {s.name: s.left for s in report.steps}["shards"] == {"not in a shard": 2}
    assert report.clips == sum(report.tiers.values()) + sum(n for s in report.steps for n in s.left.values())


def test_receipts_in_work_count_as_those_that_are_sealed(corpus: Store) -> None:
    before = read_facts(corpus, STAGES)
    ledger = Ledger(corpus)
    held = ledger.load(PARTITION)
    some = sorted(held)[0]
    ledger.append(PARTITION, held[some].values())
    ledger.flush()
    after = read_facts(corpus, STAGES)
    assert after.table.equals(before.table)
    assert np.array_equal(after.scores, before.scores, equal_nan=True)
