"""Two ranks equal one. One torchrun launch answers all checks of ranks.py; the rest is one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.model_support import PRESET, SEEDS, Video, noisy_expert
from trainer.config import ConfigError
from trainer.distributed.mesh import Mesh, Parallel, Precision, make_mesh
from trainer.distributed.parallelize import (
    DtypeError,
    buffer_dtypes,
    check_dtypes,
    freeze,
    parallelize,
    train_only,
)
from trainer.distributed.ulysses import cut
from trainer.model.block import Shared
from trainer.model.layout import clip, teacher_forced
from trainer.model.plan import make_plan

pytestmark = pytest.mark.alone

BAR = 1e-5

ROOT = Path(__file__).parents[2]
EQUAL = (
    "sharded, high",
    "sharded, low",
    "without checkpointing",
    "accumulated whole",
    "accumulated in shards",
    "parts frozen",
    "parts frozen, accumulated",
    "replicated",
    "replicated, accumulated",
    "offloaded",
    "sequence, high",
    "sequence, low",
    "sequence, clip",
    "sequence, queries",
    "sequence, parts frozen",
)


def launch(ranks: int, out: Path, *checks: str) -> Any:
    """The answers of a torchrun group on this machine."""
    group = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    run = subprocess.run(
        (sys.executable, "-m", *group, "-m", "tests.trainer.ranks", str(out), *checks),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert out.is_file(), f"{run.stdout[-2000:]}\n{run.stderr[-20000:]}"
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(2, tmp_path_factory.mktemp("ranks") / "two.json")


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """A group of this process alone."""
    alone = make_mesh(Parallel(), "cpu")
    yield alone
    alone.close()


@pytest.mark.parametrize("check", EQUAL)
def test_two_ranks_equal_one(two: Any, check: str) -> None:
    answer = two[check]
    assert answer["loss"] <= BAR
    assert answer["norm"] <= BAR
    assert answer["grads"] <= BAR
    assert answer["weights"] <= BAR < answer["moved"]


def test_ranks_of_a_sequence_share_the_caches_of_a_rollout_and_its_replay(two: Any) -> None:
    answer = two["sequence, played"]
    assert min(answer["blocks"]) > 0 and answer["share of the cache"] == 0.5
    assert answer["video"] <= BAR and answer["grads"] <= BAR


def test_frozen_parts_have_neither_gradient_nor_moments(two: Any) -> None:
    everything = len(list(noisy_expert().named_parameters()))
    assert two["sharded, high"]["trained"] == everything
    model = noisy_expert()
    names = train_only(model, ("memory", "blocks.1.action_mlp", "head"))
    assert two["parts frozen"]["trained"] == len(names) < everything
    assert all(two[check]["states"] for check in EQUAL)


def test_hybrid_sharding_replicates(two: Any) -> None:
    assert two["sharded, high"]["placements"] == ["(Shard(dim=0),)"]
    assert two["replicated"]["placements"] == ["(Replicate(), Shard(dim=0))"]


def test_the_gradient_norm_is_global_over_replicated_and_sharded_modules(two: Any) -> None:
    assert two["mixed norm"]["norm"] <= BAR
    assert two["mixed norm"]["clipped"] <= BAR


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_before_the_update(two: Any) -> None:
    first, second = two["not finite"]["refused"]
    assert "inf" in first and "weight, bias" in first
    assert "inf" in second


def test_the_loop_refuses_a_rank_with_another_branch_on_all_before_the_step(two: Any) -> None:
    said = "chunks of history at step 1: rank 0 has 2, rank 1 has 1; all must agree"
    assert two["loop, branches"]["refused"] == [said] * 2


def test_the_loop_ends_on_all_ranks_where_the_loss_of_one_is_no_number(two: Any) -> None:
    first, second = two["loop, not finite"]["refused"]
    assert first == second and "step 1: the loss is not finite; samples sample5 (sigma " in first
    assert two["loop, not finite"]["saved"] == [1]


def test_a_slow_rank_is_told_by_its_number_and_a_checkpoint_that_one_finds_due_is_saved_by_all(
    two: Any,
) -> None:
    answer = two["loop, slow rank"]
    slow = answer["rows"][1]
    assert slow["slow_rank"] == 1 and slow["data_wait_s"] >= 0.5
    # The other rank waited for it, and it for nobody.
    assert slow["others_s_most"] >= 0.3 and slow["others_s_least"] <= 0.2
    assert answer["saved"] == ["2,4", "2,4"]


def test_moments_of_eight_bits_are_sharded_and_train_like_those_of_32(two: Any) -> None:
    answer = two["eight bits"]
    assert answer["quantised"] > 0 and answer["kept"]
    fall = answer["wanted"][0] - answer["wanted"][-1]
    assert fall > 0.02
    # measured 1e-4 of the fall
    assert answer["losses"] == pytest.approx(answer["wanted"], rel=0, abs=0.01 * fall)


def test_a_rank_that_stalls_is_named_within_the_set_time(two: Any) -> None:
    said = two["loop, stalled"]["refused"]
    assert "rank 0 of 2 waited 1 s at step 1" in said and "Ranks 1 failed" in said


@pytest.mark.soak
def test_four_ranks_equal_one(tmp_path: Path) -> None:
    equal = ("sharded, high", "replicated", "sequence, high", "sequence, clip")
    four = launch(4, tmp_path / "four.json", *equal, "mixed norm")
    assert set(four) == {*equal, "mixed norm"}
    for check in equal:
        assert max(four[check][what] for what in ("loss", "norm", "grads", "weights")) <= BAR
    assert max(four["mixed norm"][what] for what in ("norm", "clipped")) <= BAR


@pytest.mark.parametrize("expert", SEEDS)
def test_names_stay_those_of_the_bare_network(mesh: Mesh, expert: str) -> None:
    model = parallelize(noisy_expert(expert), mesh, Parallel(checkpointing=True))
    bare = noisy_expert(expert)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in bare.named_parameters()]
    assert list(model.state_dict()) == list(bare.state_dict())


def test_under_a_bf16_policy_noise_levels_modulation_and_rotations_stay_as_they_are(mesh: Mesh) -> None:
    model = parallelize(noisy_expert(), mesh, Parallel(precision=Precision.BFLOAT16))
    seen: list[tuple[torch.dtype, Shared]] = []
    computed: list[torch.dtype] = []
    model.blocks[0].self_attn.q.register_forward_hook(lambda _, args, out: computed.append(out.dtype))
    forward = model.blocks[1].forward

    def spy(x: torch.Tensor, shared: Shared, *more: Any) -> Any:
        seen.append((x.dtype, shared))
        return forward(x, shared, *more)

    model.blocks[1].forward = spy
    video = Video(chunks=3)
    inputs = video.inputs(teacher_forced(PRESET, 1, 2), sigma=torch.rand(1, 8, dtype=torch.float64))
    out = model(inputs)
    out.velocity.square().mean().backward()
    dtype, shared = seen[0]
    assert computed[0] == dtype == shared.action.dtype == torch.bfloat16
    assert shared.modulation.dtype == shared.plan.cos.dtype == out.velocity.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    # The same pass without a policy, on weights rounded to bf16, differs by rounding alone.
    with torch.no_grad():
        wanted = noisy_expert()(inputs).velocity
    assert (out.velocity - wanted).abs().max() <= 0.03 * wanted.abs().max()


def test_masters_and_buffers_of_other_dtypes_are_refused_by_name(mesh: Mesh) -> None:
    model = noisy_expert()
    model.blocks[1].ffn[0].weight.data = model.blocks[1].ffn[0].weight.data.bfloat16()
    with pytest.raises(DtypeError, match=r"blocks\.1\.ffn\.0\.weight \(torch\.bfloat16\)"):
        parallelize(model, mesh, Parallel())
    model = noisy_expert()
    model.register_buffer("table", torch.zeros(3, dtype=torch.bfloat16))
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
    assert buffer_dtypes(model) == {"table": torch.bfloat16, "counts": torch.int64}
    with pytest.raises(DtypeError, match="buffers must be float32: table"):
        check_dtypes(model)


def test_a_frozen_role_lies_in_bf16_and_predicts_the_same(mesh: Mesh) -> None:
    inputs = Video(chunks=2).inputs(teacher_forced(PRESET, 1, 1))
    with torch.no_grad():
        wanted = noisy_expert()(inputs).velocity
        role = parallelize(freeze(noisy_expert()), mesh, Parallel(precision=Precision.BFLOAT16))
        given = role(inputs).velocity
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in role.parameters())
    assert (given - wanted).abs().max() <= 0.03 * wanted.abs().max()


def test_what_is_trained_is_chosen_by_prefix_before_sharding(mesh: Mesh) -> None:
    model = noisy_expert()
    with pytest.raises(ConfigError, match="'memry'"):
        train_only(model, ("memory", "memry"))
    names = train_only(model, ("memory",))
    assert names and all(name.startswith("memory.") for name in names)
    with pytest.raises(ConfigError, match="before the network is sharded"):
        train_only(parallelize(model, mesh, Parallel()), ("",))


def test_heads_that_do_not_divide_are_refused_before_the_start(mesh: Mesh) -> None:
    class Three(Mesh):
        sequence_world = 3

    three = Three(mesh.device, mesh.shards, mesh.sequences, mesh.hosts, mesh.timeout)
    with pytest.raises(ConfigError, match="4 heads do not divide by 3 ranks"):
        parallelize(noisy_expert(), three, Parallel())


@pytest.mark.parametrize("parallel", [Parallel(replicate=2), Parallel(shard=3), Parallel(sequence=2)])
def test_ranks_that_are_no_product_are_refused_before_a_group_is_made(parallel: Parallel) -> None:
    with pytest.raises(ConfigError, match="1 ranks are not replicate"):
        make_mesh(parallel, "cpu")
    assert not torch.distributed.is_initialized()
    assert Parallel(replicate=2, sequence=4).shards(16) == 2


def test_a_sequence_is_cut_between_frames_with_the_smallest_largest_share() -> None:
    layout = clip(PRESET, 4, 8)
    tokens = tuple(frame.grid.tokens for frame in layout.frames)
    assert len(set(tokens)) == 2
    for parts in (2, 4, 8):
        cuts = cut(tokens, parts)
        shares = [sum(tokens[a:b]) for a, b in itertools.pairwise(cuts)]
        assert len(shares) == parts and sum(shares) == layout.tokens and min(shares) > 0
        assert max(shares) <= layout.tokens / parts + max(tokens)
    assert cut((5, 1, 1, 1), 3) == (0, 1, 3, 4)
    assert cut((1, 1, 9), 3) == (0, 1, 2, 3)
    assert cut((4, 4), 3) == (0, 1, 2, 2) and cut((4,), 4) == (0, 1, 1, 1, 1)


def test_the_parts_of_a_plan_hold_what_their_frames_had_in_the_whole() -> None:
    layout = teacher_forced(PRESET, 2, 2, 8)
    prompts = tuple(frame.chunk % 3 for frame in layout.frames)
    plan = make_plan(PRESET.model, layout, prompts=prompts)
    stops = (3, 11, len(layout))
    parts = [plan.part(a, b) for a, b in zip((0, *stops), stops)]
    assert plan.part(0, len(layout)) is plan
    assert sum((part.layout.frames for part in parts), ()) == layout.frames
    for whole, pieces in (
        (plan.cos, [part.cos for part in parts]),
        (plan.sin, [part.sin for part in parts]),
        (plan.times, [part.times for part in parts]),
    ):
        assert torch.equal(torch.cat(pieces), whole)
    spread = [prompt for part in parts for a, b, prompt in part.prompt_runs for _ in range(a, b)]
    assert spread == [prompt for a, b, prompt in plan.prompt_runs for _ in range(a, b)]
    assert all(part.mask is plan.mask and part.whole == layout for part in parts)


def test_the_network_knows_of_no_process() -> None:
    files = sorted((ROOT / "trainer/model").glob("*.py"))
    assert files and not [file.name for file in files if "torch.distributed" in file.read_text()]


def test_numbers_of_a_group_of_one_need_no_other_rank(mesh: Mesh) -> None:
    assert (mesh.rank, mesh.world, mesh.data_rank, mesh.data_world, mesh.sequence_world) == (0, 1, 0, 1, 1)
    assert torch.equal(mesh.gather(torch.tensor([1.0, 2.0])), torch.tensor([[1.0, 2.0]]))
    assert mesh.mean(torch.tensor(3.0)).item() == 3.0
    mesh.meet("the start")
    mesh.agree("history", 3)
    assert replace(Parallel(), precision="bfloat16").precision.dtype is torch.bfloat16
    with pytest.raises(ValueError):
        Parallel(precision="float16")  # type: ignore[arg-type]
