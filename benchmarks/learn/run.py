"""The learning benchmark: two corpora recorded and curated, three stages trained, evidence taken; resumable.

    python -m benchmarks.learn --out DIR [--minutes 120] [--corpora probe,vizdoom] [--seed 0]
        [--quick] [--export FOLDER]

Every step is the project's own command (`wp2 record`, `curate`, `train`, `export`), and is left out where it
was finished; run it again after any death. Steps of training scale with the minutes: 120 are for both corpora
on two quiet cores. `--quick` runs the whole of it on little, in minutes, and proves nothing but that it runs.
The second corpus begins from the weights of the first, or, where DIR has none, from those that are kept here.
`--export` copies the weights (bf16, both experts), their codec, and checksums.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.learn.corpora import CORPORA, Made, Tick, record_probe
from benchmarks.learn.evidence import Evidence, Measure
from benchmarks.learn.model import LearnError, load_experts
from jobs.train_config import DataConfig
from jobs.train_data import TrainingData
from schemas.latents import FittedCodec
from trainer.codec.linear import Linear
from trainer.config import SMALL

MINUTES = 120.0
STAGES = ("1", "2a", "2b", "3")
GATES = ("actions", "recall", "memory")
"""Told and written, not obeyed: a stage that failed its gate is reported with what followed."""
KEPT = Path(__file__).parent / "weights"
SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class Place:
    """Where one corpus of a run lies."""

    folder: Path

    @property
    def recordings(self) -> Path:
        return self.folder / "recordings"

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def weights(self) -> Path:
        return self.folder / "weights"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learn", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; the same one goes on")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="scales the steps of training")
    parser.add_argument("--seed", type=int, default=0, help="of the training; the corpora are the same")
    parser.add_argument("--corpora", default=",".join(c.name for c in CORPORA))
    parser.add_argument("--quick", action="store_true", help="little of everything: does it run")
    parser.add_argument("--export", type=Path, help="write weights and checksums here, in a folder a corpus")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [c for c in CORPORA if c.name in args.corpora.split(",")]
    for made in chosen:
        made = _little(made) if args.quick else made
        place = Place(args.out / made.name)
        prepare(made, place)
        init = _start(made, args.out)
        timed(place, "train", functools.partial(_train, made, place, args.minutes / MINUTES, args.seed, init))
        timed(place, "export", functools.partial(_export, place))
        timed(place, "evidence", functools.partial(_evidence, made, place))
        if args.export:
            _copied(place.weights, args.export / made.name)
    _report(args.out, chosen)


def prepare(made: Made, place: Place) -> None:
    """Record and curate, unless that was done."""
    place.folder.mkdir(exist_ok=True)
    timed(place, "record", lambda: _record(made, place))
    timed(place, "curate", lambda: _curate(made, place))


def _little(made: Made) -> Made:
    """The same in minutes: enough clips for every measure to have something to say."""
    counts = None if made.counts is None else {"navigation": 12, "loops": 1, "events": 2}
    return replace(
        made,
        steps=dict.fromkeys(made.steps, 2),
        episodes=min(made.episodes, 60),
        counts=counts,
        batch=2,
        held_out=0.2,
        little=True,
    )


# --- the steps --------------------------------------------------------------------------------------------


def _record(made: Made, place: Place) -> None:
    if made.counts is None:
        record_probe(place.recordings, made.episodes, made.latents, _told("recording"))
        return
    counts = [part for kind, count in made.counts.items() for part in (f"--{kind}", str(count))]
    wp2("record", str(place.recordings), *counts, "--seconds", str(made.seconds), "--third-person", "0")


def _curate(made: Made, place: Place) -> None:
    config = place.folder / "curate.yaml"
    config.write_text(yaml.safe_dump(made.curate(os.cpu_count() or 1), sort_keys=False))
    wp2("curate", f"gameplay:{place.recordings}", "--out", str(place.corpus), "--config", str(config))


def _start(made: Made, out: Path) -> Path | None:
    """The weights that a corpus begins from; None for fresh ones. Raises LearnError where there are none."""
    if not made.start:
        return None
    found = [f for f in (Place(out / made.start).weights, KEPT / made.start) if (f / SUMS).is_file()]
    if not found:
        raise LearnError(f"{made.name} begins from the weights of {made.start}: run that corpus first")
    say(f"{made.name} begins from {found[0]}")
    return found[0].absolute()


def _train(made: Made, place: Place, share: float, seed: int, init: Path | None) -> None:
    config = place.folder / "train.yaml"
    config.write_text(yaml.safe_dump(made.train(share, seed), sort_keys=False))
    begin = () if init is None else ("--init", str(init))
    wp2(
        "train", str(place.corpus), "--preset", "small", "--stages", f"{next(iter(made.steps))}-3",
        "--out", str(place.run), "--config", str(config), *begin, "--gate-override", ",".join(GATES),
    )  # fmt: skip


def open_evidence(made: Made, place: Place) -> Evidence:
    """Raises LearnError where the corpus has no codec, or the run no weights."""
    return Evidence(
        TrainingData.open(str(place.corpus), DataConfig(), SMALL),
        SMALL,
        Linear(FittedCodec.model_validate_json(_codec_file(place).read_bytes())),
        load_experts(place.run, "2a", SMALL),
        load_experts(place.run, "3", SMALL),
        made.bars,
    )


def _codec_file(place: Place) -> Path:
    """The newest fitted codec of the corpus."""
    found = sorted((place.corpus / "statistics").glob("codec-v*.json"))
    if not found:
        raise LearnError(f"{place.corpus} has no fitted codec")
    return found[-1]


def _evidence(made: Made, place: Place) -> None:
    from benchmarks.learn import pictures

    evidence = open_evidence(made, place)
    pictures.next_chunks(evidence, place.folder / "next.png")
    pictures.recalled(evidence, place.folder / "recall.png")
    pictures.returns(evidence, place.folder / "returns.png")
    found: list[Measure] = evidence.all(say)
    told = {
        "corpus": evidence.data.root,
        "train_clips": len(evidence.data.train),
        "held_out_clips": len(evidence.data.held_out),
        "measures": [m.row() for m in found],
    }
    write(place.folder / "evidence.json", told)


def _export(place: Place) -> None:
    """Both experts of stage 3, the codec that decodes what they make, and the sha256 of every file, last."""
    folder = place.weights
    shutil.rmtree(folder, ignore_errors=True)
    wp2("export", str(place.run), "--out", str(folder), "--stage", "3")
    (folder / "codec.json").write_bytes(_codec_file(place).read_bytes())
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder)}" for p in files]
    (folder / SUMS).write_text("\n".join(sums) + "\n")
    say(f"{folder}: {sum(p.stat().st_size for p in files) / 1e6:.1f} MB")


def _copied(weights: Path, folder: Path) -> None:
    """A folder with checksums is an earlier export, and is replaced; another one is not touched."""
    if (folder / SUMS).is_file():
        shutil.rmtree(folder)
    shutil.copytree(weights, folder)


def _report(out: Path, chosen: list[Made]) -> None:
    from benchmarks.learn import pictures

    places = {made.name: Place(out / made.name) for made in chosen}
    pictures.curves({n: p.run for n, p in places.items()}, STAGES, SMALL.experts, out / "curves.png")
    found = {}
    for name, place in places.items():
        evidence = json.loads((place.folder / "evidence.json").read_text())
        found[name] = {**evidence, "seconds": json.loads((place.folder / "seconds.json").read_text())}
    write(out / "report.json", found)
    say(f"written: {out / 'report.json'}, {out / 'curves.png'}")


# --- small things -----------------------------------------------------------------------------------------


def timed(place: Place, name: str, do: Callable[[], None]) -> None:
    """Run a step unless it was finished; seconds add up over restarts."""
    file = place.folder / "seconds.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    if known.get(name, {}).get("done"):
        say(f"{place.folder.name}: {name} finished before")
        return
    began = time.monotonic()
    spent = known.get(name, {}).get("seconds", 0.0)
    try:
        do()
    except BaseException:
        known[name] = {"seconds": spent + time.monotonic() - began, "done": False}
        write(file, known)
        raise
    known[name] = {"seconds": spent + time.monotonic() - began, "done": True}
    write(file, known)
    say(f"{place.folder.name}: {name} took {known[name]['seconds']:.0f} s")


def wp2(*arguments: str) -> None:
    """A command of the project. It says itself what is wrong, and then this run ends too."""
    code = subprocess.run([sys.executable, "-m", "jobs", *arguments], check=False).returncode
    if code:
        raise SystemExit(code)


def _told(what: str) -> Tick:
    def tick(done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            say(f"{what} {done}/{total}")

    return tick


def write(file: Path, value: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.rename(file)


def say(text: str) -> None:
    print(text, flush=True)
