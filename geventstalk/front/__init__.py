"""Processes that do the socket work of clients, and what they and the server's process say to each other."""
