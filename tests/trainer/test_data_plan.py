"""The plan: which samples a step trains on, whoever asks and whenever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from trainer.config import PRESETS
from trainer.curriculum import STAGES, Stage, curriculum, select
from trainer.data import plan as plans
from trainer.data.plan import Plan, PlanError, SampleTable, latents_read
from trainer.data.stream import share

SMALL = PRESETS["small"]


def table(navigation: int, events: int = 0, latents: int = 160, known: int = 160) -> SampleTable:
    n = navigation + events
    ids = np.array([f"clip{i:06d}" for i in range(n)])
    same = np.full(n, "", np.str_)
    kinds = np.array(["navigation"] * navigation + ["event"] * events)
    return SampleTable(
        np.arange(n), ids, kinds, np.full(n, latents), np.full(n, known), np.full(n, "train"), same, same
    )


def stage(name: str, **changes: object) -> Stage:
    return replace(select(curriculum("small"), name)[0], **changes)


def drawn(plan: Plan, steps: range) -> list[plans.Draw]:
    return [draw for step in steps for draw in plan.batch(step)]


def test_17_samples_in_batches_of_4_come_out_once_an_epoch() -> None:
    plan = Plan(table(17), stage("1", batch=4, micro=4), SMALL, 3)
    every = drawn(plan, range(3 * 17))
    assert Counter((d.epoch, d.row) for d in every) == {(e, r): 1 for e in range(12) for r in range(17)}
    first = [[d.row for d in every if d.epoch == e] for e in range(12)]
    assert len({tuple(order) for order in first}) == 12  # another order each time
    assert [d.position for d in every] == list(range(204))


def test_with_histories_every_sample_of_an_epoch_comes_out_once_and_batches_have_one_history() -> None:
    chosen = stage("3", events=0.25)
    plan = Plan(table(30, 7), chosen, SMALL, 0)
    batches = [plan.batch(step) for step in range(400)]
    assert all(len({d.history for d in batch}) == 1 and len(batch) == 8 for batch in batches)
    every = [d for batch in batches for d in batch]
    seen = Counter((d.row >= 30, d.epoch, d.row) for d in every)
    assert max(seen.values()) == 1
    # At most batch - 1 elements of each history wait at the end; all before them are out.
    waiting = len(chosen.histories) * 7
    assert sum(d.position >= 3200 for d in every) <= waiting
    assert set(range(3200)) - {d.position for d in every} <= set(range(3200 - 40 * waiting, 3200))
    assert {d.history for d in every} == set(chosen.histories)


@pytest.mark.parametrize("share", [0.1, 0.25, 1 / 3, 1.0])
def test_kinds_interleave_at_exactly_the_stated_share(share: float) -> None:
    plan = Plan(table(40, 12), stage("2b", histories=(2,), events=share), SMALL, 1)
    rows = np.array([d.row for d in drawn(plan, range(300))])
    counts = np.cumsum(rows >= 40)
    expected = np.arange(1, len(rows) + 1) * share
    assert np.all(np.abs(counts - expected) <= 1)


def test_a_step_is_the_same_in_a_new_plan_at_any_place_and_for_any_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made() -> Plan:
        return Plan(table(50, 9), stage("3"), SMALL, 5)

    unbroken = [made().batch(step) for step in range(60)]
    plan = made()
    assert [plan.batch(step) for step in (57, 3, 20, 59, 0)] == [unbroken[s] for s in (57, 3, 20, 59, 0)]
    monkeypatch.setattr(plans, "_BLOCK", 13)
    assert [made().batch(step) for step in (0, 31, 59)] == [unbroken[s] for s in (0, 31, 59)]


def test_another_seed_or_stage_is_another_order() -> None:
    rows = {
        tuple(d.row for d in drawn(Plan(table(50), stage(name, events=0.0), SMALL, seed), range(6)))
        for name, seed in (("1", 0), ("1", 1), ("2b", 0))
    }
    assert len(rows) == 3


def test_the_order_of_the_index_and_other_samples_move_none() -> None:
    def ids(samples: SampleTable, steps: int) -> list[tuple[str, int, int]]:
        plan = Plan(samples, stage("2b", events=0.0), SMALL, 0)
        name = dict(zip(samples.row.tolist(), samples.sample_id.tolist(), strict=True))
        return [(name[d.row], d.epoch, d.history) for d in drawn(plan, range(steps))]

    whole = table(40)
    shuffled = whole.filter(np.random.default_rng(0).permutation(40))
    assert ids(shuffled, 15) == ids(whole, 15)
    few = [entry for entry in ids(whole.filter(np.arange(40) != 7), 300) if entry[1] < 30]
    assert set(few) == {e for e in ids(whole, 330) if e[0] != "clip000007" and e[1] < 30}


def test_filtered_samples_keep_their_row_of_the_index() -> None:
    kept = table(40).filter(np.arange(40) % 4 == 3)
    assert {d.row for d in drawn(Plan(kept, stage("1"), SMALL, 0), range(5))} == set(range(3, 40, 4))


def test_a_history_never_reaches_beyond_known_actions_and_short_clips_are_left_out() -> None:
    samples = table(60)
    known = np.where(np.arange(60) % 3 == 0, 12, np.where(np.arange(60) % 3 == 1, 25, 160))
    samples = replace(samples, actions_known=known)
    chosen = stage("3", events=0.0, histories=(0, 1, 2, 4, 6))
    plan = Plan(samples, chosen, SMALL, 0)
    longest: dict[int, int] = {}
    for d in drawn(plan, range(200)):
        longest[d.row] = max(longest.get(d.row, 0), latents_read(chosen, SMALL, d.history))
    assert set(longest) == set(np.flatnonzero(known > 12).tolist())
    assert {longest[row] for row in range(1, 60, 3)} == {24}
    assert {longest[row] for row in range(2, 60, 3)} == {40}
    assert plan.describe(1).left_out == 20


def test_what_is_announced_is_what_comes() -> None:
    plan = Plan(table(23, 4), stage("2b", events=0.1), SMALL, 2)
    told = plan.describe(70)
    every = drawn(plan, range(70))
    assert told.draws == {
        "navigation": sum(d.row < 23 for d in every),
        "event": sum(d.row >= 23 for d in every),
    }
    assert told.histories == Counter(d.history for d in every)
    assert told.epochs["event"] == pytest.approx(told.draws["event"] / 4)
    assert "70 steps of 8 samples" in str(told) and "(90." in str(told)


def test_ranks_share_every_step_and_another_number_of_them_goes_on_in_the_same_order() -> None:
    chosen = stage("2b", events=0.0, batch=8, micro=2)
    plan = Plan(table(33), chosen, SMALL, 0)
    unbroken = drawn(plan, range(20))

    def ran(world: int, steps: range) -> list[plans.Draw]:
        parts = [[plan.batch(s)[share(chosen, rank, world)] for s in steps] for rank in range(world)]
        assert len({len(part) for own in parts for part in own}) == 1  # as many samples on every rank
        return [d for per_step in zip(*parts, strict=True) for own in per_step for d in own]

    for world in (1, 2, 4):
        assert ran(world, range(20)) == unbroken
    assert ran(2, range(7)) + ran(4, range(7, 13)) + ran(1, range(13, 20)) == unbroken


@pytest.mark.parametrize(("batch", "micro", "world"), [(8, 8, 3), (4, 4, 8), (12, 4, 2)])
def test_what_does_not_split_is_refused_before_the_first_step(batch: int, micro: int, world: int) -> None:
    with pytest.raises(PlanError, match="do not split"):
        share(stage("1", batch=batch, micro=micro), 0, world)


def test_a_mixture_without_samples_of_a_kind_is_refused_in_one_line() -> None:
    with pytest.raises(PlanError, match="10% of its samples from event clips, and of 0 none"):
        Plan(table(5), stage("2a"), SMALL, 0)
    with pytest.raises(PlanError, match="of 5 none has 32 latents"):
        Plan(table(5, known=31), stage("1"), SMALL, 0)


def test_the_last_of_ten_epochs_of_70000_samples_is_found_at_once() -> None:
    chosen = STAGES[3]
    plan = Plan(table(63_000, 7_000, 240, 240), chosen, PRESETS["a14b"], 0)
    step = 10 * 70_000 // chosen.batch
    assert max(d.epoch for d in plan.batch(step)) in (9, 10, 11)
    assert all(b - a >= 0 for a, b in pairwise(plan._begins))
