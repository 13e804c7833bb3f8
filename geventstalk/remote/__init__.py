"""Clients of a running server's port and of its API, for the commands. Imports neither the engine nor gevent."""
