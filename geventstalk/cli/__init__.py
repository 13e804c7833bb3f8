"""The command line. Nothing here imports gevent: clients come 0.1 s after the start, and gevent takes that long."""
