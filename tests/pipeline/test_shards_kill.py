"""SIGKILL the writer anywhere: no partial file at a final name, and a rerun gives the same bytes.

The writer runs in a child that kills itself at its n-th file operation (an audit hook counts opens, renames
and removals), or is killed from outside after a random time.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shards_corpus import CONFIG, PARTITION, put, samples, snapshot, write

from pipeline.shards.read import read_index
from pipeline.shards.verify import verify
from pipeline.shards.write import Sample
from pipeline.store import Store

_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


def write_and_die(url: str, at_event: int, slow: bool) -> None:
    count = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        if event in _EVENTS:
            count += 1
            if count == at_event:
                os.kill(os.getpid(), signal.SIGKILL)

    def slowly() -> Iterator[Sample]:
        for sample in samples():
            time.sleep(0.01)
            yield sample

    samples()
    sys.addaudithook(hook)
    put(Store(url), PARTITION, slowly() if slow else samples(), CONFIG)


def run(url: str, at_event: int = 0, after_s: float | None = None) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shards_corpus"])
    child = context.Process(target=write_and_die, args=(url, at_event, after_s is not None))
    child.start()
    if after_s is not None:
        time.sleep(after_s)
        child.kill()
    child.join()
    return child.exitcode or 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    corpus = Store(str(tmp_path_factory.mktemp("kill") / "corpus"))
    put(corpus, PARTITION, samples(), CONFIG)
    return snapshot(corpus)


def check_after_kill(corpus: Store, whole: dict[str, bytes]) -> None:
    left = snapshot(corpus)
    assert left.items() <= whole.items(), "a file at a final name is not complete"
    if f"index/{PARTITION}.json" in left:
        assert left == whole, "the inventory was there before all that it names"
    corpus.sweep()
    put(corpus, PARTITION, samples(), CONFIG)
    assert snapshot(corpus) == whole
    files = [p for p in Path(corpus.root).rglob("*") if p.is_file()]
    assert len(files) == len(whole), "temporaries are left"


@pytest.mark.parametrize("rounds", [8, pytest.param(100, marks=pytest.mark.soak)])
def test_a_kill_at_any_file_operation_leaves_whole_files_only(
    tmp_path: Path, whole: dict[str, bytes], rounds: int
) -> None:
    rng = random.Random(0)
    killed = 0
    for i in range(rounds):
        corpus = Store(str(tmp_path / str(i)))
        killed += run(corpus.url, at_event=rng.randint(1, 60)) == -signal.SIGKILL
        check_after_kill(corpus, whole)
    assert killed >= rounds // 2


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_a_kill_at_any_time_leaves_whole_files_only(
    tmp_path: Path, whole: dict[str, bytes], rounds: int
) -> None:
    rng = random.Random(1)
    for i in range(rounds):
        corpus = Store(str(tmp_path / str(i)))
        run(corpus.url, after_s=rng.uniform(0.1, 0.5))
        check_after_kill(corpus, whole)


def test_a_kill_in_a_rewrite_with_other_samples_never_leaves_an_inventory_that_lies(tmp_path: Path) -> None:
    rng = random.Random(2)
    for i in range(3):
        corpus = Store(str(tmp_path / str(i)))
        write(corpus)
        put(corpus, PARTITION, samples()[2:], CONFIG)
        run(corpus.url, at_event=rng.randint(10, 50))
        told = read_index(corpus)  # refuses an index that its inventory does not name
        problems = [f for f in verify(corpus) if f.path.startswith("shards/") and told.num_rows]
        assert all("extra" in f.problem for f in problems), problems
        corpus.sweep()
        write(corpus)
        assert verify(corpus) == []
