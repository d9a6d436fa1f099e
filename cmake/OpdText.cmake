# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# What the trainer's tokenizer needs: the target opd_text_needs, of PCRE2 (8 bits wide) and utf8proc.
if(NOT TARGET opd_text_needs)
    find_path(OPD_PCRE2_INCLUDE_DIR pcre2.h)
    find_library(OPD_PCRE2_LIBRARY pcre2-8)
    find_path(OPD_UTF8PROC_INCLUDE_DIR utf8proc.h)
    find_library(OPD_UTF8PROC_LIBRARY utf8proc)
    mark_as_advanced(OPD_PCRE2_INCLUDE_DIR OPD_PCRE2_LIBRARY OPD_UTF8PROC_INCLUDE_DIR OPD_UTF8PROC_LIBRARY)
    if(NOT OPD_PCRE2_INCLUDE_DIR OR NOT OPD_PCRE2_LIBRARY)
        message(FATAL_ERROR "opd: the trainer's tokenizer needs PCRE2 (Debian: libpcre2-dev)")
    endif()
    if(NOT OPD_UTF8PROC_INCLUDE_DIR OR NOT OPD_UTF8PROC_LIBRARY)
        message(FATAL_ERROR "opd: the trainer's tokenizer needs utf8proc (Debian: libutf8proc-dev)")
    endif()
    add_library(opd_text_needs INTERFACE IMPORTED)
    set_target_properties(
        opd_text_needs PROPERTIES INTERFACE_LINK_LIBRARIES "${OPD_PCRE2_LIBRARY};${OPD_UTF8PROC_LIBRARY}"
                                  INTERFACE_INCLUDE_DIRECTORIES "${OPD_PCRE2_INCLUDE_DIR};${OPD_UTF8PROC_INCLUDE_DIR}")
endif()
