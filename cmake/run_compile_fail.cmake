# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -DCOMPILER=<list> -DSOURCE=<file> -DINCLUDES=<list> [-DPRECOMPILED=<header>] -P run_compile_fail.cmake
# See OpdCompileFailTests.cmake.
function(fail text)
    message(NOTICE "${text}") # unlike FATAL_ERROR, does not break the lines
    message(FATAL_ERROR "not as expected")
endfunction()

file(STRINGS "${SOURCE}" head LIMIT_COUNT 10)
set(expected "")
set(first "")
set(most "")
set(flags "")
set(control "")
foreach(line IN LISTS head)
    if(line MATCHES "^// expect: (.+)$")
        list(APPEND expected "${CMAKE_MATCH_1}")
    elseif(line MATCHES "^// first: (.+)$")
        set(first "${CMAKE_MATCH_1}")
    elseif(line MATCHES "^// errors: ([0-9]+)$")
        set(most "${CMAKE_MATCH_1}")
    elseif(line MATCHES "^// flags: (.+)$")
        separate_arguments(flags UNIX_COMMAND "${CMAKE_MATCH_1}")
    elseif(line MATCHES "^// control: ([A-Za-z_0-9]+)$")
        set(control "${CMAKE_MATCH_1}")
    endif()
endforeach()
if(expected STREQUAL "" AND first STREQUAL "")
    fail("${SOURCE} has no `// expect:` and no `// first:` line")
endif()

list(TRANSFORM INCLUDES PREPEND -I)
if(PRECOMPILED AND flags STREQUAL "") # (other flags, other headers)
    list(PREPEND INCLUDES -include "${PRECOMPILED}")
endif()
set(ENV{LC_ALL} C) # plain quotation marks
execute_process(
    COMMAND ${COMPILER} ${flags} ${INCLUDES} "${SOURCE}"
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
string(REPLACE ";" "," errors "${output}") # which would part a list
string(REGEX MATCHALL "[^\n]*error: [^\n]*" errors "${errors}")
list(LENGTH errors count)
if(first)
    set(first_error "")
    if(count GREATER 0)
        list(GET errors 0 first_error)
    endif()
    if(NOT first_error MATCHES "${first}")
        fail("${SOURCE}: the first error is another one.\nexpected: ${first}\nfirst: ${first_error}\n--- it printed\n${output}")
    endif()
endif()
if(NOT most STREQUAL "" AND count GREATER most)
    fail("${SOURCE}: ${count} errors; at most ${most} may follow from one mistake.\n--- it printed\n${output}")
endif()

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
