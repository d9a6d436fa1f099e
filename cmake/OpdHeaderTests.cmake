# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Every public header is compiled alone (a build error is the test's failure), and two translation units that include all
# of them are linked into one program, which finds a missing `inline`. Names that system headers define as macros (`I` of
# complex.h, `B0` of termios.h, `small` of Windows) are defined before the header, so that opd may not use them.
#
# backends/eigen.hpp needs Eigen; backends/cuda.hpp the CUDA runtime's headers, *.cuh nvcc. A header with other needs than
# these has no place in include/opd, except ranges.hpp, which needs range-v3.
file(GLOB_RECURSE opd_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include"
     "${PROJECT_SOURCE_DIR}/include/opd/*.hpp")
file(GLOB_RECURSE opd_device_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include"
     "${PROJECT_SOURCE_DIR}/include/opd/*.cuh")

set(opd_header_links opd::opd)
if(TARGET opd::eigen)
    list(APPEND opd_header_links opd::eigen)
else()
    list(FILTER opd_headers EXCLUDE REGEX "opd/backends/eigen\\.hpp$")
endif()
if(TARGET opd::cuda)
    list(APPEND opd_header_links opd::cuda)
else()
    list(FILTER opd_headers EXCLUDE REGEX "opd/backends/cuda\\.hpp$")
endif()
find_package(range-v3 CONFIG QUIET)
if(TARGET range-v3::range-v3)
    list(APPEND opd_header_links range-v3::range-v3)
else()
    list(FILTER opd_headers EXCLUDE REGEX "opd/ranges\\.hpp$")
endif()

set(hostile_macros "#define I opd_test_macro_I\n#define B0 opd_test_macro_B0\n#define small opd_test_macro_small\n")
set(generated "${CMAKE_CURRENT_BINARY_DIR}/headers")

function(opd_write path text)
    file(GENERATE OUTPUT "${path}" CONTENT "${text}")
endfunction()

# headers: as in the public tree. extension: cpp or cu.
function(opd_header_programs name extension)
    set(alone "")
    set(includes "")
    foreach(header IN LISTS ARGN)
        string(MAKE_C_IDENTIFIER "${header}" id)
        set(macros "${hostile_macros}")
        if(NOT header MATCHES "^opd/(estimators/.*|sched/.*|detail/.*|[^/]*)\\.hpp$" OR header MATCHES "opd/ranges\\.hpp$")
            set(macros "") # Eigen refuses `I` itself, and the others' headers are not ours to judge
        endif()
        opd_write("${generated}/alone_${id}.${extension}" "${macros}#include <${header}>\n#include <${header}>\n")
        list(APPEND alone "${generated}/alone_${id}.${extension}")
        string(APPEND includes "#include <${header}>\n")
    endforeach()
    add_library(test_${name}_alone OBJECT ${alone})
    target_link_libraries(test_${name}_alone PRIVATE ${opd_header_links})

    opd_write("${generated}/${name}_first.${extension}" "${includes}int opd_test_second();\nint main() { return opd_test_second(); }\n")
    opd_write("${generated}/${name}_second.${extension}" "${includes}int opd_test_second();\nint opd_test_second() { return 0; }\n")
    add_executable(test_${name}_link_twice "${generated}/${name}_first.${extension}" "${generated}/${name}_second.${extension}")
    target_link_libraries(test_${name}_link_twice PRIVATE ${opd_header_links})
    target_compile_options(test_${name}_alone PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0>")
    target_compile_options(test_${name}_link_twice PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0>")
    add_test(NAME ${name}.link_twice COMMAND test_${name}_link_twice)
endfunction()

if(opd_headers)
    opd_header_programs(headers cpp ${opd_headers})
endif()
if(OPD_CUDA_LANGUAGE AND opd_device_headers)
    opd_header_programs(device_headers cu ${opd_device_headers})
endif()
