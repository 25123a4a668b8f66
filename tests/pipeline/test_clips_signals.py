"""What recordings show: hard cuts, flashes, fast turns, menus and loading, on the pack, on recordings
composed of it, and on recorded play with its truth; and what the cutting stage makes of them.

Source: spec/faults.md C5; DESIGN 2.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from composed import compose
from recordings import PACK_MAP

from pipeline.clips.segments import ClipsConfig
from pipeline.clips.signals import SIGNALS, Signals, pack, read_signals, runs, watch
from pipeline.clips.stage import Clips, read_segments, read_spans
from pipeline.frames import frame_pass
from pipeline.sources import SourceConfig, discover
from pipeline.sources.found import sidecars_of
from pipeline.sources.keymap import KeyMapError, parse
from pipeline.stage import Receipt, Unit, run_unit
from pipeline.store import Store, sha256_file
from schemas.clip import Clip, ClipKind, Sidecar
from schemas.quality import Status
from schemas.segment import LeftOut

WHOLE = ("nav*.mp4", "loop*.mp4", "nonloop*.mp4", "event*.mp4", "bad0[1357]*.mp4")

Spans = Sequence[Sequence[int]]


class Score(Counter[str]):
    """Counts of found, extra and missed, by what was looked for."""

    def frames(self, name: str, got: Iterable[int], truth: Iterable[int]) -> None:
        got, truth = set(got), set(truth)
        self.update({f"{name} found": len(got & truth), f"{name} extra": len(got - truth)})
        self.update({f"{name} missed": len(truth - got)})

    def spans(self, name: str, got: Spans, truth: Spans) -> None:
        """A span counts as found when its ends are at most two frames off."""
        near = [any(abs(a - c) <= 2 and abs(b - d) <= 2 for c, d in got) for a, b in truth]
        sound = [any(abs(a - c) <= 2 and abs(b - d) <= 2 for c, d in truth) for a, b in got]
        self.update({f"{name} found": sum(near), f"{name} missed": len(near) - sum(near)})
        self.update({f"{name} extra": len(sound) - sum(sound)})

    def uncut(self, name: str, cut: np.ndarray, truth: Spans) -> None:
        """Spans in which, and right behind which, no cut may lie."""
        hit = [bool(cut[a : b + 1].any()) for a, b in truth]
        self.update({f"{name} found": len(hit) - sum(hit), f"{name} missed": sum(hit)})

    def passes(self, name: str) -> bool:
        """Precision and recall of at least 0.95."""
        found = self[f"{name} found"]
        return found >= 0.95 * (found + max(self[f"{name} extra"], self[f"{name} missed"])) and found > 0


def unit_of(source: Store, corpus: Store, path: str, config: SourceConfig) -> Unit:
    """A recording on its way to the cutting stage."""
    listing = discover("gameplay", source, config)
    found = next(f for f in listing.found if f.path == path)
    clip = Clip(
        clip_id="r0",
        recording_id="r0",
        source_path=path,
        bytes=found.size,
        sha256=sha256_file(Path(source.full(path))),
        game=found.game,
        **sidecars_of(found, source, listing.key_map),
    )
    return Unit(clip, "p0", source, corpus)


def cut(unit: Unit, settings: ClipsConfig, config: SourceConfig) -> tuple[Receipt, Signals]:
    receipt = run_unit(Clips(settings, config), unit)
    assert receipt.status is Status.OK, receipt.reasons
    signals = Sidecar(path=receipt.output(SIGNALS).path, digest="0")
    return receipt, read_signals(unit.corpus, unit.clip.model_copy(update={"signals": signals}))


# --- the pack ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["nav08_runkeys_map03", "nav12_miniworld_fourrooms", "event01_door_map01"])
def test_a_clip_without_cuts_keeps_every_frame(footage: Path, clip: str) -> None:
    # nav08 turns by 7 degrees a frame, nav12 looks at plain walls, event01 stands still at a door.
    seen = watch(footage / f"{clip}.mp4")
    assert not (seen.cut | seen.menu | seen.loading).any()


@pytest.mark.soak
def test_no_recording_of_the_pack_is_cut(footage: Path) -> None:
    for path in sorted(p for glob in WHOLE for p in footage.glob(glob)):
        seen = watch(path)
        assert not (seen.cut | seen.menu | seen.loading).any(), path.name


def test_the_signals_have_the_frames_of_the_strict_decode(footage: Path) -> None:
    path = footage / "odd_start1p5.mkv"
    seen, decoded = watch(path), frame_pass(path)
    assert np.array_equal(seen.pts, decoded.pts) and np.array_equal(seen.pixels, decoded.pixels)
    assert seen.pts[0] * seen.time_base == Fraction(3, 2)
    assert seen.key[0] and 0 < seen.key.sum() < len(seen)


def test_hard_cuts_of_a_film_trailer_are_found(footage: Path) -> None:
    # Looked at: two dialogues, a fight in snow, a city, a dragon, a face; black between three of them.
    seen = watch(footage / "cosmos_test_video_30s.mp4")
    assert np.flatnonzero(seen.cut).tolist() == [286, 348, 356, 372, 523, 573, 610, 624]
    assert all(seen.loading[k - 4 : k].all() for k in (348,)) and seen.loading[374:386].all()


def test_a_real_menu_is_seen_from_its_first_frame_to_its_last_through_two_pages(footage: Path) -> None:
    seen = watch(footage / "bad04_menu.mp4")
    assert runs(seen.menu) == [(21, 350)]
    assert seen.covered[:21].max() == 0.0 and seen.covered[21:].min() > 0.9


# --- composed ---------------------------------------------------------------------------------------------


def score_composed(footage: Path, folder: Path, seeds: Iterable[int], pieces: int) -> Score:
    score = Score()
    for seed in seeds:
        made = compose(footage, folder, seed, pieces)
        seen = watch(made.path)
        score.frames("cuts", np.flatnonzero(seen.cut).tolist(), made.cuts)
        score.uncut("flashes", seen.cut, made.flashes)
        score.uncut("turns", seen.cut, made.turns)
        score.spans("menus", runs(seen.menu), made.menus)
    return score


def test_composed_cuts_are_found_and_flashes_fast_turns_and_menus_are_none(
    footage: Path, tmp_path: Path
) -> None:
    score = score_composed(footage, tmp_path, [0], 12)
    assert score["cuts found"] == 11 and score["flashes found"] == 6
    assert {k: v for k, v in score.items() if v and not k.endswith("found")} == {}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_composed_recordings_of_many_seeds_pass_the_bar(footage: Path, tmp_path: Path) -> None:
    score = score_composed(footage, tmp_path, range(100, 110), 24)
    print(dict(score))
    assert all(score.passes(name) for name in ("cuts", "flashes", "turns", "menus"))


# --- recorded play ----------------------------------------------------------------------------------------


def record_sessions(folder: Path, seed: int, count: int, seconds: float) -> list[Path]:
    pytest.importorskip("vizdoom", reason="recording needs the demo extra")
    from jobs.record import record

    record(
        folder, seed=seed, navigation=0, loops=0, events=0, seconds=30,
        sessions=count, session_seconds=seconds, size=(320, 180),
    )  # fmt: skip
    return sorted(folder.glob("*.mp4"))


def score_session(video: Path, corpus: Store, score: Score) -> tuple[Receipt, Signals, dict[str, Spans]]:
    truth = json.loads(video.with_suffix(".segments.json").read_text())
    seen = watch(video)
    score.spans("menus by picture", runs(seen.menu), truth["menus"])
    score.spans("loading by picture", runs(seen.loading), truth["loading"])
    score.frames("cuts by picture", np.flatnonzero(seen.cut).tolist(), truth["cuts"])
    unit = unit_of(Store(str(video.parent)), corpus, video.name, SourceConfig())
    receipt, told = cut(unit, ClipsConfig(), SourceConfig())
    score.frames("cuts", np.flatnonzero(told.cut).tolist(), truth["cuts"])
    score.uncut("flashes", told.cut, truth["flashes"])
    score.uncut("turns", told.cut, truth["fast_turns"])
    score.spans("menus", runs(told.menu), truth["menus"])
    score.spans("deaths", runs(told.dead), truth["deaths"])
    score.spans("loading", runs(told.loading), truth["loading"])
    for start, stop in truth["idle"]:
        score.update({"idle found": int(told.idle[start + 60 : stop - 1].all())})
    return receipt, told, truth


@pytest.mark.soak  # 22 s; a composed recording holds the same in every run
def test_a_recorded_session_is_cut_at_its_true_frames(tmp_path: Path) -> None:
    (video,) = record_sessions(tmp_path / "source", 3, 1, 45)
    corpus, score = Store(str(tmp_path / "corpus")), Score()
    receipt, told, truth = score_session(video, corpus, score)
    assert {k: v for k, v in score.items() if v and not k.endswith("found")} == {}
    assert score["deaths found"] >= 2 and score["menus found"] == 3 and score["idle found"] == 1
    assert receipt.facts["cuts"] == len(truth["cuts"])
    # 45 s of acts leave no navigation clip between them; with shorter ones every clip is clean.
    short = ClipsConfig(
        navigation_min_s=2, navigation_max_s=4, event_min_s=1, event_max_s=2, event_border_s=0.2
    )
    unit = unit_of(Store(str(video.parent)), corpus, video.name, SourceConfig())
    receipt, _ = cut(unit, short, SourceConfig())
    made = read_segments(corpus, receipt)
    assert [(s.start, s.stop, s.kind) for s in made if s.kind] == read_spans(receipt)
    assert {s.left_out for s in made} >= {LeftOut.MENU, LeftOut.DEATH, LeftOut.LOADING, LeftOut.IDLE}
    bad = told.menu | told.dead | told.loading | told.idle
    assert all(not bad[s.start : s.stop].any() for s in made if s.kind)
    assert all(not told.cut[s.start + 1 : s.stop].any() for s in made if s.kind)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_recorded_sessions_of_many_seeds_pass_the_bar(tmp_path: Path) -> None:
    score = Score()
    for seed in range(20, 26):
        for video in record_sessions(tmp_path / f"source{seed}", seed, 2, 90):
            score_session(video, Store(str(tmp_path / "corpus")), score)
    print(dict(score))
    assert all(score.passes(n) for n in ("cuts", "flashes", "turns", "menus", "deaths", "menus by picture"))


# --- the stage --------------------------------------------------------------------------------------------


def pack_unit(footage: Path, corpus: Store, clip: str) -> tuple[Unit, SourceConfig]:
    config = SourceConfig(key_map=str(PACK_MAP))
    return unit_of(Store(str(footage)), corpus, clip, config), config


def test_a_short_recording_without_cuts_is_one_clip_of_the_whole_file(footage: Path, tmp_path: Path) -> None:
    corpus = Store(str(tmp_path))
    unit, config = pack_unit(footage, corpus, "event03_kill_zombieman.mp4")
    receipt, seen = cut(unit, ClipsConfig(), config)
    assert read_spans(receipt) == [(0, 0, ClipKind.EVENT)]
    assert [(s.start, s.stop) for s in read_segments(corpus, receipt)] == [(0, 193)]
    assert len(seen) == receipt.facts["frames"] == 193


def test_signals_of_a_part_are_the_rows_of_its_own_frames(footage: Path, tmp_path: Path) -> None:
    corpus = Store(str(tmp_path))
    unit, config = pack_unit(footage, corpus, "event03_kill_zombieman.mp4")
    receipt, seen = cut(unit, ClipsConfig(), config)
    signals = Sidecar(path=receipt.output(SIGNALS).path, digest="0")
    part = unit.clip.model_copy(update={"signals": signals, "start": 20, "stop": 50})
    assert np.array_equal(read_signals(corpus, part).pts, seen.pts[20:50])


def test_the_stage_gives_the_same_bytes_again_and_keeps_its_receipt_when_a_setting_changes(
    footage: Path, tmp_path: Path
) -> None:
    unit, config = pack_unit(footage, Store(str(tmp_path)), "odd_short_140f.mp4")
    first, seen = cut(unit, ClipsConfig(), config)
    again, _ = cut(unit, ClipsConfig(navigation_max_s=45), config)
    assert [o.sha256 for o in first.outputs] == [o.sha256 for o in again.outputs]
    assert first.config == again.config and first.content == again.content
    assert pack(seen) == Store(str(tmp_path)).read(first.output(SIGNALS).path)


@pytest.mark.parametrize("name", ["odd_zero_byte.mp4", "odd_garbage.mp4", "odd_truncated_no_moov.mp4"])
def test_a_recording_that_cannot_be_decoded_is_one_clip_and_says_why(
    footage: Path, tmp_path: Path, name: str
) -> None:
    unit, config = pack_unit(footage, Store(str(tmp_path)), name)
    receipt = run_unit(Clips(ClipsConfig(), config), unit)
    assert receipt.status is Status.OK and receipt.outputs == ()
    assert read_spans(receipt) == [(0, 0, ClipKind.NAVIGATION)] and read_segments(unit.corpus, receipt) == []
    assert receipt.facts["undecodable"]


def test_a_changed_source_fails(footage: Path, tmp_path: Path) -> None:
    unit, config = pack_unit(footage, Store(str(tmp_path)), "odd_short_140f.mp4")
    changed = replace(unit, clip=unit.clip.model_copy(update={"sha256": "0" * 64}))
    receipt = run_unit(Clips(ClipsConfig(), config), changed)
    assert receipt.status is Status.FAILED and receipt.reasons[0].startswith("source_changed")


# --- the key map ------------------------------------------------------------------------------------------

ENTRY = {
    "game": "toy",
    "videos": ["*.mp4"],
    "log": {"file": "{stem}.csv", "inputs": [{"column": "W", "action": "forward"}]},
}


def test_states_are_read_from_the_log_beside_their_frames(footage: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "run.mp4").symlink_to(footage / "odd_short_140f.mp4")
    rows = [f"{int(k < 20)},{int(40 <= k < 60)},{0.4 if 80 <= k < 90 else 0.6}" for k in range(140)]
    (source / "run.csv").write_text("W,MENU,ALPHA\n" + "\n".join(rows) + "\n")
    states = [
        {"column": "MENU", "state": "menu"},
        {"column": "MENU", "state": "dead", "above": 5},
        {"column": "ALPHA", "state": "loading", "above": 0.5},
    ]
    for row in ("next", "previous"):
        entry = ENTRY | {"log": ENTRY["log"] | {"row": row, "states": states}}
        (source / "games.yaml").write_text(yaml.safe_dump({"games": [entry]}))
        unit = unit_of(Store(str(source)), Store(str(tmp_path / row)), "run.mp4", SourceConfig())
        _, seen = cut(unit, ClipsConfig(), SourceConfig())
        assert runs(seen.menu) == [(40, 60)] and not seen.dead.any()
        assert runs(seen.loading) == [(0, 80), (90, 140)]


def test_a_log_that_cannot_be_read_is_named_and_the_pictures_are_cut_without_it(
    footage: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.mp4").symlink_to(footage / "odd_short_140f.mp4")
    (tmp_path / "run.csv").write_text("W\n1\n")
    entry = ENTRY | {"log": ENTRY["log"] | {"states": [{"column": "DEAD", "state": "dead"}]}}
    (tmp_path / "games.yaml").write_text(yaml.safe_dump({"games": [entry]}))
    unit = unit_of(Store(str(tmp_path)), Store(str(tmp_path / "corpus")), "run.mp4", SourceConfig())
    receipt, _ = cut(unit, ClipsConfig(), SourceConfig())
    assert "no column 'DEAD'" in str(receipt.facts["log_unread"]) and receipt.facts["clips"] == 1


def test_an_unknown_state_is_refused_by_the_key_map() -> None:
    entry = ENTRY | {"log": ENTRY["log"] | {"states": [{"column": "X", "state": "asleep"}]}}
    with pytest.raises(KeyMapError, match=r"games\.0\.log\.states\.0\.state: .*'dead', 'menu' or 'loading'"):
        parse(yaml.safe_dump({"games": [entry]}), "games.yaml")
