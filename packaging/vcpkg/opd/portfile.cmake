# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# An overlay port of the source tree that it lies in: vcpkg install opd --overlay-ports=packaging/vcpkg. In a registry,
# vcpkg_from_github (or _gitlab, _git) with a release's REF takes this line's place.
cmake_path(SET SOURCE_PATH NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../../..")

set(VCPKG_BUILD_TYPE release) # headers alone
vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS -DOPD_BUILD_TESTS=OFF -DOPD_BUILD_EXAMPLES=OFF -DOPD_BUILD_BENCHMARKS=OFF -DOPD_WITH_CUDA=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/opd)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/lib" "${CURRENT_PACKAGES_DIR}/share/doc")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
