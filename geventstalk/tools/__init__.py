"""Offline work on a journal: look at it, repair it, move jobs in and out. Needs neither the server nor gevent."""
