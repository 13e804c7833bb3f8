"""A front-end process: it accepts clients and does all their socket work; the link to the engine has the rest.

This module must not know the protocol, gevent or jobs, and imports little: a front is started again when it dies.
Invariant: it reads only from clients that accept their replies, and only as much as the engine allows. At the end of
the link the process ends, whatever its clients do.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
from time import monotonic, sleep
from typing import Final

from geventstalk.addresses import own_end_of, peer_of
from geventstalk.front import frames as f
from geventstalk.front.parting import let_read
from geventstalk.stream import Stream

READ_BYTES: Final = 1 << 16
"""The most that one read takes from a client."""
SHORT_BYTES: Final = 960
"""Bytes that a read asks for when the client's last piece was shorter than this."""
LINK_BYTES: Final = 1 << 18
"""The most that one read takes from the link."""
ACCEPTS_MAX: Final = 32
"""Connections that a front accepts at once when it is the only one."""
ACCEPT_RETRY_S: Final = 0.1
CLOG_BYTES: Final = 1 << 18
"""While more bytes than this wait for the engine, no client is read from: what comes next would wait behind them."""
_EVENTS_MAX: Final = 256
"""Sockets of one turn."""
_TELL_HALF: Final = f.OUT_BYTES_MAX // 2
_SPARE_DESCRIPTORS: Final = 4
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_PR_SET_PDEATHSIG: Final = 1
_SIGKILL: Final = 9

_IN: Final = 0x001  # select.EPOLLIN and so on, as constants that are known when this is compiled
_OUT: Final = 0x004
_ERR: Final = 0x008
_HUP: Final = 0x010
_RDHUP: Final = 0x2000
_EXCLUSIVE: Final = 1 << 28


class Client:
    """One client's stream."""

    __slots__ = ("ask_bytes", "closing", "ended", "fd", "hung_up", "mask", "number", "out", "room", "stream", "taken")

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.stream: Final = Stream(sock)
        self.fd = self.stream.fd
        self.number = number
        self.room = f.IN_BYTES  # what it may still send
        self.out: Final = self.stream.unsent  # replies that its socket has not taken
        self.taken = 0  # what the socket has taken of replies since the engine was told
        self.mask = 0  # what epoll looks for; 0: the socket is not registered
        self.ask_bytes = SHORT_BYTES
        self.ended = False  # it sends nothing more
        self.hung_up = False  # the engine knows that its end stands behind what is not read
        self.closing = False  # the engine is done with it


class Front:
    """Serves until the link ends. `alone` says that no other front has these listeners."""

    def __init__(self, link: socket.socket, listeners: list[socket.socket], alone: bool) -> None:
        self._link: Final = Stream(link)
        self._link_fd = link.fileno()
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._alone = alone
        self._epoll = select.epoll()
        self._link_poll = select.poll()
        self._link_poll.register(self._link_fd, _IN | _OUT)
        self._cutter = f.Cutter()
        self._out: list[bytes] = []  # frames for the engine
        self._out_bytes = 0
        self._begin = 0  # at which of those that send much the next turn begins
        self._by_fd: dict[int, Client] = {}
        self._by_number: dict[int, Client] = {}
        self._last_number = 0
        self._accepts = False  # whether it is to accept at all
        self._may_accept = f.ACCEPTS  # how many, when it is not alone
        self._looks = False  # whether it looks for connections
        self._resume_s = 0.0  # when accepting goes on that pauses
        self._refused = False
        self._over = False
        self._own = 0  # descriptors that are no client's

    def run(self) -> None:
        """Serves, and returns at the end of the link."""
        self._own = len(os.listdir("/proc/self/fd")) + _SPARE_DESCRIPTORS
        self._link.socket.setblocking(False)
        self._epoll.register(self._link_fd, _IN)
        self._say(f.frame(0, f.HELLO))
        self._flush()
        while not self._over:
            self._attend_all(self._epoll.poll(self._timeout_s(), _EVENTS_MAX))
            if self._resume_s and monotonic() >= self._resume_s:
                self._resume_s = 0.0
                self._look()
            if self._out:
                if not self._link.unsent:
                    self._flush()
                self._wait_for_engine()
        self._end()

    def _timeout_s(self) -> float:
        return -1.0 if not self._resume_s else max(0.0, self._resume_s - monotonic())

    def _end(self) -> None:
        """Sends the part of the last replies that clients take at once. The engine is gone."""
        for listener in self._listeners.values():
            listener.close()  # first: another server may want the address
        clients = list(self._by_fd.values())
        for client in clients:
            if client.out:
                self._write(client)
        let_read([client.stream for client in clients], sleep)
        for client in clients:
            client.stream.close()

    # --- the link

    def _say(self, frame: bytes) -> None:
        self._out.append(frame)
        self._out_bytes += len(frame)

    def _flush(self) -> None:
        data = b"".join(self._out)
        self._out.clear()
        self._out_bytes = 0
        try:
            sent = self._link.send(data)
        except OSError:
            self._over = True
            return
        if sent < len(data):
            self._epoll.modify(self._link_fd, _IN | _OUT)

    def _wait_for_engine(self) -> None:
        """Attends to the link alone while the engine is slower than the clients."""
        while self._link.unsent and self._held_bytes() >= CLOG_BYTES and not self._over:
            for _, event in self._link_poll.poll():
                self._attend_link(event)

    def _held_bytes(self) -> int:
        return self._out_bytes + self._link.unsent_bytes

    def _send_left(self) -> None:
        if not self._link.unsent:
            return
        try:
            self._link.flush()
        except OSError:
            self._over = True
            return
        if not self._link.unsent:
            self._epoll.modify(self._link_fd, _IN)
            if self._out:
                self._flush()

    def _attend_link(self, event: int) -> None:
        if event & _OUT:
            self._send_left()
        if event & ~_OUT:
            self._hear()

    def _hear(self) -> None:
        try:
            data = self._link.get(LINK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._over = True
            return
        by_number = self._by_number
        cutter = self._cutter
        cutter.feed(data)
        while cutter.take():
            kind = cutter.kind
            client = by_number.get(cutter.client)
            if client is None:
                self._hear_of_accepting(kind)
            elif kind == f.REPLY:
                self._reply(client, cutter.data)
            elif kind == f.MORE:
                client.room += f.count_of(cutter.data)
                self._look_for(client)
            elif kind == f.CLOSE:
                client.closing = True
                if not client.out:
                    self._drop(client)
            elif kind == f.SHUT:
                client.stream.hang_up()

    def _hear_of_accepting(self, kind: int) -> None:
        """Obeys a frame without a client, or of a client that is gone."""
        cutter = self._cutter
        if kind == f.ACCEPT:
            self._accepts = True
            self._look_again()
        elif kind == f.STOP:
            self._accepts = False
            self._look()
        elif kind == f.MORE and not cutter.client:
            self._may_accept += f.count_of(cutter.data)
            self._look()

    # --- clients

    def _attend_all(self, events: list[tuple[int, int]]) -> None:
        by_fd = self._by_fd
        heavy: list[tuple[Client, int]] = []
        asked: list[int] = []
        for fd, event in events:
            client = by_fd.get(fd)
            if client is not None:
                if client.ask_bytes == SHORT_BYTES:
                    self._attend(client, event)
                else:
                    heavy.append((client, event))
            elif fd == self._link_fd:
                self._attend_link(event)
            elif fd in self._listeners:  # and not of a client that is gone
                asked.append(fd)
        if heavy:
            self._attend_heavy(heavy)
        for fd in asked:  # after all others: a descriptor that was closed meanwhile may have an event of its old client
            if self._looks:
                self._accept(fd)

    def _attend_heavy(self, heavy: list[tuple[Client, int]]) -> None:
        """Attends to clients that send much, behind all others and in turns, until enough waits for the engine.

        At least one of them has its turn, however much the others have sent.
        """
        count = len(heavy)
        begin = self._begin % count
        for at in range(begin, begin + count):
            if at > begin and self._held_bytes() >= CLOG_BYTES:
                count = at - begin
                break
            client, event = heavy[at % len(heavy)]
            if self._by_number.get(client.number) is client:
                self._attend(client, event)
        self._begin = begin + count

    def _attend(self, client: Client, event: int) -> None:
        if event & _ERR:
            self._lose(client)
        elif client.out:
            self._write(client)
            if client.out:
                if event & _HUP:
                    self._lose(client)
            elif client.number not in self._by_number:
                return  # it was lost
            elif client.closing:
                self._drop(client)
            else:
                self._look_for(client)
        elif client.room > 0 and not client.ended:
            self._read(client)
        elif not client.hung_up and not client.ended:
            client.hung_up = True
            self._say(f.frame(client.number, f.HANGUP))
            self._look_for(client)

    def _look_for(self, client: Client) -> None:
        """Registers the client's socket for the events that matter now."""
        if client.out:
            mask = _OUT
        elif client.ended or client.closing:
            mask = 0
        elif client.room > 0:
            mask = _IN
        else:
            mask = 0 if client.hung_up else _RDHUP  # a socket with both ends shut would wake us again and again
        before = client.mask
        if mask == before:
            return
        if not mask:
            self._epoll.unregister(client.fd)
        elif before:
            self._epoll.modify(client.fd, mask)
        else:
            try:
                self._epoll.register(client.fd, mask)
            except OSError:  # there is no memory, or the user has too many of them
                self._lose(client)
                return
        client.mask = mask

    def _read(self, client: Client) -> None:
        try:
            data = client.stream.get(min(client.ask_bytes, client.room))
        except BlockingIOError:
            return
        except (OSError, MemoryError):
            self._lose(client)
            return
        size = len(data)
        if not size:
            client.ended = True
            self._say(f.frame(client.number, f.END))
            self._look_for(client)
            return
        client.ask_bytes = SHORT_BYTES if size < SHORT_BYTES else READ_BYTES
        client.room -= size
        self._out.append(f.head(client.number, f.DATA, size))
        self._out.append(data)
        self._out_bytes += f.HEAD_BYTES + size
        if client.room <= 0:
            self._look_for(client)

    def _reply(self, client: Client, data: bytes) -> None:
        left = bool(client.out)
        try:
            sent = client.stream.send(data)
        except OSError:
            self._lose(client)
            return
        if sent:
            self._took(client, sent)
        if sent < len(data) and not left:
            self._look_for(client)

    def _write(self, client: Client) -> None:
        """Writes as much of the waiting replies as the socket takes."""
        try:
            sent = client.stream.flush()
        except OSError:
            self._lose(client)
            return
        if sent:
            self._took(client, sent)

    def _took(self, client: Client, count: int) -> None:
        taken = client.taken + count
        if taken >= _TELL_HALF:
            self._say(f.count_frame(client.number, f.TAKEN, taken))
            taken = 0
        client.taken = taken

    def _lose(self, client: Client) -> None:
        """Drops a client that is gone."""
        if client.number in self._by_number:
            if not client.closing:
                self._say(f.frame(client.number, f.GONE))
            self._drop(client)

    def _drop(self, client: Client) -> None:
        client.stream.forget()
        del self._by_fd[client.fd]
        del self._by_number[client.number]
        if client.mask:
            self._epoll.unregister(client.fd)
            client.mask = 0
        client.stream.close()

    # --- listeners

    def _look(self) -> None:
        """Registers or unregisters the listeners, as the state demands."""
        looks = self._accepts and not self._resume_s and (self._alone or self._may_accept > 0)
        if looks == self._looks:
            return
        self._looks = looks
        for fd in self._listeners:
            if looks:
                self._epoll.register(fd, _IN | _EXCLUSIVE)
            else:
                self._epoll.unregister(fd)

    def _look_again(self) -> None:
        """Re-registers the listeners, to find connections that another front was woken for, and to be woken last."""
        if self._looks:
            for fd in self._listeners:
                self._epoll.unregister(fd)
            self._looks = False
        self._look()

    def _accept(self, fd: int) -> None:
        """Accepts one connection, and lets the other fronts come before this one accepts the next."""
        listener = self._listeners[fd]
        for count in range(ACCEPTS_MAX if self._alone else 1):
            if not self._accept_one(listener, count > 0):
                return
        if not self._alone:
            self._may_accept -= 1
            self._look_again()

    def _accept_one(self, listener: socket.socket, another: bool) -> bool:
        """Accepts a connection. Returns whether there was one; with `another`, there need not be."""
        if len(self._by_fd) >= _limit() - self._own:
            if not another:
                self._refuse(os.strerror(errno.EMFILE))
            return False
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                self._refuse(os.strerror(error.errno))
            return False
        self._refused = False
        sock.setblocking(False)
        client = Client(sock, self._next_number())
        self._by_fd[client.fd] = client
        self._by_number[client.number] = client
        self._say(f.frame(client.number, f.OPEN, f"{peer_of(sock)}\n{own_end_of(sock)}".encode(errors="replace")))
        self._look_for(client)
        return True

    def _next_number(self) -> int:
        """Returns a number that no client has, nor had among the last four billion."""
        number = self._last_number % f.CLIENTS_MAX + 1
        while number in self._by_number:
            number = number % f.CLIENTS_MAX + 1
        self._last_number = number
        return number

    def _refuse(self, why: str) -> None:
        self._say(f.frame(0, f.REFUSED, b"" if self._refused else why.encode()))
        self._refused = True
        self._resume_s = monotonic() + ACCEPT_RETRY_S
        self._look()


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def end_with(engine: int) -> None:
    """Has the system kill this process when the engine's process ends, also while this process stands still.

    The system looks at the thread that started this process. That is the engine's main thread, which ends last.
    """
    try:
        import ctypes  # here: Python may lack it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    except (AttributeError, ImportError, MemoryError, OSError):
        pass  # this system refuses what ctypes needs: the end of the link remains
    if os.getppid() != engine:
        os._exit(0)  # it ended before the system was told


def main(words: list[str]) -> None:
    """Runs a front. The words are the descriptors of the link and of the listeners, and `alone` when it is alone.

    The process that started it holds back the signals that would end it: it ends with its link.
    """
    link = socket.socket(fileno=int(words[0]))
    numbers = [int(word) for word in words[1:] if word != "alone"]
    listeners = [socket.socket(fileno=number) for number in numbers]
    try:
        Front(link, listeners, "alone" in words).run()
    except MemoryError:
        os._exit(os.EX_OSERR)  # as the engine's process tells
    os._exit(0)
