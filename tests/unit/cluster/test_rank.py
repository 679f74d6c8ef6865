"""The rank of a host, from options and from variables of launchers (jswa/cluster/rank.py)."""

import re

import pytest

from jswa.cluster.rank import PORT, Member, find_member
from jswa.config import EngineConfig
from jswa.errors import ConfigError

LWS = {"LWS_LEADER_ADDRESS": "jswa-0.jswa.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
SLURM = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "gpu[007-009,12],other"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


def options(**given: object) -> EngineConfig:
    return EngineConfig(**{"nnodes": 2, "tensor_parallel_size": 4, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ({"node_rank": 1, "dist_init_addr": "node0:1234"}, {}, Member(2, 1, "node0", 1234)),
        ({"node_rank": 0, "dist_init_addr": "10.0.0.1"}, {}, Member(2, 0, "10.0.0.1", PORT)),
        ({"node_rank": 0, "dist_init_addr": "[fd00::1]:1234"}, {}, Member(2, 0, "fd00::1", 1234)),
        ({"node_rank": 0, "dist_init_addr": "fd00::1"}, {}, Member(2, 0, "fd00::1", PORT)),
        ({}, LWS, Member(2, 1, "jswa-0.jswa.default", PORT)),
        ({}, SLURM, Member(2, 0, "gpu007", PORT)),
        ({}, SLURM | {"SLURM_STEP_NODELIST": "a-1"}, Member(2, 0, "a-1", PORT)),
        ({}, SLURM | {"SLURM_STEP_NODELIST": "a-1,b-[2-3]"}, Member(2, 0, "a-1", PORT)),
        ({}, SLURM | {"SLURM_STEP_NODELIST": "n[3,5]-ib"}, Member(2, 0, "n3-ib", PORT)),
        ({}, OPEN_MPI, Member(2, 1, "10.96.0.1", PORT)),
        ({"dist_init_addr": "a:1"}, {"PMI_SIZE": "2", "PMI_RANK": "1"}, Member(2, 1, "a", 1)),
        ({"node_rank": 0, "dist_init_addr": "a:1"}, LWS, Member(2, 0, "a", 1)),
    ],
)
def test_options_override_the_variables_of_the_launcher(
    given: dict[str, object], environ: dict[str, str], expected: Member
) -> None:
    assert find_member(options(**given), environ) == expected


def test_a_single_host_ignores_the_variables_of_the_launcher() -> None:
    assert find_member(EngineConfig(), LWS) is None


def test_addresses_have_the_form_that_jax_reads() -> None:
    assert Member(2, 0, "a", 1).address == "a:1"
    assert Member(2, 0, "fd00::1", 1).address == "[fd00::1]:1"


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({"nnodes": 1, "dist_init_addr": "a:1"}, {}, "dist_init_addr = 'a:1': needs several hosts"),
        ({"nnodes": 1, "node_rank": 1}, {}, "node_rank = 1: needs several hosts"),
        ({"nnodes": 3}, {}, "tensor_parallel_size = 4: must be a multiple of nnodes = 3"),
        ({}, {}, "node_rank = None: must be this host's number, 0 to 1"),
        ({"node_rank": 2}, {}, "node_rank = 2: must be a whole number, at least 0 and less than nnodes = 2"),
        ({"node_rank": -1}, {}, "node_rank = -1: must be"),
        ({"node_rank": "0"}, {}, "node_rank = '0': must be"),
        ({"node_rank": 0}, {}, "dist_init_addr = None: must be the first host's address"),
        ({"node_rank": 0, "dist_init_addr": "a:b"}, {}, "dist_init_addr = 'a:b': must be a host and a port"),
        ({"node_rank": 0, "dist_init_addr": ":80"}, {}, "dist_init_addr = ':80': must be a host and a port"),
        ({"node_rank": 0, "dist_init_addr": "a:65536"}, {}, "dist_init_addr = 'a:65536': must be"),
        ({}, LWS | {"LWS_GROUP_SIZE": "3"}, "nnodes = 2: LeaderWorkerSet has started LWS_GROUP_SIZE = 3"),
    ],
)
def test_errors_name_the_wrong_option(given: dict[str, object], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_member(options(**given), environ)
