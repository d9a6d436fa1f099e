// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Data sets that tests make of others.
#pragma once

#include <cstdint>
#include <string>

#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"
#include "opd/teacher.hpp"

namespace opd::test {

/// The set once more, its samples alone, under other names. `vocab` 0: that of the set.
inline void copy_set(const std::string& of, const std::string& to, const data::fingerprints& prints,
                     index_t vocab = 0) {
    const data::rollout_set set(of);
    data::rollout_writer out(to, {.vocab = vocab > 0 ? vocab : set.description().vocab, .fingerprints = prints});
    for (index_t i = 0; i < set.sequences(); ++i) {
        auto one = set.read(i, 1);
        const auto cache = one.cache<teacher::samples<std::int32_t>>();
        out.add({.tokens = one.tokens(), .rows = one.rows(), .mask = one.mask(), .sample = i}, cache);
    }
    out.finish();
}

} // namespace opd::test
