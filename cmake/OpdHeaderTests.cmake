# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Every public header is compiled alone (a build error is the test's failure; not where OPD_TEST_SUBSET is compiler), and two translation units that include all
# of them are linked into one program, which finds a missing `inline`. Names that system headers define as macros (`B0` of
# termios.h, `small` of Windows, `major` and `minor` of sysmacros.h) are defined before the header: opd may not use them.
#
# backends/eigen.hpp and compressed.hpp need Eigen; backends/cuda.hpp the CUDA runtime's headers, *.cuh nvcc; data/ needs
# nlohmann-json, serve/ cpp-httplib beside it. A header with other needs than these has no place in include/opd, except
# ranges.hpp, which needs range-v3.
file(GLOB_RECURSE opd_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include"
     "${PROJECT_SOURCE_DIR}/include/opd/*.hpp")
file(GLOB_RECURSE opd_device_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include"
     "${PROJECT_SOURCE_DIR}/include/opd/*.cuh")

set(opd_header_links opd::opd)
if(TARGET opd::eigen)
    list(APPEND opd_header_links opd::eigen)
else()
    list(FILTER opd_headers EXCLUDE REGEX "opd/(backends/eigen|compressed)\\.hpp$")
endif()
if(TARGET opd::cuda)
    list(APPEND opd_header_links opd::cuda)
else()
    list(FILTER opd_headers EXCLUDE REGEX "opd/backends/cuda(_graphs)?\\.hpp$")
endif()
if(TARGET opd::data)
    list(APPEND opd_header_links opd::data)
else()
    list(FILTER opd_headers EXCLUDE REGEX "opd/data/")
endif()
if(TARGET opd::serve)
    list(APPEND opd_header_links opd::serve)
else()
    list(FILTER opd_headers EXCLUDE REGEX "opd/serve/")
endif()
find_package(range-v3 CONFIG QUIET)
if(TARGET range-v3::range-v3)
    list(APPEND opd_header_links range-v3::range-v3)
else()
    list(FILTER opd_headers EXCLUDE REGEX "opd/ranges\\.hpp$")
endif()

set(hostile_macros "#define B0 0000000\n#define small char\n#define major(dev) (dev)\n#define minor(dev) (dev)\n")
set(generated "${CMAKE_CURRENT_BINARY_DIR}/headers")

function(opd_write path text)
    file(GENERATE OUTPUT "${path}" CONTENT "${text}")
endfunction()

# Headers outside backends/, data/, serve/, ranges.hpp and compressed.hpp see opd::opd alone, as a caller without Eigen would.
function(opd_header_programs name extension)
    set(includes "")
    foreach(header IN LISTS ARGN)
        string(MAKE_C_IDENTIFIER "${header}" id)
        if(header MATCHES "^opd/(backends/|data/|serve/|(ranges|compressed)\\.hpp$)")
            set(macros "") # what other libraries' headers use is not ours to judge
            set(group test_${name}_alone_backends)
            set(links ${opd_header_links})
        else()
            set(macros "${hostile_macros}")
            set(group test_${name}_alone)
            set(links opd::opd)
        endif()
        string(APPEND includes "#include <${header}>\n")
        if(NOT OPD_TEST_SUBSET STREQUAL all)
            continue()
        endif()
        set(source "${generated}/alone_${id}.${extension}")
        if(NOT TARGET ${group})
            add_library(${group} OBJECT)
            target_link_libraries(${group} PRIVATE ${links})
            target_compile_options(${group} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0>")
        endif()
        opd_write("${source}" "${macros}#include <${header}>\n#include <${header}>\n")
        target_sources(${group} PRIVATE "${source}")
    endforeach()

    set(first "${generated}/${name}_first.${extension}")
    set(second "${generated}/${name}_second.${extension}")
    opd_write("${first}" "${includes}int opd_test_second();\nint main() { return opd_test_second(); }\n")
    opd_write("${second}" "${includes}int opd_test_second();\nint opd_test_second() { return 0; }\n")
    add_executable(test_${name}_link_twice "${first}" "${second}")
    target_link_libraries(test_${name}_link_twice PRIVATE ${opd_header_links})
    target_compile_options(test_${name}_link_twice PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0>")
    add_test(NAME ${name}.link_twice COMMAND test_${name}_link_twice)
endfunction()

if(opd_headers)
    opd_header_programs(headers cpp ${opd_headers})
endif()
if(OPD_CUDA_LANGUAGE AND opd_device_headers)
    opd_header_programs(device_headers cu ${opd_device_headers})
endif()
