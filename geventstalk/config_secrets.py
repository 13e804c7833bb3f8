"""Reads files that others must not be able to read or replace: tokens of HTTP, users and their rights.

This module must not know what the files say. Invariant: the content comes from the very file that was looked at.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from geventstalk.config import ConfigError

_FORBIDDEN: Final = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


def read_secret(path: str, noun: str, bytes_max: int, owner: int) -> bytes:
    """Returns the content of a file that belongs to root or to the user `owner`, and that only these two can change.

    Its group may read it. `noun` says what the file holds. Raises ConfigError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
        try:
            _require_private(path, noun, os.fstat(fd), owner)
            with open(fd, "rb", closefd=False) as file:
                content = file.read(bytes_max + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > bytes_max:
        raise ConfigError(f"{path} is no file of {noun}: it is larger than {bytes_max} bytes")
    return content


def _require_private(path: str, noun: str, status: os.stat_result, owner: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is no file of {noun}")
    if status.st_uid not in (0, owner):
        raise ConfigError(f"{path} belongs to user {status.st_uid}, who is neither root nor the server's user")
    if status.st_mode & _FORBIDDEN:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"others can read or replace {path}: its mode is {mode:04o}; chmod 600 is fine")
