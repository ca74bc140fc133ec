"""Two hosts, as network namespaces of this machine, with names of their own and one slow link."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/support/distributed/on_two_hosts.py"
HOSTS = ("seqshard-a", "seqshard-b")
RATE = 25e6  # bytes a second


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=20)


@pytest.fixture
def link() -> Iterator[str]:
    """The name of the link on both hosts; the first has the address 10.77.0.1."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root, ip and tc")
    name = "seqshard0"
    try:
        connect(name)
        yield name
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces with a limited link here: {error.stderr.decode()}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], check=False, capture_output=True)


def connect(name: str) -> None:
    """Make the hosts, and a link of ``RATE`` between them."""
    for host in HOSTS:
        run(f"ip netns add {host}")
    run(f"ip link add {name} netns {HOSTS[0]} type veth peer name {name} netns {HOSTS[1]}")
    for n, host in enumerate(HOSTS, 1):
        inside = f"ip netns exec {host}"
        run(f"{inside} ip addr add 10.77.0.{n}/24 dev {name}")
        for device in (name, "lo"):
            run(f"{inside} ip link set {device} up")
        shape = f"rate {8 * RATE / 1e6:.0f}mbit burst 64kb latency 400ms"
        run(f"{inside} tc qdisc add dev {name} root tbf {shape}")


@pytest.mark.slow
def test_causal_attention(link: str) -> None:
    """Ranks find their hosts by themselves; keys cross once, as planned and no more; the probe
    finds the rate; results are those of one device."""
    given = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": link,
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for n, host in enumerate(HOSTS):
        # A name of its own, as hosts have.
        begin = f"hostname {host} && exec {sys.executable} -m torch.distributed.run"
        where = f"--nnodes 2 --nproc-per-node 2 --node-rank {n}"
        meeting = "--master-addr 10.77.0.1 --master-port 29577"
        script = f"{begin} {where} {meeting} {SCRIPT}"
        command = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", script]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=given, **pipes))  # type: ignore[call-overload]
    try:
        said = [each.communicate(timeout=180) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert all(each.returncode == 0 for each in ranks), said
    found = json.loads(said[0][0].splitlines()[-1])
    print(found)
    assert found["topology"] == "2x2"
    assert found["relays"]
    assert found["error"] < 1e-10
    # Headers of packets, and what barriers and the comparison of calls take, beside the keys.
    assert found["planned"] <= found["crossed"] <= 1.1 * found["planned"] + 2e5
    # Two ranks of a host share the link; a busy machine is slower still.
    assert RATE / 12 <= found["between_bytes"] <= 1.4 * RATE
    assert found["link_bytes"] > found["between_bytes"]
