"""What the shard writer promises: legal ids, whole samples in fixed order, same samples same bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import tarfile
from pathlib import Path

import numpy as np
import pytest
from shards_corpus import CONFIG, PARTITION, content, npy, put, samples, snapshot, write

from pipeline.shards.inventory import Inventory, inventory_path, unseal, whole
from pipeline.shards.read import read_index, read_sample
from pipeline.shards.tar import ShardError, TarWriter
from pipeline.shards.verify import verify
from pipeline.shards.write import Sample, ShardConfig
from pipeline.store import Store, StoreError
from schemas.sample import FAMILIES

ONE_TAR = ShardConfig()


@pytest.fixture
def corpus(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "corpus"))


def renamed(sample: Sample, name: str) -> Sample:
    note = sample.members["json"].replace(sample.sample_id.encode(), name.encode())
    facts = {k: name if v == sample.sample_id else v for k, v in sample.facts.items()}
    return Sample(name, facts, {**sample.members, "json": note})


def with_member(sample: Sample, suffix: str, data: bytes) -> Sample:
    return dataclasses.replace(sample, members={**sample.members, suffix: data})


def names(corpus: Store, path: str) -> list[str]:
    with tarfile.open(corpus.full(path)) as tar:
        return tar.getnames()


def test_members_lie_together_in_the_fixed_order_in_three_tars_a_family(corpus: Store) -> None:
    write(corpus)
    for family, suffixes in FAMILIES.items():
        paths = [f"shards/{family}/{PARTITION}-{i:04d}.tar" for i in range(3)]
        assert [s.path for s in corpus.list(f"shards/{family}")] == paths
        want = [f"{s.sample_id}.{suffix}" for s in samples() for suffix in suffixes]
        assert [name for path in paths for name in names(corpus, path)] == want


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = Store(str(tmp_path / "a")), Store(str(tmp_path / "b"))
    write(first)
    write(second)
    write(second)
    assert snapshot(first) == snapshot(second)


def test_headers_say_nothing_of_when_and_by_whom(corpus: Store) -> None:
    write(corpus)
    with tarfile.open(corpus.full(f"shards/media/{PARTITION}-0000.tar")) as tar:
        seen = {(i.mtime, i.uid, i.gid, i.uname, i.gname, i.mode, i.type) for i in tar}
    assert seen == {(0, 0, 0, "", "", 0o644, tarfile.REGTYPE)}


def test_inventory_holds_size_and_sha256_of_what_was_published(corpus: Store) -> None:
    inventory = put(corpus, PARTITION, samples(), CONFIG)
    assert inventory == unseal(corpus.read(inventory_path(PARTITION)), Inventory, "")
    assert inventory.samples == len(samples())
    for entry in inventory.files:
        data = corpus.read(entry.path)
        assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_new_tar_starts_where_the_target_would_be_passed(corpus: Store) -> None:
    inventory = put(corpus, PARTITION, samples(), CONFIG)
    media = [t for t in inventory.tars if "/media/" in t.path]
    assert len(media) == 3
    assert all(t.bytes <= CONFIG.target_bytes["media"] for t in media)


def test_a_sample_larger_than_the_target_gets_a_tar_of_its_own(corpus: Store) -> None:
    inventory = put(corpus, PARTITION, samples(), ShardConfig(target_bytes=dict.fromkeys(FAMILIES, 1)))
    assert len(inventory.tars) == len(FAMILIES) * len(samples())


def test_no_samples_make_an_index_and_an_inventory_and_no_tar(corpus: Store) -> None:
    inventory = put(corpus, PARTITION, [], ONE_TAR)
    assert (inventory.samples, inventory.tars) == (0, ())
    assert read_index(corpus).num_rows == 0
    assert [s.path for s in corpus.list()] == [f"index/{PARTITION}.json", f"index/{PARTITION}.parquet"]


@pytest.mark.parametrize("name", ["clip_v1.2_w000", "Clip", "a b", "дом", "", "a/b", "x" * 97])
def test_an_illegal_key_raises_and_leaves_nothing(corpus: Store, name: str) -> None:
    with pytest.raises(ShardError, match="must match"):
        put(corpus, PARTITION, [renamed(samples()[0], name)], ONE_TAR)
    assert snapshot(corpus) == {}
    assert corpus.sweep() == 0


def test_the_longest_legal_key_reads_back(corpus: Store) -> None:
    sample = renamed(samples()[0], "z" * 96)
    inventory = put(corpus, PARTITION, [sample], ONE_TAR)
    tar = next(t.path for t in inventory.tars if "annotations" in t.path)
    assert names(corpus, tar)[1] == "z" * 96 + ".actions.npy"
    (row,) = read_index(corpus).to_pylist()
    assert read_sample(corpus, row["annotations"])["actions.npy"] == sample.members["actions.npy"]


def test_unsorted_and_repeated_ids_raise(corpus: Store) -> None:
    first, second = samples()[:2]
    for wrong in ([second, first], [first, first]):
        with pytest.raises(ShardError, match="sorted by id, each once"):
            put(corpus, PARTITION, wrong, ONE_TAR)
    assert snapshot(corpus) == {}


def test_a_missing_or_unknown_member_or_fact_raises(corpus: Store) -> None:
    good = samples()[0]
    less = {k: v for k, v in good.members.items() if k != "grid.npy"}
    for members, facts, match in (
        (less, good.facts, "lacks the member grid.npy"),
        ({**good.members, "txt": b""}, good.facts, "unknown member txt"),
        (good.members, {k: v for k, v in good.facts.items() if k != "split"}, "lacks the fact split"),
        (good.members, {**good.facts, "colour": 1}, "unknown fact colour"),
    ):
        with pytest.raises(ShardError, match=match):
            put(corpus, PARTITION, [Sample(good.sample_id, facts, members)], ONE_TAR)


def test_content_that_is_not_what_the_schema_says_is_never_published(corpus: Store) -> None:
    good = samples()[0]
    note = good.members["json"]
    for suffix, data, match in (
        ("actions.npy", npy(np.zeros((3, 6), np.float32)), "must be float32"),
        ("poses.npy", npy(np.array(["x"], object).astype("U1")), "must be float32"),
        ("grid.npy", good.members["grid.npy"] + b"more", "nothing else"),
        ("json", note.replace(b'"schema_version":1', b'"schema_version":null'), "strict Annotation"),
        ("json", note.replace(b'"schema_version":1,', b""), "strict Annotation"),
        ("json", note.replace(b'"fps_den":1', b'"fps_den":1,"fps_den":2'), "repeated key"),
        ("json", note.replace(b'"action_lag_frames":0.0', b'"action_lag_frames":NaN'), "not JSON"),
        ("json", note.replace(b'"action_lag_frames":0.0', b'"action_lag_frames":0'), "another type"),
        ("json", note.replace(b'"train"', b'"test"'), "the index says 'train'"),
    ):
        assert data != good.members[suffix]
        with pytest.raises(ShardError, match=match):
            put(corpus, PARTITION, [with_member(good, suffix, data)], ONE_TAR)
    assert [p for p in snapshot(corpus) if "annotations" in p] == []


def test_a_shorter_rewrite_removes_the_tars_that_are_left_over(corpus: Store) -> None:
    write(corpus)
    before = snapshot(corpus)
    put(corpus, PARTITION, samples()[:4], CONFIG)
    tars = [p for p in snapshot(corpus) if p.startswith("shards/")]
    assert len(tars) < len([p for p in before if p.startswith("shards/")])
    assert {r["sample_id"] for r in read_index(corpus).to_pylist()} == {s.sample_id for s in samples()[:4]}


def test_a_rewrite_that_fails_leaves_no_inventory_over_changed_tars(corpus: Store) -> None:
    write(corpus)

    def wrong() -> list[Sample]:
        return [*samples()[1:], samples()[0]]  # the last one is out of order, after tars were published

    with pytest.raises(ShardError):
        put(corpus, PARTITION, wrong(), CONFIG)
    assert not corpus.exists(inventory_path(PARTITION))
    write(corpus)
    assert verify(corpus) == []


def test_a_failed_rewrite_of_the_same_bytes_keeps_the_inventory(corpus: Store) -> None:
    write(corpus)
    before = snapshot(corpus)
    with pytest.raises(ShardError):
        put(corpus, PARTITION, [*samples(), samples()[0]], CONFIG)
    assert snapshot(corpus) == before


def test_a_path_and_its_bytes_make_the_same_tar(corpus: Store, tmp_path: Path) -> None:
    other = Store(str(tmp_path / "other"))
    held = [with_member(s, "mp4", content(s.members["mp4"])) for s in samples()]
    assert put(corpus, PARTITION, samples(), CONFIG) == put(other, PARTITION, held, CONFIG)


def test_a_damaged_record_is_refused_whatever_byte_changes(corpus: Store) -> None:
    write(corpus)
    good = corpus.read(inventory_path(PARTITION))
    for at, flip in itertools.product(range(len(good)), (1, ord(" ") ^ ord("\n"))):
        bad = good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :]
        with pytest.raises(StoreError, match="write it again"):
            unseal(bad, Inventory, "index/x.json")


def test_a_file_that_changes_size_while_it_is_read_raises() -> None:
    """/proc files say 0 bytes and give more, as a file that is being appended to does."""
    with pytest.raises(ShardError, match="its file is in use"):
        TarWriter(io.BytesIO()).add("x.mp4", Path("/proc/self/status"))


def notes_only(found: tuple[Sample, ...]) -> list[Sample]:
    return [dataclasses.replace(s, members={k: v for k, v in s.members.items() if k != "mp4"}) for s in found]


def test_a_kept_family_needs_no_members_and_keeps_its_files(corpus: Store) -> None:
    write(corpus)
    before = snapshot(corpus)
    media = {s.path: s.version for s in corpus.list("shards/media")}
    put(corpus, PARTITION, notes_only(samples()), CONFIG, keep=["media"])
    assert snapshot(corpus) == before
    assert {s.path: s.version for s in corpus.list("shards/media")} == media


def test_a_family_is_kept_only_over_a_whole_partition_and_the_same_samples(corpus: Store) -> None:
    write(corpus)
    before = snapshot(corpus)
    for wrong in (samples()[1:], samples()[:-1], samples()[:3] + samples()[4:]):
        with pytest.raises(ShardError, match="the kept media tars hold sample"):
            put(corpus, PARTITION, notes_only(wrong), ONE_TAR, keep=["media"])
        assert snapshot(corpus) == before
    corpus.remove(f"shards/media/{PARTITION}-0001.tar")
    with pytest.raises(StoreError, match="not whole"):
        put(corpus, PARTITION, notes_only(samples()), CONFIG, keep=["media"])


def test_whole_sees_every_missing_and_shortened_file_and_any_change_of_the_inventory(corpus: Store) -> None:
    write(corpus)
    files = [p for p in snapshot(corpus) if PARTITION in p]
    assert whole(corpus, PARTITION) and whole(corpus, "g0000-p00001")
    for path in files:
        data = corpus.read(path)
        for bad in (None, b"", data[:-1], data + b"0"):
            corpus.remove(path) if bad is None else corpus.write(path, bad)
            sizes = {s.path: s.size for folder in ("shards", "index") for s in corpus.list(folder)}
            assert not whole(corpus, PARTITION) and not whole(corpus, PARTITION, sizes)
        corpus.write(path, data)
    inventory = corpus.read(inventory_path(PARTITION))
    for at in range(0, len(inventory), 7):
        corpus.write(inventory_path(PARTITION), inventory[:at] + b"\xff" + inventory[at + 1 :])
        assert not whole(corpus, PARTITION)
    corpus.write(inventory_path(PARTITION), corpus.read(inventory_path("g0000-p00001")))
    assert not whole(corpus, PARTITION)
