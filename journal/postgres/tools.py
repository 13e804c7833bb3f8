"""A log in a database, for the tools: see journal/tools.py for what each method promises.

A tool that reads runs beside nodes that serve. A tool that writes leads meanwhile, so that no node does. A repair and
an import are one transaction. A backup is a journal in a directory, which any server can start on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from journal.errors import JournalDamaged, JournalError, JournalLocked
from journal.log import Record
from journal.postgres import schema as tables
from journal.postgres.builder import PostgresBuilder, mend
from journal.postgres.exclusive import Exclusive
from journal.postgres.link import Link
from journal.postgres.place import Place
from journal.postgres.survey import PostgresSurvey, every_record, is_blank, saying
from journal.sqlite.directory import list_segments
from journal.sqlite.tools import DirectoryTools
from journal.tools import Examine, LogTools, ServerUser, rewrite

_RIGHTS = (
    "SELECT has_schema_privilege('{schema}', 'CREATE') AND has_table_privilege('{schema}.leader', 'SELECT, UPDATE')"
    " AND has_table_privilege('{schema}.segment', 'SELECT, INSERT, UPDATE, DELETE')"
    " AND pg_has_role((SELECT relowner FROM pg_class WHERE oid = '{schema}.segment'::regclass), 'USAGE')"
)
"""A table is dropped and altered by its owner only."""
_MAY_MAKE = (
    "SELECT CASE WHEN to_regnamespace('{schema}') IS NULL THEN has_database_privilege(current_database(), 'CREATE')"
    " ELSE has_schema_privilege('{schema}', 'CREATE') END"
)


def make_log(url: str) -> bool:
    """Makes an empty log, unless there is one. Returns whether there was none. Raises a JournalError, PlaceError."""
    place = Place(url)
    link = Link(place)
    try:
        with saying(place):
            link.connect()
            return tables.make(link, place.schema)
    finally:
        link.close()


class PostgresTools(LogTools):
    """Works on a schema of a database. Its place is a URL."""

    def __init__(self, url: str) -> None:
        """Raises PlaceError."""
        self._place = Place(url)
        self.place = self._place.shown
        self._exclusive: Exclusive | None = None

    # --- looking

    def exists(self) -> bool:
        link = self._connect()
        schema = self._place.schema
        try:
            with saying(self._place):
                return tables.version(link, schema) != tables.UNFINISHED and tables.require(link, schema)
        finally:
            link.close()

    def survey(self, examine: Examine) -> PostgresSurvey:
        return PostgresSurvey(self._place, examine)

    def every_record(self, complain: Callable[[str], None]) -> Iterator[tuple[int, Record]]:
        return every_record(self._place, complain)

    def strangers(self) -> list[str]:
        return []

    # --- what a server would meet

    def require_usable(self, owner: ServerUser | None = None) -> None:
        link = self._connect()
        try:
            with saying(self._place):
                tables.require(link, self._place.schema)
                self._require_rights(link)
        finally:
            link.close()

    def _require_rights(self, link: Link) -> None:
        schema = self._place.schema
        if tables.version(link, schema) == tables.UNFINISHED or tables.require(link, schema):
            if link.execute(_RIGHTS.format(schema=schema)).rows[0][0] != b"t":
                raise JournalLocked(f"{self.place}: this user may not change all of schema {schema}")
        elif link.execute(_MAY_MAKE.format(schema=schema)).rows[0][0] != b"t":
            raise JournalLocked(
                f"{self.place}: schema {schema} is not there, and this user may not make it; "
                f"as a user who may: CREATE SCHEMA {schema} AUTHORIZATION this user"
            )

    def holder(self) -> int | None:
        return None

    @contextmanager
    def without_writers(self) -> Iterator[None]:
        if not self.exists():
            raise JournalLocked(f"{self.place} has no journal in it: schema {self._place.schema} is not there")
        self.require_usable()
        with Exclusive(self._place):
            yield

    # --- writing

    def require_empty(self) -> None:
        if self.exists() and not is_blank(self._place):
            raise JournalLocked(f"{self.place} is not empty: schema {self._place.schema} has records")

    def writing(self) -> AbstractContextManager[None]:
        return self._writing()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        link = self._connect()
        schema = self._place.schema
        try:
            with saying(self._place):
                self._require_rights(link)
                made_schema = link.execute(f"SELECT to_regnamespace('{schema}') IS NULL").rows[0][0] == b"t"
                unfinished = tables.version(link, schema) == tables.UNFINISHED  # of a command that was killed
                made = unfinished or tables.make(link, schema, tables.UNFINISHED)
            with Exclusive(self._place) as self._exclusive:
                try:
                    yield
                except BaseException:
                    if made:
                        mine = (self._exclusive.epoch, self._exclusive.me.incarnation)
                        with suppress(JournalError):
                            link.run(tables.unmaking(schema, *mine, made_schema))
                    raise
        finally:
            self._exclusive = None
            link.close()

    def builder(self, high_water: int = 0) -> PostgresBuilder:
        assert self._exclusive is not None, "only within writing()"
        return PostgresBuilder(self._place, self._exclusive, high_water)

    def mend(self, examine: Examine) -> list[tuple[str, str]]:
        survey = self.survey(examine)
        try:
            return mend(survey, self.builder())
        finally:
            survey.close()

    def backup(self, target: str) -> int:
        copy = DirectoryTools(target)
        survey = self.survey(lambda record: None)
        try:
            copy.require_empty()
            with copy.writing():
                builder = copy.builder()
                for _ in survey.read():
                    pass
                if survey.findings:
                    raise JournalDamaged(f"{self.place} is damaged: {survey.findings[0]}; nothing was copied")
                rewrite(survey, builder)
        finally:
            survey.close()
        return len(list_segments(target))

    def _connect(self) -> Link:
        link = Link(self._place)
        with saying(self._place):
            link.connect()
        return link
