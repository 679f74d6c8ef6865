"""One of several hosts of a model: `python -m tests.scale.shared_hosts FOLDER NAME DEVICES NODES RANK ADDRESS`.

Runs the requests of `tests.support.shared_model`; the first host prints the results as JSON.
"""

import json
import sys
from pathlib import Path

import jax

from tests.support.commands.leaving import leave
from tests.support.oracles import quick_compiles
from tests.support.shared_model import ask, checkpoint, load


def main(folder: Path, name: str, devices: int, nodes: int, rank: int, address: str) -> None:
    """Run one host. Each host writes its own checkpoint below the folder."""
    jax.config.update("jax_num_cpu_devices", devices // nodes)  # type: ignore[no-untyped-call]
    model, vocab = checkpoint(name, folder / f"{nodes} {rank}")
    several = {} if nodes == 1 else {"nnodes": nodes, "node_rank": rank, "dist_init_addr": address}
    with quick_compiles(), load(model, devices, **several) as llm:
        print(json.dumps(ask(llm, vocab)))


if __name__ == "__main__":
    devices, nodes, rank = map(int, sys.argv[3:6])
    main(Path(sys.argv[1]), sys.argv[2], devices, nodes, rank, sys.argv[6])
    leave()
