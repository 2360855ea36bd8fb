"""Writes default_model_reference.json: greedy continuations of the default model by the reference implementation.

Run by hand, `python -m tests.parity.make_default_reference MODEL.gguf BOOK.txt`: the reference is too slow for
every test run. Each step's lead of the best token over the second is kept, so that a tie is seen for what it is.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

from app.text.tokenizer import load_tokenizer

TOKENS = 64
FILE = Path(__file__).with_name("default_model_reference.json")

TEXTS = {
    "one word": "The",
    "a question": "What is the capital of France, and why is it famous?",
    "code": 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "numbers": "2, 3, 5, 7, 11, 13, 17, 19, 23, 29,",
    "Korean": "옛날 옛적에 깊은 산속에 호랑이 한 마리가 살고 있었습니다. "
    "어느 날 호랑이는 배가 고파서 마을로 내려왔습니다.",
    "emoji and accents": "Café ☕ naïve 🤖 — déjà vu, 東京 and Köln:",
    "chat": "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
}
BOOK = {"a page": (1_000, 129), "a few pages": (5_000, 517), "a chapter": (0, 3_000)}  # first id, number of ids


def load_reference(gguf: Path) -> torch.nn.Module:
    """The reference model in float32, its weights dequantised by its own reader."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """The next TOKENS ids, end-of-sequence ignored, and the smallest lead of a best token over its second."""
    ids, lead, cache, new = [], float("inf"), None, torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(TOKENS):
            result = model(new, cache=cache, use_cache=True, logits_to_keep=1)
            cache = result.cache
            best = result.logits[0, -1].topk(2)
            lead = min(lead, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
            new = torch.tensor([[ids[-1]]])
    return ids, lead


def main(gguf: Path, book: Path) -> None:
    tokenizer, model = load_tokenizer(gguf), load_reference(gguf)
    prompts = {name: tokenizer.encode(text, add_special=False) for name, text in TEXTS.items()}
    pages = tokenizer.encode(book.read_text(encoding="utf-8")[:60_000], add_special=False)
    prompts |= {name: pages[start : start + count] for name, (start, count) in BOOK.items()}
    rows = []
    for name, prompt in prompts.items():
        output, lead = greedy(model, prompt)
        rows.append({"name": name, "prompt": prompt, "output": output, "smallest_lead": round(lead, 5)})
        print(name, len(prompt), f"{lead:.5f}", repr(tokenizer.decode(output, skip_special=False))[:100])
    FILE.write_text(json.dumps(rows, separators=(",", ":")).replace("},{", "},\n{") + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
