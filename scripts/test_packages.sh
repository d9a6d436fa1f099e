#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test_packages.sh [versions|conan|debian|vcpkg|bazel]...: makes the packages of packaging/, in copies under
# build/packages, and uses what they hold as a caller would. What a machine has not got is SKIPPED, and says so.
#
#   versions   every package has include/opd/version.hpp's version
#   conan      `conan create` with its test package, by a Conan from PyPI in an environment of its own
#   debian     dpkg-buildpackage -b: libopd-dev
#   vcpkg      vcpkg with the overlay port; without VCPKG_ROOT, the port's own commands with CMake alone
#              (tests/packages/vcpkg.cmake)
#   bazel      `bazel run` of a program; without a Bazel of modules (7), the files are read as the language that they
#              are in (tests/packages/bazel.py)
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$opd_root"
work=$opd_root/build/packages

skipped() { echo "SKIPPED: $*"; }

version=$(sed -n 's/^#define OPD_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' include/opd/version.hpp | paste -sd.)

# used <prefix>: all of the headers are there, and CMake and pkg-config find the package.
used() {
    diff -r include/opd "$1/include/opd"
    local use=$work/$one.used
    rm -rf "$use"
    cmake -S packaging/conan/test_package -B "$use" -DCMAKE_PREFIX_PATH="$1" >/dev/null
    grep -q "^opd_DIR:PATH=$1/" "$use/CMakeCache.txt"
    if command -v pkg-config >/dev/null; then
        export PKG_CONFIG_PATH=$1/share/pkgconfig
        [ "$(pkg-config --modversion opd-headers)" = "$version" ]
        pkg-config --cflags opd-headers | tr ' ' '\n' | sed -n 's/^-I//p' | xargs -I{} test -f {}/opd/opd.hpp
    fi
    grep -rqi 'may redistribute such embedded portions' "$1/share" # the licence
    echo "$1: all headers, CMake's and pkg-config's package, the licence"
}

try_versions() {
    python3 - "$version" <<'PY'
import json
import re
import sys

version, wrong = sys.argv[1], []
for path, pattern in {"packaging/debian/changelog": r"^opd \((.*)-\d+\)", "MODULE.bazel": r'    version = "(.*)",',
                      "CITATION.cff": r"^version: (.*)", "CHANGELOG.md": r"^## (\S+)"}.items():
    found = re.search(pattern, open(path).read(), re.M)
    if not found or found[1] != version:
        wrong.append(f"{path} has {found and found[1]}")
if json.load(open("packaging/vcpkg/opd/vcpkg.json"))["version"] != version:
    wrong.append("packaging/vcpkg/opd/vcpkg.json has another")
if wrong:
    sys.exit(f"include/opd/version.hpp has {version}, but: " + "; ".join(wrong))
PY
    echo "every package has version $version"
}

try_conan() {
    local home=$work/conan
    opd_venv "$home/venv" conan 'conan>=2,<3' || return 0
    export CONAN_HOME=$home/home
    rm -rf "$CONAN_HOME" "$home/build"
    "$home/venv/bin/conan" profile detect >/dev/null
    "$home/venv/bin/conan" create packaging/conan -s compiler.cppstd=20 -s build_type=Debug --no-remote \
        -c "tools.cmake.cmake_layout:test_folder=$home/build"
    local made
    made=$(find "$CONAN_HOME/p" -type d -path '*/p/include/opd')
    used "${made%/include/opd}"
}

try_debian() {
    for tool in dpkg-buildpackage dh; do
        command -v $tool >/dev/null || { skipped "no $tool (Debian: debhelper, dpkg-dev)"; return; }
    done
    rm -rf "$work/debian"
    mkdir -p "$work/debian/opd"
    cp -r CMakeLists.txt LICENSE README.md cmake include scripts "$work/debian/opd"
    cp -r packaging/debian "$work/debian/opd/debian"
    (cd "$work/debian/opd" && dpkg-buildpackage -b -us -uc)
    local package=$work/debian/libopd-dev_$version-1_all.deb
    dpkg-deb -x "$package" "$work/debian/there"
    if (cd "$work/debian/there" && find . -type f) |
        grep -vE '^\./usr/(include/opd|share/(cmake/opd|doc/libopd-dev|pkgconfig))/'; then
        opd_die "these files are not in their place"
    fi
    used "$work/debian/there/usr"
    if command -v lintian >/dev/null; then lintian --fail-on error "$package"; fi
}

# as_usage_says <prefix>: the lines that vcpkg prints once the port is there build a program; the port's features are
# components of the package, each of the target that it names.
as_usage_says() {
    local port=packaging/vcpkg/opd use=$work/vcpkg/usage feature
    mkdir -p "$use"
    {
        echo 'cmake_minimum_required(VERSION 3.25)'
        echo 'project(usage LANGUAGES CXX)'
        echo "add_executable(main $opd_root/tests/consumer/core_only.cpp)"
        grep '^    ' $port/usage
    } >"$use/CMakeLists.txt"
    cmake -S "$use" -B "$use/build" -DCMAKE_PREFIX_PATH="$1" >/dev/null
    cmake --build "$use/build" >/dev/null
    "$use/build/main" >/dev/null
    python3 - $port <<'PY'
import json
import re
import sys

port = sys.argv[1]
said = open(port + "/usage").read()
known = re.search(r"MATCHES \"\^\(([a-z|]+)\)\$\"", open("cmake/opdConfig.cmake.in").read())[1].split("|")
features = json.load(open(port + "/vcpkg.json"))["features"]
for name, feature in features.items():
    if name not in known or not re.search(rf"\b{name}\b", said) or not re.search(rf"opd::{name}\b",
                                                                                  feature["description"]):
        sys.exit(f"{port}: the feature {name} is no component of the package, or usage or its description lacks it")
code = re.sub(r"#.*", "", open(port + "/portfile.cmake").read())
if re.search(r"vcpkg_from|SHA512|\bREF\b", code):
    sys.exit(f"{port}: an overlay port has the tree that it lies in, and no release's hash")
PY
    echo "usage builds a program; features are components"
}

try_vcpkg() {
    rm -rf "$work/vcpkg"
    mkdir -p "$work/vcpkg"
    if [ -n "${VCPKG_ROOT-}" ]; then
        "$VCPKG_ROOT/vcpkg" install opd --overlay-ports=packaging/vcpkg --x-install-root="$work/vcpkg/installed"
        local made
        made=$(find "$work/vcpkg/installed" -path '*/include/opd' -type d)
        used "${made%/include/opd}"
        as_usage_says "${made%/include/opd}"
        return
    fi
    echo "no VCPKG_ROOT: the port's commands by CMake alone"
    cmake -DPORT_FILE="$opd_root/packaging/vcpkg/opd/portfile.cmake" -DWORK="$work/vcpkg" -P tests/packages/vcpkg.cmake
    used "$work/vcpkg/packages/opd"
    as_usage_says "$work/vcpkg/packages/opd"
}

try_bazel() {
    local release
    release=$(command -v bazel >/dev/null && bazel --version | sed 's/^bazel \([0-9]*\).*/\1/') || true
    if [ "${release:-0}" -lt 7 ]; then # older ones know no modules
        python3 tests/packages/bazel.py MODULE.bazel BUILD.bazel
        return
    fi
    rm -rf "$work/bazel"
    mkdir -p "$work/bazel"
    cp tests/consumer/core_only.cpp "$work/bazel"
    cat >"$work/bazel/MODULE.bazel" <<'X'
bazel_dep(name = "opd")
bazel_dep(name = "rules_cc", version = "0.0.17")
X
    printf 'local_path_override(module_name = "opd", path = "%s")\n' "$opd_root" >>"$work/bazel/MODULE.bazel"
    cat >"$work/bazel/BUILD.bazel" <<'X'
load("@rules_cc//cc:defs.bzl", "cc_binary")
cc_binary(name = "core_only", srcs = ["core_only.cpp"], copts = ["-std=c++20"], deps = ["@opd"])
X
    if ! (cd "$work/bazel" && bazel mod graph >/dev/null); then
        skipped "Bazel could not get its modules"
        return
    fi
    (cd "$work/bazel" && bazel run //:core_only)
}

for part in "${@:-versions conan debian vcpkg bazel}"; do
    for one in $part; do
        case $one in
        versions | conan | debian | vcpkg | bazel) ;;
        *) opd_die "there is no package of the kind '$one'" ;;
        esac
        mkdir -p "$work"
        opd_say "$one"
        "try_$one"
    done
done
