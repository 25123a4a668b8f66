"""`python -m jobs` is `wp2`."""

from jobs.cli import main

main()
