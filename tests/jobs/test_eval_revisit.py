"""Revisit: pairing to the pixel, the ceiling, and worlds whose memory is known."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
from torchmetrics.functional.image.lpips import _LPIPS

from jobs.evaluate import revisit
from jobs.evaluate.actions import mirrored, random_rows, there_and_back
from jobs.evaluate.loops import (
    FEWEST,
    Pairs,
    RecordedLoop,
    Recording,
    grid_frames,
    recorded_loops,
    same_views,
)
from jobs.evaluate.measures import Lpips, Met3r, Psnr, Ssim, check, plain
from jobs.evaluate.page import write
from jobs.evaluate.report import Report
from jobs.evaluate.revisit import ALL, CEILING, FAR, PLAYED, Protocol, compared
from jobs.evaluate.stats import interval, paired
from jobs.evaluate.world import Case, EvaluationError, World, whole
from pipeline.corpus import open_corpus
from pipeline.pose.given import Given
from pipeline.shards.write import write_root
from schemas.action import FORWARD, LATERAL, PERSPECTIVE, PITCH, YAW
from schemas.clip import Perspective
from schemas.sample import Annotation
from tests.jobs.oracles import (
    Corrupted,
    Deaf,
    Frozen,
    Memory,
    Noise,
    Panorama,
    Picture,
    starts,
    texture,
)
from tests.pipeline.shards_corpus import CONFIG, PARTITION, put, sample
from trainer.config import Geometry

SIZE = Geometry(64, 128)
TEN = Protocol(ten=6, thirty=0, films=0)
OUT = "10 s out"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def quiet(what: str, done: int, of: int) -> None:
    pass


def measured(world: World, folder: Path, protocol: Protocol = TEN) -> Report:
    return revisit.run(world, starts(protocol.ten), protocol, plain(), [], folder, quiet)


def of_cases(report: Report, score: str) -> list[float]:
    return [case[score] for case in report.cases]


# --- protocol ---------------------------------------------------------------------------------------------


def test_the_way_back_undoes_every_row_and_nothing_jumps() -> None:
    for latents in (40, 120):
        out = random_rows(latents, Perspective.FIRST, 3.0, 1.0, 5, "way")
        rows = there_and_back(out)
        assert len(rows) == 2 * latents and not rows[0, :PERSPECTIVE].any()
        back = rows[latents : 2 * latents - 1]
        moving = [PITCH, YAW, FORWARD, LATERAL]
        np.testing.assert_array_equal(back[:, moving], -out[:0:-1, moving])
        assert (rows[:, PERSPECTIVE] == 1).all() and not rows[:, -1].any()
        assert not rows[2 * latents - 1 :, :PERSPECTIVE].any()  # padding stands still
        for axis, values in ((YAW, {-3, 0, 3}), (PITCH, {-1, 0, 1}), (FORWARD, {-1, 0, 1})):
            assert set(out[:, axis]) <= values
        assert len({tuple(r) for r in out}) > 3
        again = random_rows(latents, Perspective.FIRST, 3.0, 1.0, 5, "way")
        other = random_rows(latents, Perspective.FIRST, 3.0, 1.0, 6, "way")
        assert np.array_equal(out, again) and not np.array_equal(out, other)


def test_the_bench_has_50_and_150_trajectories_and_starts_take_turns() -> None:
    planned = Protocol().trajectories(starts(3))
    assert [len(t.case.rows) for t in planned] == [80] * 50 + [240] * 150
    assert [t.start for t in planned[:4]] == ["start0", "start1", "start2", "start0"]
    assert len({t.case.rows.tobytes() for t in planned}) == 200
    assert Protocol().latents == 240 and Protocol.of(8, 3.0, 3.0, 0, 0).ten == 2


def test_paired_frames_of_an_invertible_world_are_equal_to_the_pixel() -> None:
    for one in Protocol(ten=3, thirty=1).trajectories(starts(4)):
        frames = whole(Panorama().play(one.case, 0))
        assert len(frames) == 4 * len(one.case.rows) - 3
        pairs = one.pairs
        turn = 4 * (len(one.case.rows) // 2 - 1)
        assert sorted(pairs.first) == list(range(turn)) and (pairs.first + pairs.later == 2 * turn).all()
        np.testing.assert_array_equal(frames[pairs.first], frames[pairs.later])
        # One frame beside, they differ wherever the camera moves.
        beside = (frames[pairs.first] != frames[pairs.later + 1]).reshape(turn, -1).any(axis=1)
        assert beside.mean() > 0.8


def test_pairs_two_seconds_apart_are_reported_apart(tmp_path: Path) -> None:
    first, later = mirrored(40)
    gaps = (later - first) / 16
    assert gaps.min() == 0.125 and gaps.max() == 2 * 156 / 16

    class Counting:
        name, better, every = "gap", "lower", 1

        def of(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
            return np.abs(left[:, 0, 0, 0].astype(float) - right[:, 0, 0, 0])

    # Frame k shows the number k: the measure of a pair is its distance in frames.
    frames = np.tile(np.arange(157 * 2, dtype=np.int64)[:, None, None, None], (1, 2, 2, 3))
    scores = compared(iter([frames]), Pairs(first, later), [Counting()])  # type: ignore[list-item]
    np.testing.assert_array_equal(scores["gap"] / 16, gaps)
    trajectory = replace(TEN, ten=1).trajectories(starts(1))[0]
    one = revisit.Scored(trajectory, scores)
    assert one.mean("gap", False) == 157 and one.mean("gap", True) == np.mean(gaps[gaps >= 2] * 16)
    with pytest.raises(ValueError, match="last pair needs"):
        compared(iter([frames[:200]]), Pairs(first, later), [Counting()])  # type: ignore[list-item]


# --- recorded loops ---------------------------------------------------------------------------------------


def truth_poses(footage: Path, clip: str) -> tuple[np.ndarray, np.ndarray]:
    """Camera-to-world [F, 3, 3] and place [F, 3] by the game."""
    t = pd.read_csv(footage / f"{clip}.truth.csv")
    yaw, up = np.radians(t["CAMERA_ANGLE"].to_numpy()), np.radians(-t["CAMERA_PITCH"].to_numpy())
    ahead = np.stack([np.cos(yaw) * np.cos(up), np.sin(yaw) * np.cos(up), np.sin(up)], 1)
    right = np.stack([np.sin(yaw), -np.cos(yaw), 0 * yaw], 1)
    place = t[[f"CAMERA_POSITION_{axis}" for axis in "XYZ"]].to_numpy(np.float64)
    return np.stack([right, np.cross(ahead, right), ahead], 2), place


def test_a_recording_scores_the_ceiling_exactly_and_its_loop_is_found_by_poses(
    footage: Path, tmp_path: Path
) -> None:
    clip = "loop04_rewind_map06"
    rotation, place = truth_poses(footage, clip)
    made = sample("loop04", footage / f"{clip}.mp4", 0)
    poses = np.concatenate([rotation, place[:, :, None]], axis=2).astype(np.float32)
    note = json.loads(made.members["json"]) | {"pose_estimator": Given.name}  # type: ignore[arg-type]
    sink = io.BytesIO()
    np.save(sink, poses)
    said = Annotation.model_validate(note).model_dump_json().encode()
    members = made.members | {"json": said, "poses.npy": sink.getvalue()}
    corpus = open_corpus(str(tmp_path / "corpus"), create=True)
    put(corpus, PARTITION, [replace(made, members=members)], CONFIG)
    write_root(corpus)

    (loop,) = recorded_loops(str(tmp_path / "corpus"), SIZE, 5)
    assert loop.frames.shape == (len(loop.case.rows) * 4 - 3, 64, 128, 3)
    about = json.loads((footage / f"{clip}.truth.json").read_text())["loop"]
    turn = about["return_start"] * 16 / 30
    assert len(loop.pairs) > 50 and (loop.pairs.first < turn).all() and (loop.pairs.later > turn).all()
    assert (loop.pairs.later - loop.pairs.first >= 32).all()

    report = revisit.run(
        Recording((loop,)), starts(1), Protocol(0, 0), plain(), [loop], tmp_path / "out", quiet
    )
    for measure in ("psnr", "ssim"):
        for pairs in (ALL, FAR):
            ceiling, world = (report.value(f"{p}, {pairs}", measure) for p in (CEILING, PLAYED))
            assert ceiling.mean == world.mean
    # A game's own return is far from equal, and far better than another place of the same game.
    ceiling = report.value(f"{CEILING}, {ALL}", "psnr").mean
    elsewhere = Pairs(np.roll(loop.pairs.first, 40), loop.pairs.later)
    order = np.argsort(elsewhere.later)
    scores = compared(iter([loop.frames]), Pairs(elsewhere.first[order], elsewhere.later[order]), [Psnr()])
    assert scores["psnr"].mean() + 3 < ceiling < 50


def test_a_camera_that_stands_still_or_never_returns_has_no_pairs(footage: Path) -> None:
    still = np.tile(np.eye(3), (100, 1, 1)), np.zeros((100, 3))
    assert len(same_views(*still)) == 0
    rotation, place = truth_poses(footage, "nonloop01_oneway_drop_e1m1")
    assert len(same_views(rotation[::2], place[::2])) < FEWEST


def test_a_corpus_without_a_loop_says_how_many_clips_and_why(footage: Path, tmp_path: Path) -> None:
    made = sample("oneway", footage / "nonloop01_oneway_drop_e1m1.mp4", 0)
    corpus = open_corpus(str(tmp_path / "corpus"), create=True)
    put(corpus, PARTITION, [made], CONFIG)
    write_root(corpus)
    with pytest.raises(EvaluationError, match="none of 1 clips is a loop: 1 without poses of the game"):
        recorded_loops(str(tmp_path / "corpus"), SIZE, 5)


def test_the_pair_that_is_furthest_apart_is_in_the_last_bin() -> None:
    (one,) = TEN.trajectories(starts(1))[:1]
    pairs = Pairs(np.array([0, 0]), np.array([32, 64]))  # 2 and 4 seconds apart
    found = revisit.Scored(replace(one, pairs=pairs), {"psnr": np.array([10.0, 30.0])})
    assert revisit._by_gap("part", [found], "psnr").y[-1].mean == 20.0


@pytest.mark.parametrize("size", [(64, 128), (8, 8)])
def test_a_measure_is_tried_on_the_size_before_anything_is_played(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    save_features(torchvision.models.alexnet, tmp_path / "alex.pt")
    measures = [*plain(), Lpips(tmp_path / "alex.pt")]
    if min(size) >= 63:
        check(measures, *size)
        return
    with pytest.raises(EvaluationError, match="8x8"):
        check(measures, *size)


# --- worlds whose memory is known -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("controls")
    worlds: list[World] = [Panorama(m) for m in Memory]
    worlds += [Deaf(Panorama()), Frozen(), Noise()]
    return {world.name: measured(world, folder) for world in worlds}


@pytest.mark.parametrize("memory", [Memory.SWAPPED, Memory.ZEROED])
@pytest.mark.parametrize("score", ["psnr", "ssim", "psnr_far", "ssim_far"])
def test_swapped_and_zeroed_memory_score_worse_with_an_interval_clear_of_zero(
    controls: dict[str, Report], memory: Memory, score: str
) -> None:
    own, other = controls[Panorama().name], controls[Panorama(memory).name]
    names = [case["start"] for case in own.cases]
    worse = paired(of_cases(own, score), of_cases(other, score), names)
    assert worse.low > 0 and worse.clear_of(0.0)


def test_noise_scores_below_every_other_control(controls: dict[str, Report]) -> None:
    for score in ("psnr", "ssim"):
        means = {name: np.mean(of_cases(report, score)) for name, report in controls.items()}
        noise = means.pop("noise")
        assert all(noise < other for other in means.values()), means


def noisy(sigma: float) -> Callable[[Picture, int, np.random.Generator], Picture]:
    def change(rgb: Picture, frame: int, draw: np.random.Generator) -> Picture:
        return np.clip(rgb + sigma * draw.standard_normal(rgb.shape), 0, 255).astype(np.uint8)

    return change


def test_psnr_ssim_and_lpips_are_strictly_monotone_over_five_grades(tmp_path: Path) -> None:
    torch.manual_seed(3)
    save_features(torchvision.models.vgg16, tmp_path / "vgg.pth")
    measures = [*plain(), replace_every(Lpips(tmp_path / "vgg.pth"), 39)]
    one = replace(TEN, ten=2)
    means = []
    for sigma in (0, 6, 16, 40, 100):
        world = Corrupted(Panorama(), noisy(sigma))
        report = revisit.run(world, starts(2), one, measures, [], tmp_path, quiet)
        means.append([report.value(f"{OUT}, {ALL}", m.name).mean for m in measures])
    for worse, better in pairwise(reversed(means)):
        assert worse[0] < better[0] and worse[1] < better[1] and worse[2] > better[2]


def save_features(make: Callable[..., torch.nn.Module], path: Path) -> None:
    """Random weights of the layers that are used; the others are ten times as many."""
    with torch.device("meta"):
        features = make(weights=None).features
    features = features.to_empty(device="cpu")  # type: ignore[operator]
    for layer in features:
        if isinstance(layer, torch.nn.Conv2d):
            layer.reset_parameters()
    torch.save(prefixed(features), path)


def prefixed(features: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"features.{name}": value for name, value in features.state_dict().items()}


def replace_every(measure: Lpips, every: int) -> Lpips:
    measure.every = every
    return measure


# --- measures ---------------------------------------------------------------------------------------------


def test_psnr_is_of_the_mean_square_and_never_infinite() -> None:
    a = np.zeros((2, 16, 16, 3), np.uint8)
    b = a.copy()
    b[1] += 51  # a fifth of the range: 20 log10(5)
    np.testing.assert_allclose(Psnr().of(a, b), [60.0, 13.979], atol=1e-3)
    assert Ssim().of(a, a).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["alex", "vgg"])
def test_lpips_is_that_of_the_reference_on_the_same_weights(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    theirs = _LPIPS(net=kind, pnet_rand=True)
    make = torchvision.models.alexnet if kind == "alex" else torchvision.models.vgg16
    with torch.device("meta"):
        backbone = make(weights=None).features
    backbone = backbone.to_empty(device="cpu")
    slices = [getattr(theirs.net, f"slice{k}") for k in range(1, 6)]
    convolutions = [layer for part in slices for layer in part if isinstance(layer, torch.nn.Conv2d)]
    ours = [layer for layer in backbone if isinstance(layer, torch.nn.Conv2d)]
    for mine, other in zip(ours, convolutions, strict=True):
        mine.load_state_dict(other.state_dict())
    torch.save(prefixed(backbone), tmp_path / "backbone.pth")
    pictures = np.stack([texture(64, 96, f"{k}") for k in range(4)])
    found = Lpips(tmp_path / "backbone.pth").of(pictures[:2], pictures[2:])
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
    wanted = theirs(pixels[:2], pixels[2:], normalize=True).flatten().detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert found.min() > 0
    np.testing.assert_array_equal(Lpips(tmp_path / "backbone.pth").of(pictures, pictures), 0)


def test_wrong_weights_are_named_in_one_line(tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("no weights")
    for name in ("other.pth", "text.pth"):
        with pytest.raises(EvaluationError, match=name) as caught:
            Lpips(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(EvaluationError, match="give the Python"):
        Met3r(tmp_path / "nowhere")


STAND_IN = """
import torch
class MEt3R(torch.nn.Module):
    def __init__(self, **given):
        super().__init__()
        assert given["img_size"] == 256
    def forward(self, images, **given):
        assert images.shape == (1, 2, 3, 256, 256) and images.min() >= -1 and images.max() <= 1
        return ((images[:, 0] - images[:, 1]).abs().mean(dim=(1, 2, 3)),)
"""


def test_met3r_runs_in_its_own_process_and_its_failure_is_one_line(tmp_path: Path) -> None:
    """The package is stood in for: what is held here is the way there and back."""
    (tmp_path / "met3r.py").write_text(STAND_IN)
    metric = Met3r(Path(sys.executable), environment={"PYTHONPATH": str(tmp_path)})
    a = np.zeros((3, 64, 128, 3), np.uint8)
    b = a.copy()
    b[1], b[2] = 51, 255
    np.testing.assert_allclose(metric.of(a, b), [0.0, 0.4, 2.0], atol=1e-6)
    np.testing.assert_allclose(metric.of(a[:1], b[2:]), [2.0], atol=1e-6)
    metric.close()
    absent = Met3r(Path(sys.executable), environment={"PYTHONPATH": ""})
    with pytest.raises(EvaluationError, match="No module named 'met3r'"):
        absent.of(a, b)


# --- statistics and page ----------------------------------------------------------------------------------


def test_intervals_draw_starts_and_know_when_they_know_nothing() -> None:
    values = np.array([1.0, 2.0, 3.0, np.nan, 5.0])
    found = interval(values, ["a", "b", "c", "d", "e"])
    assert found.mean == 2.75 and found.n == 4 and found.groups == 4
    assert found.low < 2.75 < found.high and found == interval(values, ["a", "b", "c", "d", "e"])
    # The same number from a hundred cases of two starts is known no better than two starts are.
    draw = np.random.default_rng(0)
    offsets = np.repeat([0.0, 1.0], 50)
    noisy_values = offsets + 0.01 * draw.standard_normal(100)
    tied = interval(noisy_values, ["a"] * 50 + ["b"] * 50)
    assert tied.high - tied.low > 0.9
    assert not interval([1.0, 2.0], ["a", "a"]).clear_of(0.0)
    assert interval([np.nan], ["a"]).row()["mean"] is None
    # Pairs cancel what cases share.
    hard = draw.normal(0, 10, 30)
    names = [str(k) for k in range(30)]
    difference = paired(hard + 1, hard + 0.1 * draw.standard_normal(30), names)
    assert difference.low > 0.9 and difference.high < 1.1
    assert not interval(hard + 1, names).clear_of(float(hard.mean()))


def test_a_report_is_one_page_and_its_numbers(tmp_path: Path) -> None:
    report = measured(Panorama(Memory.ZEROED), tmp_path, replace(TEN, ten=2, films=1))
    page = write(report, tmp_path).read_text()
    assert page.count("<svg") == 2 and page.count("data:video/mp4;base64,") == 1
    assert "://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    row = next(n for n in numbers["numbers"] if n["measure"] == "psnr" and n["part"] == f"{OUT}, {ALL}")
    assert row["mean"] == report.value(f"{OUT}, {ALL}", "psnr").mean and row["n"] == 2
    assert len(numbers["cases"]) == 2 and numbers["settings"]["trajectories_10s"] == 2
    film = tmp_path / numbers["films"][0]["file"]
    first = grid_frames(film, np.arange(156), SIZE)
    assert first.shape == (156, 64, 128, 3)


def test_a_case_whose_parts_do_not_fit_is_refused() -> None:
    image, rows = texture(32, 48, "x"), np.zeros((8, 6), np.float32)
    Case("fits", image, Perspective.FIRST, rows, ("a", "b"))
    with pytest.raises(ValueError, match="a prompt each"):
        Case("short", image, Perspective.FIRST, rows, ("a",))
    moving = rows.copy()
    moving[0, YAW] = 3
    with pytest.raises(ValueError, match="row 0 moves"):
        Case("moving", image, Perspective.FIRST, moving, ("a", "b"))


def test_a_loop_of_a_recording_is_played_back_as_it_was() -> None:
    one = replace(TEN, ten=1).trajectories(starts(1))[0]
    frames = whole(Panorama().play(one.case, 0))
    loop = RecordedLoop(one.case, frames, one.pairs)
    chunks = list(Recording((loop,)).play(one.case, 0))
    assert [len(c) for c in chunks[:3]] == [13, 16, 16]
    np.testing.assert_array_equal(np.concatenate(chunks), frames)
