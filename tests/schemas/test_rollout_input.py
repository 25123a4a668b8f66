"""The released input JSON and its action grammar: sign table, round trip, one line with its place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.clip import Perspective
from schemas.rollout import (
    MOVES,
    PITCHES,
    YAWS,
    Command,
    RolloutError,
    action_rows,
    parse_actions,
    parse_inputs,
    parse_prompts,
)

ENTRY = {
    "image_path": "pictures/door.png",
    "perspective": "fps",
    "action": "none-4,w+left-8,wa+right+up+space-4",
    "prompt": "The scene in the video is: a corridor.",
    "prompt_door": "The scene in the video is: a corridor. The event is: a door opens.",
    "prompt_event": "prompt-8,prompt_door-8",
}


def parsed(**changes: Any) -> Any:
    entry = {k: v for k, v in (ENTRY | changes).items() if v is not None}
    return parse_inputs(json.dumps([entry]), "input.json")[0]


def test_the_sign_table() -> None:
    """[pitch, yaw, forward, lateral, perspective, jump]; spec b."""
    table = {
        "w": (0, 0, 1, 0, 0, 0),
        "s": (0, 0, -1, 0, 0, 0),
        "a": (0, 0, 0, -1, 0, 0),
        "d": (0, 0, 0, 1, 0, 0),
        "wa": (0, 0, 1, -1, 0, 0),
        "wd": (0, 0, 1, 1, 0, 0),
        "sa": (0, 0, -1, -1, 0, 0),
        "sd": (0, 0, -1, 1, 0, 0),
        "left": (0, -3, 0, 0, 0, 0),
        "right": (0, 3, 0, 0, 0, 0),
        "up": (2, 0, 0, 0, 0, 0),
        "down": (-2, 0, 0, 0, 0, 0),
        "space": (0, 0, 0, 0, 0, 1),
        "none": (0, 0, 0, 0, 0, 0),
        "left+space+wd+up": (2, -3, 1, 1, 0, 1),
    }
    for token, row in table.items():
        rows = action_rows(parse_actions(f"{token}-2", "a"), Perspective.THIRD, yaw=3.0, pitch=2.0)
        np.testing.assert_array_equal(rows, np.float32([[0] * 6, row]), err_msg=token)


def test_latent_0_stands_still_and_keeps_its_perspective() -> None:
    rows = action_rows(parse_actions("w-3,s-1", "a"), Perspective.FIRST, 3.0, 3.0)
    assert rows.dtype == np.float32
    assert rows[:, 2].tolist() == [0, 1, 1, -1]
    assert rows[:, 4].tolist() == [1, 1, 1, 1]


def test_an_entry_becomes_chunks_with_their_prompts() -> None:
    one = parsed()
    assert (one.name, one.image, one.perspective) == ("0000_door", "pictures/door.png", Perspective.FIRST)
    assert (one.latents, one.chunks) == (16, 4)
    assert one.prompt_names == ("prompt", "prompt", "prompt_door", "prompt_door")
    assert one.chunk_prompts[2].endswith("a door opens.")
    assert one.commands[2] == Command(4, forward=1, lateral=-1, yaw=1, pitch=1, jump=1)
    assert parsed(output_name="walk-1").name == "walk-1"


command = st.builds(
    lambda move, yaw, pitch, space, latents, order: (
        "+".join(order([t for t in (move, yaw, pitch, space) if t]) or ["none"]) + f"-{latents}",
        Command(
            latents,
            *MOVES.get(move, (0, 0)),
            YAWS.get(yaw, 0),
            PITCHES.get(pitch, 0),
            int(bool(space)),
        ),
    ),
    st.sampled_from(["", *MOVES]),
    st.sampled_from(["", *YAWS]),
    st.sampled_from(["", *PITCHES]),
    st.sampled_from(["", "space"]),
    st.integers(1, 400),
    st.sampled_from([lambda tokens: tokens, lambda tokens: tokens[::-1]]),
)


@given(st.lists(command, min_size=1, max_size=6))
def test_every_command_reads_back_in_any_order_of_its_tokens(commands: list[tuple[str, Command]]) -> None:
    text = ",".join(text for text, _ in commands)
    assert parse_actions(text, "a") == tuple(wanted for _, wanted in commands)


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("w+a-4", r"command 0 'w\+a-4': at most one movement, not w and a; a diagonal is one token, as wa"),
        ("w-4,left+right-4", "command 1 .*at most one yaw, not left and right"),
        ("up+down-4", "at most one pitch"),
        ("space+space-4", "at most one space"),
        ("none+w-4", "none stands alone"),
        ("forward-4", "'forward' is none of w s a d"),
        ("aw-4", "'aw' is none of"),
        ("W-4", "'W' is none of"),
        ("w-0", "a positive number of latents"),
        ("w--4", "'w-' is none of"),
        ("w-4.0", "a positive number"),
        ("w-٤", "a positive number"),
        ("w- 4", "a positive number"),
        ("w -4", "'w ' is none of"),
        ("w", "a name, a dash"),
        ("w-4,", "command 1 ''"),
        ("", "command 0 ''"),
        ("w+-4", "'' is none of"),
    ],
)
def test_a_wrong_action_is_named_with_its_place(action: str, says: str) -> None:
    with pytest.raises(RolloutError, match=says) as caught:
        parse_actions(action, "input.json: entry 0, action")
    assert str(caught.value).startswith("input.json: entry 0, action: command ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prompt-6,prompt-2", "part 0 'prompt-6': 6 latents; prompts change every 4 latents only"),
        ("other-8", "no prompt 'other'; there is prompt, prompt_a-b"),
        ("prompt", "a name, a dash"),
    ],
)
def test_a_wrong_prompt_event_is_named_with_its_place(text: str, says: str) -> None:
    with pytest.raises(RolloutError, match=says):
        parse_prompts(text, ("prompt", "prompt_a-b"), "input.json")
    assert parse_prompts("prompt_a-b-8", ("prompt_a-b",), "x")[0].latents == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"perspective": "first"}, "entry 0, perspective: 'first' is neither fps nor tps"),
        ({"action": None}, "entry 0: action is missing"),
        ({"action": "w-12"}, "entry 0: action lasts 12 latents and prompt_event 16"),
        ({"prompts_event": 3}, "entry 0, prompts_event: a text that is not empty is needed"),
        ({"fps": "16"}, "entry 0: unknown key 'fps'"),
        ({"prompt": ""}, "entry 0, prompt: a text that is not empty"),
        ({"prompt": "a\u202eb"}, "unicode: U\\+202E"),
        ({"output_name": "../up"}, "output_name: '../up' is no plain file name"),
        ({"output_name": ".hidden"}, "no plain file name"),
        ({"image_path": "my door.png"}, "as image_path makes it: give output_name"),
    ],
)
def test_a_wrong_entry_is_named_with_its_place(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RolloutError, match=says) as caught:
        parsed(**changes)
    assert str(caught.value).startswith("input.json") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{}", "a JSON array"),
        ("[]", "a JSON array"),
        ("[3]", "entry 0 is no object"),
        ('[{"action": "w-4", "action": "s-4"}]', "key 'action' is given twice"),
        ("[{]", "at character 2"),
        (
            json.dumps([ENTRY | {"output_name": "x"}] * 2),
            "entry 1: output_name 'x' makes x.mp4, as entry 0 does",
        ),
    ],
)
def test_a_wrong_file_is_refused(data: str, says: str) -> None:
    with pytest.raises(RolloutError, match=says):
        parse_inputs(data, "input.json")


def test_two_videos_never_share_a_file() -> None:
    """NAME.actions.mp4 of one would be NAME.mp4 of the other."""
    entries = [ENTRY | {"output_name": name} for name in ("a.actions", "a")]
    with pytest.raises(RolloutError, match=r"entry 1: output_name 'a' makes a.actions.mp4, as entry 0 does"):
        parse_inputs(json.dumps(entries), "input.json")
