"""Which of several hosts this process is: from options, or from what Slurm, MPI or a LeaderWorkerSet tell it. No jax.

A host is one process with the devices that it sees. The first one plans, serves and tells the others what to launch.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jswa.config import EngineConfig
from jswa.errors import ConfigError

PORT = 9876  # of the first host, where whoever starts the processes names none
# Variables by launcher: how many processes there are, and which this one is.
_COUNTED = {
    "LeaderWorkerSet": ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
    "Slurm": ("SLURM_NTASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MPI": ("PMI_SIZE", "PMI_RANK"),
}
# The first name of "node[003-007,011],other" is node003.
_FIRST_NODE = re.compile(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)")
_LAUNCHER = re.compile(r"tcp://([^,:]+)")


class Member(NamedTuple):
    """One of so many hosts; `address` is where the first one listens for the others, host and port."""

    nodes: int
    rank: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """Host and port as one."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_member(options: EngineConfig, environ: Mapping[str, str]) -> Member | None:
    """This process among `nnodes`; None where there is one host. Raises ConfigError where it cannot be told.

    Options come before the environment, which counts only where `nnodes` says that there are several hosts.
    """
    nodes = options.nnodes
    if nodes == 1:
        for name in ("node_rank", "dist_init_addr"):
            if getattr(options, name):
                raise ConfigError(name, getattr(options, name), "is of several hosts, and nnodes is 1")
        return None
    if options.tensor_parallel_size % nodes:
        raise ConfigError(
            "tensor_parallel_size", options.tensor_parallel_size, f"must be a multiple of nnodes = {nodes}"
        )
    rank = _rank(environ, nodes) if options.node_rank is None else options.node_rank
    if not isinstance(rank, int) or not 0 <= rank < nodes:
        raise ConfigError("node_rank", rank, f"must be a whole number, at least 0 and less than nnodes = {nodes}")
    address = options.dist_init_addr or _first_host(environ)
    if address is None:
        raise ConfigError("dist_init_addr", None, "must be the first host's address and port: no launcher tells it")
    return Member(nodes, rank, *_host_and_port(address))


def _rank(environ: Mapping[str, str], nodes: int) -> int:
    """What the launcher says. Raises ConfigError where none says anything, or another number of processes."""
    for launcher, (size, index) in _COUNTED.items():
        if size in environ and index in environ:
            if environ[size] != str(nodes):
                raise ConfigError("nnodes", nodes, f"{launcher} has started {size} = {environ[size]}")
            return int(environ[index])
    raise ConfigError("node_rank", None, f"must be this host's number, 0 to {nodes - 1}: no launcher tells it")


def _first_host(environ: Mapping[str, str]) -> str | None:
    """The address of the first host, as the launcher knows it."""
    if "LWS_LEADER_ADDRESS" in environ:
        return environ["LWS_LEADER_ADDRESS"]
    found = _FIRST_NODE.match(environ.get("SLURM_STEP_NODELIST", ""))
    if found is not None:
        return f"{found[1]}{found[2] or ''}{found[3]}"
    found = _LAUNCHER.search(environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return None if found is None else found[1]


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not address.startswith("[")):  # no port, as in "name" and "::1"
        host, port = address, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError("dist_init_addr", address, "must be a host and a port, as in node0:9876")
    return host, int(port)
