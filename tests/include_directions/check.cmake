# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# cmake -DROOT=<repository> -P check.cmake: who may include whom. Prints every violation as `file:line: reason`.
#
#     core        include/opd/*.hpp               core, checks/, logits/, rows/, products/, the standard library,
#                                                 intrinsics
#     opd.hpp, sched.hpp, spec.hpp: the umbrellas core, estimators/, sched/, spec/, backends/ that need the standard
#                                                 library alone
#     ranges.hpp                                  core, range-v3
#     compressed.hpp                              core, products/, Eigen
#     estimators/                                 core, estimators/, checks/, rows/, the standard library
#     sched/                                      core, sched/, the standard library, POSIX threads
#     spec/                                       core, spec/, the standard library
#     data/                                       core, data/, the standard library, POSIX, nlohmann-json
#   How a call is done, each floor on those below it alone (and on core, whose files say what a call is):
#     products/   arithmetic with fixed bits      core, products/
#     rows/       what happens in a row           core, rows/, products/, POSIX
#     checks/     of a call's arguments           core, checks/, rows/
#     logits/     rows that are made              core, logits/, checks/, rows/, products/, POSIX
#     cpu/        lanes, groups over threads      core, cpu/, logits/, checks/, rows/, products/, POSIX
#     cuda/       threads of a block, kernels     core, cuda/, logits/, checks/, rows/, products/, CUDA, cuBLAS, CUB
#     shards/     a vocabulary over ranks         core, shards/, cuda/, checks/, rows/
#     serve/      a teacher behind a server       core, serve/, nlohmann-json
#     serve/http_{post,teacher}.hpp               the same, cpp-httplib, POSIX
#     serve/{http_rollout,weight_folders}.hpp     the same, sched/
#     backends/                                   all of these but cuda/, backends/ except eigen.hpp and cuda.*, POSIX
#     backends/eigen.hpp                          the same, Eigen
#     backends/cuda.*                             all of these but cpu/, backends/ except eigen.hpp, CUDA, cuBLAS, CUB
#     c/                                          the C interface: c/, <stddef.h>, <stdint.h>
#     tests                                       anything
#     bench, examples                             anything but doctest and RapidCheck
#     examples/trainer                            the rooms of its README's table: each itself and those above it, and
#                                                 of opd/ core and what the row names
#
# A header of more than 600 lines says why at its head.
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
    elseif(header MATCHES "^opd/data/")
        set(kind data)
    elseif(header MATCHES "^opd/serve/http_(post|teacher)\\.hpp$")
        set(kind serve_http)
    elseif(header MATCHES "^opd/serve/(http_rollout|weight_folders)\\.hpp$")
        set(kind serve_rollout)
    elseif(header MATCHES "^opd/serve/")
        set(kind serve)
    elseif(header STREQUAL "opd/backends/eigen.hpp")
        set(kind backend_eigen)
    elseif(header MATCHES "^opd/backends/cuda")
        set(kind backend_cuda)
    elseif(header MATCHES "^opd/backends/")
        set(kind backends)
    elseif(header MATCHES "^opd/(opd|sched|spec)\\.hpp$")
        set(kind umbrella)
    elseif(header STREQUAL "opd/ranges.hpp")
        set(kind ranges)
    elseif(header STREQUAL "opd/compressed.hpp")
        set(kind compressed)
    elseif(header MATCHES "^opd/[^/]+$")
        set(kind core)
    elseif(header MATCHES "^opd/(products|rows|checks|logits|cpu|cuda|shards)/")
        set(kind ${CMAKE_MATCH_1})
    elseif(header MATCHES "^opd/c/|^std(def|int)\\.h$")
        set(kind c)
    elseif(header MATCHES "^opd/")
        set(kind unknown_room)
    elseif(header IN_LIST standard)
        set(kind standard)
    elseif(header MATCHES "^(([iex]mm|x86)intrin|arm_neon|cpuid)\\.h$")
        set(kind intrinsics)
    elseif(header MATCHES "^(fcntl|pthread|semaphore|sched|unistd)\\.h$|^sys/(file|mman|stat|syscall|types)\\.h$|^linux/")
        set(kind posix)
    elseif(header MATCHES "^(unsupported/)?Eigen/")
        set(kind eigen)
    elseif(header MATCHES "^(cuda|cublas|cooperative_groups|driver_types|vector_types|curand|nvtx)|^(cub|thrust|cuda|nv)/")
        set(kind cuda_library)
    elseif(header MATCHES "^nlohmann/")
        set(kind json)
    elseif(header STREQUAL "httplib.h")
        set(kind httplib)
    elseif(header MATCHES "^range/v3/")
        set(kind range_v3)
    elseif(header MATCHES "^(doctest/|doctest\\.h|rapidcheck/|rapidcheck\\.h)")
        set(kind test_framework)
    else()
        set(kind foreign)
    endif()
    set(${result} ${kind} PARENT_SCOPE)
endfunction()

set(may_core core products rows checks logits standard intrinsics)
set(may_umbrella core estimators sched spec backends standard)
set(may_ranges core standard range_v3)
set(may_compressed core products standard eigen)
set(may_estimators core estimators rows checks standard)
set(may_sched core sched standard posix)
set(may_spec core spec standard)
set(may_data core data standard posix json)
set(may_serve core serve serve_http standard json)
set(may_serve_http core serve serve_http standard json httplib posix)
set(may_serve_rollout ${may_serve_http} serve_rollout sched)
set(may_products core products standard intrinsics posix)
set(may_rows core rows products standard posix)
set(may_checks core checks rows standard)
set(may_logits core logits checks rows products standard posix)
set(may_cpu core cpu logits checks rows products standard intrinsics posix)
set(may_cuda core cuda logits checks rows products standard cuda_library)
set(may_shards core shards cuda checks rows standard)
set(may_backends core backends shards cpu logits checks rows products standard intrinsics posix)
set(may_c c)
set(may_backend_eigen ${may_backends} eigen)
set(may_backend_cuda core backends backend_cuda shards cuda logits checks rows products standard cuda_library)

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

set(rooms core umbrella ranges compressed estimators sched spec data serve serve_http serve_rollout products rows checks logits cpu cuda shards
          backends backend_eigen backend_cuda c)
file(GLOB_RECURSE headers RELATIVE "${ROOT}" "${ROOT}/include/opd/*.hpp" "${ROOT}/include/opd/*.cuh"
     "${ROOT}/include/opd/*.h" "${ROOT}/include/opd/*.inl")
foreach(file IN LISTS headers)
    string(REGEX REPLACE "^include/" "" header "${file}")
    kind_of("${header}" who)
    if(NOT who IN_LIST rooms)
        message(NOTICE "${file}: not in a room of include/opd (tests/include_directions/check.cmake lists them)")
        math(EXPR violations "${violations} + 1")
        continue()
    endif()
    check("${file}" ${who})
    file(READ "${ROOT}/${file}" text)
    string(REGEX MATCHALL "\n" ends "${text}") # a list of lines would join those between brackets
    list(LENGTH ends count)
    if(count GREATER 600 AND NOT "${text}" MATCHES "// Above 600 lines: ")
        message(NOTICE "${file}: ${count} lines, and no `// Above 600 lines: why` at its head")
        math(EXPR violations "${violations} + 1")
    endif()
endforeach()

# The page that says what is where names every file of the folders that callers do not include, and none that is gone.
set(page "docs/concepts/backend.md")
if(EXISTS "${ROOT}/${page}")
    file(STRINGS "${ROOT}/${page}" lines REGEX "^\\| [^|]*\\| `[a-z_]+\\.hpp`.*\\|")
    set(room "")
    set(named "")
    foreach(line IN LISTS lines)
        if(line MATCHES "^\\| `([a-z]+)/`")
            set(room ${CMAKE_MATCH_1})
        endif()
        string(REGEX REPLACE "^\\| [^|]*\\|([^|]*)\\|.*" "\\1" cell "${line}")
        string(REGEX MATCHALL "[a-z_]+\\.hpp" names "${cell}")
        foreach(name IN LISTS names)
            list(APPEND named "include/opd/${room}/${name}")
        endforeach()
    endforeach()
    set(here ${headers})
    list(FILTER here INCLUDE REGEX "^include/opd/(products|rows|checks|logits|cpu|cuda|shards)/")
    foreach(file IN LISTS here)
        if(NOT file IN_LIST named)
            message(NOTICE "${file}: not in the table of ${page}")
            math(EXPR violations "${violations} + 1")
        endif()
    endforeach()
    foreach(file IN LISTS named)
        if(NOT file IN_LIST here)
            message(NOTICE "${page}: ${file} is no file")
            math(EXPR violations "${violations} + 1")
        endif()
    endforeach()
endif()

file(GLOB_RECURSE programs RELATIVE "${ROOT}" "${ROOT}/bench/*.[ch]pp" "${ROOT}/examples/*.[ch]pp" "${ROOT}/bench/*.cu*"
     "${ROOT}/examples/*.cu*")
foreach(file IN LISTS programs)
    check("${file}" program)
endforeach()

# The reference trainer's rooms: "| `room/` | files | idea | more than core of opd/ |", in the order of their rows; a
# row without a room goes on with the one above it. A header among the last column's names is one of a room below.
set(page "examples/trainer/README.md")
if(EXISTS "${ROOT}/${page}")
    file(STRINGS "${ROOT}/${page}" lines REGEX "^(#|\\| room \\||\\|[^|]*\\|[^|]*`[a-z_]+`[^|]*\\|[^|]*\\|[^|]*\\|$)")
    set(above "")
    set(room "")
    set(in_table FALSE)
    foreach(line IN LISTS lines)
        if(line MATCHES "^#")
            set(in_table FALSE)
        elseif(line MATCHES "^\\| room \\|")
            set(in_table TRUE)
            continue()
        endif()
        if(NOT in_table)
            continue()
        endif()
        string(REGEX MATCH "^\\|([^|]*)\\|([^|]*)\\|[^|]*\\|([^|]*)\\|$" line "${line}")
        set(cells "${CMAKE_MATCH_2}")
        set(more "${CMAKE_MATCH_3}")
        if("${CMAKE_MATCH_1}" MATCHES "`([a-z]+)/`")
            set(room ${CMAKE_MATCH_1})
            list(APPEND above ${room})
            set(may_room_${room} ${above})
        endif()
        string(REGEX MATCHALL "`[a-z_/.]+`" more "${more}")
        string(REPLACE "`" "" more "${more}")
        list(APPEND may_room_${room} ${more})
        string(REGEX MATCHALL "`[a-z_]+`" cells "${cells}")
        foreach(name IN LISTS cells)
            string(REPLACE "`" "" name "${name}")
            file(GLOB found "${ROOT}/examples/trainer/${room}/${name}.[ch]pp")
            if(NOT found)
                message(NOTICE "${page}: ${room}/${name} is no file")
                math(EXPR violations "${violations} + 1")
            endif()
        endforeach()
    endforeach()
    file(GLOB_RECURSE sources RELATIVE "${ROOT}/examples/trainer" "${ROOT}/examples/trainer/*.[ch]pp")
    foreach(file IN LISTS sources)
        string(REGEX MATCH "^([a-z]+)/[^/]+$" room "${file}")
        set(room "${CMAKE_MATCH_1}")
        if(NOT room IN_LIST above)
            message(NOTICE "examples/trainer/${file}: not in a room of ${page}")
            math(EXPR violations "${violations} + 1")
            continue()
        endif()
        file(STRINGS "${ROOT}/examples/trainer/${file}" lines REGEX "^[ \t]*#[ \t]*include")
        foreach(line IN LISTS lines)
            string(REGEX MATCH "[<\"]([^>\"]+)[>\"]" line "${line}")
            set(header "${CMAKE_MATCH_1}")
            string(REGEX MATCH "^(opd/)?([a-z]+)/" of "${header}")
            set(of "${CMAKE_MATCH_2}")
            if(CMAKE_MATCH_1 STREQUAL "opd/" OR (of AND EXISTS "${ROOT}/examples/trainer/${header}"))
                if(NOT of IN_LIST may_room_${room} AND NOT header IN_LIST may_room_${room})
                    list(JOIN may_room_${room} ", " may)
                    message(NOTICE "examples/trainer/${file}: \"${header}\" is of ${of}; ${room} may include ${may}")
                    math(EXPR violations "${violations} + 1")
                endif()
            endif()
        endforeach()
    endforeach()
endif()

if(files EQUAL 0)
    message(FATAL_ERROR "no file found under ${ROOT}")
elseif(NOT violations EQUAL 0)
    message(FATAL_ERROR "${violations} violations")
endif()
message(NOTICE "${files} files: every include goes in a permitted direction")
