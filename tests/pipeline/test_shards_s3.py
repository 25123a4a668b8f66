"""The same corpus on an object store: written, read, verified, and no partial object (moto's S3 server)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import s3fs
from shards_corpus import CONFIG, PARTITION, content, put, samples, snapshot, write

from pipeline.shards.check import Finding
from pipeline.shards.read import CorruptMember, read_index, read_sample
from pipeline.shards.tar import ShardError
from pipeline.shards.verify import verify
from pipeline.store import Store
from schemas.sample import FAMILIES


@pytest.fixture(scope="module")
def bucket(s3: dict[str, Any]) -> Store:
    s3fs.S3FileSystem(**s3).mkdir("bucket")
    return Store("s3://bucket/corpus", s3)


def test_an_object_store_holds_the_same_bytes_and_reads_and_verifies_alike(
    bucket: Store, tmp_path: Path
) -> None:
    local = Store(str(tmp_path / "local"))
    write(local)
    write(bucket)
    assert snapshot(bucket) == snapshot(local)
    for row, want in zip(read_index(bucket).to_pylist(), samples(), strict=True):
        for family, suffixes in FAMILIES.items():
            got = read_sample(bucket, row[family])
            assert got == {s: content(want.members[s]) for s in suffixes}
    assert verify(bucket) == []


def test_damage_on_an_object_store_is_named(bucket: Store) -> None:
    write(bucket)
    row = read_index(bucket).to_pylist()[-1]
    place = row["media"]
    good = bucket.read(place["tar"])
    bad = bytearray(good)
    bad[place["members"][0]["offset"]] ^= 1
    bucket.write(place["tar"], bytes(bad))
    name = place["members"][0]["name"]
    assert verify(bucket) == [Finding(place["tar"], name, "it is damaged (its checksum differs)")]
    with pytest.raises(CorruptMember, match=name):
        read_sample(bucket, place)
    for cut in (place["offset"] + 5, place["offset"] - 5):  # inside the range, and before its start
        bucket.write(place["tar"], good[:cut])
        with pytest.raises(CorruptMember, match="cut short"):
            read_sample(bucket, place)


def test_a_write_that_fails_leaves_no_object_for_what_it_did_not_finish(bucket: Store) -> None:
    other = Store("s3://bucket/other", bucket.options)
    with pytest.raises(ShardError):
        put(other, PARTITION, [samples()[0], samples()[0]], CONFIG)
    assert other.list() == []


def test_a_shorter_rewrite_removes_objects_that_are_left_over(bucket: Store) -> None:
    other = Store("s3://bucket/shorter", bucket.options)
    write(other)
    put(other, PARTITION, samples()[:2], CONFIG)
    assert [s.path for s in other.list("shards/media")] == [f"shards/media/{PARTITION}-0000.tar"]
