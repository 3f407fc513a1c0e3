"""A link with a delay and a rate, as a TCP proxy on loopback; kernels without netem can't shape their own.

The connections of a link share its rate, each way by itself. TCP ends at the proxy on both sides, so that there is
no slow start and no loss: a real link of this delay and rate is a little slower.
"""

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

LOOPBACK = "127.0.0.1"
PIECE = 1 << 16  # bytes that pass at once
BUFFER = 1 << 18  # bytes of the kernel's buffer on each side of the proxy: without a bound it holds megabytes
SLACK = 0.05  # seconds by which the event loop may be late without a loss of rate


@dataclass
class Way:
    """One way of a link: the bytes that passed, and when it is free again, on the loop's clock."""

    passed: int = 0
    free: float = 0.0


class Link:
    """A link to a port on loopback, on a port of its own, in a thread of its own.

    Parameters
    ----------
    target : int
        The port that connections go on to.
    delay : float
        Seconds from one end to the other.
    mbit : float
        Mbit/s each way.

    Attributes
    ----------
    port : int
        The port that it listens on.
    down, up : Way
        From the target, and to it.
    """

    def __init__(self, target: int, delay: float, mbit: float) -> None:
        self.target, self.delay, self.rate = target, delay, mbit * 1e6 / 8
        self.down, self.up = Way(), Way()
        self.port = 0
        self._cut_until = 0.0
        self._loop = asyncio.new_event_loop()
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="link")

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def cut(self, seconds: float) -> None:
        """Let nothing pass for so many seconds; connections aren't closed, as when a cable is pulled."""
        self._cut_until = self._loop.time() + seconds

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await self._join(reader, writer)
            except (asyncio.CancelledError, OSError):  # the end; nobody listens at the target
                pass
            finally:
                writer.close()
                tasks.discard(task)

        listener = socket.create_server((LOOPBACK, 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # accepted ones have it, too
        server = await asyncio.start_server(connected, sock=listener, limit=PIECE)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        for task in [*tasks]:
            task.cancel()
        await asyncio.gather(*tasks)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            plain.setblocking(False)
            await self._loop.sock_connect(plain, (LOOPBACK, self.target))
            from_target, to_target = await asyncio.open_connection(sock=plain, limit=PIECE)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass(reader, to_target, self.up))
                    both.create_task(self._pass(from_target, writer, self.down))
            except* OSError:  # an end is gone, and so is the other
                pass
            finally:
                writer.close()
                to_target.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        """Pass on what comes, at the way's rate, until its end."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._deliver(under_way, writer))
        try:
            while True:
                data = await reader.read(PIECE)
                await self._until_joined()
                way.free = max(self._loop.time() - SLACK, way.free) + len(data) / self.rate
                way.passed += len(data)
                free = max(self._loop.time(), way.free)
                under_way.put_nowait((free + self.delay, data))
                if not data:
                    await sender
                    return
                await asyncio.sleep(free - self._loop.time())
        finally:
            sender.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sender

    async def _deliver(
        self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(due - self._loop.time())
            await self._until_joined()
            if not data:
                with suppress(OSError):
                    writer.write_eof() if writer.can_write_eof() else writer.close()
                return
            writer.write(data)
            await writer.drain()

    async def _until_joined(self) -> None:
        while (seconds := self._cut_until - self._loop.time()) > 0:
            await asyncio.sleep(seconds)
