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
// part but one that is hidden states. Beside the parts' products it costs two reads of each part's row and an
// exponential an entry and part, twice.
//
// m is rounded to float: 2^-24 of |log q| an entry. Sums are float within 1,024 entries and double above. No bit
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

/// A row of a part: leaves of 1,024 logits as floats; what is -inf, or below, becomes -1e30.
template <class Y>
class mixed_row {
public:
    static constexpr int leaf = 1024;
    mixed_row(const Y* y, index_t n, float temperature) : y_(y), n_(n), inv_(1 / temperature) {}

    /// top_ and the normaliser; false: the row has NaN, +inf, or no mass.
    bool measure() {
        double total = 0;
        float buffer[leaf];
        for (index_t begin = 0; begin < n_; begin += leaf) {
            const int count = static_cast<int>(std::min<index_t>(leaf, n_ - begin));
            if (!stage(begin, count, buffer)) return false;
            lanes best(-1e30);
            for (int i = 0; i < leaf; i += lanes::width) best = max(best, lanes::load(buffer + i));
            const float most = max_lane(best);
            if (most > top_) {
                total *= std::exp(double(top_ - most) * double(inv_));
                top_ = most;
            }
            if (top_ <= -1e30f) continue;
            lanes part(0.);
            const lanes top{double(top_)}, inv{double(inv_)};
            for (int i = 0; i < leaf; i += lanes::width) part += exp(pin(lanes::load(buffer + i) - top) * inv);
            total += double(sum(part));
        }
        log_sum_ = std::log(total);
        return top_ > -1e30f;
    }
    /// log w q of a leaf, of which what lies beyond `count` means nothing.
    void log_shares(index_t begin, int count, double log_weight, float* to) {
        (void)stage(begin, count, to);
        const lanes top{double(top_)}, inv{double(inv_)}, by{log_weight - log_sum_};
        for (int i = 0; i < leaf; i += lanes::width) {
            const lanes y = lanes::load(to + i);
            select(y > lanes(-1e30), pin(y - top) * inv + by, lanes(-1e30)).store(to + i);
        }
    }

private:
    const Y* y_;
    index_t n_;
    float inv_, top_ = -1e30f;
    double log_sum_ = 0;

    /// A leaf padded with -1e30; false where it holds NaN or +inf, by the bits.
    bool stage(index_t begin, int count, float* to) {
        std::uint32_t worst = 0;
        for (int i = 0; i < count; ++i) {
            const float x = static_cast<float>(element<Y>::load(y_[begin + i]));
            const auto bits = bit_cast<std::uint32_t>(x);
            const std::uint32_t size = bits & 0x7fffffffu;
            const bool below = (bits >> 31) != 0 && size >= 0x7149f2cau && size <= 0x7f800000u; // -1e30 and below, -inf
            const std::uint32_t counted = below ? 0 : size;
            worst = counted > worst ? counted : worst;
            to[i] = below ? -1e30f : x;
        }
        for (int i = count; i < leaf; ++i) to[i] = -1e30f;
        return worst < 0x7f800000u;
    }
};

/// to[v] = log Σ_i e^(log w_i q_i[v]) of a leaf of `parts` rows, `leaf` numbers each.
inline void log_of_shares(const float* shares, int parts, float* to, int count) {
    constexpr int leaf = mixed_row<float>::leaf;
    float all[leaf];
    for (int i = 0; i < leaf; i += lanes::width) {
        lanes m;
        if (parts == 1) {
            m = lanes::load(shares + i);
        } else if (parts == 2) {
            const lanes a = lanes::load(shares + i), b = lanes::load(shares + leaf + i);
            m = max(a, b) + log1p(exp(min(a, b) - max(a, b)));
        } else {
            lanes top = lanes::load(shares + i), sum(0.);
            for (int k = 1; k < parts; ++k) top = max(top, lanes::load(shares + k * leaf + i));
            for (int k = 0; k < parts; ++k) sum += exp(lanes::load(shares + k * leaf + i) - top);
            m = top + log(sum);
        }
        m.store(all + i);
    }
    for (int i = 0; i < count; ++i) to[i] = all[i] > -1e29f ? all[i] : neg_inf<float>();
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
    float temperature = 1;                      ///< of the mixture: q = softmax(m / temperature)
    std::size_t budget = std::size_t{16} << 20; ///< bytes

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
        team.run(rows.count, [&](index_t i, int) {
            const index_t r = rows.at[i];
            mix(memory, r, begin, memory.logits + (r - begin) * v, std::index_sequence_for<Parts...>());
        });
    }
    std::size_t bytes_of_worker(index_t rows) const {
        std::size_t most = 0;
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
    template <std::size_t I>
    auto row_of(const block& memory, index_t r, index_t begin) const {
        const auto& part = std::get<I>(parts);
        const float temperature_of = part.temperature;
        if constexpr (made_source<std::remove_cvref_t<decltype(part)>>)
            return opd::detail::mixed_row<float>(std::get<I>(memory.made).logits + (r - begin) * vocab(), vocab(),
                                                 temperature_of);
        else
            return opd::detail::mixed_row<typename std::remove_cvref_t<decltype(part)>::logit_type>(
                part.tile({r}, 0), vocab(), temperature_of);
    }
    template <std::size_t... I>
    void mix(const block& memory, index_t r, index_t begin, float* to, std::index_sequence<I...>) const {
        constexpr int leaf = opd::detail::mixed_row<float>::leaf;
        std::tuple rows{row_of<I>(memory, r, begin)...};
        if (!(std::get<I>(rows).measure() && ...)) {
            to[0] = opd::detail::quiet_nan<float>(); // the row is bad
            return;
        }
        const double all = (weights[I] + ...);
        const std::array<double, K> log_w{std::log(weights[I] / all)...};
        float shares[K * std::size_t(leaf)];
        const index_t v = vocab();
        for (index_t first = 0; first < v; first += leaf) {
            const int count = static_cast<int>(std::min<index_t>(leaf, v - first));
            (std::get<I>(rows).log_shares(first, count, log_w[I], shares + I * std::size_t(leaf)), ...);
            opd::detail::log_of_shares(shares, int(K), to + first, count);
        }
    }
};
template <class... Parts>
mixture(share<Parts>...) -> mixture<Parts...>;

} // namespace teacher

} // namespace opd
