"""Scores of one small task twice: `python lm_eval_scores.py URL MODEL GGUF_FILE FOLDER`, as JSON on the last line.

Once through `local-completions` against a running server, once through lm-eval's own backend for `transformers` on
the same weights. A process of its own: both libraries take seconds and change global settings. FOLDER is for files.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
    "Ireland": "Dublin", "Cuba": "Havana",
}  # fmt: skip


def tasks(folder: Path) -> list[dict]:
    """A task of choices and one of free answers, over documents written here."""
    names = list(CAPITALS.values())
    documents = [
        {
            "question": f"The capital of {country} is",
            "choices": [" " + name for name in (names[n - 1], capital, names[(n + 3) % len(names)])],
            "gold": 1,
            "capital": capital,
        }
        for n, (country, capital) in enumerate(CAPITALS.items())
    ]
    file = folder / "capitals.json"
    file.write_text("\n".join(json.dumps(document) for document in documents))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choices = {
        "task": "capitals",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    answers = {
        "task": "capitals_free",
        "output_type": "generate_until",
        "doc_to_target": " {{capital}}",
        "generation_kwargs": {"until": ["\n", ".", ","], "max_gen_toks": 8, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
    }
    return [common | choices, common | answers]


def evaluate(model: str, arguments: dict, folder: Path) -> dict:
    """Scores by task and metric, and what was answered to each document."""
    import lm_eval

    done = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=tasks(folder), batch_size=4, log_samples=True, bootstrap_iters=0
    )
    scores = {
        f"{task} {metric}": value
        for task, row in done["results"].items()
        for metric, value in row.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    said = {task: [s["filtered_resps"] for s in samples] for task, samples in done["samples"].items()}
    return {"scores": scores, "said": said}


def main() -> int:
    url, name, file, place = sys.argv[1:]
    folder, checkpoint = Path(place), Path(file)
    from transformers import AutoTokenizer

    gguf = {"gguf_file": checkpoint.name}
    AutoTokenizer.from_pretrained(str(checkpoint.parent), **gguf).save_pretrained(folder / "tokenizer")
    served = {
        "model": name,
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(folder / "tokenizer"),
        "num_concurrent": 1,
        "max_retries": 1,
        "max_length": 8192,
    }
    own = {"pretrained": str(checkpoint.parent), "dtype": "float32", "device": "cpu", **gguf}
    answer = {"served": evaluate("local-completions", served, folder), "reference": evaluate("hf", own, folder)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
