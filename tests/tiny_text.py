"""A tokenizer whose ids are bytes: 0 to 255 stand for themselves, 256 begins a text, 257 ends it."""

import json
from pathlib import Path

from app.text.tokenizer import _ALPHABET, Tokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    """Make `folder` a model folder as far as text goes; returns it."""
    specials = ["<s>", "</s>"]
    vocabulary = dict(_ALPHABET) | {name: 256 + i for i, name in enumerate(specials)}
    added = [
        {
            "id": 256 + number,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, name in enumerate(specials)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 257}))
    return folder


def byte_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of such a folder."""
    return load_tokenizer(write_tokenizer(folder))
