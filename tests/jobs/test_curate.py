"""`wp2 curate` on real clips through real Ray: outcomes, kills, growth, changed settings."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import s3fs
from ray.util.state import list_tasks

from jobs.config import CurateConfig, parse
from jobs.corpus_run import run_curate
from jobs.curate import BudgetExceeded
from jobs.runner import InProcess, RayPool
from pipeline.corpus import CorpusError, open_corpus, sole_writer
from pipeline.ledger import Ledger
from pipeline.shards.verify import verify
from pipeline.status import corpus_status
from pipeline.store import Store
from pipeline.tables import batches
from schemas.quality import Status

SMALL = {
    "odd_64x36.mp4": "ok",
    "odd_h264.mov": "ok",
    "odd_exactly_150f.mp4": "ok",
    "odd_fragmented.mp4": "ok",
    "odd_with_audio_shorter.mp4": "ok",
    "tc_nasa_13013.mp4": "rejected",  # a hard cut in 16 s
    "odd_short_140f.mp4": "rejected",
    "odd_garbage.mp4": "rejected",
    "odd_zero_byte.mp4": "rejected",
    "odd_truncated_no_moov.mp4": "rejected",
    "decord_video_90.mov": "rejected",
    "tc_audio_only.mp3": "rejected",
}
# Odometry costs ten times the rest and has its own tests.
CONFIG = {"run": {"cpus": 2, "partition_size": 4, "val_share": 0.2}, "observe": {"track": "none"}}


@pytest.fixture
def clips(footage: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in SMALL:
        (folder / name).symlink_to(footage / name)
    return folder


def config(**sections: dict[str, Any]) -> CurateConfig:
    data = {name: dict(values) for name, values in CONFIG.items()}
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return parse(data, "test")


def published(corpus: Path) -> dict[str, str]:
    """sha256 of every tar, index and inventory, by path. (The root also covers the catalogue, which names the
    folder that the clips came from.)"""
    files = [p for part in ("shards", "index") for p in sorted((corpus / part).rglob("*")) if p.is_file()]
    return {
        str(p.relative_to(corpus)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in files
        if p.name != "root.json"
    }


def rows(corpus: Path, table: str) -> list[dict[str, Any]]:
    return [r for b in batches(open_corpus(str(corpus)), table) for r in b.to_pylist()]


@pytest.fixture(scope="module")
def reference(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run over the small clips, in this process."""
    base = tmp_path_factory.mktemp("reference")
    (base / "clips").mkdir()
    for name in SMALL:
        (base / "clips" / name).symlink_to(footage / name)
    run_curate(f"folder:{base / 'clips'}", str(base / "corpus"), config(), pool=InProcess())
    return base / "corpus"


def test_every_clip_has_one_outcome_and_its_reason(reference: Path) -> None:
    found = {r["source_path"]: r for r in rows(reference, "clips")}
    assert {name: r["status"] for name, r in found.items()} == SMALL
    assert all(bool(r["reasons"]) == (r["status"] != "ok") for r in found.values())
    assert found["odd_zero_byte.mp4"]["reasons"].startswith("empty_file")
    assert found["tc_audio_only.mp3"]["reasons"].startswith("no_video_stream")
    assert found["odd_truncated_no_moov.mp4"]["reasons"].startswith("truncated")
    failures = {r["source_path"] for r in rows(reference, "failures")}
    assert failures == {name for name, status in SMALL.items() if status != "ok"}


def test_the_samples_are_the_clips_that_passed_and_verify(reference: Path) -> None:
    ok = {r["clip_id"] for r in rows(reference, "clips") if r["status"] == "ok"}
    samples = rows(reference, "samples")
    assert {r["clip_id"] for r in samples} == ok
    assert len(samples) == 2 * len(ok)
    assert verify(Store(str(reference))) == []


def test_ray_and_one_process_make_the_same_bytes(clips: Path, tmp_path: Path, reference: Path) -> None:
    run_curate(f"folder:{clips}", str(tmp_path / "corpus"), config())
    assert published(tmp_path / "corpus") == published(reference)


def test_a_second_run_has_nothing_to_do_and_changes_nothing(clips: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    run_curate(f"folder:{clips}", str(corpus), config(), pool=InProcess())
    before = {p: p.stat().st_mtime_ns for p in corpus.rglob("*") if p.is_file()}
    outcome = run_curate(f"folder:{clips}", str(corpus), config(), pool=InProcess())
    assert outcome.already_done == len(SMALL) and sum(outcome.counts.values()) == 0
    after = {p: p.stat().st_mtime_ns for p in corpus.rglob("*") if p.is_file()}
    changed = {str(p.relative_to(corpus)) for p in before if after.get(p) != before[p]}
    assert changed <= {"index/root.json", ".lock"}


def test_growth_leaves_every_old_tar_as_it_is(clips: Path, tmp_path: Path, footage: Path) -> None:
    corpus = tmp_path / "corpus"
    run_curate(f"folder:{clips}", str(corpus), config(), pool=InProcess())
    before = published(corpus)
    (clips / "new.mkv").symlink_to(footage / "odd_h264.mkv")
    run_curate(f"folder:{clips}", str(corpus), config(), pool=InProcess())
    after = published(corpus)
    assert {p: after[p] for p in before} == before
    assert any("g0001-p00000" in p for p in set(after) - set(before))
    assert verify(Store(str(corpus))) == []


def test_a_changed_setting_runs_only_what_depends_on_it(clips: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    run_curate(f"folder:{clips}", str(corpus), config(), pool=InProcess())
    work = {p: p.stat().st_mtime_ns for p in (corpus / "work" / "ingest").rglob("*") if p.is_file()}
    run_curate(f"folder:{clips}", str(corpus), config(gates={"min_frames": 200}), pool=InProcess())
    assert {p: p.stat().st_mtime_ns for p in work} == work
    found = {r["source_path"]: r["status"] for r in rows(corpus, "clips")}
    assert found == SMALL | {"odd_exactly_150f.mp4": "rejected"}
    assert len(rows(corpus, "samples")) == 2 * list(found.values()).count("ok")
    run_curate(f"folder:{clips}", str(corpus), config(), pool=InProcess())
    assert {r["source_path"]: r["status"] for r in rows(corpus, "clips")} == SMALL


def test_two_files_with_the_same_bytes_are_one_clip(clips: Path, tmp_path: Path) -> None:
    shutil.copy(clips / "odd_64x36.mp4", clips / "a copy.mp4")
    run_curate(f"folder:{clips}", str(tmp_path / "corpus"), config(), pool=InProcess())
    found = [r for r in rows(tmp_path / "corpus", "clips") if r["also_at"]]
    assert [(r["source_path"], r["also_at"]) for r in found] == [("a copy.mp4", "odd_64x36.mp4")]


def test_a_failing_share_over_the_budget_ends_the_run(clips: Path, tmp_path: Path) -> None:
    for name in ("odd_64x36.mp4", "odd_h264.mov"):
        (clips / name).unlink()
        (clips / name).write_bytes(b"not what was scanned")
    strict = config(
        run={"max_failed_share": 0.0, "min_failed": 0, "attempts": 2}, ingest={"timeout_s": 0.001}
    )
    with pytest.raises(BudgetExceeded, match="clips failed"):
        run_curate(f"folder:{clips}", str(tmp_path / "corpus"), strict, pool=InProcess())
    failed = [r for r in rows(tmp_path / "corpus", "failures") if r["status"] == "failed"]
    assert failed and all(r["attempts"] == 2 for r in failed)


def test_a_corpus_takes_one_writer(tmp_path: Path) -> None:
    corpus = open_corpus(str(tmp_path / "corpus"), create=True)
    with sole_writer(corpus), pytest.raises(CorpusError, match="another run"), sole_writer(corpus):
        pass


def test_source_and_corpus_on_an_object_store_give_the_same_bytes(
    clips: Path, tmp_path: Path, reference: Path, s3: dict[str, Any]
) -> None:
    files = s3fs.S3FileSystem(**s3)
    files.mkdir("curate")
    for path in clips.iterdir():
        files.put_file(str(path), f"curate/clips/{path.name}")
    remote = config(storage=s3)
    for _ in range(2):
        outcome = run_curate("folder:s3://curate/clips", "s3://curate/corpus", remote, pool=InProcess())
    assert outcome.already_done == len(SMALL)
    assert verify(open_corpus("s3://curate/corpus", s3)) == []
    files.get("curate/corpus", str(tmp_path / "copy"), recursive=True)
    assert published(tmp_path / "copy") == published(reference)


# --- Ray is real ------------------------------------------------------------------------------------------


@pytest.mark.soak  # 20 s; test_runner holds that two tasks run at once
def test_two_workers_of_ours_run_at_once(clips: Path, tmp_path: Path, footage: Path) -> None:
    for i in range(8):
        (clips / f"{i}.mp4").symlink_to(footage / "nav12_miniworld_fourrooms.mp4")
    pool = RayPool(None, 2, None, dashboard=True)
    address = ray.get_runtime_context().gcs_address
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            running = list_tasks(
                address, filters=[("state", "=", "RUNNING"), ("name", "=", "_call")], detail=True
            )
            seen.append(len({t.worker_pid for t in running if t.worker_pid}))
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_curate(f"folder:{clips}", str(tmp_path / "corpus"), config(), pool=pool)
    finally:
        done.set()
        watcher.join()
        pool.close()
    assert max(seen) >= 2


def curate_process(clips: Path, corpus: Path, *more: str) -> subprocess.Popen[bytes]:
    settings = corpus.with_suffix(".yaml")
    settings.write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "jobs", "curate", f"folder:{clips}", "--out", str(corpus)]
    log = corpus.with_suffix(".log").open("ab")
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        [*command, "--config", str(settings), "--json-logs", *more], stdout=log, stderr=log, env=env
    )


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def decoder_of(pid: int, name: str) -> psutil.Process | None:
    """The decode process that is at work on a file of this name: a child of a Ray worker of ours."""
    for process in descendants(pid):
        try:
            parent = process.parent()
            ours = parent is not None and "_call" in " ".join(parent.cmdline())
            if ours and any(f.path.endswith(name) for f in process.open_files()):
                return process
        except psutil.Error:
            continue
    return None


def kill_everything(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the driver and to everything it started, Ray's own processes included."""
    family = descendants(process.pid)
    process.kill()
    for child in family:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=10)


def test_a_killed_worker_costs_one_attempt_of_one_clip(clips: Path, tmp_path: Path, footage: Path) -> None:
    name = "nav12_miniworld_fourrooms.mp4"
    (clips / name).symlink_to(footage / name)
    corpus = tmp_path / "corpus"
    process = curate_process(clips, corpus)
    try:
        deadline = time.monotonic() + 90
        while (decoder := decoder_of(process.pid, name)) is None and time.monotonic() < deadline:
            assert process.poll() is None, corpus.with_suffix(".log").read_text()
            time.sleep(0.05)
        assert decoder is not None
        worker = decoder.parent()
        assert worker is not None
        worker.kill()
        decoder.wait(timeout=10)  # it dies with its worker
        assert process.wait(timeout=120) == 0, corpus.with_suffix(".log").read_text()
    finally:
        kill_everything(process)
    # The first decoder of a file is that of the cut.
    ledger = Ledger(Store(str(corpus / "recordings")))
    attempts = {
        clip: max(r.attempts for r in stages.values())
        for partition in ledger.files()
        for clip, stages in ledger.load(partition).items()
    }
    assert sorted(attempts.values())[-1] == 2
    assert list(attempts.values()).count(2) == 1
    assert corpus_status(Store(str(corpus))).against(Status.FAILED) == 0


def run_with_kills(clips: Path, corpus: Path, seed: int, longest_s: float) -> None:
    """One run, killed with all its processes at a random moment after it began to scan; then the same run
    again, to its end."""
    process = curate_process(clips, corpus)
    try:
        log = corpus.with_suffix(".log")
        while '"phase": "scan"' not in log.read_text() and process.poll() is None:
            time.sleep(0.02)
        time.sleep(random.Random(seed).uniform(0.0, longest_s))
    finally:
        kill_everything(process)
    process = curate_process(clips, corpus)
    try:
        assert process.wait(timeout=180) == 0, log.read_text()
    finally:
        kill_everything(process)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_kill_of_everything_leaves_the_bytes_of_an_unbroken_run(
    clips: Path, tmp_path: Path, reference: Path, seed: int
) -> None:
    corpus = tmp_path / "corpus"
    run_with_kills(clips, corpus, seed, longest_s=5.0)
    assert published(corpus) == published(reference)
    assert verify(Store(str(corpus))) == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_twenty_kills_of_everything(clips: Path, tmp_path: Path, reference: Path, seed: int) -> None:
    corpus = tmp_path / "corpus"
    run_with_kills(clips, corpus, seed, longest_s=6.0)
    assert published(corpus) == published(reference)


@pytest.fixture(autouse=True)
def _no_ray_left_behind() -> Iterator[None]:
    yield
    assert not ray.is_initialized()
