"""Few steps and Stable Forcing, from the learning run's weights: does it help. Resumable.

    python -m benchmarks.learn.ladder --out DIR [--weights benchmarks/learn/weights]
        [--minutes 120] [--corpora probe,vizdoom] [--seed 0] [--quick]

Of each world a corpus of longer clips is recorded and curated. From the weights of stage 3 the score (2b) is
trained again on these, then stage 4, then stage 5 four times: the ladder of the paper. All of them, the start
of stage 5 and the teacher of many steps are played on held-out clips: 48 recorded latents out, and back.
Source: issue "few steps and long rollouts", table "what it must show"; spec/worldplay2.md g.1.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.learn.corpora import CORPORA, OPTIM, PROBE, VIZDOOM, Made
from benchmarks.learn.journeys import Journeys, draw, measured, pictured
from benchmarks.learn.run import KEPT, MINUTES, Place, prepare, say, timed, wp2, write
from trainer.config import SMALL

LATENTS = 96
"""Of a rollout: 24 chunks."""
LONG = {
    "probe": replace(PROBE, episodes=400, latents=LATENTS),
    "vizdoom": replace(
        VIZDOOM, counts={"navigation": 50, "loops": 4, "events": 2}, seconds=25.0, held_out=0.45
    ),
}
STEPS = {"2b": 150, "4": 150, "5": 40}
"""Of each expert, for 120 minutes on two quiet cores."""
WATCH = {"patience": 1000, "left_out": 1.0, "still": 0.0, "saturated": 1000.0, "blurred": 0.0}
"""An arm that fails is measured like the others: no rule of looks ends it."""
STABLE = {"batch": 2, "micro": 2, "optim": {"lr": 2e-4}}
"""Stage 5: two rollouts of 24 chunks a step, 48 replayed chunks."""


@dataclass(frozen=True)
class Arm:
    """One way to train stage 5. few: does it begin with stage 4. stable: what differs from the method."""

    name: str
    few: bool
    stable: dict[str, Any]


ARMS = (
    Arm("no init, no replay", False, {"replayed": 1}),
    Arm("no init", False, {}),
    Arm("full-context scores", True, {"clip": LATENTS}),
    Arm("full method", True, {}),
)
"""No init: from stage 3, every interval with its one velocity. No replay: as a retained graph would have to,
only the newest clip of a rollout has gradient."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learn.ladder", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; the same one goes on")
    parser.add_argument("--weights", type=Path, default=KEPT, help="a folder a corpus, as `--export` writes")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="scales the steps of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpora", default=",".join(c.name for c in CORPORA))
    parser.add_argument("--quick", action="store_true", help="little of everything: does it run")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in args.corpora.split(","):
        weights = args.weights.absolute() / name
        made = replace(LONG[name], codec=str(weights / "codec.json"))
        made = _little(made) if args.quick else made
        steps = {s: 2 if args.quick else max(1, round(n * args.minutes / MINUTES)) for s, n in STEPS.items()}
        place = Place(args.out / name)
        world = _World(made, place, weights, steps, args.seed)
        prepare(made, place)
        timed(place, "score", world.score)
        timed(place, "few steps", world.few_steps)
        for arm in ARMS:
            timed(place, arm.name, functools.partial(world.arm, arm))
        timed(place, "evidence", world.evidence)
        found[name] = json.loads((place.folder / "evidence.json").read_text())
        found[name]["seconds"] = json.loads((place.folder / "seconds.json").read_text())
    write(args.out / "report.json", found)
    say(f"written: {args.out / 'report.json'}")


def _little(made: Made) -> Made:
    counts = None if made.counts is None else {"navigation": 12, "loops": 1, "events": 0}
    return replace(made, episodes=min(made.episodes, 40), counts=counts, batch=2, held_out=0.2, little=True)


@dataclass(frozen=True)
class _World:
    made: Made
    place: Place
    weights: Path
    steps: dict[str, int]
    seed: int

    @property
    def base(self) -> Path:
        """The run that all arms branch off from: 2b and 4."""
        return self.place.folder / "base"

    def run_of(self, arm: Arm) -> Path:
        return self.place.folder / arm.name.replace(",", "").replace(" ", "-")

    def score(self) -> None:
        self._train(self.base, "2b", {}, self.weights)

    def few_steps(self) -> None:
        self._train(self.base, "4", {}, self.weights)

    def arm(self, arm: Arm) -> None:
        """In a run of its own that shares the files of the base."""
        run = self.run_of(arm)
        if not run.exists():
            partial = run.with_name(f".{run.name}")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self.base, partial, symlinks=True, ignore=shutil.ignore_patterns("rollouts"))
            partial.rename(run)
        self._train(run, "5", arm.stable, None if arm.few else self.weights)

    def evidence(self) -> None:
        journeys = Journeys.open(
            str(self.place.corpus), SMALL, LATENTS, most=24 if not self.made.little else 3
        )
        players: dict[str, Callable[[], Any]] = {
            "stage 3, 12 steps": lambda: journeys.from_files(self.weights),
            "stage 4": lambda: journeys.from_run(self.base, "4"),
        }
        for arm in ARMS:
            players[arm.name] = functools.partial(journeys.from_run, self.run_of(arm), "5")
        videos = {}
        for name, player in players.items():
            say(f"{self.place.folder.name}: {name} plays {len(journeys)} journeys of {LATENTS} latents")
            videos[name] = journeys.play(player())
        rows = measured(journeys, videos, against="stage 4", say=say)
        draw(journeys, videos, self.place.folder / "ladder.png")
        pictured(journeys, videos, self.place.folder / "journeys.png")
        gate = json.loads((self.base / "4" / "gate.json").read_text())
        write(self.place.folder / "evidence.json", {"few_steps": gate, "measures": rows})

    def _train(self, run: Path, stage: str, stable: dict[str, Any], init: Path | None) -> None:
        config = self.place.folder / f"{run.name}-{stage}.yaml"
        config.write_text(yaml.safe_dump(self._config(stage, stable), sort_keys=False))
        begin = ("--init", str(init)) if init is not None else ()
        wp2(
            "train", str(self.place.corpus), "--preset", "small", "--stages", stage, "--out", str(run),
            "--config", str(config), *begin, "--gate-override", "memory,few_steps",
        )  # fmt: skip

    def _config(self, stage: str, stable: dict[str, Any]) -> dict[str, Any]:
        """guidance 1: prompts are of logs, and a negative one points nowhere."""
        one: dict[str, Any] = {"steps": self.steps[stage], "batch": self.made.batch, "micro": self.made.batch}
        if stage == "2b":
            one |= {"optim": OPTIM | {"lr": 1e-3}, "histories": [0, 4, 8, 16], "events": self.made.events}
        elif stage == "4":
            one |= {"histories": [0, 2, 4, 8], "events": self.made.events, "pdd": {"guidance": 1.0}}
        else:
            score = {"latents": LATENTS, "guidance": 1.0, "critic_lr": 6e-4}
            score |= {"score": "2b", "teacher": str(self.weights)}
            one |= STABLE | {"events": self.made.events, "stable": score | stable}
        gate = {"clips": 16, "levels": 2} if not self.made.little else {"clips": 2, "batch": 2, "levels": 1}
        return {
            "preset": "small",
            "seed": self.seed,
            "stages": {stage: one},
            "parallel": {"precision": "bfloat16"},
            "look": {"clips": 1, "chunks": 2 if self.made.little else 12, "steps": 12, "guidance": 1.0},
            "gate": gate,
            "watch": WATCH,
            "save_every": 5 if stage == "5" else 100,
        }


if __name__ == "__main__":
    main()
