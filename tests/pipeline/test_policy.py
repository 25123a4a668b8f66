"""The policy: thresholds between floor and enough, tiers in order, reasons, rules on flags, one scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.quality.facts import ScaleError
from pipeline.quality.select import Report, select
from pipeline.store import Store
from pipeline.tables import batches
from schemas.policy import AXES, Distribution, Policy, QualityStatistics, threshold
from schemas.quality import Status
from tests.pipeline.selection_corpus import STAGES, Made, make

PLAIN = Policy(tiers={"high": {"sharpness": 25}, "base": {"sharpness": 5}}, floor={"sharpness": 0.2})


def rows(corpus: Store) -> dict[str, dict[str, Any]]:
    """Rows of the table `selection` by the name of the clip."""
    found = [r for b in batches(corpus, "selection") for r in b.to_pylist()]
    return {r["source_path"].removesuffix(".mp4"): r for r in found}


def judged(folder: Path, clips: list[Made], policy: Policy = PLAIN) -> dict[str, dict[str, Any]]:
    corpus = make(str(folder), clips)
    select(corpus, policy, STAGES)
    return rows(corpus)


def statistics(low: float, high: float) -> QualityStatistics:
    held = Distribution(
        n=100, percentiles=dict(zip((1, 5, 10, 25, 50, 75, 90, 99), np.linspace(low, high, 8)))
    )
    return QualityStatistics(
        min_clips=50,
        sample=None,
        aesthetics_by="proxy",
        pooled=dict.fromkeys(AXES, held),
        groups={"doom": dict.fromkeys(AXES, held)},
        small={},
    )


@pytest.mark.parametrize(
    ("low", "high", "value", "by"),
    [(0.3, 0.6, 0.3 + 0.3 * 3 / 7, "p25 of doom"), (0.0, 0.1, 0.2, "floor"), (0.9, 1.0, 0.8, "enough")],
)
def test_a_threshold_is_the_percentile_held_between_floor_and_enough(
    low: float, high: float, value: float, by: str
) -> None:
    found = threshold(PLAIN, statistics(low, high), "doom", "high", "sharpness")
    assert found.by == by and found.value == pytest.approx(value)


def test_a_clip_falls_to_the_first_tier_that_it_reaches_with_ordered_reasons(tmp_path: Path) -> None:
    clips = [Made(f"c{i:02}", scores={"sharpness": 0.30 + 0.004 * i}) for i in range(100)]
    low = {"sharpness": 0.12, "noise": 0.01, "smoothness": 0.02}
    found = judged(
        tmp_path / "corpus", [*clips, Made("bad", scores=low), Made("fine", scores={"sharpness": 0.9})]
    )
    assert {found[n]["tier"] for n in ("fine", "c99", "c40")} == {"high"}
    assert found["c99"]["reasons"] == "" and found["fine"]["reasons"] == ""
    assert found["c10"]["tier"] == "base"
    assert found["c10"]["reasons"] == "sharpness: 0.340 under 0.397 (p25 of doom)"
    assert found["c00"]["tier"] == "out"
    assert found["bad"]["tier"] == "out"
    reasons = found["bad"]["reasons"].split("|")
    assert [r.split(":")[0] for r in reasons] == ["sharpness", "noise", "smoothness"]
    assert reasons[1:] == ["noise: 0.010 under 0.300 (floor)", "smoothness: 0.020 under 0.350 (floor)"]


def test_no_share_is_cut_off_a_group_whose_worst_is_good_enough(tmp_path: Path) -> None:
    """Percentiles alone would refuse a twentieth of any corpus on every axis."""
    scores = dict.fromkeys(AXES, 0.95)
    clips = [Made(f"c{i:02}", scores={**scores, AXES[i % 7]: 0.9 + i / 1000}) for i in range(100)]
    found = judged(tmp_path / "corpus", clips, Policy())
    assert {r["tier"] for r in found.values()} == {"high"}


def test_one_low_axis_is_enough_and_an_unmeasured_one_says_nothing(tmp_path: Path) -> None:
    corpus = make(
        str(tmp_path / "corpus"),
        [Made("dull", scores={"aesthetics": 0.03}), Made("unknown", scores={"smoothness": None})],
    )
    report = select(corpus, Policy(), STAGES)
    found = rows(corpus)
    assert found["dull"]["reasons"] == "aesthetics: 0.030 under 0.050 (floor)"
    assert found["unknown"]["tier"] == "high" and found["unknown"]["smoothness"] is None
    assert any(n.startswith("smoothness was not measured on 1 of 2") for n in report.notes)


def test_flags_are_kept_and_only_filtered_where_the_policy_says_so(tmp_path: Path) -> None:
    clips = [
        Made("hud", facts={"hud_share": 0.4}),
        Made("text", facts={"text_share": 0.31}),
        Made("mark", facts={"watermark": True}),
        Made("clean"),
    ]
    assert {r["tier"] for r in judged(tmp_path / "off", clips, Policy()).values()} == {"high"}
    strict = Policy(max_hud_share=0.3, max_text_share=0.3, refuse_watermark=True)
    found = judged(tmp_path / "on", clips, strict)
    assert found["clean"]["tier"] == "high"
    assert found["hud"]["reasons"] == "hud_share: 0.400 over 0.3"
    assert found["text"]["reasons"] == "text_share: 0.310 over 0.3"
    assert found["mark"]["tier"] == "out" and found["mark"]["reasons"].startswith("watermark")


def test_refused_clips_keep_their_own_first_reason_and_open_ones_are_pending(tmp_path: Path) -> None:
    clips = [
        Made("ok"),
        Made("frozen", ends=("gates", Status.REJECTED, "frozen: one picture")),
        Made("crash", ends=("pose", Status.FAILED, "timeout: 60 s")),
        Made("open", ends=("actions", None, "")),
    ]
    found = judged(tmp_path / "corpus", clips)
    assert (found["frozen"]["tier"], found["frozen"]["reasons"]) == ("out", "frozen: one picture")
    assert (found["crash"]["tier"], found["crash"]["reasons"]) == ("out", "timeout: 60 s")
    assert (found["open"]["tier"], found["open"]["reasons"]) == ("pending", "")


def left(report: Report) -> int:
    return sum(n for step in report.steps for n in step.left.values())


def test_reason_counts_and_tiers_add_up_to_the_clips(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    ends = [None, None, None, ("gates", Status.REJECTED, "frozen: x"), ("actions", None, "")]
    ends += [("ingest", Status.REJECTED, "truncated: y"), ("quality", Status.FAILED, "internal: z")]
    clips = [
        Made(
            f"c{i}",
            "ab"[i % 2],
            scores={"noise": float(rng.random())},
            ends=ends[int(rng.integers(len(ends)))],
        )
        for i in range(300)
    ]
    report = select(make(str(tmp_path / "corpus"), clips, partition_size=70), Policy(), STAGES)
    assert report.clips == 300 == report.recordings
    assert left(report) + sum(report.tiers.values()) == 300
    passed = [s.clips for s in report.steps]
    assert passed == sorted(passed, reverse=True)
    assert {s.name: s.left for s in report.steps}["gates"] == {
        "rejected: frozen": sum(c.ends is not None and c.ends[0] == "gates" for c in clips)
    }
    assert sum(sum(share.tiers.values()) for share in report.shares) == sum(c.ends is None for c in clips)


def test_sensitivity_counts_the_clips_that_hang_on_a_threshold(tmp_path: Path) -> None:
    clips = [Made(f"c{i}", scores={"noise": 0.105 if i < 7 else 0.095 if i < 10 else 0.5}) for i in range(40)]
    report = select(
        make(str(tmp_path / "corpus"), clips), Policy(tiers={"base": {}}, floor={"noise": 0.1}), STAGES
    )
    moved = {(m.tier, m.axis): (m.lower, m.higher) for m in report.sensitivity}
    assert moved["base", "noise"] == (3, 7)
    assert moved["base", "sharpness"] == (0, 0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"floor": {"aesthetics": 5}}, "less than or equal to 1"),
        ({"enough": {"noise": 80}}, "less than or equal to 1"),
        ({"floor": {"sharpnes": 0.3}}, "'sharpness', 'detail'"),
        ({"floor": {"noise": 0.9}}, "floor.noise 0.9 is over enough.noise 0.8"),
        ({"tiers": {"high": {"noise": 30}}}, "should be 1, 5, 10, 25, 50, 75, 90 or 99"),
        ({"tiers": {"out": {}}}, "tier 'out'"),
    ],
)
def test_a_threshold_on_another_scale_or_of_nothing_known_is_refused(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Policy.model_validate(data)


def test_a_score_on_another_scale_stops_with_one_line(tmp_path: Path) -> None:
    corpus = make(str(tmp_path / "corpus"), [Made("ok"), Made("laion", scores={"aesthetics": 5.4})])
    with pytest.raises(ScaleError, match=r"aesthetics of clip [0-9a-f]{16} is 5.4; scores run from 0 to 1"):
        select(corpus, Policy(), STAGES)
