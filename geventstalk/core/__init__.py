"""Jobs, tubes and waiting lines, in memory. Pure: no sockets, no gevent, no SQLite, no clock, no randomness.

Time comes in as monotonic integer nanoseconds, and nothing here yields.
"""
