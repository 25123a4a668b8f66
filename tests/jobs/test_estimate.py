"""What `wp2 plan train` says is what training takes: predicted on the meta device, then measured."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from jobs.cli import app
from jobs.estimate.footprint import activations, empty_inputs, kv_bytes, live_bytes, parameters, tensors_of
from jobs.estimate.recipes import (
    COPIES,
    GB,
    LORA_RANK,
    OTHERS,
    Adam,
    Machine,
    Planner,
    Recipe,
    judge,
    recipes,
    state_bytes,
)
from jobs.estimate.show import values
from jobs.estimate.work import Pass, Work, prompts_of, stages_of, work_of
from jobs.train_config import load
from jobs.train_stable import cast, with_bank
from trainer.config import A14B, SMALL, TINY, WAN1_3B, ConfigError, Geometry, Preset
from trainer.curriculum import ADDITIONS_LR, CLIP, OptimConfig, StableConfig, Stage
from trainer.distributed.mesh import Parallel, make_mesh
from trainer.flops import stage_flops, visible_pairs
from trainer.model.attention import Backend
from trainer.model.layout import Rule, clip, frame_queries, memory, teacher_forced
from trainer.model.wan import Inputs, WanModel, build
from trainer.optim import make_optimizer
from trainer.parameters import named_parameters
from trainer.schedule import schedule_of
from trainer.stable.loop import PROBES

CPU = torch.device("cpu")
H20 = Machine(8, 88 * GB, 1500 * GB)  # 8 x 96 GB, 8 of them kept back
SLICE = replace(A14B, model=replace(A14B.model, layers=1), geometry=Geometry(64, 128))


def passes(preset: Preset) -> dict[str, Pass]:
    return {
        "a clip without memory": Pass(clip(preset, 0, 2), Rule.FULL),
        "a clip with memory": Pass(clip(preset, 2, 2), Rule.FULL),
        "frame queries": Pass(frame_queries(preset, 2, (1, 6)), Rule.FULL),
        "teacher forced": Pass(teacher_forced(preset, 2, 2, 8), Rule.CAUSAL, 2),
    }


def given(preset: Preset, run: Pass) -> Inputs:
    """Numbers of no meaning, but actions, which must be of their domain."""
    inputs = empty_inputs(preset.model, run, torch.float32, Backend.DENSE, device=CPU)
    return replace(inputs, actions=torch.zeros_like(inputs.actions))


def saved_bytes(model: WanModel, inputs: Inputs) -> tuple[int, Tensor]:
    """Storages that backward will read, each once, without parameters and inputs; measured by themselves."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *tensors_of(inputs)]}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)  # so that no address comes twice
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        velocity = model(inputs).velocity
    return sum(kept.values()), velocity


def tensor_bytes(model: WanModel, optimizer: torch.optim.Optimizer | None) -> int:
    """Weights, gradients and moments."""
    tensors = [t for p in model.parameters() for t in (p.detach(), p.grad) if t is not None]
    if optimizer is not None:
        tensors += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    return sum(t.numel() * t.element_size() for t in tensors)


def is_near(predicted: float, measured: float) -> bool:
    return abs(predicted - measured) <= 0.1 * measured


@pytest.mark.parametrize("name", passes(TINY))
def test_bytes_of_a_step_of_tiny_are_predicted(name: str) -> None:
    run, model = passes(TINY)[name], build(TINY.model, 0)
    optimizer = make_optimizer(model.named_parameters(), OptimConfig())
    kept, velocity = saved_bytes(model, given(TINY, run))
    velocity.square().mean().backward()
    optimizer.step()
    state = parameters(TINY.model).total * (4 + 4 + Adam.FULL.bytes)
    found = activations(TINY.model, run, dtype=torch.float32, backend=Backend.DENSE)
    assert is_near(found.saved, kept), (found.saved, kept)
    unasked = sum(p.numel() for p in model.parameters() if p.grad is None)
    held = tensor_bytes(model, optimizer) + 16 * unasked  # no history: the compressor had no gradient
    assert is_near(state + found.saved, held + kept)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_the_peak_of_a_pass_is_predicted(again: bool) -> None:
    run, model = passes(TINY)["teacher forced"], build(TINY.model, 0)
    if again:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    _, peak = live_bytes(model, given(TINY, run))
    found = activations(TINY.model, run, dtype=torch.float32, checkpointing=again, backend=Backend.DENSE)
    assert is_near(found.peak, peak), (found.peak, peak)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["a clip with memory", "teacher forced"])
def test_bytes_of_a_slice_of_full_size_are_predicted(name: str) -> None:
    """One block of `a14b`, 0.69 B parameters: 5.5 GB of weights and gradients in fp32."""
    run = passes(SLICE)[name]
    with torch.device("meta"):
        model = WanModel(SLICE.model)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1e-3)
    kept, velocity = saved_bytes(model, given(SLICE, run))
    velocity.square().mean().backward()
    state = parameters(SLICE.model).total * (4 + 4)
    found = activations(SLICE.model, run, dtype=torch.float32, backend=Backend.DENSE)
    assert is_near(found.saved, kept), (found.saved, kept)
    assert is_near(state + found.saved, tensor_bytes(model, None) + kept)


def test_deeper_networks_follow_from_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    run, deep = passes(TINY)["teacher forced"], replace(TINY.model, layers=4)
    expected = activations(deep, run, checkpointing=True)
    activations.cache_clear()
    monkeypatch.setattr("jobs.estimate.footprint.MEASURED", 4)
    found = activations(deep, run, checkpointing=True)
    assert found.saved == expected.saved
    # The peak of so small a network is that of its head or of a block; at full size it follows to the byte.
    assert found.peak == pytest.approx(expected.peak, rel=0.03)
    activations.cache_clear()


def test_ranks_of_a_sequence_share_what_blocks_keep() -> None:
    run = passes(TINY)["teacher forced"]
    alone, shared = (activations(TINY.model, run, sequence=n).saved for n in (1, 2))
    assert 0.5 < shared / alone < 0.75  # compressor and patches are on every rank


def test_full_size_has_the_parameters_and_caches_of_the_spec() -> None:
    size = parameters(A14B.model)
    assert size.total == 17_460_184_640
    assert size.parts["compressor"] == 19_582_720
    assert sum(size.parts.values()) == size.total == size.block * 40 + size.root
    caches = {t: memory(A14B, t // 4).tokens for t in (32, 96, 320)}
    assert caches == {32: 4_368, 96: 7_280, 320: 17_472}
    assert [round(kv_bytes(A14B.model, n) / GB, 1) for n in caches.values()] == [3.6, 6.0, 14.3]


@pytest.mark.parametrize("stage", ["1", "2a", "2b", "3", "4"])
def test_stages_1_to_4_of_full_size_fit_8_gpus_of_96_gb(stage: str) -> None:
    work = work_of(A14B, stages_of(A14B, stage)[0])
    found = Planner(A14B, work, H20).estimate(Recipe(sequence=4))
    assert found.fits(H20), found
    assert found.step_s > 0 and found.days == found.step_s * work.stage.steps * 2 / 86_400


@functools.cache
def stable() -> Work:
    return work_of(A14B, stages_of(A14B, "5")[0])


@pytest.mark.parametrize(
    ("recipe", "parts", "expected"),
    [
        (Recipe(), ("masters", "gradients", "moments", "read in bf16"), 87),
        (Recipe(adam=Adam.NO_FIRST), ("masters", "gradients", "moments", "read in bf16"), 70),
        (Recipe(adam=Adam.EIGHT_BIT), ("masters", "gradients", "moments", "read in bf16"), 61),
        (Recipe(lora=True), ("masters", "gradients", "moments", "read in bf16"), 51),
        (Recipe(adam=Adam.NO_FIRST, offload=True), ("gradients", "read in bf16"), 35),
    ],
    ids=lambda value: value.words() if isinstance(value, Recipe) else "",
)
def test_state_of_stage_5_is_that_of_the_spec(recipe: Recipe, parts: tuple[str, ...], expected: int) -> None:
    """GB a GPU of 8 (n.4). The last keeps gradients on the GPU; FSDP's offload moves them as well."""
    state = state_bytes(parameters(A14B.model), stable(), recipe)
    assert round(sum(state[part] for part in parts) / 8 / GB) == expected
    assert round(parameters(A14B.model).adapters * LORA_RANK / 1e6) == 744


def by_parameters(work: Work) -> dict[str, float]:
    """PFLOP by the rule of n.5: every parameter works on every token, and attention on what it sees."""
    found: dict[str, float] = defaultdict(float)
    config, size = A14B.model, parameters(A14B.model).total
    for run in work.runs:
        layout = run.run.layout
        pairs = visible_pairs(layout, run.run.context + layout, run.run.rule)
        forward = 2 * size * layout.tokens + 4 * pairs * config.dim * config.layers
        found[run.what] += run.times * forward * (4 if run.trained else 1) / 1e15
    return found


def test_work_of_stage_5_is_that_of_the_spec() -> None:
    """n.5: 89 + 6 + 89 + 135 = 320 PFLOP and 9 minutes; a critic pass over ten clips 181. Its prefill is that
    of one expert, its replay that of both."""
    rule = by_parameters(stable())
    made = [rule["rollout"], rule["prefill"] / 2, rule["replay"] * 2, rule["scores"], rule["critic"] / 5 * 10]
    assert made == [pytest.approx(v, abs=1) for v in (89, 6, 89, 135, 181)]
    generator = sum(made[:4])
    assert generator == pytest.approx(320, abs=3)
    assert generator * 1e15 / (8 * 148e12 * 0.5) / 60 == pytest.approx(9, abs=0.1)


def test_a_step_of_stage_5_has_the_passes_that_the_trainer_makes() -> None:
    """Of 80 chunks those of the expert in training are replayed; an update of the critic reads one clip."""
    times: dict[str, float] = defaultdict(float)
    for run in stable().runs:
        times[run.what] += run.times
    assert times == pytest.approx(
        {
            "rollout": 80 * 4,
            "prefill": 79 * 2,
            "replay": 40,
            "replay: anchor": 79 / 2,
            "scores": 10 * 3,
            "critic": 5,
            "probes": 3 * len(PROBES),
        }
    )
    many = replace(stable().stage, stable=StableConfig(critic_steps=10, latents=64))
    found = work_of(A14B, many)
    assert sum(r.times for r in found.runs if r.what == "critic") == pytest.approx(10)
    assert CliRunner().invoke(app, ["plan", "train", "--stage", "5", "--critic-clips", "2"]).exit_code == 2


def test_memory_of_rollouts_grows_with_those_at_once_and_those_of_a_step() -> None:
    """Caches and recorded states of `micro` rollouts at a time; both streams of all 16 of a rank."""
    one, two, half = (
        Planner(A14B, work_of(A14B, replace(stable().stage, micro=micro, batch=batch)), H20)
        .estimate(Recipe(sequence=4, lora=True))
        .gpu
        for micro, batch in ((1, 32), (2, 32), (1, 16))
    )
    cache = kv_bytes(A14B.model, 2 * memory(A14B, 79).tokens) / 4
    assert one["caches"] == half["caches"] == cache and two["caches"] == 2 * cache
    size, low = 56 * 104, 14 * 26
    full, states = 36 * (320 * size + 158 * low), 2 * 16 * 320 * size
    assert one["rollouts"] == 4 * (16 * full + states)
    assert two["rollouts"] == 4 * (16 * full + 2 * states)
    assert half["rollouts"] == 4 * (8 * full + states)
    assert two["activations"] == 2 * one["activations"]


@pytest.mark.parametrize("name", ["1", "2b", "3", "4"])
def test_the_trainer_counts_for_its_mfu_what_the_planner_counts(name: str) -> None:
    """Of stage 4 the teacher's four passes are nearly half."""
    stage = replace(stages_of(A14B, name)[0], histories=(0,))
    work, heads = work_of(A14B, stage), max(schedule_of(A14B).heads(e) for e in A14B.experts)
    main = next(r.run for r in work.runs if r.trained)
    found = stage_flops(A14B.model, stage, main.layout, main.rule, prompts=main.prompts, heads=heads)
    assert found == pytest.approx(sum(r.flops(A14B.model, checkpointing=False) for r in work.runs), rel=1e-12)
    part = replace(stage, trainable=("blocks.0.",))
    less = stage_flops(A14B.model, part, main.layout, main.rule, prompts=main.prompts, heads=heads)
    assert 0.6 < less / found < 0.99


def test_what_waits_is_back_on_the_gpu_between_steps() -> None:
    small = replace(stable(), cache=0, kept=0, played=0)
    state = state_bytes(parameters(A14B.model), small, Recipe(sequence=4))
    found = Planner(A14B, small, H20).estimate(Recipe(sequence=4))
    kept = ("masters", "moments", "average", "read in bf16", OTHERS, COPIES)
    assert found.gpu_bytes == pytest.approx(sum(state[part] for part in kept) / 8)


@pytest.mark.parametrize(("stage", "whole"), [("1", 1), ("2a", 1), ("3", 1), ("4", 2), ("5", 1)])
def test_weights_are_whole_on_every_rank_while_they_are_loaded(stage: str, whole: int) -> None:
    """Stage 4 makes student and teacher before either is sharded."""
    network = 4 * parameters(A14B.model).total
    work = work_of(A14B, stages_of(A14B, stage)[0])
    found = Planner(A14B, work, H20).estimate(Recipe(sequence=4, lora=stage == "5"))
    assert found.loading == pytest.approx(8 * (whole * network + 4 * GB))
    assert found.host_bytes == max(found.loading, sum(found.host.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobs.estimate.recipes.PROCESS_BYTES", 200 * GB)
        assert Planner(A14B, work, H20).estimate(Recipe(sequence=4)).over(H20)[1] > 0


def test_with_offload_what_is_read_and_loaded_is_on_the_host() -> None:
    recipe, size = Recipe(sequence=2, adam=Adam.NO_FIRST, host_ema=True, offload=True), parameters(A14B.model)
    found = Planner(A14B, stable(), H20).estimate(recipe)
    assert "read in bf16" not in found.gpu and found.host["read in bf16"] == pytest.approx(2 * 4 * size.total)
    # Masters of both students and both fakes, two real scores, four copies; and eight ranks with one in fp32.
    assert found.loading == pytest.approx((4 * 4 + 6 * 2 + 8 * 4) * size.total + 32 * GB)
    # A checkpoint has masters and moments of all four, and the averages.
    assert found.host["checkpoint being saved"] == pytest.approx((4 * 8 + 2 * 4) * size.total)


def optimizer_of(stage: Stage, parallel: Parallel) -> torch.optim.Optimizer:
    named = build(TINY.model, 0).named_parameters()
    return make_optimizer(named, stage.optim, offload=parallel.offload)


KINDS = {Adam.FULL: "AdamW", Adam.EIGHT_BIT: "AdamW8bit", Adam.NO_FIRST: "SecondMomentAdam"}


@pytest.mark.parametrize("preset", [TINY, A14B], ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["1", "2a", "2b", "3", "4", "5"])
def test_settings_of_every_recipe_are_taken_by_the_trainer(preset: Preset, name: str, tmp_path: Path) -> None:
    """Whatever the stage's own moments are, the recipe's are trained."""
    work, file, seen = work_of(preset, stages_of(preset, name)[0]), tmp_path / "train.yaml", set[str]()
    for recipe in recipes(preset, work, H20):
        settings = recipe.settings(preset, work, H20)
        told = yaml.safe_dump({**settings, "parallel": {"offload": recipe.offload}})
        if told in seen:
            continue
        seen.add(told)
        file.write_text(yaml.safe_dump(settings), "utf-8")
        config = load(file, None)
        (stage,) = config.selected(name, None)
        found = optimizer_of(stage, config.parallel)
        assert type(found).__name__ == KINDS[recipe.adam]
        assert Adam.of(stage.optim) is recipe.adam
        assert stage.optim.betas[0] == (
            0.0 if recipe.adam is Adam.NO_FIRST else work.stage.optim.betas[0] or 0.9
        )
        assert stage.stable.critic_rank == (LORA_RANK if recipe.lora else 0)
        assert not recipe.lora or stage.stable.critic_lr == ADDITIONS_LR
        assert config.parallel.replicate == recipe.replicate and config.host_ema is recipe.host_ema
    assert len(seen) > 3


@pytest.mark.parametrize("lora", [False, True], ids=["whole critic", "LoRA critic"])
def test_a_recipe_of_stage_5_is_cast_with_optimizers_for_all_that_it_trains(
    lora: bool, tmp_path: Path
) -> None:
    one, file = replace(H20, gpus=1), tmp_path / "train.yaml"
    work = work_of(TINY, stages_of(TINY, "5")[0])
    for adam in Adam:
        file.write_text(yaml.safe_dump(Recipe(adam=adam, lora=lora).settings(TINY, work, one)), "utf-8")
        config = load(file, None)
        (stage,) = config.selected("5", None)
        mesh = make_mesh(config.parallel, "cpu")
        try:
            roles = cast(
                stage,
                config,
                mesh,
                lambda source, expert: build(TINY.model, 0),
                lambda expert: with_bank(build(TINY.model, 0), schedule_of(TINY), expert),
            )
            for expert in TINY.experts:
                critic = roles.fake[expert] if roles.additions is None else roles.additions[expert]
                for trained in (roles.student[expert], critic):
                    made = make_optimizer(named_parameters(trained).items(), stage.optim)
                    assert type(made).__name__ == KINDS[adam]
            assert (roles.additions is not None) is lora and roles.readers is not None
        finally:
            mesh.close()


def test_exact_work_is_less_than_the_rule_because_text_is_projected_once() -> None:
    exact: dict[str, float] = defaultdict(float)
    for run in stable().runs:
        exact[run.what] += run.flops(A14B.model, checkpointing=True) / 1e15
    rule = by_parameters(stable())
    assert all(0.85 < exact[what] / rule[what] < 0.95 for what in ("rollout", "replay", "scores", "critic"))


def test_stage_5_has_a_recipe_and_says_what_does_not_fit() -> None:
    verdict = judge(A14B, stable(), H20, sequence=2)
    assert verdict.best is not None and verdict.best.recipe.offload
    assert all(e.gpu_bytes <= 88 * GB and e.host_bytes <= 1500 * GB for e in verdict.fitting)
    plain = next(e for e in verdict.others if e.recipe == Recipe(sequence=2))
    assert plain.over(H20)[0] == pytest.approx(plain.gpu_bytes - 88 * GB)


def test_the_fastest_recipe_that_fits_is_the_best_and_the_nearest_comes_first() -> None:
    work = work_of(TINY, stages_of(TINY, "3")[0])
    every = sorted(e.gpu_bytes for e in judge(TINY, work, H20, sequence=2).fitting)
    machine = replace(H20, gpu_bytes=every[len(every) // 2])
    verdict = judge(TINY, work, machine, sequence=2)
    assert verdict.fitting and verdict.others
    times = [e.step_s for e in verdict.fitting]
    assert times == pytest.approx(sorted(times), rel=1e-3)
    lacks = [max(e.over(machine)) for e in verdict.others]
    assert lacks == sorted(lacks) and lacks[0] > 0


def test_prompts_are_those_of_the_intervals_that_hold_the_chunks_middles() -> None:
    assert [prompts_of(n) for n in (1, 5, 6, 10, 11)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("preset", [TINY, SMALL, WAN1_3B, A14B], ids=lambda p: p.name)
def test_every_stage_of_every_preset_has_work(preset: Preset) -> None:
    for stage in stages_of(preset, "1-4"):
        work = work_of(preset, stage)
        trained = [r for r in work.runs if r.trained]
        assert sum(r.times for r in trained) == pytest.approx(1)
        assert work.tokens() > 0 and all(r.run.flops(preset.model).total > 0 for r in work.runs)
    assert stages_of(preset, "1")[0].target == CLIP


def test_the_command_answers_in_json_and_its_settings_are_what_was_planned(tmp_path: Path) -> None:
    """Batch and steps of the command are in the file: planned again from it, all numbers are the same."""
    asked = ["--preset", "tiny", "--stage", "4-5", "--gpus", "2", "--sequence", "2", "--batch", "4"]
    done = CliRunner().invoke(app, ["plan", "train", *asked, "--steps", "7", "--json"])
    assert done.exit_code == 0, done.output
    plans = json.loads(done.stdout)
    assert [p["stage"] for p in plans] == ["4", "5"]
    file = tmp_path / "train.yaml"
    for plan in plans:
        assert plan["best"]["gpu_bytes"] == pytest.approx(sum(plan["best"]["gpu"].values()))
        assert plan["best"]["days"] > 0 and f"--stages {plan['stage']} " in plan["command"]
        file.write_text(yaml.safe_dump(plan["settings"]), "utf-8")
        config = load(file, None)
        assert config.preset == "tiny"
        assert config.parallel.sequence == 2 and config.parallel.shards(2) == 1
        (stage,) = config.selected(plan["stage"], None)
        assert (stage.steps, stage.batch, stage.micro) == (7, 4, 1)
        machine = Machine(2, 88 * GB, 1500 * GB)
        again = judge(TINY, work_of(TINY, stage), machine, config.parallel.sequence)
        assert json.loads(json.dumps(values(TINY, again))) == plan


def test_the_command_shows_parts_recipes_and_a_command_and_fails_where_none_fits() -> None:
    asked = ["plan", "train", "--preset", "tiny", "--stage", "1", "--gpus", "1"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    for expected in (
        "masters",
        "moments",
        "activations",
        "torchrun --nproc-per-node 1",
        "in training",
        "being loaded",
    ):
        assert expected in done.stdout
    none = CliRunner().invoke(app, [*asked, "--limit", "0.1", "--host-mem", "1"])
    assert none.exit_code == 1 and "no recipe fits" in none.stdout


def test_what_cannot_be_planned_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="no stage '7': one of 1, 2a, 2b, 3, 4, 5"):
        stages_of(A14B, "7")
    work = work_of(A14B, replace(stages_of(A14B, "3")[0], batch=9))
    with pytest.raises(ConfigError, match="9 cannot be shared by 8 GPUs"):
        judge(A14B, work, H20, sequence=4)


def test_a_corpus_after_plan_still_means_its_captions(tmp_path: Path) -> None:
    """An argument, or an option, that is no command goes to the plan of captions."""
    for asked in (["plan", str(tmp_path)], ["plan", "--clips", "3", str(tmp_path)]):
        done = CliRunner().invoke(app, asked)
        assert done.exit_code != 0 and "No such command" not in done.output
        assert str(tmp_path) in str(done.exception)
