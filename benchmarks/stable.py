"""Stable Forcing: scores by clip against one full-context pass, and replay against one retained graph.

    python -m benchmarks.stable            # the table, and docs/stable.png

Each measurement is a process of its own; peak memory is what it took beyond the networks and the rollout.
Networks are random (preset small, expert low), because neither time nor memory depends on their values. The
full-context baseline is one bidirectional pass over all latents of the video, without compressed memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import SMALL
from trainer.curriculum import CLIP, StableConfig
from trainer.data.batch import Batch
from trainer.model.kvcache import KvCache, Segment
from trainer.model.layout import Rule, compressed, sink, target
from trainer.model.pdd_head import IntervalHead
from trainer.model.wan import WanModel, build
from trainer.noise import keyed
from trainer.objectives.passes import forward
from trainer.rollout import Scene
from trainer.schedule import PddSchedule, Sigma
from trainer.stable.played import Played, Snapshot
from trainer.stable.scores import Scored, clip_batch, score_clip
from trainer.stable.step import replay_all

LENGTHS = (32, 96, 160, 320)
CHUNKS = (4, 8, 16, 32)
PRESET = SMALL
SIGMA = Sigma(0.5)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=keyed(0, *shape))


def a_video(latents: int) -> Played:
    """Random latents in the place of a rollout."""
    chunks, geometry = latents // PRESET.chunk, PRESET.geometry
    actions = torch.zeros(1, latents, 6)
    scene = Scene(randn(1, 3, 1, 64, 128), actions, (randn(20, 384),), (0,) * chunks, randn(20, 384))
    block = PddSchedule().blocks_of("low")[0]
    snapshots = tuple(Snapshot(c, block, randn(1, 16, PRESET.chunk, *geometry.latent)) for c in range(chunks))
    return Played(
        scene,
        randn(1, 36, latents, *geometry.latent),
        randn(1, 36, latents // 2 - 2, *geometry.low_latent),
        snapshots,
        {"low": _cache(chunks)},
    )


def _cache(chunks: int) -> KvCache:
    """As a rollout leaves it: one segment a chunk."""
    cache = KvCache()
    for chunk in range(chunks - 1):
        layout = compressed(PRESET, chunk, chunk + 1)
        layout = sink(PRESET) + layout if chunk == 0 else layout
        shape = (1, layout.tokens, PRESET.model.heads, PRESET.model.head_dim)
        each = tuple(randn(*shape) for _ in range(PRESET.model.layers))
        cache = cache.extend(Segment(layout, each, each))
    return cache


def by_clip(model: WanModel, played: Played) -> None:
    scores = {"low": model}
    for index in range(played.chunks * PRESET.chunk // CLIP):
        batch = clip_batch(played, PRESET, index)
        noise = randn(*batch.latents[:, :, -CLIP:].shape)
        score_clip(PRESET, scores, scores, batch, StableConfig(), SIGMA, noise)


@torch.no_grad()
def full_context(model: WanModel, played: Played) -> None:
    """What `score_clip` asks of the two scores, of the whole video at once: real with guidance, and fake."""
    latents, full = played.full.shape[2], played.full
    layout = target(PRESET, 0, latents // PRESET.chunk)
    text = played.scene.text(0, full.device).embeddings
    batch = Batch((0,), ("",), 0, full[:, :16], full[:, 16:], played.low[:, :, :0], played.scene.actions,
                  text, (0,) * (latents // PRESET.chunk), played.scene.negative)  # fmt: skip
    levels = torch.full((1, latents), SIGMA, dtype=torch.float64)
    for negative in (False, True, False):
        forward(model, batch, layout, Rule.FULL, full, levels, negative=negative)


def replays(model: WanModel, played: Played, retained: bool) -> None:
    zero = torch.zeros(1, 16, CLIP, *PRESET.geometry.latent)
    scored = (Scored(zero, torch.ones(1, dtype=torch.bool), torch.ones(1), torch.zeros(1), SIGMA),) * 8
    kept: list[Tensor] = []
    replay_all(PRESET, {"low": model.train()}, played, scored,
               lambda loss, snapshot: kept.append(loss) if retained else loss.backward())  # type: ignore[func-returns-value,no-untyped-call]  # fmt: skip
    if retained:
        torch.stack(kept).sum().backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak_mb: float


def measure(what: str, size: int) -> Cost:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.stable", "--one", what, "--size", str(size)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Cost(**json.loads(out.splitlines()[-1]))


def one(what: str, size: int) -> None:
    head = None
    if what in ("replay", "retained"):
        head = IntervalHead(
            PRESET.model.dim, PRESET.model.patch_out, PRESET.model.eps, PddSchedule().heads("low")
        )
    model = build(PRESET.model, 0, head=head)
    latents = size * PRESET.chunk if head is not None else size
    played = a_video(latents)
    small = a_video(CLIP)
    runs = {
        "clips": lambda v: by_clip(model, v),
        "full": lambda v: full_context(model, v),
        "replay": lambda v: replays(model, v, False),
        "retained": lambda v: replays(model, v, True),
    }
    if head is None:
        runs[what](small)  # libraries load, pools fill
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    runs[what](played)
    seconds = time.perf_counter() - began
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"seconds": seconds, "peak_mb": peak}))


def main() -> None:
    scores = {n: (measure("clips", n), measure("full", n)) for n in LENGTHS}
    print("scores of a rollout     by clip             full context        full / clip")
    for n, (clips, full) in scores.items():
        print(
            f"{n:4} latents      {clips.seconds:8.2f} s {clips.peak_mb:7.0f} MB {full.seconds:8.2f} s "
            f"{full.peak_mb:7.0f} MB   {full.seconds / clips.seconds:5.2f} x"
        )
    replay = {n: (measure("replay", n), measure("retained", n)) for n in CHUNKS}
    print("replay                  chunk by chunk      one retained graph")
    for n, (chunked, retained) in replay.items():
        print(
            f"{n:4} chunks       {chunked.seconds:8.2f} s {chunked.peak_mb:7.0f} MB "
            f"{retained.seconds:8.2f} s {retained.peak_mb:7.0f} MB"
        )
    draw(scores, replay)


def draw(scores: dict[int, tuple[Cost, Cost]], replay: dict[int, tuple[Cost, Cost]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4))
    panels = (
        (axes[0], scores, "seconds", "scores of a rollout, s", "latents", ("clip by clip", "full context")),
        (axes[1], scores, "peak_mb", "scores, peak MB", "latents", ("clip by clip", "full context")),
        (axes[2], replay, "peak_mb", "replay, peak MB", "chunks", ("chunk by chunk", "one retained graph")),
    )
    for axis, found, name, title, unit, labels in panels:
        for k, label in enumerate(labels):
            axis.plot(list(found), [getattr(c[k], name) for c in found.values()], marker="o", label=label)
        axis.set(title=title, xlabel=unit, ylim=(0, None), xticks=list(found))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig("docs/stable.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one, given.size)
    else:
        main()
