"""rrd-gate: the privileged helper behind the ``socket`` gate, and the only code that touches PCI.

A root process as small as can be: the standard library and this package, nothing else of rrd. It grants the dies of a
group one at a time, over a Unix socket, to the daemon alone.
"""
