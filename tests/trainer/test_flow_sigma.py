"""Noise levels follow their law, inside the range of their expert, each by its own key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from tests.trainer.model_support import PRESET
from trainer.config import PRESETS, ConfigError
from trainer.curriculum import Draw, SigmaLaw
from trainer.objectives.sigma import draw_sigma, expert_range

MANY = range(600)
LAWS = [SigmaLaw(), SigmaLaw(mean=0.5, std=0.7, shift=7.0), SigmaLaw(draw=Draw.UNIFORM, shift=3.0)]


def closed_form(law: SigmaLaw, sigma: np.ndarray) -> np.ndarray:
    """Distribution of the whole law: of u, at the u of a sigma. Written from section e alone."""
    u = sigma / (law.shift - (law.shift - 1) * sigma)
    if law.draw is Draw.UNIFORM:
        return u
    with np.errstate(divide="ignore"):
        return stats.norm.cdf((np.log(u) - np.log1p(-u) - law.mean) / law.std)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("expert", ["high", "low"])
def test_levels_follow_the_law_cut_to_the_range_of_the_expert(law: SigmaLaw, expert: str) -> None:
    drawn = draw_sigma(law, PRESET, expert, MANY, 8, seed=5).flatten().numpy()
    low, high = expert_range(PRESET, expert)
    ends = closed_form(law, np.array([low, high]))
    found = stats.kstest(drawn, lambda s: (closed_form(law, s) - ends[0]) / (ends[1] - ends[0]))
    assert found.pvalue > 0.01
    assert low <= drawn.min() and drawn.max() <= high
    assert {PRESET.expert(s) for s in drawn} == {expert}


def test_a_model_of_one_network_has_the_whole_law() -> None:
    law = SigmaLaw()
    drawn = draw_sigma(law, PRESETS["wan1_3b"], "single", MANY, 8, seed=5).flatten().numpy()
    assert stats.kstest(drawn, lambda s: closed_form(law, s)).pvalue > 0.01


def test_released_boundary_has_the_pre_images_of_the_spec() -> None:
    # Source: spec/worldplay2.md e: sigma 0.9 <-> u 0.643 at shift 5, so 35.7 % of a uniform law are high.
    law = SigmaLaw(draw=Draw.UNIFORM, shift=5.0)
    drawn = draw_sigma(law, PRESETS["wan1_3b"], "single", range(4000), 4, seed=1)
    assert float((drawn >= 0.9).double().mean()) == pytest.approx(0.357, abs=0.01)


def test_a_level_depends_on_its_position_alone() -> None:
    together = draw_sigma(SigmaLaw(), PRESET, "high", (3, 8, 5), 4, seed=2)
    alone = draw_sigma(SigmaLaw(), PRESET, "high", (8,), 4, seed=2)
    assert torch.equal(together[1:2], alone)
    assert not torch.equal(alone, draw_sigma(SigmaLaw(), PRESET, "high", (8,), 4, seed=3))


def test_an_expert_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no expert 'single' in preset tiny"):
        draw_sigma(SigmaLaw(), PRESET, "single", (0,), 1, seed=0)
