"""Held-out journeys, half of each out and half the same way back, played by students: what held, what not.

revisit   the same place twice, 2 seconds apart or more: PSNR of the way back against the way out. A world
          that has faded to grey is alike everywhere, so beside it:
told apart  how much more alike the same place is than another one, of the same pictures
home      the last 32 frames against the recorded ones of the same places: what was never invented
drift     the last quarter's colours from the first chunk's (total variation), and its sharpness by that of
          the recording's at the same places
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.learn.model import STEPS, LearnError, load_experts, read_clips, usable
from jobs.evaluate.actions import mirrored
from jobs.evaluate.drift import Looks, looks
from jobs.evaluate.loops import APART
from jobs.evaluate.measures import Psnr
from jobs.evaluate.stats import interval
from jobs.train_config import DataConfig, LookConfig
from jobs.train_data import TrainingData
from jobs.train_look import codec_of
from jobs.train_weights import from_files
from schemas.timeline import FRAMES_PER_LATENT, GRID_PER_CHUNK, GRID_RATE
from trainer.codec.base import Codec, to_rgb
from trainer.config import Preset
from trainer.curriculum import Law, curriculum
from trainer.data.plan import Draw
from trainer.data.scenes import make_scene
from trainer.model.wan import WanModel
from trainer.rollout import Rollout, Scene, Settings
from trainer.schedule import schedule_of
from trainer.stable.controls import extended

HOME = 32
"""Frames at the end of a way back that the recording shows too, near the first picture."""

Video = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Journeys:
    """scene: of all journeys side by side. turn: latents of the way out. true: uint8 [B, F, H, W, 3], what
    the recording shows on the way out, as the codec decodes it."""

    data: TrainingData
    preset: Preset
    codec: Codec
    scene: Scene
    names: tuple[str, ...]
    turn: int
    true: Video

    @staticmethod
    def open(url: str, preset: Preset, latents: int, most: int) -> Journeys:
        """The first held-out clips of a corpus. Raises LearnError."""
        data, turn = TrainingData.open(url, DataConfig(), preset), latents // 2
        codec = codec_of(data, LookConfig(), "cpu")
        rows = usable(data, turn)[:most]
        if codec is None or len(rows) < 2:
            raise LearnError(f"{url} has no codec, or fewer than two held-out clips of {turn} latents")
        draws = [Draw(k, 0, int(data.held_out.row[k]), 0) for k in rows]
        scene = make_scene(
            draws,
            data.corpus.reader(curriculum(preset.name)[-1]),
            data.corpus.read,
            preset,
            latents,
            Law.OUT_AND_BACK,
            lambda draw: iter(()),
        )

        def there_and_back(rows: Tensor) -> Tensor:
            way = extended(rows[:turn].numpy(), latents, Law.OUT_AND_BACK, lambda: iter(()))
            return torch.from_numpy(way)

        recorded = read_clips(data, preset, rows, turn, 0)
        scene = replace(scene, actions=torch.stack([there_and_back(rows) for rows in recorded.actions]))
        true = _frames([codec.decode(recorded.latents)[0]])
        return Journeys(data, preset, codec, scene, recorded.samples, turn, true)

    def __len__(self) -> int:
        return len(self.names)

    def from_run(self, run: Path, stage: str) -> tuple[dict[str, WanModel], Settings]:
        """Four steps."""
        return load_experts(run, stage, self.preset), Settings(few=schedule_of(self.preset))

    def from_files(self, path: Path) -> tuple[dict[str, WanModel], Settings]:
        """Many steps."""
        return {e: from_files(path, e, self.preset).eval() for e in self.preset.experts}, Settings(many=STEPS)

    @torch.no_grad()
    def play(self, player: tuple[dict[str, WanModel], Settings]) -> Video:
        """uint8 [B, F, H, W, 3]. The same noise for all players."""
        experts, settings = player
        rollout = Rollout(self.preset, experts, self.codec, self.scene, settings)
        return _frames([chunk.pixels for chunk in rollout.chunks()])

    def pairs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Frames of the way out, and of the way back at the same places."""
        return mirrored(self.turn)


def _frames(chunks: list[Tensor]) -> Video:
    """uint8 [B, F, H, W, 3] of pixels [B, 3, F, H, W] of chunks."""
    pixels = torch.cat(chunks, dim=2)
    return np.stack([to_rgb(pixels[k : k + 1]).numpy() for k in range(len(pixels))])


def measured(
    journeys: Journeys, videos: Mapping[str, Video], against: str, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every measure of every player, and its difference to one of them, paired by journey."""
    found = {name: _measures(journeys, video) for name, video in videos.items()}
    rows = []
    for name, values in found.items():
        for measure, each in values.items():
            own = interval(each, journeys.names)
            row: dict[str, Any] = {"player": name, "measure": measure, "value": own.row()}
            text = f"{name}: {measure} {own.mean:.3f}"
            if name != against:
                gain = interval(each - found[against][measure], journeys.names)
                row["gain"] = gain.row()
                text += f", against {against} {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
            say(text)
            rows.append(row)
    return rows


def _measures(journeys: Journeys, video: Video) -> dict[str, npt.NDArray[np.float64]]:
    """float64 [B] each; of colours and sharpness less is better, of dB more."""
    first, later = journeys.pairs()
    far = later - first >= APART
    psnr, end = Psnr(), int(later[-1]) + 1
    out, back = first[far], later[far]
    elsewhere = np.roll(back, len(back) // 2)
    revisit = [psnr.of(v[out], v[back]).mean() for v in video]
    other = [psnr.of(v[out], v[elsewhere]).mean() for v in video]
    home = [
        psnr.of(t[:HOME], v[end - HOME : end][::-1]).mean() for t, v in zip(journeys.true, video, strict=True)
    ]
    own = [_looks(v[:end]) for v in video]
    true = [_looks(np.concatenate([t, t[-2::-1]])) for t in journeys.true]
    late = -(-len(own[0].distance) // 4)
    colours = [v.distance[-late:].mean() - t.distance[-late:].mean() for v, t in zip(own, true)]
    sharp = [abs(np.log(v.sharpness[-late:].mean() / t.sharpness[-late:].mean())) for v, t in zip(own, true)]
    return {
        "revisit, dB": np.array(revisit),
        "told apart, dB": np.array(revisit) - np.array(other),
        "home, dB": np.array(home),
        "drift of colours": np.array(colours),
        "drift of sharpness, |log|": np.array(sharp),
    }


def _looks(video: Video) -> Looks:
    return looks(iter(np.array_split(video, -(-len(video) // GRID_PER_CHUNK))), third_person=False)


# --- figures ----------------------------------------------------------------------------------------------


def draw(journeys: Journeys, videos: Mapping[str, Video], out: Path) -> None:
    """Curves: likeness of places by how long ago they were seen, and looks by chunk."""
    figure = Figure(figsize=(13, 3.6))
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, 3, k + 1) for k in range(3)]
    first, later = journeys.pairs()
    psnr = Psnr()
    for name, video in videos.items():
        likeness = np.mean([psnr.of(v[first], v[later]) for v in video], axis=0)
        axes[0].plot((later - first) / GRID_RATE, likeness, label=name, linewidth=1)
    shown = {"recording": np.concatenate([journeys.true, journeys.true[:, -2::-1]], axis=1), **videos}
    for name, video in shown.items():
        found = [_looks(v) for v in video]
        for at, what in ((1, "sharpness"), (2, "saturation")):
            mean = np.mean([getattr(f, what) for f in found], axis=0)
            axes[at].plot(mean, label=name, linewidth=1, **({"color": "k"} if name == "recording" else {}))
    for one, title, x in zip(
        axes,
        ("the same place again: PSNR, dB", "sharpness", "saturation"),
        ("seconds between", "chunk", "chunk"),
    ):
        one.set_title(title, fontsize=9)
        one.set_xlabel(x, fontsize=8)
        one.tick_params(labelsize=7)
    axes[1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def pictured(journeys: Journeys, videos: Mapping[str, Video], out: Path, which: int = 0) -> None:
    """A row a player of one journey: frames out and back, and the recording's above."""
    turn = FRAMES_PER_LATENT * (journeys.turn - 1)
    at = [0, turn // 2, turn, turn + turn // 2, 2 * turn]
    true = np.concatenate([journeys.true[which], journeys.true[which][-2::-1]])
    rows = [np.concatenate([v[k] for k in at], axis=1) for v in (true, *(v[which] for v in videos.values()))]
    rows = [_labelled(row, name) for row, name in zip(rows, ("recording", *videos), strict=True)]
    whole = cv2.resize(np.concatenate(rows), None, fx=2, fy=2, interpolation=cv2.INTER_NEAREST)
    cv2.imwrite(str(out), whole[:, :, ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 9])


def _labelled(row: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    """A white strip to the left, with the name."""
    strip = np.full((len(row), 120, 3), 255, np.uint8)
    cv2.putText(strip, name, (3, 36), cv2.FONT_HERSHEY_SIMPLEX, 0.32, (0, 0, 0), 1, cv2.LINE_AA)
    return np.concatenate([strip, row], axis=1)
