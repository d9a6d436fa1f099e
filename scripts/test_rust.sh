#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test_rust.sh <folder of libopd.so>: builds and runs examples/integrations/rust with the rustc that there is
# (Debian: rustc); prints SKIPPED without one.
set -euo pipefail
library=$(cd "${1?the folder of libopd.so}" && pwd)
if ! command -v rustc >/dev/null; then
    echo "SKIPPED: no rustc (Debian: rustc)"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rustc --edition 2021 -O -D warnings "$(dirname "${BASH_SOURCE[0]}")/../examples/integrations/rust/opd.rs" -o "$work/opd" \
    -L "native=$library" -l dylib=opd -C link-arg="-Wl,-rpath,$library"
"$work/opd"
