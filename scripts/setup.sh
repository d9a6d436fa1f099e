#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# What the other scripts share: installing what a build needs on Debian 12, and configuring a build folder. By itself,
# `scripts/setup.sh [test|demo|bench|python|site|browser|ci]...` installs and does nothing else. Nothing is installed
# that is there already.

# Without these ccache keeps nothing that was compiled with a precompiled header.
export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS-pch_defines,time_macros}

opd_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

opd_say() { printf '== %s\n' "$*"; }
opd_die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

opd_packages() {
    local build="g++ cmake ninja-build libeigen3-dev"
    local trainer="libcli11-dev nlohmann-json3-dev libfmt-dev libspdlog-dev libcpp-httplib-dev libpcre2-dev libutf8proc-dev gnuplot-nox"
    local tests="doctest-dev librapidcheck-dev librange-v3-dev"
    local site="python3 mkdocs mkdocs-material"
    local engines="libzmq3-dev cppzmq-dev libopenmpi-dev openmpi-bin python3" # examples/engines
    case $1 in
    demo) echo "$build $trainer" ;;
    test) echo "$build $trainer $tests $site $engines clang-19 lld-19 zstd" ;;
    bench) echo "$build nlohmann-json3-dev libbenchmark-dev libtbb-dev" ;;
    python) echo "python3 python3-numpy" ;;
    site) echo "$site" ;;
    browser) echo "chromium-headless-shell" ;; # trainer.report_page; in no other set: it takes 300 MB
    ci) echo "$build $trainer $tests $site $engines debhelper pkg-config python3-venv libbenchmark-dev libtbb-dev git clang-19 lld-19 libclang-rt-19-dev clang-format python3-numpy zstd" ;;
    *) opd_die "opd_packages: no set of packages is called '$1'" ;;
    esac
}

# The packages of a set that are not installed, on one line.
opd_missing() {
    local package
    local missing=()
    for package in $(opd_packages "$1"); do
        if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
            missing+=("$package")
        fi
    done
    echo "${missing[*]}"
}

opd_setup() {
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        opd_say "not a Debian system: nothing is installed; needed are the equivalents of: $(opd_packages "$1")"
        return 0
    fi
    local missing
    missing=$(opd_missing "$1")
    [ -z "$missing" ] && return 0

    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null ||
            opd_die "these packages are missing, and there is neither root nor sudo to install them: $missing"
        as_root=(sudo)
    fi
    opd_say "installing: $missing"
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600)
    "${apt[@]}" update || opd_say "apt-get update failed; trying with the lists that are there"
    # shellcheck disable=SC2086 # a list of words
    "${apt[@]}" install -y --no-install-recommends $missing ||
        opd_die "apt-get could not install: $missing (all are in the main section of Debian 12)"
    missing=$(opd_missing "$1")
    [ -z "$missing" ] || opd_die "still missing after apt-get install: $missing"
}

# Compilers of these tests take up to 1.5 GB each.
opd_jobs() {
    local cores memory
    cores=$(nproc)
    memory=$(awk '/^MemAvailable:/ {print int($2 / 1500000)}' /proc/meminfo)
    [ "$memory" -lt 1 ] && memory=1
    echo $((cores < memory ? cores : memory))
}

opd_is_gcc() { "${CXX-c++}" --version 2>/dev/null | grep -q 'Free Software'; }

# Flags for g++ where memory is plenty: it then collects its garbage later, which saves a tenth of its time.
opd_collects_late() {
    local memory
    memory=$(awk '/^MemAvailable:/ {print int($2 / 1000000)}' /proc/meminfo)
    if [ "$memory" -ge $((5 * $(opd_jobs))) ] && opd_is_gcc; then
        printf ' --param ggc-min-heapsize=1500000 --param ggc-min-expand=400'
    fi
}

# opd_configure <folder under build/> <cmake arguments...>
opd_configure() {
    local folder=$opd_root/build/$1
    shift
    local launcher=()
    if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
    cmake -S "$opd_root" -B "$folder" -G Ninja "${launcher[@]}" "$@"
}

# opd_demo_program <targets>: sets up, and builds programs of the examples for this machine, in build/demo; a warning of
# a compiler that we have not seen stops nobody
opd_demo_program() {
    opd_setup demo
    opd_configure_demo
    opd_build demo --target "$@"
}
opd_configure_demo() {
    local late=() # decided once: with other flags everything would be compiled again
    if [ ! -e "$opd_root/build/demo/CMakeCache.txt" ]; then late=("-DCMAKE_CXX_FLAGS=${CXXFLAGS-}$(opd_collects_late)"); fi
    opd_configure demo -DCMAKE_BUILD_TYPE=Release "${late[@]}" -DOPD_NATIVE=ON -DOPD_WITH_CUDA=OFF -DOPD_BUILD_TESTS=OFF \
        -DOPD_BUILD_BENCHMARKS=OFF -DOPD_WERROR=OFF "$@"
}

# opd_build <folder under build/> <cmake --build arguments...>
opd_build() {
    local folder=$opd_root/build/$1
    shift
    # glibc asks for huge pages: compilers spend up to a tenth of their time on pages of four kilobytes
    GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1} cmake --build "$folder" -j "$(opd_jobs)" "$@"
}

# opd_venv <folder> "<modules>" <pip's arguments...>: a virtual environment whose Python imports these modules; pip
# installs what they need where it does not yet. Prints SKIPPED, with the reason, and returns 1 where that cannot be
# had.
opd_venv() {
    local folder=$1 imports="import ${2// /, }" cpu=()
    shift 2
    "$folder/bin/python" -c "$imports" 2>/dev/null && return 0
    if ! "${PYTHON:-python3}" -m venv "$folder" >/dev/null 2>&1; then
        echo "SKIPPED: ${PYTHON:-python3} makes no virtual environment here (Debian: python3-venv)"
        return 1
    fi
    opd_say "installing $* into $folder"
    case " $* " in *' torch '*) cpu=(--extra-index-url https://download.pytorch.org/whl/cpu) ;; esac # without CUDA's libraries
    local pip=(timeout 900 "$folder/bin/pip" install -q --retries 1 --timeout 30 "$@")
    if { "${pip[@]}" "${cpu[@]}" || "${pip[@]}"; } >"$folder/pip.log" 2>&1 &&
        "$folder/bin/python" -c "$imports" 2>>"$folder/pip.log"; then
        return 0
    fi
    echo "SKIPPED: $* cannot be had from PyPI, $folder/pip.log says why"
    return 1
}

# opd_programs <build folder> <ctest arguments...>: the files, among those that the build makes, that the commands of
# these tests name; one a line.
opd_programs() {
    local folder=$1
    shift
    comm -12 \
        <(awk 'NR == FNR { chosen[$0]; next }
               /^add_test\(/ {
                   name = $0
                   sub(/^add_test\((\[=+\[)?"?/, "", name)
                   sub(/(\]=+\])?"? .*/, "", name)
                   if (name in chosen) print
               }' \
            <(ctest --test-dir "$folder" -N "$@" | sed -n 's/^ *Test *#[0-9]*: //p') \
            <(find "$folder" -name CTestTestfile.cmake -exec cat {} +) |
            grep -oE "$folder/[^\\\"'; ]+" | sed "s|^$folder/||; s|/\./|/|g" | sort -u) \
        <(ninja -C "$folder" -t targets all | sed 's/: [^:]*$//' | sort -u)
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    for opd_set in "${@:-test}"; do opd_setup "$opd_set"; done
fi
