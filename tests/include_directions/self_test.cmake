# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -DCHECK=<check.cmake> -DWORK=<folder> -P self_test.cmake: plants one violation at a time and expects it reported;
# a tree without one must pass.
cmake_minimum_required(VERSION 3.25)

function(expect status_wanted text file include)
    file(REMOVE_RECURSE "${WORK}")
    file(WRITE "${WORK}/include/opd/core.hpp" "#include <vector>\n#include <opd/detail/inner.hpp>\n#include \"detail/inner.hpp\"\n")
    file(WRITE "${WORK}/include/opd/detail/inner.hpp" "  #  include <immintrin.h>\n")
    file(WRITE "${WORK}/include/opd/opd.hpp" "#include <opd/core.hpp>\n#include <opd/estimators/a.hpp>\n")
    file(WRITE "${WORK}/include/opd/estimators/a.hpp" "#include \"../core.hpp\"\n#include <opd/estimators/b.hpp>\n")
    file(WRITE "${WORK}/include/opd/estimators/b.hpp" "#include <cmath>\n")
    file(WRITE "${WORK}/include/opd/sched/q.hpp" "#include <semaphore.h>\n#include <opd/core.hpp>\n")
    file(WRITE "${WORK}/include/opd/backends/eigen.hpp" "#include <Eigen/Core>\n#include <opd/core.hpp>\n")
    file(WRITE "${WORK}/include/opd/backends/cuda.cuh" "#include <cub/cub.cuh>\n#include <opd/backends/cuda.hpp>\n")
    file(WRITE "${WORK}/include/opd/backends/cuda.hpp" "#include <cuda_runtime_api.h>\n")
    file(WRITE "${WORK}/examples/01_a.cpp" "#include <Eigen/Core>\n#include <range/v3/view/zip.hpp>\n")
    if(file)
        file(APPEND "${WORK}/${file}" "#include ${include}\n")
    endif()
    execute_process(
        COMMAND ${CMAKE_COMMAND} -DROOT=${WORK} -P "${CHECK}"
        RESULT_VARIABLE status
        OUTPUT_VARIABLE output
        ERROR_VARIABLE output)
    if((status_wanted STREQUAL ok AND NOT status EQUAL 0) OR (status_wanted STREQUAL fails AND status EQUAL 0)
       OR NOT output MATCHES "${text}")
        message(FATAL_ERROR "${file} including ${include}: expected '${status_wanted}' with '${text}', got\n${output}")
    endif()
endfunction()

expect(ok "10 files" "" "")
expect(fails "include/opd/core.hpp: .*estimators" include/opd/core.hpp "<opd/estimators/a.hpp>")
expect(fails "include/opd/core.hpp: .*sched" include/opd/core.hpp "\"sched/q.hpp\"")
expect(fails "include/opd/core.hpp: .*backend_eigen" include/opd/core.hpp "<opd/backends/eigen.hpp>")
expect(fails "include/opd/core.hpp: .*eigen" include/opd/core.hpp "<Eigen/Core>")
expect(fails "include/opd/core.hpp: .*umbrella" include/opd/core.hpp "<opd/opd.hpp>")
expect(fails "include/opd/core.hpp: .*foreign" include/opd/core.hpp "<fmt/format.h>")
expect(fails "include/opd/detail/inner.hpp: .*estimators" include/opd/detail/inner.hpp "\"../estimators/a.hpp\"")
expect(fails "include/opd/opd.hpp: .*backend_eigen" include/opd/opd.hpp "<opd/backends/eigen.hpp>")
expect(fails "include/opd/estimators/a.hpp: .*sched" include/opd/estimators/a.hpp "<opd/sched/q.hpp>")
expect(fails "include/opd/estimators/a.hpp: .*range_v3" include/opd/estimators/a.hpp "<range/v3/all.hpp>")
expect(fails "include/opd/sched/q.hpp: .*estimators" include/opd/sched/q.hpp "<opd/estimators/a.hpp>")
expect(fails "include/opd/backends/eigen.hpp: .*estimators" include/opd/backends/eigen.hpp "<opd/estimators/a.hpp>")
expect(fails "include/opd/backends/eigen.hpp: .*cuda" include/opd/backends/eigen.hpp "<cuda_runtime.h>")
expect(fails "include/opd/backends/cuda.cuh: .*eigen" include/opd/backends/cuda.cuh "<Eigen/Core>")
expect(fails "include/opd/backends/cuda.cuh: .*range_v3" include/opd/backends/cuda.cuh "<range/v3/all.hpp>")
expect(fails "include/opd/estimators/b.hpp: .*test_framework" include/opd/estimators/b.hpp "<doctest/doctest.h>")
expect(fails "include/opd/estimators/b.hpp: an include that is not a plain name" include/opd/estimators/b.hpp "OPD_HEADER")
expect(fails "examples/01_a.cpp: doctest and RapidCheck" examples/01_a.cpp "<rapidcheck.h>")
expect(fails "include/opd/losses/x.hpp: not in a room" include/opd/losses/x.hpp "<vector>")
