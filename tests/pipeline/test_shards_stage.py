"""The shards stage on real clips: what is written again, what stays, and what becomes of a lost file."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.actions import ACTIONS, Actions, ActionsConfig
from pipeline.caption.stage import Caption, CaptionConfig, ServeConfig
from pipeline.flow import Flow
from pipeline.gates import Gates, GatesConfig
from pipeline.ingest import Ingest, IngestConfig
from pipeline.observe import Observe, ObserveConfig
from pipeline.pose.stage import Pose, PoseConfig
from pipeline.shards.inventory import ROOT, index_path, inventory_path, whole
from pipeline.shards.read import read_index, read_sample
from pipeline.shards.stage import Member, Shards
from pipeline.shards.verify import verify
from pipeline.shards.write import ShardConfig, write_root
from pipeline.sources.found import SourceConfig
from pipeline.stage import Receipt, Unit
from pipeline.store import Store
from schemas.action import JUMP, RotationRates
from schemas.camera import Cameras
from schemas.clip import Clip
from schemas.quality import Status

PARTITION = "g0000-p00000"
NAMES = ("odd_64x36.mp4", "odd_exactly_150f.mp4", "odd_h264.mov")  # the last one gets a working copy
CONFIG = ShardConfig(target_bytes={"media": 250_000, "annotations": 1 << 30})


def stages() -> tuple:
    return (
        Ingest(IngestConfig()),
        Gates(GatesConfig()),
        Observe(ObserveConfig()),
        Pose(PoseConfig(estimators=("none",)), SourceConfig(), Cameras()),
        Actions(ActionsConfig(), SourceConfig(), RotationRates()),
        Caption(CaptionConfig(), SourceConfig(), ServeConfig()),
    )


@dataclass
class Made:
    """A published partition, its members, and the receipt of its shards."""

    shards: Shards
    members: list[Member]
    receipt: Receipt | None = None

    @property
    def corpus(self) -> Store:
        return self.shards.corpus

    def write(self) -> Receipt:
        self.receipt = self.shards.run(PARTITION, self.members, self.receipt)
        return self.receipt

    def unit(self, name: str) -> Unit:
        return next(u for u, _ in self.members if u.clip.source_path == name)

    def source(self, name: str) -> Path:
        return Path(self.unit(name).source.full(name))

    def ids(self) -> list[str]:
        return read_index(self.corpus, ["sample_id"])["sample_id"].to_pylist()

    def stamps(self, part: str) -> dict[str, tuple[int, int]]:
        files = {s.path: Path(self.corpus.full(s.path)).stat() for s in self.corpus.list(part)}
        return {path: (info.st_ino, info.st_mtime_ns) for path, info in files.items()}

    def holds_the_catalogued_media(self) -> bool:
        root = self.corpus
        root.write("corpus.json", b"{}")
        write_root(root)
        rows = read_index(root).to_pylist()
        data = {r["sample_id"]: read_sample(root, r["media"])["mp4"] for r in rows}
        want = {u.clip.clip_id: u for u, _ in self.members}
        for name, content in data.items():
            ingest = want[name].receipts["ingest"]
            sha = ingest.output("media.mp4").sha256 if ingest.has("media.mp4") else want[name].clip.sha256
            assert hashlib.sha256(content).hexdigest() == sha
        return verify(root) == []


def member(source: Store, corpus: Store, name: str) -> Member:
    data = source.read(name)
    sha = hashlib.sha256(data).hexdigest()
    clip = Clip(
        clip_id=sha[:16],
        recording_id=sha[:16],
        source=f"folder:{source.url}",
        source_path=name,
        bytes=len(data),
        sha256=sha,
    )
    unit = Unit(clip, PARTITION, source, corpus)
    receipts = Flow(stages(), corpus).run(unit, 1)
    assert all(r.status is Status.OK for r in receipts), receipts
    return replace(unit, receipts={r.stage: r for r in receipts}), "train"


@pytest.fixture(scope="module")
def curated(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Member]]:
    base = tmp_path_factory.mktemp("curated")
    (base / "source").mkdir()
    for name in NAMES:
        shutil.copyfile(footage / name, base / "source" / name)
    source, corpus = Store(str(base / "source")), Store(str(base / "corpus"))
    members = [member(source, corpus, name) for name in NAMES]
    return base, sorted(members, key=lambda m: m[0].clip.clip_id)


@pytest.fixture
def made(curated: tuple[Path, list[Member]], tmp_path: Path) -> Made:
    """A copy of the curated clips, published."""
    base, members = curated
    shutil.copytree(base, tmp_path / "made")
    source, corpus = Store(str(tmp_path / "made/source")), Store(str(tmp_path / "made/corpus"))
    made = Made(Shards(CONFIG, corpus), [(replace(u, source=source, corpus=corpus), s) for u, s in members])
    made.write()
    assert made.receipt and made.shards.is_fresh(made.receipt, made.members)
    assert len(made.corpus.list("shards/media")) > 1
    return made


def relabel(made: Made, name: str) -> None:
    """Another output of the actions stage for a clip: the player jumps all the way."""
    unit = made.unit(name)
    held = unit.receipts["actions"]
    path = made.corpus.full(held.output(ACTIONS).path)
    with np.load(path) as stored:
        arrays = dict(stored)
    about = json.loads(str(arrays["about"]))
    about["reasons"].pop("jump", None)
    arrays["about"] = np.array(json.dumps(about))
    arrays["rows"][1:, JUMP] = 1
    arrays["rows"][0, JUMP] = 0
    np.savez(path, **arrays)
    change(made, name, "actions", held.model_copy(update={"content": "jumps"}))


def change(made: Made, name: str, stage: str, receipt: Receipt) -> None:
    unit = made.unit(name)
    other = replace(unit, receipts={**unit.receipts, stage: receipt})
    made.members = [(other if u is unit else u, split) for u, split in made.members]


def without(made: Made, name: str) -> None:
    made.members = [m for m in made.members if m[0].clip.source_path != name]


def test_new_actions_write_the_annotations_again_and_touch_no_media(made: Made) -> None:
    media, notes = made.stamps("shards/media"), made.stamps("shards/annotations")
    places = read_index(made.corpus)["media"].to_pylist()
    relabel(made, NAMES[0])
    assert not made.shards.is_fresh(made.receipt, made.members)
    for name in NAMES:  # the sources are gone, and so is the working copy: nothing of them is read
        made.source(name).unlink()
    made.corpus.remove(made.unit(NAMES[2]).receipts["ingest"].output("media.mp4").path)
    receipt = made.write()
    assert receipt.reasons == () and made.shards.is_fresh(receipt, made.members)
    assert made.stamps("shards/media") == media
    assert made.stamps("shards/annotations") != notes
    assert read_index(made.corpus)["media"].to_pylist() == places
    row = next(
        r for r in read_index(made.corpus).to_pylist() if r["sample_id"] == made.unit(NAMES[0]).clip.clip_id
    )
    actions = np.load(io.BytesIO(read_sample(made.corpus, row["annotations"])["actions.npy"]))
    assert (actions[1:, JUMP] == 1).all()
    assert made.holds_the_catalogued_media()


def test_keeping_the_media_makes_the_bytes_that_writing_all_makes(made: Made, tmp_path: Path) -> None:
    relabel(made, NAMES[1])
    made.write()
    kept = snapshot(made.corpus, "shards", "index")
    made.receipt = None
    made.write()
    assert snapshot(made.corpus, "shards", "index") == kept


def test_another_member_set_and_another_tar_size_write_the_media_again(made: Made) -> None:
    media = made.stamps("shards/media")
    without(made, NAMES[1])
    made.write()
    assert made.ids() == [u.clip.clip_id for u, _ in made.members]
    assert made.stamps("shards/media") != media
    media = made.stamps("shards/media")
    made.shards = Shards(ShardConfig(), made.corpus)
    made.write()
    assert made.stamps("shards/media") != media and len(made.corpus.list("shards/media")) == 1
    assert made.holds_the_catalogued_media()


def test_a_source_recorded_again_never_gets_under_the_old_id(made: Made, footage: Path) -> None:
    """The partition is new, so nothing else holds the clip: it is left out, told, and tried again."""
    for stat in [*made.corpus.list("shards"), *made.corpus.list("index")]:
        made.corpus.remove(stat.path)
    made.receipt = None
    lost = made.unit(NAMES[0]).clip.clip_id
    shutil.copyfile(footage / NAMES[1], made.source(NAMES[0]))
    receipt = made.write()
    assert receipt.status is Status.OK and receipt.facts["skipped"] == 1
    (reason,) = receipt.reasons
    assert reason.startswith(f"{lost}: source_changed: {NAMES[0]} in ")
    assert not made.shards.is_fresh(receipt, made.members)
    assert lost not in made.ids() and len(made.ids()) == len(NAMES) - 1
    assert made.holds_the_catalogued_media()
    shutil.copyfile(footage / NAMES[0], made.source(NAMES[0]))
    receipt = made.write()
    assert receipt.reasons == () and made.shards.is_fresh(receipt, made.members)
    assert lost in made.ids() and made.holds_the_catalogued_media()


@pytest.mark.parametrize("inventory", ["sound", "gone", "index gone too"])
def test_a_rewrite_of_the_media_keeps_published_clips_whose_files_are_gone(
    made: Made, inventory: str
) -> None:
    """Also after a kill that left no inventory."""
    if inventory != "sound":
        made.corpus.remove(inventory_path(PARTITION))
    if inventory == "index gone too":
        made.corpus.remove(index_path(PARTITION))
    for name in NAMES:
        made.source(name).unlink()
    made.corpus.remove(made.unit(NAMES[2]).receipts["ingest"].output("media.mp4").path)
    without(made, min(NAMES, key=lambda n: made.unit(n).clip.clip_id))
    receipt = made.write()
    assert receipt.reasons == () and made.ids() == [u.clip.clip_id for u, _ in made.members]
    assert made.holds_the_catalogued_media()


def test_media_tars_that_the_receipt_does_not_describe_are_not_kept(made: Made) -> None:
    """A run that wrote other shards and was killed before its receipt reached the ledger."""
    held = made.receipt
    whole_set = made.members
    without(made, NAMES[1])
    made.write()
    made.members, made.receipt = whole_set, held
    assert not made.shards.is_fresh(held, made.members)
    made.write()
    assert made.ids() == [u.clip.clip_id for u, _ in made.members]
    assert made.holds_the_catalogued_media()


@pytest.mark.parametrize("damage", ["tar short", "tar gone", "index changed", "inventory changed"])
def test_damage_in_the_published_partition_is_healed_by_the_next_write(made: Made, damage: str) -> None:
    before = snapshot(made.corpus, "shards", "index")
    path = {"tar": f"shards/media/{PARTITION}-0000.tar", "index": index_path(PARTITION)}.get(
        damage.split()[0], inventory_path(PARTITION)
    )
    data = bytearray(made.corpus.read(path))
    data[-20] ^= 1
    if damage == "tar gone":
        made.corpus.remove(path)
    else:
        made.corpus.write(path, bytes(data[:-512] if damage == "tar short" else data))
    assert whole(made.corpus, PARTITION) == (damage == "index changed")  # sizes alone do not show that one
    relabel(made, NAMES[0])
    made.write()
    assert snapshot(made.corpus, "shards/media") == {
        p: d for p, d in before.items() if p.startswith("shards/media")
    }
    assert whole(made.corpus, PARTITION) and made.holds_the_catalogued_media()


def snapshot(corpus: Store, *folders: str) -> dict[str, bytes]:
    return {s.path: corpus.read(s.path) for f in folders for s in corpus.list(f) if s.path != ROOT}
