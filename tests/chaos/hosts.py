"""Four hosts on one bridge: a master of Spark, two workers, and a driver. Cables may fail.

A host is a network namespace that a process of ours holds, so it ends with that process. The
command itself has a network namespace, too, with the bridge and the servers. On a host, the
loopback address leads to the servers' ports of that namespace. So servers have one address
everywhere.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.standalone import ClusterHost, StandaloneCluster

_BRIDGE = "onceflow"
_NETWORK = "10.98.0"
_GATEWAY = f"{_NETWORK}.1"
_COMMAND_TIMEOUT_S = 30
_HOLDER_DEADLINE_S = 30.0
_CORES = 8
"""Of each worker. Two drivers at once have their executors side by side."""
_LOST_PART = "0.3"
# After the change of loopback addresses, so that packets to servers are met, too.
_RULE = {
    "in": "INPUT -i wire -j DROP",
    "out": "POSTROUTING -o wire -j DROP",
    "loss": f"INPUT -i wire -m statistic --mode random --probability {_LOST_PART} -j DROP",
}
_NETEM = {
    "delay": "netem delay 150ms 50ms",
    "reorder": "netem delay 40ms reorder 50% 50%",
}
# A queue that drains this slowly delays packets, by a second at most.
_SLOW = "tbf rate 4mbit burst 32kbit latency 1s"
_NAMES = ("driver", "master", "worker-1", "worker-2")


@dataclass(frozen=True, slots=True)
class Host:
    """A host with one cable to the bridge."""

    name: str
    address: str
    holder: int
    """The process whose network namespace is the host."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command before a command that is to run on this host."""
        return ("nsenter", f"--net=/proc/{self.holder}/ns/net", f"--uts=/proc/{self.holder}/ns/uts")

    @property
    def cable(self) -> str:
        """The cable's end at the bridge. Its end at the host is `wire`."""
        return f"to-{self.name}"

    def run(self, command: str) -> str:
        """Run a command on this host and return its output."""
        return _run([*self.prefix, *command.split()])


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts, with a cluster of Spark on three of them."""

    by_name: dict[str, Host]
    cluster: StandaloneCluster
    has_netem: bool

    @property
    def driver(self) -> Host:
        """The host of the job's drivers."""
        return self.by_name["driver"]


def break_cable(host: Host, action: str, *, has_netem: bool) -> Callable[[], bool]:
    """Break the cable of a host: cut, in, out, loss, delay or reorder.

    Return the function that heals it and returns True if packets really met the fault.
    """
    match action:
        case "cut":
            return _cut(host)
        case "in" | "out" | "loss":
            return _drop(host, _RULE[action])
        case _:
            return _queue(host, _NETEM[action] if has_netem else _SLOW)


def has_netem() -> bool:
    """Return True if the kernel can delay and reorder packets by themselves."""
    try:
        _run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except subprocess.CalledProcessError:
        return False
    _run(["tc", "qdisc", "del", "dev", "lo", "root"])
    return True


def probe_hosts() -> None:
    """Make a bridge and a host, without servers and without Spark.

    Raises:
        CalledProcessError: This user or this kernel does not allow it.
    """
    with ExitStack() as stack:
        lay_bridge(stack, ())
        host = make_host(stack, "probe", 9, ())
        _drop(host, _RULE["loss"])()
        _queue(host, _SLOW)()


def use_own_network(directory: Path) -> None:
    """Set up the network namespace of this process, which also has a mount namespace of its own.

    Names of hosts are then read from a file in `directory`. There is no name server to wait for.
    """
    _run(["ip", "link", "set", "lo", "up"])
    names = directory / "hosts"
    lines = [f"127.0.0.1 localhost {socket.gethostname()}"]
    lines += [f"{_NETWORK}.{number} {name}" for number, name in enumerate(_NAMES, 2)]
    names.write_text("\n".join(lines) + "\n", encoding="ascii")
    _run(f"mount --bind {names} /etc/hosts".split())


@contextmanager
def start_hosts(directory: Path, ports: Sequence[int]) -> Generator[Hosts, None, None]:
    """Make the hosts and run the cluster for as long as the context lasts.

    `ports` are those of servers at the loopback address of this network namespace.
    """
    with ExitStack() as stack:
        lay_bridge(stack, ports)
        hosts = {
            name: make_host(stack, name, number, ports) for number, name in enumerate(_NAMES, 2)
        }
        places = {name: ClusterHost(host.address, host.prefix) for name, host in hosts.items()}
        folder = directory / "cluster"
        folder.mkdir()
        cluster = StandaloneCluster(
            folder, places["master"], (places["worker-1"], places["worker-2"]), cores=_CORES
        )
        stack.callback(cluster.end)
        cluster.start_master()
        cluster.start_workers()
        yield Hosts(hosts, cluster, has_netem())


def lay_bridge(stack: ExitStack, ports: Sequence[int]) -> None:
    """Make the bridge, which leads to `ports` of the loopback address. `stack` removes it."""
    _run(f"ip link add {_BRIDGE} type bridge".split())
    stack.callback(_run, f"ip link del {_BRIDGE}".split())
    _run(f"ip addr add {_GATEWAY}/24 dev {_BRIDGE}".split())
    _run(f"ip link set {_BRIDGE} up".split())
    _route_loopback(())
    stack.callback(_run, ["iptables", "-t", "nat", "-F", "PREROUTING"])
    for port in ports:
        match = f"PREROUTING -i {_BRIDGE} -p tcp -d {_GATEWAY} --dport {port}"
        _run(f"iptables -t nat -A {match} -j DNAT --to-destination 127.0.0.1:{port}".split())


def make_host(stack: ExitStack, name: str, number: int, ports: Sequence[int]) -> Host:
    """Make a host with a cable to the bridge. `stack` removes it."""
    holder = subprocess.Popen(["unshare", "--net", "--uts", "cat"], stdin=subprocess.PIPE)

    def end() -> None:
        holder.kill()
        holder.wait(_COMMAND_TIMEOUT_S)

    stack.callback(end)
    _await_namespace(holder.pid)
    host = Host(name, f"{_NETWORK}.{number}", holder.pid)
    _run(f"ip link add {host.cable} type veth peer name wire netns {holder.pid}".split())
    _run(f"ip link set {host.cable} master {_BRIDGE} up".split())
    for command in (
        f"hostname {name}",
        "ip link set lo up",
        f"ip addr add {host.address}/24 dev wire",
        "ip link set wire up",
        f"iptables -t nat -A POSTROUTING -o wire -s 127.0.0.1 -j SNAT --to-source {host.address}",
    ):
        host.run(command)
    _route_loopback(host.prefix)
    for port in ports:
        match = f"OUTPUT -p tcp -d 127.0.0.1 --dport {port}"
        target = f"{_GATEWAY}:{port}"
        host.run(f"iptables -t nat -A {match} -j DNAT --to-destination {target}")
    return host


def _await_namespace(pid: int) -> None:
    own = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + _HOLDER_DEADLINE_S
    while Path(f"/proc/{pid}/ns/net").readlink() == own:
        if time.monotonic() > deadline:
            raise TimeoutError("the namespace of a host was not made in time")
        time.sleep(0.01)


def _route_loopback(prefix: Sequence[str]) -> None:
    """Let packets with loopback addresses leave through other devices."""
    for device in ("all", "default"):
        setting = f"/proc/sys/net/ipv4/conf/{device}/route_localnet"
        _run([*prefix, "sh", "-c", f"echo 1 > {setting}"])


def _cut(host: Host) -> Callable[[], bool]:
    _run(f"ip link set {host.cable} down".split())
    was_down = _run(f"ip -brief link show dev {host.cable}".split()).split()[1] == "DOWN"

    def heal() -> bool:
        _run(f"ip link set {host.cable} up".split())
        return was_down

    return heal


def _drop(host: Host, rule: str) -> Callable[[], bool]:
    chain, _, rest = rule.partition(" ")
    host.run(f"iptables -t mangle -I {chain} 1 {rest}")

    def heal() -> bool:
        # The first rule is the third line, below the heading.
        packets = host.run(f"iptables -t mangle -nvxL {chain}").splitlines()[2].split()[0]
        host.run(f"iptables -t mangle -D {rule}")
        return int(packets) > 0

    return heal


def _queue(host: Host, discipline: str) -> Callable[[], bool]:
    _run(f"tc qdisc add dev {host.cable} root {discipline}".split())
    host.run(f"tc qdisc add dev wire root {discipline}")

    def heal() -> bool:
        sent = host.run("tc -s qdisc show dev wire").split("Sent ")[1].split()[0]
        host.run("tc qdisc del dev wire root")
        _run(f"tc qdisc del dev {host.cable} root".split())
        return int(sent) > 0

    return heal


def _run(command: Sequence[str]) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
    ).stdout
