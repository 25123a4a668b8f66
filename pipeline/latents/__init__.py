"""The latents and text stages: the one part of pipeline that uses trainer/codec, so that data are made by the
functions that a rollout uses."""
