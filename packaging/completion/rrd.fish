# Completion of rrd for fish. The script itself comes from rrd: it fits its version.
rrd completion fish 2>/dev/null | source
