"""What the commands beside the server do: look at a journal, repair it, move jobs in and out.

They need neither the server nor gevent, and reach a journal only through journal/tools.py.
"""
