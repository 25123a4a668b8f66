"""Does it learn? A probe world, two corpora, the curriculum, and paired evidence (docs/learning.md)."""
