"""A real vLLM, on CPU, with a checkpoint of random weights made on the spot: `make setup-vlm` first.

What the model says is noise, so content checks advise; everything else is as with a real model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs import captioner
from jobs.caption_run import run_caption
from jobs.config import CurateConfig
from jobs.engine import Engine, EngineConfig, Phase, Served, command, environment, free_port
from jobs.evaluate.events import EventReport, judge_videos, make_videos
from jobs.evaluate.judge import JudgeConfig
from jobs.serving import Engines, serve
from pipeline.caption.client import EndpointConfig
from pipeline.caption.frames import Limits, plan_frames
from pipeline.caption.ladder import ContentChecks
from pipeline.caption.stage import CaptionConfig, read_unit_caption
from pipeline.media import read_frames
from pipeline.shards.verify import verify
from pipeline.stage import Unit
from pipeline.store import Store
from pipeline.tables import batches, units
from schemas.timeline import intervals
from tests.jobs.caption_corpus import CLIPS, ROOT, attempts, config, make_corpus
from tests.jobs.event_sets import WITH, Painted, event_set
from tests.tiny_vlm import build

pytestmark = [pytest.mark.timeout(1200), pytest.mark.alone]
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


@dataclass(frozen=True)
class Ran:
    """What one server did before it was ended: it captioned a corpus, and judged videos."""

    corpus: Path
    judged: EventReport


@pytest.fixture(scope="module")
def ran(footage: Path, vllm: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """`wp2 caption --serve`, whose server judges too before it is ended: a start takes 50 s."""
    folder = tmp_path_factory.mktemp("served")
    corpus, judged = make_corpus(footage, folder), []

    @contextlib.contextmanager
    def judging(*served: Any) -> Iterator[Engines]:
        with serve(*served) as running:
            yield running
            endpoints = EndpointConfig(endpoints=running.urls)
            judged.append(judge_two(folder / "events", endpoints))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU.items():
            patch.setenv(name, value)
        patch.setattr(captioner, "serve", judging)
        run_caption(str(corpus), advising(), engines(vllm, folder), model=str(model))
    yield Ran(corpus, judged[0])


def judge_two(out: Path, endpoints: EndpointConfig) -> EventReport:
    """Two painted videos, by a judge of random weights: checks of content advise."""
    cases = event_set(out / "set", 2)
    make_videos(Painted(), cases, out, WITH, lambda *_: None)
    config = JudgeConfig(content_checks=ContentChecks.ADVISE)
    return judge_videos(cases, out / "videos", out, config, endpoints, lambda *_: None)


def test_a_real_server_judges_videos_in_the_form_that_was_asked_for(ran: Ran) -> None:
    report = ran.judged
    assert report.judge["model"] == "tiny-vlm" and len(report.cases) == 2
    for line in report.cases:
        assert not line.unjudged, line
        assert line.instruction in range(5) and line.execution in range(5)
        assert 0 < len(line.instruction_reason) <= 200 and 0 < len(line.execution_reason) <= 200
        last = line.tries[-1]
        assert (last.status, last.finish) == (200, "stop") and last.tokens_in and last.tokens_out
        assert last.faults, "noise passed every check of content"


def test_a_real_server_captions_footage_into_shards(ran: Ran, model: Path) -> None:
    corpus = ran.corpus
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
