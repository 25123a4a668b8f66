"""`python -m jobs` is `wp2`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. Ctrl-C while modules load, which takes seconds, ends without a traceback."""
    try:
        from jobs.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
