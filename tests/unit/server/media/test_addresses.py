"""Which addresses a server connects to for a stranger."""

import pytest

from server.media.addresses import is_public


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "2a00:1450:4001:80b::200e"])
def test_these_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.1", "127.0.0.1", "127.255.255.254", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "100.100.100.200", "192.0.0.1", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1",
        "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "168.63.129.16",
        "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:8.8.8.8", "64:ff9b::7f00:1",
        "64:ff9b:1::1", "100::1", "2001::1", "2001:0:4136:e378::1", "2001:10::1", "2001:20::1", "2001:db8::1",
        "2002:7f00:1::", "2002:808:808::", "3fff::1", "4000::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo",
        "2606:4700::1111%lo", "fec0::1", "ff02::1", "ff0e::1",
        "", "localhost", "1", "0x7f000001", "127.1", "0177.0.0.1", "8.8.8.8 ", "08.8.8.8",
    ],
)  # fmt: skip
def test_all_others_are_refused(address: str) -> None:
    assert not is_public(address)
