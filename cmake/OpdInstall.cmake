# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Headers, and a package for find_package(opd CONFIG). The package is the same on every machine: it looks for Eigen and
# CUDA where it is used, not where it was installed from.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(opd_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/opd")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/opd" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS opd EXPORT opdTargets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT opdTargets NAMESPACE opd:: DESTINATION "${opd_package_dir}")

configure_package_config_file(
    "${PROJECT_SOURCE_DIR}/cmake/opdConfig.cmake.in" "${CMAKE_CURRENT_BINARY_DIR}/opdConfig.cmake"
    INSTALL_DESTINATION "${opd_package_dir}")
write_basic_package_version_file(
    "${CMAKE_CURRENT_BINARY_DIR}/opdConfigVersion.cmake"
    VERSION ${PROJECT_VERSION}
    COMPATIBILITY SameMinorVersion
    ARCH_INDEPENDENT)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/opdConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/opdConfigVersion.cmake"
        DESTINATION "${opd_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
