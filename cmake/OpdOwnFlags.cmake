# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Flags of opd's own programs. They are directory-scoped, so that neither opd::opd nor a caller's targets see them.
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic>")
    if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
        # std::stable_sort of libstdc++ 12 uses a function that it calls deprecated itself, and clang says so.
        add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wno-deprecated-declarations>")
    endif()
    if(OPD_WERROR)
        add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
    endif()
    # What ccache asks for where headers are precompiled.
    if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
        add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")
    else()
        add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
    endif()
    # Tests are hundreds of programs: the quickest linker that this compiler takes. (nvcc has no such flag.)
    if(OPD_BUILD_TESTS AND NOT CMAKE_EXE_LINKER_FLAGS MATCHES "-fuse-ld")
        foreach(linker lld gold)
            execute_process(
                COMMAND ${CMAKE_CXX_COMPILER} -fuse-ld=${linker} -Wl,--version
                OUTPUT_QUIET ERROR_QUIET
                RESULT_VARIABLE opd_status)
            if(opd_status EQUAL 0)
                message(STATUS "opd: links with ${linker}")
                add_link_options("$<$<LINK_LANGUAGE:CXX>:-fuse-ld=${linker}>")
                break()
            endif()
        endforeach()
    endif()
    if(OPD_MARCH)
        # What the compiler says that it may use, which for native depends on the machine.
        execute_process(
            COMMAND ${CMAKE_CXX_COMPILER} -march=${OPD_MARCH} -dM -E -x c++ /dev/null
            OUTPUT_VARIABLE opd_macros
            ERROR_VARIABLE opd_error
            RESULT_VARIABLE opd_status)
        if(NOT opd_status EQUAL 0)
            string(STRIP "${opd_error}" opd_error)
            message(FATAL_ERROR "opd: ${CMAKE_CXX_COMPILER} does not take OPD_MARCH=${OPD_MARCH}: ${opd_error}")
        endif()
        if(opd_macros MATCHES "__AVX512F__")
            set(opd_lanes "512-bit lanes (AVX-512)")
        elseif(opd_macros MATCHES "__AVX2__" AND opd_macros MATCHES "__FMA__")
            set(opd_lanes "256-bit lanes (AVX2)")
        else()
            set(opd_lanes "the lanes of the base: less than x86-64-v3")
        endif()
        message(STATUS "opd: -march=${OPD_MARCH}, ${opd_lanes}")
        add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-march=${OPD_MARCH}>")
    endif()
    if(OPD_SANITIZE)
        add_compile_options(-fsanitize=${OPD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
        if(NOT CMAKE_CXX_FLAGS_RELEASE MATCHES "-g0") # without lines a report names functions alone
            add_compile_options(-g1)
        endif()
        # a quarter of the compile time, for what the address sanitizer sees
        if(OPD_SANITIZE MATCHES "address.*undefined")
            add_compile_options(-fno-sanitize=null,object-size,vptr)
        endif()
        add_link_options(-fsanitize=${OPD_SANITIZE})
    endif()
elseif(OPD_MARCH OR OPD_SANITIZE)
    message(FATAL_ERROR "opd: OPD_MARCH and OPD_SANITIZE are for g++ and clang++, not ${CMAKE_CXX_COMPILER_ID}")
endif()

if(OPD_CUDA_LANGUAGE)
    add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-Xcompiler=-Wall,-Wextra>")
    if(OPD_WERROR)
        add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>")
    endif()
endif()

# opd_computes(<targets>...): where all is compiled with -O0 (scripts/test.sh), these are with -O1, since they run for
# long.
function(opd_computes)
    if(CMAKE_CXX_FLAGS_RELEASE MATCHES "-O0")
        foreach(target IN LISTS ARGN)
            target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O1>")
        endforeach()
    endif()
endfunction()
