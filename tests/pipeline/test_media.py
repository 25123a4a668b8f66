"""A clip's media is the file that was catalogued or ingested, or nobody gets it."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.media import MEDIA, has_media, media, media_sha256
from pipeline.stage import Artefact, Receipt, Unit
from pipeline.store import Store, StoreError
from schemas.clip import Clip
from schemas.quality import Status


def entry(path: Path) -> dict[str, object]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def receipt(*outputs: Artefact) -> Receipt:
    return Receipt(
        clip_id="c", stage="ingest", config="", inputs="", status=Status.OK, outputs=outputs, content=""
    )


@pytest.fixture
def unit(footage: Path, tmp_path: Path) -> Unit:
    """A unit whose media file is its source."""
    (tmp_path / "source").mkdir()
    source = shutil.copyfile(footage / "odd_64x36.mp4", tmp_path / "source" / "run.mp4")
    clip = Clip(clip_id="c", recording_id="c", source_path="run.mp4", **entry(source))
    corpus = Store(str(tmp_path / "corpus"))
    return Unit(clip, "p", Store(str(tmp_path / "source")), corpus, {"ingest": receipt()})


@pytest.fixture
def copied(footage: Path, unit: Unit) -> Unit:
    """The same unit, with a working copy."""
    path = "work/ingest/p/c.media.mp4"
    unit.corpus.put(footage / "odd_exactly_150f.mp4", path)
    copy = Artefact(name=MEDIA, path=path, **entry(footage / "odd_exactly_150f.mp4"))
    return replace(unit, receipts={"ingest": receipt(copy)})


def swap_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def refused(unit: Unit) -> str:
    with pytest.raises(StoreError) as error, media(unit):
        pass
    text = str(error.value)
    assert "\n" not in text
    return text


def test_media_is_the_source_or_the_working_copy(unit: Unit, copied: Unit) -> None:
    for of, path in ((unit, unit.source.full("run.mp4")), (copied, copied.corpus.full(copied_path(copied)))):
        with media(of) as local:
            assert local == Path(path)
            assert hashlib.sha256(local.read_bytes()).hexdigest() == media_sha256(of)
        assert has_media(of)


def copied_path(unit: Unit) -> str:
    return unit.receipts["ingest"].output(MEDIA).path


def test_a_source_that_was_recorded_again_is_refused(unit: Unit, footage: Path) -> None:
    source = Path(unit.source.full("run.mp4"))
    swap_a_byte(source)
    text = refused(unit)
    assert text.startswith("source_changed: run.mp4 in ") and "put that one back" in text
    shutil.copyfile(footage / "odd_exactly_150f.mp4", source)
    assert refused(unit) == text
    assert not has_media(unit)


def test_a_source_that_is_gone_is_named(unit: Unit) -> None:
    Path(unit.source.full("run.mp4")).unlink()
    assert refused(unit).startswith("source run.mp4 is missing from ")
    assert not has_media(unit)


def test_a_working_copy_that_is_damaged_or_gone_asks_for_ingest(copied: Unit) -> None:
    path = Path(copied.corpus.full(copied_path(copied)))
    whole = path.read_bytes()
    swap_a_byte(path)
    assert refused(copied) == f"working copy {copied_path(copied)} is damaged; run again with `--from ingest`"
    path.write_bytes(whole[:-1])
    assert "is damaged" in refused(copied)
    assert not has_media(copied)
    path.unlink()
    assert refused(copied) == f"working copy {copied_path(copied)} is missing; run again with `--from ingest`"


def test_a_changed_source_does_not_matter_where_there_is_a_working_copy(copied: Unit) -> None:
    swap_a_byte(Path(copied.source.full("run.mp4")))
    with media(copied) as path:
        assert path.name == "c.media.mp4"
