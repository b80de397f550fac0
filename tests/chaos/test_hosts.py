"""Hosts on a bridge: a broken cable disconnects its own host and no other host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.chaos.machine import find_missing_commands
from tests.support.program import REPOSITORY

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

# In a network namespace of its own: a server at its loopback address, and two hosts that ask it.
_PROGRAM = """
import socket, subprocess, sys, threading
from contextlib import ExitStack
from pathlib import Path
from tests.chaos import hosts

hosts.use_own_network(Path(sys.argv[1]))
server = socket.create_server(("127.0.0.1", 23456))

def answer():
    while True:
        connection, _ = server.accept()
        connection.sendall(b"hello")
        connection.close()

threading.Thread(target=answer, daemon=True).start()
ASK = (
    "import socket\\n"
    "with socket.create_connection(('127.0.0.1', 23456), 1) as connection:\\n"
    "    print(connection.recv(99).decode())\\n"
)

def ask(host):
    command = [*host.prefix, sys.executable, "-c", ASK]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "silence"

with ExitStack() as stack:
    hosts.lay_bridge(stack, (23456,))
    first = hosts.make_host(stack, "worker-1", 4, (23456,))
    second = hosts.make_host(stack, "worker-2", 5, (23456,))
    for action in ("cut", "in", "out"):
        heal = hosts.break_cable(first, action, has_netem=False)
        during = ask(first), ask(second)
        print(action, *during, heal(), ask(first))
"""


def test_broken_cable_separates_one_host_until_it_is_healed(tmp_path: Path) -> None:
    prefix = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    if find_missing_commands():
        pytest.skip(f"no {', '.join(find_missing_commands())}")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make network namespaces")
    ended = subprocess.run(
        [*prefix, sys.executable, "-c", _PROGRAM, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.stdout.splitlines() == [
        f"{action} silence hello True hello" for action in ("cut", "in", "out")
    ], ended.stderr
