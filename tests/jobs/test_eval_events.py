"""Events: test sets, videos of them, and a judge over real HTTP whose replies are scripted."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import jobs.commands.evaluate_events  # noqa: F401
from jobs.commands.evaluate import evaluate
from jobs.evaluate import judge_prompt
from jobs.evaluate.event_cases import (
    Category,
    EventSet,
    action_of,
    make_cases,
    read_cases,
)
from jobs.evaluate.events import (
    EventReport,
    MadeWith,
    compare,
    judge_videos,
    make_videos,
    page_of,
    read_report,
)
from jobs.evaluate.judge import JudgeConfig, drawn_films
from jobs.evaluate.judge_prompt import PROMPT_SHA256, prompt_sha256
from jobs.evaluate.page import write
from jobs.evaluate.world import Case, EvaluationError
from jobs.video import video_writer
from pipeline.caption.client import EndpointConfig, EndpointError
from pipeline.caption.frames import Limits
from pipeline.frames import frame_pass
from pipeline.shards.read import read_index, read_sample
from pipeline.store import Store
from schemas.action import AXES
from schemas.caption import EventCategory, IntervalEvent, StructuredCaption
from schemas.clip import Perspective
from schemas.errors import UserError
from schemas.rollout import RolloutError, action_rows, parse_actions
from schemas.sample import Annotation
from tests import caption_server
from tests.caption_server import CaptionServer
from tests.jobs.event_sets import SIZE, WITH, Painted, event_set, records
from tests.pipeline.shards_corpus import CONFIG, PARTITION, npy, put, sample

SIGHT = {"judge-sight-done": ["grade_4_4"], "judge-sight-undone": ["grade_0_0"]}
CONFIGURED = JudgeConfig()


def _graded(instruction: int, execution: int) -> Any:
    def make(body: dict[str, Any], text: str) -> str:
        held = json.loads(text)
        held["instruction"]["grade"], held["execution"]["grade"] = str(instruction), str(execution)
        return json.dumps(held)

    return make


for _a in range(5):
    for _b in range(5):
        caption_server.reply_fault(f"grade_{_a}_{_b}", _graded(_a, _b))


def _seen_red(body: dict[str, Any], text: str) -> str:
    """A judge that looks: a grade a quarter of full red in the middle of the last picture."""
    urls = [p["image_url"]["url"] for p in body["messages"][1]["content"] if p["type"] == "image_url"]
    data = np.frombuffer(base64.b64decode(urls[-1].partition(",")[2]), np.uint8)
    blue, _, red = cv2.imdecode(data, cv2.IMREAD_COLOR)[SIZE[0] // 2, SIZE[1] // 2].astype(int)
    grade = max(0, min(4, round((red - blue) / 200 * 4)))
    return str(_graded(grade, grade)(body, text))


caption_server.reply_fault("looks", _seen_red)


def judged(
    cases: EventSet, out: Path, script: dict[str, Sequence[str]], config: JudgeConfig = CONFIGURED
) -> tuple[EventReport, CaptionServer]:
    with CaptionServer(script=SIGHT | script) as server:
        endpoints = EndpointConfig(endpoints=(server.url,), patience_s=5)
        return judge_videos(cases, out / "videos", out, config, endpoints, lambda *_: None), server


def asked(server: CaptionServer) -> list[str]:
    return sorted(s.request_id for s in server.seen if not s.clip.startswith("judge-sight"))


# --- the numbers ------------------------------------------------------------------------------------------


def test_grades_become_means_and_no_unjudged_case_is_lost(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 6)
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    script = {
        "case0": ["grade_4_4"], "case1": ["grade_3_2"], "case2": ["grade_0_1"],
        "case3": ["grade_2_2"], "case4": ["grade_4_1"], "case5": ["prose"],
    }  # fmt: skip
    report, server = judged(cases, tmp_path, script)
    eo, ci = report.categories[Category.EO], report.categories[Category.CI]
    assert (eo["cases"], eo["judged"], eo["unjudged"]) == (3, 3, 0)
    assert (ci["cases"], ci["judged"], ci["unjudged"]) == (3, 2, 1)
    assert [eo[s]["mean"] for s in ("instruction", "execution")] == pytest.approx([175 / 3, 175 / 3])
    assert [ci[s]["mean"] for s in ("instruction", "execution", "score")] == [75.0, 37.5, 56.25]
    assert (ci["score"]["least"], ci["score"]["most"]) == (37.5, pytest.approx(212.5 / 3))
    assert report.macro["score"] == pytest.approx((175 / 3 + 56.25) / 2)
    assert list(report.unjudged) == ["case5"] and report.unjudged["case5"].startswith("json: ")
    assert asked(server)[-4:] == ["case5.1", "case5.2", "case5.3", "case5.4"]
    assert report.prompt_sha256 == PROMPT_SHA256
    assert read_report(tmp_path / "events.json") == report
    page = write(page_of(report, tmp_path / "videos"), tmp_path).read_text()
    assert "1 of 3 cases are unjudged" in page and "case5" in page and page.count("<video") == 5


def test_a_category_without_a_judged_case_has_no_mean_and_no_macro_mean(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 2)
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    report, _ = judged(cases, tmp_path, {"case0": ["grade_4_4"], "case1": ["empty_text"]})
    assert report.categories[Category.EO]["score"]["mean"] == 100
    assert report.categories[Category.CI]["score"]["mean"] is None and report.macro["score"] is None
    assert (
        report.categories[Category.CI]["score"]["least"],
        report.categories[Category.CI]["score"]["most"],
    ) == (
        0,
        100,
    )


@pytest.mark.parametrize("measure", ["instruction", "execution"])
def test_scores_rise_strictly_over_five_grades(tmp_path: Path, measure: str) -> None:
    cases = event_set(tmp_path / "set", 2)
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    means = []
    for grade in range(5):
        pair = (grade, 2) if measure == "instruction" else (2, grade)
        script = {f"case{k}": ["grade_{}_{}".format(*pair)] for k in range(2)}
        (tmp_path / f"run{grade}").mkdir()
        (tmp_path / f"run{grade}/videos").symlink_to(tmp_path / "videos")
        (tmp_path / f"run{grade}/made.json").write_bytes((tmp_path / "made.json").read_bytes())
        report, _ = judged(cases, tmp_path / f"run{grade}", script)
        means.append((report.macro[measure], report.macro["score"]))
    assert [m for m, _ in means] == [0, 25, 50, 75, 100]
    assert all(low < high for (_, low), (_, high) in pairwise(means))


def test_a_judge_that_looks_grades_worlds_by_what_their_videos_show(tmp_path: Path) -> None:
    means = []
    for k, red in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
        out = tmp_path / f"run{k}"
        cases = event_set(tmp_path / "set", 2)
        out.mkdir()
        make_videos(Painted(red), cases, out, WITH, lambda *_: None)
        report, server = judged(cases, out, {"case0": ["looks"], "case1": ["looks"]})
        means.append(report.macro["score"])
    assert means == [0, 25, 50, 75, 100]
    words = json.dumps(server.seen[-1].body)
    assert "from 4.81 to 9.81 s the following happens: A door opens." in words
    assert "start picture, which the model was given" in words


# --- replies ----------------------------------------------------------------------------------------------


def test_what_is_wrong_with_a_reply_is_named_and_every_retry_changes_something(tmp_path: Path) -> None:
    wrong = {
        "whole_but_length": "finish: ", "fenced": "json: ", "extra_key": "schema: ", "nulls": "schema: ",
        "other_nonce": "nonce: ", "lone_surrogate": "unicode: ", "error_500": "no answer: engine: ",
        "context_too_long": "no answer: refused: ",
    }  # fmt: skip
    cases = event_set(tmp_path / "set", len(wrong))
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    script = {f"case{k}": [name] for k, name in enumerate(wrong)}
    report, server = judged(cases, tmp_path, script)
    for (name, told), line in zip(wrong.items(), report.cases, strict=True):
        assert line.unjudged.startswith(told), name
        assert [t.change for t in line.tries] == [
            "first",
            "seed, temperature",
            "half the pictures",
            "penalty",
        ]
        assert math.isnan(line.values["score"])
    bodies = [s.body for s in server.seen if s.clip == "case0"]
    assert [b["temperature"] for b in bodies] == [0, 0.5, 0.5, 0.5]
    assert len({b["seed"] for b in bodies}) == 4 and "repetition_penalty" in bodies[3]
    pictures = [sum(p["type"] == "image_url" for p in b["messages"][1]["content"]) for b in bodies]
    assert pictures[:2] == [18, 18] and pictures[2:] == [10, 10]  # digits and start picture, 16 or 8 more


def test_the_first_reply_that_is_right_is_taken(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 2)
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    report, server = judged(
        cases, tmp_path, {"case0": ["cut_but_stop", "error_500", "grade_3_1"], "case1": ["grade_1_1"]}
    )
    line = report.cases[0]
    assert (line.instruction, line.execution, len(line.tries)) == (3, 1, 3)
    assert line.tries[0].faults[0].startswith("json: ") and line.tries[2].faults == ()
    assert line.tries[2].tokens_in == 1000
    assert asked(server) == ["case0.1", "case0.2", "case0.3", "case1.1"]


def test_a_judge_that_cannot_tell_done_from_undone_judges_nothing(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 1)
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    with pytest.raises(EndpointError, match="happens 4 of 4, and one that does not 4"):
        judged(cases, tmp_path, {"judge-sight-undone": ["grade_4_4"]})
    assert not (tmp_path / "judgements").exists()


def test_the_drawn_videos_show_what_they_say() -> None:
    done, undone = drawn_films(Limits())
    for film, many in ((done, 2), (undone, 1)):
        assert len(set(film.shown.jpegs)) == many
    before = [s < 5 for s in done.shown.plan.seconds]
    assert [j == done.start for j in done.shown.jpegs] == before


# --- again ------------------------------------------------------------------------------------------------


def test_what_was_accepted_is_kept_and_what_was_not_is_asked_again(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 3)
    world = Painted()
    assert make_videos(world, cases, tmp_path, WITH, lambda *_: None) == 3
    judged(cases, tmp_path, {"case0": ["grade_4_4"], "case1": ["prose"], "case2": ["grade_1_1"]})
    first = (tmp_path / "judgements/case0.json").read_bytes()
    (tmp_path / "videos/case2.mp4").unlink()
    assert make_videos(Painted(0.3), cases, tmp_path, WITH, lambda *_: None) == 1
    report, server = judged(cases, tmp_path, {"case1": ["grade_2_2"], "case2": ["grade_0_0"]})
    assert asked(server) == ["case1.1", "case2.1"]  # case 2 has another video
    assert (tmp_path / "judgements/case0.json").read_bytes() == first
    assert [line.instruction for line in report.cases] == [4, 2, 0] and not report.unjudged


def test_a_run_that_is_killed_keeps_what_it_had(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        make_videos(Painted(dies_at=5), cases, tmp_path, WITH, lambda *_: None)
    assert not list((tmp_path / "videos").glob("case*")), "a half-written video stands under its name"
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    assert len(frame_pass(tmp_path / "videos/case0.mp4")) == 4 * 40 - 3
    with CaptionServer(script=SIGHT | {"case1": ["hang"]}) as server:
        endpoints = EndpointConfig(endpoints=(server.url,), timeout_s=0.3, patience_s=0.5, in_flight=1)
        with pytest.raises(EvaluationError, match="is missing"):
            (tmp_path / "videos/case1.mp4").rename(tmp_path / "away.mp4")
            judge_videos(cases, tmp_path / "videos", tmp_path, JudgeConfig(), endpoints, lambda *_: None)
    assert [p.name for p in (tmp_path / "judgements").iterdir()] == ["case0.json"]


def test_a_folder_of_another_prompt_world_or_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = event_set(tmp_path / "set", 2)
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    here, _ = judged(cases, tmp_path, {})
    with pytest.raises(EvaluationError, match=r"made.json: seed was 0 and is now 1: give another folder"):
        make_videos(Painted(), cases, tmp_path, MadeWith(1, 3.0, 3.0, {}), lambda *_: None)
    other = event_set(tmp_path / "set2", 2, expected="A light goes out.")
    with pytest.raises(EvaluationError, match="cases_sha256 was"):
        make_videos(Painted(), other, tmp_path, WITH, lambda *_: None)
    with pytest.raises(EvaluationError, match=r"judged\.json: config.attempts was 4 and is now 2"):
        judged(cases, tmp_path, {}, JudgeConfig(attempts=2))
    monkeypatch.setattr(judge_prompt, "QUESTION", judge_prompt.QUESTION + " Be kind.")
    with pytest.raises(EvaluationError, match=f"judged.json: prompt_sha256 was {PROMPT_SHA256}"):
        judged(cases, tmp_path, {})
    away = tmp_path / "elsewhere"
    away.mkdir()
    make_videos(Painted(), cases, away, WITH, lambda *_: None)
    there, _ = judged(cases, away, {})
    with pytest.raises(EvaluationError, match="cannot be compared: prompt_sha256"):
        compare(here, there)


def test_reports_of_one_judge_are_compared_case_by_case(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 4)
    reports = []
    for k, grades in enumerate((("4_4", "3_3", "2_2", "prose"), ("2_2", "3_3", "0_0", "4_4"))):
        out = tmp_path / f"run{k}"
        out.mkdir()
        make_videos(Painted(), cases, out, WITH, lambda *_: None)
        script = {f"case{j}": [g if g == "prose" else f"grade_{g}"] for j, g in enumerate(grades)}
        reports.append(judged(cases, out, script)[0])
    found = compare(*reports)
    assert (found[Category.EO]["score"].mean, found[Category.EO]["score"].n) == (25, 2)
    assert (found[Category.CI]["score"].mean, found[Category.CI]["score"].n) == (50, 1)


def test_the_prompt_is_pinned() -> None:
    assert prompt_sha256() == PROMPT_SHA256, "a new wording needs a new PROMPT_VERSION and hash"


# --- test sets --------------------------------------------------------------------------------------------


def test_json_and_yaml_are_one_set_and_say_when_the_event_is_asked_for(tmp_path: Path) -> None:
    cases = event_set(tmp_path, 2)
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"version": 1, "cases": records(2)}))
    assert read_cases(tmp_path / "cases.yaml").sha256 == cases.sha256
    first = cases.cases[0]
    assert first.spans == ((4.8125, 9.8125),)  # latent 20 starts at grid entry 77
    case = first.case(3.0, 1.0)
    assert case.rows[20:].tolist() == [[0, -3, 1, 0, 1, 0]] * 20 and not case.rows[:20, :4].any()
    assert case.prompts[4:6] == ("The scene is a hall.", "The scene is a hall. A door opens.")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"category": "XX"}, "cases.0.category"),
        ({"extra": 1}, "cases.0.extra"),
        ({"event": "prompt7"}, "event 'prompt7' is none of prompt, prompt1"),
        ({"prompt_event": "prompt-40"}, "never shows 'prompt1'"),
        ({"action": "w-3"}, "action lasts 3 latents and prompt_event 40"),
        ({"action": "jump-40"}, "'jump' is none of"),
        ({"prompts": {"text": "x"}}, "prompt name 'text'"),
        ({"image": "nowhere.png"}, "nowhere.png is no picture"),
        ({"name": "../x"}, "no plain file name"),
    ],
)
def test_a_case_that_cannot_be_played_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises((EvaluationError, RolloutError), match=told):
        event_set(tmp_path, 1, **changed)


def event_corpus(footage: Path, folder: Path) -> Store:
    """event07 (22 s): a fight from 5 s on, over two intervals, then a door; turns of 2 and 1 degrees."""
    held = sample("event07", footage / "event07_fight_defend_center.mp4", 0)
    note = Annotation.model_validate_json(held.members["json"])
    fight = IntervalEvent(category=EventCategory.COMPLEX_INTERACTION, text="A soldier is shot.")
    door = IntervalEvent(category=EventCategory.ENVIRONMENT_TRANSITION, text="A door opens.")
    events = (IntervalEvent(), fight, fight, door, IntervalEvent())[: len(note.caption.events)]
    caption = StructuredCaption(scene="A round hall.", events=events, provenance="log")
    note = note.model_copy(update={"split": "val", "caption": caption})
    rows = np.zeros((note.latent_frames, len(AXES)), np.float32)
    rows[:, AXES.index("perspective")] = 1
    rows[5:10, AXES.index("yaw")], rows[10:15, AXES.index("yaw")] = 2, -1
    members = held.members | {"json": note.model_dump_json().encode(), "actions.npy": npy(rows)}
    changed = type(held)(held.sample_id, held.facts | {"split": "val"}, members)
    corpus = Store(str(folder))
    put(corpus, PARTITION, [changed], CONFIG)
    return corpus


def test_event_clips_become_cases_with_their_frame_their_prompts_and_their_controls(
    footage: Path, tmp_path: Path
) -> None:
    corpus = event_corpus(footage, tmp_path / "corpus")
    made = make_cases(corpus, tmp_path / "set")
    assert made.counts == {"EO": 1, "CI": 1}
    fight, door = read_cases(made.path).cases
    assert (fight.record.category, fight.record.expected) == (Category.CI, "A soldier is shot.")
    assert fight.record.action == "none-5,right-5,none-30"  # 1 degree a latent is less than half of 3
    assert fight.record.prompts == {
        "prompt": "The scene in the video is: A round hall.",
        "prompt1": "The scene in the video is: A round hall. The event is: A soldier is shot.",
    }
    assert fight.record.prompt_event == "prompt-20,prompt1-20" and fight.spans == ((4.8125, 9.8125),)
    assert (door.record.category, door.record.event) == (Category.EO, "prompt1")
    wanted = int(np.load(_member(corpus, "grid.npy"))[4 * 40])  # the interval before the door starts at 10 s

    class Look:
        rgb: Any = None

        def see(self, index: int, picture: Any) -> None:
            if index == wanted:
                self.rgb = picture.rgb.copy()

    look = Look()
    frame_pass(footage / "event07_fight_defend_center.mp4", [look])
    assert np.array_equal(door.image, look.rgb)
    with pytest.raises(EvaluationError, match="is there already"):
        make_cases(corpus, tmp_path / "set")
    with pytest.raises(EvaluationError, match="no sample of split 'train'"):
        make_cases(corpus, tmp_path / "set2", "train")
    assert make_cases(corpus, tmp_path / "one", most=1).counts in ({"EO": 1, "CI": 0}, {"EO": 0, "CI": 1})


def _member(corpus: Store, name: str) -> Any:
    (row,) = read_index(corpus).to_pylist()
    return io.BytesIO(read_sample(corpus, row["annotations"])[name])


def test_rows_in_the_words_of_the_grammar_come_back_as_rows() -> None:
    text = "none-3,wa+right-4,s+up+space-2,left+down-3"
    commands = parse_actions(text, "test")
    rows = action_rows(commands, Perspective.FIRST, 3.0, 3.0)
    assert action_of(rows, 3.0, 3.0) == text


# --- as a user types it -----------------------------------------------------------------------------------


def wp2_eval(*arguments: str | Path) -> tuple[int, str]:
    """Exit code, and what is said: output, or the line of the error."""
    done = CliRunner().invoke(evaluate, [str(a) for a in arguments])
    if isinstance(done.exception, UserError):
        return 1, str(done.exception)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_command_judges_videos_that_are_there_and_says_what_it_could_not_judge(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 2)
    make_videos(Painted(), cases, tmp_path / "made", WITH, lambda *_: None)
    call = ("events", "--cases", tmp_path / "set/cases.json", "--out", tmp_path / "run")
    call += ("--videos", tmp_path / "made/videos")
    code, said = wp2_eval(*call)
    assert code == 0 and "no judge was given" in said
    with CaptionServer(script=SIGHT | {"case0": ["grade_4_3"], "case1": ["prose"]}) as server:
        code, said = wp2_eval(*call, "--endpoint", server.url)
    assert code == 1 and "EO: instruction 100.0  execution 75.0  score 87.5  (1 of 1 judged)" in said
    assert "macro mean: instruction not known" in said and "case1 is not judged: json: " in said
    assert "A door opens." in (tmp_path / "run/index.html").read_text()
    with CaptionServer(script=SIGHT | {"case1": ["grade_1_1"]}) as server:
        code, said = wp2_eval(*call, "--endpoint", server.url, "--against", tmp_path / "run/events.json")
    assert code == 0 and "macro mean: instruction 62.5  execution 50.0  score 56.2" in said
    assert "EO score: +0.0" in said
    (tmp_path / "made/videos/case1.mp4").unlink()
    assert wp2_eval(*call) == (1, f"{tmp_path}/made/videos lacks 1 videos, case1.mp4 for one")
    assert "give WEIGHTS" in wp2_eval(*call[:5])[1]


def test_a_kept_video_that_cannot_be_read_or_is_too_short_is_made_again(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 3)
    make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None)
    videos = tmp_path / "videos"
    (videos / "case0.mp4").write_bytes((videos / "case0.mp4").read_bytes()[:2000])
    with video_writer(videos / "case1.mp4") as write_frame:
        write_frame(np.zeros((64, 128, 3), np.uint8))
    assert make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None) == 2
    assert len(frame_pass(videos / "case1.mp4")) == 4 * 40 - 3


def test_a_folder_is_pinned_only_when_all_was_checked(tmp_path: Path) -> None:
    cases = event_set(tmp_path / "set", 2)

    def check(lacking: Sequence[Case]) -> None:
        assert [case.name for case in lacking] == ["case0", "case1"]
        raise EvaluationError("no such codec")

    with pytest.raises(EvaluationError, match="no such codec"):
        make_videos(Painted(), cases, tmp_path, WITH, lambda *_: None, check)
    identity = {"codec": "wan:" + 90 * "a" + "1"}
    make_videos(Painted(), cases, tmp_path, replace(WITH, identity=identity), lambda *_: None)
    identity = {"codec": "wan:" + 90 * "a" + "2"}
    with pytest.raises(EvaluationError, match=r"identity.codec was \.\.\.a+1 and is now \.\.\.a+2: give"):
        make_videos(Painted(), cases, tmp_path, replace(WITH, identity=identity), lambda *_: None)
