"""Media that only the published tars still hold.

Sources may be deleted once their partition is published. When such a partition has to be written again, the
clips whose files are gone are copied out of its old tars first, so that no rewrite loses a sample.
Source: DESIGN rule 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pipeline.media import has_media, media_sha256
from pipeline.shards.check import walk
from pipeline.shards.tar import tar_pattern
from pipeline.stage import Unit
from pipeline.store import Store


def recover(corpus: Store, partition: str, units: Iterable[Unit], folder: Path) -> dict[str, Path]:
    """Media files, by clip id, of the units whose own is gone while the partition's tars still hold it.

    folder: where they are written; it grows as large as what is recovered. The tars' own headers say where to
    look, for a kill or damage may have left no index; the sha256 of each clip decides.
    """
    gone = {f"{unit.clip.clip_id}.mp4": unit for unit in units if not has_media(unit)}
    own = tar_pattern(partition)
    found: dict[str, Path] = {}
    for path in [s.path for s in corpus.list("shards/media") if own.fullmatch(s.path)] if gone else []:
        with corpus.open(path) as tar:
            for name, places in walk(tar).items():
                for place in places if name in gone else []:
                    tar.seek(place.offset_data)
                    data = tar.read(place.size)
                    if hashlib.sha256(data).hexdigest() == media_sha256(gone[name]):
                        (folder / name).write_bytes(data)
                        found[gone[name].clip.clip_id] = folder / name
    return found
