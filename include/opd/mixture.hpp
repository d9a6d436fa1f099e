// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The divergence of a mixture of teachers: D(p ‖ Σ_i w_i q_i), for every divergence.
//
//   teacher::mixture{share{t0, .7}, share{t1, .3}}     m[v] = log Σ_i w_i q_i[v],  q_i = softmax(y_i / T_i)
//
// stands where teacher::dense does. A part is a cache of logits, hidden states, either through teacher::at_rows, or a
// source of whole rows; parts may differ in kind, type, width and temperature, not in their vocabulary. Weights are
// positive and relative: m is normalised. The mean of the divergences, Σ_i w_i D(p ‖ q_i), is evaluate_mean's
// (routes.hpp): by convexity it is at least as large, and it wants what all teachers allow where the mixture wants
// what any of them does.
//
// Shapes: (N,V) each. The rows of m are made a block at a time within .budget bytes, V·4 a row and as much for every
// part but one that is hidden states. Beside the parts' products it costs a read of each part's row, an exponential an
// entry and part, which is kept until the row's normalisers are known (4 V bytes a part and thread), and a logarithm an
// entry. What the mixture gives less than 1e-27 is formed from the logits again.
//
// m is rounded to float: 2^-24 of |log q| an entry, and has 2^-22 of its exponentials. Sums are
// float within 1,024 entries and double above. No bit
// depends on threads or the budget. A row is bad where a part holds NaN or +inf, or no mass.
//
// Throws invalid_input, before anything is written, that names teacher.mixture, or a part's members as `teacher`'s. On
// the CPU backends; not teacher::lumped{mixture}.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/lanes.hpp"
#include "opd/logits/logit_blocks.hpp"
#include "opd/logits/own_rows.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"
#include "opd/threads.hpp"

namespace opd {

/// A part of a mixture: a teacher and its weight.
template <class Teacher>
struct share {
    Teacher teacher;
    double weight = 1;
};
template <class Teacher, std::convertible_to<double>... Weight>
share(Teacher, Weight...) -> share<Teacher>;

namespace detail {
inline namespace OPD_ISA {

/// What is kept of a part's row while it is mixed: e^((y - anchor)/T) of each entry, and each leaf's anchor.
struct kept_exponentials {
    float *e = nullptr, *anchor = nullptr;
    kept_exponentials() = default;
    kept_exponentials(carver& from, index_t leaves, int leaf)
        : e(from.take<float>(leaves * leaf)), anchor(from.take<float>(leaves)) {}
};

/// A row of a part: leaves of 1,024 logits as floats, in place where they are floats within ±1e30 and fill a leaf, else
/// through a buffer, in which -inf, and what is below -1e30, is -1e30.
template <class Y>
class mixed_row {
public:
    static constexpr int leaf = 1024;
    mixed_row(const Y* y, index_t n, float temperature, double weight, const kept_exponentials& keep)
        : y_(y), n_(n), weight_(weight), keep_(keep) {
        const double by = 1.44269504088896340736 / double(temperature); // log2 e
        hi_ = float(by), lo_ = float(by - double(hi_)), inv_ = 1 / temperature;
    }

    /// The anchor and the normaliser; false: the row has NaN, +inf, or no mass.
    template <bool Keeps>
    bool measure() {
        double total = 0;
        float buffer[leaf];
        for (index_t begin = 0; begin < n_; begin += leaf) {
            const float* x = in_place(begin);
            leaf_sum of = {};
            if (x != nullptr) {
                of = sum_of<Keeps>(x, begin);
                if (of.worst >= limit) plain_ = false, x = nullptr; // what such a leaf's sums are says nothing
            }
            if (x == nullptr) {
                if (!copy(begin, buffer)) return false;
                of = sum_of<Keeps>(x = buffer, begin);
            }
            if ((of.most - top_) * inv_ > 8) { // beyond what a float's sum carries well: from a new anchor
                total *= std::exp(double(top_ - of.most) * double(inv_));
                top_ = of.most;
                of = sum_of<Keeps>(x, begin);
            }
            if constexpr (Keeps) keep_.anchor[begin / leaf] = top_;
            if (top_ > -1e30f) total += double(of.sum);
        }
        log_share_ = std::log(weight_) - std::log(total);
        return top_ > -1e30f;
    }
    /// Of a leaf's exponentials: w q is this many of them.
    lanes share_of(index_t begin) {
        const float anchor = keep_.anchor[begin / leaf];
        if (anchor != anchor_) {
            anchor_ = anchor;
            share_ = anchor > -1e30f ? std::exp(double(anchor - top_) * double(inv_) + log_share_) : 0;
        }
        return lanes(share_);
    }
    const float* exponentials(index_t begin) const { return keep_.e + begin; }
    /// Where a leaf's logits are, and how log w q follows from them: (y - top) inv + by.
    struct shares {
        const float* y;
        lanes top, inv, by;
        OPD_INLINE lanes at(int i) const {
            const lanes x = lanes::load(y + i);
            return select(x > lanes(-1e30), pin(x - top) * inv + by, lanes(-1e30));
        }
    };
    shares of_leaf(index_t begin, float* buffer) {
        const float* y = in_place(begin);
        if (y == nullptr) copy(begin, buffer), y = buffer;
        return {y, lanes(double(top_)), lanes(double(inv_)), lanes(log_share_)};
    }

private:
    const Y* y_;
    index_t n_;
    double weight_; ///< of all parts' 1
    kept_exponentials keep_;
    float hi_, lo_, inv_, top_ = -1e30f;
    float anchor_ = 2e30f; ///< which `share_` is of
    double log_share_ = 0, share_ = 0;
    bool plain_ = true; ///< no leaf is known to hold anything beyond ±1e30

    struct leaf_sum {
        float most, sum;
        std::int32_t worst;
    };
    /// A leaf's largest logit, Σ e^((y - anchor)/T), of which nothing can be said where the former is far above it, and
    /// the bits of the largest magnitude, or of a NaN.
    template <bool Keeps>
    leaf_sum sum_of(const float* x, index_t begin) const {
        const lanes top{double(top_)}, hi{double(hi_)}, lo{double(lo_)}, floor{-160 / double(hi_)},
            roof{100 / double(hi_)};
        lanes best[4], part[4];
        lanes::ivec worst[4];
        for (int k = 0; k < 4; ++k) best[k] = lanes(-1e30), part[k] = lanes(0.), worst[k] = lanes::ivec{};
        for (int i = 0; i < leaf; i += 4 * lanes::width)
            for (int k = 0; k < 4; ++k) {
                const lanes y = lanes::load(x + i + k * lanes::width);
                const auto size = bit_cast<lanes::ivec>(y.v) & 0x7fffffff;
                worst[k] = worst[k] > size ? worst[k] : size;
                best[k] = max(best[k], y);
                const lanes e = exp2_scaled(min(pin(y - top), roof), hi, lo, floor);
                part[k] += e;
                if constexpr (Keeps) e.store(keep_.e + begin + i + k * lanes::width);
            }
        for (int k = 1; k < 4; ++k) worst[0] = worst[0] > worst[k] ? worst[0] : worst[k];
        std::int32_t all = 0;
        for (int j = 0; j < lanes::width; ++j) all = worst[0][j] > all ? worst[0][j] : all;
        return {max_lane(max(max(best[0], best[1]), max(best[2], best[3]))),
                sum((part[0] + part[1]) + (part[2] + part[3])), all};
    }

    /// A leaf's logits where they are, if they need no change as far as is known.
    const float* in_place(index_t begin) const {
        if constexpr (std::is_same_v<Y, float>) return plain_ && n_ - begin >= leaf ? y_ + begin : nullptr;
        return nullptr;
    }
    /// A leaf, padded with -1e30; false: it holds NaN or +inf.
    bool copy(index_t begin, float* to) const {
        const int count = static_cast<int>(std::min<index_t>(leaf, n_ - begin));
        std::uint32_t above = 0;
        for (int i = 0; i < count; ++i) {
            const float x = static_cast<float>(load_maskable(y_[begin + i]));
            const auto bits = bit_cast<std::uint32_t>(x);
            const std::uint32_t size = bits & 0x7fffffffu;
            const bool below = (bits >> 31) != 0 && size >= std::uint32_t{limit} && size <= 0x7f800000u;
            const std::uint32_t counted = below ? 0 : size;
            above = counted > above ? counted : above;
            to[i] = below ? -1e30f : x;
        }
        for (int i = count; i < leaf; ++i) to[i] = -1e30f;
        return above < 0x7f800000u;
    }
    static constexpr std::int32_t limit = 0x7149f2ca; // 1e30
};

/// log Σ_i e^(log w_i q_i), of any size; -1e30 where nobody has mass.
template <class... Rest>
OPD_INLINE lanes log_of_shares(lanes first, Rest... rest) {
    lanes m = first;
    if constexpr (sizeof...(rest) > 0) {
        lanes top = first;
        ((top = max(top, rest)), ...);
        lanes sum = exp(first - top);
        ((sum += exp(rest - top)), ...);
        m = top + log(sum);
    }
    return select(m > lanes(-1e29), m, lanes(-1e30));
}
/// to[v] = log Σ_i w_i q_i[v] of the `count` ids of the leaf that begins at `begin`. `to` may be where a part's
/// logits are.
template <std::size_t... I, class... Rows>
void mix_leaf(float* to, index_t begin, int count, std::index_sequence<I...>, Rows&... rows) {
    constexpr int leaf = mixed_row<float>::leaf;
    float buffers[sizeof...(I)][leaf];
    const auto store = [&](int i, lanes m) {
        if (i + lanes::width <= count) return m.store(to + i);
        float last[lanes::width];
        m.store(last);
        std::copy_n(last, count - i, to + i);
    };
    int i = 0;
    if constexpr (sizeof...(I) > 1) {
        const std::array<lanes, sizeof...(I)> share{rows.share_of(begin)...};
        const std::array<const float*, sizeof...(I)> e{rows.exponentials(begin)...};
        const lanes least(1e-27); // far from what a float's exponentials lose
        for (; i < count; i += lanes::width) {
            lanes sum(0.);
            ((sum += share[I] * lanes::load(e[I] + i)), ...);
            if (any(sum < least)) break;
            store(i, log(sum));
        }
        if (i >= count) return;
        const std::tuple of{rows.of_leaf(begin, buffers[I])...};
        for (; i < count; i += lanes::width) {
            lanes sum(0.);
            ((sum += share[I] * lanes::load(e[I] + i)), ...);
            store(i, any(sum < least) ? log_of_shares(std::get<I>(of).at(i)...) : log(sum));
        }
    } else {
        const std::tuple of{rows.of_leaf(begin, buffers[I])...};
        for (; i < count; i += lanes::width) store(i, log_of_shares(std::get<I>(of).at(i)...));
    }
}

/// Rows that can be read from end to end.
template <class Source>
inline constexpr bool has_whole_rows = [] {
    if constexpr (made_source<Source>)
        return true;
    else if constexpr (row_source<Source>)
        return bool(Source::one_tile) && !has_scratch<Source>;
    else
        return false;
}();

/// What an own maker of rows and its memory have from here: their names are looked up in this namespace.
struct made_of_parts {};

} // namespace OPD_ISA
} // namespace detail

namespace teacher {

/// See the head of this file.
template <class... Parts>
struct mixture : opd::detail::made_of_parts {
    static constexpr std::size_t K = sizeof...(Parts);
    static_assert(K > 0 && ((Parts::kind == cache_kind::dense && Parts::memory_space == space::host) && ...),
                  "opd: teacher::mixture is of teachers whose logits are known, in the host's memory: teacher::dense, "
                  "teacher::hidden, teacher::at_rows of one of them");
    static_assert((opd::detail::has_whole_rows<Parts> && ...), "opd: a part of teacher::mixture has whole rows");
    static_assert((!is_lumped<Parts> && ...), "opd: the parts of teacher::mixture are of one vocabulary");
    static constexpr cache_kind kind = cache_kind::dense;
    using logit_type = float;
    static constexpr space memory_space = space::host;
    static constexpr bool in_blocks = true, fills_rows = true;

    std::tuple<Parts...> parts;
    std::array<double, K> weights;
    float temperature = 1; ///< of the mixture: q = softmax(m / temperature)
    /// bytes; a head is read once a block, logits had better not leave the cache
    std::size_t budget = std::size_t{(made_source<Parts> || ...) ? 256 : 16} << 20;

    explicit mixture(share<Parts>... of) : parts(of.teacher...), weights{of.weight...} {}

    index_t rows() const { return std::get<0>(parts).rows(); }
    index_t vocab() const { return std::get<0>(parts).vocab(); }
    void validate() const {
        for (const double w : weights)
            if (!opd::detail::is_finite(w) || !(w >= 1e-30 && w <= 1e30))
                throw invalid_input("teacher.mixture", "weights must be above 0, between 1e-30 and 1e30");
        each([&](const auto& part, std::size_t) {
            opd::detail::check_dense_teacher(part, rows());
            if (part.vocab() != vocab())
                throw invalid_input("teacher.mixture", "parts have " + std::to_string(vocab()) + " and " +
                                                           std::to_string(part.vocab()) + " ids");
        });
    }
    void check_rows(const row_mask<>& mask, index_t n) const {
        each([&](const auto& part, std::size_t) { opd::detail::check_row_map_contents(part, mask, n); });
    }
    void reads(opd::detail::call_spans& spans) const {
        each([&](const auto& part, std::size_t) {
            if constexpr (made_source<std::remove_cvref_t<decltype(part)>>)
                opd::detail::read_states(spans, part);
            else if constexpr (requires { part.y; })
                spans.reads("teacher.y", part.y);
            if constexpr (has_row_map<std::remove_cvref_t<decltype(part)>>) spans.reads("teacher.map", part.map);
        });
    }

    /// Memory of a block: of each hidden part what its logits take; m takes the place of the last one's.
    struct block {
        template <class Part>
        struct of_part {
            struct none {
                none(const Part&, index_t, std::byte*) {}
                static constexpr std::size_t bytes = 0;
            };
            struct made : opd::detail::block_memory<Part> {
                made(const Part& p, index_t rows, std::byte* at) : opd::detail::block_memory<Part>(p, rows, 0, at) {}
            };
            using type = std::conditional_t<made_source<Part>, made, none>;
        };
        float* logits = nullptr;
        std::size_t bytes = 0;
        std::tuple<typename of_part<Parts>::type...> made;
        block(const mixture& of, index_t rows, std::byte* at)
            : block(of, rows, at, std::index_sequence_for<Parts...>()) {}

    private:
        template <class Part>
        typename of_part<Part>::type next(const Part& p, index_t rows, std::byte* at) {
            typename of_part<Part>::type m(p, rows, at != nullptr ? at + bytes : nullptr);
            bytes += (m.bytes + 63) / 64 * 64;
            if constexpr (made_source<Part>) logits = m.logits;
            return m;
        }
        template <std::size_t... I>
        block(const mixture& of, index_t rows, std::byte* at, std::index_sequence<I...>)
            : made{next(std::get<I>(of.parts), rows, at)...} { // in order: braces
            if constexpr (!(made_source<Parts> || ...)) {
                opd::detail::carver from{at};
                logits = from.take<float>(rows * of.vocab());
                bytes = from.used;
            }
        }
    };

    void ready(const block& memory, opd::detail::row_list rows, index_t begin, thread_team& team,
               opd::detail::worker_floats workers) const {
        each_made(memory, [&](const auto& part, const auto& of) {
            opd::detail::ready_states(part, static_cast<const block_of<decltype(part)>&>(of), rows, begin, team,
                                      workers);
        });
    }
    void fill_rows(const block& memory, opd::detail::row_list rows, index_t begin, thread_team& team,
                   opd::detail::worker_floats workers) const {
        const index_t v = vocab();
        each_made(memory, [&](const auto& part, const auto& of) {
            opd::detail::fill(part, static_cast<const block_of<decltype(part)>&>(of), rows, begin, v, 0, v, team,
                              workers);
        });
        team.run(rows.count, [&](index_t i, int worker) {
            const index_t r = rows.at[i];
            std::array<opd::detail::kept_exponentials, K> keep;
            (void)kept(keep, reinterpret_cast<std::byte*>(workers.of(worker)));
            mix(memory, r, begin, memory.logits + (r - begin) * v, keep, std::index_sequence_for<Parts...>());
        });
    }
    std::size_t bytes_of_worker(index_t rows) const {
        std::array<opd::detail::kept_exponentials, K> keep;
        std::size_t most = kept(keep, nullptr);
        each([&](const auto& part, std::size_t) {
            if constexpr (made_source<std::remove_cvref_t<decltype(part)>>)
                most = std::max(most, opd::detail::worker_bytes(part, rows));
        });
        return most;
    }

private:
    template <class Part>
    using block_of = opd::detail::block_memory<std::remove_cvref_t<Part>>;

    template <class Visit>
    void each(Visit&& visit) const {
        [&]<std::size_t... I>(std::index_sequence<I...>) { (visit(std::get<I>(parts), I), ...); }
        (std::index_sequence_for<Parts...>());
    }
    template <class Visit>
    void each_made(const block& memory, Visit&& visit) const {
        each_of(
            memory,
            [&](const auto& part, const auto& of) {
                if constexpr (made_source<std::remove_cvref_t<decltype(part)>>) visit(part, of);
            },
            std::index_sequence_for<Parts...>());
    }
    template <class Visit, std::size_t... I>
    void each_of(const block& memory, Visit&& visit, std::index_sequence<I...>) const {
        (visit(std::get<I>(parts), std::get<I>(memory.made)), ...);
    }
    /// Where a thread keeps the exponentials of a row, if there are several parts; returns the bytes.
    std::size_t kept(std::array<opd::detail::kept_exponentials, K>& keep, std::byte* at) const {
        constexpr int leaf = opd::detail::mixed_row<float>::leaf;
        opd::detail::carver from{at};
        for (auto& of : keep)
            if (K > 1) of = opd::detail::kept_exponentials(from, (vocab() + leaf - 1) / leaf, leaf);
        return from.used;
    }
    template <std::size_t I>
    auto row_of(const block& memory, index_t r, index_t begin, double weight,
                const opd::detail::kept_exponentials& keep) const {
        const auto& part = std::get<I>(parts);
        const float temperature_of = part.temperature;
        if constexpr (made_source<std::remove_cvref_t<decltype(part)>>)
            return opd::detail::mixed_row<float>(std::get<I>(memory.made).logits + (r - begin) * vocab(), vocab(),
                                                 temperature_of, weight, keep);
        else
            return opd::detail::mixed_row<typename std::remove_cvref_t<decltype(part)>::logit_type>(
                part.tile({r}, 0), vocab(), temperature_of, weight, keep);
    }
    template <std::size_t... I>
    void mix(const block& memory, index_t r, index_t begin, float* to,
             const std::array<opd::detail::kept_exponentials, K>& keep, std::index_sequence<I...> all) const {
        constexpr int leaf = opd::detail::mixed_row<float>::leaf;
        const double sum = (weights[I] + ...);
        std::tuple rows{row_of<I>(memory, r, begin, weights[I] / sum, keep[I])...};
        if (!(std::get<I>(rows).template measure<(K > 1)>() && ...)) {
            to[0] = opd::detail::quiet_nan<float>(); // the row is bad
            return;
        }
        const index_t v = vocab();
        for (index_t first = 0; first < v; first += leaf)
            opd::detail::mix_leaf(to + first, first, static_cast<int>(std::min<index_t>(leaf, v - first)), all,
                                  std::get<I>(rows)...);
    }
};
template <class... Parts>
mixture(share<Parts>...) -> mixture<Parts...>;

} // namespace teacher

} // namespace opd
