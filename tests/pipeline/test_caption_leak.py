"""The leak metric: words of the character, an event or the camera in a scene, and their other senses.

The clean scenes are written to tempt the vocabulary: the same words in their other senses.
"""

from __future__ import annotations

import pytest

from pipeline.caption.leak import Topic, caption_row, score, scores
from schemas.caption import IntervalEvent, Part, StructuredCaption
from schemas.clip import Perspective

FIRST, THIRD = Perspective.FIRST, Perspective.THIRD
C, E, M, U = Topic.CHARACTER, Topic.EVENT, Topic.CAMERA, Topic.UI

PLANTED = [
    (FIRST, C, "A grey hall with crates. The player stands at its end."),
    (FIRST, C, "A narrow corridor of brown stone, where hands hold a shotgun."),
    (FIRST, C, "Green slime covers the floor; a pistol in the foreground points at a door."),
    (FIRST, C, "A courtyard under a red sky that the protagonist crosses."),
    (THIRD, C, "A forest path at dusk with a lone man on it."),
    (THIRD, C, "A ruined city. A hooded warrior with a bow is in the middle of the square."),
    (THIRD, C, "A snowy mountain pass, and she wears a red coat."),
    (THIRD, C, "A market street with stalls and the main character among them."),
    (FIRST, E, "A metal door slides up at the end of the hall."),
    (FIRST, E, "A dark room in which a lamp turns on."),
    (FIRST, E, "A zombie appears behind the crates of a warehouse."),
    (FIRST, E, "A bridge over lava collapses."),
    (FIRST, E, "An arena of brown brick. Suddenly, monsters stand on all sides."),
    (FIRST, E, "Stone stairs lead up to a gate that begins to close."),
    (THIRD, E, "A beach at noon; after a few moments, clouds cover the sun."),
    (FIRST, M, "A tiled hall with columns. The camera moves through it."),
    (FIRST, M, "A first-person view of a grey corridor."),
    (FIRST, M, "A valley between hills, panning from left to right."),
    (FIRST, M, "The view turns to a brick wall with a torch."),
    (FIRST, U, "A room with a pool; a health bar is at the lower edge."),
]

CLEAN = [
    (
        FIRST,
        "A long corridor with grey metal walls, lit by lamps in the ceiling. An open door stands at its end.",
    ),
    (FIRST, "A security camera hangs above a broken window; glass covers the tiled floor."),
    (FIRST, "A record player and an old film camera stand on a wooden table."),
    (THIRD, "A plaza with a statue of a man on a horse and a fountain before it."),
    (THIRD, "A gallery with paintings of the hero of a war, and a portrait of a woman with a dog."),
    (THIRD, "A man-made lake between hills, with reeds along the shore."),
    (FIRST, "The corridor turns left behind a row of barrels. Sunlight falls through a window."),
    (FIRST, "The building appears to be abandoned: its doors are gone and moss covers the steps."),
    (FIRST, "An opening in the wall leads to a cave with dripping water and green shoots."),
    (FIRST, "Frying pans and pots hang over a stove in a tiled kitchen."),
    (FIRST, "A wooden frame holds a picture on the wall; the frame of the door is red."),
    (FIRST, "A crowd of people and a man with a hat stand at a market of fruit and cloth."),
    (FIRST, "Zombies and a soldier in green stand before a brown brick wall in a round arena."),
    (THIRD, "Low-poly trees and pink clouds, in the flat style of a cartoon, under warm evening light."),
    (THIRD, "A harbour at night with cranes, containers and yellow lamps; the ground is wet."),
    (FIRST, "Torches burn on stone pillars. Behind them a pit of lava glows in a dim dungeon."),
    (FIRST, "A road runs straight to a village below snowy mountains."),
    (THIRD, "A street of brick houses with a closed shop, parked cars and a row of bare trees."),
    (FIRST, "A viewing platform over a canyon, with a telescope and a sign of a bird."),
    (FIRST, "A desert with the ruins of a collapsed tower, half covered in sand."),
]


@pytest.mark.parametrize(("perspective", "topic", "text"), PLANTED)
def test_a_planted_leak_is_found(perspective: Perspective, topic: Topic, text: str) -> None:
    found = score(Part.SCENE, text, perspective)
    assert topic in {leak.topic for leak in found.leaks}
    assert 0 < found.share <= 1


@pytest.mark.parametrize(("perspective", "text"), CLEAN)
def test_a_clean_scene_has_no_leak(perspective: Perspective, text: str) -> None:
    assert score(Part.SCENE, text, perspective).leaks == ()


def test_a_single_person_is_the_character_only_outside_first_person() -> None:
    text = "A station hall with a man in a grey coat."
    assert score(Part.SCENE, text, FIRST).leaks == ()
    assert [leak.topic for leak in score(Part.SCENE, text, Perspective.UNKNOWN).leaks] == [C]


def test_the_share_counts_sentences_of_each_field() -> None:
    door = IntervalEvent(category="environment_transition", text="A door opens.")
    pan = IntervalEvent(category="object_change", text="The camera pans left. A lamp breaks.")
    caption = StructuredCaption(
        scene="A grey hall. The player stands in it. Lamps hang from the ceiling. A door opens.",
        character="A courier with a yellow backpack, walking through a street.",
        ui="A minimap at the upper right.",
        events=(IntervalEvent(), door, pan),
    )
    found = scores(caption, THIRD)
    assert {part: (s.leaking, s.sentences) for part, s in found.items()} == {
        Part.SCENE: (2, 4),
        Part.CHARACTER: (1, 1),
        Part.UI: (0, 1),
        Part.EVENTS: (1, 3),
    }
    assert found[Part.SCENE].share == 0.5
    assert [leak.sentence for leak in found[Part.SCENE].leaks] == [1, 3]


def test_an_empty_caption_has_no_leak() -> None:
    found = scores(StructuredCaption(events=(IntervalEvent(),)), FIRST)
    assert {s.share for s in found.values()} == {0.0}


def test_a_row_of_the_table_says_what_leaks_and_leaves_out_what_is_empty() -> None:
    caption = StructuredCaption(
        scene="A grey hall. A door opens.", events=(IntervalEvent(),) * 3, provenance="some-vlm"
    )
    row = caption_row(caption, FIRST)
    assert (row["scene_leak"], row["character_leak"], row["ui_leak"], row["events_leak"]) == (
        0.5,
        None,
        None,
        None,
    )
    assert row["leaks"] == "scene event: opens"
    assert (row["intervals"], row["events"], row["provenance"], row["unsafe"]) == (
        3,
        0,
        "some-vlm",
        "unknown",
    )
