"""A vision-language checkpoint with random weights, made on the spot: Qwen2.5-VL at 0.6 M parameters.

It loads, sees images and answers as a real model does; what it says is noise. Its tokenizer is trained on a
few lines of JSON and English, so that no file is fetched. Takes about 10 s.

    python -m tests.tiny_vlm FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONTEXT = 32768
MERGE, PATCH = 2, 14
PIXELS_MIN, PIXELS_MAX = (MERGE * PATCH) ** 2 * 4, (MERGE * PATCH) ** 2 * 64
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
VISION, IMAGE, VIDEO = "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (PAD, START, END, VISION_START, VISION_END, VISION, IMAGE, VIDEO)

TEXT = (
    '{"scene":"a corridor of grey stone with iron doors","character":"a knight in red armour","ui":"none"}',
    '{"i00":{"category":"none","text":""},"i01":{"category":"object_change","text":"a door opens"}}',
    "Describe the scene, the character, the interface and what happens in each interval of this game clip.",
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint into `folder` (made if need be): the same weights for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder)
    _processors(folder)
    _weights(folder, ids, seed)
    return folder


def _tokenizer(folder: Path) -> dict[str, int]:
    """Byte-level BPE of 480 tokens and the special ones. Returns their ids."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT * 50, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    model = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    _write(folder / "vocab.json", model["vocab"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    plain = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {str(tokenizer.token_to_id(name)): {"content": name} | plain for name in SPECIAL}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
    }
    _write(folder / "tokenizer_config.json", settings)
    return {name: tokenizer.token_to_id(name) for name in SPECIAL} | {"": tokenizer.get_vocab_size()}


def _processors(folder: Path) -> None:
    common = {
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": PIXELS_MIN, "longest_edge": PIXELS_MAX},
        "min_pixels": PIXELS_MIN,
        "max_pixels": PIXELS_MAX,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
    }
    _write(folder / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"} | common)
    _write(
        folder / "video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor"} | common
    )


def _weights(folder: Path, ids: dict[str, int], seed: int) -> None:
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}  # half of a head of 64
    text = {
        "vocab_size": -(-ids[""] // 64) * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 1e6,
        "rope_parameters": rope,
        "rope_scaling": rope | {"type": "mrope"},
        "tie_word_embeddings": True,
        "bos_token_id": ids[PAD],
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "in_channels": 3,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        vision_token_id=ids[VISION],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)
    ends = [ids[END], ids[PAD]]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ids[PAD])
    model.save_pretrained(folder)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
