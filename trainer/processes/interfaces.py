"""Network interfaces: which one leads to the other ranks, where this machine's name resolves to a loopback address."""

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from ...base.environment import set_default

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, by its name alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def has_public_name() -> bool:
    """Return whether this machine's name, by which gloo chooses an address, resolves to one that others may reach."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.bind(address)  # as torch tries it
                return not is_loopback(str(address[0]))
    return False


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`; "" where that is a loopback address, or not known."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.connect(address)  # a datagram socket: nothing is sent
                source = str(probe.getsockname()[0])
                if not is_loopback(source):
                    return source
    return ""


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address; "" where there is none, or not on Linux."""
    if sys.platform != "linux" or not address:
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def interface_to_ranks(store: "Store", host: str, rank: int, world_size: int) -> str:
    """Return the interface that leads to the other machines, "" where it is not known; every rank calls it.

    On the machine of the store the route to `host` is often the loopback interface: there another rank's address says
    the way.
    """
    own = address_towards(host) if host else ""
    store.set(f"address/{rank}", own)
    if not own:
        addresses = (store.get(f"address/{other}").decode() for other in range(world_size))
        other = next(filter(None, addresses), "")
        own = address_towards(other) if other else ""
    return interface_of(own)


def keep_to_loopback() -> None:
    """Restrict gloo and NCCL to the loopback interface, unless the user has chosen another."""
    keep_to_interface(next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), ""))


def keep_to_interface(name: str) -> None:
    """Restrict gloo and NCCL to a network interface, if there is one, unless the user has chosen another."""
    if name:
        set_default("GLOO_SOCKET_IFNAME", name)
        set_default("NCCL_SOCKET_IFNAME", name)
        set_default("TP_SOCKET_IFNAME", name)
