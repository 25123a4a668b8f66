"""Gates: ordered reasons from ingest's facts, without another decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.gates import Gates, GatesConfig
from pipeline.stage import Receipt, Unit, run_unit
from pipeline.store import Store
from schemas.clip import Clip
from schemas.quality import Status

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


def gates(tmp_path: Path, facts: dict[str, float], **config: float) -> Receipt:
    clip = Clip(clip_id="a", recording_id="a", source_path="gone.mp4", bytes=1, sha256="0")
    ingest = Receipt(
        clip_id="a", stage="ingest", config="", inputs="", status=Status.OK, facts=GOOD | facts, content="c"
    )
    # Neither the source nor the corpus holds a file: a gate that opened one would fail.
    nowhere = Store(str(tmp_path / "nowhere"))
    return run_unit(Gates(GatesConfig(**config)), Unit(clip, "p", nowhere, nowhere, {"ingest": ingest}))


def test_a_good_clip_passes(tmp_path):
    receipt = gates(tmp_path, {})
    assert receipt.status is Status.OK and receipt.reasons == ()
    assert receipt.facts == {"frozen_share": round(29 / 715, 6), "effective_fps": 35.0}


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
    receipt = gates(tmp_path, {"frames": 1, "longest_frozen": 1})
    assert [r.split(":")[0] for r in receipt.reasons] == ["too_short"]


def test_a_tolerated_number_of_bad_frames_passes(tmp_path):
    assert gates(tmp_path, {"bad_frames": 3}, max_bad_frames=3).status is Status.OK
