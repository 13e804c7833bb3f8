"""What the commands against a running server do: a client of its port, a client of its API. No engine, no gevent."""
