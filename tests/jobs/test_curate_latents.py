"""`wp2 curate` to tars of latents and text: what turning them on, off and captioning again writes.

Source: DESIGN 2 (Tars, same keys, same order), rules 2, 10.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.caption_run import run_caption
from jobs.config import parse
from jobs.corpus_run import run_curate
from jobs.curate import Outcome
from jobs.engine import EngineConfig
from jobs.runner import InProcess
from pipeline.flow import StageOrderError
from pipeline.latents.members import members
from pipeline.latents.stage import CODEC, Latents
from pipeline.latents.text import Text
from pipeline.shards import sample as shards_sample
from pipeline.shards.read import read_index, read_sample
from pipeline.shards.verify import verify
from pipeline.stage import Result, Unit
from pipeline.statistics import newest, versions
from pipeline.store import Store
from pipeline.tables import batches
from schemas.caption import prompts
from schemas.latents import FittedCodec, LatentsNote, TextNote
from schemas.sample import FAMILIES, Annotation
from tests.caption_server import CaptionServer
from tests.pipeline.recordings import PACK_MAP
from trainer.codec.weights import CodecError

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
from tiny_codecs import short_clip, tiny_vae, write_tiny_umt5

CLIPS = ("event01_door_map01", "event05_pickup_bonus")  # 10 and 7 s
OFF: dict[str, dict[str, Any]] = {"observe": {"track": "none"}, "source": {"key_map": str(PACK_MAP)}}
ON = OFF | {
    "latents": {"codec": {"kind": "linear"}, "height": 64, "width": 128},
    "text": {"kind": "minilm"},
}
# Curates in a process of its own, and says whether torch was loaded on the way.
RUN = """
import json, sys
from jobs.caption_run import run_caption
from jobs.config import parse
from jobs.corpus_run import run_curate
from jobs.engine import EngineConfig
from jobs.runner import InProcess
run_curate(sys.argv[1], sys.argv[2], parse(json.loads(sys.argv[3]), "test"), pool=InProcess())
print("torch" in sys.modules)
"""


def curate(corpus: Path, source: Path, settings: dict[str, Any], **how: Any) -> Outcome:
    outcome = run_curate(f"gameplay:{source}", str(corpus), parse(settings, "test"), pool=InProcess(), **how)
    assert outcome.shard_failures == []
    assert verify(Store(str(corpus))) == []
    return outcome


def tars(corpus: Path, *families: str) -> dict[str, tuple[bytes, int]]:
    """Bytes, and time of writing, of the tars of these families."""
    found = [p for f in families for p in sorted((corpus / "shards" / f).glob("*.tar"))]
    return {f"{p.parent.name}/{p.name}": (p.read_bytes(), p.stat().st_mtime_ns) for p in found}


def families(corpus: Path) -> list[str]:
    return sorted({p.parent.name for p in (corpus / "shards").glob("*/*.tar")})


def rows(corpus: Path, table: str = "") -> list[dict[str, Any]]:
    store = Store(str(corpus))
    return (
        [r for b in batches(store, table) for r in b.to_pylist()] if table else read_index(store).to_pylist()
    )


def npy(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data))


@pytest.fixture(scope="module")
def source(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for clip in CLIPS:
        for suffix in ("mp4", "truth.csv", "truth.json"):
            shutil.copyfile(footage / f"{clip}.{suffix}", folder / f"{clip}.{suffix}")
    return folder


@pytest.fixture(scope="module")
def without(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clips, curated by the defaults: no latents, no text, and torch is never loaded."""
    corpus = tmp_path_factory.mktemp("off") / "corpus"
    arguments = [f"gameplay:{source}", str(corpus), json.dumps(OFF)]
    run = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split()[-1] == "False"
    return corpus


@pytest.fixture(scope="module")
def curated(source: Path, without: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and then curated again with latents and text."""
    corpus = tmp_path_factory.mktemp("on") / "corpus"
    shutil.copytree(without, corpus)
    curate(corpus, source, ON)
    return corpus


@pytest.fixture
def corpus(curated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(curated, tmp_path / "corpus"))


def test_turning_latents_and_text_on_adds_their_tars_and_writes_no_other(
    without: Path, curated: Path
) -> None:
    assert families(without) == ["annotations", "media"] and families(curated) == sorted(FAMILIES)
    assert tars(curated, "media", "annotations") == tars(without, "media", "annotations")
    before, after = rows(without), rows(curated)
    assert [(r.pop("latents"), r.pop("text")) for r in before] == [(None, None)] * 2
    places = [(r.pop("latents"), r.pop("text")) for r in after]
    assert before == after and all(lat["size"] > 0 and text["size"] > 0 for lat, text in places)


def test_a_sample_has_the_latents_and_the_prompts_of_its_clip(curated: Path) -> None:
    store = Store(str(curated))
    codec = newest(store, CODEC, FittedCodec)
    assert codec is not None and versions(store, CODEC) == [1] and len(codec.clips) == 2
    for row in rows(curated):
        coded, text = read_sample(store, row["latents"]), read_sample(store, row["text"])
        assert tuple(coded) == FAMILIES["latents"] and tuple(text) == FAMILIES["text"]
        note = LatentsNote.model_validate_json(coded["latents.json"])
        notes = Annotation.model_validate_json(read_sample(store, row["annotations"])["json"])
        assert note.codec == f"linear-{codec.identity()}"
        assert npy(coded["hr.npy"]).shape == (notes.latent_frames, 16, 8, 16)
        assert len(npy(coded["segments.npy"])) == note.segments == notes.latent_frames // 32
        held = TextNote.model_validate_json(text["text.json"])
        assert set(prompts(notes.caption, notes.perspective)) <= set(held.prompts)
    told = {r["clip_id"]: r for r in rows(curated, "latents")}
    assert set(told) == {r["clip_id"] for r in rows(curated)}
    assert {(r["height"], r["width"], r["prompts"]) for r in told.values()} == {(64, 128, 2)}


def test_turned_off_and_on_again_the_same_tars_come_back_and_nothing_is_encoded(
    source: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: data for name, (data, _) in tars(corpus, *FAMILIES).items()}
    index = (corpus / "index/g0000-p00000.parquet").read_bytes()
    media = tars(corpus, "media", "annotations")
    curate(corpus, source, OFF)
    assert families(corpus) == ["annotations", "media"]
    assert [(r["latents"], r["text"]) for r in rows(corpus)] == [(None, None)] * 2
    monkeypatch.delattr(Latents, "run")
    monkeypatch.delattr(Text, "run")
    curate(corpus, source, ON)
    assert {name: data for name, (data, _) in tars(corpus, *FAMILIES).items()} == before
    assert tars(corpus, "media", "annotations") == media
    assert (corpus / "index/g0000-p00000.parquet").read_bytes() == index


@pytest.mark.parametrize("how", [{}, {"anew": "caption"}])
def test_a_new_caption_writes_annotations_and_text_and_nothing_else(
    source: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, str]
) -> None:
    kept, written = tars(corpus, "media", "latents"), tars(corpus, "annotations", "text")
    places = [(r["media"], r["latents"]) for r in rows(corpus)]
    monkeypatch.delattr(Latents, "run")
    monkeypatch.setattr(shards_sample, "coded_members", only_text)
    for clip in CLIPS:  # no video is left that could be read
        (source / f"{clip}.mp4").rename(tmp_path / f"{clip}.mp4")
    try:
        curate(corpus, source, ON | {"caption": {"source": "log"}}, **how)
    finally:
        for clip in CLIPS:
            (tmp_path / f"{clip}.mp4").rename(source / f"{clip}.mp4")
    assert tars(corpus, "media", "latents") == kept
    assert [(r["media"], r["latents"]) for r in rows(corpus)] == places
    after = tars(corpus, "annotations", "text")
    assert after.keys() == written.keys() and all(after[name][0] != written[name][0] for name in after)
    store = Store(str(corpus))
    for row in rows(corpus):
        notes = Annotation.model_validate_json(read_sample(store, row["annotations"])["json"])
        held = TextNote.model_validate_json(read_sample(store, row["text"])["text.json"])
        assert notes.caption.provenance == "log"
        assert set(prompts(notes.caption, notes.perspective)) <= set(held.prompts)


def test_a_served_model_captions_and_text_follows(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tars(corpus, "media", "latents")
    monkeypatch.delattr(Latents, "run")
    monkeypatch.setattr(shards_sample, "coded_members", only_text)
    with CaptionServer() as server:
        settings = parse(ON | {"serve": {"endpoints": [server.url]}}, "test")
        run_caption(str(corpus), settings, EngineConfig(), pool=InProcess())
    store = Store(str(corpus))
    assert tars(corpus, "media", "latents") == kept and verify(store) == []
    for row in rows(corpus):
        notes = Annotation.model_validate_json(read_sample(store, row["annotations"])["json"])
        held = TextNote.model_validate_json(read_sample(store, row["text"])["text.json"])
        assert notes.caption.provenance == "stand-in"
        assert set(prompts(notes.caption, notes.perspective)) <= set(held.prompts)


def test_a_stage_that_failed_and_is_then_turned_off_keeps_no_clip_away(
    source: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Latents, unit: Unit, scratch: Path) -> Result:
        raise CodecError("no")

    other = ON | {"latents": ON["latents"] | {"segments": 1}, "run": {"attempts": 1}}
    with monkeypatch.context() as patched:
        patched.setattr(Latents, "run", fails)
        run_curate(f"gameplay:{source}", str(corpus), parse(other, "test"), pool=InProcess())
    curate(corpus, source, OFF)
    assert len(rows(corpus)) == 2 and families(corpus) == ["annotations", "media"]


def only_text(unit: Unit, family: str, held: ExitStack) -> dict[str, Path]:
    assert family == "text", "latents of kept tars are not read"
    return members(unit, family, held)


def test_a_corpus_grows_by_the_codec_that_it_has_and_recalibration_fits_another(
    footage: Path, source: Path, corpus: Path
) -> None:
    old, store = tars(corpus, *FAMILIES), Store(str(corpus))
    shutil.copyfile(footage / "odd_64x36.mp4", source / "new.mp4")
    curate(corpus, source, ON)
    grown = tars(corpus, *FAMILIES)
    assert grown | old == grown and len(grown) == len(old) + len(FAMILIES)
    assert versions(store, CODEC) == [1]
    curate(corpus, source, ON, recalibrate=True)
    (source / "new.mp4").unlink()
    codec = newest(store, CODEC, FittedCodec)
    assert codec is not None and versions(store, CODEC) == [1, 2] and len(codec.clips) == 3
    assert {r["codec"] for r in rows(corpus, "latents")} == {f"linear-{codec.identity()}"}
    again = tars(corpus, *FAMILIES)
    assert {name for name in again if again[name] != grown[name]} == {n for n in again if "latents" in n}


def test_the_released_models_layouts_from_disk_reach_the_tars(footage: Path, tmp_path: Path) -> None:
    """Random weights in the places of the real ones, by the keys that a user gives: one chunk of 64x64."""
    tiny_vae().save_pretrained(tmp_path / "weights" / "vae")
    write_tiny_umt5(tmp_path / "umt5")
    (tmp_path / "source").mkdir()
    short_clip(footage, tmp_path / "source")
    settings = {
        "observe": {"track": "none"},
        "gates": {"min_frames": 13, "max_frozen_share": 1.0},
        "latents": {
            "codec": {"kind": "wan", "path": str(tmp_path / "weights")},
            "height": 64,
            "width": 64,
        },
        "text": {"kind": "umt5", "path": str(tmp_path / "umt5")},
    }
    outcome = run_curate(
        f"folder:{tmp_path / 'source'}", str(tmp_path / "corpus"), parse(settings, "test"), pool=InProcess()
    )
    store = Store(str(tmp_path / "corpus"))
    assert outcome.shard_failures == [] and verify(store) == []
    (row,) = rows(tmp_path / "corpus")
    coded, text = read_sample(store, row["latents"]), read_sample(store, row["text"])
    assert npy(coded["hr.npy"]).shape == (4, 16, 8, 8) and npy(coded["lr.npy"]).shape == (2, 16, 2, 2)
    assert LatentsNote.model_validate_json(coded["latents.json"]).codec.startswith("wan-")
    note = TextNote.model_validate_json(text["text.json"])
    assert note.encoder.startswith("umt5-") and npy(text["text.npy"]).shape == (sum(note.tokens), 32)


def test_a_path_without_weights_and_a_stage_that_is_off_are_refused_before_anything_starts(
    source: Path, tmp_path: Path
) -> None:
    wan = {"latents": {"codec": {"kind": "wan", "path": str(tmp_path)}}}
    with pytest.raises(CodecError, match="holds no VAE"):
        run_curate(f"gameplay:{source}", str(tmp_path / "c"), parse(OFF | wan, "test"), pool=InProcess())
    with pytest.raises(StageOrderError, match="no stage is named 'latents'"):
        run_curate(
            f"gameplay:{source}", str(tmp_path / "c"), parse(OFF, "test"), only="latents", pool=InProcess()
        )
    assert Store(str(tmp_path / "c")).list("recordings") == []


def test_a_second_corpus_takes_the_codec_of_the_first(footage: Path, corpus: Path, tmp_path: Path) -> None:
    """One model reads both, so their latents must be of one codec."""
    given = corpus / "statistics" / "codec-v0001.json"
    (tmp_path / "source").mkdir()
    for suffix in ("mp4", "truth.csv", "truth.json"):
        shutil.copy(footage / f"{CLIPS[1]}.{suffix}", tmp_path / "source")
    latents = ON["latents"] | {"codec": {"kind": "linear", "path": str(given)}}
    other = curate(tmp_path / "other", tmp_path / "source", ON | {"latents": latents}) and tmp_path / "other"
    assert (other / "statistics" / "codec-v0001.json").read_bytes() == given.read_bytes()
    assert {r["codec"] for r in rows(other, "latents")} == {
        f"linear-{FittedCodec.model_validate_json(given.read_bytes()).identity()}"
    }
    before = tars(other, *FAMILIES)
    curate(other, tmp_path / "source", ON | {"latents": latents}, recalibrate=True)
    assert tars(other, *FAMILIES) == before
    for wrong, why in (
        (latents | {"height": 128}, "was fitted at 64x128, and latents are of 128x128"),
        (latents | {"codec": {"kind": "linear", "path": str(tmp_path)}}, "cannot be read"),
    ):
        with pytest.raises(CodecError, match=why):
            curate(other, tmp_path / "source", ON | {"latents": wrong})
