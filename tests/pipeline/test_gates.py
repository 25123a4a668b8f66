"""Gates: ordered reasons from what ingest found and the recording's signals, without another decode."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from pipeline.clips.signals import COLUMNS, SIGNALS, Signals, watch
from pipeline.clips.signals import pack as pack_signals
from pipeline.frames import frame_pass
from pipeline.gates import Gates, GatesConfig, static_share
from pipeline.ingest import Ingest, IngestConfig
from pipeline.media import FRAMES, MediaTable, Probe, pack
from pipeline.stage import Artefact, Receipt, Unit, run_unit
from pipeline.store import Store, sha256_file
from schemas.clip import Clip, FrameTable, Sidecar
from schemas.quality import Status

FOOTAGE = Path(os.environ.get("WP2_FOOTAGE", Path(__file__).parents[3] / "shared/data/footage"))

GOOD = {
    "frames": 715,
    "fps": 35.0,
    "duration_s": 20.43,
    "bad_frames": 0,
    "missing_packets": 0,
    "windows": 6,
    "windows_damaged": 0,
    "longest_frozen": 29,
    "picture_step": 1,
}


def table(change: np.ndarray, rate: int = 35) -> MediaTable:
    n = len(change)
    frames = FrameTable(
        time_base=Fraction(1, rate),
        pts=np.arange(n),
        source_index=np.arange(n),
        pixels=np.arange(n, dtype=np.uint64),
        ok=np.ones(n, np.bool_),
        repeat=np.zeros(n, np.bool_),
    )
    return MediaTable(frames, change.astype(np.float32), {})


def signals(count: int, **marked: np.ndarray) -> Signals:
    """Signals of play in which nothing is seen, but for what is given."""
    kinds = {"pts": np.int64, "pixels": np.uint64, "change": np.float32, "covered": np.float32}
    columns = {name: np.zeros(count, kinds.get(name, np.bool_)) for name in COLUMNS}
    return Signals(time_base=Fraction(1, 35), **columns | marked)


def gates(
    tmp_path: Path,
    facts: Mapping[str, float] = {},
    change: np.ndarray | None = None,
    seen: Signals | None = None,
    start: int = 0,
    stop: int = 0,
    **config: float,
) -> Receipt:
    sidecar = Sidecar(path=SIGNALS, digest="d") if seen is not None else None
    clip = Clip(
        clip_id="a",
        recording_id="a",
        source_path="gone.mp4",
        bytes=1,
        sha256="0",
        signals=sidecar,
        start=start,
        stop=stop,
    )
    # The source is not there: a gate that opened it would fail.
    nowhere, corpus = Store(str(tmp_path / "nowhere")), Store(str(tmp_path / "corpus"))
    corpus.write(FRAMES, pack(table(np.full(715, 5.0) if change is None else change)))
    if seen is not None:
        corpus.write(SIGNALS, pack_signals(seen))
    frames = Artefact(name=FRAMES, path=FRAMES, bytes=0, sha256="")
    ingest = Receipt(
        clip_id="a",
        stage="ingest",
        config="",
        inputs="",
        status=Status.OK,
        facts=GOOD | dict(facts),
        outputs=(frames,),
        content="c",
    )
    return run_unit(Gates(GatesConfig(**config)), Unit(clip, "p", nowhere, corpus, {"ingest": ingest}))


def test_a_good_clip_passes(tmp_path):
    receipt = gates(tmp_path, {})
    assert receipt.status is Status.OK and receipt.reasons == ()
    assert receipt.facts == {
        "frozen_share": round(29 / 715, 6),
        "effective_fps": 35.0,
        "static_share": 0.0,
    }


@pytest.mark.parametrize(
    "facts, config, line",
    [
        ({"frames": 149}, {}, "too_short: 149 frames, 20.43 s; 150 frames and 0 s are the least"),
        ({}, {"min_seconds": 30}, "too_short: 715 frames, 20.43 s; 150 frames and 30 s are the least"),
        ({"bad_frames": 3, "windows_damaged": 2}, {}, "decode_damage: 3 bad frames, 2 of 6 windows touched"),
        ({"missing_packets": 9}, {}, "decode_damage: 9 bad frames, 0 of 6 windows touched"),
        ({"fps": 15.0}, {}, "below_grid_rate: 15.000 fps; 16 is the least"),
        (
            {"picture_step": 3},
            {},
            "below_grid_rate: 35.000 fps, every picture shown 3 times; 16 is the least",
        ),
        ({"longest_frozen": 300}, {}, "frozen: one picture for 300 of 715 frames, 40% is the most"),
    ],
)
def test_each_threshold_names_the_fact(tmp_path, facts, config, line):
    receipt = gates(tmp_path, facts, **config)
    assert receipt.status is Status.REJECTED and receipt.reasons == (line,)


@pytest.mark.parametrize(
    "facts", [{"frames": 150, "longest_frozen": 60}, {"fps": 16.0}, {"fps": 32.0, "picture_step": 2}]
)
def test_a_fact_at_its_threshold_passes(tmp_path, facts):
    assert gates(tmp_path, facts).status is Status.OK


def test_all_reasons_are_kept_in_order(tmp_path):
    receipt = gates(tmp_path, {"frames": 100, "bad_frames": 1, "fps": 10.0, "longest_frozen": 100})
    assert [r.split(":")[0] for r in receipt.reasons] == [
        "too_short",
        "decode_damage",
        "below_grid_rate",
        "frozen",
    ]


def test_one_frame_is_too_short_and_not_frozen(tmp_path):
    receipt = gates(tmp_path, {"frames": 1, "longest_frozen": 1}, np.zeros(1))
    assert [r.split(":")[0] for r in receipt.reasons] == ["too_short"]


def test_a_tolerated_number_of_bad_frames_passes(tmp_path):
    assert gates(tmp_path, {"bad_frames": 3}, max_bad_frames=3).status is Status.OK


def test_a_clip_in_which_next_to_nothing_changes_is_static(tmp_path):
    change = np.full(700, 0.1)  # a screen that flickers: no picture is held
    change[:105] = 5.0
    receipt = gates(tmp_path, change=change)
    assert receipt.reasons == ("static: nothing changes in 85% of the seconds, 75% is the most",)
    change[105:210] = 5.0
    assert gates(tmp_path, change=change).status is Status.OK


def test_the_length_gate_off_lets_a_short_clip_through(tmp_path):
    """Even one in which a player stands still: nobody is static within a second and a half."""
    short = {"frames": 53, "duration_s": 53 / 35, "longest_frozen": 1}
    assert gates(tmp_path, short, np.full(53, 0.2), min_frames=1).status is Status.OK


# --- signals of the recording -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "marked, line",
    [
        (
            {"cut": np.isin(np.arange(700), [200, 450])},
            "cut_inside: 2 hard cuts, before frames 200, 450",
        ),
        ({"menu": np.arange(700) < 140}, "menu: a menu is open in 20% of the frames, 10% is the most"),
        (
            {"covered": np.full(700, 0.8, np.float32)},
            "covered: overlays cover 80% of the picture, 50% is the most",
        ),
    ],
)
def test_signals_speak_for_their_own_reason(tmp_path, marked, line):
    receipt = gates(tmp_path, seen=signals(700, **marked))
    assert receipt.reasons == (line,)


def test_play_passes_and_the_shares_are_facts(tmp_path):
    receipt = gates(tmp_path, seen=signals(700, menu=np.arange(700) < 7))
    assert receipt.status is Status.OK
    assert {k: receipt.facts[k] for k in ("cuts", "menu_share", "covered")} == {
        "cuts": 0,
        "menu_share": 0.01,
        "covered": 0.0,
    }


def test_only_the_signals_of_the_clips_own_frames_count(tmp_path):
    """A recording with a menu and cuts around the clip, which begins at a cut."""
    frame = np.arange(2000)
    seen = signals(2000, menu=frame < 500, cut=np.isin(frame, [500, 1215]))
    assert gates(tmp_path, seen=seen, start=500, stop=1215).status is Status.OK
    assert gates(tmp_path, seen=seen, start=499, stop=1216).reasons == (
        "cut_inside: 2 hard cuts, before frames 1, 716",
    )


def test_without_signals_their_gates_do_not_speak(tmp_path):
    assert not {"cuts", "menu_share", "covered"} & gates(tmp_path).facts.keys()


# --- real footage -----------------------------------------------------------------------------------------


def judged(tmp_path: Path, name: str) -> Receipt:
    """A clip of the pack through ingest, the signals of its recording, and the gates."""
    path = FOOTAGE / name
    corpus = Store(str(tmp_path / "corpus"))
    corpus.write(SIGNALS, pack_signals(watch(path)))
    clip = Clip(
        clip_id="a",
        recording_id="a",
        source_path=name,
        bytes=path.stat().st_size,
        sha256=sha256_file(path),
        signals=Sidecar(path=SIGNALS, digest="d"),
    )
    unit = Unit(clip, "p", Store(str(FOOTAGE)), corpus)
    ingest = run_unit(Ingest(IngestConfig()), unit)
    return run_unit(Gates(GatesConfig()), Unit(clip, "p", unit.source, corpus, {"ingest": ingest}))


def test_the_menu_clip_is_refused_and_names_the_menu(footage, tmp_path):
    reasons = [r.split(":")[0] for r in judged(tmp_path, "bad04_menu.mp4").reasons]
    assert reasons == ["menu", "covered", "frozen", "static"]


def test_a_frozen_run_of_a_quarter_is_told_and_not_refused(footage, tmp_path):
    receipt = judged(tmp_path, "bad05_frozen_140_245.mp4")
    assert receipt.status is Status.OK
    assert receipt.facts["frozen_share"] == round(106 / 420, 6)


def test_navigation_passes(footage, tmp_path):
    assert judged(tmp_path, "nav05_keys_deathmatch.mp4").status is Status.OK


@pytest.mark.parametrize("name", ["nav12_miniworld_fourrooms", "event03_kill_zombieman"])
def test_a_player_who_waits_is_not_static(footage, name):
    probe = Probe()
    decoded = frame_pass(FOOTAGE / f"{name}.mp4", [probe])
    frames = FrameTable(
        time_base=decoded.report.stream.time_base,
        pts=decoded.pts - decoded.pts[0],
        source_index=np.arange(len(decoded)),
        pixels=decoded.pixels,
        ok=decoded.ok,
        repeat=decoded.repeat,
    )
    assert static_share(probe.table(decoded, frames)) < 0.6
