#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/site.sh: the documentation as a site in build/site, by the distribution's mkdocs and mkdocs-material
# (scripts/setup.sh site installs them). A warning is an error; every link and anchor is followed; no page asks
# another host for anything. `python3 -m http.server -d build/site` shows it.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

python=/usr/bin/python3 # the one that the distribution's packages are for
if ! $python -c 'import mkdocs, pymdownx, material' 2>/dev/null && ! [ -d /usr/share/mkdocs/themes/material ]; then
    echo "SKIPPED: no mkdocs with mkdocs-material (Debian: mkdocs mkdocs-material)"
    exit 0
fi
work=$opd_root/build/site-work
mkdir -p "$work"
$python "$opd_root/scripts/site.py" stage "$work/pages"
(cd "$work" && $python -m mkdocs build --strict --quiet --config-file mkdocs.yml --site-dir "$work/new")
$python "$opd_root/scripts/site.py" check "$work/new"
rm -rf "$opd_root/build/site"
mv "$work/new" "$opd_root/build/site"
echo "build/site/index.html"
