"""The interface of the tools to a journal in a directory: see journal/tools.py for what each method promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from journal.errors import JournalLocked
from journal.log import Record
from journal.sqlite import directory
from journal.sqlite.backup import backup
from journal.sqlite.builder import SegmentBuilder, mend
from journal.sqlite.survey import SegmentSurvey, every_record
from journal.tools import Examine, LogTools, ServerUser


class DirectoryTools(LogTools):
    """Works on a directory of segments. Its place is the path of the directory."""

    def __init__(self, place: str) -> None:
        self.place = place

    # --- looking

    def exists(self) -> bool:
        return bool(directory.list_segments(self.place))

    def survey(self, examine: Examine) -> SegmentSurvey:
        directory.require_readable(self.place)
        return SegmentSurvey(self.place, examine)

    def every_record(self, complain: Callable[[str], None]) -> Iterator[tuple[int, Record]]:
        directory.require_readable(self.place)
        return every_record(self.place, complain)

    def strangers(self) -> list[str]:
        return directory.strangers(self.place)

    # --- what a server would meet

    def require_usable(self, owner: ServerUser | None = None) -> None:
        directory.require_usable(self.place, owner)

    def holder(self) -> int | None:
        return directory.holder(self.place)

    def without_writers(self) -> AbstractContextManager[None]:
        return directory.without_writers(self.place)

    # --- writing

    def require_empty(self) -> None:
        directory.require_empty(self.place)

    def writing(self) -> AbstractContextManager[None]:
        return directory.writing(self.place)

    def builder(self, high_water: int = 0) -> SegmentBuilder:
        return SegmentBuilder(self.place, first=directory.next_number(self.place), high_water=high_water)

    def mend(self, examine: Examine) -> list[tuple[str, str]]:
        survey = self.survey(examine)
        try:
            oldest = min((number for number, _ in directory.list_segments(self.place)), default=0)
            first = directory.next_number(self.place)
            return mend(survey, SegmentBuilder(self.place, first=first, oldest=oldest))
        finally:
            survey.close()

    def backup(self, target: str) -> int:
        directory.require_readable(self.place)
        if not self.exists():
            raise JournalLocked(f"{self.place} has no journal in it")
        directory.require_empty(target)
        with directory.writing(target):
            return backup(self.place, target)
