# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Every option of the build. What is asked for and cannot be had stops the configuration.

option(OPD_BUILD_TESTS "Build opd's tests" ${PROJECT_IS_TOP_LEVEL})
option(OPD_BUILD_EXAMPLES "Build opd's examples and the reference trainer" ${PROJECT_IS_TOP_LEVEL})
option(OPD_BUILD_BENCHMARKS "Build opd's benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(OPD_INSTALL "Add opd's install rules" ${PROJECT_IS_TOP_LEVEL})
option(OPD_WERROR "Turn warnings in opd's own tests, examples and benchmarks into errors" ${PROJECT_IS_TOP_LEVEL})
option(OPD_NATIVE "Compile opd's own tests and examples with -march=native (benchmarks always are)" OFF)

set(OPD_WITH_CUDA AUTO CACHE STRING "CUDA backend: AUTO (if nvcc is found), ON (fail without nvcc), OFF")
set(OPD_CUDA_ARCHITECTURES "80;90" CACHE STRING "Architectures for opd's own CUDA programs")
set(OPD_SANITIZE "" CACHE STRING "Sanitizers for opd's own programs, as in -fsanitize=: e.g. address,undefined")
set(OPD_TEST_SUBSET all CACHE STRING "Tests to build: all, ofast (`// build: ofast`), sanitize (not `// build: no-sanitize`) or tsan (`// build: tsan`)")
set(OPD_TEST_OPTIMIZE -O2 CACHE STRING "Optimisation flags of the test programs")

set_property(CACHE OPD_WITH_CUDA PROPERTY STRINGS AUTO ON OFF)
set_property(CACHE OPD_TEST_SUBSET PROPERTY STRINGS all ofast sanitize tsan)

if(NOT OPD_WITH_CUDA MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "opd: OPD_WITH_CUDA is '${OPD_WITH_CUDA}'; it must be AUTO, ON or OFF")
endif()
if(NOT OPD_TEST_SUBSET MATCHES "^(all|ofast|sanitize|tsan)$")
    message(FATAL_ERROR "opd: OPD_TEST_SUBSET is '${OPD_TEST_SUBSET}'; it must be all, ofast, sanitize or tsan")
endif()
if(OPD_SANITIZE AND OPD_WITH_CUDA STREQUAL ON)
    message(FATAL_ERROR "opd: OPD_SANITIZE and OPD_WITH_CUDA=ON cannot be combined")
endif()

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
if(PROJECT_IS_TOP_LEVEL)
    set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
    set(CMAKE_CXX_EXTENSIONS OFF)
endif()
