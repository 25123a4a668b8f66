"""What the log of a game tells of a recording and of its clips, and what it leaves out."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import yaml
from recordings import PACK_MAP, find, table, truth

from pipeline.events import clip_events, in_words, mine, recording_events
from pipeline.sources import KeyMapError, SourceConfig
from pipeline.sources.keymap import parse
from pipeline.sources.sidecar import SidecarError
from pipeline.stage import Unit
from pipeline.store import Store
from schemas.clip import FrameTable
from schemas.event import GameEvent

PACK = SourceConfig(key_map=str(PACK_MAP))
CLOCK = {"start": "start", "end": "end", "unit": "frame"}


def pack_unit(footage: Path, name: str, config: SourceConfig = PACK) -> Unit:
    source = Store(str(footage))
    return Unit(find(source, name, config)[1], "p0", source, source)


def told(events: tuple[GameEvent, ...]) -> list[tuple[int, int, str]]:
    return [(e.start, e.stop, e.text) for e in events]


def rule(**about: Any) -> dict[str, Any]:
    return {"type": "door", "category": "environment_transition", "text": "a door opens", **about}


def toy(folder: Path, records: list[dict[str, Any]] | str, *rules: dict[str, Any], **part: Any) -> Unit:
    """A recording whose event log holds these records, one line each; or this text."""
    text = records if isinstance(records, str) else "".join(json.dumps(r) + "\n" for r in records)
    part = {"file": "{stem}.events.jsonl", "clock": CLOCK, **part}
    (folder / "run.mp4").touch()
    (folder / part["file"].replace("{stem}", "run")).write_text(text)
    events = {k: v for k, v in part.items() if v is not None} | {"rules": list(rules or [rule()])}
    games = {"games": [{"game": "toy", "videos": ["*.mp4"], "events": events}]}
    (folder / "games.yaml").write_text(yaml.safe_dump(games))
    source = Store(str(folder))
    return Unit(find(source, "run.mp4", SourceConfig())[1], "p0", source, source)


def part_of(whole: FrameTable, frames: np.ndarray) -> FrameTable:
    """A clip of some frames of a recording."""
    pts = whole.pts[frames]
    return FrameTable(
        whole.time_base,
        pts - pts[0],
        whole.source_index[frames],
        whole.pixels[frames],
        whole.ok[frames],
        whole.repeat[frames],
        int(pts[0]) * whole.time_base,
    )


# --- the pack ---------------------------------------------------------------------------------------------


def test_a_recording_has_its_events_in_frames_of_the_file(footage: Path) -> None:
    unit = pack_unit(footage, "event01_door_map01.mp4")
    events = recording_events(unit, PACK, np.arange(357, dtype=np.int64) * 512, Fraction(1, 17920))
    assert told(events) == [(67, 80, "a door opens"), (229, 242, "a door closes")]


def test_what_happens_far_away_is_left_out_and_counted(footage: Path) -> None:
    unit = pack_unit(footage, "nav11_lowsens_e1m2.mp4")
    mined = mine(unit, PACK, truth(footage, "nav11_lowsens_e1m2")[1])
    assert mined.left_out["door_open: beyond"] == 1  # 1150 units away
    assert {e.name for e in mined.events} == {"object_removed"}
    unit = pack_unit(footage, "nonloop01_oneway_drop_e1m1.mp4")
    mined = mine(unit, PACK, truth(footage, "nonloop01_oneway_drop_e1m1")[1])
    assert mined.left_out["floor_moved: beyond"] == 1  # 643 units away; the one 156 away is told
    assert [e.start for e in mined.events if e.name == "floor_moved"] == [147]


def test_who_dies_out_of_view_is_left_out(footage: Path) -> None:
    """Monsters of this arena kill each other: of ten that die two are on screen."""
    unit = pack_unit(footage, "loop03_turn180_deathmatch_offpath.mp4")
    mined = mine(unit, PACK, truth(footage, "loop03_turn180_deathmatch_offpath")[1])
    assert told(mined.events) == [
        (331, 332, "an armed soldier is killed"),
        (893, 894, "a shotgun soldier is killed"),
    ]
    assert mined.left_out["object_removed: unseen"] == 8


def test_no_name_of_the_engine_gets_into_a_text(footage: Path) -> None:
    for name in ("odd_long_5min", "event07_fight_defend_center", "nav08_runkeys_map03"):
        events = clip_events(pack_unit(footage, f"{name}.mp4"), PACK, truth(footage, name)[1])
        assert events
        assert all(e.text == e.text.lower() and "vzd" not in e.text for e in events)


def test_a_log_in_seconds_finds_the_frames_of_a_video_of_another_rate(footage: Path) -> None:
    """odd_vfr is nav02 with frames dropped: fewer frames, the same moments."""
    with av.open(str(footage / "odd_vfr.mp4")) as video:
        stream = video.streams.video[0]
        pts = np.array(sorted(p.pts for p in video.demux(stream) if p.pts is not None))
        base = stream.time_base
    assert base is not None
    sparse = recording_events(pack_unit(footage, "odd_vfr.mp4"), PACK, pts, base)
    whole = truth(footage, "nav02_mouse_map02")[1]
    dense = clip_events(pack_unit(footage, "nav02_mouse_map02.mp4"), PACK, whole)
    seconds = (pts - pts[0]) * float(base)
    expected = [e for e in dense if whole.seconds[e.start] <= seconds[-1]]
    assert len(sparse) == len(expected) >= 2
    for a, b in zip(sparse, expected, strict=True):
        assert a.text == b.text
        assert abs(seconds[a.start] - whole.seconds[b.start]) <= np.diff(seconds).max()


# --- clips ------------------------------------------------------------------------------------------------


def test_a_clip_has_its_share_of_the_events_in_its_own_frames(footage: Path) -> None:
    unit = pack_unit(footage, "event01_door_map01.mp4")
    whole = truth(footage, "event01_door_map01")[1]
    assert told(clip_events(unit, PACK, part_of(whole, np.arange(70, 235)))) == [
        (0, 10, "a door opens"),  # 67-79, cut at the clip's start
        (159, 165, "a door closes"),  # 229-241, cut at its end
    ]
    assert clip_events(unit, PACK, part_of(whole, np.arange(80, 229))) == ()


def test_a_halved_clip_keeps_an_event_whose_frame_it_skips(footage: Path) -> None:
    unit = pack_unit(footage, "event09_pickup_shotgun_e1m1.mp4")
    halved = part_of(truth(footage, "event09_pickup_shotgun_e1m1")[1], np.arange(0, 241, 2))
    starts = [e.start for e in clip_events(unit, PACK, halved)]
    assert starts == [43, 51]  # source frames 85 and 101 are first seen in 86 and 102


def test_events_in_seconds_follow_the_origin_of_a_part(tmp_path: Path) -> None:
    clock = {"start": "t", "unit": "second"}
    unit = toy(tmp_path, [{"type": "door", "t": 102.0}], clock=clock, clock_start=100.0)
    whole = table(100, 25)
    assert [e.start for e in clip_events(unit, SourceConfig(), whole)] == [50]
    clip = part_of(whole, np.arange(40, 100))
    assert told(clip_events(unit, SourceConfig(), clip)) == [(10, 11, "a door opens")]
    assert clip_events(unit, SourceConfig(), part_of(whole, np.arange(60, 100))) == ()


def test_frames_of_the_log_start_at_first_frame(tmp_path: Path) -> None:
    unit = toy(tmp_path, [{"type": "door", "start": 3, "end": 4}], first_frame=20)
    assert told(clip_events(unit, SourceConfig(), table(50, 25))) == [(23, 25, "a door opens")]


def test_a_clip_without_log_or_part_has_no_events(footage: Path, tmp_path: Path) -> None:
    assert clip_events(pack_unit(footage, "nav12_miniworld_fourrooms.mp4"), PACK, table(9, 30)) == ()
    assert clip_events(pack_unit(footage, "cosmos_test_video_30s.mp4"), PACK, table(9, 30)) == ()
    unit = toy(tmp_path, [{"type": "door", "start": 1, "end": 1}])
    bare = replace(unit, clip=unit.clip.model_copy(update={"events": None}))
    assert clip_events(bare, SourceConfig(), table(9, 30)) == ()


# --- conditions -------------------------------------------------------------------------------------------


def test_a_limit_holds_for_either_sign_and_equality_is_inside(tmp_path: Path) -> None:
    bearings = (45.0, -45.0, 45.1, -180)
    records = [{"type": "door", "start": 10 * i, "end": 10 * i, "bearing": b} for i, b in enumerate(bearings)]
    unit = toy(tmp_path, records, rule(within={"bearing": 45}))
    mined = mine(unit, SourceConfig(), table(50, 25))
    assert [e.start for e in mined.events] == [0, 10]
    assert mined.left_out == {"door: beyond": 2}


def test_a_witness_is_the_same_object_of_a_stated_kind_shortly_before(tmp_path: Path) -> None:
    def gone(start: int, number: int) -> dict[str, Any]:
        return {"type": "gone", "id": number, "start": start, "end": start}

    def shown(number: int, kind: str, start: int, end: int) -> dict[str, Any]:
        return {"type": "shown", "id": number, "kind": kind, "start": start, "end": end}

    records = [
        shown(1, "item", 0, 20), gone(30, 1),  # 0.4 s before, at 25 frames a second
        shown(2, "item", 0, 20), gone(33, 2),  # 0.52 s before
        shown(3, "shot", 0, 40), gone(35, 3),  # another kind
        gone(36, 4),  # another object
        gone(37, 5), shown(5, "item", 38, 60),  # only afterwards
        shown(6, "item", 30, 60), gone(38, 6),  # still there
    ]  # fmt: skip
    seen = {"type": "shown", "same": ["id"], "where": {"kind": ["item"]}, "within_s": 0.5}
    unit = toy(tmp_path, records, rule(type="gone", text="it goes", seen=seen))
    mined = mine(unit, SourceConfig(), table(80, 25))
    assert [e.start for e in mined.events] == [30, 38]
    assert mined.left_out == {"gone: unseen": 4}


def test_what_lasts_too_short_is_left_out(tmp_path: Path) -> None:
    records = [{"type": "door", "start": 0, "end": 9}, {"type": "door", "start": 20, "end": 30}]
    mined = mine(toy(tmp_path, records, rule(min_s=0.4)), SourceConfig(), table(50, 25))
    assert ([e.start for e in mined.events], mined.left_out) == ([20], {"door: short": 1})


def test_events_of_one_rule_that_follow_closely_are_one(tmp_path: Path) -> None:
    starts = (0, 25, 50, 101, 160)
    records = [{"type": "hit", "start": s, "end": s} for s in starts]
    records.insert(1, {"type": "door", "start": 10, "end": 12})
    fight = rule(type="hit", category="complex_interaction", text="one falls", merge_s=2, many="several fall")
    unit = toy(tmp_path, records, fight, rule())
    assert told(clip_events(unit, SourceConfig(), table(200, 25))) == [
        (0, 51, "several fall"),
        (10, 13, "a door opens"),
        (101, 102, "one falls"),  # 2.04 s later
        (160, 161, "one falls"),
    ]
    # In a clip that holds one of them there is one.
    clip = part_of(table(200, 25), np.arange(40, 90))
    assert told(clip_events(unit, SourceConfig(), clip)) == [(10, 11, "one falls")]


def test_the_first_rule_whose_conditions_hold_tells(tmp_path: Path) -> None:
    records = [{"type": "door", "start": i, "end": i, "far": far} for i, far in enumerate((1, 5, 9))]
    near = rule(text="a door opens here", within={"far": 2})
    away = rule(text="a door opens farther on", within={"far": 6})
    mined = mine(toy(tmp_path, records, near, away), SourceConfig(), table(9, 25))
    assert [e.text for e in mined.events] == ["a door opens here", "a door opens farther on"]
    assert mined.left_out == {"door: beyond": 1}


def test_types_without_a_rule_are_counted(tmp_path: Path) -> None:
    mined = mine(toy(tmp_path, [{"type": "music"}, {"type": "music"}]), SourceConfig(), table(9, 25))
    assert (mined.events, mined.left_out) == ((), {"music: no_rule": 2})


def test_fields_become_words_with_their_article(tmp_path: Path) -> None:
    names = ("ArmorBonus", "XyzGuyVzd", "RedKey", "HUDElement2")
    records = [{"type": "door", "start": i, "end": i, "what": w} for i, w in enumerate(names)]
    unit = toy(tmp_path, records, rule(text="{a what} and the {what}"), names={"XyzGuyVzd": "armed soldier"})
    assert [e.text for e in clip_events(unit, SourceConfig(), table(9, 25))] == [
        "an armor bonus and the armor bonus",
        "an armed soldier and the armed soldier",
        "a red key and the red key",
        "a hud element2 and the hud element2",
    ]
    assert in_words("iron_sword-2") == "iron sword 2"


# --- counters ---------------------------------------------------------------------------------------------


def counter_map(folder: Path, column: str, change: str, video: str) -> SourceConfig:
    rises = rule(column=column, change=change, text="it changes")
    del rises["type"]
    events = {"file": "{stem}.truth.csv", "rules": [rises]}
    path = folder / "counters.yaml"
    path.write_text(yaml.safe_dump({"games": [{"game": "g", "videos": [video], "events": events}]}))
    return SourceConfig(key_map=str(path))


@pytest.mark.parametrize(
    ("name", "column", "change", "type_"),
    [
        ("event03_kill_zombieman", "KILLCOUNT", "rises", "monster_killed"),
        ("nav05_keys_deathmatch", "HEALTH", "falls", "health_down"),
        ("event05_pickup_bonus", "HEALTH", "rises", "health_up"),
    ],
)
def test_a_counter_of_the_log_tells_where_there_is_no_event_file(
    footage: Path, tmp_path: Path, name: str, column: str, change: str, type_: str
) -> None:
    config = counter_map(tmp_path, column, change, f"{name}.mp4")
    events = clip_events(pack_unit(footage, f"{name}.mp4", config), config, truth(footage, name)[1])
    logged = json.loads((footage / f"{name}.truth.json").read_text())["events"]
    assert [e.start for e in events] == [e["start"] for e in logged if e["type"] == type_] != []


@pytest.mark.parametrize(("change", "rows"), [("rises", [3, 6]), ("falls", [5])])
def test_a_counter_tells_one_way_and_an_unknown_value_is_no_change(
    tmp_path: Path, change: str, rows: list[int]
) -> None:
    values = ("1", "1", "", "2", "2", "0", "1", "1")
    only = {"column": "kills", "change": change, "category": "complex_interaction", "text": "it changes"}
    unit = toy(tmp_path, "kills\n" + "\n".join(values), only, file="{stem}.csv", clock=None)
    assert [e.start for e in clip_events(unit, SourceConfig(), table(8, 25))] == rows


# --- strict reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type": "door", "start": 1, "end": 2', "record 0 cannot be read: json"),
        ('\n{"type": "door", "start": 1, "end": NaN}', "record 0 cannot be read: json: NaN is not JSON"),
        ('{"type": "door", "start": 1, "end": 1e999}', "record 0 cannot be read: json: number 1e999"),
        ('{"type": "door", "start": 1, "start": 2, "end": 3}', "key 'start' is given twice"),
        ("[1]", "record 0 is not a JSON object"),
        ('{"start": 1, "end": 2}', "record 0 has no 'type' that names its type"),
        ('{"type": "door", "start": 1}', r"record 0 \(door\) has no 'end'"),
        ('{"type": "door", "start": "1", "end": 2}', "record 0: start is '1', not a number"),
        ('{"type": "door", "start": true, "end": 2}', "record 0: start is True, not a number"),
        ('{"type": "door", "start": 1.5, "end": 2}', "1.5 to 2 are no frame numbers"),
        ('{"type": "door", "start": 3, "end": 2}', "ends at 2, before its start at 3"),
        ('{"type": "door", "start": 1, "end": 2}', r"record 0 \(door\) has no 'what'"),
        ('{"type": "door", "start": 1, "end": 2, "what": ["x"]}', "what is no name"),
        ('{"type": "door", "start": 1, "end": 2, "what": "a\\u0007b"}', "is not printable: give it words"),
    ],
)
def test_a_log_that_cannot_be_read_is_one_line_that_names_file_and_record(
    tmp_path: Path, text: str, message: str
) -> None:
    unit = toy(tmp_path, text, rule(text="{a what} opens"))
    with pytest.raises(SidecarError, match=message) as raised:
        clip_events(unit, SourceConfig(), table(9, 25))
    assert "run.events.jsonl" in str(raised.value) and "\n" not in str(raised.value)


def test_the_list_of_a_json_file_must_be_there(tmp_path: Path) -> None:
    part = {"file": "{stem}.json", "list": "happened"}
    unit = toy(tmp_path, '{"happened": [{"type": "door", "start": 1, "end": 1}]}', **part)
    assert len(clip_events(unit, SourceConfig(), table(9, 25))) == 1
    for text, message in (('{"events": []}', "with the list 'happened'"), ('{"happened": 3}', "not a list")):
        with pytest.raises(SidecarError, match=message):
            clip_events(toy(tmp_path, text, **part), SourceConfig(), table(9, 25))
    unit = toy(tmp_path, '[{"type": "door", "start": 1, "end": 1}]', file="{stem}.json")
    assert len(clip_events(unit, SourceConfig(), table(9, 25))) == 1


def test_a_log_that_is_gone_is_an_error_and_not_silence(tmp_path: Path) -> None:
    unit = toy(tmp_path, [])
    (tmp_path / "run.events.jsonl").unlink()
    with pytest.raises(SidecarError, match=r"run\.events\.jsonl"):
        clip_events(unit, SourceConfig(), table(9, 25))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rules": []}, "rules"),
        ({"rules": [rule(category="none")]}, "its category cannot be none"),
        ({"rules": [rule(text="")]}, "text is empty"),
        ({"rules": [rule(text="a door opens.")]}, "full stop"),
        ({"rules": [rule(text="{an object} opens")]}, "a field is written"),
        ({"rules": [rule(nead={"x": 1})]}, "unknown key 'nead'"),
        ({"rules": [rule(column="KILLS")]}, "names either type"),
        ({"rules": [rule(merge_s=3)]}, "go together"),
        ({"rules": [rule(merge_s=3, many="{object} opens")]}, "cannot name a field"),
        ({"rules": [rule(merge_s=6, many="doors open")]}, "less than or equal to 5"),
        ({"rules": [rule(), {**rule(column="X"), "type": ""}]}, "not both"),
        ({"file": "{stem}.csv"}, "must end in .json or .jsonl"),
        ({"file": "../x.json"}, "beside the video"),
        ({"list": "events"}, "list is a key of a .json file"),
        ({"clock": None}, "records need clock"),
        ({"clock_start": 4.0}, "clock_start for seconds"),
        ({"clock": {"start": "t", "unit": "second"}, "first_frame": 3}, "first_frame is for frames"),
        ({"time": "t"}, "time is for tables"),
    ],
)
def test_a_wrong_part_of_the_key_map_is_one_line_that_names_the_place(
    change: dict[str, Any], message: str
) -> None:
    part = {"file": "{stem}.events.jsonl", "clock": CLOCK, "rules": [rule()], **change}
    part = {k: v for k, v in part.items() if v is not None}
    text = yaml.safe_dump({"games": [{"game": "toy", "videos": ["*"], "events": part}]})
    with pytest.raises(KeyMapError, match=message) as raised:
        parse(text, "games.yaml")
    assert "games.0.events" in str(raised.value) and "\n" not in str(raised.value)


# --- digest -----------------------------------------------------------------------------------------------


def test_the_digest_sees_rules_and_the_records_they_name_and_nothing_else(tmp_path: Path) -> None:
    def digest(records: list[dict[str, Any]] | str, *rules: dict[str, Any]) -> str:
        sidecar = toy(tmp_path, records, *rules).clip.events
        assert sidecar is not None
        return sidecar.digest

    door = {"type": "door", "start": 1, "end": 1}
    base = digest([door, {"type": "music", "bar": 1}])
    assert digest([{"type": "music", "bar": 2}, door]) == base
    assert digest([{**door, "end": 2}, {"type": "music"}]) != base
    assert digest([door], rule(text="the door opens")) != base
    broken = digest("{")
    assert broken not in (base, digest("[]"))
    assert digest([door]) == base  # repaired
