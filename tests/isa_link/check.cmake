# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -DNM=<nm> -DOBJECTS=<list> -P check.cmake: no two objects for different instruction sets may define the same
# weak function of opd's, or the linker keeps one of them for both. Names of namespace OPD_ISA contain `isa_`.
# Exceptions are one type for all, whatever the instruction set, so that they can be caught; what makes their text is
# exempt with them.
cmake_minimum_required(VERSION 3.25)
set(shared "")
set(seen 0)
foreach(object IN LISTS OBJECTS)
    execute_process(COMMAND "${NM}" --defined-only "${object}" OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[0-9a-f]+ [WVu] _ZN?K?3opd[^\n]*" lines "${text}")
    list(LENGTH lines count)
    if(count EQUAL 0)
        message(FATAL_ERROR "no symbol of opd's in ${object}")
    endif()
    math(EXPR seen "${seen} + ${count}")
    list(FILTER lines EXCLUDE REGEX "isa_")
    list(FILTER lines EXCLUDE REGEX "_ZN3opd(5error|13invalid_input|14infinite_value|11unsupported)[CD]I?[0-2]")
    # The constructors of these copy a result, and are inlined.
    list(FILTER lines EXCLUDE REGEX "_ZN3opd(12bad_contents|15infinite_result)D[0-2]")
    list(FILTER lines EXCLUDE REGEX "_ZN3opd6detail5shapeB5cxx11Ell")
    list(TRANSFORM lines REPLACE "^[0-9a-f]+ . " "")
    list(APPEND shared ${lines})
endforeach()
list(REMOVE_DUPLICATES shared)
if(shared)
    list(JOIN shared "\n  " text)
    message(NOTICE "functions outside `inline namespace OPD_ISA` that would be shared (see them with c++filt):\n  ${text}")
    message(FATAL_ERROR "functions of several instruction sets are shared")
endif()
message(NOTICE "${seen} functions of opd's, none shared")
