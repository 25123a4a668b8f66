"""What one torchrun group of two ranks is asked, all in one launch; rank 0 writes the answers as JSON.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.trainer.ranks OUT [CHECK..]

Each check compares with a bare network on the whole batch, or reports what was refused. Read by
test_distributed.py.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.trainer.loop_support import Fed, Remembered, run_loop, two_chunks
from tests.trainer.model_support import PRESET, Video, draw, noisy_expert
from tests.trainer.stable_support import SCHEDULE, scene, students
from tests.trainer.tiny_codecs import fitted
from trainer.codec.linear import Linear
from trainer.curriculum import OptimConfig
from trainer.distributed.mesh import Mesh, Parallel, RanksDifferError, StalledError, end_rank, make_mesh
from trainer.distributed.parallelize import accumulate, parallelize, train_only
from trainer.loop import NotFiniteError, SaveClock
from trainer.metrics import StepRecord
from trainer.model.kvcache import RawText
from trainer.model.layout import Layout, Rule, chunk_prompts, clip, frame_queries, teacher_forced
from trainer.model.wan import History, Inputs, WanModel, make_plan
from trainer.objectives.flow import objective
from trainer.optim import clip_gradients, make_optimizer
from trainer.schedule import Sigma
from trainer.stable.played import Played, Snapshot, play
from trainer.stable.scores import Scored
from trainer.stable.step import replay_all

STRONG = 10.0
"""Prompts of this size: at 1.0 attention to text is uniform, and the gradients of its queries and keys are
4e-5 of the largest and half rounding noise."""
STAGE_3 = (teacher_forced(PRESET, 2, 2, 8), Rule.CAUSAL)  # six compressed latents, padded to eight
STAGE_2B = (clip(PRESET, 3, 1), Rule.FULL)
STAGE_2A = (frame_queries(PRESET, 4, (1, 6, 15)), Rule.FULL)
LONG = (clip(PRESET, 40, 1), Rule.FULL)  # so much memory that both ranks of a sequence have some
CHUNKS = 5
"""Of a rollout. The anchor of each is one frame, so one rank of a sequence has none of it."""
STEPS = 3
# A large eps, because elements whose gradient is rounding noise would move by the full rate in any direction.
OPTIM = OptimConfig(lr=1e-3, eps=1e-3, clip=0.05)

Sequence = tuple[Layout, Rule]
Answer = dict[str, Any]


def inputs(samples: list[int], sequence: Sequence) -> Inputs:
    """Samples of these seeds as one batch, each chunk with its own prompt."""
    layout, rule = sequence
    chunks = max(layout.times) // PRESET.chunk + 1
    videos = [Video(chunks, seed=100 * sample) for sample in samples]
    parts = [video.inputs(layout, rule) for video in videos]
    histories = [part.history for part in parts if part.history is not None]
    return replace(
        parts[0],
        plan=make_plan(PRESET.model, layout, rule=rule, prompts=chunk_prompts(layout)),
        latents=torch.cat([part.latents for part in parts]),
        sigma=torch.cat([part.sigma for part in parts]),
        actions=torch.cat([part.actions for part in parts]),
        text=RawText(STRONG * torch.cat([video.prompts for video in videos])),
        history=History(torch.cat([h.full for h in histories]), torch.cat([h.low for h in histories])),
    )


def loss_of(model: WanModel, samples: list[int], sequence: Sequence) -> Tensor:
    velocity = model(inputs(samples, sequence)).velocity
    wanted = torch.cat([draw(sample + 7, 1, *velocity.shape[1:]) for sample in samples])
    return (velocity - wanted).square().mean()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@functools.cache
def alone(
    expert: str, samples: tuple[int, ...], sequence: Sequence, trained: tuple[str, ...], steps: int
) -> Run:
    """The bare network with the whole batch."""
    bare = noisy_expert(expert).train()
    train_only(bare, trained)
    return Run(bare, [list(samples)], sequence, steps=steps)


class Run:
    """Steps of a network: losses, norms, gradients of the first step and weights after the last."""

    def __init__(
        self,
        model: WanModel,
        batches: list[list[int]],
        sequence: Sequence,
        parallel: Parallel | None = None,
        steps: int = STEPS,
    ) -> None:
        optimizer = make_optimizer(model.named_parameters(), OPTIM)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.grads: dict[str, Tensor] = {}
        for step in range(steps):
            total = 0.0
            for index, samples in enumerate(batches):
                if parallel is not None:
                    accumulate(model, parallel, last=index == len(batches) - 1)
                loss = loss_of(model, samples, sequence) / len(batches)
                loss.backward()
                total += loss.item()
            self.losses.append(total)
            if step == 0:
                self.grads = {
                    name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
                }
            self.norms.append(clip_gradients(model, OPTIM.clip))
            optimizer.step()
            optimizer.zero_grad()
        self.weights = {name: whole(p).cpu() for name, p in model.named_parameters()}
        self.states = len(optimizer.state)


def far(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest relative error of a tensor (norm of the error over its own); names must be equal."""
    assert given.keys() == wanted.keys(), sorted(given.keys() ^ wanted.keys())[:5]
    return max(((given[n] - w).norm() / w.norm().clamp_min(1e-30)).item() for n, w in wanted.items())


def compare(
    mesh: Mesh,
    parallel: Parallel,
    *,
    expert: str = "high",
    sequence: Sequence = STAGE_3,
    micro: int = 1,
    trained: tuple[str, ...] = ("",),
    steps: int = STEPS,
) -> Answer:
    """A parallel run of two samples a data rank against a bare network with all of them."""
    here = make_mesh(parallel, "cpu")
    samples = list(range(2 * here.data_world))
    wanted = alone(expert, tuple(samples), sequence, trained, steps)
    model = noisy_expert(expert)
    train_only(model, trained)
    own = samples[2 * here.data_rank : 2 * here.data_rank + 2]
    size = 2 // micro
    batches = [own[i : i + size] for i in range(0, 2, size)]
    given = Run(parallelize(model, here, parallel), batches, sequence, parallel, steps)
    losses = here.mean(torch.tensor(given.losses, dtype=torch.float64)).tolist()
    return {
        "loss": max(abs(a - b) / b for a, b in zip(losses, wanted.losses)),
        "norm": max(abs(a - b) / b for a, b in zip(given.norms, wanted.norms)),
        "grads": far(given.grads, wanted.grads),
        "weights": far(given.weights, wanted.weights),
        "moved": far({n: whole(p) for n, p in noisy_expert(expert).named_parameters()}, given.weights),
        "trained": len(given.grads),
        "states": given.states == wanted.states == len(given.grads),
        "placements": sorted({str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}),
    }


def played_by_all(mesh: Mesh) -> Answer:
    """Stage 5 with a sequence that is shared: a rollout over caches, and its replay, against one process."""
    here = make_mesh(Parallel(sequence=mesh.world), "cpu")
    found = []
    for parallel in (None, Parallel(sequence=mesh.world)):
        models = students()
        for name, model in models.items():
            train_only(model, ("",))
            models[name] = model if parallel is None else parallelize(model, here, parallel)
        shown = scene(CHUNKS)
        shown = replace(shown, texts=tuple(STRONG * text for text in shown.texts))
        video = play(PRESET, models, Linear(fitted()), shown, SCHEDULE, seed=0, step=0)
        grads = {n: _replayed(model, n, video, parallel) for n, model in models.items()}
        found.append((video, grads, sum(cache.bytes for cache in video.caches.values())))
    (alone, wanted, bytes_alone), (together, given, own) = found
    blocks = {n: sum(s.block.expert == n for s in alone.snapshots) for n in wanted}
    return {
        "video": ((together.full - alone.full).norm() / alone.full.norm()).item(),
        "grads": max(far(given[n], wanted[n]) for n in wanted if blocks[n]),
        "blocks": list(blocks.values()),
        "share of the cache": own / bytes_alone,
    }


def _replayed(model: WanModel, name: str, video: Played, parallel: Parallel | None) -> dict[str, Tensor]:
    """Gradients of an expert after the replay of all of its steps."""
    gradient = draw(3, 2, 16, CHUNKS * PRESET.chunk, *PRESET.geometry.latent)
    one = torch.ones(2)
    scored = (Scored(gradient, one.bool(), one, one, Sigma(0.5)),)
    left = sum(s.block.expert == name for s in video.snapshots)

    def backward(loss: Tensor, snapshot: Snapshot) -> None:
        nonlocal left
        left -= 1
        if parallel is not None:
            accumulate(model, parallel, last=left == 0)
        loss.backward()

    replay_all(PRESET, {name: model}, video, scored, backward)
    return {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def refusal(act: Callable[[], object], kind: type[Exception]) -> str:
    """The message that this rank was refused with; empty for none."""
    try:
        act()
    except kind as error:
        return str(error)
    return ""


def mixed_norm(mesh: Mesh) -> Answer:
    """One module replicated and whole on every rank, one sharded, one on a mesh of both kinds."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({name: nn.Linear(6, 5) for name in ("plain", "sharded", "hybrid")})
    grads = {name: draw(i, *p.shape) for i, (name, p) in enumerate(parts.named_parameters())}
    wanted = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    fully_shard(parts["sharded"], mesh=make_mesh(Parallel(), "cpu").shards)
    fully_shard(parts["hybrid"], mesh=make_mesh(Parallel(replicate=mesh.world), "cpu").shards)
    for name, parameter in parts.named_parameters():
        grad = grads[name]
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            rows = len(local)
            first = mesh.rank * -(-len(grad) // mesh.world) if name.startswith("sharded") else 0
            grad = DTensor.from_local(
                grad[first : first + rows],
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = grad
    norm = clip_gradients(parts, 0.5)
    clipped = torch.cat([whole(p.grad).flatten() for p in parts.parameters()]).norm().item()
    return {"norm": abs(norm - wanted) / wanted, "clipped": abs(clipped - 0.5) / 0.5}


def not_finite(mesh: Mesh) -> Answer:
    """Rank 0 alone holds the element that is not finite; every rank must refuse the step."""
    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=make_mesh(Parallel(), "cpu").shards)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
        if mesh.rank == 0:
            parameter.grad.to_local()[0] = float("inf")
    refused = refusal(lambda: clip_gradients(layer, 1.0), ValueError)
    return {"refused": every(mesh, refused)}


def eight_bits(mesh: Mesh) -> Answer:
    """Losses with moments of 8 bits beside those of 32, on shards. quantised: moments of 8 bits that there
    are. kept: all have the layout of their parameter."""
    losses = {}
    for eight_bit in (False, True):
        model = parallelize(noisy_expert(), make_mesh(Parallel(), "cpu"), Parallel())
        config = replace(OPTIM, eight_bit=eight_bit, clip=1.0)
        optimizer = make_optimizer(model.named_parameters(), config)
        values = []
        # Compiled, as torchao has it, the first step takes half a minute.
        with torch.compiler.set_stance("force_eager"):
            for _ in range(STEPS):
                loss = loss_of(model, [mesh.rank], STAGE_2B)
                loss.backward()
                values.append(mesh.mean(loss.detach()).item())
                optimizer.step()
                optimizer.zero_grad()
        losses[eight_bit] = values
    moments = [(p, state["exp_avg"]) for p, state in optimizer.state.items()]
    return {
        "losses": losses[True],
        "wanted": losses[False],
        "quantised": sum("8bit" in type(m.to_local()).__name__ for _, m in moments),
        "kept": all(m.shape == p.shape and m.placements == p.placements for p, m in moments),
    }


def every(mesh: Mesh, text: str) -> list[str]:
    texts: list[Any] = [None] * mesh.world
    dist.all_gather_object(texts, text)
    return texts


def looped(mesh: Mesh, fed: Fed, **more: Any) -> list[StepRecord]:
    """Steps of the training loop; what rank 0 was told."""
    with tempfile.TemporaryDirectory() as folder:
        return run_loop(mesh, Path(folder), fed, **more)


def loop_not_finite(mesh: Mesh) -> Answer:
    """In the loop: the loss of rank 1's sample of step 1 is no number."""

    def minimise(model: Any, preset: Any, batch: Any, expert: str, seed: int, step: int) -> Any:
        loss = objective(two_chunks(2))(model, preset, batch, expert, seed, step)
        bad = float("nan") if (mesh.rank, step) == (1, 1) else 1.0
        return replace(loss, total=loss.total * bad, value=loss.value * bad)

    kept = Remembered()
    run = functools.partial(looped, mesh, Fed(mesh.rank), checkpoints=kept, minimise=minimise, save_every=1)
    return {"refused": every(mesh, refusal(run, NotFiniteError)), "saved": kept.steps}


def branches(mesh: Mesh) -> Answer:
    """In the loop: at step 1 the batch of rank 0 has a longer memory than the others'."""
    fed = Fed(mesh.rank, history=lambda step: 2 if (mesh.rank, step) == (0, 1) else 1)
    return {"refused": every(mesh, refusal(lambda: looped(mesh, fed), RanksDifferError))}


def slow_rank(mesh: Mesh) -> Answer:
    """In the loop: the data of step 1 take rank 1 a while, and its clock alone finds a checkpoint due."""
    fed, kept = Fed(mesh.rank, slow={1: 0.5} if mesh.rank == 1 else {}), Remembered()
    answers = iter((False, mesh.rank == 1, False, False))
    with mock.patch.object(SaveClock, "due", lambda clock: next(answers)):
        told = looped(mesh, fed, steps=4, checkpoints=kept)
    saved = every(mesh, ",".join(map(str, kept.steps)))
    return {"saved": saved, "rows": [record.row() for record in told]}


def stalled(mesh: Mesh) -> Answer:
    """In the loop: rank 1 waits for its data while rank 0 waits a second for it. The last check: gloo closes
    what timed out."""
    short = replace(mesh, timeout=timedelta(seconds=1))
    fed = Fed(mesh.rank, slow={1: 3.0} if mesh.rank == 1 else {})
    refused = refusal(lambda: looped(short, fed), StalledError)
    return {"refused": refused}


CHECKS: dict[str, Callable[[Mesh], Answer]] = {
    "sharded, high": lambda mesh: compare(mesh, Parallel()),
    "sharded, low": lambda mesh: compare(mesh, Parallel(), expert="low"),
    "without checkpointing": lambda mesh: compare(mesh, Parallel(checkpointing=False), steps=1),
    "accumulated whole": lambda mesh: compare(mesh, Parallel(whole_sums=True), micro=2),
    "accumulated in shards": lambda mesh: compare(mesh, Parallel(), micro=2),
    "parts frozen": lambda mesh: compare(mesh, Parallel(), trained=("memory", "blocks.1.action_mlp", "head")),
    "parts frozen, accumulated": lambda mesh: compare(
        mesh, Parallel(whole_sums=True), micro=2, trained=("action", "blocks.0"), steps=1
    ),
    # With four ranks: 2 x 2.
    "replicated": lambda mesh: compare(mesh, Parallel(replicate=2), sequence=STAGE_2B),
    "replicated, accumulated": lambda mesh: compare(
        mesh, Parallel(replicate=mesh.world), micro=2, sequence=STAGE_2A, steps=1
    ),
    "offloaded": lambda mesh: compare(mesh, Parallel(offload=True)),
    # With four ranks: two pairs.
    "sequence, high": lambda mesh: compare(mesh, Parallel(sequence=2)),
    "sequence, low": lambda mesh: compare(mesh, Parallel(sequence=mesh.world), expert="low"),
    "sequence, clip": lambda mesh: compare(mesh, Parallel(sequence=mesh.world), sequence=STAGE_2B, steps=1),
    "sequence, queries": lambda mesh: compare(
        mesh, Parallel(sequence=mesh.world), sequence=STAGE_2A, micro=2, steps=1
    ),
    "sequence, parts frozen": lambda mesh: compare(
        mesh, Parallel(sequence=mesh.world), trained=("memory",), sequence=LONG, steps=1
    ),
    "sequence, played": played_by_all,
    "eight bits": eight_bits,
    "mixed norm": mixed_norm,
    "not finite": not_finite,
    "loop, not finite": loop_not_finite,
    "loop, branches": branches,
    "loop, slow rank": slow_rank,
    "loop, stalled": stalled,
}


def main(out: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    mesh = make_mesh(Parallel(timeout_s=60.0), "cpu")
    answers = {}
    for name in chosen or CHECKS:
        started = time.monotonic()
        answers[name] = CHECKS[name](mesh)
        if mesh.rank == 0:
            print(f"{name}: {time.monotonic() - started:.1f} s {answers[name]}", flush=True)
    if mesh.rank == 0:
        out.write_text(json.dumps(answers))
    end_rank()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
