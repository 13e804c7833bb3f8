"""Measures geventstalk beside beanstalkd on one machine, for scripts/bench and scripts/soak.

Nothing here may import geventstalk or journal: a benchmark knows the wire, processes and the clock, and no product code
runs in the process that measures. Invariant: every reply is checked before it is counted.
"""
