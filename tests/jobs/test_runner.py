"""Pools: the same answers from both, and nothing large or foreign travels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.config import CurateConfig
from jobs.package import PACKAGES, package_env
from jobs.runner import InProcess, Lost, Pool, RayPool, RunnerError
from jobs.stages import Statistics, flow
from pipeline.quality.aesthetics import AestheticsConfig, load_scorer
from pipeline.store import Store
from schemas.errors import StopRun


def answers(pool: Pool, tasks: list[int]) -> dict[int, object]:
    found: dict[int, object] = {}
    waiting = list(tasks)
    while waiting or pool.busy:
        while waiting and pool.free > 0:
            x = waiting.pop()
            pool.submit(x, math.isqrt, x)
        found.update(pool.wait(30.0))
    return found


@pytest.fixture(scope="module")
def ray_pool() -> Iterator[RayPool]:
    pool = RayPool(None, 1, None)
    yield pool
    pool.close()


def test_both_pools_give_the_same_answers_by_key(ray_pool: RayPool) -> None:
    tasks = [1, -2, 9, 16, -5]
    refused = Lost("ValueError: isqrt() argument must be nonnegative", worker_died=False)
    expected = {x: math.isqrt(x) if x > 0 else refused for x in tasks}
    assert answers(InProcess(), tasks) == expected
    assert answers(ray_pool, tasks) == expected


def test_a_dead_worker_is_told_from_a_task_that_raised(ray_pool: RayPool) -> None:
    ray_pool.submit("dies", os._exit, 9)
    ray_pool.submit("lives", math.isqrt, 81)
    found = {}
    while ray_pool.busy:
        found.update(ray_pool.wait(60.0))
    assert found["lives"] == 9
    assert found["dies"].worker_died


def test_what_is_wrong_for_every_clip_ends_the_run(ray_pool: RayPool) -> None:
    config = AestheticsConfig(clip_weights="/nowhere/clip.bin", head_weights="/nowhere/head.pth")
    for pool in (InProcess(), ray_pool):
        pool.submit("a", load_scorer, config)
        with pytest.raises(StopRun, match="no weights at /nowhere"):
            while pool.busy:
                pool.wait(30.0)


def test_no_more_tasks_than_the_limit_are_in_flight(ray_pool: RayPool) -> None:
    assert ray_pool.free == 2
    ray_pool.submit("a", math.isqrt, 1)
    assert ray_pool.free == 1
    while ray_pool.busy:
        ray_pool.wait(30.0)


def test_the_stages_are_small_and_large_data_is_refused(ray_pool: RayPool, tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    ray_pool.share(flow(CurateConfig(), store, Statistics.newest(store)))
    with pytest.raises(RunnerError, match="pass data by path"):
        ray_pool.share(list(range(100_000)))


def test_a_cluster_is_sent_the_packages_and_nothing_else(tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("x = 1\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "pack.py").write_bytes(bytes(1 << 20))
    (tmp_path / "jobs" / "clip.mp4").write_bytes(bytes(1 << 20))
    with package_env(tmp_path) as env:
        sent = sorted(str(p.relative_to(env["working_dir"])) for p in Path(env["working_dir"]).rglob("*.*"))
    assert sent == sorted(f"{name}/code.py" for name in PACKAGES)


def test_a_package_over_the_limit_is_refused_naming_the_largest(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    for i in range(12):
        (tmp_path / "jobs" / f"table{i:02d}.py").write_bytes(bytes(1000 * (i + 1)))
    refused = pytest.raises(RunnerError, match=r"over 4 KiB; largest: jobs/table11\.py")
    with refused as error, package_env(tmp_path, limit=4 << 10):
        pass
    assert "table01.py" not in str(error.value)


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(RunnerError, match=r"no Ray cluster answers at 127\.0\.0\.1:9"):
        RayPool("127.0.0.1:9", None, None)
    assert time.monotonic() - started < 10


@pytest.mark.soak  # 29 s; a local cluster is in every run
def test_a_running_cluster_curates_what_it_is_given(footage: Path, tmp_path: Path) -> None:
    """`--address` joins a cluster that we did not start, and leaves it running."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").symlink_to(footage / "odd_64x36.mp4")
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    port = 20_000 + os.getpid() % 10_000
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=1"]
    ray += ["--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={port}"]
    log = (tmp_path / "ray.log").open("wb")
    head = subprocess.Popen(ray, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while b"block forever" not in (tmp_path / "ray.log").read_bytes():
            assert time.monotonic() < deadline and head.poll() is None, (tmp_path / "ray.log").read_text()
            time.sleep(0.1)
        command = [sys.executable, "-m", "jobs", "curate", f"folder:{tmp_path / 'clips'}"]
        command += ["--out", str(tmp_path / "corpus"), "--address", f"127.0.0.1:{port}"]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
        assert run.returncode == 0, run.stderr
        assert head.poll() is None
        assert (tmp_path / "corpus" / "index" / "root.json").exists()
    finally:
        head.terminate()
        head.wait(timeout=30)
