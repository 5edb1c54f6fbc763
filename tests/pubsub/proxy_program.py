"""A publisher or a subscriber of the reliable proxy that dies at some step, and goes on where it
was.

    python -m tests.pubsub.proxy_program publisher ADDRESS NAME DIRECTORY TOPIC STEPS PUTS
    python -m tests.pubsub.proxy_program subscriber ADDRESS NAME DIRECTORY TOPIC STEPS

It kills itself after so many steps, of which each message has a few; with 0 it does not.

Both keep what they know in a file of lines, each synced before the next step:

    NAME.told      the number of each message that the broker has acknowledged
    NAME.stored    the id and the value of each message, once
    NAME.wrong     an id that came although it was done with

A subscriber stores a message and then says that it is done. Who dies in between gets that one
again, and no other.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from quackmq.client.proxy import ReliablePublisher, ReliableSubscriber
from quackmq.errors import QuackTimeout
from tests.pubsub.checker import Identity

TIMEOUT_S = 120.0


def main(role: str, address: str, name: str, directory: str, topic: str, *more: str) -> None:
    life, path = Life(int(more[0])), Path(directory)
    if role == "publisher":
        publish(address, name, path / f"{name}.told", topic, life, int(more[1]))
    else:
        subscribe(address, name, path, topic, life)


class Life:
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def step(self) -> None:
        self._steps -= 1
        if self._steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def publish(address: str, name: str, told: Path, topic: str, life: Life, puts: int) -> None:
    with ReliablePublisher(address, name, timeout=TIMEOUT_S) as publisher:
        # The one that it may have died with is published again, which is dropped if it was there.
        number = len(lines(told))
        while number < puts:
            life.step()
            try:
                publisher.publish(topic, str(Identity(name, number)), number=number)
            except QuackTimeout:
                continue
            life.step()
            keep(told, str(number))
            number += 1


def subscribe(address: str, name: str, path: Path, topic: str, life: Life) -> None:
    stored = path / f"{name}.stored"
    known = [line.split(" ", 1)[0] for line in lines(stored)]
    unsure, seen = known[-1:], set(known)
    with ReliableSubscriber(address, name, directory=path / "done", timeout=TIMEOUT_S) as client:
        client.subscribe(topic)
        while True:
            try:
                message = client.get(hold=True)
            except QuackTimeout:
                continue
            life.step()
            if message.id not in seen:
                keep(stored, f"{message.id} {message.text}")
                seen.add(message.id)
            elif message.id not in unsure:
                keep(path / f"{name}.wrong", message.id)
            life.step()
            client.done(message)
            life.step()


def lines(file: Path) -> list[str]:
    """Whole lines: what a crash tore is none."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def keep(file: Path, line: str) -> None:
    with file.open("a") as open_file:
        open_file.write(line + "\n")
        open_file.flush()
        os.fsync(open_file.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
