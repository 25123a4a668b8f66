"""The indexed reader: any sample by one range read, its members checked.

Source: DESIGN rules 2, 9; spec/faults.md S2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pipeline.shards.inventory import Inventory, partition_names, read_inventory
from pipeline.shards.tar import Place
from pipeline.store import Store, StoreError
from schemas.sample import index_schema

_READS_IN_FLIGHT = 16  # 710 partitions x 2 GETs of some 30 ms each: 3 s instead of 43 s


class CorruptMember(StoreError):
    """A member whose bytes are not those that were written."""

    def __init__(self, member: str, tar: str, problem: str) -> None:
        self.member, self.tar = member, tar
        super().__init__(f"member {member} of {tar} {problem}; run `wp2 verify`, then restore that tar")


def read_inventories(corpus: Store) -> list[Inventory]:
    """Inventories of the published partitions, by name. Raises StoreError when one is damaged."""
    names = partition_names([s.path for s in corpus.list("index")], ".json")
    with ThreadPoolExecutor(_READS_IN_FLIGHT) as pool:
        return list(pool.map(partial(read_inventory, corpus), names))


def read_index(corpus: Store, columns: Sequence[str] | None = None) -> pa.Table:
    """Index of the whole corpus: one row a sample in the order of partition and id.

    columns: of schemas.sample.index_schema; all when None. A full row takes some 0.5 KB of memory.
    Raises StoreError when an index is missing or is not the one that its inventory names.
    """
    inventories = read_inventories(corpus)
    with ThreadPoolExecutor(_READS_IN_FLIGHT) as pool:
        tables = list(pool.map(lambda inventory: read_partition(corpus, inventory, columns), inventories))
    if tables:
        return pa.concat_tables(tables)
    empty = index_schema().empty_table()
    return empty if columns is None else empty.select(columns)


def read_partition(corpus: Store, inventory: Inventory, columns: Sequence[str] | None = None) -> pa.Table:
    """Index of one partition. Raises StoreError when it is not the one that the inventory names."""
    data = corpus.read(inventory.index.path)
    if hashlib.sha256(data).hexdigest() != inventory.index.sha256:
        raise StoreError(f"{inventory.index.path} is not what its inventory names; run `wp2 verify`")
    return pq.read_table(pa.BufferReader(data), columns=None if columns is None else list(columns))


def read_sample(corpus: Store, place: Place, check: bool = True) -> dict[str, bytes]:
    """Members of a sample in one family, by suffix, from one range read.

    place: the family's column of an index row, as a dict (`row["media"]`).
    check: compare every member with its checksum (xxh64).
    Raises CorruptMember on a short read or a checksum that differs, StoreError when the tar is missing.
    """
    try:
        data = corpus.read(place["tar"], place["offset"], place["size"])
    except StoreError as error:
        if not corpus.exists(place["tar"]):
            raise
        raise CorruptMember(place["members"][-1]["name"], place["tar"], f"is cut short ({error})") from None
    return {suffix: bytes(content) for suffix, content in split_sample(place, data, check).items()}


def split_sample(place: Place, data: bytes | memoryview, check: bool = True) -> dict[str, memoryview]:
    """Members of a sample in one family, by suffix, in the bytes of its range: nothing is copied.

    Raises CorruptMember when the range is short, or a checksum (xxh64) differs.
    """
    if len(data) != place["size"]:
        raise CorruptMember(place["members"][-1]["name"], place["tar"], "is cut short")
    members, whole = {}, memoryview(data)
    for member in place["members"]:
        start = member["offset"] - place["offset"]
        content = whole[start : start + member["size"]]
        if check and xxhash.xxh64_intdigest(content) != member["xxh64"]:
            raise CorruptMember(member["name"], place["tar"], "is damaged (its checksum differs)")
        members[member["name"].partition(".")[2]] = content
    return members
