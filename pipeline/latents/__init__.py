"""The latents and text stages: the one room of pipeline that uses trainer/codec, so that what is trained on is
built by the functions that a rollout uses."""
