"""Generations: what is in a corpus never moves; what its source says may change."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa

from pipeline.catalogue import DESCRIPTION, Catalogue, split_of, to_clips
from pipeline.store import Store
from schemas.clip import Clip, Sidecar


def found(count: int, note: str = "", log: Sidecar | None = None) -> pa.Table:
    rows = []
    for i in range(count):
        sha = hashlib.sha256(str(i).encode()).hexdigest()
        clip = Clip(clip_id=sha[:16], recording_id=sha[:16], source="folder:clips",
                    source_path=f"{i}{note}.mp4", bytes=1, sha256=sha, log=log)  # fmt: skip
        rows.append(clip.model_dump(mode="json"))
    return pa.Table.from_pylist(sorted(rows, key=lambda r: r["clip_id"]), schema=DESCRIPTION)


def places(catalogue: Catalogue) -> dict[str, tuple[str, str]]:
    table = catalogue.table(["clip_id", "partition", "split"]).to_pylist()
    return {r["clip_id"]: (r["partition"], r["split"]) for r in table}


def test_growth_makes_a_generation_and_moves_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = Catalogue.load(store).update(found(20), 8, 0.3)
    old = store.list("catalogue")
    grown = Catalogue.load(store).update(found(22), 8, 0.3)
    assert list(first.parts) == ["g0000-p00000", "g0000-p00001", "g0000-p00002"]
    assert list(grown.parts)[-1] == "g0001-p00000"
    assert places(grown).items() >= places(first).items()
    assert set(old) < set(store.list("catalogue"))
    assert Catalogue.load(store) == grown


def test_a_listing_without_news_writes_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    made = Catalogue.load(store).update(found(20), 8, 0.3)
    before = store.list("catalogue")
    again = Catalogue.load(store).update(found(20), 8, 0.3)
    assert store.list("catalogue") == before
    assert again == made


def test_a_moved_file_and_a_changed_log_are_the_same_clip_described_anew(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = Catalogue.load(store).update(found(5), 8, 0.3)
    log = Sidecar(path="a.csv", digest="0123456789abcdef")
    moved = Catalogue.load(store).update(found(5, "-moved", log), 8, 0.3)
    assert places(moved) == places(first)
    assert moved.parts != first.parts
    assert all(c.log == log and c.source_path.endswith("-moved.mp4") for c, _ in to_clips(moved.table()))


def test_a_clip_that_left_the_source_stays_in_the_corpus(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = Catalogue.load(store).update(found(5), 8, 0.3)
    fewer = Catalogue.load(store).update(found(2), 8, 0.3)
    assert fewer == first


def test_clips_come_back_as_records(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    table = found(3, log=Sidecar(path="a.csv", digest="0123456789abcdef"))
    Catalogue.load(store).update(table, 8, 0.3)
    clips = [c for c, _ in to_clips(Catalogue.load(store).table())]
    assert [Clip.model_validate(c.model_dump(mode="json")) for c in clips] == clips
    assert [c.model_dump(mode="json") for c in clips] == [
        {**r, "also_at": []} | {"log": r["log"]} for r in table.to_pylist()
    ]


def test_splits_hold_their_share_and_depend_on_the_id_alone() -> None:
    ids = [hashlib.sha256(str(i).encode()).hexdigest()[:16] for i in range(5000)]
    share = sum(split_of(i, 0.1) == "val" for i in ids) / len(ids)
    assert 0.085 < share < 0.115
    assert all(split_of(i, 0.2) == "val" for i in ids if split_of(i, 0.1) == "val")
