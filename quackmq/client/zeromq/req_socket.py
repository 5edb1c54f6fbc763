"""A REQ socket with timeouts: one request, and one answer or none.

A REQ socket without its answer cannot be used again, and a late answer must not be taken for that
of another request. So the socket is replaced after a timeout. Not thread-safe, except `end_wait`.
"""

from __future__ import annotations

import zmq

from quackmq.client.deadline import Deadline
from quackmq.errors import ClientClosed, InvalidRequest, ProtocolError, QuackError


class ReqSocket:
    def __init__(self, address: str) -> None:
        """`address` is HOST:PORT or tcp://HOST:PORT. The socket is opened by the first request."""
        self.address = address if "://" in address else f"tcp://{address}"
        self._socket: zmq.Socket[bytes] | None = None
        self._is_closed = False

    def request(self, frame: bytes, wait_s: float) -> bytes | None:
        """Send a request and return the answer, or None if there is none in time. Raises
        InvalidRequest for an invalid address, ProtocolError for an invalid answer, and ClientClosed
        after `end_wait`."""
        socket = self._connect()
        deadline = Deadline(max(0.0, wait_s))
        try:
            socket.send(frame, zmq.NOBLOCK)
            # Wait in slices, so that `end_wait` takes effect soon.
            while not socket.poll(int(deadline.slice_s() * 1000), zmq.POLLIN):
                if self._is_closed:
                    raise ClientClosed("the client is closed")
                if deadline.has_passed():
                    self._drop_socket()
                    return None
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._drop_socket()
            raise QuackError(f"the request to {self.address} failed: {error}") from error
        except BaseException:  # an interrupt: the answer may still arrive
            self._drop_socket()
            raise
        if len(frames) != 1:
            raise ProtocolError(f"{self.address} answered with {len(frames)} frames, not one")
        return frames[0]

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def end_wait(self) -> None:
        """Let a request that waits in another thread raise ClientClosed. Any thread may call."""
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True
        self._drop_socket()

    def _connect(self) -> zmq.Socket[bytes]:
        """Return the socket; open it if necessary. Raises ClientClosed, or InvalidRequest for an
        invalid address."""
        if self._is_closed:
            raise ClientClosed("the client is closed")
        if self._socket is None:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
            # Requests that could not be sent in time must not be sent later.
            socket.linger = 0
            try:
                socket.ipv6 = True
                socket.connect(self.address)
            except zmq.ZMQError as error:
                socket.close()
                raise InvalidRequest(f"cannot connect to {self.address}: {error}") from error
            self._socket = socket
        return self._socket
