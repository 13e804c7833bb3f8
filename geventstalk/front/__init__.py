"""Processes that do the socket work of clients, and their link to the server's process."""
