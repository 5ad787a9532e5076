"""Machines for experiments on one: network namespaces around a hub, each on a link whose rate `tc tbf` limits.

Needs Linux, root, `ip` and `tc`. A namespace has the files of this machine and a network of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from moe_async.errors import MoeAsyncError

HUB = "10.77.0.1"
"""Address under which every leaf finds the hub."""

PAYLOAD_SHARE = 1448 / 1514
"""Of the bytes that a link's rate counts, those that TCP over Ethernet leaves to the sender."""

_BURST_SECONDS = 0.02
_LEAST_BURST, _QUEUE = 16_000, 200_000


class Star:
    """A hub and leaves around it; on leaving the context all of it is gone, with what still runs there.

    Args:
        leaves: how many.
        rate: of each link in each direction, in bits per second.

    Raises:
        MoeAsyncError: on entering: this machine does not let us.
    """

    def __init__(self, leaves: int, rate: float) -> None:
        self._leaves, self._rate = leaves, rate
        self._prefix = f"moe{os.getpid()}"

    @property
    def _hub(self) -> str:
        return f"{self._prefix}-hub"

    def _leaf(self, leaf: int) -> str:
        return f"{self._prefix}-{leaf}"

    def __enter__(self) -> Self:
        if not all(shutil.which(program) for program in ("ip", "tc")):
            raise MoeAsyncError("links can be limited only with the programs ip and tc (package iproute2).")
        try:
            self._make(self._hub)
            _run("ip", "-n", self._hub, "address", "add", f"{HUB}/32", "dev", "lo")
            for leaf in range(self._leaves):
                self._connect(leaf)
        except subprocess.CalledProcessError as error:
            self.__exit__(None, None, None)
            raise MoeAsyncError(
                f"no network namespaces can be made here ({error.stderr.strip()}); it takes root on Linux."
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (self._hub, *map(self._leaf, range(self._leaves))):
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _connect(self, leaf: int) -> None:
        """A link between the hub and a leaf; each end limits what it sends."""
        name, here, there = self._leaf(leaf), f"leaf{leaf}", "hub"
        self._make(name)
        _run("ip", "-n", self._hub, "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        for namespace, device, last in ((self._hub, here, 1), (name, there, 2)):
            _run("ip", "-n", namespace, "address", "add", f"10.77.{leaf + 1}.{last}/30", "dev", device)
            _run("ip", "-n", namespace, "link", "set", device, "mtu", "1500", "up")
            burst = max(int(self._rate / 8 * _BURST_SECONDS), _LEAST_BURST)
            limit = ["rate", f"{int(self._rate)}bit", "burst", str(burst), "limit", str(_QUEUE + burst)]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        _run("ip", "-n", name, "route", "add", HUB, "via", f"10.77.{leaf + 1}.1")

    def at_hub(self, command: Sequence[str]) -> list[str]:
        """The command that runs another at the hub."""
        return ["ip", "netns", "exec", self._hub, *command]

    def at_leaf(self, leaf: int, command: Sequence[str]) -> list[str]:
        """The command that runs another at a leaf."""
        return ["ip", "netns", "exec", self._leaf(leaf), *command]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
