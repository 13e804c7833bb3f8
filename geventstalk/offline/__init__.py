"""The work of the commands for a journal: checks, repairs and copies journals, moves jobs in and out.

This package needs neither the server nor gevent, and reaches a journal only through journal/tools.py.
"""
