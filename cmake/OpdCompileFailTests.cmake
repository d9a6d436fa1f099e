# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Every tests/compile_fail/*.cpp (and *.cu where nvcc is found) must not compile, and the compiler must print what a
# comment in its first ten lines says:
#
#     // expect: <CMake regular expression>
#
# May be given several times; every one must match.
#
#     // first: <CMake regular expression>     the line of the first error must match
#     // errors: N                             at most N errors in all
#     // flags: -std=c++17                     further options; not for the control
#
# Where the file has
#
#     // control: NAME
#
# it is also compiled with -DNAME and must then compile, so that it is known to fail for its stated reason alone.
#
# The headers come precompiled, by compile_fail.headers, which runs first: a case takes a tenth of the time.
file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/compile_fail/*.cpp")
if(OPD_CUDA_LANGUAGE)
    file(GLOB cuda_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/compile_fail/*.cu")
    list(APPEND sources ${cuda_sources})
endif()

get_target_property(eigen_includes Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
set(includes "${PROJECT_SOURCE_DIR}/include" "${CMAKE_CURRENT_SOURCE_DIR}" ${eigen_includes})
list(TRANSFORM includes PREPEND -I OUTPUT_VARIABLE include_options)
set(precompiled "${CMAKE_CURRENT_BINARY_DIR}/compile_fail_headers.hpp")
file(WRITE "${precompiled}" "#include <opd/backends/eigen.hpp>\n#include <opd/opd.hpp>\n")
add_test(NAME compile_fail.headers COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 ${include_options} -x c++-header
                                           "${precompiled}" -o "${precompiled}.gch")
set_tests_properties(compile_fail.headers PROPERTIES FIXTURES_SETUP compile_fail_headers TIMEOUT 300)
foreach(source IN LISTS sources)
    cmake_path(GET source STEM stem)
    cmake_path(GET source EXTENSION LAST_ONLY extension)
    if(extension STREQUAL .cu)
        set(stem ${stem}.cu)
        set(headers "")
        # PTX that is not optimised: of what compiles, no more is wanted
        set(compiler "${CMAKE_CUDA_COMPILER};-std=c++20;-arch=compute_80;-Xcicc;-O0;-cuda;-o;/dev/null")
    else()
        set(compiler "${CMAKE_CXX_COMPILER};-std=c++20;-fsyntax-only")
        set(headers "-DPRECOMPILED=${precompiled}")
    endif()
    add_test(
        NAME compile_fail.${stem}
        COMMAND
            ${CMAKE_COMMAND} "-DCOMPILER=${compiler}" "-DSOURCE=${source}"
            "-DINCLUDES=${includes}" ${headers} -P "${PROJECT_SOURCE_DIR}/cmake/run_compile_fail.cmake")
    set_tests_properties(compile_fail.${stem} PROPERTIES FIXTURES_REQUIRED compile_fail_headers TIMEOUT 300)
endforeach()

# The harness itself: a file that compiles, a wrong message and a broken control must each be called a failure.
foreach(kind compiles wrong_message wrong_first too_many broken_control no_expectation)
    add_test(
        NAME compile_fail.harness_${kind}
        COMMAND
            ${CMAKE_COMMAND} "-DCOMPILER=${CMAKE_CXX_COMPILER};-std=c++20;-fsyntax-only"
            "-DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/compile_fail/harness/${kind}.cpp" "-DINCLUDES=${PROJECT_SOURCE_DIR}/include"
            -P "${PROJECT_SOURCE_DIR}/cmake/run_compile_fail.cmake")
endforeach()
set_tests_properties(compile_fail.harness_compiles PROPERTIES PASS_REGULAR_EXPRESSION "compiled, but it must not")
set_tests_properties(compile_fail.harness_wrong_message PROPERTIES PASS_REGULAR_EXPRESSION "did not print what it should")
set_tests_properties(compile_fail.harness_wrong_first PROPERTIES PASS_REGULAR_EXPRESSION "the first error is another one")
set_tests_properties(compile_fail.harness_too_many PROPERTIES PASS_REGULAR_EXPRESSION "2 errors; at most 1 may follow")
set_tests_properties(compile_fail.harness_broken_control PROPERTIES PASS_REGULAR_EXPRESSION "its control must compile")
set_tests_properties(compile_fail.harness_no_expectation PROPERTIES PASS_REGULAR_EXPRESSION "has no `// expect:` and no")
