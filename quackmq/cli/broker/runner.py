"""Build and run a broker: the store, the broker on top of it, and the listeners in front.

stdout gets only these lines: `NAME listening on HOST:PORT` (or `on unix:PATH`) for each open
listener, then `ready`. SIGTERM, SIGINT, and SIGHUP from a closed terminal start a clean shutdown:
first the listeners close, so that accepted requests are answered, then the broker, then the store.
A SIGINT during the shutdown exits immediately. Exiting without closing is safe at any time: the
next start recovers, and no data is lost.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, NoReturn, Protocol

from quackmq import __version__
from quackmq.archive.archiving.worker_process import WorkerProcess
from quackmq.archive.tiered_store import TieredStore
from quackmq.broker import Broker, BrokerSettings
from quackmq.cli import limits
from quackmq.cli.broker import closing, process
from quackmq.cli.broker.address import Address, UnixPath
from quackmq.cli.broker.collector import FullCollection
from quackmq.cli.broker.settings import LOCAL_STORE, MEMORY_STORE, Settings
from quackmq.cli.text import pluralize
from quackmq.clock import Clock
from quackmq.errors import InvalidSetting
from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.kafka.server import KafkaServer
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.zmq.budgets import Budgets as ZmqBudgets
from quackmq.protocols.zmq.proxy.clients import ProxySettings
from quackmq.protocols.zmq.proxy.proxy_server import ProxyServer
from quackmq.protocols.zmq.proxy.xpub import XpubServer
from quackmq.protocols.zmq.proxy.xsub import XsubServer
from quackmq.protocols.zmq.server import ZmqServer
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.memory import MemoryStore
from quackmq.watchdog import LoopWatchdog

log = logging.getLogger(__name__)

GAVE_UP: Final = 1
STORE_LOST: Final = 1
INTERRUPTED: Final = 130


class Listener(Protocol):
    """The interface of a listener. `start` returns the address it is bound to: host and port, or
    the path of a Unix socket."""

    async def start(self) -> tuple[str, int] | str | None: ...

    async def close(self) -> None: ...


def _make_kafka_listener(broker: Broker, address: Address, settings: Settings) -> Listener:
    return KafkaServer(broker, address.host, address.port, advertise=settings.advertise)


def _make_http_listener(broker: Broker, address: Address, settings: Settings) -> Listener:
    """Return the HTTP listener. It accepts requests to the advertised host and to the names in
    the settings."""
    return HttpServer(
        broker,
        address.host,
        address.port,
        names=settings.http_names,
        advertised_host="" if settings.advertise is None else settings.advertise.host,
    )


def _make_line_listener(
    broker: Broker, address: Address | UnixPath, settings: Settings
) -> Listener:
    """Return the listener of the line protocol, on a TCP address or a Unix socket."""
    bind_address = address.path if isinstance(address, UnixPath) else address
    return LineServer(
        broker,
        bind_address,
        LineSettings(
            entry_bytes=settings.line_entry_bytes,
            answer_ms=settings.line_answer_ms,
            reading=settings.line_reading,
            durable_acks=settings.line_durable_acks,
        ),
    )


#: Functions that construct each listener. `serve.LISTENERS` has the default addresses.
LISTENER_MAKERS: Final[Mapping[str, Callable[[Broker, Any, Settings], Listener]]] = {
    "kafka": _make_kafka_listener,
    "http": _make_http_listener,
    "line": _make_line_listener,
}
#: The servers of ZeroMQ sockets share their budgets.
ZMQ_SERVERS: Final[Mapping[str, type[ZmqServer | XsubServer | XpubServer]]] = {
    "zmq": ZmqServer,
    "xsub": XsubServer,
    "xpub": XpubServer,
}


def make_listener(
    name: str,
    broker: Broker,
    address: Any,
    settings: Settings,
    zmq_budgets: ZmqBudgets,
    opened: Mapping[str, Listener],
) -> Listener:
    """Construct a listener. `opened` are the listeners opened before it; the proxy needs the XPUB
    listener."""
    if name in ZMQ_SERVERS:
        return ZMQ_SERVERS[name](broker, address.host, address.port, zmq_budgets)
    if name != "proxy":
        return LISTENER_MAKERS[name](broker, address, settings)
    xpub = opened["xpub"]
    assert isinstance(xpub, XpubServer), "XPUB is opened before the proxy"
    proxy = ProxySettings(lease_ms=settings.proxy_lease_ms, any_address=settings.proxy_any_address)
    return ProxyServer(broker, address.host, address.port, xpub, proxy, zmq_budgets)


async def serve(settings: Settings, addresses: Mapping[str, Address | UnixPath]) -> int:
    """Open everything, print the addresses, wait for a signal, then close everything in reverse
    order."""
    process.prepare()
    stopping = _catch_signals()
    if _is_address_checked_first(settings):
        await _check_addresses(addresses)
    async with AsyncExitStack() as opened:
        clock = Clock.of_system()
        opening = asyncio.ensure_future(_open_store(settings, clock, addresses))
        if not await _ends_before(opening, stopping):
            return 0
        store, archive = opening.result()
        opened.push_async_callback(store.close)
        if archive is not None:
            # Loading Parquet's library blocks the loop: do it before there are clients.
            await archive.registry.load_reader()
        broker = Broker(
            store,
            BrokerSettings(
                auto_create_topics=settings.auto_create_topics,
                default_partitions=settings.default_partitions,
                topic_defaults=dict(settings.topic_defaults),
                group_initial_delay_ms=settings.group_initial_delay_ms,
                merge_target_bytes=settings.merge_target_bytes,
            ),
            clock,
            archive=archive,
            file_builder=None if archive is None else WorkerProcess(),
        )
        await broker.open()
        opened.push_async_callback(broker.close)
        watchdog = LoopWatchdog()
        watchdog.start()
        opened.callback(watchdog.stop)
        log.info("quackmq %s with %s", __version__, pluralize(len(broker.topics()), "topic"))
        started: dict[str, Listener] = {}
        zmq_budgets = ZmqBudgets()
        opened.push_async_callback(_close_listeners, started)
        for name, address in addresses.items():
            listener = make_listener(name, broker, address, settings, zmq_budgets, started)
            started[name] = listener
            bound_address = await _start_listener(name, listener, address)
            if isinstance(bound_address, Address):
                broker.listener_addresses[name] = (bound_address.host, bound_address.port)
            print(f"{name} listening on {bound_address}", flush=True)
        garbage_collection = FullCollection()
        garbage_collection.start()
        opened.callback(garbage_collection.stop)
        print("ready", flush=True)

        lost = asyncio.ensure_future(store.lost())
        exit_code = 0
        if await _ends_before(lost, stopping):
            # A new process becomes a standby of the broker that has taken over.
            log.error("the store is lost: %s", lost.result())
            exit_code = STORE_LOST
        log.info("closing")
        # Exit without closing if closing makes no progress.
        closing.watch(lambda: store.work_done, _give_up)
    log.info("closed")
    return exit_code


def _is_address_checked_first(settings: Settings) -> bool:
    """Return whether to check the addresses of the listeners before the store is opened. A start
    that fails leaves no new directory behind. A broker that waits for a database can take over."""
    if settings.store == LOCAL_STORE:
        return settings.data is not None and not settings.data.exists()
    return settings.store != MEMORY_STORE


async def _open_store(
    settings: Settings, clock: Clock, addresses: Mapping[str, Address | UnixPath]
) -> tuple[Store, TieredStore | None]:
    """Open the store. Return it, and again as a TieredStore if it has an archive. A database gets
    one of the addresses, to name this broker."""
    if settings.store == MEMORY_STORE:
        if settings.data is not None:
            log.warning(
                "store = memory: the data directory %s is not used, and all data is lost at exit",
                settings.data,
            )
        return MemoryStore(clock), None
    if settings.store != LOCAL_STORE:
        broker = str(settings.advertise or addresses.get("kafka") or next(iter(addresses.values())))
        return await _open_database(settings, clock, broker), None
    assert settings.data is not None, "serve has checked that data is set"
    if settings.sync != "always":
        log.warning("sync = %s: a power failure can lose acknowledged messages", settings.sync)
    options = LocalOptions(sync=settings.sync, sync_interval_ms=settings.sync_interval_ms)
    log_store = await LocalStore.open(settings.data, options, clock)
    try:
        archive = await TieredStore.open(log_store, log_store.disk, clock)
    except BaseException:
        await log_store.close()
        raise
    return archive, archive


async def _open_database(settings: Settings, clock: Clock, broker: str) -> Store:
    """Open a store in a database, as soon as no other broker owns it. `broker` is the address of
    this one. Raises StorageError, InvalidSetting."""
    try:
        from quackmq.stores.postgres.options import PostgresOptions
        from quackmq.stores.postgres.store import PostgresStore
    except ModuleNotFoundError as error:
        raise InvalidSetting(
            f"--store postgresql://… needs {error.name}, which is not installed: pip install "
            "'quackmq[postgres]'"
        ) from error
    if settings.data is not None:
        log.warning("the data directory %s is not used: the store is a database", settings.data)
    options = PostgresOptions(broker=broker)
    return await PostgresStore.open(settings.store, options, clock)


async def _ends_before(work: asyncio.Future[Any], stopping: asyncio.Event) -> bool:
    """Wait until `work` has ended, or the broker is to stop; return whether `work` has ended. Else
    cancel it."""
    stopped = asyncio.ensure_future(stopping.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if work.done():
        return True
    work.cancel()
    await asyncio.wait([work])
    return False


async def _check_addresses(addresses: Mapping[str, Address | UnixPath]) -> None:
    """Bind each TCP address, and release it. Raise OSError for the first one that cannot be
    bound."""
    for name, address in addresses.items():
        if isinstance(address, UnixPath):
            continue
        try:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(
                asyncio.Protocol, address.host, address.port, start_serving=False
            )
        except OSError as error:
            raise _listener_error(name, address, error) from error
        server.close()
        await server.wait_closed()


async def _start_listener(
    name: str, listener: Listener, address: Address | UnixPath
) -> Address | UnixPath:
    """Start a listener; return the address that it is bound to. Raise OSError with a sentence for
    the user."""
    try:
        bound_address = await listener.start()
    except OSError as error:
        raise _listener_error(name, address, error) from error
    assert bound_address is not None, "a listener with an address is bound"
    return UnixPath(bound_address) if isinstance(bound_address, str) else Address(*bound_address)


def _listener_error(name: str, address: Address | UnixPath, error: OSError) -> OSError:
    """Return the error to raise if a listener cannot be opened: the reason, and what to do."""
    # The event loop's message repeats the address. A failed name look-up has no system error
    # number.
    has_errno = error.errno is not None and error.errno > 0
    reason = os.strerror(error.errno or 0) if has_errno else error.strerror or str(error)
    hint = ""
    if error.errno == errno.EADDRINUSE:
        hint = ". Is another broker running?"
        if isinstance(address, Address):
            hint += f" --{name} {address.host}:0 picks a free port"
    return OSError(f"cannot open the {name} listener on {address}: {reason.lower()}{hint}")


async def _close_listeners(listeners: Mapping[str, Listener]) -> None:
    """Close all listeners concurrently, because each may wait for peers that do not read their
    answers. An error in one does not keep the others from closing."""
    results = await asyncio.gather(
        *(listener.close() for listener in listeners.values()), return_exceptions=True
    )
    for error in results:
        if error is not None:
            raise error


def _catch_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM, SIGINT or SIGHUP sets. A later SIGINT exits the
    process."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def interrupt() -> None:
        if stopping.is_set():
            _exit_now(INTERRUPTED)
        stopping.set()

    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
        loop.add_signal_handler(signal.SIGHUP, stopping.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    return stopping


def _give_up() -> None:
    """Exit without closing the store. The next start recovers."""
    log.error(
        "giving up closing after %d s without progress; the next start will recover",
        limits.DRAIN_MS // 1000,
    )
    _exit_now(GAVE_UP)


def _exit_now(exit_code: int) -> NoReturn:
    logging.shutdown()
    os._exit(exit_code)
