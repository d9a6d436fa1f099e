# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Installs libopd and builds the first example against it: by find_package, shared and static, and by pkg-config where
# there is one.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE "${WORK}")
function(run)
    execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE out ERROR_VARIABLE out RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "${ARGN}: ${status}\n${out}")
    endif()
endfunction()
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/there")
run("${CMAKE_COMMAND}" -S "${SOURCE}/tests/c/installed" -B "${WORK}/build" -G "${GENERATOR}" "-DCMAKE_PREFIX_PATH=${WORK}/there"
    "-DOPD_EXAMPLE=${SOURCE}/examples/c/01_first_loss.c" "-DCMAKE_C_COMPILER=${CC}" "-DCMAKE_CXX_COMPILER=${CXX}")
run("${CMAKE_COMMAND}" --build "${WORK}/build")
run("${WORK}/build/first_c")
run("${WORK}/build/first_c_static")
find_program(pkg_config pkg-config)
if(NOT pkg_config)
    message(STATUS "no pkg-config: opd.pc is not tried")
    return()
endif()
file(GLOB_RECURSE pc "${WORK}/there/*/opd.pc")
cmake_path(GET pc PARENT_PATH folder)
set(ENV{PKG_CONFIG_PATH} "${folder}")
execute_process(COMMAND "${pkg_config}" --cflags --libs opd OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run("${CC}" -std=c99 "${SOURCE}/examples/c/01_first_loss.c" -o "${WORK}/by_pkg_config" ${flags} -lm)
file(GLOB_RECURSE library "${WORK}/there/libopd.so")
cmake_path(GET library PARENT_PATH folder)
set(ENV{LD_LIBRARY_PATH} "${folder}")
run("${WORK}/by_pkg_config")
