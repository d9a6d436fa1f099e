#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test_torch.sh [libopd.so]: a virtual environment with torch in build/venv-torch (or OPD_TORCH_VENV), and in it
# all tests of the Python package, those of opd.torch with them. TRL and Liger are compared with where pip can install
# them; where it can install transformers, examples/python/distil_hf.py must close a fifth of the divergence. Prints
# SKIPPED where PyPI or torch cannot be had.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

library=${1:-${OPD_LIBRARY:-$opd_root/build/test/lib/libopd.so}}
[ -f "$library" ] || opd_die "there is no $library; build libopd with -DOPD_BUILD_LIBRARY=ON and name it"
venv=${OPD_TORCH_VENV:-$opd_root/build/venv-torch}
opd_venv "$venv" 'numpy ml_dtypes torch' numpy ml_dtypes torch || exit 0
for peer in trl liger_kernel transformers pyarrow; do
    "$venv/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$peer') is None)" ||
        timeout 300 "$venv/bin/pip" install -q "$peer" || opd_say "SKIPPED $peer: pip cannot install it"
done
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
PYTHON=$venv/bin/python "$opd_root/scripts/test_python.sh" "$library" -v tests.test_torch tests.test_docs tests.test_losses tests.test_convert

if ! "$venv/bin/python" -c 'import transformers' 2>/dev/null; then
    opd_say "SKIPPED examples/python/distil_hf.py: no transformers"
    exit 0
fi
made=$(OPD_LIBRARY=$library PYTHONPATH=$opd_root/python "$venv/bin/python" "$opd_root/examples/python/distil_hf.py" --steps 30 | tee -a /dev/stderr)
awk '/held-out/ { before = $(NF - 3); after = $(NF - 1) } END { exit !(before > 0 && after < .8 * before) }' <<<"$made" ||
    opd_die "distil_hf.py did not close a fifth of the divergence"
