"""The frozen distribution of scores: made once, by game, from a sample that is the same everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.quality.facts import ScaleError, read_facts
from pipeline.quality.select import select
from pipeline.quality.thresholds import KIND, freeze_first, frozen, measure
from pipeline.statistics import freeze, versions
from pipeline.store import Store
from schemas.policy import AXES, PERCENTILES, Applied, Policy
from tests.pipeline.selection_corpus import STAGES, Made, make

STYLES = {"photo": 0.5, "cel_shaded": 0.75, "pixel": 0.3}


def styled(count: int, names: str = "c", **means: float) -> list[Made]:
    """Clips of groups with equal spread about their own level, on every axis."""
    rng = np.random.default_rng(len(names))
    return [
        Made(
            f"{names}-{group}-{i}",
            group,
            scores={a: float(np.clip(rng.normal(mean, 0.05), 0, 1)) for a in AXES},
        )
        for group, mean in means.items()
        for i in range(count)
    ]


def test_styles_of_equal_quality_keep_equal_shares(tmp_path: Path) -> None:
    """Faults Q5: scores normalised on filmed video saturate or sink on rendered ones."""
    corpus = make(str(tmp_path / "corpus"), styled(200, **STYLES))
    policy = Policy(floor=dict.fromkeys(AXES, 0.0), enough=dict.fromkeys(AXES, 1.0))
    report = select(corpus, policy, STAGES)
    kept = {s.group: s.tiers["high"] / 200 for s in report.shares}
    assert set(kept) == set(STYLES) and max(kept.values()) - min(kept.values()) < 0.12
    assert all(0.4 < share < 0.75 for share in kept.values())
    one_level = {s.group: s.tiers["out"] for s in select(corpus, at_most(0.4), STAGES).shares}
    assert one_level["pixel"] > 190 and one_level["photo"] < 60


def at_most(level: float) -> Policy:
    return Policy(tiers={"base": {}}, floor=dict.fromkeys(AXES, level))


def test_the_first_selection_freezes_a_record_and_growth_never_moves_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "corpus")
    corpus = make(folder, styled(80, photo=0.5))
    select(corpus, Policy(), STAGES)
    first = corpus.read(f"statistics/{KIND}-v0001.json")
    before = Applied.model_validate_json(corpus.read("selection/policy.json"))
    old = corpus.read("selection/g0000-p00000.parquet")
    make(folder, styled(300, "later", photo=0.3, pixel=0.7))
    report = select(corpus, Policy(), STAGES)
    after = Applied.model_validate_json(corpus.read("selection/policy.json"))
    assert versions(corpus, KIND) == [1] and corpus.read(f"statistics/{KIND}-v0001.json") == first
    assert after.groups["photo"] == before.groups["photo"]
    assert corpus.read("selection/g0000-p00000.parquet") == old
    assert after.groups["pixel"]["noise"].of == "all"
    assert any("pixel" in note for note in report.notes)


def test_a_new_version_is_what_calibration_makes_and_moves_the_thresholds(tmp_path: Path) -> None:
    corpus = make(str(tmp_path / "corpus"), styled(80, photo=0.5))
    select(corpus, Policy(), STAGES)
    make(str(tmp_path / "corpus"), styled(300, "later", photo=0.35))
    assert freeze(corpus, KIND, measure(read_facts(corpus, STAGES), 50)) == 2
    assert select(corpus, Policy(), STAGES).thresholds_version == 2


def test_a_record_holds_every_percentile_by_axis_and_says_which_groups_are_too_small(tmp_path: Path) -> None:
    corpus = make(str(tmp_path / "corpus"), [*styled(60, photo=0.5), *styled(9, pixel=0.4)])
    record = measure(read_facts(corpus, STAGES), 50)
    assert set(record.groups) == {"photo"} and record.small == {"pixel": 9}
    assert record.pooled["noise"].n == 69 and record.groups["photo"]["noise"].n == 60
    scores = read_facts(corpus, STAGES).scores[:, AXES.index("noise")]
    assert list(record.pooled["noise"].percentiles.values()) == pytest.approx(
        np.percentile(scores, PERCENTILES), abs=1e-6
    )
    assert record.of("pixel")[0] == "all" and record.of("photo")[0] == "photo"


def test_a_clip_without_a_game_belongs_to_its_source(tmp_path: Path) -> None:
    corpus = make(str(tmp_path / "corpus"), [Made(f"c{i}", game="") for i in range(60)])
    assert set(measure(read_facts(corpus, STAGES), 50).groups) == {"folder:/somewhere"}


def test_the_sample_is_chosen_by_id_and_grows_with_the_corpus_as_little_as_can_be(tmp_path: Path) -> None:
    corpus = make(str(tmp_path / "corpus"), styled(200, photo=0.5, pixel=0.4))
    some = measure(read_facts(corpus, STAGES), 50, sample=60)
    assert {g: d["noise"].n for g, d in some.groups.items()} == {"photo": 60, "pixel": 60}
    assert some == measure(read_facts(corpus, STAGES), 50, sample=60)
    assert some != measure(read_facts(corpus, STAGES), 50)


def test_a_handful_of_clips_is_judged_by_floors_alone(tmp_path: Path) -> None:
    corpus = make(str(tmp_path / "corpus"), styled(12, photo=0.5))
    report = select(corpus, Policy(), STAGES)
    assert report.tiers == {"high": 0, "base": 0}  # no shards here
    assert report.shares[0].tiers == {"high": 12, "base": 0, "out": 0}
    assert "thresholds rest on 12 clips, 50 are the least for percentiles: floors alone" in report.notes


def test_nothing_is_frozen_while_nothing_is_scored(tmp_path: Path) -> None:
    corpus = make(str(tmp_path / "corpus"), [Made("open", ends=("quality", None, ""))])
    assert select(corpus, Policy(), STAGES).thresholds_version == 0
    assert frozen(corpus) is None


def test_thresholds_of_another_scorer_stop_with_one_line(tmp_path: Path) -> None:
    folder = str(tmp_path / "corpus")
    corpus = make(folder, styled(60, photo=0.5))
    freeze_first(corpus, read_facts(corpus, STAGES), 50)
    make(folder, [Made("new", facts={"aesthetics_by": "laion"})])
    with pytest.raises(ScaleError, match="come from laion and proxy, which do not compare"):
        select(corpus, Policy(), STAGES)
    other = make(str(tmp_path / "other"), [Made("new", facts={"aesthetics_by": "laion"})])
    _copy(corpus, other)
    with pytest.raises(
        ScaleError, match="from laion, their thresholds from proxy: run `wp2 calibrate-quality"
    ):
        select(other, Policy(), STAGES)


def _copy(source: Store, target: Store) -> None:
    path = f"statistics/{KIND}-v0001.json"
    target.write(path, source.read(path))
