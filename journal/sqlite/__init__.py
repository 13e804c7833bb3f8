"""The kind of log that is a directory of SQLite files. Only this package imports sqlite3.

`segment-NNNNNNNN.db` are the segments, in ascending order; SQLite keeps a `-wal` and a `-shm` beside an open segment.
`lock` keeps other processes away. `synced` says how much of the journal was on the device. `reserve` keeps room for
changes on a full disk.
The modules, from below: format, files, sql, lock; reader, writer, wal; replay; space, sizing, watermark, worker;
segments, compaction, repair; log, which a store has; directory, survey, builder, backup; tools, which commands have.
"""
