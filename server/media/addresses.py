"""Which addresses of the internet are public, so that a server may connect to them for a stranger."""

from ipaddress import IPv4Network, IPv6Network, ip_address

# Networks that Python takes for global, or did in some version: through most of them others are reached.
_REFUSED = (
    IPv4Network("168.63.129.16/32"),  # Azure's service for its virtual machines
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv6Network("2001::/23"),  # protocols, such as Teredo
    IPv6Network("2001:db8::/32"),
    IPv6Network("2002::/16"),  # 6to4
    IPv6Network("3fff::/20"),
)
_UNICAST = IPv6Network("2000::/3")  # what is given out of IPv6


def is_public(address: str) -> bool:
    """Return whether an address, as the resolver writes it, is public unicast.

    Private, shared, local, reserved and multicast addresses are not, nor are those that stand for IPv4 addresses.
    """
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if not found.is_global or found.is_multicast or "%" in address:
        return False
    if found.version == 6 and found not in _UNICAST:
        return False
    return not any(found in network for network in _REFUSED)  # no network has addresses of the other version
