# Completion of rrd for bash, read at the first press of the tab key. The script itself comes from rrd: it fits its version.
eval "$(rrd completion bash 2>/dev/null)"
