"""A real vLLM, on CPU, with a checkpoint of random weights made on the spot: `make setup-vlm` first.

What the model says is noise, so content checks advise; everything else is as with a real model.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jobs.caption_run import run_caption
from jobs.config import CurateConfig
from jobs.engine import Engine, EngineConfig, Phase, Served, command, environment, free_port
from pipeline.caption.frames import Limits, plan_frames
from pipeline.caption.stage import CaptionConfig, read_unit_caption
from pipeline.media import read_frames
from pipeline.shards.verify import verify
from pipeline.stage import Unit
from pipeline.store import Store
from pipeline.tables import batches, units
from schemas.timeline import intervals
from tests.jobs.caption_corpus import CLIPS, ROOT, attempts, config, make_corpus
from tests.tiny_vlm import build

pytestmark = pytest.mark.timeout(1200)
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def vllm() -> Path:
    """vLLM's program, from $WP2_VLLM or .venv-vlm."""
    program = Path(os.environ.get("WP2_VLLM", ROOT / ".venv-vlm" / "bin" / "vllm"))
    if program.is_file():
        return program
    if os.environ.get("CI"):
        pytest.fail(f"vLLM is missing from {program}: `make setup-vlm` did not build its environment")
    pytest.skip(f"no vLLM at {program}: `make setup-vlm`")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model") / "tiny-vlm")


def engines(vllm: Path, logs: Path) -> EngineConfig:
    return EngineConfig(
        program=str(vllm),
        arguments=("--enforce-eager",),
        sequences=8,
        logs=str(logs),
        probe_s=1.0,
        hang_s=15.0,
    )


def advising() -> CurateConfig:
    return config(caption={"content_checks": "advise"})


def pictures_shown(unit: Unit) -> int:
    table, facts = read_frames(unit), unit.receipts["ingest"].facts
    size = int(facts["width"]), int(facts["height"])
    limits = CaptionConfig().limits
    return len(plan_frames(table.pts, table.time_base, intervals(table.duration()), size, limits).frames)


def test_a_real_server_captions_footage_into_shards(
    footage: Path, vllm: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    corpus = make_corpus(footage, tmp_path)
    run_caption(str(corpus), advising(), engines(vllm, tmp_path), model=str(model))
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(model) in str(p.info["cmdline"])], (
        "it is left"
    )
    first = [a for a in attempts(corpus) if a.number == 1]
    passed = {a.clip_id for a in first if a.finish == "stop" and a.caption}
    assert len(first) == len(CLIPS) == 8 and len(passed) >= 6
    assert all(a.model == "tiny-vlm" and a.tokens_out for a in first)
    assert any(a.faults for a in first), "noise passed every check of content"
    for unit in units(Store(str(corpus))):
        spans = intervals(read_frames(unit).duration())
        if unit.clip.clip_id in passed:
            caption = read_unit_caption(unit)
            assert len(caption.events) == len(spans) and caption.provenance == "tiny-vlm"
        assert pictures_shown(unit) >= 3
    samples = {r["clip_id"] for b in batches(Store(str(corpus)), "samples") for r in b.to_pylist()}
    assert passed <= samples
    texts = "".join(p.read_bytes().decode("latin-1") for p in (corpus / "shards/annotations").iterdir())
    assert texts.count('"provenance":"tiny-vlm"') >= 6
    assert verify(Store(str(corpus))) == []


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.2)


def is_server(process: psutil.Process, port: str) -> bool:
    line = process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    return port in line and not any("engine_guard" in part for part in line)


@pytest.mark.soak
def test_a_real_engine_is_started_again_when_its_parts_die_or_stand_still(
    vllm: Path, model: Path, tmp_path: Path
) -> None:
    settings, port = engines(vllm, tmp_path), free_port("127.0.0.1")
    line = command(settings, str(vllm), Served(str(model), "", Limits()), "127.0.0.1", port)
    env = environment({**os.environ, **CPU}, str(vllm), str(model))
    engine = Engine(settings, line, env, f"http://127.0.0.1:{port}", tmp_path / "engine.log")

    def serves(starts: int) -> Callable[[], bool]:
        return lambda: engine.state().phase is Phase.SERVING and engine.state().starts == starts

    def part(name: str) -> psutil.Process:
        server = next(p for p in psutil.process_iter() if is_server(p, str(port)))
        return next(p for p in server.children(recursive=True) if name in str(p.cmdline()))

    try:
        until(serves(1))
        part("VLLM::EngineCore").kill()
        until(serves(2))
        part("VLLM::EngineCore").send_signal(signal.SIGSTOP)
        until(serves(3))
        assert "it gave no token" in engine.state().why
    finally:
        engine.stop()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(model) in str(p.info["cmdline"])]
