#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/env.sh: what a bug report needs, a line each. It builds and changes nothing; what is not there is said to be
# none. (From Python, for the library that is loaded: `python3 -c "import opd; opd.show_config()"`.)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

line() { printf '%-12s %s\n' "$1" "${2:-none}"; }
first() { command -v "$1" >/dev/null && "$@" 2>/dev/null | head -1; }

line opd "$(sed -n 's/^#define OPD_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' include/opd/version.hpp | paste -sd.)"
line commit "$(git rev-parse HEAD 2>/dev/null)$(git diff --quiet HEAD 2>/dev/null || echo ', with changes')"
line system "$(. /etc/os-release 2>/dev/null && echo "${PRETTY_NAME-}"), $(uname -srm)"
line processor "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -1)"
line threads "$(getconf _NPROCESSORS_ONLN 2>/dev/null)"
line lanes "$(grep -m1 '^flags' /proc/cpuinfo 2>/dev/null |
    grep -oE '\b(sse4_2|avx|avx2|fma|f16c|avx512(f|dq|bw|vl|_bf16|_fp16)|amx_(tile|bf16|int8))\b' |
    sort -u | paste -sd' ')"
line memory "$(awk '/^MemTotal:/ {printf "%.1f GB", $2 / 1e6}' /proc/meminfo 2>/dev/null)"
for tool in g++ clang++-19 clang++ "${CXX:-c++}" cmake ninja python3; do
    line "$tool" "$(first "$tool" --version)"
done
line "C library" "$(first ldd --version)"
line nvcc "$(command -v nvcc >/dev/null && nvcc --version | sed -n 's/^Cuda compilation tools, //p')"
line GPU "$(command -v nvidia-smi >/dev/null &&
    nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null | paste -sd';')"
if command -v dpkg-query >/dev/null; then
    line packages "$(dpkg-query -W -f '${Package} ${Version};' libeigen3-dev nlohmann-json3-dev libcpp-httplib-dev \
        doctest-dev librapidcheck-dev librange-v3-dev 2>/dev/null | sed 's/;$//; s/;/; /g')"
fi
settings='^(OPD_|RC_PARAMS|CXXFLAGS|CFLAGS|LDFLAGS|CCACHE_|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES)'
line settings "$(env | grep -E "$settings" | sort | paste -sd' ')"
