// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A teacher with another tokenizer: the same text cut in two ways, and the log-ratio of each piece that both cuts agree
// on.
//
//   token_bytes{offsets, bytes}          a vocabulary as bytes: token v's are bytes[offsets[v]] to bytes[offsets[v+1]]
//   align_chunks(mine, ids, theirs, their_ids, chunks)
//   chunk_advantages(chunks, log_p, log_q, A)      A_t = Σ_{j in chunk} log q_j - Σ_{i in chunk} log p_i for each of
//                                                  the chunk's student tokens t; or the sum of all chunks for each
//                                                  (chunk_credit)
//
// A chunk is the shortest stretch that ends at the same byte in both: between two neighbouring chunks both tokenizers
// have a border, within one they share none. With equal tokenizers every chunk is a token, and A_t = log q - log p.
//
// A is an advantage from outside: give it as samples.advantage (N,1) and evaluate with mc{advantage::outside{}}, or
// beside a reward with advantage::mixed. What it descends: with chunk_credit::text, the sum over the text's chunks for
// every token of it, the mean gradient on fresh samples is that of Σ_y p(y) (log p(y) - log q(text of y)), the
// sequences' reverse KL, exactly and at the variance of a whole sequence's return. With chunk_credit::own a token
// answers for its own chunk, as a row's loss does for its own token: less variance, and biased, by what it does to the
// chunks behind it, and because where a chunk ends may depend on what comes next.
// The teacher is judged at the one cut that its tokenizer makes: its other cuts of the same text are not summed.
//
// Tokens without bytes (beginning and end of text): where both sides have one it is a chunk, else it joins the chunk
// before it, and at the very front the first one. To hold two tokens against each other, give both the same bytes.
//
// Shapes: ids (n), any integer type; log_p (n), log_q (n'), nats; chunks in order, without gaps. Linear time. Throws
// invalid_input: ids out of range, offsets that do not ascend, texts that differ, each with the token's place.
//
// Source: minimal common chunks by two pointers, DPCA (arXiv 2606.09456), X-Token (2605.21699).
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <string>
#include <vector>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/reduction.hpp"
#include "opd/view.hpp"

namespace opd {

/// A vocabulary as bytes.
struct token_bytes {
    row_offsets<> offsets;                  ///< (V+1) int32 or int64, ascending
    vector_view<const unsigned char> bytes; ///< (total); empty: lengths alone are known, texts are not compared

    index_t vocab() const { return offsets.size > 0 ? offsets.size - 1 : 0; }
    index_t length(index_t id) const { return offsets[id + 1] - offsets[id]; }
};

/// Student tokens [student, student_end) and teacher tokens [teacher, teacher_end) that are the same text.
struct chunk {
    index_t student, student_end, teacher, teacher_end;
    friend bool operator==(const chunk&, const chunk&) = default;
};

namespace detail {

/// One side of an alignment: which token, and where in its bytes.
template <class Id>
struct token_walk {
    const char* name;
    const token_bytes& table;
    vector_view<const Id> ids;
    index_t next = 0; ///< token
    index_t end = 0;  ///< bytes of the tokens before it

    bool done() const { return next == ids.size; }
    index_t id() const { return static_cast<index_t>(ids[next]); }
    index_t length() const { return table.length(id()); }
    void check() const {
        check_vector(name, ids, ids.size);
        for (index_t i = 0; i < ids.size; ++i) {
            const auto v = static_cast<index_t>(ids[i]);
            if (v < 0 || v >= table.vocab())
                throw invalid_input(
                    name, "id " + std::to_string(v) + " for a table of " + std::to_string(table.vocab()) + " tokens",
                    i);
            const index_t first = table.offsets[v], last = table.offsets[v + 1];
            if (first < 0 || last < first || (!table.bytes.empty() && last > table.bytes.size))
                throw invalid_input(name,
                                    "token " + std::to_string(v) + " has bytes from " + std::to_string(first) + " to " +
                                        std::to_string(last),
                                    i);
        }
    }
    void advance() { end += length(), ++next; }
};
/// The bytes of tokens [a, a_end) and [b, b_end), of one length, are the same.
template <class A, class B>
bool same_text(const token_walk<A>& x, index_t a, index_t a_end, const token_walk<B>& y, index_t b) {
    index_t at = 0; // in y's token b
    for (; a < a_end; ++a)
        for (index_t i = x.table.offsets[static_cast<index_t>(x.ids[a])];
             i < x.table.offsets[static_cast<index_t>(x.ids[a]) + 1]; ++i) {
            while (at == y.table.length(static_cast<index_t>(y.ids[b]))) ++b, at = 0;
            if (x.table.bytes[i] != y.table.bytes[y.table.offsets[static_cast<index_t>(y.ids[b])] + at++]) return false;
        }
    return true;
}

} // namespace detail

/// The chunks of one text, in order, into `out` (whose memory is kept). See the head of this file.
template <std::integral Mine, std::integral Theirs>
void align_chunks(const token_bytes& mine, vector_view<const Mine> ids, const token_bytes& theirs,
                  vector_view<const Theirs> their_ids, std::vector<chunk>& out) {
    detail::token_walk<Mine> s{"student_ids", mine, ids};
    detail::token_walk<Theirs> t{"teacher_ids", theirs, their_ids};
    s.check(), t.check();
    out.clear();
    const bool compared = !mine.bytes.empty() && !theirs.bytes.empty();
    const auto length_of = [](auto walk) {
        while (!walk.done()) walk.advance();
        return walk.end;
    };
    if (const index_t a = length_of(s), b = length_of(t); a != b)
        throw invalid_input("teacher_ids",
                            "are a text of " + std::to_string(b) + " bytes, the student's of " + std::to_string(a));
    const auto empty_next = [](const auto& walk) { return !walk.done() && walk.length() == 0; };
    while (!s.done() || !t.done()) {
        chunk c{s.next, s.next, t.next, t.next};
        const bool both_empty = empty_next(s) && empty_next(t);
        if (both_empty) {
            s.advance(), t.advance();
        } else {
            // one side's empty tokens at the very front join what follows
            while (empty_next(s)) s.advance();
            while (empty_next(t)) t.advance();
            if (!s.done()) s.advance();
            if (!t.done()) t.advance();
            while (s.end != t.end) {
                if (s.end < t.end)
                    s.advance();
                else
                    t.advance();
            }
        }
        while (empty_next(s) && !empty_next(t)) s.advance(); // one side's alone join what is before them
        while (empty_next(t) && !empty_next(s)) t.advance();
        c.student_end = s.next, c.teacher_end = t.next;
        if (compared && !detail::same_text(s, c.student, c.student_end, t, c.teacher))
            throw invalid_input("teacher_ids",
                                "are another text than the student's from token " + std::to_string(c.teacher) + " on",
                                c.student);
        out.push_back(c);
    }
}

/// What a token answers for: its own chunk, or all of the text's.
enum class chunk_credit { own, text };

/// A (n,1) of the student's tokens: log q less log p of their chunk, or of the text. `log_p` (n), `log_q` (n') of the
/// teacher's tokens.
template <class P, class Q, class L>
void chunk_advantages(const std::vector<chunk>& chunks, vector_view<const P> log_p, vector_view<const Q> log_q,
                      matrix_view<L> advantage, chunk_credit credit = chunk_credit::own) {
    index_t mine = 0, theirs = 0;
    for (const chunk& c : chunks) {
        if (c.student != mine || c.student_end < mine || c.teacher != theirs || c.teacher_end < theirs)
            throw invalid_input("chunks", "must follow one another", c.student);
        mine = c.student_end, theirs = c.teacher_end;
    }
    if (log_p.size != mine)
        throw invalid_input("log_p",
                            "has " + std::to_string(log_p.size) + " entries for " + std::to_string(mine) + " tokens");
    if (log_q.size != theirs)
        throw invalid_input("log_q",
                            "has " + std::to_string(log_q.size) + " entries for " + std::to_string(theirs) + " tokens");
    if (advantage.rows != mine || advantage.cols != 1)
        throw invalid_input("advantage", "is (" + std::to_string(advantage.rows) + ", " +
                                             std::to_string(advantage.cols) + "), not (" + std::to_string(mine) +
                                             ", 1)");
    const auto put = [&](const chunk& c, double ratio) {
        for (index_t i = c.student; i < c.student_end; ++i)
            advantage(i, 0) = element<L>::store(static_cast<arithmetic_t<L>>(ratio));
    };
    double text = 0;
    for (const chunk& c : chunks) {
        double ratio = 0;
        for (index_t j = c.teacher; j < c.teacher_end; ++j) ratio += double(element<Q>::load(log_q[j]));
        for (index_t i = c.student; i < c.student_end; ++i) ratio -= double(element<P>::load(log_p[i]));
        text += ratio;
        put(c, ratio);
    }
    if (credit == chunk_credit::text)
        for (const chunk& c : chunks) put(c, text);
}

} // namespace opd
