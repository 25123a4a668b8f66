"""What is painted over the world is found, flagged, and left out of every axis."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from drawn import HEIGHT, WIDTH, Image, blur, flat_shapes, foliage, looked, pan

from pipeline.frames import frame_pass
from pipeline.quality.axes import AXES, score
from pipeline.quality.looks import Look, Looks
from pipeline.quality.overlay import Crop

FRAMES = 300


def look(path: Path) -> Looks:
    observer = Look()
    frame_pass(path, [observer])
    return observer.looks()


def status(view: Image, k: int) -> Image:
    """Opaque white text at the bottom, as a HUD has it."""
    shown = view.copy()
    for line in range(4):
        at = (12, HEIGHT - 56 + 15 * line)
        cv2.putText(shown, "HEALTH 100  AMMO 50  SCORE 12345", at, 0, 0.5, (255, 255, 255), 1, cv2.LINE_AA)
    return shown


def logo(view: Image, k: int) -> Image:
    """A corner logo of 30 % white."""
    ink = np.zeros(view.shape, np.uint8)
    cv2.putText(ink, "LOGO", (WIDTH - 120, 45), 0, 1.1, (255, 255, 255), 3, cv2.LINE_AA)
    return np.asarray(view + 0.3 * (ink / 255) * (255.0 - view), np.uint8)


def test_the_status_bar_of_a_real_game_is_flagged_and_play_without_one_is_not(footage: Path) -> None:
    """32 of 200 rows are the bar. The weapon in hand bobs and counts as world."""
    bar = look(footage / "bad03_hud.mp4").flags
    assert bar.known and 0.14 < bar.hud_share < 0.22 and bar.text_share > 0.1 and not bar.watermark
    for name in ("nav05_keys_deathmatch", "nav06_keys_map05", "loop01_rewind_map02"):
        flags = look(footage / f"{name}.mp4").flags
        assert flags.known and flags.hud_share < 0.01 and not flags.watermark, (name, flags)


@pytest.mark.parametrize("name", ["event07_fight_defend_center", "tc_nasa_13013", "bad04_menu"])
def test_nothing_is_claimed_where_the_world_stands_still(footage: Path, name: str) -> None:
    """A turn on the spot in a bare arena, a camera on a tripod, a menu over a stopped game. A sky as dark
    as a bar is no bar."""
    looks = look(footage / f"{name}.mp4")
    assert not looks.flags.known and looks.flags.hud_share == 0 and looks.crop == Crop()


def test_hud_text_does_not_sharpen_a_blurred_world() -> None:
    world = blur(foliage(), 3)
    bare, painted = looked(pan(world, FRAMES)), looked(pan(world, FRAMES), status)
    assert not bare.flags.hud_share and 0.05 < painted.flags.hud_share < 0.15
    assert painted.flags.text_share == pytest.approx(painted.flags.hud_share, abs=0.03)
    assert not painted.flags.watermark
    without, under = score(bare, 0, FRAMES), score(painted, 0, FRAMES)
    assert under.sharpness < 0.05
    for axis in AXES:
        assert getattr(under, axis) == pytest.approx(getattr(without, axis), abs=0.03), axis


def test_a_mark_that_the_world_is_seen_through_is_a_watermark() -> None:
    painted = looked(pan(foliage(), FRAMES), logo)
    assert painted.flags.watermark and 0.01 < painted.flags.hud_share < 0.04


def test_bars_are_found_on_every_side_and_ringing_in_them_is_no_picture() -> None:
    def boxed(view: Image, k: int) -> Image:
        shown = view.copy()
        shown[:40], shown[-20:], shown[:, :80], shown[:, -64:] = 0, 0, 0, 0
        shown[39, k % 500 : k % 500 + 8] = 60
        return shown

    looks = looked(pan(flat_shapes(), 40), boxed)
    assert looks.crop == Crop(top=40, bottom=20, left=80, right=64)


def test_a_black_clip_has_no_bars() -> None:
    assert looked(iter([np.zeros((HEIGHT, WIDTH, 3), np.uint8)] * 20)).crop == Crop()
