// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One random call of evaluate. What must hold:
//
//   it throws opd::error, and every output is as it was; or it returns
//   inputs, what lies around the views and between their rows, and rows that the mask drops with beta = 1 are untouched
//   with 1 and with 3 threads it does the same, to the bit
//   where the numbers are moderate every gradient is finite, and every row of a dense gradient sums to 0
//   (`row_sum_bound`)
//
// Moderate: finite logits and -inf on either side, |logit| up to 1,000, any temperature that is taken, with log-probs
// of the cache that are those of some teacher. Of sampled losses only those whose ratios stay within e^30 are asked to
// be finite.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fuzz/input.hpp"
#include "opd/backends/eigen.hpp"
#include "opd/opd.hpp"

namespace opd::fuzz {

inline constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
inline constexpr double infinity = std::numeric_limits<double>::infinity();

/// Rows of T in memory of their own: a guard before and after, padding between. Everything begins as a pattern.
template <class T>
struct block {
    static constexpr index_t guard = 8;
    index_t rows = 0, cols = 0, stride = 0;
    std::vector<T> data;

    block() = default;
    block(index_t n, index_t c, index_t pad)
        : rows(n), cols(c), stride(c + pad), data(static_cast<std::size_t>(n * stride + 2 * guard)) {
        std::memset(static_cast<void*>(data.data()), 0x5a, data.size() * sizeof(T));
    }
    T* at(index_t r, index_t c) { return data.data() + guard + r * stride + c; }
    const T* at(index_t r, index_t c) const { return data.data() + guard + r * stride + c; }
    double number(index_t r, index_t c) const { return static_cast<double>(element<T>::load(*at(r, c))); }
    void set(index_t r, index_t c, double x) { *at(r, c) = element<T>::store(static_cast<arithmetic_t<T>>(x)); }
    matrix_view<T> view(index_t padding = 0) { return {at(0, 0), rows, cols, stride, padding}; }
    vector_view<T> column() { return {at(0, 0), rows}; } // of one column, without padding

    bool same(const block& o) const { return std::memcmp(data.data(), o.data.data(), data.size() * sizeof(T)) == 0; }
    /// Everything but columns [0, cols) of the rows.
    bool same_outside(const block& o, index_t but_for = 0) const {
        std::vector<T> mine = data;
        for (index_t r = 0; r < rows; ++r) {
            const auto first = static_cast<std::ptrdiff_t>(guard + r * stride);
            std::copy_n(o.data.begin() + first, cols + but_for, mine.begin() + first);
        }
        return std::memcmp(mine.data(), o.data.data(), data.size() * sizeof(T)) == 0;
    }
    /// Columns [cols, cols + padding) of every row are 0.
    bool zero_padding(index_t padding) const {
        const T zero = element<T>::store(arithmetic_t<T>(0));
        for (index_t r = 0; r < rows; ++r)
            for (index_t c = cols; c < cols + padding; ++c)
                if (std::memcmp(at(r, c), &zero, sizeof(T)) != 0) return false;
        return true;
    }
};

template <class T>
constexpr double epsilon_of() { // the spacing at 1
    if constexpr (std::is_same_v<T, double>)
        return 0x1p-52;
    else
        return std::is_same_v<T, float> ? 0x1p-23 : std::is_same_v<T, bfloat16> ? 0x1p-7 : 0x1p-10;
}
template <class T>
constexpr double
smallest_of() { // of what is stored, half a step of it is lost an entry; the backend may flush denormals
    return std::is_same_v<T, half> ? 0x1p-24 : std::is_same_v<T, double> ? 0x1p-1022 : 0x1p-126;
}

/// How far a gradient row may be from summing to 0: `units` eps·Σ|dz| of the type it is stored in. Where p is nearly q,
/// c itself is the difference of numbers as large as the scaled logits: their rounding, eps of the arithmetic each,
/// counts too, by p.
template <class G, class Z>
double row_sum_bound(double sum_of_magnitudes, double factor, double range, index_t cols, double units = 8) {
    const double arithmetic = epsilon_of<arithmetic_t<Z>>();
    return units * std::max(epsilon_of<G>(), arithmetic) * sum_of_magnitudes + 8 * arithmetic * factor * (1 + range) +
           static_cast<double>(cols) * smallest_of<G>();
}

enum class look { ordinary, near, flat, peaked, filtered, one_hot, gap, wild };

/// A row of student and teacher logits (V).
inline void fill_row(choices& c, double* z, double* y, index_t n, bool wild) {
    const look what =
        wild ? look::wild
             : c.of({look::ordinary, look::near, look::flat, look::peaked, look::filtered, look::one_hot, look::gap});
    const double scale = c.of({3.0, 0.02, 1.0, 30.0, 300.0}), far = c.of({40.0, 12.0, 88.0, 104.0, 300.0, 1000.0});
    numbers u(c.bytes(2));
    const index_t s = u.below(n), t = c.once_in(2) ? u.below(n) : s, side = c.below(3);
    for (index_t v = 0; v < n; ++v) {
        z[v] = std::clamp(scale * u.normal(), -1000.0, 1000.0);
        y[v] = std::clamp(scale * u.normal(), -1000.0, 1000.0);
        if (what == look::near) y[v] = z[v] + 1e-3 * u.normal();
        if (what == look::flat) z[v] = 0.02 * (2 * u.uniform() - 1);
        const bool cut = v != s && v != t && (what == look::one_hot || u.uniform() < 0.5);
        if (what == look::filtered || what == look::one_hot) {
            if (cut) z[v] = y[v] = -infinity;
        } else if (what == look::gap) {
            if (cut && side != 1) z[v] = -infinity;
            if (u.uniform() < 0.3 && v != s && v != t && side != 0) y[v] = -infinity;
        } else if (what == look::wild) {
            const double some[] = {not_a_number, infinity, -infinity, 1e30, 3e38, -3e38,
                                   1e-45,        1e-310,   1e308,     -0.0, 1e5,  -1e5};
            if (u.uniform() < 0.3) z[v] = some[u.below(12)];
            if (u.uniform() < 0.3) y[v] = some[u.below(12)];
        }
    }
    if (what == look::peaked || what == look::flat) {
        if (what == look::peaked && side != 1) z[s] = std::min(1000.0, *std::max_element(z, z + n) + far);
        if (side != 2) y[t] = std::min(1000.0, *std::max_element(y, y + n) + far);
    }
}

struct sizes {
    index_t n, v, k;
};
inline sizes sizes_of(choices& c) {
    const index_t v = c.once_in(3)   ? c.of<index_t>({1023, 1024, 1025, 2047, 2048, 2049, 2100, 63, 64, 65})
                      : c.once_in(8) ? 1 + c.below(2100)
                                     : 1 + c.below(40);
    const index_t k = c.once_in(6) ? v : c.once_in(8) ? 0 : 1 + c.below(std::min<index_t>(v, 20));
    return {c.of<index_t>({1, 2, 3, 5, 0, 4}), v, k};
}

/// Everything that env can point to.
struct surroundings {
    env e;
    block<float> weights;
    block<decltype(env::losses)::element_type> losses;
    block<decltype(env::lse)::element_type> lse;
    block<std::remove_const_t<decltype(env::given_lse)::element_type>> given;
    std::vector<std::int64_t> offsets;
    std::vector<std::int32_t> versions;
    std::vector<std::uint8_t> mask8;
    std::vector<std::int64_t> mask64;
    double factor = 1; // an upper bound of |w f|
    bool plain = true; // nothing in it is odd

    surroundings(choices& c, index_t n, bool lse_allowed)
        : weights(n, 1, 0), losses(n, 1, 0), lse(n, 1, 0), given(n, 1, 0) {
        e.reduction =
            c.of({reduce::token_mean, reduce::sum, reduce::sequence_mean, reduce::sequence_sum_mean, reduce::constant});
        if (c.once_in(3)) {
            mask8.assign(static_cast<std::size_t>(n), 1);
            for (auto& m : mask8) m = static_cast<std::uint8_t>(c.below(3));
            if (n > 0) e.mask = row_mask<>(mask8);
        } else if (c.once_in(4)) {
            mask64.assign(static_cast<std::size_t>(n), 7);
            for (auto& m : mask64) m = c.below(2) - 1;
            if (n > 0) e.mask = row_mask<>::ignoring(vector_view<const std::int64_t>(mask64), -1);
        }
        if (c.once_in(3)) {
            for (index_t r = 0; r < n; ++r) weights.set(r, 0, c.of({1.0, -0.5, 0.0, 1e3, 1e-3}));
            factor = 1e3;
            if (c.once_in(8) && n > 0) weights.set(c.below(n), 0, c.of({not_a_number, infinity, 3e38})), plain = false;
            e.weights = weights.column();
        }
        if (c.once_in(2) || e.reduction == reduce::sequence_mean || e.reduction == reduce::sequence_sum_mean) {
            offsets = {0, n};
            if (n > 1 && c.once_in(2)) offsets.insert(offsets.begin() + 1, c.below(n));
            if (c.once_in(10)) offsets[1] = c.of<std::int64_t>({-1, n + 1, 1 << 30});
            e.offsets = offsets;
        }
        if (c.once_in(4)) {
            for (index_t r = 0; r < n; ++r) versions.push_back(static_cast<std::int32_t>(c.below(40)));
            if (n > 0) e.versions = vector_view<const std::int32_t>(versions);
            e.version = 40;
        }
        if (e.reduction == reduce::constant || c.once_in(4))
            e.normaliser = c.once_in(8) ? (plain = false, c.of({not_a_number, -1.0, infinity, 1e-310, 0.0}))
                                        : c.of({1.0, 7.0, 1e4});
        if (c.once_in(4))
            e.beta = c.once_in(8) ? (plain = false, c.of({std::nanf(""), HUGE_VALF})) : c.of({1.0F, -0.5F});
        if (c.once_in(2)) e.losses = losses.column();
        if (c.once_in(8)) e.beta_loss = c.once_in(4) ? (plain = false, std::nanf("")) : 1;
        if (lse_allowed && c.once_in(3)) e.lse = lse.column();
        if (lse_allowed && c.once_in(8)) e.given_lse = given.column(), plain = false;
        for (index_t r = 0; r < n; ++r) {
            losses.set(r, 0, 0.25), lse.set(r, 0, 0.25);
            given.set(r, 0, c.once_in(16) ? not_a_number : 5.0);
        }
        if (c.once_in(4)) {
            e.on_infinite = c.of({infinite::skip(), infinite::raise(), infinite::floor(-100), infinite::floor(0)});
            if (c.once_in(8))
                e.on_infinite = infinite::floor(c.of({not_a_number, infinity, -infinity, 5.0})), plain = false;
        }
        if (c.once_in(8)) e.loss_clamp = c.of({1.0, 1e-9, not_a_number, -1.0});
        if (c.once_in(4)) e.checks = check::contents;
        if (c.once_in(6)) e.on_bad = c.of({bad::raise(), bad::raise_above(0.5), bad::raise_above(2)});
        if (c.once_in(16)) e.vocab = vocabulary::drop_and_renormalise;
        if (c.once_in(32)) e.level = determinism::tiling_invariant;
    }
    bool inputs_same(const surroundings& o) const {
        return weights.same(o.weights) && given.same(o.given) && offsets == o.offsets && versions == o.versions &&
               mask8 == o.mask8 && mask64 == o.mask64;
    }
    bool outputs_same(const surroundings& o) const { return losses.same(o.losses) && lse.same(o.lse); }
    bool outside_same(const surroundings& o) const { return losses.same_outside(o.losses) && lse.same_outside(o.lse); }
    /// The same, with its views in its own memory.
    surroundings copy() const {
        surroundings r = *this;
        const auto move = [](auto& view, auto& mine) {
            if (!view.empty()) view = mine.column();
        };
        move(r.e.weights, r.weights), move(r.e.losses, r.losses), move(r.e.lse, r.lse), move(r.e.given_lse, r.given);
        if (!offsets.empty() && !e.offsets.empty()) r.e.offsets = r.offsets;
        if (!e.versions.empty()) r.e.versions = vector_view<const std::int32_t>(r.versions);
        if (!e.mask.empty()) r.e.mask.data = mask8.empty() ? static_cast<const void*>(r.mask64.data()) : r.mask8.data();
        return r;
    }
};

/// A view that cannot be meant: one field of it is wrong, in a way that shows without looking at the memory.
template <class T>
void spoil(choices& c, matrix_view<T>& v) {
    switch (c.below(8)) {
    case 0:
        v.rows += 1;
        break;
    case 1:
        v.stride = v.cols - 1;
        break;
    case 2:
        v.rows = -v.rows - 1;
        break;
    case 3:
        v.cols = -v.cols - 1;
        break;
    case 4:
        v.data = nullptr; // with its shape
        break;
    case 5:
        v.stride = std::numeric_limits<index_t>::max() / 2; // of one row at most, or larger than any memory
        break;
    case 6:
        v.data = reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(v.data) + 1);
        break;
    default:
        v.cols = 0;
    }
}

inline float temperature_of(choices& c, bool& plain) {
    if (c.once_in(24)) {
        plain = false;
        return c.of({std::nanf(""), 0.0F, -1.0F, HUGE_VALF, 1e-45F, 1e-38F, 3e38F, 1e30F});
    }
    return c.of({1.0F, 0.7F, 2.0F, 0.1F, 100.0F, 0.01F});
}

/// The outcome of a call, to be compared: its loss and counts by their bits; `threw`: before anything was written.
struct outcome {
    bool threw = false, raised = false;
    std::vector<unsigned char> bits = {};
    double loss = 0;
    bool operator==(const outcome& o) const { return threw == o.threw && raised == o.raised && bits == o.bits; }
};
inline std::span<std::byte> arena() {
    static std::vector<std::byte> memory(std::size_t{1} << 20);
    return memory;
}
inline opd::eigen_backend& backend(int threads) {
    static opd::eigen_backend one{.threads = 1, .arena = arena()}, three{.threads = 3, .arena = arena()};
    return threads == 1 ? one : three;
}

template <class Call>
outcome try_call(Call&& call) {
    outcome o;
    const auto look = [&o](const result& r) {
        o.loss = static_cast<double>(r.loss);
        const auto add = [&](const auto& x) {
            const auto* p = reinterpret_cast<const unsigned char*>(&x);
            o.bits.insert(o.bits.end(), p, p + sizeof x);
        };
        const diagnostics& d = r.diagnostics;
        add(o.loss), add(d.kept), add(d.bad_rows), add(d.first_bad_row), add(d.infinite_rows), add(d.careful_rows);
        add(d.kept_loss), add(d.ratio_sum), add(d.saturated), add(d.student_mass_sum);
    };
    try {
        look(call());
    } catch (const infinite_result& e) { // after the whole batch
        o.raised = true;
        look(e.result);
    } catch (const bad_contents& e) { // likewise
        o.raised = true;
        look(e.result);
    } catch (const opd::error& e) {
        o.threw = true;
        need(std::string_view(e.what()).find("workspace") == std::string_view::npos, "the arena is too small");
    } // anything else is a defect, and ends the run
    return o;
}

/// Runs the call with one thread and with three in memory of their own and looks at both. `logits`: the student's;
/// `inputs`: blocks that are only read; `call(backend, z, dz, surroundings)` does it. Returns the first run's outcome
/// and gradient.
template <class Z, class G, class Call>
std::pair<outcome, block<G>> checked(const block<Z>& z, const block<G>& dz, bool in_place, index_t zeroed,
                                     const surroundings& s, Call&& call) {
    std::optional<std::pair<outcome, block<G>>> first;
    std::optional<block<Z>> first_z;
    std::optional<surroundings> first_s;
    for (const int threads : {1, 3}) {
        block<Z> my_z = z;
        block<G> my_dz = dz;
        surroundings my = s.copy();
        std::memset(arena().data(), threads == 1 ? 0 : 0xff, arena().size()); // nothing may depend on what was there
        outcome o = try_call([&] { return call(backend(threads), my_z, my_dz, my); });
        need(my.inputs_same(s), "an input of env was written");
        need(my.outside_same(s), "memory around an output of env was written");
        const auto written = [&](const auto& mine, const auto& before) { // columns, padding that is zeroed, and no more
            need(mine.same_outside(before, zeroed), "memory around the gradient was written");
            need(o.threw || mine.zero_padding(zeroed), "padding of the gradient was left");
        };
        if (in_place) {
            written(my_z, z);
            need(my_dz.same(dz), "memory that no view shows was written");
        } else {
            written(my_dz, dz);
            need(my_z.same(z), "the logits were written");
        }
        if (o.threw) need(my_dz.same(dz) && my_z.same(z) && my.outputs_same(s), "a call that threw has written");
        if (!first) {
            first.emplace(o, std::move(my_dz));
            first_z = std::move(my_z), first_s.emplace(my.copy());
        } else {
            need(o == first->first, "three threads report something else than one");
            need(my_dz.same(first->second) && my_z.same(*first_z) && my.outputs_same(*first_s),
                 "three threads write something else than one");
        }
    }
    if constexpr (std::is_same_v<Z, G>)
        if (in_place) first->second = *first_z;
    return *first;
}

/// The sum of each row of a gradient, and that it is finite. `c_sizes`: what else cancels in a row, Σ |c|, where slopes
/// are many times what is left of them.
template <class G, class Z>
void check_rows(const block<G>& dz, const block<Z>& z, const surroundings& s, float temperature, index_t cols,
                double slope, double teacher_range = 0, double units = 8, const std::vector<double>& c_sizes = {}) {
    for (index_t r = 0; r < dz.rows; ++r) {
        long double exact = 0; // a sum in double would add a rounding of its own for each entry
        double magnitudes = 0, low = 0, high = 0;
        for (index_t v = 0; v < cols; ++v) {
            const double g = dz.number(r, v), x = z.number(r, v);
            if (!std::isfinite(g)) {
                std::fprintf(stderr, "row %lld, column %lld: %g\n", static_cast<long long>(r),
                             static_cast<long long>(v), g);
                fail("a gradient of moderate numbers is not finite");
            }
            exact += g, magnitudes += std::abs(g);
            if (std::isfinite(x)) low = std::min(low, x), high = std::max(high, x);
        }
        if (!c_sizes.empty())
            magnitudes += s.factor / static_cast<double>(temperature) * c_sizes[static_cast<std::size_t>(r)];
        const auto sum = static_cast<double>(exact);
        const double bound =
            row_sum_bound<G, Z>(magnitudes, s.factor * slope / static_cast<double>(temperature),
                                teacher_range + (high - low) / static_cast<double>(temperature), cols, units);
        if (std::abs(sum) > bound) {
            std::fprintf(stderr, "row %lld of (%lld,%lld): sum %g, of magnitudes %g, bound %g, T %g\n",
                         static_cast<long long>(r), static_cast<long long>(dz.rows), static_cast<long long>(cols), sum,
                         magnitudes, bound, static_cast<double>(temperature));
            if (cols <= 40)
                for (index_t v = 0; v < cols; ++v)
                    std::fprintf(stderr, "  z %.9g  dz %.9g\n", z.number(r, v), dz.number(r, v));
            fail("a row of the gradient does not sum to 0");
        }
    }
}

} // namespace opd::fuzz
