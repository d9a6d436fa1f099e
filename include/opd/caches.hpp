// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a cache of a teacher's is, and the slots of one of its rows, whichever way rows of few ids lie: columns of a
// matrix, a stretch of one long line, or as a cache of its own storage says. teacher.hpp has the library's caches;
// another one of the kind support has
//
//   slots(row)              the row's detail::row_slots
//   most_slots()            the most that a row has
//   validate(rows, vocab)   throws invalid_input where shapes do not fit
//   ids, log_q, log_mu, log_tail   views of what is read, whatever their shape: outputs may not lie on them
#pragma once

#include "opd/config.hpp"
#include "opd/teacher.hpp"

namespace opd {

/// What is known of the teacher: its kind (dense logits, a support, drawn or weighted tokens) and where it lies.
template <class T>
concept teacher_cache = requires {
    T::kind;
    T::memory_space;
};

namespace detail {
inline namespace OPD_ISA {

template <class Id, class L>
struct row_slots {
    const Id* ids = nullptr;
    const L *log_q = nullptr, *log_mu = nullptr; ///< log_mu: null where the cache has none
    index_t count = 0;
    index_t first = 0; ///< ragged: where in the line the row begins
};

/// A cache that says itself where its rows lie.
template <class Teacher>
concept own_storage = requires(const Teacher& t, index_t row) {
    t.slots(row);
    t.most_slots();
};

/// Ragged rows whose offsets make no sense, as only a device's may, have no slot.
template <class Teacher>
OPD_HD OPD_INLINE auto slots_of(const Teacher& t, index_t row) {
    row_slots<typename Teacher::id_type, typename Teacher::log_type> s;
    row = cache_row(t, row);
    if constexpr (own_storage<Teacher>) {
        s = t.slots(row);
    } else if constexpr (is_ragged<Teacher>) {
        const index_t first = t.offsets[row], last = t.offsets[row + 1];
        if (first < 0 || last > t.ids.size || last <= first || last - first > t.widest) return s;
        s.first = first, s.count = last - first;
        s.ids = t.ids.data + first, s.log_q = t.log_q.data + first;
        if (!t.log_mu.empty()) s.log_mu = t.log_mu.data + first;
    } else {
        s.count = t.ids.cols;
        s.ids = t.ids.row(row), s.log_q = t.log_q.row(row);
        if (!t.log_mu.empty()) s.log_mu = t.log_mu.row(row);
    }
    return s;
}
/// The most that a row has.
template <class Teacher>
OPD_HD index_t most_slots(const Teacher& t) {
    if constexpr (own_storage<Teacher>)
        return t.most_slots();
    else if constexpr (is_ragged<Teacher>)
        return t.widest;
    else
        return t.ids.cols;
}

} // namespace OPD_ISA
} // namespace detail

} // namespace opd
