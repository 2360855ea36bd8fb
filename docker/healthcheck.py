"""The container's health: whether the front end answers at all. Whether it can serve is /health/ready's to say.

Any answer below 500 counts, so that a server whose /health asks for a key is healthy too.
"""

import os
import sys
import urllib.error
import urllib.request

port = os.environ.get("EVERSTREAM_PORT", "8000")
try:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=4):
        pass
except urllib.error.HTTPError as answer:
    sys.exit(answer.code >= 500)
except OSError as error:
    sys.exit(f"no answer on port {port}: {error}")
