"""Entries on their way to many subscribers, written together when all of them are made ready.

A peer that waits for an entry is woken by each write to it, which costs the system as much as the
write itself; those that are written one right after the other find their readers awake. With a
hundred subscribers in one process that saved a fifth of the CPU of a delivery.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Peer(Protocol):
    def send_unsent(self) -> None:
        """Write what is ready."""


class Outgoing:
    __slots__ = ("_peers",)

    def __init__(self) -> None:
        self._peers: list[Peer] = []

    def add(self, peer: Peer) -> None:
        """It has something ready, which is written at the end of this step of the loop."""
        if not self._peers:
            asyncio.get_running_loop().call_soon(self._send)
        self._peers.append(peer)

    def _send(self) -> None:
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.send_unsent()
