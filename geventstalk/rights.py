"""The rights of users on patterns of tubes, and how a connection proves which user it is.

This module must not know files, sockets or commands. Invariant: what no pattern grants is not granted.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, NamedTuple

from geventstalk import globs

PUT: Final = 1
WORK: Final = 2
"""Reserve jobs, and delete, release, bury and touch jobs that the user has reserved."""
LOOK: Final = 4
"""Peek, statistics and lists."""
MANAGE: Final = 8
"""Kick, pause, move and flush, and delete jobs that the user has not reserved."""
ALL: Final = PUT | WORK | LOOK | MANAGE
OPERATE: Final = 16
"""Have the server refuse puts: not a right on a tube, so it is granted on every tube only."""
RIGHTS: Final = {"put": PUT, "work": WORK, "look": LOOK, "manage": MANAGE, "all": ALL, "operate": OPERATE}
EVERY_TUBE: Final = "*"
USER_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
TOKEN_BYTES: Final = 32
"""`geventstalk token new` draws this many random bytes. A guess is hopeless, so a quick hash protects the token."""
HASH: Final = re.compile(r"sha256:[0-9a-f]{64}|scrypt:[0-9a-f]{32}:[0-9a-f]{64}")
SALT_BYTES: Final = 16
_SCRYPT: Final = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26, "dklen": 32}
"""A guess at a chosen token takes some 0.1 s and 32 MB (RFC 7914)."""
NO_LIMIT: Final = 1 << 53
_SECOND_NS: Final = 1_000_000_000
_KNOWN_MAX: Final = 4096
"""Tubes whose rights are kept for each user."""

Network = IPv4Network | IPv6Network


class Proof(NamedTuple):
    """The proofs that a connection is a user's, each None where it is not accepted: a name in a certificate, the hash
    of a token, the number of a user of the host, networks."""

    certificate: str | None = None
    token: str | None = None
    uid: int | None = None
    networks: tuple[Network, ...] = ()


class Limits(NamedTuple):
    """The most that a user may take: connections at a time and puts a second of all of them together, `puts_burst` of
    which may come at once; of each connection the tubes that it watches and the jobs that it holds; the bytes of a job;
    the jobs that the user has put and that are not deleted, and the bytes of them all; ttr and delay of a put.
    """

    connections: int = NO_LIMIT
    puts_per_second: int = NO_LIMIT
    puts_burst: int = NO_LIMIT
    watched: int = NO_LIMIT
    reserved: int = NO_LIMIT
    job_bytes: int = NO_LIMIT
    jobs: int = NO_LIMIT
    bytes: int = NO_LIMIT
    ttr: int = NO_LIMIT
    delay: int = NO_LIMIT


class User:
    """A user, and the rights on each tube. `sees_all` says that the user may look at every tube, `operates` that the
    user may have the server refuse puts, `is_paced` that puts or reserves may have to wait. Puts
    have their turns `put_step_ns` apart (0: at once), and `put_ahead_ns` before that, if earlier turns were not taken.
    `quota` is the most jobs and bytes of the user's jobs together; `bounds_puts` says that puts are changed or counted.
    """

    def __init__(self, name: str, proof: Proof, rights: Mapping[str, int], limits: Limits | None = None) -> None:
        self.limits: Final = Limits() if limits is None else limits
        self.job_bytes: Final = self.limits.job_bytes
        self.reserved_max: Final = self.limits.reserved
        per_second = self.limits.puts_per_second
        self.put_step_ns: Final = 0 if per_second >= NO_LIMIT else _SECOND_NS // per_second
        self.put_ahead_ns: Final = (self.limits.puts_burst - 1) * self.put_step_ns
        jobs, taken = self.limits.jobs, self.limits.bytes
        self.quota: Final = (jobs, taken) if min(jobs, taken) < NO_LIMIT else None
        self.bounds_puts: Final = self.quota is not None or min(self.limits.ttr, self.limits.delay) < NO_LIMIT
        self.is_paced: Final = min(per_second, self.limits.reserved) < NO_LIMIT
        self.name: Final = name
        self.proof: Final = proof
        self.rights: Final = dict(rights)
        self._patterns = [(globs.parts_of(pattern), right) for pattern, right in rights.items()]
        self._known: dict[bytes, int] = {}
        self.operates: Final = rights.get(EVERY_TUBE, 0) & OPERATE != 0
        self.sees_all: Final = rights.get(EVERY_TUBE, 0) & LOOK != 0

    def on(self, tube: bytes) -> int:
        """Returns the rights on a tube: those of all patterns that fit."""
        known = self._known.get(tube)
        if known is None:
            known = 0
            for parts, right in self._patterns:
                if globs.fits(parts, tube):
                    known |= right
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[tube] = known
        return known


class Access:
    """All users."""

    def __init__(self, users: Iterable[User]) -> None:
        self.users: Final = {user.name: user for user in users}
        proofs = [(user.proof, user) for user in self.users.values()]
        self._by_certificate = {proof.certificate: user for proof, user in proofs if proof.certificate is not None}
        tokens = [(proof.token, user) for proof, user in proofs if proof.token is not None]
        self._by_token = {token: user for token, user in tokens if token.startswith("sha256:")}
        self._chosen = {user.name: token for token, user in tokens if token.startswith("scrypt:")}
        self._proven: dict[str, str] = {}  # chosen tokens that were right, as their quick hash, by the user
        self._by_uid = {proof.uid: user for proof, user in proofs if proof.uid is not None}
        networks = [(network, user) for user in self.users.values() for network in user.proof.networks]
        self._networks = sorted(networks, key=lambda pair: -pair[0].prefixlen)

    def of_certificate(self, names: Iterable[str]) -> User | None:
        """Returns the user that one of the names of a certificate stands for."""
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)

    def of_token(self, token: str) -> User | None:
        """Returns the user of a token. Takes the same time whichever token is wrong."""
        found = None
        given = hash_of(token)
        for known, user in self._by_token.items():
            if hmac.compare_digest(given, known):
                found = user
        for name, known in self._proven.items():
            if hmac.compare_digest(given, known):
                found = self.users[name]
        return found

    def is_slow(self, token: str) -> bool:
        """Returns whether the token may be one that a person has chosen, for prove() to look at."""
        return bool(self._chosen) and ":" in token

    def prove(self, token: str) -> None:
        """Has of_token() know a chosen token if it is right. Takes 0.1 s and 32 MB, so it runs in a thread.

        It takes as long for a user that does not exist. Without so much memory the token is not known.
        """
        name = token.partition(":")[0]
        known = self._chosen.get(name, _NO_SECRET)
        try:
            right = hmac.compare_digest(slow_hash_of(token, bytes.fromhex(known.split(":")[1])), known)
        except (MemoryError, ValueError):
            return
        if right:
            self._proven[name] = hash_of(token)

    def recall(self, before: Access) -> None:
        """Takes over which chosen tokens were right, where the users still have them."""
        kept = {name: each for name, each in before._proven.items() if self._chosen.get(name) == before._chosen[name]}
        self._proven.update(kept)

    def of_uid(self, uid: int) -> User | None:
        """Returns the user of this number on the host."""
        return self._by_uid.get(uid)

    def of_address(self, address: str) -> User | None:
        """Returns the user of the smallest network that has this address."""
        found = ip_address(address.partition("%")[0])
        mapped = getattr(found, "ipv4_mapped", None)
        if mapped is not None:
            found = mapped
        return next((user for network, user in self._networks if found in network), None)


def hash_of(token: str) -> str:
    """Returns a token as the file of users has it."""
    return "sha256:" + hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def slow_hash_of(token: str, salt: bytes) -> str:
    """Returns a token that a person has chosen as the file of users has it. Raises MemoryError or ValueError."""
    made = hashlib.scrypt(token.encode("utf-8", "surrogateescape"), salt=salt, **_SCRYPT)
    return f"scrypt:{salt.hex()}:{made.hex()}"


_NO_SECRET: Final = f"scrypt:{bytes(SALT_BYTES).hex()}:{bytes(32).hex()}"


def words_of(rights: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the rights of each pattern, in words."""
    words = {word: right for word, right in RIGHTS.items() if right != ALL}
    return {pattern: [word for word in words if granted & words[word]] for pattern, granted in rights.items()}
