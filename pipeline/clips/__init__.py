"""From recordings to clips: what the pictures and the log show, and where to cut."""
