"""Serves with a worker that needs no torch: `python front.py MODEL_FOLDER '<settings>' '<behaviour>'`, both JSON.

The same `serve` as the command line's, only with another program in the worker's place.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from app import process, settings
from tests.fake_worker import command


def main() -> int:
    folder, flags, behaviour = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    chosen = settings.load(**flags)
    configs = chosen.engine_configs(Path(folder), "fake")
    program = command(**behaviour)
    launched = process.launch_all(configs, program)
    from app.main import serve

    return serve(chosen, configs, launched, command=program)


if __name__ == "__main__":
    sys.exit(main())
