"""Many clips captioned at once: engines that die, runs that are stopped, and what the pool promises."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from jobs.caption_run import run_caption
from jobs.captioner import NotReady, captioning
from jobs.config import CurateConfig
from jobs.corpus_run import run_curate
from jobs.curate import Curator, Outcome
from jobs.engine import (
    Engine,
    EngineConfig,
    EngineError,
    Phase,
    Served,
    command,
    environment,
    free_port,
    program_of,
    served_name,
)
from jobs.progress import Progress
from jobs.runner import InProcess, RayPool
from jobs.stages import STAGES, Statistics, flow
from pipeline.caption.accounts import BudgetReached
from pipeline.caption.client import EndpointError
from pipeline.caption.frames import Limits
from pipeline.caption.stage import Caption
from pipeline.catalogue import Catalogue
from pipeline.ledger import Ledger
from pipeline.shards.verify import verify
from pipeline.store import Store
from pipeline.tables import batches
from schemas.errors import StopRun
from schemas.quality import Status
from tests.caption_server import CaptionServer
from tests.jobs.caption_corpus import CLIPS, ROOT, accepted, attempts, config, make_corpus, stand_in

QUICK = EngineConfig(probe_s=0.1, hang_s=2.0, start_s=60.0)


@pytest.fixture(scope="module")
def ready(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(footage, tmp_path_factory.mktemp("ready"))


@pytest.fixture
def corpus(ready: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ready, tmp_path / "corpus"))


def vlm(*urls: str, **serve: object) -> CurateConfig:
    return config(caption={"source": "vlm"}, serve={"endpoints": list(urls), **serve})


def caption(corpus: Path, how: CurateConfig, local: bool = True) -> Outcome:
    """The captions alone; without Ray where they are local."""
    store = Store(str(corpus))
    catalogue = Catalogue.load(store)
    work = flow(how, store, Statistics.newest(store), Caption.name)
    (source,) = catalogue.sources()
    with (
        captioning(work, EngineConfig(), "", local, print) as pool,
        Progress(STAGES, json_logs=True) as progress,
    ):
        return Curator(store, how, source, work, None, pool, progress).run(catalogue)


def held(corpus: Path) -> dict[str, Status]:
    """Status of the caption receipts of every clip of a VLM's config, by clip."""
    ledger = Ledger(Store(str(corpus)))
    receipts = {
        i: r[Caption.name] for p in ledger.files() for i, r in ledger.load(p).items() if Caption.name in r
    }
    return {
        i: r.status for i, r in receipts.items() if r.facts.get("provenance") or r.status is not Status.OK
    }


@contextmanager
def engine(folder: Path, settings: EngineConfig, *more: str) -> Iterator[Engine]:
    port = free_port("127.0.0.1")
    program = str(stand_in(folder, *more))
    line = command(settings, program, Served("stand-in", "", Limits()), "127.0.0.1", port)
    supervised = Engine(settings, line, {}, f"http://127.0.0.1:{port}", folder / f"engine-{port}.log")
    try:
        yield supervised
    finally:
        supervised.stop()


def until(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def processes(part: str) -> list[psutil.Process]:
    """Processes with `part` in their command line, but for this one."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != psutil.Process().pid and part in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


def served_by(running: Engine) -> psutil.Process:
    """The server behind an engine's guard."""
    (server,) = [
        p
        for p in processes(running.log.stem.removeprefix("engine-"))
        if "engine_guard" not in str(p.cmdline())
    ]
    return server


# --- the pool ----------------------------------------------------------------------------------------------


def test_clips_are_captioned_many_at_once_and_stand_in_shards(corpus: Path) -> None:
    with CaptionServer(latency_s=0.5) as server:
        (outcome,) = run_caption(str(corpus), vlm(server.url), EngineConfig(), pool=InProcess())
    assert outcome.counts[Status.OK] == len(CLIPS)
    assert outcome.seconds < 0.5 * len(CLIPS), "one after another"
    rows = [r for b in batches(Store(str(corpus)), "samples") for r in b.to_pylist()]
    assert {r["clip_id"] for r in rows} == set(accepted(corpus))
    texts = "".join(p.read_bytes().decode("latin-1") for p in (corpus / "shards/annotations").iterdir())
    assert texts.count('"provenance":"stand-in"') == len(CLIPS)
    assert verify(Store(str(corpus))) == []


def test_a_clip_without_an_answer_keeps_its_place_and_holds_nothing_back(corpus: Path) -> None:
    """Nor does a run that captions nothing take captions away, ask again, or hide who has none."""
    (unlucky, *_) = sorted(r["clip_id"] for b in batches(Store(str(corpus)), "clips") for r in b.to_pylist())
    with CaptionServer(script={unlucky: ["context_too_long"]}) as server:
        (outcome,) = run_caption(str(corpus), vlm(server.url), EngineConfig(), pool=InProcess())
        assert len(server.seen) == len(CLIPS) - 1 + 4, "one request a clip, and one ladder"
    assert outcome.counts[Status.FAILED] == 1 and outcome.shard_failures == []
    after = annotations(corpus)
    assert (
        after.count('"provenance":"stand-in"') == len(CLIPS) - 1
        and after.count(f'"clip_id":"{unlucky}"') == 1
    )
    source = next(batches(Store(str(corpus)), "clips")).to_pylist()[0]["source"]
    run_curate(source, str(corpus), config(), pool=InProcess())
    assert annotations(corpus) == after
    (failed,) = [r for b in batches(Store(str(corpus)), "failures") for r in b.to_pylist()]
    assert failed["clip_id"] == unlucky and failed["reasons"].startswith("no_answer")
    with CaptionServer() as server:
        run_caption(str(corpus), vlm(server.url), EngineConfig(), retry_failed=True, pool=InProcess())
        assert {s.clip for s in server.seen} == {unlucky}
    assert annotations(corpus).count('"provenance":"stand-in"') == len(CLIPS)


def test_a_damaged_file_of_attempts_ends_the_run_and_costs_no_caption(corpus: Path) -> None:
    with CaptionServer() as server:
        run_caption(str(corpus), vlm(server.url), EngineConfig(), pool=InProcess())
        before = annotations(corpus)
        for segment in (corpus / "captions/attempts").glob("g0*/*.parquet"):
            segment.write_bytes(b"damaged")
        other = config(
            caption={"source": "vlm", "limits": {"per_interval": 1}}, serve={"endpoints": [server.url]}
        )
        with pytest.raises(StopRun, match=r"captions/attempts/.* is damaged: delete it"):
            run_caption(str(corpus), other, EngineConfig(), pool=InProcess())
    assert annotations(corpus) == before
    assert set(held(corpus).values()) == {Status.OK}


def annotations(corpus: Path) -> str:
    tars = sorted((corpus / "shards/annotations").iterdir())
    return "".join(p.read_bytes().decode("latin-1") for p in tars)


@pytest.mark.soak  # 11 s
def test_on_a_cluster_the_desks_are_actors_and_a_budget_is_theirs_too(corpus: Path) -> None:
    ray_pool = RayPool(None, 2, None)
    try:
        with CaptionServer() as server:
            with pytest.raises(BudgetReached, match="tokens"):
                caption(corpus, vlm(server.url, budget={"tokens": 0}), local=False)
            outcome = caption(corpus, vlm(server.url), local=False)
    finally:
        ray_pool.close()
    assert outcome.counts[Status.OK] == len(CLIPS)
    assert accepted(corpus) == dict.fromkeys(held(corpus), 1) and len(held(corpus)) == len(CLIPS)


def test_a_budget_ends_the_run_and_the_next_run_goes_on(corpus: Path) -> None:
    with CaptionServer(latency_s=0.1) as server:
        with pytest.raises(BudgetReached, match="tokens"):
            caption(corpus, vlm(server.url, in_flight=1, budget={"tokens": 9000}))
        first = held(corpus)
        assert 0 < len(first) < len(CLIPS) and set(first.values()) == {Status.OK}
        assert sum(accepted(corpus).values()) == len(first), "captions that were paid for are lost"
        caption(corpus, vlm(server.url))
    assert accepted(corpus) == dict.fromkeys(held(corpus), 1) and len(held(corpus)) == len(CLIPS)


def test_a_run_with_nothing_to_caption_needs_no_server(corpus: Path) -> None:
    with CaptionServer() as server:
        caption(corpus, vlm(server.url))
    assert caption(corpus, vlm(server.url)).already_done == len(CLIPS)


def test_a_wrong_model_is_refused_before_any_clip(corpus: Path) -> None:
    with CaptionServer() as server:
        wrong = config(caption={"source": "vlm", "model": "other"}, serve={"endpoints": [server.url]})
        with pytest.raises(EndpointError, match="serves stand-in, not other"):
            caption(corpus, wrong)
        assert server.seen == []


def test_captioning_runs_no_other_stage(corpus: Path) -> None:
    with CaptionServer() as server:
        other = vlm(server.url)
        other = other.model_copy(update={"gates": other.gates.model_copy(update={"min_frames": 151})})
        with pytest.raises(NotReady, match="is not through stage gates"):
            caption(corpus, other)
        assert server.seen == []


def test_a_run_that_is_killed_loses_no_caption_that_was_published(corpus: Path, tmp_path: Path) -> None:
    program = f"""
        from pathlib import Path
        from tests.jobs.test_captioner import caption, vlm
        import sys
        caption(Path({str(corpus)!r}), vlm(sys.argv[1], in_flight=1))
        """
    with CaptionServer(latency_s=1.0) as server:
        run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), server.url], cwd=ROOT)
        until(lambda: accepted(corpus), 120.0)
        run.kill()
        run.wait()
        before = accepted(corpus)
        caption(corpus, vlm(server.url))
    after = accepted(corpus)
    assert 0 < len(before) < len(CLIPS)
    assert len(after) == len(CLIPS) and all(after[clip] == 1 for clip in before)


# --- engines -----------------------------------------------------------------------------------------------


def dies_while_captioning(corpus: Path, tmp_path: Path, seed: int) -> None:
    """Two engines, one killed at a time drawn from the seed: it is started again, and every clip is captioned
    once."""
    draw = random.Random(seed)
    with (
        engine(tmp_path, QUICK, "--latency", "0.3") as first,
        engine(tmp_path, QUICK, "--latency", "0.3") as second,
    ):
        engines = first, second
        until(lambda: all(e.state().phase is Phase.SERVING for e in engines))
        victim, delay = draw.choice(engines), draw.uniform(0.0, 1.5)
        killer = threading.Timer(delay, served_by(victim).kill)
        killer.start()
        outcome = caption(corpus, vlm(*(e.state().url for e in engines), in_flight=2))
        killer.join()
        until(lambda: victim.state().phase is Phase.SERVING and victim.state().starts == 2)
    assert outcome.counts[Status.OK] == len(CLIPS)
    assert accepted(corpus) == dict.fromkeys(held(corpus), 1) and len(held(corpus)) == len(CLIPS)
    assert all(a.number == 1 for a in attempts(corpus)), (
        "the death of an engine was counted as a clip's fault"
    )


@pytest.mark.parametrize("seed", range(2))
def test_an_engine_that_dies_costs_no_clip_and_captions_none_twice(
    corpus: Path, tmp_path: Path, seed: int
) -> None:
    dies_while_captioning(corpus, tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 20))
def test_an_engine_that_dies_at_any_time(corpus: Path, tmp_path: Path, seed: int) -> None:
    dies_while_captioning(corpus, tmp_path, seed)


def test_an_engine_that_stands_still_is_started_again(tmp_path: Path) -> None:
    with engine(tmp_path, QUICK) as running:
        until(lambda: running.state().phase is Phase.SERVING)
        served_by(running).send_signal(signal.SIGSTOP)
        until(lambda: running.state().phase is Phase.SERVING and running.state().starts == 2)
        assert "it gave no token for 2 s" in running.state().why


def test_an_engine_that_keeps_dying_is_given_up_by_name_and_log(tmp_path: Path) -> None:
    once = QUICK.model_copy(update={"restarts": 1})
    with engine(tmp_path, once) as running:
        for start in (1, 2):
            until(lambda n=start: running.state().phase is Phase.SERVING and running.state().starts == n)
            served_by(running).kill()
        until(lambda: running.state().phase is Phase.FAILED)
        assert "it ended" in running.state().why and str(running.log) in running.state().why


def test_an_engine_that_cannot_start_ends_the_run_with_its_own_error(corpus: Path, tmp_path: Path) -> None:
    program = stand_in(tmp_path, "--latency", "no number")
    broken = QUICK.model_copy(update={"program": str(program), "logs": str(tmp_path)})
    with pytest.raises(EngineError, match=r"engine 0 of 1 does not start: it ended.*invalid float value"):
        run_caption(str(corpus), config(), broken, model="stand-in")


def test_a_missing_vllm_is_named_with_what_to_do() -> None:
    with pytest.raises(EngineError, match=r"/nowhere/vllm is no program on .*make setup-vlm"):
        program_of(EngineConfig(program="/nowhere/vllm"))


def test_engines_end_with_the_run_and_with_a_driver_that_is_killed(corpus: Path, tmp_path: Path) -> None:
    program = stand_in(tmp_path, "--latency", "60")
    script = f"""
        from jobs.caption_run import run_caption
        from jobs.engine import EngineConfig
        from tests.jobs.caption_corpus import config
        engines = EngineConfig(program={str(program)!r}, logs={str(tmp_path)!r}, engines=2)
        run_caption({str(corpus)!r}, config(), engines, model="stand-in")
        """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT)
    until(
        lambda: len([p for p in processes(str(program)) if "engine_guard" not in str(p.cmdline())]) == 2,
        120.0,
    )
    time.sleep(1.0)
    driver.kill()
    driver.wait()
    until(lambda: not processes(str(program)), 120.0)


# --- the command line --------------------------------------------------------------------------------------


def test_the_command_line_carries_what_captions_depend_on() -> None:
    settings = EngineConfig(tensor_parallel=4, arguments=("--enforce-eager",))
    served = Served("Qwen/Qwen3-VL-8B-Instruct", "abc123", Limits(context=8192, max_images=24))
    line = command(settings, "vllm", served, "10.0.0.3", 8000)
    value = dict(itertools.pairwise(line))
    assert line[:3] == ["vllm", "serve", "Qwen/Qwen3-VL-8B-Instruct"]
    assert value["--revision"] == "abc123"
    assert value["--served-model-name"] == "Qwen/Qwen3-VL-8B-Instruct"
    assert (value["--host"], value["--port"]) == ("10.0.0.3", "8000")
    assert (value["--tensor-parallel-size"], value["--max-model-len"]) == ("4", "8192")
    assert value["--limit-mm-per-prompt"] == '{"image": 24, "video": 0}'
    assert value["--structured-outputs-config"] == '{"backend": "xgrammar", "disable_any_whitespace": true}'
    assert value["--generation-config"] == "vllm", "a checkpoint's own sampling would replace ours"
    assert line[-1] == "--enforce-eager"
    assert "--revision" not in command(settings, "vllm", replace(served, revision=""), "127.0.0.1", 8000)


def test_a_model_in_a_folder_is_served_under_its_last_name(tmp_path: Path) -> None:
    assert served_name(str(tmp_path / "qwen3-vl")) == "qwen3-vl"
    assert served_name("Qwen/Qwen3-VL-8B-Instruct") == "Qwen/Qwen3-VL-8B-Instruct"


def test_the_engine_inherits_its_gpus_and_nothing_of_this_environment(tmp_path: Path) -> None:
    base = {"CUDA_VISIBLE_DEVICES": "3", "PYTHONPATH": "here", "VIRTUAL_ENV": "here", "PATH": "/bin"}
    made = environment(base, "/opt/vlm/bin/vllm", str(tmp_path))
    assert made["CUDA_VISIBLE_DEVICES"] == "3" and made["PATH"] == "/opt/vlm/bin:/bin"
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & made.keys()
    assert made["HF_HUB_OFFLINE"] == "1" and "HF_HUB_OFFLINE" not in environment(
        base, "/opt/vlm/bin/vllm", "a/b"
    )
