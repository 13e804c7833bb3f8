"""Causes of takeovers: each strikes a cluster, lasts until clients are served again, and is mended."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.support.cluster.net import CLIENTS, DATABASE
from tests.support.cluster.nodes import Cluster, Node
from tests.support.process import GEVENTSTALK

Mend = Callable[[], None]


class Cause(NamedTuple):
    """`strike` does it and returns what mends it. `moves` says that another node must serve afterwards.

    `lasts_s` is how long it lasts when no node takes over: then the mending ends the gap, not the cluster.
    """

    name: str
    strike: Callable[[Cluster, random.Random], Mend]
    moves: bool = False
    lasts_s: float = 0.0
    network: bool = False
    pair: bool = False


def _again(node: Node) -> Mend:
    def mend() -> None:
        node.start()

    return mend


def _nothing() -> None:
    pass


def kill_active(cluster: Cluster, draw: random.Random) -> Mend:
    node = cluster.leader()
    node.kill()
    return _again(node)


def freeze_active(cluster: Cluster, draw: random.Random) -> Mend:
    node = cluster.leader()
    node.freeze()
    return node.thaw


def pause_active(cluster: Cluster, draw: random.Random) -> Mend:
    return freeze_active(cluster, draw)


def terminate_active(cluster: Cluster, draw: random.Random) -> Mend:
    node = cluster.leader()
    node.terminate()

    def mend() -> None:
        code = node.end()
        assert code in (0, -15), f"SIGTERM ended {node.name} with {code}: {node.last_words()}"
        node.start()

    return mend


def promote_standby(cluster: Cluster, draw: random.Random) -> Mend:
    node = cluster.standby()
    words = [*GEVENTSTALK, "cluster", "promote", node.name, "-b", cluster.url]
    end = time.monotonic() + 5 * cluster.lease_s  # nodes tell of their roles now and then
    while True:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            break
        assert "cannot lead now" in done.stderr and time.monotonic() < end, (words, done.stdout, done.stderr)
    return _nothing


def cut_active_off_the_database(cluster: Cluster, draw: random.Random) -> Mend:
    place = cluster.leader().place
    assert place is not None
    place.cut(DATABASE)
    return place.heal


def cut_active_off_everything(cluster: Cluster, draw: random.Random) -> Mend:
    place = cluster.leader().place
    assert place is not None
    place.cut(CLIENTS, DATABASE)
    return place.heal


def kill_standby(cluster: Cluster, draw: random.Random) -> Mend:
    node = cluster.standby()
    node.kill()
    return _again(node)


def freeze_standby(cluster: Cluster, draw: random.Random) -> Mend:
    node = cluster.standby()
    node.freeze()
    return node.thaw


def cut_standby(cluster: Cluster, draw: random.Random) -> Mend:
    place = cluster.standby().place
    assert place is not None
    place.cut(CLIENTS, DATABASE)
    return place.heal


def kill_primary(cluster: Cluster, draw: random.Random) -> Mend:
    """The machine of the primary dies, and the replica is promoted at once."""
    pair = cluster.pair
    assert pair is not None
    pair.primary.kill()
    pair.fail_over()
    return pair.rejoin


def lose_frozen_primary(cluster: Cluster, draw: random.Random) -> Mend:
    """The primary hangs, the replica is promoted, and then the old primary comes back to life for a while."""
    pair = cluster.pair
    assert pair is not None
    pair.primary.freeze()
    pair.fail_over()

    def mend() -> None:
        pair.replica.thaw()
        time.sleep(0.5)
        pair.rejoin()

    return mend


def restart_primary(cluster: Cluster, draw: random.Random) -> Mend:
    pair = cluster.pair
    assert pair is not None
    pair.primary.stop()
    pair.primary.start()
    return _nothing


def freeze_primary(cluster: Cluster, draw: random.Random) -> Mend:
    pair = cluster.pair
    assert pair is not None
    pair.primary.freeze()
    return pair.primary.thaw


def kill_replica(cluster: Cluster, draw: random.Random) -> Mend:
    pair = cluster.pair
    assert pair is not None
    pair.replica.kill()

    def mend() -> None:
        pair.replica.start()
        pair.await_replica()

    return mend


def freeze_replica(cluster: Cluster, draw: random.Random) -> Mend:
    pair = cluster.pair
    assert pair is not None
    pair.replica.freeze()
    return pair.replica.thaw


CAUSES = [
    Cause("kill -9 of the active node", kill_active, moves=True),
    Cause("active node frozen", freeze_active, moves=True),
    Cause("active node paused for a third of its lease", pause_active, lasts_s=0.33),
    Cause("SIGTERM of the active node", terminate_active, moves=True),
    Cause("cluster promote", promote_standby, moves=True),
    Cause("active node cut off the database", cut_active_off_the_database, moves=True, network=True),
    Cause("active node cut off everything", cut_active_off_everything, moves=True, network=True),
    Cause("kill -9 of the standby", kill_standby, lasts_s=0.3),
    Cause("standby frozen for 1.5 s", freeze_standby, lasts_s=1.5),
    Cause("standby cut off for 1.5 s", cut_standby, lasts_s=1.5, network=True),
    Cause("primary killed, replica promoted", kill_primary, pair=True),
    Cause("primary frozen, replica promoted, old primary back", lose_frozen_primary, pair=True),
    Cause("primary restarted", restart_primary, pair=True),
    Cause("primary frozen for 1.5 s", freeze_primary, lasts_s=1.5, pair=True),
    Cause("replica killed for 1 s", kill_replica, lasts_s=1.0, pair=True),
    Cause("replica frozen for 1 s", freeze_replica, lasts_s=1.0, pair=True),
]
BY_NAME = {cause.name: cause for cause in CAUSES}


def possible(cluster: Cluster) -> list[Cause]:
    """Those that this cluster can suffer."""
    return [
        cause
        for cause in CAUSES
        if (cluster.network is not None or not cause.network) and (cluster.pair is not None or not cause.pair)
    ]


__all__ = ["BY_NAME", "CAUSES", "Cause", "possible"]
