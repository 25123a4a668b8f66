"""What a VLM that judges events is told and shown, and what it may answer.

The wording is pinned: `PROMPT_SHA256` is that of every word and of the reply's schema, stands in each report,
and reports of another one are never compared. Source: spec/worldplay2.md j; DESIGN rule 6.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.caption.frames import NONCE_SIDE, FramePlan, request_tokens, text_tokens
from pipeline.caption.prompt import nonce_picture, picture_part, text_part
from pipeline.caption.reply import Fault, FaultKind, ReplyError
from pipeline.caption.validate import text_faults
from pipeline.caption.wording import NONCE, NONCE_LABEL
from schemas.reply_form import NONCE as NONCE_FORM
from schemas.reply_form import bounded_text, choice, object_of
from schemas.strict_json import StrictJsonError, TextFault, dumps, loads

PROMPT_VERSION = 1
PROMPT_SHA256 = "6553a80e26f0aa605920b57039a980aac689ded31a451087969fd7a1cff19e33"
"""Of `prompt_sha256`. A change of any word is another PROMPT_VERSION, and other numbers."""
GRADES = ("0", "1", "2", "3", "4")
REASON = 200
"""Longest reason of a grade, in characters."""
SCALES = ("instruction", "execution")
"""Of a reply, in order."""

SYSTEM = (
    "You judge videos that a world model made from a start picture and an instruction. You are shown the"
    " start picture, then pictures of the video in order of time; before each stands its second. Judge only"
    " what the pictures show, and judge it strictly. Answer with one JSON object of the given form and"
    " nothing else."
)
START_LABEL = "start picture, which the model was given"
LABEL = "{second:.2f} s"
SPAN = "from {start:.2f} to {stop:.2f} s"
QUESTION = "\n".join(
    (
        "These were the start picture and {count} pictures of a video of {seconds:.2f} seconds.",
        "The instruction: {when} the following happens: {expected}",
        "How the camera and the one who is controlled walk and turn was asked for by other means: it is not"
        " judged.",
        "Answer each of these; in the last two the reason first, in one short English sentence, then the"
        " grade:",
        f"- {NONCE}",
        "- instruction: does what the instruction asks for happen?"
        " 4: all of it, in the time that it gives. 3: nearly all of it, or a little early or late."
        " 2: about half of it, or another thing of the same kind. 1: a hint of it."
        " 0: none of it, or the opposite.",
        "- execution: how well is the event carried out, as a recording of the same world would show it?"
        " 4: without a flaw: cause and effect, shapes, materials and the rest of the scene hold."
        " 3: small flaws. 2: flaws that anyone sees, such as a thing that changes its shape or jumps."
        " 1: hardly to be recognised. 0: nothing of the event is to be seen, or the picture falls apart.",
    )
)


@dataclass(frozen=True, slots=True)
class Question:
    """A request to judge one video, ready to be sent. tokens: most of request and reply together."""

    messages: list[dict[str, Any]]
    nonce: str
    tokens: int
    max_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """Grades 0-4 with their reasons: does what was asked happen, and how well is it carried out."""

    instruction: int
    execution: int
    instruction_reason: str
    execution_reason: str


def reply_schema() -> dict[str, Any]:
    """JSON schema of a reply: a reason before its grade, so that the grade can follow from it."""
    scale = object_of({"reason": bounded_text(REASON), "grade": choice(*GRADES)})
    return object_of({"nonce": NONCE_FORM} | dict.fromkeys(SCALES, scale))


def prompt_sha256() -> str:
    """sha256 of every word that a judge is told, and of the form of its answer."""
    words = [PROMPT_VERSION, SYSTEM, NONCE_LABEL, START_LABEL, LABEL, SPAN, QUESTION, reply_schema()]
    return hashlib.sha256(dumps(words)).hexdigest()


def question(
    plan: FramePlan,
    start: bytes,
    jpegs: Sequence[bytes],
    expected: str,
    spans: Sequence[tuple[float, float]],
    nonce: str,
) -> Question:
    """The request to judge a video.

    start: JPEG of the start picture. jpegs: those of the plan's frames. expected: what should happen, in
    `spans` of seconds.
    """
    check = nonce_picture(nonce)
    labels = [LABEL.format(second=float(second)) for second in plan.seconds]
    when = " and ".join(SPAN.format(start=a, stop=b) for a, b in spans)
    asked = QUESTION.format(
        count=len(jpegs), seconds=float(plan.spans[-1][1]), when=when, expected=expected.rstrip(". ") + "."
    )
    content = [text_part(NONCE_LABEL), picture_part(check), text_part(START_LABEL), picture_part(start)]
    for label, data in zip(labels, jpegs, strict=True):
        content += [text_part(label), picture_part(data)]
    content.append(text_part(asked))
    limits, size = plan.limits, (plan.width, plan.height)
    sizes = [(NONCE_SIDE, NONCE_SIDE)] + [size] * (1 + len(jpegs))
    reply = reply_tokens(plan)
    tokens = request_tokens([SYSTEM, NONCE_LABEL, START_LABEL, *labels, asked], sizes, limits) + reply
    seen = [hashlib.sha256(data).hexdigest() for data in (check, start, *jpegs)]
    digest = hashlib.sha256(dumps([prompt_sha256(), labels, asked, seen])).hexdigest()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": content},
    ]
    return Question(messages, nonce, tokens, reply, digest)


def reply_tokens(plan: FramePlan) -> int:
    """Tokens of the longest reply that the schema allows."""
    longest = {name: {"reason": "x" * REASON, "grade": "0"} for name in SCALES}
    return text_tokens(json.dumps({"nonce": "0000"} | longest), plan.limits) + 1


# --- replies ----------------------------------------------------------------------------------------------


def read_judgement(text: str, finish_reason: str) -> tuple[str, Judgement]:
    """Nonce and judgement of a reply that has exactly the form that was asked for; nothing is repaired.

    Raises ReplyError with a structural fault.
    """
    if finish_reason != "stop":
        raise _fault(FaultKind.FINISH, f"finish reason {finish_reason[:40]!r}, not stop")
    try:
        value = loads(text)
    except StrictJsonError as error:
        kind = FaultKind.UNICODE if error.fault is TextFault.UNICODE else FaultKind.JSON
        raise _fault(kind, error.detail) from None
    reply = _keys(value, ("nonce", *SCALES), "the reply")
    nonce = reply["nonce"]
    if not (isinstance(nonce, str) and len(nonce) == 4 and nonce.isascii() and nonce.isdigit()):
        raise _fault(FaultKind.SCHEMA, "the nonce is not four digits")
    (instruction, why), (execution, how) = (_scale(reply[name], name) for name in SCALES)
    return nonce, Judgement(instruction, execution, why, how)


def content_faults(nonce: str, judgement: Judgement, asked: Question) -> Iterator[Fault]:
    """What speaks against a reply that could be read."""
    if nonce != asked.nonce:
        yield Fault(None, FaultKind.NONCE, f"{nonce} answered, {asked.nonce} shown")
    reasons = (judgement.instruction_reason, judgement.execution_reason)
    for name, text in zip(SCALES, reasons, strict=True):
        for kind, detail in text_faults(text, REASON):
            yield Fault(None, kind, f"{name}: {detail}")


def _scale(value: Any, name: str) -> tuple[int, str]:
    held = _keys(value, ("reason", "grade"), name)
    reason, grade = held["reason"], held["grade"]
    if not isinstance(reason, str) or grade not in GRADES:
        raise _fault(
            FaultKind.SCHEMA, f"{name}: a text and a grade of {GRADES[0]} to {GRADES[-1]} are needed"
        )
    if not reason.strip() or len(reason) > REASON:
        raise _fault(
            FaultKind.BOUNDS, f"{name}: a reason of {len(reason)} characters, 1 to {REASON} are allowed"
        )
    return int(grade), reason


def _keys(value: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _fault(FaultKind.SCHEMA, f"{where} is a {type(value).__name__}, not an object")
    if wrong := sorted(set(names) ^ set(value)):
        raise _fault(FaultKind.SCHEMA, f"{', '.join(wrong)[:60]} of {where} missing or not asked for")
    return value


def _fault(kind: FaultKind, detail: str) -> ReplyError:
    return ReplyError(Fault(None, kind, detail))
