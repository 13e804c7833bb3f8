"""Fills a beanstalkd so that its binlog holds jobs in every state, and asks a server about single jobs."""

from __future__ import annotations

from tests.support.wire import Client


def fill_beanstalkd(client: Client) -> None:
    """Jobs 1 to about 100 in three tubes: ready, delayed, buried, reserved, deleted; released, kicked, moved."""

    def reserve() -> int:
        return int(client.ask(b"reserve-with-timeout 0").split()[1])

    client.ask(b"use work")
    for n in range(40):
        client.put(b"work %d\r\n" % n * (n % 7), pri=1000 - n, delay=3600 + n if n % 8 == 0 else 0, ttr=60 + n)
    client.ask(b"watch work")
    for pri in (5, 4, 9, 4, 6, 1):
        client.ask(b"bury %d %d" % (reserve(), pri))
    for delay in (7200, 9000):
        client.ask(b"release %d 17 %d" % (reserve(), delay))
    client.ask(b"kick 2")
    client.ask(b"release %d 3 0" % reserve())  # not in the binlog
    client.ask(b"use other/tube")
    for n in range(30):  # short lives, so that files become garbage and jobs are moved
        client.put(bytes(range(256)) * (n % 3), pri=0, delay=0)
        client.ask(b"watch other/tube")
        client.ask(b"delete %d" % reserve())
    client.ask(b"use " + b"long" * 50)
    client.put(b"", pri=2**32 - 1, delay=2**31, ttr=2**32 - 1)
    client.put(b"\0\r\n\0", pri=0)
    client.ask(b"delete %d" % client.put(b"gone"))
    for _ in range(3):
        reserve()  # held when the server dies


def stats_of(client: Client, id: int) -> dict[str, str]:
    """`stats-job`, without the quotes that some versions put around the name of a tube."""
    stats = client.stats(b"stats-job %d" % id)
    return {**stats, "tube": stats["tube"].strip('"')}
