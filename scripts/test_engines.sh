#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test_engines.sh [libopd.so] [--full]: Open MPI 5 in a virtual environment, build/venv-mpi, and twelve runs of
# opd-mpi that lose a rank (--full: forty). Another with ray in build/venv-engines (or OPD_ENGINES_VENV), and in it what
# opd.ray promises: its protocol, a killed node, thirty kills of actors (--full: two hundred), a thousand sequences a
# second; with torch and transformers, where pip can install them, examples/python/distil_ray.py must close a tenth of
# the divergence. Prints SKIPPED where PyPI or a package cannot be had.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

full=() deaths=12
library=${OPD_LIBRARY:-$opd_root/build/test/lib/libopd.so}
for word in "$@"; do
    if [ "$word" = --full ]; then full=(--full) deaths=40; else library=$word; fi
done

mpi=$opd_root/build/venv-mpi
if opd_venv "$mpi" 'importlib.metadata;importlib.metadata.version("openmpi")' 'openmpi>=5'; then
    sources=$opd_root/examples/engines/mpi
    OMPI_CXX=${CXX:-clang++-19} "$mpi/bin/mpicxx" -std=c++20 -O1 -pthread -I "$opd_root/include" "$sources/main.cpp" \
        -o "$mpi/opd-mpi"
    bash "$sources/test.sh" "$mpi/bin/mpirun" "$mpi/opd-mpi" "$deaths"
fi

[ -f "$library" ] || opd_die "there is no $library; build libopd with -DOPD_BUILD_LIBRARY=ON and name it"
OPD_LIBRARY=$(cd "$(dirname "$library")" && pwd)/$(basename "$library")
export OPD_LIBRARY
venv=${OPD_ENGINES_VENV:-$opd_root/build/venv-engines}
opd_venv "$venv" 'numpy ray' numpy ray || exit 0
export RAY_USAGE_STATS_ENABLED=0 PYTHONDONTWRITEBYTECODE=1
"$venv/bin/python" -c 'import ray; print("ray", ray.__version__)'
PYTHON=$venv/bin/python "$opd_root/scripts/test_python.sh" "$OPD_LIBRARY" -v tests.test_actors tests.test_ray
cd "$opd_root/python"
"$venv/bin/python" -m tests.ray_kills "${full[@]}"
"$venv/bin/python" -m tests.ray_kills --throughput

opd_venv "$venv" 'torch transformers' torch transformers || exit 0
made=$(PYTHONPATH=$opd_root/python "$venv/bin/python" "$opd_root/examples/python/distil_ray.py" --steps 20 |
    tee -a /dev/stderr)
awk '/held-out/ { before = $(NF - 3); after = $(NF - 1) } END { exit !(before > 0 && after < .9 * before) }' \
    <<<"$made" ||
    opd_die "distil_ray.py did not close a tenth of the divergence"
