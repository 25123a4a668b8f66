"""What a source lists, what a key map may say, and what a sidecar's digest sees."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from recordings import PACK_MAP, find, pack_map, small_source, truth

from pipeline.sources import SourceConfig, SourceError, discover, open_source
from pipeline.sources.keymap import KeyMapError, parse
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


def test_the_path_of_a_key_map_means_the_same_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert SourceConfig(key_map="games.yaml").key_map == str(tmp_path / "games.yaml")
    assert SourceConfig(key_map="s3://b/games.yaml").key_map == "s3://b/games.yaml"


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
