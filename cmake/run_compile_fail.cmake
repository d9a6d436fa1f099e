# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -DCOMPILER=<list> -DSOURCE=<file> -DINCLUDES=<list> -P run_compile_fail.cmake
# See OpdCompileFailTests.cmake.
function(fail text)
    message(NOTICE "${text}") # unlike FATAL_ERROR, does not break the lines
    message(FATAL_ERROR "not as expected")
endfunction()

file(STRINGS "${SOURCE}" head LIMIT_COUNT 10)
set(expected "")
set(control "")
foreach(line IN LISTS head)
    if(line MATCHES "^// expect: (.+)$")
        list(APPEND expected "${CMAKE_MATCH_1}")
    elseif(line MATCHES "^// control: ([A-Za-z_0-9]+)$")
        set(control "${CMAKE_MATCH_1}")
    endif()
endforeach()
if(expected STREQUAL "")
    fail("${SOURCE} has no `// expect:` line")
endif()

list(TRANSFORM INCLUDES PREPEND -I)
set(ENV{LC_ALL} C) # plain quotation marks
execute_process(
    COMMAND ${COMPILER} ${INCLUDES} "${SOURCE}"
    RESULT_VARIABLE status
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
if(status EQUAL 0)
    fail("${SOURCE} compiled, but it must not")
endif()
foreach(regex IN LISTS expected)
    if(NOT output MATCHES "${regex}")
        fail("${SOURCE}: the compiler did not print what it should.\nexpected: ${regex}\n--- it printed\n${output}")
    endif()
endforeach()

if(control)
    execute_process(
        COMMAND ${COMPILER} ${INCLUDES} -D${control} "${SOURCE}"
        RESULT_VARIABLE status
        OUTPUT_VARIABLE output
        ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        fail("${SOURCE}: with -D${control} its control must compile.\n--- the compiler printed\n${output}")
    endif()
endif()
