"""The rank of this process among several hosts, from options or from Slurm, MPI or a LeaderWorkerSet. No jax.

A host is one process with the devices that it sees. The first host plans, serves, and broadcasts its launches.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jswa.config import EngineConfig
from jswa.errors import ConfigError

PORT = 9876  # of the first host, unless an option or the launcher names another
# Environment variables by launcher: the number of processes, and the rank of this one.
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
    """This process among `nodes` hosts; the first host listens for the others at `host` and `port`."""

    nodes: int
    rank: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """Host and port in one string."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_member(options: EngineConfig, environ: Mapping[str, str]) -> Member | None:
    """Return this process's rank among `nnodes` hosts, or None if there is one host.

    Options override the environment, which is read only if `nnodes` > 1. Raises ConfigError if the rank or the first
    host's address is unknown.
    """
    nodes = options.nnodes
    if nodes == 1:
        for name in ("node_rank", "dist_init_addr"):
            if getattr(options, name):
                raise ConfigError(name, getattr(options, name), "needs several hosts, but nnodes is 1")
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
        raise ConfigError("dist_init_addr", None, "must be the first host's address and port: no launcher names it")
    return Member(nodes, rank, *_host_and_port(address))


def _rank(environ: Mapping[str, str], nodes: int) -> int:
    """Return the rank that the launcher gives. Raises ConfigError if there is none, or another number of hosts."""
    for launcher, (size, index) in _COUNTED.items():
        if size in environ and index in environ:
            if environ[size] != str(nodes):
                raise ConfigError("nnodes", nodes, f"{launcher} has started {size} = {environ[size]}")
            return int(environ[index])
    raise ConfigError("node_rank", None, f"must be this host's number, 0 to {nodes - 1}: no launcher names it")


def _first_host(environ: Mapping[str, str]) -> str | None:
    """Return the first host's address from the launcher's environment, if it has one."""
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
