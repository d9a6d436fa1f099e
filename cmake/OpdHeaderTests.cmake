# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Every public header is compiled alone (a build error is the test's failure; not where OPD_TEST_SUBSET is compiler),
# and one translation unit that includes all of them is linked twice into one program, which finds a missing `inline`.
# Names that system headers define as macros (`B0` of termios.h, `small` of Windows, `major` and `minor` of
# sysmacros.h) are defined before the header: opd may not use them.
#
# backends/eigen.hpp and compressed.hpp need Eigen; backends/cuda.hpp the CUDA runtime's headers, *.cuh nvcc; data/
# needs nlohmann-json, serve/ cpp-httplib beside it. A header with other needs than these has no place in include/opd,
# except ranges.hpp, which needs range-v3.
#
# In .ci/run, which configures anew, a header gets precompiled those standard headers that it includes whatever is
# defined, itself or through others of opd's: what it lacks it does not get.
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

# The standard headers that a header includes outside of every #if, itself or through others of opd's.
function(opd_standard_includes header result)
    get_property(known GLOBAL PROPERTY "opd_includes ${header}" SET)
    if(NOT known)
        set_property(GLOBAL PROPERTY "opd_includes ${header}" "") # of a header in a circle
        set(found "")
        set(depth 0)
        file(STRINGS "${PROJECT_SOURCE_DIR}/include/${header}" lines REGEX "^ *# *(if|endif|include)")
        foreach(line IN LISTS lines)
            if(line MATCHES "^ *# *if")
                math(EXPR depth "${depth} + 1")
            elseif(line MATCHES "^ *# *endif")
                math(EXPR depth "${depth} - 1")
            elseif(depth EQUAL 0 AND line MATCHES "include [<\"](opd/[^>\"]+)")
                opd_standard_includes("${CMAKE_MATCH_1}" more)
                list(APPEND found ${more})
            elseif(depth EQUAL 0 AND line MATCHES "include <([a-z_]+)>")
                list(APPEND found ${CMAKE_MATCH_1})
            endif()
        endforeach()
        list(REMOVE_DUPLICATES found)
        set_property(GLOBAL PROPERTY "opd_includes ${header}" "${found}")
    endif()
    get_property(found GLOBAL PROPERTY "opd_includes ${header}")
    set(${result} "${found}" PARENT_SCOPE)
endfunction()

# What is precompiled, each line with those before it; those that a header includes, all of them.
set(opd_precompiled "string stdexcept" "algorithm" "vector" "deque memory optional variant")
function(opd_precompiled_of header result)
    opd_standard_includes("${header}" included)
    set(taken "")
    foreach(line IN LISTS opd_precompiled)
        separate_arguments(line UNIX_COMMAND "${line}")
        foreach(name IN LISTS line)
            if(NOT name IN_LIST included)
                set(${result} "${taken}" PARENT_SCOPE)
                return()
            endif()
        endforeach()
        list(TRANSFORM line REPLACE "(.+)" "<\\1>")
        list(APPEND taken ${line})
    endforeach()
    set(${result} "${taken}" PARENT_SCOPE)
endfunction()

set(hostile_macros "#define B0 0000000\n#define small char\n#define major(dev) (dev)\n#define minor(dev) (dev)\n")
set(generated "${CMAKE_CURRENT_BINARY_DIR}/headers")

function(opd_write path text)
    file(GENERATE OUTPUT "${path}" CONTENT "${text}")
endfunction()

# Headers outside backends/, data/, serve/, ranges.hpp and compressed.hpp see opd::opd alone, as a caller without Eigen
# would.
function(opd_header_programs name extension)
    set(includes "")
    foreach(header IN LISTS ARGN)
        string(MAKE_C_IDENTIFIER "${header}" id)
        set(precompiled "")
        if(header MATCHES "^opd/(backends/|data/|serve/|(ranges|compressed)\\.hpp$)")
            set(macros "") # what other libraries' headers use is not ours to judge
            set(group test_${name}_alone_backends)
            set(links ${opd_header_links})
        else()
            set(macros "${hostile_macros}")
            set(group test_${name}_alone)
            set(links opd::opd)
            if(extension STREQUAL cpp AND OPD_CI_RESULTS)
                opd_precompiled_of("${header}" precompiled)
                list(LENGTH precompiled count)
                string(APPEND group "_${count}")
            endif()
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
            if(precompiled)
                target_precompile_headers(${group} PRIVATE ${precompiled})
            endif()
        endif()
        opd_write("${source}" "${macros}#include <${header}>\n#include <${header}>\n")
        target_sources(${group} PRIVATE "${source}")
    endforeach()

    # one object that includes all, and a copy of it
    set(all test_${name}_all)
    set(copy "${generated}/${name}_again.o")
    opd_write("${generated}/${name}_all.${extension}" "${includes}")
    opd_write("${generated}/${name}_main.${extension}" "int main() { return 0; }\n")
    add_library(${all} OBJECT "${generated}/${name}_all.${extension}")
    target_link_libraries(${all} PRIVATE ${opd_header_links})
    # a caller who has opd's headers in -I may ask for more warnings than -Wall has
    target_compile_options(${all} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0;-Wsign-conversion>")
    add_custom_command(
        OUTPUT "${copy}"
        COMMAND "${CMAKE_COMMAND}" -E copy "$<TARGET_OBJECTS:${all}>" "${copy}"
        DEPENDS "$<TARGET_OBJECTS:${all}>"
        VERBATIM)
    set_source_files_properties("${copy}" PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
    add_executable(test_${name}_link_twice "${generated}/${name}_main.${extension}" $<TARGET_OBJECTS:${all}> "${copy}")
    target_link_libraries(test_${name}_link_twice PRIVATE ${opd_header_links})
    add_test(NAME ${name}.link_twice COMMAND test_${name}_link_twice)
endfunction()

if(opd_headers)
    opd_header_programs(headers cpp ${opd_headers})
endif()
if(OPD_CUDA_LANGUAGE AND opd_device_headers)
    opd_header_programs(device_headers cu ${opd_device_headers})
endif()
