"""The kind of log that is a schema in a PostgreSQL database. Only this package imports psycopg, and only its `pq`.

All of its SQL is here. It knows no gevent: whatever waits does so by a Waiter, which the owner gives (link.py).
The modules, from below: place, where the database is; link, a connection; schema, the tables that fence and log share;
format, how records are packed into rows; replay, reading them back; segments, tables that come and go over a second
link; log, which a store has; fence, in which nodes agree who leads.
"""
