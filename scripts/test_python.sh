#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test_python.sh [libopd.so] [unittest arguments]: the tests of the Python package that need numpy alone, with
# the distribution's python3 (or PYTHON), on a libopd that is built: the first argument, or OPD_LIBRARY, or
# build/test's.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

library=${1:-${OPD_LIBRARY:-$opd_root/build/test/lib/libopd.so}}
[ $# -gt 0 ] && shift
[ -f "$library" ] || opd_die "there is no $library; build libopd with -DOPD_BUILD_LIBRARY=ON and name it"
OPD_LIBRARY=$(cd "$(dirname "$library")" && pwd)/$(basename "$library")
export OPD_LIBRARY
if [ -z "${PYTHON-}" ]; then
    opd_setup python
    PYTHON=/usr/bin/python3
fi
cd "$opd_root/python"
opd_say "$("$PYTHON" -c 'import sys, numpy; print("Python", sys.version.split()[0], "numpy", numpy.__version__)'), $OPD_LIBRARY"
PYTHONDONTWRITEBYTECODE=1 "$PYTHON" -W error::RuntimeWarning -m unittest "${@:-discover}"
