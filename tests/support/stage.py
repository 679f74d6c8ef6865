"""A stage of a call, for tests of the runner: it ends well or badly, or takes too long. Imports no jax."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "parent" in args.words:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("child", child.pid, flush=True)
    if {"slow", "parent"} & set(args.words):
        time.sleep(600)
    if "bad" in args.words:
        print("it went wrong")
        sys.exit(3)
    args.json.write_text(json.dumps({"words": args.words, "flags": os.environ["XLA_FLAGS"]}))
