"""The addresses at which driver and slots reach each other.

A slot is reached at the first available of these:

1. `RuntimeSettings.slot_host`, which may refer to a variable or a file of the slot's own machine
2. an address to which the machine's host name resolves, IPv4 before IPv6, unless it is loopback
3. the source address of the slot's packets to the driver

Link-local addresses of IPv6 are left out: they need an interface, which differs between machines.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from onceflow.core.errors import SettingsRefused
from onceflow.core.secret_references import follow_references

_DISCARD_PORT = 9
"""A port for connecting datagram sockets. That sends nothing, so any port but 0 works."""


def to_location(scheme: str, host: str, port: int) -> str:
    """Return the location of a Flight server. An IPv6 address is put in brackets."""
    bare = host.removeprefix("[").removesuffix("]")
    return f"{scheme}://[{bare}]:{port}" if ":" in bare else f"{scheme}://{bare}:{port}"


def host_of(location: str) -> str:
    """Return the host in a Flight server's location, without brackets."""
    return urlsplit(location).hostname or ""


def find_slot_host(driver_address: str, slot_host: str | None) -> str:
    """Return the host at which other slots reach a slot of this machine.

    Raises:
        SettingsRefused: No address of this machine leads to the driver.
        ConfigError: `slot_host` refers to a variable or file that does not exist.
    """
    if slot_host is not None:
        return follow_references(slot_host, setting="slot_host")
    name = socket.gethostname()
    for address in resolve(name):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    driver = host_of(driver_address)
    if route := find_route_source(driver):
        return route
    raise SettingsRefused(
        f"the host name {name!r} of this machine resolves to no address that other machines can"
        f" reach, and this machine has no route to the driver at {driver!r}. Map the name to this"
        " machine's network address (/etc/hosts), or set RuntimeSettings(slot_host=…), for"
        ' example "${env:SLOT_HOST}" with a variable on each machine'
    )


def resolve(host: str) -> list[str]:
    """Return the addresses to which `host` resolves on this machine, IPv4 first; may be empty."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        infos = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = [str(sockaddr[0]) for _, _, _, _, sockaddr in infos]
    usable = [address for address in addresses if not ipaddress.ip_address(address).is_link_local]
    return sorted(dict.fromkeys(usable), key=lambda address: ":" in address)


def find_route_source(host: str) -> str | None:
    """Return this machine's address on its way to `host`, or None if no route leads there."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as route:
                route.connect((address, _DISCARD_PORT))
                return str(route.getsockname()[0])
        except OSError:
            continue
    return None


def leads_to_loopback(host: str) -> bool:
    """Return True if `host` resolves on this machine, and only to loopback addresses."""
    addresses = resolve(host)
    return bool(addresses) and all(
        ipaddress.ip_address(address).is_loopback for address in addresses
    )


def read_network_id() -> str:
    """Return the identity of this process's network stack; empty if Linux does not provide it.

    Containers that use their machine's network have the machine's identity, others their own. Two
    stacks that reach each other never share an address.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115 - no path, but a name
    except OSError:
        return ""
