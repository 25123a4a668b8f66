"""The tiers in a published index: filled in and changed without touching a tar.

The index is replaced first, its inventory after it. Between the two the inventory names the index as it was:
readers refuse that, and `heal` or the next `set_tiers` brings the inventory to the index, which it knows by
what is left of it without tiers. Source: DESIGN 2, rules 2, 10.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.shards.inventory import (
    FileEntry,
    Inventory,
    index_path,
    inventory_path,
    partition_names,
    read_inventory,
    seal,
)
from pipeline.shards.write import index_bytes
from pipeline.store import Store, StoreError
from schemas.sample import UNSELECTED, index_schema

_REMEDY = "delete it and run `wp2 curate` again"
Tiers = Mapping[str, tuple[str, str]]
"""By sample id: its tier, and the reasons joined by |."""


def set_tiers(corpus: Store, partition: str, tiers: Tiers) -> tuple[list[str], bool]:
    """Fill in the tiers of a partition's index. Returns its samples, and whether anything was written.

    Samples without an entry are pending. Same tiers: nothing is written.
    Raises StoreError when the index is not that of the inventory, tiers aside.
    """
    path = index_path(partition)
    inventory = read_inventory(corpus, partition)
    data = corpus.read(path)
    table = _table(data, path, corpus)
    if _digest(data) != inventory.index.sha256 and _bare(table) != inventory.bare:
        raise StoreError(f"{path} is not what its inventory names; run `wp2 verify`")
    samples: list[str] = table.column("sample_id").to_pylist()
    none = tuple(UNSELECTED.values())
    chosen = [tiers.get(i, none) for i in samples]
    for at, name in enumerate(UNSELECTED):
        table = _with(table, name, [values[at] for values in chosen])
    new = index_bytes(table)
    if new != data:
        corpus.write(path, new)
    return samples, _publish(corpus, inventory, new) or new != data


def heal(corpus: Store) -> int:
    """Bring inventories to their indexes where a kill came between the two; returns how many. Damage of any
    other kind is left as it is, for `wp2 verify` to name and `wp2 curate` to mend."""
    sizes = {s.path: s.size for s in corpus.list("index")}
    healed = 0
    for partition in partition_names(list(sizes), ".json"):
        path = index_path(partition)
        try:
            inventory = read_inventory(corpus, partition)
            if path not in sizes or sizes[path] == inventory.index.bytes:
                continue
            data = corpus.read(path)
            same = _bare(_table(data, path, corpus)) == inventory.bare
        except StoreError:  # damaged: not a kill between the two
            continue
        healed += same and _publish(corpus, inventory, data)
    return healed


def _publish(corpus: Store, inventory: Inventory, index: bytes) -> bool:
    """Write the inventory of an index if it is not there already."""
    entry = FileEntry(path=inventory.index.path, bytes=len(index), sha256=_digest(index))
    if entry == inventory.index:
        return False
    corpus.write(inventory_path(inventory.partition), seal(inventory.model_copy(update={"index": entry})))
    return True


def _table(data: bytes, path: str, corpus: Store) -> pa.Table:
    try:
        # The cast takes off what reading adds to the schema, so that the same rows give the same bytes.
        return pq.read_table(pa.BufferReader(data)).cast(index_schema())
    except (ValueError, OSError):  # no Parquet, or the columns of an earlier wp2
        raise StoreError(f"{path} of {corpus.url} is no index: {_REMEDY}") from None


def _bare(table: pa.Table) -> str:
    """sha256 of an index as it was before any tier."""
    for name, value in UNSELECTED.items():
        table = _with(table, name, [value] * len(table))
    return _digest(index_bytes(table))


def _with(table: pa.Table, name: str, values: list[str]) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), pa.array(values, pa.string()))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
