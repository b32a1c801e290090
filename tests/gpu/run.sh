#!/usr/bin/env bash
# Everything that needs a CUDA die, in one go, within 8 minutes on one card; prints one table to paste.
#
#   tests/gpu/run.sh [DEVICE]        cuda:0 if left out; cpu proves the tests on a CPU die
#
# Uses ./.venv if it is there (`make test` makes it; put a torch built for the card into it), else python3.
set -uo pipefail
cd "$(dirname "$0")/../.."
device=${1:-cuda:0}
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export RRD_TEST_DEVICE=$device PYTHONPATH=$PWD CUBLAS_WORKSPACE_CONFIG=:4096:8
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
timeout 420 $python -m pytest -m gpu -rs tests
tests=$?
echo
timeout 60 $python -m rrd bench ops --device "$device" --markdown
ops=$?
exit $((tests || ops))
