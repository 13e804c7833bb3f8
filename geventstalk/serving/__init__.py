"""Sockets and gevent: listeners, connections, and the greenlets of the server.

The other layers know neither. This file stays empty, so that `listen` can be imported before gevent is.
"""
