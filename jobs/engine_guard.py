"""Runs a program so that nothing of it outlives whoever started it: `python engine_guard.py PROGRAM ...`.

It is started in a session of its own, with a pipe as standard input. When the pipe breaks (its owner closed
it, or died however suddenly), and when the program ends by itself, the whole process group is ended: vLLM
runs its engine and workers as further processes of the group.

A Ray worker that ends kills its direct children, and nothing below them. So the guard proper is a grandchild.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 10.0


def main(command: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that it may end its own group
    guard = os.fork()
    if guard:
        os.waitpid(guard, 0)
        return
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_signals)
    threading.Thread(target=_end_with_owner, args=(child,), daemon=True).start()
    code = child.wait()
    print(f"engine_guard: the program ended with exit code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an ignored signal stays ignored in a new program


def _end_with_owner(child: "subprocess.Popen[bytes]") -> None:
    os.read(0, 1)  # nothing is ever written
    os.killpg(0, signal.SIGTERM)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
