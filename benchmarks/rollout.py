"""What a rollout costs over its horizon: latency a chunk, size of the caches, work of the compressor.

    python benchmarks/rollout.py [--preset tiny] [--chunks 80] [--steps 40] [--threads 1]

Weights are random: time and memory do not depend on their values. Latency is of the four-step sampler, and of
the velocity sampler with guidance for the first chunks only. The compressor is run twice on the same history:
streamed, as `trainer/rollout.py` does, and from the first latent again for every chunk, as the release does;
work is counted in floating point operations of its convolutions and matrix products, and timed.
Caches of `a14b` follow from its layouts, in bf16, for one expert and one text.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainer.codec.base import to_pixels
from trainer.codec.linear import Fit, Linear
from trainer.config import A14B, LATENTS_PER_PAIR, Preset, preset
from trainer.model.layout import memory
from trainer.model.memory import MemoryCompressor, MemoryState
from trainer.model.pdd_head import CompactHead
from trainer.model.wan import build
from trainer.noise import keyed
from trainer.rollout import Rollout, Scene, Settings
from trainer.sampler import ManySteps
from trainer.schedule import PddSchedule

SHOWN = (1, 2, 5, 10, 20, 40, 80, 160, 256)
HORIZONS = (32, 96, 320, 1020)


def codec_of(size: Preset) -> Linear:
    """A linear codec of noise: as dear as any other."""
    fit, geometry = Fit(), size.geometry
    for k in range(4):
        rgb = torch.randint(0, 255, (4, geometry.height, geometry.width, 3), generator=keyed(k, "codec"))
        fit.see(to_pixels(rgb.to(torch.uint8)))
    return Linear(fit.record(("noise",)))


def scene_of(size: Preset, chunks: int) -> Scene:
    image = torch.zeros(1, 3, 1, size.geometry.height, size.geometry.width)
    texts = torch.randn(2, 40, size.model.text_dim, generator=keyed(0, "text"))
    actions = torch.zeros(1, chunks * size.chunk, 6)
    actions[:, 1:, 2] = 1.0
    return Scene(image, actions, (texts[0],), (0,) * chunks, texts[1])


def latency(size: Preset, chunks: int, few: bool, steps: int) -> list[tuple[float, int]]:
    """(seconds, bytes of the caches) of each chunk."""
    c = size.model
    heads = {e: CompactHead(c.dim, c.patch_out, c.eps, 2) if few else None for e in size.experts}
    experts = {e: build(c, k, head=heads[e]).eval() for k, e in enumerate(size.experts)}
    settings = Settings(few=PddSchedule() if few else None, many=ManySteps(steps))
    rollout = Rollout(size, experts, codec_of(size), scene_of(size, chunks), settings)
    found, began = [], time.perf_counter()
    for chunk in rollout.chunks():
        now = time.perf_counter()
        found.append((now - began, chunk.cache_bytes))
        began = now
    return found


def compressor(size: Preset, chunks: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(seconds, Gflop) of each chunk: streamed, and over the whole history."""
    model = MemoryCompressor(size.model.in_dim, size.model.dim, size.model.memory)
    model.init_weights(keyed(0, "compressor"))
    torch.nn.init.normal_(
        model.output_layer.weight, std=0.02, generator=keyed(0, "output")
    )  # zero at the start
    latents = torch.randn(1, 36, chunks * size.chunk, *size.geometry.latent, generator=keyed(0, "history"))
    streamed, whole = [], []
    state: MemoryState | None = None
    with torch.no_grad():
        for chunk in range(chunks):
            stop = (chunk + 1) * size.chunk
            part = latents[:, :, stop - size.chunk : stop]
            seconds, work, (tokens, state) = measured(model, part, state)
            streamed.append((seconds, work))
            if chunk + 1 in SHOWN or chunk + 1 == chunks:
                seconds, work, (again, _) = measured(model, latents[:, :, :stop], None)
                whole.append((seconds, work))
                own = again[:, -size.chunk // LATENTS_PER_PAIR :]
                torch.testing.assert_close(tokens, own, rtol=1e-5, atol=1e-5)
            else:
                whole.append((float("nan"), float("nan")))
    return streamed, whole


def measured(
    model: MemoryCompressor, history: Tensor, state: MemoryState | None
) -> tuple[float, float, tuple[Tensor, MemoryState]]:
    with FlopCounterMode(display=False) as counter:
        model(history, state)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        out = model(history, state)
        times.append(time.perf_counter() - began)
    return statistics.median(times), counter.get_total_flops() / 1e9, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--chunks", type=int, default=80)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    size = preset(given.preset)

    streamed, whole = compressor(size, given.chunks)
    few = latency(size, given.chunks, True, 0)
    many = latency(size, min(given.chunks, 5), False, given.steps)
    print(f"{size.name}, {given.chunks} chunks, {given.threads} thread(s), float32\n")
    print("| chunk | 4 steps ms | caches kB | streamed ms | Gflop | whole history ms | Gflop | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    shown = sorted({k for k in (*SHOWN, given.chunks) if k <= given.chunks})
    for k in shown:
        near = slice(max(0, k - 3), k + 2)  # a single chunk is noisy
        ms, own = 1e3 * statistics.median(t for t, _ in few[near]), streamed[k - 1]
        own_ms = 1e3 * statistics.median(t for t, _ in streamed[near])
        print(
            f"| {k} | {ms:.1f} | {few[k - 1][1] / 1e3:.0f} | {own_ms:.2f} | {own[1]:.4f} | "
            f"{1e3 * whole[k - 1][0]:.2f} | {whole[k - 1][1]:.4f} | {whole[k - 1][1] / own[1]:.1f} |"
        )
    times = [1e3 * t for t, _ in many[1:]]
    print(f"\n{given.steps} steps with guidance: {np.median(times):.0f} ms a chunk after the first")
    a14b = A14B.model
    token = 2 * a14b.layers * a14b.dim * 2
    print(f"\na14b at 448x832, one expert and one text, {token:,} bytes a token in bf16:")
    for latents in HORIZONS:
        tokens = memory(A14B, latents // A14B.chunk).tokens
        print(f"  {latents} latents: {tokens:,} tokens of memory, {tokens * token / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
