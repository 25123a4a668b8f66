"""`python -m benchmarks.learn`."""

from benchmarks.learn.run import main

main()
