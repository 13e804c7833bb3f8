"""geventstalk: a work queue server that speaks the beanstalk protocol.

It must not import the server: an importer of the package would pay for gevent, which start-up puts off
until the port is open.
"""

from geventstalk._version import __version__

__all__ = ["__version__"]
