"""The fields of a job that are numbers, in one table: what each is called, what it measures and where it comes from.

stats-job, exports, the API with its description, filters, the console and the client's commands read FIELDS. A new
count is a line here, a slot of Tally in core/job.py, and the rule that sets it; durable/records.py says how a field
gets into the journal. What else the API has of a job stands in http/openapi.yaml as well.
This module must not know jobs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Kinds, the cheapest to read first.
NUMBER: Final = 1
REFERENCE: Final = 2
"""The number of something else; 0 stands for none, which is null in the API."""
COUNT: Final = 3
"""A count of what happened to the job; kept in its tally, and in exports."""
SECONDS: Final = 4
SINCE: Final = 5
"""The time since a moment."""
UNTIL: Final = 6
"""The time until a deadline, of a job that has one."""


class Field(NamedTuple):
    """A field. `name` is its key in stats-job, exports and filters, `api` its key in the API, in `counts` for a COUNT.

    `source` is the attribute of Job, or of Tally for a COUNT. `says` explains its key in filters, "" where there is
    none; `tries` are values with which the console suggests to begin.
    """

    name: str
    kind: int
    source: str
    api: str
    says: str = ""
    in_stats: bool = True
    tries: tuple[str, ...] = ()


FIELDS: Final = (
    Field("pri", NUMBER, "pri", "pri", "priority; 0 is the most urgent", tries=("<1024",)),
    Field("age", SINCE, "created_ns", "age_s", "since the job was put", tries=(">1h", ">1d", "<5min", ":1h..2h")),
    Field("delay", SECONDS, "delay_s", "delay_s", "delay of the last put or release", tries=(">0s",)),
    Field("ttr", SECONDS, "ttr_s", "ttr_s", "time to run", tries=(">60s",)),
    Field("time-left", UNTIL, "rank", "time_left_s"),
    Field("file", REFERENCE, "segment", "segment"),
    Field("reserves", COUNT, "reserves", "reserves", "how often it was reserved", tries=(">3", ":0")),
    Field("timeouts", COUNT, "timeouts", "timeouts", "how often its time ran out"),
    Field("releases", COUNT, "releases", "releases", "how often it was released"),
    Field("buries", COUNT, "buries", "buries", "how often it was buried"),
    Field("kicks", COUNT, "kicks", "kicks", "how often it was kicked"),
    Field("since", SINCE, "since_ns", "since_s", "since the job came into its state", False, (">1h", ">1d")),
    Field("holder", REFERENCE, "holder", "holder", "number of the connection that holds it", in_stats=False),
)
"""In the order of stats-job."""
COUNTS: Final = tuple(field.name for field in FIELDS if field.kind == COUNT)
