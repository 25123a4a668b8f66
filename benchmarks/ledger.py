"""A corpus of 710,000 clips: how long a resume and `wp2 status` take, and what the driver holds.

Makes a synthetic catalogue and sealed receipts (five stages a clip) in a temporary folder, then in one run:
  floor    DuckDB reads every column of the same receipt files
  resume   the curator walks the finished corpus and finds nothing to do (start-up apart)
  status   what `wp2 status` computes
  listing  keys, descriptions and catalogue update for 710,000 recordings of a source
Each runs in a process of its own; peak resident memory is that process's.

    python -m benchmarks.ledger [--clips 710000]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.config import CurateConfig
from jobs.curate import Curator
from jobs.progress import Progress
from jobs.runner import InProcess
from jobs.stages import STAGES, Statistics, flow, shards
from pipeline.catalogue import DESCRIPTION, Catalogue
from pipeline.ledger import SCHEMA, Ledger
from pipeline.recordings import clip_rows, recordings_of
from pipeline.scan import ScanCache, cache_keys
from pipeline.shards.write import ShardConfig, write_partition
from pipeline.sources.found import Discovery, Found
from pipeline.stage import config_digest, digest
from pipeline.status import corpus_status, relation, sealed_files
from pipeline.store import Store
from schemas.clip import Perspective

SOURCE = "folder:/clips"
FACTS = json.dumps(
    {"frames": 1800, "fps": 30.0, "width": 1280, "height": 720, "duration_s": 60.0, "windows": 13}
)


def curator(corpus: Store) -> Curator:
    config = CurateConfig()
    progress = Progress(STAGES, json_logs=True)
    return Curator(
        corpus,
        config,
        SOURCE,
        flow(config, corpus, Statistics.newest(corpus)),
        shards(config, corpus),
        InProcess(),
        progress,
    )


def make(corpus: Store, clips: int) -> None:
    ids = sorted(hashlib.sha256(str(i).encode()).hexdigest() for i in range(clips))
    found = pa.Table.from_pylist(
        [
            {
                "clip_id": h[:16], "recording_id": h[:16], "source": SOURCE, "sha256": h, "bytes": 40_000_000,
                "source_path": f"part{h[:2]}/{h[:20]}.mp4", "also_at": [], "game": "", "perspective": "fps",
                "licence": "CC-BY-4.0", "start": 0, "stop": 0, "kind": "navigation",
            }
            for h in ids
        ],
        schema=DESCRIPTION,
    )  # fmt: skip
    Catalogue.load(recordings_of(corpus)).update(found, 1000, 0.02)
    catalogue = Catalogue.load(corpus).update(found, 1000, 0.02)
    made = curator(corpus)
    stages = made.flow.stages
    for name, part in catalogue.parts.items():
        table, n = catalogue.read(name), part.rows
        clip_ids = table.column("clip_id").combine_chunks()
        parts = []
        for stage in stages:
            folder = f"work/{stage.name}/{name}"
            outputs = [
                [
                    {
                        "name": "out.parquet",
                        "path": f"{folder}/{c}.out.parquet",
                        "bytes": 1,
                        "sha256": str(c) * 4,
                    }
                ]
                for c in clip_ids
            ]
            columns = {
                "clip_id": clip_ids,
                "stage": [stage.name] * n,
                "status": ["ok"] * n,
                "reasons": [[]] * n,
                "config": [config_digest(stage)] * n,
                "inputs": clip_ids,
                "content": clip_ids,
                "outputs": outputs,
                "facts": [FACTS] * n,
                "attempts": [1] * n,
                "seconds": [1.0] * n,
            }
            parts.append(pa.table(columns, schema=SCHEMA))
        mark = digest(made._base, part.digest)
        rows = pa.concat_tables(parts)
        path = Path(corpus.full(f"ledger/{name}/sealed-00000001-{mark}.parquet"))
        path.parent.mkdir(parents=True)
        pq.write_table(rows, path, compression="zstd")
        write_partition(corpus, name, [], ShardConfig())


def run(corpus: Store, what: str, clips: int) -> None:
    started = time.perf_counter()
    if what == "floor":
        db = duckdb.connect()
        files = sealed_files(Ledger(corpus).files())
        db.execute(f"select bit_xor(hash(columns(*))) from {relation(db, corpus, files)}").fetchall()
    elif what == "status":
        status = corpus_status(corpus)
        assert status.marked == status.partitions and status.clips == clips
    elif what == "resume":
        made = curator(corpus)
        made.shards = None  # no root to write: the shards are synthetic
        outcome = made.run(Catalogue.load(corpus))
        assert outcome.already_done == clips, outcome
    elif what == "listing":
        rows = Catalogue.load(corpus).table(["source_path"]).column("source_path").to_pylist()
        found = tuple(Found(p, 40_000_000, "1700000000", "", Perspective.FIRST, "CC-BY-4.0") for p in rows)
        listing = Discovery(found, {})
        keys = cache_keys(SOURCE, listing)
        recordings = recordings_of(corpus)
        known = Catalogue.load(recordings).table()
        cache = ScanCache(
            recordings, known.drop_columns(["partition", "split"]).add_column(0, "key", pa.array(keys))
        )
        assert cache.missing(keys) == []
        table = cache.describe(SOURCE, keys)
        before = {s.path: s.version for s in corpus.list("catalogue")}
        Catalogue.load(recordings).update(table, 1000, 0.02)
        del cache, known, table, listing, found, rows
        held = Catalogue.load(corpus)
        held.update(clip_rows(corpus, held), 1000, 0.02)
        assert {s.path: s.version for s in corpus.list("catalogue")} == before
    seconds = time.perf_counter() - started
    # VmHWM, not ru_maxrss: the latter starts from what the parent held when it forked.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    print(json.dumps({"s": seconds, "rss": int(peak.split()[1]) * 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=710_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--corpus", type=Path, help="keep the synthetic corpus here and use it again")
    parser.add_argument("--what", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what:
        run(Store(str(args.corpus)), args.what, args.clips)
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = Store(str(args.corpus or Path(folder) / "corpus"))
        if not corpus.exists("catalogue/g0000.parquet"):
            print(f"making {args.clips} synthetic clips ...", flush=True)
            make(corpus, args.clips)
        best: dict[str, tuple[float, int]] = {}
        for _ in range(args.rounds):
            for what in ("floor", "resume", "status", "listing"):
                command = [sys.executable, "-m", "benchmarks.ledger", "--what", what, "--corpus", corpus.root,
                           "--clips", str(args.clips)]  # fmt: skip
                answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                seconds = min(answer["s"], best.get(what, (1e9, 0))[0])
                best[what] = (seconds, max(answer["rss"], best.get(what, (0, 0))[1]))
        floor = best["floor"][0]
        print(f"{'':10}{'seconds':>9}{'ratio':>8}{'peak MiB':>10}   (best of {args.rounds})")
        for what, (seconds, rss) in best.items():
            print(f"{what:10}{seconds:9.2f}{seconds / floor:8.2f}{rss >> 20:10d}")


if __name__ == "__main__":
    main()
