"""What a person sees happen in every 5 s interval of the pack's event clips.

Written down from contact sheets (frames 0.25 to 0.5 s apart at 300 px, single frames at full size around a
change), before the code had mined anything from these clips. Not taken from the event logs. An interval in
which the world and the player's hands stay as they are is none, even where the player walks or turns.
Each row: category, words that the sentence must hold, and what was seen at which second.
"""

from __future__ import annotations

NONE = ("none", (), "")

SEEN: dict[str, tuple[tuple[str, tuple[str, ...], str], ...]] = {
    "event01_door_map01": (
        ("environment_transition", ("door", "opens"), "1.9-2.3: the closed AGM door ahead slides up"),
        ("environment_transition", ("door", "closes"), "6.5-6.9: looking back, the same door comes down"),
        NONE,  # 10.0-10.2: the closed door
    ),
    "event03_kill_zombieman": (
        ("complex_interaction", ("killed",), "1.5: a soldier appears left; 3.0: shot, falls by 3.3"),
        NONE,  # 5.0-5.5: the body lies on the floor
    ),
    "event05_pickup_bonus": (
        # The bottles are nearly hidden behind the pistol: a green tip beside it at 2.1.
        ("object_change", ("picks up",), "2.0 and 2.3: yellow flashes of two pick-ups"),
        NONE,  # 5.0-6.7: turned round, standing
    ),
    "event07_fight_defend_center": (
        ("complex_interaction", ("killed",), "0.5, 2.0: muzzle flashes; red and dark figures fall"),
        ("complex_interaction", ("killed",), "6.0-7.0: figures ahead, shots; 9.0-9.5: two more"),
        ("complex_interaction", ("killed",), "10.5: a figure bursts close by; 11.5, 12.5: shots"),
        ("complex_interaction", ("killed",), "15.0-17.5: figures ahead fall"),
        ("complex_interaction", ("killed",), "20.0-20.5: a red figure, shot; 21.5: one close on the right"),
    ),
    "event09_pickup_shotgun_e1m1": (
        (
            "object_change",
            ("picks up", "shotgun", "weapon"),
            "2.4: the gun beside the body is gone, yellow flash; 2.8-3.3: pistol lowered, shotgun raised",
        ),
        NONE,  # 5.0-6.9: turned round, standing
    ),
}
