# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -DMODE=find_package|add_subdirectory -DSOURCE=<opd> -DBUILD=<opd's build tree> -DWORK=<folder> -DCOMPILER=<c++>
#       -DGENERATOR=<name> -P run.cmake
# Installs opd (find_package), then configures, builds and tests the consumer project from nothing.
cmake_minimum_required(VERSION 3.25)

function(step)
    execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        list(JOIN ARGV " " command)
        message(NOTICE "${output}")
        message(FATAL_ERROR "failed: ${command}")
    endif()
endfunction()

file(REMOVE_RECURSE "${WORK}")
set(arguments -S "${SOURCE}/tests/consumer" -B "${WORK}/build" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${COMPILER}")
if(MODE STREQUAL find_package)
    step(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${WORK}/prefix")
    list(APPEND arguments "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
elseif(MODE STREQUAL add_subdirectory)
    list(APPEND arguments "-DOPD_CONSUMER_SOURCE=${SOURCE}")
else()
    message(FATAL_ERROR "MODE is '${MODE}'")
endif()
step(${CMAKE_COMMAND} ${arguments})
step(${CMAKE_COMMAND} --build "${WORK}/build")
step(${CMAKE_CTEST_COMMAND} --test-dir "${WORK}/build" --no-tests=error --output-on-failure)
