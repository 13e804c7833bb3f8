"""The tables of one log, its version, and how they are made. What they mean is the business of log.py and fence.py.

`leader` has one row: the epoch that fences every write. `beat` and `wish` (the node that an operator asks to lead) are
apart from it, for a change of the leader's row would wait for the commit that holds it. `segment` says which tables of
rows there are. A table seg_N holds rows: `seq` counts 1, 2, 3 ... over all of them, `epoch` is the writer's, `packed`
is as format.py says. `meta` has the version, what tells this log from all others, and for each node a row that it
changes to see whether the database confirms commits.
Invariant: a schema of another version is not changed.
"""

from __future__ import annotations

import secrets
from typing import Final

from journal.errors import JournalDamaged, JournalLocked, JournalNewer
from journal.postgres.link import Link, Refused

VERSION: Final = 1
UNFINISHED: Final = 0
"""The version while a command fills a log that is new: no node takes what is unfinished for a log."""
_LOCK: Final = 0x67767374
"""Of two nodes that start at once one makes the schema. The number is `gvst`."""
TABLES: Final = """
CREATE TABLE {0}.meta(name text PRIMARY KEY, value bigint NOT NULL);
CREATE TABLE {0}.leader(
  one boolean PRIMARY KEY DEFAULT true CHECK (one), epoch bigint NOT NULL, node text NOT NULL, address text NOT NULL,
  incarnation text NOT NULL, lease_ms integer NOT NULL, owed_ms integer NOT NULL, released boolean NOT NULL,
  successor text NOT NULL, pid integer NOT NULL
);
CREATE TABLE {0}.beat(
  one boolean PRIMARY KEY DEFAULT true CHECK (one), epoch bigint NOT NULL, n bigint NOT NULL
) WITH (fillfactor = 10);
CREATE TABLE {0}.wish(
  one boolean PRIMARY KEY DEFAULT true CHECK (one), node text NOT NULL, n bigint NOT NULL
) WITH (fillfactor = 10);
CREATE TABLE {0}.member(
  node text PRIMARY KEY, address text NOT NULL, role text NOT NULL, epoch bigint NOT NULL, place bigint NOT NULL,
  seen timestamptz NOT NULL
) WITH (fillfactor = 10);
CREATE TABLE {0}.segment(no bigint PRIMARY KEY, first_seq bigint NOT NULL);
INSERT INTO {0}.leader VALUES(true, 0, '', '', '', 0, 0, true, '', 0);
INSERT INTO {0}.beat VALUES(true, 0, 0);
INSERT INTO {0}.wish VALUES(true, '', 0);
"""
SEGMENT: Final = """
CREATE TABLE {0}.seg_{1}(
  seq bigint PRIMARY KEY, epoch bigint NOT NULL, packed bytea NOT NULL
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
ALTER TABLE {0}.seg_{1} ALTER packed SET STORAGE EXTERNAL;
INSERT INTO {0}.segment VALUES({1}, {2});
"""
"""A table of rows, made ahead: `first_seq` is a number that none of its rows is below."""
_MAKE: Final = """
SELECT pg_advisory_xact_lock({lock}, hashtext('{schema}'));
DO $$ BEGIN IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF; END $$;
{tables}
{segment}
INSERT INTO {schema}.meta VALUES('version', {version}), ('log', {identity});
"""


def version(link: Link, schema: str) -> int | None:
    """The version of the schema; None when it is not there."""
    try:
        rows = link.execute(f"SELECT value FROM {schema}.meta WHERE name = 'version'").rows
    except Refused as error:
        if error.state in ("3F000", "42P01"):  # no such schema, no such table
            return None
        if error.state == "42501":
            raise JournalLocked(f"{link.shown}: {error}") from error
        raise
    if not rows or rows[0][0] is None:
        raise JournalDamaged(f"schema {schema} does not say its version: it is not this program's")
    return int(rows[0][0])


def require(link: Link, schema: str) -> bool:
    """Returns whether the schema is there. Raises JournalNewer or JournalDamaged when this program cannot use it."""
    found = version(link, schema)
    if found is None:
        return False
    if found > VERSION:
        raise JournalNewer(
            f"schema {schema} was made by a newer geventstalk: "
            f"it has version {found}, and this one knows up to {VERSION}"
        )
    if found == UNFINISHED:
        raise JournalDamaged(
            f"schema {schema} is empty: the command that was to fill it did not finish; let it begin anew"
        )
    if found < 1:
        raise JournalDamaged(f"schema {schema} has version {found}, which no geventstalk makes")
    return True


def identity(link: Link, schema: str) -> int:
    """Returns the word that tells this log from any other. A log of an older version gets one now."""
    name = f"SELECT value FROM {schema}.meta WHERE name = 'log'"
    if not (found := link.execute(name).rows):
        link.run(f"INSERT INTO {schema}.meta VALUES('log', {secrets.randbits(62)}) ON CONFLICT (name) DO NOTHING")
        found = link.execute(name).rows
    return int(found[0][0] or 0)


def floor(link: Link, schema: str) -> int:
    """The largest key that a node knew of when it began anew. 0 when none has told one."""
    return int(link.execute(f"SELECT coalesce(max(value), 0) FROM {schema}.meta WHERE name = 'floor'").rows[0][0] or 0)


def raising_floor(schema: str, key: int) -> str:
    """SQL of a node that knows this key: whichever node leads next gives no key up to it."""
    return (
        f"INSERT INTO {schema}.meta VALUES('floor', {key}) ON CONFLICT (name)"
        f" DO UPDATE SET value = EXCLUDED.value WHERE meta.value < EXCLUDED.value"
    )


def make(link: Link, schema: str, version: int = VERSION) -> bool:
    """Makes the schema where it is missing, in one transaction. Returns whether it was missing.

    Raises JournalLocked when this user may not, JournalNewer and JournalDamaged as require(). Raises Refused when the
    same may succeed later.
    """
    if require(link, schema):
        return False
    tables = TABLES.format(schema)
    first = SEGMENT.format(schema, 1, 1)
    try:
        link.run(
            _MAKE.format(
                lock=_LOCK, schema=schema, tables=tables, segment=first, version=version, identity=secrets.randbits(62)
            )
        )
    except Refused as error:
        if error.state in ("42P07", "23505", "42P06") and require(link, schema):
            return False  # another node was quicker
        if error.passing:
            raise
        raise JournalLocked(f"{link.shown}: schema {schema} cannot be made: {error}") from error
    return True


def finishing(schema: str) -> str:
    """SQL after which a log that was filled counts as one."""
    return f"UPDATE {schema}.meta SET value = {VERSION} WHERE name = 'version' AND value = {UNFINISHED}"


def unmaking(schema: str, epoch: int, incarnation: str, made_schema: bool) -> str:
    """SQL that takes an unfinished log away, if this process has it to itself. What else is in the schema stays."""
    names = ("meta", "leader", "beat", "wish", "member", "segment", "seg_1")
    drop = f"DROP TABLE {', '.join(f'{schema}.{name}' for name in names)};"
    if made_schema:
        drop += f" DROP SCHEMA {schema};"
    return f"""DO $$ BEGIN
  PERFORM 1 FROM {schema}.leader, {schema}.meta WHERE leader.epoch = {epoch} AND incarnation = '{incarnation}'
    AND meta.name = 'version' AND meta.value = {UNFINISHED} FOR UPDATE;
  IF FOUND THEN {drop} END IF;
END $$"""
