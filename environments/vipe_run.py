"""Run ViPE on one video, in ViPE's own environment, with its settings as arguments:
`python vipe_run.py pipeline=default streams.base_path=clip.mp4 ...`. Its PyPI package has no such program.

Standard input is a pipe from whoever started this: when that is gone, this ends too, and frees the GPU.
"""

import os
import sys
import threading

from vipe import make_pipeline
from vipe.config import parse_typed_config
from vipe.streams.base import StreamList


def end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written; sys.stdin's lock, held here, would abort a regular end
    os._exit(1)


threading.Thread(target=end_with_parent, daemon=True).start()
config = parse_typed_config("default", hydra_args=sys.argv[1:])
videos = StreamList.make(config.streams)
for index in range(len(videos)):
    make_pipeline(config.pipeline).run(videos[index])
