// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Made sources that fill their rows themselves, whole ones, from other sources: mixtures of teachers (mixture.hpp),
// teachers in the order of the student's ids (uld.hpp). Such a source has, beside what made_source asks (source.hpp),
//
//   block<Source>                        memory of a block: constructed from (source, rows, std::byte* or null);
//                                        .bytes, .logits
//   ready(block, rows, begin, team, workers)      before `fill`, as ready_states of hidden states
//   fill_rows(block, rows, begin, team, workers)  row r's logits to block.logits + (r - begin) vocab()
//   bytes_of_worker(rows)                scratch of a thread
//   reads(spans)                         the caller's memory that it reads
//
// makers.hpp runs it as it runs hidden states, in blocks within .budget; never in tiles of the vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/logits/logit_blocks.hpp"
#include "opd/rows/rows.hpp"
#include "opd/source.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Memory of a block of such a source.
template <fills_rows Source>
struct block_memory<Source> : Source::block {
    float* gradient = nullptr; ///< there is none
    index_t* wanted = nullptr;
    std::size_t bytes = 0;
    block_memory(const Source& s, index_t rows, index_t, std::byte* memory = nullptr)
        : Source::block(s, rows, memory != nullptr ? memory + of_list(rows) : nullptr) {
        carver from{memory};
        wanted = from.take<index_t>(rows);
        bytes = of_list(rows) + Source::block::bytes;
    }
    static index_t ids_of(const Source& s, index_t) { return s.vocab(); }

private:
    static std::size_t of_list(index_t rows) {
        carver from;
        (void)from.take<index_t>(rows);
        return from.used;
    }
};
template <fills_rows Source>
void ready_states(const Source& s, const block_memory<Source>& memory, row_list rows, index_t begin, thread_team& team,
                  worker_floats workers) {
    s.ready(memory, rows, begin, team, workers);
}
template <fills_rows Source>
void fill(const Source& s, const block_memory<Source>& memory, row_list rows, index_t begin, index_t, index_t, index_t,
          thread_team& team, worker_floats workers) {
    s.fill_rows(memory, rows, begin, team, workers);
}

/// Row r of a source of whole rows in memory.
template <class Source>
auto whole_row(const Source& s, index_t row) {
    return s.tile({row}, 0);
}

} // namespace OPD_ISA
} // namespace opd::detail
