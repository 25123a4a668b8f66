"""`history` rises and falls with what a model uses: a denoiser made by hand reads actions and memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from jobs.corpus_reader import Corpus
from jobs.evaluate import history as measure
from jobs.evaluate.history import Condition, HistoryOptions, Reading
from jobs.evaluate.page import write
from jobs.evaluate.world import EvaluationError
from pipeline.corpus import open_corpus
from tests.jobs.train_corpus import write_corpus
from tests.trainer.flow_support import ByHand, predicted
from tests.trainer.model_support import PRESET, action_rows, draw
from trainer.curriculum import Objective, Stage
from trainer.data.batch import Batch
from trainer.data.plan import Draw
from trainer.data.sample import make_batch
from trainer.model.wan import Inputs
from trainer.objectives.sigma import even_levels

HISTORY, YAW = 4, 1
PATTERN = draw(3, 16, *PRESET.geometry.latent)
STAGES = {
    "2b": Stage("2b", Objective.CLIP, None, 1, 8, (HISTORY,)),
    "3": Stage("3", Objective.CHUNKS, None, 1, PRESET.chunk, (HISTORY,)),
    "2a": Stage("2a", Objective.QUERIES, None, 1, 4, (HISTORY,)),
}


def world(stage: Stage, clips: int = 8) -> Batch:
    """Clips whose every latent is the clip's own picture, moved by the yaw of its row, and a little noise."""
    latents = HISTORY * PRESET.chunk + (0 if stage.name == "2a" else stage.target)
    picture = draw(5, clips, 16, 1, *PRESET.geometry.latent)
    actions = torch.cat([action_rows(50 + k, latents) for k in range(clips)])
    clean = picture + 0.3 * actions[:, None, :, YAW, None, None] * PATTERN[None, :, None]
    clean = clean + 0.1 * draw(6, *clean.shape)
    high, low = PRESET.geometry.latent, PRESET.geometry.low_latent
    return Batch(
        tuple(range(clips)),
        tuple(f"clip{k}" for k in range(clips)),
        HISTORY,
        clean,
        torch.zeros(clips, 20, latents, *high),
        torch.zeros(clips, 36, latents // 2, *low),
        actions,
        torch.zeros(clips, 1, 3, PRESET.model.text_dim),
        (0,) * (latents // PRESET.chunk),
        torch.zeros(2, PRESET.model.text_dim),
    )


def by_hand(inputs: Inputs) -> Tensor:
    """The velocity of what memory and actions say: the picture is the memory's mean without its motion."""
    noisy, count = predicted(inputs), inputs.sigma.shape[1]
    yaw = 0.3 * inputs.actions[:, None, :, YAW, None, None] * PATTERN[None, :, None]
    if inputs.history is not None:
        known = inputs.history.full[:, :16]
        picture = (known - yaw[:, :, : known.shape[2]]).mean(2, keepdim=True)
    else:
        times = list(inputs.plan.layout.times[: inputs.latents.shape[2] - count])
        picture = (inputs.latents[:, :16, :-count] - yaw[:, :, times]).mean(2, keepdim=True)
    said = picture + yaw[:, :, list(inputs.plan.layout.times[-count:])]
    return (noisy - said) / inputs.sigma.float()[:, None, :, None, None]


def readings(stage: Stage, model: ByHand | None = None) -> list[Reading]:
    batch = world(stage)
    found: list[Reading] = []
    for expert in PRESET.experts:
        levels = even_levels(stage.sigma, PRESET, expert, 2)
        found += measure.read(model or ByHand(by_hand), batch, stage, PRESET, expert, levels, seed=1)
    return found


@pytest.mark.parametrize("name", STAGES)
def test_what_is_made_wrong_costs_a_model_that_uses_it(name: str) -> None:
    found = readings(STAGES[name])
    for condition in (Condition.ACTIONS, Condition.OTHER, Condition.ZEROED):
        difference = measure.worse(found, condition)
        assert difference.low > 0, condition
        assert difference.groups == 8 and difference.n == 32
    assert measure.losses(found, Condition.OWN).mean < 0.1


def test_a_model_that_uses_neither_is_seen_to_use_neither() -> None:
    blind = ByHand(lambda inputs: predicted(inputs) / inputs.sigma.float()[:, None, :, None, None])
    found = readings(STAGES["2b"], blind)
    for condition in (Condition.ACTIONS, Condition.OTHER, Condition.ZEROED):
        assert measure.worse(found, condition).mean == 0.0


@pytest.mark.parametrize("condition", [Condition.ACTIONS, Condition.OTHER, Condition.ZEROED])
def test_the_loss_rises_with_every_grade_of_corruption(condition: Condition) -> None:
    stage, model = STAGES["2b"], ByHand(by_hand)
    batch = world(stage)
    layout, rule = measure.layout_of(stage, PRESET, HISTORY, condition)
    grades = [
        float(measure.error(model, batch, stage, layout, rule, 0.8, 1, 0, condition, share).mean())
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert all(b > a for a, b in itertools.pairwise(grades)), grades


def test_the_window_costs_no_more_tokens_than_the_memory_it_stands_for() -> None:
    from trainer.model.layout import memory

    for history in (2, 4, 8, 16):
        window = measure.window(PRESET, history)
        budget = memory(PRESET, history).tokens
        assert budget - PRESET.grid.tokens < window.tokens <= budget or len(window) == 4 * history
        assert window.times == tuple(range(4 * history - len(window), 4 * history))


def test_actions_of_the_past_stay_when_those_of_the_target_are_swapped() -> None:
    stage, model = STAGES["2b"], ByHand(by_hand)
    batch = world(stage)
    list(measure.read(model, batch, stage, PRESET, "low", torch.tensor([0.5]), 1, [Condition.ACTIONS]))
    given = model.seen[0].actions
    past = HISTORY * PRESET.chunk
    assert torch.equal(given[:, :past], batch.actions[:, :past])
    assert torch.equal(given[:, past:], batch.actions.roll(1, 0)[:, past:])


def test_held_out_clips_of_a_corpus_are_read_and_become_a_page(tmp_path: Path) -> None:
    corpus = Corpus.open(open_corpus(write_corpus(tmp_path / "corpus", train=1, val=3)))
    table = corpus.table.filter(corpus.table.split == "val")
    stage = Stage("2b", Objective.CLIP, None, 1, 8, (2, 4))
    options = HistoryOptions(clips=3, batch=2, levels=1, histories=(2, 4))
    models = {expert: ByHand(by_hand) for expert in PRESET.experts}
    found = measure.measure(models, PRESET, stage, table, corpus.read, options, torch.device("cpu"))
    assert {r.sample for r in found} == {"val00", "val01", "val02"}
    assert {r.history for r in found} == {2, 4}
    page = write(measure.report("by hand", found, {}), tmp_path / "page")
    assert "Loss by noise level" in page.read_text()
    # The same clip is asked the same way in whatever batch it lies.
    draws = [Draw(int(k), 0, int(k), 4) for k in table.row[:2]]
    batch = make_batch(draws, corpus.read, measure.held(stage, PRESET), PRESET, 0)
    again = list(
        measure.read(
            ByHand(by_hand), batch, stage, PRESET, "high", even_levels(stage.sigma, PRESET, "high", 1), 0
        )
    )
    own = {r.sample: r.loss for r in found if (r.history, r.expert, r.condition) == (4, "high", "own")}
    assert all(np.isclose(own[r.sample], r.loss) for r in again if r.condition is Condition.OWN)
    with pytest.raises(EvaluationError, match="no two of 3 clips have 88 latents"):
        long = HistoryOptions(histories=(20,))
        measure.measure(models, PRESET, stage, table, corpus.read, long, torch.device("cpu"))


def test_a_loss_that_is_no_number_ends_the_measure_by_name() -> None:
    broken = ByHand(lambda inputs: by_hand(inputs) * (torch.nan if inputs.sigma.max() > 0.95 else 1.0))
    with pytest.raises(EvaluationError, match=r"clip clip0, expert high, sigma .*, own: the loss is nan"):
        readings(STAGES["2b"], broken)
