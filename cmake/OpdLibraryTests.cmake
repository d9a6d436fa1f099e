# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Of libopd as a file: each instruction set's kernels run, no name but those of the headers is exported, C99 and C++11
# compile the headers, and the examples run.

# The kernels that a process chooses, each in one of its own; skipped where the processor has not the instructions.
foreach(isa IN LISTS OPD_LIBRARY_ISAS)
    if(TARGET test_c_isas)
        add_test(NAME c.isas.${isa} COMMAND test_c_isas)
        set_tests_properties(c.isas.${isa} PROPERTIES ENVIRONMENT "OPD_ISA=${isa}" SKIP_REGULAR_EXPRESSION "SKIPPED")
    endif()
endforeach()

if(CMAKE_NM)
    add_test(NAME c.exports COMMAND "${CMAKE_COMMAND}" "-DNM=${CMAKE_NM}" "-DLIBRARY=$<TARGET_FILE:opd_c>"
                                    "-DHEADERS=${PROJECT_SOURCE_DIR}/include/opd/c"
                                    -P "${PROJECT_SOURCE_DIR}/tests/c/exports.cmake")
endif()

enable_language(C)
file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/c/*.c" "${PROJECT_SOURCE_DIR}/tests/c/*.c")
foreach(source IN LISTS sources)
    cmake_path(GET source STEM stem)
    add_executable(c_${stem} "${source}")
    set_target_properties(c_${stem} PROPERTIES C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF LINKER_LANGUAGE C)
    target_compile_options(c_${stem} PRIVATE "$<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-Wpedantic;-Werror>")
    target_link_libraries(c_${stem} PRIVATE opd_c m)
    add_test(NAME c.run.${stem} COMMAND c_${stem})
endforeach()
add_test(NAME c.run.08_train.samples COMMAND c_08_train samples)
add_library(c_header_cxx11 OBJECT "${PROJECT_SOURCE_DIR}/tests/c/header_cxx11.cpp")
target_include_directories(c_header_cxx11 PRIVATE "${PROJECT_SOURCE_DIR}/include")
set_target_properties(c_header_cxx11 PROPERTIES CXX_STANDARD 11 CXX_EXTENSIONS OFF)

add_test(NAME c.installed COMMAND "${CMAKE_COMMAND}" "-DBUILD=${PROJECT_BINARY_DIR}" "-DSOURCE=${PROJECT_SOURCE_DIR}"
                                  "-DWORK=${CMAKE_CURRENT_BINARY_DIR}/c_installed" "-DGENERATOR=${CMAKE_GENERATOR}"
                                  "-DCC=${CMAKE_C_COMPILER}" "-DCXX=${CMAKE_CXX_COMPILER}"
                                  -P "${PROJECT_SOURCE_DIR}/tests/c/installed/run.cmake")

add_test(NAME c.rust COMMAND "${PROJECT_SOURCE_DIR}/scripts/test_rust.sh" "$<TARGET_FILE_DIR:opd_c>")
set_tests_properties(c.rust PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED")

# With the distribution's Python; the tests of PyTorch have an environment of their own (scripts/test_torch.sh).
add_test(NAME python.numpy COMMAND bash -c "if PYTHON=/usr/bin/python3; $PYTHON -c 'import numpy'; then export PYTHON; '${PROJECT_SOURCE_DIR}/scripts/test_python.sh' '$<TARGET_FILE:opd_c>'; else echo 'SKIPPED: no numpy (Debian: python3-numpy)'; fi")
set_tests_properties(python.numpy PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED: no numpy" TIMEOUT 900)
