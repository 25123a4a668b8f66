"""What a source lists, what a key map may say, and what a sidecar's digest sees."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from recordings import PACK_MAP, find, pack_map, small_source, truth

from pipeline import strict_yaml
from pipeline.scan import scan
from pipeline.sources import SourceConfig, SourceError, discover, open_source
from pipeline.sources.keymap import KeyMapError, LogPart, parse
from pipeline.sources.sidecar import SidecarError, read_columns
from pipeline.store import Store
from schemas.clip import Perspective

KEYS = [
    {"column": "W", "action": "forward"},
    {"column": "S", "action": "forward", "sign": -1},
    {"column": "MX", "action": "yaw", "unit": "count"},
]
LOG = {"W": [1, 1, 0], "S": [0, 0, 1], "MX": [5, 0, -3], "secret": [9, 9, 9]}
POSES = {
    "file": "{stem}.csv",
    "columns": {"x": "W", "y": "S", "z": "MX", "yaw": "secret"},
    "world": {"up": "z", "handed": "right"},
    "yaw_positive": "left",
}


def entry(**log: Any) -> dict[str, Any]:
    return {"log": {"file": "{stem}.csv", "inputs": KEYS, **log}}


def test_a_folder_lists_every_media_file_and_counts_the_rest(footage: Path) -> None:
    listing = discover("folder", Store(str(footage)), SourceConfig(licence="CC0"))
    paths = [f.path for f in listing.found]
    manifest = pd.read_csv(footage / "manifest.csv")
    assert paths == sorted(f for f in manifest.file if not f.endswith(".jsonl"))
    assert {"tc_audio_only.mp3", "odd_zero_byte.mp4", "odd.clip.v2.final.mp4"} < set(paths)
    assert all((f.game, f.log, f.licence) == ("", "", "CC0") for f in listing.found)
    assert listing.ignored[".csv"] == len(list(footage.glob("*.csv")))
    assert sum(listing.ignored.values()) + len(paths) == len(list(footage.iterdir()))


def test_every_clip_of_the_pack_has_its_game_and_the_rest_is_kept_without(footage: Path) -> None:
    listing = discover("gameplay", Store(str(footage)), SourceConfig(key_map=str(PACK_MAP)))
    assert listing.notes == ()
    by_path = {f.path: f for f in listing.found}
    for about in footage.glob("*.truth.json"):
        clip = about.name.removesuffix(".truth.json")
        game = yaml.safe_load(about.read_text())["game"]
        assert (by_path[f"{clip}.mp4"].game, by_path[f"{clip}.mp4"].log) == (game, f"{clip}.truth.csv")
    games = Counter(f.game for f in listing.found)
    assert games[""] == sum(f.path.startswith(("cosmos", "decord", "tc_", "vipe")) for f in listing.found)
    assert by_path["bad07_duplicated_x3.mp4"].log == "" and by_path["q_dark_035.mp4"].log == ""
    assert by_path["odd_start1p5.mkv"].log == "nav02_mouse_map02.truth.csv"
    assert by_path["nav12_miniworld_fourrooms.mp4"].perspective is Perspective.FIRST


def test_the_answer_is_never_mapped() -> None:
    text = "\n".join(line for line in PACK_MAP.read_text().splitlines() if not line.startswith("#"))
    assert "_DELTA" not in text and "d_yaw" not in text and "CAMERA" not in text


def test_two_entries_that_claim_one_recording_are_an_error_that_names_both() -> None:
    key_map = parse("games: [{game: a, videos: ['run*.mp4']}, {game: b, videos: ['*.mp4']}]", "games.yaml")
    assert key_map.match("x/walk.mp4") is key_map.games[1]
    with pytest.raises(KeyMapError, match=r"x/run1.mp4 .*games.0 \(a\) and games.1 \(b\)"):
        key_map.match("x/run1.mp4")


def _one(**more: Any) -> str:
    return yaml.safe_dump({"games": [{"game": "toy", "videos": ["*.mp4"], **more}]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_one(licnse="MIT"), r"games.0: unknown key 'licnse'; the nearest known one is 'licence'"),
        (_one(**entry(rows="next")), r"games.0.log: unknown key 'rows'; .*'row'"),
        (_one(**entry(row="after")), r"games.0.log.row: .*'next' or 'previous'"),
        (
            _one(log={"file": "l.csv", "inputs": [{"column": "W", "action": "forwards"}]}),
            r"inputs.0.action: ",
        ),
        (_one(log={"file": "l.csv", "inputs": [KEYS[0], KEYS[0]]}), "column W is mapped twice"),
        (_one(log={"file": "l.csv", "inputs": [{**KEYS[2], "action": "jump"}]}), "counts can only drive yaw"),
        (_one(log={"file": "l.txt", "inputs": KEYS}), r"must end in .csv or .jsonl"),
        (_one(log={"file": "{name}.csv", "inputs": KEYS}), r"may only use \{stem\}"),
        (_one(log={"file": "../l.csv", "inputs": KEYS}), "must lie beside"),
        (_one(**entry(absent=["yaw"])), "yaw is absent and mapped"),
        (_one(**entry(time="t", first_frame=3)), "clock_start"),
        (_one(poses={**POSES, "yaw_positive": None}), "yaw_positive .* must be stated"),
        (_one(poses={**POSES, "yaw_zero": "-z"}), "cannot be the up axis"),
        (_one(poses={k: v for k, v in POSES.items() if k != "world"}), "games.0.poses.world: Field required"),
        ("games: [", "is not YAML"),
        ("games: []", "games is empty"),
        ("{}", "games is empty"),
        ("games: [{game: a, game: b, videos: ['*']}]", r"is not YAML: line 1: key 'game' is given twice"),
        (_one(videos=[""]), "games.0: videos holds an empty glob"),
        (_one(videos=["a.mp4", "./"]), "games.0: videos holds an empty glob"),
        (_one(**entry(first_frame=-10_000_001)), "games.0.log.first_frame: .*10000000"),
        (_one(**entry(first_frame=10**400)), "games.0.log.first_frame: .*10000000"),
        (_one(**entry(time="t", clock_start=float("inf"))), "games.0.log.clock_start: .*finite"),
        (_one(poses={**POSES, "metres_per_unit": 1e300}), "games.0.poses.metres_per_unit: "),
    ],
)
def test_a_wrong_key_map_is_refused_in_one_line_that_names_the_place(text: str, says: str) -> None:
    with pytest.raises(KeyMapError, match=says) as error:
        parse(text, "games.yaml")
    assert "\n" not in str(error.value) and str(error.value).startswith("games.yaml")


def test_a_missing_key_map_and_a_wrong_source_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot read the key map .*games.yaml .*kind folder"):
        discover("gameplay", Store(str(tmp_path)), SourceConfig())
    with pytest.raises(SourceError, match="did you mean 'gameplay'"):
        open_source(f"gamplay:{tmp_path}", {})
    with pytest.raises(SourceError, match="does not exist"):
        open_source(f"folder:{tmp_path}/no", {})
    (tmp_path / "run.mp4").touch()
    with pytest.raises(SourceError, match=r"run.mp4 is not a folder: name the folder"):
        open_source(f"folder:{tmp_path}/run.mp4", {})


def test_a_source_on_s3_that_is_a_file_is_told_from_a_folder(s3: dict[str, Any]) -> None:
    store = Store("s3://sources-kinds", s3)
    store.fs.mkdir("sources-kinds")
    store.write("clips/run.mp4", b"x")
    assert open_source("folder:s3://sources-kinds/clips", s3)[1].list()[0].path == "run.mp4"
    with pytest.raises(SourceError, match="is not a folder"):
        open_source("folder:s3://sources-kinds/clips/run.mp4", s3)


@pytest.mark.parametrize("kind", ["folder", "gameplay"])
def test_a_file_name_that_is_not_utf8_is_noted_and_passed_over(tmp_path: Path, kind: str) -> None:
    source = small_source(tmp_path, LOG, entry())
    folder = os.fsencode(tmp_path)
    for name in (b"caf\xe9.mp4", b"caf\xe9.txt"):
        (Path(os.fsdecode(folder + b"/" + name))).touch()
    listing = discover(kind, source, SourceConfig())
    assert [f.path for f in listing.found] == ["run.mp4"] and ".txt" not in listing.ignored
    assert listing.notes == tuple(
        rf"caf\xe9.{kind}: file name is not valid UTF-8: rename it" for kind in ("mp4", "txt")
    )


def test_entries_that_match_no_file_are_one_note(tmp_path: Path) -> None:
    source = small_source(tmp_path, LOG, entry())
    games = yaml.safe_load((tmp_path / "games.yaml").read_text())["games"]
    for name in ("a", "a", "b", "c", "d", "e"):
        games.append({"game": name, "videos": [f"{name}.mkv"]})
    (tmp_path / "games.yaml").write_text(yaml.safe_dump({"games": games[:4]}))
    notes = discover("gameplay", source, SourceConfig()).notes
    assert notes == ("key map: 3 of 4 entries match no file (a, b)",)
    (tmp_path / "games.yaml").write_text(yaml.safe_dump({"games": games}))
    notes = discover("gameplay", source, SourceConfig()).notes
    assert notes == ("key map: 6 of 7 entries match no file (a, b, c, d, ...)",)


def test_yaml_takes_no_key_twice_and_still_merges() -> None:
    merged = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: [*b, *a], y: 4}"
    assert strict_yaml.load(merged) == yaml.safe_load(merged)
    for wrong, says in (
        ("a:\n  x: 1\n  y: 2\n  x: 3", "line 4: key 'x' is given twice"),
        ("a: 2026-13-01", "month"),
        ("[" * 5000, "recursion"),
    ):
        with pytest.raises(yaml.YAMLError, match=says):
            strict_yaml.load(wrong)


# --- recordings and splits --------------------------------------------------------------------------------


def test_all_cuts_of_one_recording_share_its_id_and_no_other_does(footage: Path) -> None:
    source = Store(str(footage))
    listing = discover("gameplay", source, SourceConfig(key_map=str(PACK_MAP)))
    own = ("odd_long_5min", "odd_short_140f", "odd_garbage", "odd_zero_byte")
    of = {
        f.path: "nav02" if f.path.startswith(("nav02", "odd", "bad05", "bad07")) else "q_ref"
        for f in listing.found
        if f.path.startswith(("nav02", "odd", "bad05", "bad07", "q_")) and not f.path.startswith(own)
    }
    assert Counter(of.values()) == {"nav02": 22, "q_ref": 13}
    rows = scan(source, listing.key_map, list(listing.found))
    ids: dict[str, set[object]] = {"nav02": set(), "q_ref": set()}
    for row in rows:
        assert isinstance(row, dict)
        if name := of.get(str(row["source_path"])):
            ids[name].add(row["recording_id"])
        else:
            assert row["recording_id"] == row["clip_id"]
    assert ids["nav02"] == {hashlib.sha256(b"recording:nav02").hexdigest()[:16]}
    assert len(ids["q_ref"]) == 1 and ids["q_ref"] != ids["nav02"]


def test_the_path_of_a_key_map_means_the_same_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert SourceConfig(key_map="games.yaml").key_map == str(tmp_path / "games.yaml")
    assert SourceConfig(key_map="s3://b/games.yaml").key_map == "s3://b/games.yaml"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SourceConfig(key_map="~/games.yaml").key_map == str(tmp_path / "games.yaml")
    with pytest.raises(ValueError, match="names a home that does not exist"):
        SourceConfig(key_map="~nobody-of-that-name/games.yaml")


def test_a_named_sidecar_that_is_missing_is_named_and_noted(tmp_path: Path) -> None:
    source = small_source(tmp_path, LOG, entry())
    (tmp_path / "run.csv").unlink()
    listing = discover("gameplay", source, SourceConfig())
    assert listing.found[0].log == "run.csv" and listing.notes == ("run.mp4: run.csv is missing",)
    missing = _digest(source)
    pd.DataFrame(LOG).to_csv(tmp_path / "run.csv", index=False)
    assert _digest(source) != missing


def _digest(source: Store, kind: str = "log") -> str:
    _, clip = find(source, "run.mp4", SourceConfig())
    sidecar = getattr(clip, kind)
    assert sidecar is not None
    return str(sidecar.digest)


def test_the_digest_of_a_log_sees_mapped_columns_and_their_entry_and_nothing_else(tmp_path: Path) -> None:
    before = _digest(small_source(tmp_path, LOG, entry()))
    unmapped = {k: v for k, v in LOG.items() if k != "secret"} | {"other": ["a", "b", "c"]}
    assert _digest(small_source(tmp_path, unmapped, entry())) == before
    assert _digest(small_source(tmp_path, {k: LOG[k] for k in reversed(LOG)}, entry())) == before
    assert _digest(small_source(tmp_path, LOG, {**entry(), "licence": "MIT", "perspective": "tps"})) == before


@pytest.mark.parametrize(
    ("log", "more"),
    [
        ({**LOG, "W": [1, 0, 0]}, entry()),
        ({k: v[:2] for k, v in LOG.items()}, entry()),
        (LOG, entry(row="previous")),
        (LOG, {"log": {"file": "{stem}.csv", "inputs": [*KEYS[:2], {**KEYS[2], "sign": -1}]}}),
    ],
)
def test_the_digest_of_a_log_changes_with_a_value_a_row_or_its_reading(
    tmp_path: Path, log: dict[str, Any], more: dict[str, Any]
) -> None:
    before = _digest(small_source(tmp_path, LOG, entry()))
    assert _digest(small_source(tmp_path, log, more)) != before


def test_the_digest_of_poses_does_not_see_buttons(footage: Path, tmp_path: Path) -> None:
    rows, _ = truth(footage, "nav05_keys_deathmatch")
    (tmp_path / "pack").mkdir()
    source, config = Store(str(tmp_path / "pack")), pack_map(tmp_path)

    def digests() -> tuple[str, str]:
        rows.to_csv(tmp_path / "pack/nav05_keys_deathmatch.truth.csv", index=False)
        _, clip = find(source, "nav05_keys_deathmatch.mp4", config)
        assert clip.log is not None and clip.poses is not None
        return clip.log.digest, clip.poses.digest

    (tmp_path / "pack/nav05_keys_deathmatch.mp4").touch()
    log, poses = digests()
    rows.loc[3, "MOVE_FORWARD"] = 1 - rows.loc[3, "MOVE_FORWARD"]
    assert digests()[1] == poses and digests()[0] != log
    log = digests()[0]
    rows.loc[3, "CAMERA_ANGLE"] += 1.0
    assert digests()[0] == log and digests()[1] != poses


# --- what a log may hold ----------------------------------------------------------------------------------


def read(folder: Path, text: str | bytes, name: str = "run.csv") -> dict[str, list[float]]:
    """The columns W and MX of a log with these contents."""
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    inputs = [KEYS[0], KEYS[2]]
    part = LogPart.model_validate({"file": name, "inputs": inputs})
    return {k: v.tolist() for k, v in read_columns(Store(str(folder)), name, part).items()}


NAN = pytest.approx(np.nan, nan_ok=True)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_blank_line_is_a_row_of_unknowns_and_none_at_the_end(tmp_path: Path, end: str) -> None:
    lines = ["W,x,MX", "1,a,5", "", "0,b,7", " ", "1,c,9", "", " ", ""]
    got = read(tmp_path, end.join(lines))
    assert got == {"W": [1, NAN, 0, NAN, 1], "MX": [5, NAN, 7, NAN, 9]}
    rows = ['{"W": 1, "MX": 5}', "", '{"MX": 7, "W": false}', "", ""]
    assert read(tmp_path, end.join(rows), "run.jsonl") == {"W": [1, NAN, 0], "MX": [5, NAN, 7]}


def test_cells_that_say_nothing_are_unknown_and_words_for_truth_are_1_and_0(tmp_path: Path) -> None:
    got = read(tmp_path, "\ufeffMX,W\n,true\nNaN,False\n null , 1 \n3.5e0,TRUE\n")
    assert got == {"W": [1, 0, 1, 1], "MX": [NAN, NAN, NAN, 3.5]}


def test_empty_fields_behind_the_last_column_are_harmless(tmp_path: Path) -> None:
    assert read(tmp_path, "W,MX\n1,5,\n0,7,, \n") == {"W": [1, 0], "MX": [5, 7]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("W,MX\n1,5\n1,2,3\n", "run.csv row 1 has 3 fields, its header 2"),
        ("W,x,MX\n1,0,5\n1,2\n", "run.csv row 1 has 2 fields, its header 3"),
        ("W,x,MX\n1,0,5\n,\n", "run.csv row 1 has 2 fields, its header 3"),
        ("W,MX,W\n1,5,0\n", "run.csv has column 'W' twice"),
        ("W;MX\n0,5;1\n", "separated by semicolons: write it with commas"),
        ("W\tMX\n0\t1\n", "separated by tabs: write it with commas"),
        ('W,MX\n"1"2,5\n', "run.csv is not a CSV table: ',' expected"),
        ('W,MX\n1,"5\n', "run.csv is not a CSV table: unexpected end"),
        (b"W,MX\n1,\xff\n", "run.csv is not a CSV table: .*utf-8"),
        ("", "its first line must name the columns"),
        ("\nW,MX\n1,5\n", "its first line must name the columns"),
        ("W,MX", "run.csv has no rows"),
        ("W,MX\n\n\n", "run.csv has no rows"),
        ("W,MXX\n1,5\n", "no column 'MX'; did the key map mean 'MXX'"),
        ("W,MX\n1,5\n0,1e300\n", r"row 1, column 'MX': 1e\+300 is too large"),
        ("W,MX\n1,3.5e38\n", "row 0, column 'MX': 3.5e.38 is too large"),
        ("W,MX\n1,-inf\n", "row 0, column 'MX': -inf is not a finite number"),
        ("W,MX\n1,1_000\n", "row 0, column 'MX': '1_000' is not a number"),
    ],
)
def test_a_csv_log_that_could_be_misread_is_refused_with_its_place(
    tmp_path: Path, text: str | bytes, says: str
) -> None:
    with pytest.raises(SidecarError, match=says) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value) and "np." not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"W": 1, "MX": %s}' % ("9" * 400), r"row 0, column 'MX': 9{40}\.\.\. is too large"),
        ('{"W": 1, "MX": %s}' % ("9" * 5000), "row 0 is not JSON"),
        ('{"W": 1, "MX": 1e999}', "row 0, column 'MX': inf is not a finite number"),
        ('{"W": 1, "MX": [2]}', r"row 0, column 'MX': \[2\] is not a number"),
        ('{"W": 1, "MX": 2}\n{"W": 1, "W": 0}', "row 1 has column 'W' twice"),
        ("[" * 100_000, "row 0 is not JSON"),
        ("[1]", "row 0 is not a JSON object"),
        ("\n\n", "run.jsonl has no rows"),
        ("", "run.jsonl has no rows"),
    ],
)
def test_a_json_lines_log_that_could_be_misread_is_refused_with_its_place(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(SidecarError, match=says):
        read(tmp_path, text, "run.jsonl")


def test_a_log_that_cannot_be_read_leaves_its_video_and_a_repair_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = {"type": "door", "category": "environment_transition", "text": "a door opens"}
    events = {"file": "{stem}.jsonl", "clock": {"start": "frame", "unit": "frame"}, "rules": [rule]}
    source = small_source(tmp_path, LOG, {**entry(), "events": events})
    good = _digest(source)
    (tmp_path / "run.csv").rename(tmp_path / "kept.csv")
    for name in ("run.csv", "run.jsonl"):
        (tmp_path / name).mkdir()
    listing = discover("gameplay", source, SourceConfig())
    assert listing.notes == ("run.mp4: run.csv is not a file", "run.mp4: run.jsonl is not a file")
    (row,) = scan(source, listing.key_map, list(listing.found))
    assert isinstance(row, dict) and {_digest(source), _digest(source, "events")}.isdisjoint({good})
    part = LogPart.model_validate(entry()["log"])
    with pytest.raises(SidecarError, match=r"run.csv .*cannot be read: .*[Dd]irectory"):
        read_columns(source, "run.csv", part)
    (tmp_path / "run.csv").rmdir()
    (tmp_path / "kept.csv").rename(tmp_path / "run.csv")
    assert _digest(source) == good

    def refused(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Store, "read", refused)  # file modes do not bind root, who may run the tests
    with pytest.raises(SidecarError, match="cannot be read: Permission denied"):
        read_columns(source, "run.csv", part)
