"""Validation rollouts: videos beside what was recorded, with the controls drawn on them.

A video starts from the first latent of a held-out clip, under its actions and prompts. On several ranks all
of them play, because the experts are sharded; the first one writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jobs.model import Opening, open_codec
from jobs.overlay import drawn
from jobs.train_config import LookConfig
from jobs.train_data import TrainingData
from jobs.video import video_writer
from schemas.latents import FittedCodec
from schemas.timeline import FRAMES_PER_LATENT
from trainer.codec.base import Codec, to_rgb
from trainer.codec.linear import Linear
from trainer.config import Preset
from trainer.curriculum import Objective, Stage
from trainer.data.batch import Batch
from trainer.data.plan import Draw
from trainer.data.sample import make_batch
from trainer.distributed.mesh import Mesh
from trainer.model.wan import WanModel
from trainer.rollout import Rollout, Scene, Settings
from trainer.sampler import ManySteps
from trainer.schedule import schedule_of


@dataclass(frozen=True)
class Looker:
    """clips: whole encodes of one sample each, whose first chunks are played."""

    preset: Preset
    config: LookConfig
    seed: int
    codec: Codec
    clips: tuple[Batch, ...]
    mesh: Mesh

    @staticmethod
    def of(
        data: TrainingData,
        preset: Preset,
        config: LookConfig,
        seed: int,
        mesh: Mesh,
        say: Callable[[str], None],
    ) -> Looker | None:
        """None, and a line that says why, where nothing can be decoded or no clip is long enough."""
        codec = codec_of(data, config, str(mesh.device.type))
        if codec is None:
            say(
                f"no videos: the latents are of {data.codec}; give `look: {{codec: wan:PATH}}` to decode them"
            )
            return None
        table = data.held_out
        needed = config.chunks * preset.chunk
        fit = np.flatnonzero(np.minimum(table.latents, table.actions_known) >= needed)[: config.clips]
        if not len(fit):
            say(f"no videos: no clip has {needed} latents with known actions (`look: {{chunks: ..}}`)")
            return None
        stage = Stage("look", Objective.CHUNKS, None, 1, needed, (0,), text_drop=0.0, field_drop=0.0)
        clips = tuple(
            make_batch([Draw(k, 0, int(table.row[k]), 0)], data.corpus.read, stage, preset, seed)
            for k in fit.tolist()
        )
        return Looker(preset, config, seed, codec, clips, mesh)

    def show(self, folder: Path, experts: Mapping[str, WanModel]) -> int:
        """Write `<sample>.mp4`: left what was recorded, right what the experts made. The folder is there when
        all are, in the place of one that is there: of a step that is made again. Returns how many."""
        partial = folder.with_name(f".{folder.name}")
        self.mesh.first(lambda: _remove(partial))
        for clip in self.clips:
            self._play(partial, clip, experts)
        self.mesh.first(lambda: _replace(partial, folder))
        return len(self.clips)

    def _play(self, folder: Path, clip: Batch, experts: Mapping[str, WanModel]) -> None:
        first = self.codec.decode(clip.latents[:, :, :1].to(self.codec.device))[0]
        scene = Scene(
            first.cpu(),
            clip.actions,
            tuple(clip.text[0]),
            clip.prompts,
            clip.negative,
        )
        many = ManySteps(steps=self.config.steps, guidance=self.config.guidance)
        banks = any(model.head.heads > 1 for model in experts.values())
        few = schedule_of(self.preset) if banks else None
        rollout = Rollout(
            self.preset, experts, self.codec, scene, Settings(self.seed, many, few), device=self.mesh.device
        )
        rows, chunk, cache = clip.actions[0].numpy(), self.preset.chunk, None
        with ExitStack() as held:
            write = None
            if self.mesh.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                write = held.enter_context(video_writer(folder / f"{clip.samples[0]}.mp4"))
            for made in rollout.chunks():
                start = made.index * chunk
                latents = clip.latents[:, :, start : start + chunk].to(self.codec.device)
                true, cache = self.codec.decode(latents, cache)
                if write is None:
                    continue
                for k, (left, right) in enumerate(
                    zip(to_rgb(true.cpu()).numpy(), to_rgb(made.pixels.cpu()).numpy())
                ):
                    latent = start + (k if start else k + FRAMES_PER_LATENT - 1) // FRAMES_PER_LATENT
                    caption = f"{clip.samples[0]}  chunk {made.index}"
                    write(
                        np.concatenate(
                            [drawn(left, rows[latent], "recorded"), drawn(right, rows[latent], caption)], 1
                        )
                    )


def _remove(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)


def _replace(partial: Path, folder: Path) -> None:
    _remove(folder)
    partial.rename(folder)


def codec_of(data: TrainingData, config: LookConfig, device: str) -> Codec | None:
    """The codec that made a corpus's latents: a fitted one lies in the corpus, others are given by path."""
    if config.codec:
        return open_codec(Opening(config.codec, device=device))
    store = data.corpus.store
    for found in store.list("statistics"):
        name = found.path.rsplit("/", 1)[-1]
        if name.startswith("codec-v") and name.endswith(".json"):
            record = FittedCodec.model_validate_json(store.read(found.path))
            codec = Linear(record, device)
            if codec.identity == data.codec:
                return codec
    return None
