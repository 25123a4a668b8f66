"""A corpus that is curated again: other sources, copies, earlier failures, damaged bookkeeping."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.config import CurateConfig, parse
from jobs.corpus_run import run_curate
from jobs.curate import BudgetExceeded, Outcome
from jobs.runner import InProcess
from pipeline.corpus import CorpusError, open_corpus
from pipeline.shards.verify import verify
from pipeline.store import Store, StoreError
from pipeline.tables import batches

KEY_MAP = """
games:
  - game: a_game
    videos: ["{video}"]
    licence: CC0-1.0
    perspective: fps
    log:
      file: "{{stem}}.csv"
      inputs: [{{column: W, action: forward, unit: key, sign: 1}}]
"""


PLAIN = parse({"observe": {"track": "none"}}, "test")  # odometry has its own tests


def curate(source: str, corpus: Path, config: CurateConfig | None = None, **how: Any) -> Outcome:
    return run_curate(source, str(corpus), config or PLAIN, pool=InProcess(), **how)


def clips(corpus: Path) -> dict[str, dict[str, Any]]:
    found = batches(open_corpus(str(corpus)), "clips")
    return {r["source_path"]: r for b in found for r in b.to_pylist()}


def gameplay(folder: Path, footage: Path, video: str = "rec.mp4") -> None:
    """A recording of 210 frames with a log and a key map."""
    folder.mkdir(exist_ok=True)
    shutil.copy(footage / "odd_64x36.mp4", folder / video)
    rows = "".join(f"{int(50 <= t < 100)}\n" for t in range(210))
    (folder / video).with_suffix(".csv").write_text("W\n" + rows)
    (folder / "games.yaml").write_text(KEY_MAP.format(video=video))


def test_files_of_two_sources_that_look_alike_are_two_clips(footage: Path, tmp_path: Path) -> None:
    data = (footage / "odd_64x36.mp4").read_bytes()
    for day, content in (("day1", data), ("day2", data[:-1] + bytes([data[-1] ^ 1]))):
        (tmp_path / day).mkdir()
        (tmp_path / day / "rec.mp4").write_bytes(content)
        os.utime(tmp_path / day / "rec.mp4", (1e9, 1e9))
        curate(f"folder:{tmp_path / day}", tmp_path / "corpus")
    table = batches(open_corpus(str(tmp_path / "corpus")), "clips")
    assert len({r["clip_id"] for b in table for r in b.to_pylist()}) == 2


def test_of_two_equal_files_the_one_that_the_key_map_knows_is_the_clip(footage: Path, tmp_path: Path) -> None:
    gameplay(tmp_path / "g", footage)
    shutil.copy(tmp_path / "g/rec.mp4", tmp_path / "g/a copy.mp4")
    curate(f"gameplay:{tmp_path / 'g'}", tmp_path / "corpus")
    found = clips(tmp_path / "corpus")
    assert list(found) == ["rec.mp4"]
    assert (found["rec.mp4"]["status"], found["rec.mp4"]["game"]) == ("ok", "a_game")
    assert found["rec.mp4"]["also_at"] == "a copy.mp4"


def test_another_kind_of_source_takes_no_labels_away(footage: Path, tmp_path: Path) -> None:
    gameplay(tmp_path / "g", footage)
    curate(f"gameplay:{tmp_path / 'g'}", tmp_path / "corpus")
    before = clips(tmp_path / "corpus")
    curate(f"folder:{tmp_path / 'g'}", tmp_path / "corpus")
    assert clips(tmp_path / "corpus") == before


def test_a_camera_that_the_key_map_states_is_the_camera(footage: Path, tmp_path: Path) -> None:
    gameplay(tmp_path / "g", footage)
    text = (tmp_path / "g/games.yaml").read_text()
    (tmp_path / "g/games.yaml").write_text(text + "    camera: {focal: 0.375, aspect: 1.2, look: shear}\n")
    curate(f"gameplay:{tmp_path / 'g'}", tmp_path / "corpus")
    rows = [r for b in batches(open_corpus(str(tmp_path / "corpus")), "cameras") for r in b.to_pylist()]
    stated = {"game": "a_game", "shape": "16/9", "focal": 0.375, "aspect": 1.2, "look": "shear", "n": 0}
    assert [{k: r[k] for k in stated} for r in rows] == [stated]


def test_a_source_that_moved_is_followed(footage: Path, tmp_path: Path) -> None:
    gameplay(tmp_path / "g", footage)
    curate(f"gameplay:{tmp_path / 'g'}", tmp_path / "corpus", only="ingest")
    (tmp_path / "g").rename(tmp_path / "moved")
    curate(f"gameplay:{tmp_path / 'moved'}", tmp_path / "corpus")
    assert clips(tmp_path / "corpus")["rec.mp4"]["source"] == f"gameplay:{tmp_path / 'moved'}"
    assert clips(tmp_path / "corpus")["rec.mp4"]["status"] == "ok"


@pytest.mark.parametrize("change", ["what the old annotations say", "how the old clip is made"])
def test_a_file_that_was_replaced_is_a_new_clip_and_the_old_sample_stays(
    footage: Path, tmp_path: Path, change: str
) -> None:
    (tmp_path / "s").mkdir()
    shutil.copy(footage / "odd_64x36.mp4", tmp_path / "s/a.mp4")
    curate(f"folder:{tmp_path / 's'}", tmp_path / "corpus")
    tar = next((tmp_path / "corpus/shards/media").iterdir())
    before = tar.read_bytes()
    shutil.copy(footage / "odd_exactly_150f.mp4", tmp_path / "s/a.mp4")
    settings = {"source": {"licence": "CC0-1.0"}, "observe": {"track": "none"}}
    if change == "how the old clip is made":
        settings["ingest"] = {"crf": 13}
    outcome = curate(f"folder:{tmp_path / 's'}", tmp_path / "corpus", parse(settings, "test"))
    assert tar.read_bytes() == before
    assert len(list((tmp_path / "corpus/shards/media").iterdir())) == 2
    assert verify(Store(str(tmp_path / "corpus"))) == []
    # The old clip cannot be made again: that is said, and its partition stays as it was.
    kept = [line for line in outcome.shard_failures if "stay as they were" in line]
    assert len(kept) == len(outcome.shard_failures) == int("ingest" in settings)


@pytest.mark.parametrize(("source", "corpus"), [("s", "s/corpus"), ("c/in", "c")])
def test_a_corpus_and_its_source_lie_apart(tmp_path: Path, source: str, corpus: str) -> None:
    (tmp_path / source).mkdir(parents=True)
    if corpus == "c":
        open_corpus(str(tmp_path / "c2"), create=True)
        shutil.copy(tmp_path / "c2/corpus.json", tmp_path / "c/corpus.json")
    with pytest.raises(CorpusError, match="must not lie in one another"):
        curate(f"folder:{tmp_path / source}", tmp_path / corpus)


def test_failures_of_earlier_runs_count_against_the_budget(footage: Path, tmp_path: Path) -> None:
    gameplay(tmp_path / "g", footage)
    (tmp_path / "g/rec.csv").unlink()
    strict = parse({"run": {"max_failed_share": 0.0, "min_failed": 0, "attempts": 1}}, "test")
    for _ in range(2):
        with pytest.raises(BudgetExceeded, match="1 clips failed, over the budget of 0"):
            curate(f"gameplay:{tmp_path / 'g'}", tmp_path / "corpus", strict)
    gameplay(tmp_path / "g", footage)
    curate(f"gameplay:{tmp_path / 'g'}", tmp_path / "corpus", strict)
    assert clips(tmp_path / "corpus")["rec.mp4"]["status"] == "ok"


def test_a_file_that_cannot_be_read_is_named_and_tried_again(footage: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    shutil.copy(footage / "odd_64x36.mp4", tmp_path / "s/a.mp4")
    (tmp_path / "s/gone.mp4").symlink_to(tmp_path / "not there.mp4")
    outcome = curate(f"folder:{tmp_path / 's'}", tmp_path / "corpus")
    assert [line.split(":")[0] for line in outcome.unreadable] == ["gone.mp4"]
    assert clips(tmp_path / "corpus")["a.mp4"]["status"] == "ok"
    shutil.copy(footage / "odd_exactly_150f.mp4", tmp_path / "not there.mp4")
    outcome = curate(f"folder:{tmp_path / 's'}", tmp_path / "corpus")
    assert outcome.unreadable == []
    assert clips(tmp_path / "corpus")["gone.mp4"]["status"] == "ok"


def test_from_shards_writes_the_tars_again_and_nothing_else(footage: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    shutil.copy(footage / "odd_64x36.mp4", tmp_path / "s/a.mp4")
    corpus = tmp_path / "corpus"
    curate(f"folder:{tmp_path / 's'}", corpus)
    work = {p: p.stat().st_mtime_ns for p in (corpus / "work").rglob("*") if p.is_file()}
    tars = {p: p.read_bytes() for p in (corpus / "shards").rglob("*.tar")}
    outcome = curate(f"folder:{tmp_path / 's'}", corpus, anew="shards")
    assert outcome.partitions == 1
    assert {p: p.read_bytes() for p in tars} == tars
    assert {p: p.stat().st_mtime_ns for p in work} == work


@pytest.mark.parametrize("damage", ["delete a tar", "cut a tar", "cut an inventory", "delete an index"])
def test_a_run_heals_what_verify_says_is_gone(footage: Path, tmp_path: Path, damage: str) -> None:
    (tmp_path / "s").mkdir()
    shutil.copy(footage / "odd_64x36.mp4", tmp_path / "s/a.mp4")
    corpus = tmp_path / "corpus"
    curate(f"folder:{tmp_path / 's'}", corpus)
    before = {p: p.read_bytes() for part in ("shards", "index") for p in (corpus / part).rglob("*.*")}
    tar = next(p for p in before if p.suffix == ".tar")
    match damage:
        case "delete a tar":
            tar.unlink()
        case "cut a tar":
            tar.write_bytes(tar.read_bytes()[:-700])
        case "cut an inventory":
            (corpus / "index/g0000-p00000.json").write_bytes(b"{")
        case _:
            (corpus / "index/g0000-p00000.parquet").unlink()
    assert verify(Store(str(corpus)))
    curate(f"folder:{tmp_path / 's'}", corpus)
    assert {p: p.read_bytes() for p in before} == before
    assert verify(Store(str(corpus))) == []


def test_a_lost_generation_is_refused_not_made_again(footage: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    shutil.copy(footage / "odd_64x36.mp4", tmp_path / "s/a.mp4")
    curate(f"folder:{tmp_path / 's'}", tmp_path / "corpus")
    (tmp_path / "corpus/catalogue/g0000.parquet").unlink()
    with pytest.raises(CorpusError, match=r"g0000\.parquet is missing"):
        curate(f"folder:{tmp_path / 's'}", tmp_path / "corpus")


@pytest.mark.parametrize("kind", ["ledger", "catalogue"])
def test_damaged_bookkeeping_is_named_with_what_to_do(footage: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "s").mkdir()
    shutil.copy(footage / "odd_64x36.mp4", tmp_path / "s/a.mp4")
    corpus = tmp_path / "corpus"
    curate(f"folder:{tmp_path / 's'}", corpus)
    file = next(p for p in (corpus / kind).rglob("*.parquet") if p.name != "scan.parquet")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(StoreError, match=f"{file.name} of .* is damaged: "):
        clips(corpus)
    if kind == "ledger":  # deleting it is the remedy
        file.unlink()
        curate(f"folder:{tmp_path / 's'}", corpus)
        assert verify(Store(str(corpus))) == []


def test_ctrl_c_says_that_the_same_command_goes_on(footage: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/a.mp4").symlink_to(footage / "nav01_mouse_map01.mp4")
    command = [
        sys.executable,
        "-m",
        "jobs",
        "curate",
        f"folder:{tmp_path / 's'}",
        "--out",
        str(tmp_path / "c"),
    ]
    run = subprocess.Popen([*command, "--json-logs"], stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    for line in run.stderr:
        if '"phase": "recordings"' in line or '"phase": "clips"' in line:
            break  # at work: what is interrupted while modules load is another test's
    time.sleep(1.0)
    run.send_signal(signal.SIGINT)
    assert "wp2: stopped; the same command goes on from here" in run.communicate(timeout=60)[1]
    assert run.returncode == 130


@pytest.mark.parametrize(("file", "table"), [("frames.parquet", "frames"), ("poses.parquet", "poses")])
def test_a_damaged_work_file_is_named_with_what_to_do(
    footage: Path, tmp_path: Path, file: str, table: str
) -> None:
    (tmp_path / "s").mkdir()
    shutil.copy(footage / "odd_64x36.mp4", tmp_path / "s/a.mp4")
    curate(f"folder:{tmp_path / 's'}", tmp_path / "corpus")
    path = next((tmp_path / "corpus/work").rglob(f"*.{file}"))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(StoreError, match=rf"{file}.* is damaged: .*--from "):
        list(batches(open_corpus(str(tmp_path / "corpus")), table))
