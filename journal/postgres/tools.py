"""The tools' door to a log in a database: see journal/tools.py for what each method promises.

Looking goes on beside nodes that serve. Whoever writes leads meanwhile, so that no node does. A repair and an import
are one transaction. A backup is a journal in a directory, which any server can start on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from journal.errors import JournalDamaged, JournalError, JournalLocked, JournalNewer
from journal.log import Record
from journal.postgres import schema as tables
from journal.postgres.builder import PostgresBuilder, mend
from journal.postgres.link import Link, Refused
from journal.postgres.place import Place
from journal.postgres.survey import PostgresSurvey, every_record, is_blank
from journal.postgres.tenure import Tenure
from journal.sqlite.directory import list_segments
from journal.sqlite.tools import DirectoryTools
from journal.tools import Examine, LogTools, Mended, Owner, rewrite

_RIGHTS = (
    "SELECT has_schema_privilege('{schema}', 'CREATE') AND has_table_privilege('{schema}.leader', 'SELECT, UPDATE')"
    " AND has_table_privilege('{schema}.segment', 'SELECT, INSERT, UPDATE, DELETE')"
)


class PostgresTools(LogTools):
    """Works on a schema of a database. Its place is a URL."""

    def __init__(self, url: str) -> None:
        """Raises PlaceError."""
        self._place = Place(url)
        self.place = self._place.shown
        self._tenure: Tenure | None = None

    # --- looking

    def exists(self) -> bool:
        link = self._connect()
        schema = self._place.schema
        try:
            return tables.version(link, schema) != tables.UNFINISHED and tables.require(link, schema)
        except Refused as error:
            raise JournalLocked(f"{self.place}: {error}") from error
        finally:
            link.close()

    def survey(self, examine: Examine) -> PostgresSurvey:
        return PostgresSurvey(self._place, examine)

    def every_record(self, complain: Callable[[str], None]) -> Iterator[tuple[int, Record]]:
        return every_record(self._place, complain)

    def strangers(self) -> list[str]:
        return []

    # --- what a server would meet

    def require_usable(self, owner: Owner | None = None) -> None:
        schema = self._place.schema
        link = self._connect()
        try:
            if tables.require(link, schema):
                if link.execute(_RIGHTS.format(schema=schema)).rows[0][0] != b"t":
                    raise JournalLocked(f"{self.place}: this user may not change schema {schema}")
            elif link.execute("SELECT has_database_privilege(current_database(), 'CREATE')").rows[0][0] != b"t":
                raise JournalLocked(
                    f"{self.place}: schema {schema} is not there, and this user may not make it: "
                    f"GRANT CREATE ON DATABASE, or have it made: CREATE SCHEMA {schema} AUTHORIZATION this user"
                )
        except (JournalNewer, JournalDamaged) as error:
            raise JournalLocked(f"{self.place}: {error}") from error
        except Refused as error:
            raise JournalLocked(f"{self.place}: {error}") from error
        finally:
            link.close()

    def holder(self) -> int | None:
        return None

    @contextmanager
    def resting(self) -> Iterator[None]:
        if not self.exists():
            raise JournalLocked(f"{self.place} has no journal in it: schema {self._place.schema} is not there")
        with Tenure(self._place):
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
            made_schema = link.execute(f"SELECT to_regnamespace('{schema}') IS NULL").rows[0][0] == b"t"
            unfinished = tables.version(link, schema) == tables.UNFINISHED  # of a command that was killed
            made = unfinished or tables.make(link, schema, tables.UNFINISHED)
            with Tenure(self._place) as self._tenure:
                try:
                    yield
                except BaseException:
                    if made:
                        mine = (self._tenure.epoch, self._tenure.me.incarnation)
                        with suppress(JournalError):
                            link.run(tables.unmaking(schema, *mine, made_schema))
                    raise
        except Refused as error:
            raise JournalLocked(f"{self.place}: {error}") from error
        finally:
            self._tenure = None
            link.close()

    def builder(self, high_water: int = 0) -> PostgresBuilder:
        assert self._tenure is not None, "only within writing()"
        return PostgresBuilder(self._place, self._tenure, high_water)

    def mend(self, examine: Examine) -> Mended:
        survey = self.survey(examine)
        try:
            aside = mend(survey, self.builder())
        finally:
            survey.close()
        return Mended(survey.keys, aside)

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
        try:
            link.connect()
        except Refused as error:
            raise JournalLocked(f"{self.place}: {error}") from error
        return link
