# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -DMODE=find_package|add_subdirectory|fetch_content -DSOURCE=<opd> -DBUILD=<opd's build tree> -DWORK=<folder>
# -DCOMPILER=<c++>
#       -DGENERATOR=<name> -P run.cmake
# Installs opd (find_package; there also found by pkg-config), then configures, builds and tests the consumer project
# from nothing; opd's headers must be system headers there. An installed package that lacks what it needs must say what
# that is.
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
set(arguments -S "${SOURCE}/tests/consumer" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${COMPILER}"
              -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
set(headers "${SOURCE}/include")
if(MODE STREQUAL find_package)
    step(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${WORK}/prefix")
    set(headers "${WORK}/prefix/include")
    list(APPEND arguments "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
    foreach(missing "eigen:Eigen3:libeigen3-dev" "data:nlohmann_json:nlohmann-json3-dev" "cuda:CUDAToolkit:CUDAToolkit_ROOT")
        string(REPLACE ":" ";" missing "${missing}")
        list(GET missing 0 component)
        list(GET missing 1 package)
        list(GET missing 2 words)
        execute_process(
            COMMAND ${CMAKE_COMMAND} ${arguments} -B "${WORK}/without_${package}" -DOPD_CONSUMER_COMPONENTS=${component}
                    -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON
            RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
        string(REGEX REPLACE "[ \n]+" " " output "${output}")
        if(status EQUAL 0 OR NOT output MATCHES "component '${component}' needs [^.]*[.]?[^.]* which was not found.*${words}")
            message(FATAL_ERROR "without ${package}, find_package(opd COMPONENTS ${component}) said: ${output}")
        endif()
    endforeach()
    find_program(pkg_config pkg-config)
    if(pkg_config)
        set(ENV{PKG_CONFIG_PATH} "${WORK}/prefix/share/pkgconfig")
        execute_process(COMMAND "${pkg_config}" --cflags --libs opd-headers OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
                        COMMAND_ERROR_IS_FATAL ANY)
        separate_arguments(flags UNIX_COMMAND "${flags}")
        step("${COMPILER}" -std=c++20 -fsyntax-only "${SOURCE}/tests/consumer/core_only.cpp" ${flags})
    endif()
elseif(MODE STREQUAL add_subdirectory)
    list(APPEND arguments "-DOPD_CONSUMER_SOURCE=${SOURCE}")
elseif(MODE STREQUAL fetch_content)
    list(APPEND arguments "-DOPD_CONSUMER_SOURCE=${SOURCE}" -DOPD_CONSUMER_FETCH=ON)
else()
    message(FATAL_ERROR "MODE is '${MODE}'")
endif()
step(${CMAKE_COMMAND} ${arguments} -B "${WORK}/build")
file(READ "${WORK}/build/compile_commands.json" commands)
string(FIND "${commands}" "-isystem ${headers} " found)
if(found EQUAL -1)
    message(FATAL_ERROR "opd's headers are not system headers: ${commands}")
endif()
if(MODE STREQUAL fetch_content)
    return() # to the compiler it is add_subdirectory
endif()
step(${CMAKE_COMMAND} --build "${WORK}/build")
step(${CMAKE_CTEST_COMMAND} --test-dir "${WORK}/build" --no-tests=error --output-on-failure)
