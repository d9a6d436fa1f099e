# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Headers, and a package for find_package(opd CONFIG) and pkg-config (opd-headers; opd where there is a library). The
# package is the same on every machine: it looks for Eigen and CUDA where it is used, not where it was installed from.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(opd_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/opd")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/opd" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(FILES "${CMAKE_CURRENT_LIST_DIR}/opdServe.cmake" DESTINATION "${opd_package_dir}")
install(TARGETS opd EXPORT opdTargets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT opdTargets NAMESPACE opd:: DESTINATION "${opd_package_dir}")

# A .pc names its files from where it lies, since --prefix may say another place than the configuration did.
file(RELATIVE_PATH opd_prefix_from_headers_pc "/${CMAKE_INSTALL_DATADIR}/pkgconfig" "/")
configure_file("${CMAKE_CURRENT_LIST_DIR}/opd-headers.pc.in" "${CMAKE_CURRENT_BINARY_DIR}/opd-headers.pc" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/opd-headers.pc" DESTINATION "${CMAKE_INSTALL_DATADIR}/pkgconfig")

if(TARGET opd_c)
    install(TARGETS opd_c opd_c_static EXPORT opdLibraryTargets
            LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
    if(TARGET opd_c_cuda)
        install(TARGETS opd_c_cuda LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}") # libopd finds it beside itself
    endif()
    install(EXPORT opdLibraryTargets NAMESPACE opd:: DESTINATION "${opd_package_dir}")
    file(RELATIVE_PATH opd_prefix_from_pc "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
    configure_file("${CMAKE_CURRENT_LIST_DIR}/opd.pc.in" "${CMAKE_CURRENT_BINARY_DIR}/opd.pc" @ONLY)
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/opd.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
endif()

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
