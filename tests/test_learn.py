"""The probe world of the learning benchmark: a revisit is exact, and it is known what was seen before."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learn.footage import episode
from benchmarks.learn.loops import find
from benchmarks.learn.world import TURN, Panorama, turns
from schemas.action import YAW
from schemas.latents import FittedCodec
from schemas.timeline import FRAMES_PER_LATENT
from trainer.weights.checkpoint import open_checkpoint

CHUNK = 4
WEIGHTS = Path(__file__).parents[1] / "benchmarks/learn/weights"


def test_the_same_heading_is_the_same_picture_bit_for_bit_and_no_other_world_has_it() -> None:
    one, other = (Panorama.random(np.random.default_rng(seed)) for seed in (1, 2))
    for heading in (0.0, 33.75, -101.25):
        there = one.picture(heading, 0, 0)
        for around in (360.0, -720.0):
            assert np.array_equal(one.picture(heading + around, 0, 0), there)
        assert not np.array_equal(one.picture(heading + TURN, 0, 0), there)
        assert not np.array_equal(other.picture(heading, 0, 0), there)
    # A latent of turning shifts the picture by 32 columns.
    assert np.array_equal(one.picture(TURN, 0, 0)[:, :-32], one.picture(0.0, 0, 0)[:, 32:])


def test_keys_last_pairs_of_latents_and_lead_to_the_poses() -> None:
    for index in range(12):
        made, picture = episode(index, seed=3, latents=48)
        keys = made.keys[:: 2 * FRAMES_PER_LATENT]
        assert len(made.poses) == len(made.keys) + 1 == FRAMES_PER_LATENT * 47 + 1
        if made.game == "probe_panorama":
            held = np.array(made.keys[FRAMES_PER_LATENT:]).reshape(-1, 2 * FRAMES_PER_LATENT, 2)
            assert (held == held[:, :1]).all() and len(keys)
            headings = np.array(made.poses)[:, 0]
            assert np.array_equal(np.diff(headings) * FRAMES_PER_LATENT, TURN * np.array(made.keys)[:, 0])
        assert picture(0).shape == (128, 256, 3)


def test_half_of_what_panoramas_hide_was_seen_before() -> None:
    rows = {}
    for index in range(60):
        keys = turns(np.random.default_rng(index), 48)
        rows[index] = np.zeros((48, 6), np.float32)
        rows[index][1:, YAW] = [TURN * turn for turn, _ in keys]
    back, new = find(rows, range(3, 12), CHUNK)
    assert len(back) >= 50 and len(new) >= 45


def test_a_way_out_and_back_is_found_and_what_it_never_saw_is_the_placebo() -> None:
    """16 latents to the right, then 16 back: chunk 4 sees the way again, chunk 3 sees what is new."""
    yaw = np.concatenate([[0], np.full(15, TURN), np.full(16, -TURN)])
    rows = np.zeros((32, 6), np.float32)
    rows[:, YAW] = yaw
    back, new = find({7: rows}, range(3, 8), CHUNK)
    ((place,), (other,)) = back, new
    assert (place.clip, place.history) == (7, 4) and (other.clip, other.history) == (7, 3)
    # Turning left by one column of 16 * 11.25 / 90 a latent: so many are hidden at the left edge, more each.
    assert place.hidden.sum(axis=1).tolist() == [2, 4, 6, 8]
    assert place.hidden[:, :2].all() and not place.hidden[:, 8:].any()
    assert other.hidden.sum(axis=1).tolist() == [2, 4, 6, 8] and not other.hidden[:, :8].any()
    still = np.zeros((32, 6), np.float32)
    assert find({7: still}, range(3, 8), CHUNK) == ([], [])


@pytest.mark.parametrize("world", sorted(p.name for p in WEIGHTS.iterdir()))
def test_the_weights_in_the_tree_are_whole_and_of_a_corpus_s_codec(world: str) -> None:
    folder = WEIGHTS / world
    sums = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"SHA256SUMS"}
    assert set(sums) == files and sum((folder / name).stat().st_size for name in files) < 10e6
    assert {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in files} == sums
    opened = open_checkpoint(folder)
    assert opened.preset.name == "small" and {e.name for e in opened.experts} == {"high", "low"}
    codec = FittedCodec.model_validate_json((folder / "codec.json").read_bytes())
    assert (codec.height, codec.width) == (64, 128)
