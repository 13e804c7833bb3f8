"""Certificates of authorities that live for a test, made by the program `openssl`."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

_NEW = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Pair(NamedTuple):
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates. Its own certificate is `trusted`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.trusted, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl("req", "-x509", *_NEW, "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.trusted)

    def certify(self, name: str, *, days: int = 2) -> Pair:
        """Makes a key and its certificate, which is good for 127.0.0.1 and for this many days."""
        made = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        wish = self._folder / f"{name}.csr"
        _openssl(
            *("req", "-new", *_NEW, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", made.key, "-out", wish),
        )
        _openssl(
            *("x509", "-req", "-in", wish, "-copy_extensions", "copy", "-days", str(days)),
            *("-CA", self.trusted, "-CAkey", self._key, "-CAcreateserial", "-out", made.certificate),
        )
        return made

    def context(self, own: Pair | None = None) -> ssl.SSLContext:
        """Returns the context of a client that trusts this authority, with a certificate of its own where given."""
        context = ssl.create_default_context(cafile=self.trusted)
        context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)  # a cut is told from a farewell
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        return context


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)
