"""TLS under a stream: Python's ssl between two buffers in memory, and the files that it needs.

This module must not import gevent, nor know sessions. The buffers bound what one call takes in: OpenSSL by itself reads
on while it finds messages of TLS alone, and a client that sends many of those would hold up all others.
Invariant: put() counts bytes as gone once the socket has all of their ciphertext, and get() leaves nothing behind that
could be decrypted. So an owner waits for the socket as it does without TLS.
"""

from __future__ import annotations

import os
import ssl
import stat
from contextlib import suppress
from socket import SHUT_RD
from socket import socket as Socket
from typing import Any, Final, NamedTuple

from geventstalk.config import ConfigError
from geventstalk.config_listeners import Tls
from geventstalk.stream import Stream, reason_of

READ: Final = 1
WRITE: Final = 2
RECORD_BYTES: Final = 1 << 14
"""The most that a record carries. No more is read or written at once, because the buffers keep their greatest size."""
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20:!aNULL"
"""For TLS 1.2; those of TLS 1.3 are OpenSSL's."""
_NAMES: Final = ("DNS", "URI", "email")
"""Kinds of names that stand for a client."""
_READ_BYTES: Final = RECORD_BYTES + 320
_FILE_BYTES_MAX: Final = 1 << 20
_KEY_FORBIDDEN: Final = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH

Marks = list[tuple[int, ...]]
"""A value that differs after any change of the files."""


class Found(NamedTuple):
    """The files of a certificate, as they were read."""

    marks: Marks
    context: ssl.SSLContext
    outgoing: ssl.SSLContext
    """For connections to other nodes, which have certificates of the same authorities."""


class Certificate:
    """The context of a listener: its certificate, key and authorities, as of the last correct reading."""

    def __init__(self, files: Tls) -> None:
        """Raises ConfigError."""
        self._paths = [os.path.abspath(path) for path in files.files.values()]
        self._verifies = ssl.CERT_OPTIONAL if files.optional else ssl.CERT_REQUIRED
        self._seen: Marks = []  # of the last reading, correct or not
        self.use(self.read())

    def use(self, found: Found) -> None:
        """Uses the certificate and the authorities that were read, for new connections."""
        self._seen, self.context, self.outgoing = found

    def read_changed(self) -> Found | None:
        """Reads the files if one was changed since all were last read, correct or not. Raises ConfigError."""
        marks = self._marks()
        if marks == self._seen:
            return None
        self._seen = marks
        return self.read()

    def read(self) -> Found:
        """Returns a context of the files as they are now. Raises ConfigError."""
        marks = self._marks()  # before they are read: a change meanwhile is found later
        for path in self._paths:
            _require_readable(path, is_key=path == self._paths[1])
        context, outgoing = self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        outgoing.check_hostname = False  # the names of nodes are looked at instead
        if self._paths[2:]:
            context.verify_mode = self._verifies
        return Found(marks, context, outgoing)

    def _context(self, protocol: Any) -> ssl.SSLContext:
        """Returns a context with the files as they are now. Raises ConfigError."""
        certificate, key, *authorities = self._paths
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION
        try:
            context.load_cert_chain(certificate, key, password=lambda: "")  # OpenSSL would ask for one at the terminal
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use certificate {certificate} with key {key}: {reason_of(error)}") from None
        for path in authorities:
            try:
                context.load_verify_locations(path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot use {path} as authority of clients: {reason_of(error)}") from None
        return context

    def _marks(self) -> Marks:
        """Returns a value that differs after any change of a file."""
        marks: Marks = []
        for path in self._paths:
            try:
                found = os.stat(path)
                marks.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
            except OSError as error:
                marks.append((error.errno or 0,))
        return marks


def _require_readable(path: str, *, is_key: bool) -> None:
    """Raises ConfigError for anything but a small file, and for a key that others can read or replace."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size > _FILE_BYTES_MAX:
        raise ConfigError(f"{path} is no file of a certificate or key")
    if is_key and found.st_mode & _KEY_FORBIDDEN:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"others can read or replace the key {path}: its mode is {mode:04o}; chmod 600 is fine")


class TlsStream(Stream):
    """The owner calls shake_hands() until the handshake is over; from then on the stream is as any other."""

    def __init__(self, sock: Socket, context: ssl.SSLContext, *, server_side: bool = True) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._cipher: Any = b""  # what the socket has not taken of the ciphertext
        self._under_way = 0  # bytes of put() whose ciphertext the socket has not taken yet
        self._in_record = False  # the last get() ended within a record
        self._ended = False  # the client said that it sends nothing more
        self._cut = False  # something was dropped that the client would have got

    def shake_hands(self) -> int:
        """Goes on with the handshake. Returns for which events of the socket it waits; 0 when it is over.

        Raises OSError.
        """
        while True:
            over = False
            try:
                self._tls.do_handshake()
                over = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                self._say()  # the alert
                raise
            if not self._push():
                return WRITE
            if over:
                self.holds_input = True  # the client's first commands may have come with the end of the handshake
                return 0
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                return READ
            if not data:
                raise ConnectionResetError("the other end has gone")
            self._incoming.write(data)

    def get(self, count: Any) -> bytes:
        held, self.holds_input = self.holds_input, False
        if not held:
            data = os.read(self.fd, _READ_BYTES if self._in_record else min(count, _READ_BYTES))
            if not data or self._ended:
                return b""  # an end of the connection is one of the input, too: what was complete before counts
            self._incoming.write(data)
        pieces: list[bytes] = []
        try:
            while piece := self._tls.read(RECORD_BYTES):
                pieces.append(piece)
                if not self._incoming.pending and not self._tls.pending():
                    break  # the exception below costs more
            else:
                self._end_input()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # the client's farewell behind that of the server
            self._end_input()
        except ssl.SSLError:
            self._say()
            raise
        self._say()
        self._in_record = not (pieces or self._ended or held)
        if not pieces and not self._ended:
            raise BlockingIOError
        return b"".join(pieces)

    def _end_input(self) -> None:
        self._ended = True
        with suppress(OSError):
            self.socket.shutdown(SHUT_RD)  # the owner finds an end from now on, as without TLS

    def names_of_peer(self) -> list[str]:
        """Returns the names in the client's certificate: those of its subjectAltName, and its common name."""
        found: Any = self._tls.getpeercert() or {}
        names = [value for kind, value in found.get("subjectAltName", ()) if kind in _NAMES]
        return names + [value for part in found.get("subject", ()) for key, value in part if key == "commonName"]

    @property
    def has_input(self) -> bool:
        """Returns whether bytes have come that get() has not taken."""
        return self._incoming.pending > 0

    @property
    def own_bytes(self) -> int:
        """Returns how many bytes wait for the socket that TLS has made already."""
        return self._outgoing.pending

    def put(self, data: Any) -> int:
        done = 0
        while True:
            if not self._push():
                if done:
                    return done
                raise BlockingIOError
            done += self._under_way
            self._under_way = 0
            if done >= len(data):
                return done
            piece = memoryview(data)[done : done + RECORD_BYTES]
            self._tls.write(piece)
            self._under_way = len(piece)

    def forget(self) -> None:
        self._cut = self._cut or bool(self.unsent)
        super().forget()

    def end_output(self) -> None:
        self._say_farewell()
        super().end_output()

    def close(self) -> None:
        self._say_farewell()
        super().close()

    def _push(self) -> bool:
        """Writes ciphertext. Returns whether the socket has all of it. Raises OSError."""
        while True:
            if not self._cipher:
                self._cipher = self._outgoing.read()
                if not self._cipher:
                    return True
            try:
                sent = os.write(self.fd, self._cipher)
            except BlockingIOError:
                return False
            self._cipher = memoryview(self._cipher)[sent:]

    def _say(self) -> None:
        """Writes the messages of TLS itself. While the socket takes no more bytes, the owner reads nothing."""
        if not self._outgoing.pending:
            return
        with suppress(OSError):  # the next read finds out
            if not self._push() and not self.unsent:
                self.unsent.append(memoryview(b""))

    def _say_farewell(self) -> None:
        """Tells the client that nothing follows, unless earlier bytes still wait for it."""
        with suppress(OSError):
            if not self._cut and not self.unsent and self._push():
                with suppress(ssl.SSLError):  # it does not wait for the client's farewell
                    self._tls.unwrap()
                self._push()
