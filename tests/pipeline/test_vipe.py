"""ViPE as a program beside the pipeline: its layout, its joins against the truth, and its ways to go wrong.

The program here is `standin_vipe.py`, which tells a window by its pictures. Source: spec/formats.md 1.4.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from pydantic import ValidationError
from recordings import DOOM_POSES, MINIWORLD_POSES
from standin_vipe import pictures, save

from pipeline.frames import frame_pass
from pipeline.media import FRAMES, MediaTable, pack
from pipeline.pose.given import read_track
from pipeline.pose.stage import Pose, PoseConfig, read_poses
from pipeline.pose.vipe_output import BadOutput, Layout, read_focal
from pipeline.pose.vipe_output import read_poses as read_output
from pipeline.pose.windows import read_windows
from pipeline.sources import SourceConfig
from pipeline.sources.keymap import PosePart
from pipeline.stage import Artefact, Receipt, Unit, config_digest, run_unit
from pipeline.store import Store
from schemas.camera import Cameras
from schemas.clip import Clip, FrameTable
from schemas.pose import PoseTrack, turn_between
from schemas.quality import Status

# Travels in every overlap of 40 frames, 19 steps or more: no seam is undecidable.
WHOLE = "nav05_keys_deathmatch"
CUT = "nav12_miniworld_fourrooms"
FOCAL = 240.0
STANDIN = Path(__file__).with_name("standin_vipe.py")
PROGRAM = Path(__file__).parents[2] / "environments" / "vipe_run.py"


@dataclass(frozen=True)
class Recording:
    """A video with the given pose of each of its frames, and what the stand-in is told of it."""

    video: Path
    table: FrameTable
    given: PoseTrack
    told: Path


def recording(log: Path, poses: dict[str, Any], video: Path, folder: Path) -> Recording:
    decoded = frame_pass(video)
    table = FrameTable(
        time_base=decoded.report.stream.time_base,
        pts=decoded.pts,
        source_index=np.arange(len(decoded)),
        pixels=decoded.pixels,
        ok=decoded.ok,
        repeat=decoded.repeat,
    )
    rows = log.read_text().splitlines(keepends=True)
    (folder / "run.csv").write_text("".join(rows[: len(table) + 1]))
    part = PosePart.model_validate({"file": "run.csv", **poses})
    given = read_track(Store(str(folder)), "run.csv", part, table)
    told = folder / "told.npz"
    np.savez(told, picture=pictures(video), rotation=given.rotation, translation=given.translation)
    return Recording(video, table, given, told)


@pytest.fixture(scope="module")
def whole(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("whole")
    return recording(footage / f"{WHOLE}.truth.csv", DOOM_POSES, footage / f"{WHOLE}.mp4", folder)


@pytest.fixture(scope="module")
def small(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The clip CUT at a quarter of its size: 978 frames, seven windows."""
    return cut(footage, tmp_path_factory.mktemp("small"), 978)


@pytest.fixture(scope="module")
def three(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Its first three windows."""
    return cut(footage, tmp_path_factory.mktemp("three"), 430)


@pytest.fixture(scope="module")
def one(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Its first window."""
    return cut(footage, tmp_path_factory.mktemp("one"), 150)


def cut(footage: Path, folder: Path, frames: int) -> Recording:
    with av.open(str(footage / f"{CUT}.mp4")) as source, av.open(str(folder / "cut.mp4"), "w") as out:
        stream = out.add_stream("libx264", rate=Fraction(30), options={"preset": "ultrafast", "bf": "0"})
        stream.width, stream.height, stream.pix_fmt = 160, 90, "yuv420p"
        for k, frame in zip(range(frames), source.decode(video=0)):
            little = frame.reformat(width=160, height=90)
            little.pict_type, little.pts, little.time_base = 0, k, Fraction(1, 30)
            out.mux(stream.encode(little))
        out.mux(stream.encode(None))
    return recording(footage / f"{CUT}.truth.csv", MINIWORLD_POSES, folder / "cut.mp4", folder)


@dataclass(frozen=True)
class Done:
    """What the pose stage made of a recording, and what the stand-in said of each window it was run on."""

    unit: Unit
    receipt: Receipt
    log: Path

    @property
    def track(self) -> PoseTrack:
        return read_poses(self.unit)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_windows(self.unit)["windows"]

    @property
    def seams(self) -> list[dict[str, Any]]:
        return read_windows(self.unit)["seams"]

    def said(self, window: int) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.log / f"w{window:04d}.json").read_text())
        return said


def config(**vipe: Any) -> PoseConfig:
    command = [sys.executable, str(STANDIN)]
    return PoseConfig.model_validate({"estimators": ["vipe"], "vipe": {"command": command, **vipe}})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run the pose stage on a recording. quirks: of each window; vipe: the section of the config."""

    def run(of: Recording, quirks: dict[int, list[str]] | None = None, **vipe: Any) -> Done:
        log = tmp_path / "log"
        log.mkdir(exist_ok=True)
        named = {f"w{i:04d}": names for i, names in (quirks or {}).items()}
        about = {"table": str(of.told), "focal": FOCAL, "log": str(log), "quirks": named}
        (tmp_path / "standin.json").write_text(json.dumps(about))
        monkeypatch.setenv("STANDIN_VIPE", str(tmp_path / "standin.json"))
        corpus = Store(str(tmp_path / "corpus"))
        corpus.write(FRAMES, pack(MediaTable(of.table, np.zeros(len(of.table), np.float32), {})))
        clip = Clip(
            clip_id="c0",
            recording_id="c0",
            source="folder:x",
            source_path=of.video.name,
            bytes=of.video.stat().st_size,
            sha256=hashlib.sha256(of.video.read_bytes()).hexdigest(),
        )
        frames = Artefact(name=FRAMES, path=FRAMES, bytes=0, sha256="")
        before = {
            "ingest": receipt("ingest", frames),
            "gates": receipt("gates"),
            "observe": receipt("observe"),
        }
        unit = Unit(clip, "p0", Store(str(of.video.parent)), corpus, before)
        posed = run_unit(Pose(config(**vipe), SourceConfig(), Cameras()), unit)
        return Done(Unit(clip, "p0", unit.source, corpus, {**before, "pose": posed}), posed, log)

    return run


def receipt(stage: str, *outputs: Artefact) -> Receipt:
    return Receipt(
        clip_id="c0", stage=stage, config="", inputs="", status=Status.OK, outputs=outputs, content="0"
    )


def steps(track: PoseTrack) -> np.ndarray:
    """(yaw, pitch) from each frame to the next, [F - 1, 2]."""
    frames = np.arange(len(track))
    return turn_between(track, frames[:-1], frames[1:])


def lengths(track: PoseTrack) -> np.ndarray:
    return np.linalg.norm(np.diff(track.translation, axis=0), axis=1)


def assert_turns(track: PoseTrack, of: Recording) -> None:
    """Every step between two valid frames turns as the given poses do, to the rounding of float32."""
    g = of.given
    given = PoseTrack(
        g.rotation, g.translation, g.valid, g.scale, g.estimator
    )  # ViPE knows no gravity either
    good = track.valid[:-1] & track.valid[1:]
    assert np.abs(steps(track) - steps(given))[good].max() < 1e-3


# --- a clip against its truth -----------------------------------------------------------------------------


def test_a_clip_in_windows_of_arbitrary_worlds_and_units_is_one_track(
    whole: Recording, run: Callable[..., Done]
) -> None:
    done = run(whole, overlap=40)
    assert done.receipt.status is Status.OK, done.receipt.reasons
    track = done.track
    assert track.valid.all() and track.estimator == "vipe-1"
    assert [(r["start"], r["stop"]) for r in done.rows][:2] == [(0, 150), (110, 260)]
    assert {s["verdict"] for s in done.seams} == {"joined"}
    assert_turns(track, whole)
    moves = lengths(whole.given) > 0.01  # metres
    ratio = lengths(track)[moves] / lengths(whole.given)[moves]
    assert np.ptp(ratio) / np.median(ratio) < 1e-3
    assert len({round(r["scale"], 3) for r in done.rows}) == len(done.rows)  # every window had its own unit
    assert all(s["focal_ratio"] == pytest.approx(1) for s in done.seams)


def test_the_program_is_asked_for_whole_files_without_depth_or_pictures(
    one: Recording, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    said = run(one, pipeline="dav3").said(0)
    assert said["settings"] == {
        "pipeline": "dav3",
        "streams": "raw_mp4_stream",
        "streams.base_path": "../w0000.mp4",
        "streams.frame_end": "-1",
        "pipeline.output.path": "out",
        "pipeline.output.save_artifacts": "true",
        "pipeline.output.save_viz": "false",
        "pipeline.post.depth_align_model": "null",
    }
    assert "PYTHONPATH" not in said["environment"]


def test_poses_have_the_same_bytes_again(one: Recording, run: Callable[..., Done]) -> None:
    first, second = run(one).receipt, run(one).receipt
    assert [o.sha256 for o in first.outputs] == [o.sha256 for o in second.outputs]


# --- what goes wrong in one window ------------------------------------------------------------------------


CRASH = "vipe_exit: status 1: RuntimeError: CUDA error: device-side assert triggered"
BAD = "vipe_bad_output: pose/"


@pytest.mark.parametrize(
    "bad",
    [
        {
            1: ("crash", CRASH),
            2: ("nan", f"{BAD}w0002.npz: 1 of 150 poses are not finite"),
            4: ("shape", f"{BAD}w0004.npz: data is float32 (150, 3, 4) for 150 frames"),
            5: ("beyond", f"{BAD}w0005.npz: frames 1..150 of a video of 150"),
        },
        {
            1: ("silent", "vipe_no_output: pose/w0001.npz is missing"),
            2: ("torn", f"{BAD}w0002.npz cannot be read (File is not a zip file)"),
            4: ("sheared", f"{BAD}w0004.npz: 1 of 150 poses are no camera-to-world matrices"),
            5: ("twice", f"{BAD}w0005.npz: 1 frames are named twice"),
        },
        {
            1: ("mirrored", f"{BAD}w0001.npz: 150 of 150 poses are no camera-to-world matrices"),
            2: ("no_pose", "vipe_no_output: pose/w0002.npz is missing"),
            4: ("no_pose", "vipe_no_output: pose/w0004.npz is missing"),
            5: ("crash", CRASH),
        },
    ],
)
def test_bad_windows_cost_their_own_frames_and_say_why(
    small: Recording, run: Callable[..., Done], bad: dict[int, tuple[str, str]]
) -> None:
    done = run(small, {window: [quirk] for window, (quirk, _) in bad.items()})
    assert done.receipt.status is Status.OK
    for row in done.rows:
        known = row["window"] not in bad
        assert row["valid_share"] == known and (row["world"] >= 0) == known
        assert row["reasons"] == ["no_overlap" if known else bad[row["window"]][1]]
    track = done.track
    assert np.flatnonzero(~track.valid).tolist() == [*range(150, 420), *range(570, 828)]
    assert [set(track.world[a:b]) for a, b in ((0, 150), (420, 570), (828, 978))] == [{0}, {1}, {2}]
    assert_turns(track, small)


def test_a_window_that_hangs_is_ended_with_its_children(three: Recording, run: Callable[..., Done]) -> None:
    done = run(three, {0: ["hang", "noise"]}, timeout_s=6)
    assert done.rows[0]["reasons"] == ["vipe_timeout: more than 6 s"]
    assert np.flatnonzero(~done.track.valid).tolist() == list(range(140))
    said = done.said(0)
    for pid in (said["pid"], said["child"]):
        assert ended(pid)


def ended(pid: int) -> bool:
    """A killed grandchild stays as a zombie where nobody reaps orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_noise_on_stderr_is_no_failure_and_the_reason_is_its_last_line(
    three: Recording, run: Callable[..., Done]
) -> None:
    done = run(three, {0: ["noise"], 1: ["noise", "crash"]})
    assert [bool(r["valid_share"]) for r in done.rows] == [True, False, True]
    assert done.rows[1]["reasons"][0].endswith("RuntimeError: CUDA error: device-side assert triggered")


def test_frames_that_the_program_leaves_out_stay_unknown(three: Recording, run: Callable[..., Done]) -> None:
    done = run(three, {1: ["gaps"]})
    track = done.track
    assert np.flatnonzero(~track.valid).tolist() == [160, 161, 162, 200]
    assert np.isnan(track.rotation[160]).all() and np.isnan(track.translation[200]).all()
    assert done.rows[1]["valid_share"] == pytest.approx(146 / 150)
    assert_turns(track, three)


def test_when_every_window_fails_the_clip_goes_on_without_poses(
    three: Recording, run: Callable[..., Done]
) -> None:
    done = run(three, {i: ["crash"] for i in range(3)})
    assert done.receipt.status is Status.OK and not done.track.valid.any()
    assert [r["reasons"][0].partition(":")[0] for r in done.rows] == ["vipe_exit"] * 3
    assert done.receipt.facts["valid_share"] == 0 and done.receipt.facts["scale"] == "unknown"


def test_a_zoom_shows_at_the_seam_and_no_pinhole_has_no_focal_length(
    three: Recording, run: Callable[..., Done]
) -> None:
    assert [s["focal_ratio"] for s in run(three, {1: ["zoomed"]}).seams] == pytest.approx([1.05, 1 / 1.05])
    assert [s["focal_ratio"] for s in run(three, {1: ["fisheye"]}).seams] == [None, None]


# --- the program for ViPE's environment, with a package that only looks like ViPE --------------------------

LOOKALIKE = {
    "vipe/__init__.py": """
        import json, pathlib, time
        class Pipeline:
            def run(self, video):
                pathlib.Path("ran.json.part").write_text(json.dumps([self.settings, video]))
                pathlib.Path("ran.json.part").rename("ran.json")
                time.sleep(60 if "hang" in self.settings else 0)
        def make_pipeline(settings):
            made = Pipeline()
            made.settings = settings
            return made
    """,
    "vipe/config.py": """
        import types
        def parse_typed_config(name, hydra_args):
            return types.SimpleNamespace(pipeline=hydra_args, streams=name)
    """,
    "vipe/streams/base.py": """
        class StreamList(list):
            @staticmethod
            def make(streams):
                return StreamList([f"video of {streams}"])
    """,
}


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    for name, text in LOOKALIKE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdin=subprocess.PIPE,
    )


def test_the_program_hands_its_arguments_to_vipe(tmp_path: Path) -> None:
    with start(tmp_path, "pipeline=default", "a.b=null") as process:
        assert process.wait(30) == 0
    assert json.loads((tmp_path / "ran.json").read_text()) == [
        ["pipeline=default", "a.b=null"], "video of default"
    ]  # fmt: skip


def test_the_program_ends_when_who_started_it_is_gone(tmp_path: Path) -> None:
    process = start(tmp_path, "hang")
    deadline = time.monotonic() + 30
    while not (tmp_path / "ran.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None and process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 1


# --- set up wrongly ---------------------------------------------------------------------------------------


def test_a_program_that_is_not_there_fails_the_clip_and_says_what_to_do(
    one: Recording, run: Callable[..., Done]
) -> None:
    done = run(one, command=["/nowhere/python"])
    assert done.receipt.status is Status.FAILED
    assert "pose.vipe.command: '/nowhere/python' is no program on this machine" in done.receipt.reasons[0]


def test_a_file_that_shows_other_frames_than_the_table_is_refused(
    one: Recording, run: Callable[..., Done]
) -> None:
    t = one.table
    changed = FrameTable(t.time_base, t.pts, t.source_index, t.pixels + np.uint64(1), t.ok, t.repeat)
    done = run(Recording(one.video, changed, one.given, one.told))
    assert done.receipt.status is Status.FAILED and "run ingest again" in done.receipt.reasons[0]


def test_the_config_names_vipe_only_with_a_command() -> None:
    with pytest.raises(ValidationError, match=r"set pose\.vipe\.command"):
        PoseConfig(estimators=("vipe",))


def test_to_move_the_program_makes_no_poses_stale() -> None:
    def digest(pose: PoseConfig) -> str:
        return config_digest(Pose(pose, SourceConfig(), Cameras()))

    assert digest(config(timeout_s=5, command=["/elsewhere/python"])) == digest(config())
    assert digest(config(overlap=40)) != digest(config())
    assert digest(config(pipeline="dav3")) != digest(config())


# --- the layout -------------------------------------------------------------------------------------------


def test_what_was_written_in_the_layout_is_what_is_read(one: Recording, tmp_path: Path) -> None:
    layout = Layout(tmp_path, "clip")
    pose = np.tile(np.eye(4, dtype=np.float32), (150, 1, 1))
    pose[:, :3, :3], pose[:, :3, 3] = one.given.rotation[:150], one.given.translation[:150]
    order = np.random.default_rng(1).permutation(150)[:140]
    save(layout.pose, pose[order], order)
    track = read_output(layout, 150, "x")
    assert sorted(np.flatnonzero(track.valid)) == sorted(order)
    assert track.rotation[order] == pytest.approx(one.given.rotation[order], abs=1e-6)
    assert track.translation[order] == pytest.approx(one.given.translation[order], abs=1e-5)
    save(
        layout.intrinsics,
        np.float32([[300, 301, 320, 180], [302, 301, 320, 180], [310, 1, 1, 1]]),
        np.arange(3),
    )
    layout.cameras.write_text("0: PINHOLE\n1: PINHOLE\n2: PINHOLE\n")
    assert read_focal(layout, 150) == pytest.approx(302)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path}/opened",)

    layout = Layout(tmp_path, "clip")
    layout.pose.parent.mkdir()
    np.savez(layout.pose, data=np.array([Bomb()], object), inds=np.arange(1))
    with pytest.raises(BadOutput, match="cannot be read"):
        read_output(layout, 1, "x")
    assert not (tmp_path / "opened").exists()
