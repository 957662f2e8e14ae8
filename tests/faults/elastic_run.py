"""A script as a user has it, for torchrun: it trains, and knows nothing of restarts. At first one process dies."""

import json
import os
import sys
from pathlib import Path

import faulty_runs


def main(order: Path) -> None:
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    recipe = json.loads(order.read_text())
    at = {"17": "die"} if (rank, attempt) == ("1", "0") else {}
    faulty_runs.train(recipe, resume=False, at=at, notes=f"{recipe['out']}.{attempt}.{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
