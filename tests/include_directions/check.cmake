# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -DROOT=<repository> -P check.cmake: who may include whom. Prints every violation as `file:line: reason`.
#
#     core        include/opd/*.hpp and detail/   core, the standard library, the compiler's intrinsics
#     opd.hpp, sched.hpp   the umbrellas          core, estimators/, sched/, backends/ that need the standard library alone
#     ranges.hpp                                  core, range-v3
#     compressed.hpp                              core, Eigen
#     estimators/                                 core, estimators/, the standard library
#     sched/                                      core, sched/, the standard library, POSIX threads
#     spec/                                       core, spec/, the standard library
#     backends/eigen.hpp                          core, backends/, the standard library, POSIX, Eigen
#     backends/cuda.*                             core, backends/ except eigen.hpp, the standard library, CUDA, cuBLAS, CUB
#     backends/                                   core, backends/ except eigen.hpp and cuda.*, the standard library, POSIX
#     tests                                       anything
#     bench, examples                             anything but doctest and RapidCheck
cmake_minimum_required(VERSION 3.25)

# --- kinds of included headers ----------------------------------------------------------------------------------------
set(standard
    algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes climits
    clocale cmath codecvt compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef cstdint
    cstdio cstdlib cstring ctime cuchar cwchar cwctype deque exception execution filesystem forward_list fstream functional
    future initializer_list iomanip ios iosfwd iostream istream iterator latch limits list locale map memory
    memory_resource mutex new numbers numeric optional ostream queue random ranges ratio regex scoped_allocator semaphore
    set shared_mutex source_location span sstream stack stdexcept stop_token streambuf string string_view syncstream
    system_error thread tuple type_traits typeindex typeinfo unordered_map unordered_set utility valarray variant vector
    version)

function(kind_of header result)
    if(header MATCHES "^opd/estimators/")
        set(kind estimators)
    elseif(header MATCHES "^opd/sched/")
        set(kind sched)
    elseif(header MATCHES "^opd/spec/")
        set(kind spec)
    elseif(header STREQUAL "opd/backends/eigen.hpp")
        set(kind backend_eigen)
    elseif(header MATCHES "^opd/backends/cuda")
        set(kind backend_cuda)
    elseif(header MATCHES "^opd/backends/")
        set(kind backends)
    elseif(header MATCHES "^opd/(opd|sched)\\.hpp$")
        set(kind umbrella)
    elseif(header STREQUAL "opd/ranges.hpp")
        set(kind ranges)
    elseif(header STREQUAL "opd/compressed.hpp")
        set(kind compressed)
    elseif(header MATCHES "^opd/(detail/)?[^/]+$")
        set(kind core)
    elseif(header MATCHES "^opd/")
        set(kind unknown_room)
    elseif(header IN_LIST standard)
        set(kind standard)
    elseif(header MATCHES "^(([iex]mm|x86)intrin|arm_neon|cpuid)\\.h$")
        set(kind intrinsics)
    elseif(header MATCHES "^(pthread|semaphore|sched|unistd)\\.h$|^sys/(mman|stat|syscall|types)\\.h$|^linux/")
        set(kind posix)
    elseif(header MATCHES "^(unsupported/)?Eigen/")
        set(kind eigen)
    elseif(header MATCHES "^(cuda|cublas|driver_types|vector_types|curand|nvtx)|^(cub|thrust|cuda|nv)/")
        set(kind cuda)
    elseif(header MATCHES "^range/v3/")
        set(kind range_v3)
    elseif(header MATCHES "^(doctest/|doctest\\.h|rapidcheck/|rapidcheck\\.h)")
        set(kind test_framework)
    else()
        set(kind foreign)
    endif()
    set(${result} ${kind} PARENT_SCOPE)
endfunction()

set(may_core core standard intrinsics)
set(may_umbrella core estimators sched backends standard)
set(may_ranges core standard range_v3)
set(may_compressed core standard eigen)
set(may_estimators core estimators standard)
set(may_sched core sched standard posix)
set(may_spec core spec standard)
set(may_backends core backends standard intrinsics posix)
set(may_backend_eigen core backends standard intrinsics posix eigen)
set(may_backend_cuda core backends backend_cuda standard cuda)

# --- the check --------------------------------------------------------------------------------------------------------
set(violations 0)
set(files 0)

# who: kind of the including file, or `program` for bench and examples
function(check file who)
    math(EXPR files "${files} + 1")
    file(STRINGS "${ROOT}/${file}" lines REGEX "^[ \t]*#[ \t]*include")
    foreach(line IN LISTS lines)
        set(reason "")
        if(NOT line MATCHES "#[ \t]*include[ \t]*[<\"]([^>\"]+)[>\"]")
            set(reason "an include that is not a plain name")
        else()
            set(header "${CMAKE_MATCH_1}")
            if(line MATCHES "include[ \t]*\"" AND who IN_LIST rooms)
                # Quoted: relative to the file, as far as such a file exists.
                cmake_path(GET file PARENT_PATH here)
                cmake_path(APPEND here "${header}" OUTPUT_VARIABLE path)
                cmake_path(NORMAL_PATH path)
                if(EXISTS "${ROOT}/${path}")
                    cmake_path(RELATIVE_PATH path BASE_DIRECTORY "include" OUTPUT_VARIABLE header)
                endif()
            endif()
            kind_of("${header}" kind)
            if(who STREQUAL program)
                if(kind STREQUAL test_framework)
                    set(reason "doctest and RapidCheck belong in tests alone")
                endif()
            elseif(NOT kind IN_LIST may_${who})
                list(JOIN may_${who} ", " may)
                set(reason "<${header}> is ${kind}; ${who} may include ${may}")
            endif()
        endif()
        if(reason)
            message(NOTICE "${file}: ${reason}")
            math(EXPR violations "${violations} + 1")
        endif()
    endforeach()
    set(violations ${violations} PARENT_SCOPE)
    set(files ${files} PARENT_SCOPE)
endfunction()

set(rooms core umbrella ranges compressed estimators sched spec backends backend_eigen backend_cuda)
file(GLOB_RECURSE headers RELATIVE "${ROOT}" "${ROOT}/include/opd/*.hpp" "${ROOT}/include/opd/*.cuh"
     "${ROOT}/include/opd/*.h" "${ROOT}/include/opd/*.inl")
foreach(file IN LISTS headers)
    string(REGEX REPLACE "^include/" "" header "${file}")
    kind_of("${header}" who)
    if(NOT who IN_LIST rooms)
        message(NOTICE "${file}: not in a room of include/opd (core, detail, estimators, sched, spec, backends)")
        math(EXPR violations "${violations} + 1")
        continue()
    endif()
    check("${file}" ${who})
endforeach()

file(GLOB_RECURSE programs RELATIVE "${ROOT}" "${ROOT}/bench/*.[ch]pp" "${ROOT}/examples/*.[ch]pp" "${ROOT}/bench/*.cu*"
     "${ROOT}/examples/*.cu*")
foreach(file IN LISTS programs)
    check("${file}" program)
endforeach()

if(files EQUAL 0)
    message(FATAL_ERROR "no file found under ${ROOT}")
elseif(NOT violations EQUAL 0)
    message(FATAL_ERROR "${violations} includes in a forbidden direction")
endif()
message(NOTICE "${files} files: every include goes in a permitted direction")
