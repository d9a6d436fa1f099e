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
    if(OPD_NATIVE)
        add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-march=native>")
    endif()
    if(OPD_SANITIZE)
        add_compile_options(-fsanitize=${OPD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
        add_link_options(-fsanitize=${OPD_SANITIZE})
    endif()
elseif(OPD_NATIVE OR OPD_SANITIZE)
    message(FATAL_ERROR "opd: OPD_NATIVE and OPD_SANITIZE are for g++ and clang++, not ${CMAKE_CXX_COMPILER_ID}")
endif()

if(OPD_CUDA_LANGUAGE)
    add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-Xcompiler=-Wall,-Wextra>")
    if(OPD_WERROR)
        add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>")
    endif()
endif()
