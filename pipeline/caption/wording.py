"""What a VLM is told, in words. A change of any text here is another PROMPT_VERSION."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.caption import Part, interval_key
from schemas.clip import Perspective

PROMPT_VERSION = 1

SYSTEM = (
    "You describe clips of video games and walks for a data set. You are shown pictures of one clip in order"
    " of time; before each stands the interval it belongs to and its second. Say only what the pictures show."
    " Write plain English sentences in the present tense. Answer with one JSON object of the given form and"
    " nothing else."
)

_VIEW = {
    Perspective.FIRST: "The clip is seen through the eyes of the one who is controlled (first person).",
    Perspective.THIRD: "The clip is seen with the character who is controlled in view (third person).",
    Perspective.UNKNOWN: "It is not known whether the clip is first person or third person.",
}

_CHARACTER = {
    Perspective.FIRST: (
        "character: the body of the one who is controlled, if it can be seen. In first person it cannot:"
        ' hands and what they hold do not count, so the answer is present "no".'
    ),
    Perspective.THIRD: (
        "character: who is controlled: identity, build, clothes, colours and what is carried. Appearance"
        " only: no place, no action and no camera."
    ),
    Perspective.UNKNOWN: (
        'character: if the body of the one who is controlled can be seen, present "yes" and its identity,'
        ' build, clothes and colours, without place, action or camera; else present "no".'
    ),
}

_ASKED = {
    Part.SCENE: (
        "scene: the place, as it stays for the whole clip: layout, objects, materials, light and style of the"
        " picture. Leave out who is controlled, what happens, how the camera moves, and everything that is"
        " drawn over the picture."
    ),
    Part.UI: (
        "ui: what the game draws over the picture, such as bars, counters, maps, a crosshair or messages, and"
        ' where; present "no" if nothing is drawn over it.'
    ),
    Part.EVENTS: (
        "events: for each interval, the one thing that happens to the world in it."
        " environment_transition: the place itself changes (a door opens, weather or light changes, another"
        " place is entered). object_change: a thing or a being appears, disappears, is taken, dropped or"
        " destroyed. complex_interaction: things or beings act on each other (a fight, a talk, a vehicle)."
        " Walking, running and looking around are not events, nor are movements of the camera or changes of"
        ' the interface. If nothing happens, the category is "none": most intervals have none. Tell an event'
        " only in the intervals in which it is seen."
    ),
    Part.FLAGS: (
        "flags: text_heavy, text covers more than about a third of the pictures; watermark, a logo or"
        " watermark of a channel or site lies over them; unsafe, sexual content or gore beyond game violence;"
        " personal_data, real names, chats, accounts, addresses or faces of real people. Answer each with"
        ' "yes" or "no".'
    ),
}

NONCE = (
    "nonce: the four digits in the first picture, which checks that you see pictures and is no part of the"
    " clip."
)
NONCE_LABEL = "check picture"


def question(
    perspective: Perspective, parts: Sequence[Part], spans: Sequence[tuple[float, float]], frames: int
) -> str:
    """The text behind the pictures: what each asked part means, for a clip of these intervals (seconds)."""
    listed = ", ".join(f"{interval_key(i)} {a:.2f}-{b:.2f} s" for i, (a, b) in enumerate(spans))
    asked = [_CHARACTER[perspective] if part is Part.CHARACTER else _ASKED[part] for part in parts]
    lines = [
        f"These were {frames} pictures of a clip of {spans[-1][1]:.2f} seconds, in intervals: {listed}.",
        _VIEW[perspective],
        "Answer each of these by itself, without repeating in one what belongs to another:",
        *(f"- {text}" for text in (NONCE, *asked)),
    ]
    return "\n".join(lines)


def label(interval: int, second: float) -> str:
    """What stands before a picture."""
    return f"interval {interval_key(interval)}, {second:.2f} s"
