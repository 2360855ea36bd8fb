"""The work of `bench.serve` through OpenVINO GenAI's continuous batching, in-process; run by `bench.peers`.

Knows nothing of ours: it runs in the peer's own environment, takes {model, concurrency, max_tokens, prompts}
as JSON on its standard input and prints one JSON line.
"""

import json
import sys
import time

import openvino_genai as genai  # type: ignore[import-not-found]  # lives in the peer's own environment


def main() -> None:
    """Serve the prompts in batches of `concurrency`, as a closed loop would."""
    asked = json.load(sys.stdin)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    pipe = genai.ContinuousBatchingPipeline(asked["model"], scheduler, "CPU", {})
    config = genai.GenerationConfig(max_new_tokens=asked["max_tokens"], ignore_eos=True, do_sample=False)
    config.apply_chat_template = False
    pipe.generate(["warm up"], [config])
    prompts, size = asked["prompts"], asked["concurrency"]
    start = time.perf_counter()
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        pipe.generate(batch, [config] * len(batch))
    wall = time.perf_counter() - start
    print(json.dumps({"output_rate": len(prompts) * asked["max_tokens"] / wall, "wall": wall}))


if __name__ == "__main__":
    main()
