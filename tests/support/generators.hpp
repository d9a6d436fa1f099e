// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Random calls: shapes, strides, temperatures, masks and logits. A `problem` is small and printable (RapidCheck shrinks
// its shape); the numbers follow from its seed. `buffers` holds the same problem in the element types under test. What
// is no template is in generators.cpp, compiled once for all test programs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <opd/batch.hpp>
#include <opd/element.hpp>
#include <opd/student.hpp>
#include <opd/teacher.hpp>
#include <rapidcheck.h>

namespace opd::test {

/// How a row's logits look.
enum class flavour {
    wide,        ///< z, y ~ N(0,3), independent
    near_equal,  ///< y = z + N(0, 1e-3)
    equal,       ///< y = z
    peaked,      ///< one token 12 nats above N(0,1), not always the same on both sides
    filtered,    ///< wide, with the same ids at -inf on both sides: what top-p leaves
    student_gap, ///< wide, with -inf on the student's side only: forward KL infinite
    teacher_gap, ///< wide, with -inf on the teacher's side only: reverse KL infinite
    one_hot,     ///< everything but one token at -inf, the same on both sides
    steep,       ///< one token 20 to 1,000 nats above N(0,1) on each side, mostly the same; some tokens as far below
    diffuse ///< one side within ±0.02, as an untrained head is; the other N(0,1) with one token 0 to 20 nats above
};
inline const char* name_of(flavour f) {
    constexpr const char* names[] = {"wide",        "near_equal",  "equal",   "peaked", "filtered",
                                     "student_gap", "teacher_gap", "one_hot", "steep",  "diffuse"};
    return names[int(f)];
}

struct problem {
    index_t rows = 1, vocab = 1;
    index_t pad_z = 0, pad_y = 0, pad_g = 0; ///< stride - vocab
    float temperature_p = 1, temperature_q = 1;
    flavour kind = flavour::wide;
    bool masked = false; ///< about a third of the rows
    std::uint64_t seed = 1;

    friend std::ostream& operator<<(std::ostream& o, const problem& p) {
        return o << "problem{" << p.rows << " x " << p.vocab << ", padding " << p.pad_z << "/" << p.pad_y << "/"
                 << p.pad_g << ", T " << p.temperature_p << "/" << p.temperature_q << ", " << name_of(p.kind)
                 << (p.masked ? ", masked" : "") << ", seed " << p.seed << "}";
    }
};

/// Sizes at which something changes: 0 lanes, lane widths, leaves; and everything modulo 16.
rc::Gen<index_t> vocab_size(index_t largest);

struct problem_options {
    index_t largest_vocab = 3000;
    index_t smallest_rows = 0, largest_rows = 6;
    bool temperatures = true;
    bool far_temperatures = false; ///< also from 0.01 to 100
    bool many_rows = false;        ///< also some hundreds of rows, several of them a block, of few entries
    std::vector<flavour> kinds = {flavour::wide, flavour::near_equal, flavour::equal, flavour::peaked,
                                  flavour::filtered};
};

rc::Gen<problem> problems(problem_options o = {});

/// The next numbers of a stream: independent of the standard library's distributions, so a printed seed means the same
/// everywhere.
class numbers {
public:
    explicit numbers(std::uint64_t seed) : engine_(seed) {}
    double uniform() { return (double(engine_() >> 11) + 0.5) * 0x1p-53; }
    double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
    index_t below(index_t n) { return index_t(engine_() % std::uint64_t(n)); }

private:
    std::mt19937_64 engine_;
};

/// First rows of the sequences of a batch, none longer than `longest`, some empty: env.offsets. (S+1)
std::vector<std::int64_t> random_offsets(index_t rows, numbers& u, index_t longest = 3);
/// First places of lists of these lengths. (S+1)
std::vector<std::int64_t> offsets_for(const std::vector<index_t>& lengths);
/// A mask that keeps about this share of the rows. (N)
std::vector<std::uint8_t> random_mask(index_t rows, numbers& u, double share = 0.8);

/// A row of student and teacher logits (V) of the given flavour.
void fill_row(flavour f, numbers& u, double* z, double* y, index_t n);

/// The problem's memory, rounded to the element types. Padding and dz hold 777 until written.
template <class Z, class G = Z, class Y = Z>
struct buffers {
    problem p;
    std::vector<Z> z;  // (N, V + pad_z)
    std::vector<Y> y;  // (N, V + pad_y)
    std::vector<G> dz; // (N, V + pad_g)
    std::vector<std::uint8_t> kept;
    std::vector<float> weights;

    explicit buffers(const problem& p_)
        : p(p_), z(size(p.pad_z), cast<Z>(777)), y(size(p.pad_y), cast<Y>(777)), dz(size(p.pad_g), cast<G>(777)),
          kept(std::size_t(p.rows), 1), weights(std::size_t(p.rows), 1) {
        numbers u(p.seed);
        std::vector<double> rz(static_cast<std::size_t>(p.vocab)), ry(rz.size());
        for (index_t r = 0; r < p.rows; ++r) {
            fill_row(p.kind, u, rz.data(), ry.data(), p.vocab);
            for (index_t v = 0; v < p.vocab; ++v) {
                z[std::size_t(r * (p.vocab + p.pad_z) + v)] = cast<Z>(rz[std::size_t(v)]);
                y[std::size_t(r * (p.vocab + p.pad_y) + v)] = cast<Y>(ry[std::size_t(v)]);
            }
            if (p.masked) kept[std::size_t(r)] = u.uniform() < 0.65;
            weights[std::size_t(r)] = float(u.normal());
        }
    }
    /// The same call for other element types: the values this problem's memory really holds.
    template <class Z2, class G2, class Y2>
    buffers<Z2, G2, Y2> as() const {
        buffers<Z2, G2, Y2> o(p);
        for (std::size_t i = 0; i < z.size(); ++i) o.z[i] = cast<Z2>(double(element<Z>::load(z[i])));
        for (std::size_t i = 0; i < y.size(); ++i) o.y[i] = cast<Y2>(double(element<Y>::load(y[i])));
        for (std::size_t i = 0; i < dz.size(); ++i) o.dz[i] = cast<G2>(double(element<G>::load(dz[i])));
        o.kept = kept, o.weights = weights;
        return o;
    }

    std::size_t size(index_t pad) const { return std::size_t(p.rows * (p.vocab + pad)) + 1; } // never a null pointer
    matrix_view<const Z> z_view() const { return {z.data(), p.rows, p.vocab, p.vocab + p.pad_z}; }
    matrix_view<const Y> y_view() const { return {y.data(), p.rows, p.vocab, p.vocab + p.pad_y}; }
    matrix_view<G> dz_view() { return {dz.data(), p.rows, p.vocab, p.vocab + p.pad_g, p.pad_g}; }
    student::logits<Z, G> student(padding pad = padding::keep) {
        return {.z = z_view(), .dz = dz_view(), .temperature = p.temperature_p, .pad = pad};
    }
    student::logits<Z, G> value_only() { return {z_view(), {}, p.temperature_p}; }
    teacher::dense<Y> teacher() const { return {y_view(), p.temperature_q}; }
    env masked_env() const {
        env e;
        if (p.masked) e.mask = row_mask<>(kept);
        return e;
    }

    template <class T>
    static T cast(double x) {
        return element<T>::store(static_cast<arithmetic_t<T>>(x));
    }
};

/// The sparse caches of a problem, in log-probs of type L: a support of k distinct ids, m draws (repeats among them,
/// and m may exceed V) from a stale student, and the same m slots weighted, with unused ones and exact ones among them.
template <class L>
struct caches {
    index_t rows, k, m;
    std::vector<std::int32_t> ids, drawn, slots;         // (N,k) (N,m) (N,m)
    std::vector<L> log_q, log_tail, drawn_log_q, log_mu; // (N,k) (N) (N,m) (N,m)
    std::vector<arithmetic_t<L>> weight;                 // (N,m)
    std::vector<std::uint8_t> exact;                     // (N,m)

    template <class Z, class G, class Y>
    caches(const buffers<Z, G, Y>& b, index_t k_, index_t m_) : rows(b.p.rows), k(k_), m(m_) {
        numbers u(b.p.seed + 77);
        const index_t n = b.p.vocab;
        std::vector<index_t> order(static_cast<std::size_t>(n));
        for (index_t v = 0; v < n; ++v) order[std::size_t(v)] = v;
        for (index_t r = 0; r < rows; ++r) {
            const std::vector<double> lq = log_softmax(b.y_view().row(r), n, double(b.p.temperature_q), 0, u);
            const std::vector<double> lm = log_softmax(b.z_view().row(r), n, double(b.p.temperature_p), 0.5, u);
            for (index_t j = 0; j < k; ++j) std::swap(order[std::size_t(j)], order[std::size_t(j + u.below(n - j))]);
            double rest = 0;
            for (index_t j = 0; j < n; ++j) {
                const auto id = std::size_t(order[std::size_t(j)]);
                if (j < k)
                    ids.push_back(std::int32_t(id)), log_q.push_back(cast(lq[id]));
                else
                    rest += std::exp(lq[id]);
            }
            log_tail.push_back(cast(rest > 0 ? std::log(rest) : detail::neg_inf<double>()));
            for (index_t j = 0; j < m; ++j) {
                auto id = std::size_t(u.below(n));
                while (detail::is_neg_inf(lm[id])) id = std::size_t(u.below(n)); // nobody draws what has no mass
                drawn.push_back(std::int32_t(id));
                slots.push_back(j > 0 && u.uniform() < 0.2 ? -1 : std::int32_t(id));
                drawn_log_q.push_back(cast(lq[id])), log_mu.push_back(cast(std::max(std::min(lm[id], -1e-4), -8e3)));
                exact.push_back(u.uniform() < 0.3), weight.push_back(arithmetic_t<L>(u.uniform() / double(m)));
            }
        }
    }
    teacher::support<std::int32_t, L> support() const {
        return {view(ids.data(), rows, k), view(log_q.data(), rows, k), vector_view<const L>(log_tail)};
    }
    teacher::samples<std::int32_t, L> samples() const {
        return {view(drawn.data(), rows, m), view(log_mu.data(), rows, m), view(drawn_log_q.data(), rows, m)};
    }
    teacher::weighted<std::int32_t, L> weighted() const {
        return {view(slots.data(), rows, m), view(weight.data(), rows, m), view(log_mu.data(), rows, m),
                view(drawn_log_q.data(), rows, m), view(exact.data(), rows, m)};
    }

private:
    static L cast(double x) { return element<L>::store(static_cast<arithmetic_t<L>>(x)); }
    /// log softmax(x/T + noise N(0,1)); -inf stays.
    template <class T>
    static std::vector<double> log_softmax(const T* x, index_t n, double temperature, double noise, numbers& u) {
        double top = -1e300, sum = 0;
        std::vector<double> out;
        for (index_t v = 0; v < n; ++v) {
            const double s = double(element<T>::load(x[v]));
            out.push_back(detail::is_neg_inf(s) ? s : s / temperature + noise * u.normal());
            if (!detail::is_neg_inf(s)) top = std::max(top, out.back());
        }
        for (const double s : out) sum += detail::is_neg_inf(s) ? 0 : std::exp(s - top);
        for (double& s : out) // below -9000 is a placeholder
            s = detail::is_neg_inf(s) ? s : std::max(s - top - std::log(sum), -8e3);
        return out;
    }
};

} // namespace opd::test
