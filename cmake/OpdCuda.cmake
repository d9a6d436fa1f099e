# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Finds CUDA as OPD_WITH_CUDA says. Sets OPD_CUDA_FOUND (runtime and cuBLAS are there: opd::cuda can exist) and
# OPD_CUDA_LANGUAGE (.cu files can be compiled). A caller's project only ever gets the former from us: enabling a
# language is left to the top level.
set(OPD_CUDA_FOUND OFF)
set(OPD_CUDA_LANGUAGE OFF)

if(NOT OPD_WITH_CUDA STREQUAL OFF AND NOT OPD_SANITIZE)
    if(CMAKE_CUDA_COMPILER)
        set(OPD_NVCC "${CMAKE_CUDA_COMPILER}")
    else()
        find_program(
            OPD_NVCC nvcc
            HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDAToolkit_ROOT /usr/local/cuda
            PATH_SUFFIXES bin
            DOC "The CUDA compiler")
    endif()

    if(OPD_NVCC)
        cmake_path(GET OPD_NVCC PARENT_PATH opd_cuda_bin)
        cmake_path(GET opd_cuda_bin PARENT_PATH opd_cuda_root)
        if(NOT CUDAToolkit_ROOT AND NOT DEFINED ENV{CUDAToolkit_ROOT})
            set(CUDAToolkit_ROOT "${opd_cuda_root}")
        endif()
        find_package(CUDAToolkit QUIET)
        if(TARGET CUDA::cudart AND TARGET CUDA::cublas)
            set(OPD_CUDA_FOUND ON)
        elseif(OPD_WITH_CUDA STREQUAL ON)
            message(FATAL_ERROR "opd: OPD_WITH_CUDA=ON and nvcc is ${OPD_NVCC}, but the CUDA runtime or cuBLAS is missing")
        endif()
    elseif(OPD_WITH_CUDA STREQUAL ON)
        message(FATAL_ERROR "opd: OPD_WITH_CUDA=ON, but no nvcc in PATH, CUDA_HOME, CUDAToolkit_ROOT or /usr/local/cuda")
    endif()

    if(OPD_CUDA_FOUND AND (OPD_BUILD_TESTS OR OPD_BUILD_EXAMPLES OR OPD_BUILD_BENCHMARKS OR OPD_LIBRARY_CUDA))
        if(NOT CMAKE_CUDA_COMPILER)
            set(CMAKE_CUDA_COMPILER "${OPD_NVCC}" CACHE FILEPATH "The CUDA compiler")
        endif()
        if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
            set(CMAKE_CUDA_ARCHITECTURES "${OPD_CUDA_ARCHITECTURES}")
        endif()
        if(OPD_WITH_CUDA STREQUAL ON)
            enable_language(CUDA)
            set(OPD_CUDA_LANGUAGE ON)
        else()
            include(CheckLanguage)
            check_language(CUDA)
            if(CMAKE_CUDA_COMPILER)
                enable_language(CUDA)
                set(OPD_CUDA_LANGUAGE ON)
            else()
                message(WARNING "opd: ${OPD_NVCC} cannot compile a trivial program; building without CUDA")
                set(OPD_CUDA_FOUND OFF)
            endif()
        endif()
    endif()
endif()

if(PROJECT_IS_TOP_LEVEL)
    if(OPD_CUDA_LANGUAGE)
        message(STATUS "opd: CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
    else()
        message(STATUS "opd: CUDA not used (OPD_WITH_CUDA=${OPD_WITH_CUDA})")
    endif()
endif()
