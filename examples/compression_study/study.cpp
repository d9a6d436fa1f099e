// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "study.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <future>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "gnuplot.hpp"
#include "losses.hpp"
#include "opd/opd.hpp"
#include "settings/files.hpp"

namespace compression_study {

namespace {

using floats = std::vector<float>;
constexpr double none = std::numeric_limits<double>::quiet_NaN();
constexpr float no_mass = -std::numeric_limits<float>::infinity();

std::size_t size(index_t rows, index_t columns) { return static_cast<std::size_t>(rows * columns); }

double log_sum_exp(std::span<const float> z) {
    const double top = double(*std::max_element(z.begin(), z.end()));
    double sum = 0;
    for (const float x : z) sum += std::exp(double(x) - top);
    return top + std::log(sum);
}

/// Of one row: true logits y, cached ones c; -infinity: no mass.
struct distances {
    double kl = 0, back = 0, squares = 0;
};
distances distances_of(std::span<const float> y, double lse_y, std::span<const float> c) {
    const double lse_c = log_sum_exp(c);
    distances d;
    double sum = 0, sum_of_squares = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
        const double log_p = double(y[i]) - lse_y, p = std::exp(log_p);
        if (c[i] == no_mass) {
            if (p > 0) d.kl = std::numeric_limits<double>::infinity();
            sum_of_squares = none;
            continue;
        }
        const double log_c = double(c[i]) - lse_c, wrong = double(c[i]) - double(y[i]);
        d.kl += p * (log_p - log_c);
        d.back += std::exp(log_c) * (log_c - log_p);
        sum += wrong, sum_of_squares += wrong * wrong;
    }
    const double v = double(y.size());
    d.squares = sum_of_squares / v - (sum / v) * (sum / v);
    return d;
}

class bench {
public:
    bench(const world& w, int threads, std::uint64_t seed)
        : w_(w), seed_(seed), backend_{.threads = threads}, true_(size(w.n, w.v)), true_gradient_(true_.size()),
          cached_(true_.size()), gradient_(true_.size()), lse_(size(w.n, 1)) {
        logits_of(states(), head(), true_);
        rows([&](index_t r) { lse_[size(r, 1)] = log_sum_exp(row(true_, r)); });
        out.student_kl =
            loss_of(opd::teacher::hidden{states(), head()}, opd::reverse_kl{}, true_gradient_) / double(w.n);
        for (const float g : true_gradient_) true_squares_ += double(g) * double(g);
        std::vector<double> entropies;
        for (index_t r = 0; r < w_.n; ++r) {
            double entropy = 0, top = 0;
            for (const float y : row(true_, r)) {
                const double log_p = double(y) - lse_[size(r, 1)];
                entropy -= std::exp(log_p) * log_p;
                top = std::max(top, std::exp(log_p));
            }
            entropies.push_back(entropy);
            out.mean_entropy += entropy / double(w_.n), out.top_mass += top / double(w_.n);
        }
        std::nth_element(entropies.begin(), entropies.begin() + w_.n / 2, entropies.end());
        out.median_entropy = entropies[static_cast<std::size_t>(w_.n / 2)];
    }

    void codes(const char* name, const opd::head_directions& directions) {
        const index_t most = std::min(w_.numbers.back(), w_.d);
        const opd::codec codec = opd::make_codec(backend_.team(), directions, head(), most);
        floats memory(size(w_.n, most));
        opd::encode(backend_.team(), codec, states(), opd::view(memory.data(), w_.n, most));
        for (const index_t r : w_.numbers) {
            if (r > most) continue;
            const auto codes = opd::view(std::as_const(memory).data(), w_.n, r, most);
            const opd::teacher::hidden teacher{codes, codec.decoder_view(r)};
            loss_of(teacher, opd::reverse_kl{}, gradient_);
            logits_of(teacher.x, teacher.w, cached_);
            add({.cache = name, .rank = r, .numbers = r, .with_ids = r});
        }
    }

    void top_k() {
        for (const index_t k : w_.numbers) {
            if (k >= w_.v) continue;
            std::vector<std::int32_t> ids(size(w_.n, k));
            floats log_q(ids.size()), log_tail(size(w_.n, 1));
            opd::top_k(backend_, opd::view(std::as_const(true_).data(), w_.n, w_.v), opd::view(ids.data(), w_.n, k),
                       opd::view(log_q.data(), w_.n, k));
            const auto support_row = [&](index_t r, auto&& f) {
                for (std::size_t j = size(r, k); j < size(r + 1, k); ++j) f(static_cast<std::size_t>(ids[j]), log_q[j]);
            };
            rows([&](index_t r) {
                const std::span<float> c = row(cached_, r);
                std::fill(c.begin(), c.end(), no_mass);
                support_row(r, [&](std::size_t id, float q) { c[id] = q; });
                double tail = 0;
                for (std::size_t i = 0; i < c.size(); ++i)
                    if (c[i] == no_mass) tail += std::exp(double(row(true_, r)[i]) - lse_[size(r, 1)]);
                log_tail[size(r, 1)] = static_cast<float>(std::log(tail));
            });
            const opd::teacher::support support{opd::view(std::as_const(ids).data(), w_.n, k),
                                                opd::view(std::as_const(log_q).data(), w_.n, k),
                                                opd::view(std::as_const(log_tail).data(), w_.n)};
            loss_of(support, opd::renormalised{opd::reverse_kl{}}, gradient_);
            add({.cache = "top k, renormalised", .rank = k, .numbers = k, .with_ids = 2 * k});
            rows([&](index_t r) {
                const auto even = static_cast<float>(double(log_tail[size(r, 1)]) - std::log(double(w_.v - k)));
                for (float& c : row(cached_, r))
                    if (c == no_mass) c = even;
            });
            loss_of(support, opd::tail_bucket{opd::reverse_kl{}}, gradient_);
            add({.cache = "top k and tail", .rank = k, .numbers = k + 1, .with_ids = 2 * k + 1});
        }
    }

    void threshold() {
        std::vector<std::uint64_t> samples(size(w_.n, 1));
        for (std::size_t r = 0; r < samples.size(); ++r) samples[r] = r;
        const std::vector<std::uint32_t> positions(samples.size());
        const opd::draw_keys<> keys{.seed = seed_, .sample = samples, .position = positions};
        for (const index_t budget : w_.numbers) {
            if (budget >= w_.v) continue;
            std::vector<std::int32_t> ids(size(w_.n, budget));
            floats log_mu(ids.size()), log_q(ids.size()), weight(ids.size());
            std::vector<std::uint8_t> exact(ids.size());
            const auto of = [&](auto& column) { return opd::view(column.data(), w_.n, budget); };
            const auto draw = [&](const floats& z) {
                opd::draw(backend_, opd::view(z.data(), w_.n, w_.v), opd::design::threshold{budget}, keys,
                          opd::drawn<>{of(ids), of(log_mu), of(weight), of(exact)});
            };
            draw(true_); // weights add up to one in the mean
            rows([&](index_t r) {
                const std::span<float> c = row(cached_, r);
                std::fill(c.begin(), c.end(), no_mass);
                for (std::size_t j = size(r, budget); j < size(r + 1, budget); ++j)
                    if (ids[j] >= 0) c[static_cast<std::size_t>(ids[j])] = std::log(weight[j]);
            });
            draw(w_.student);
            rows([&](index_t r) {
                for (std::size_t j = size(r, budget); j < size(r + 1, budget); ++j)
                    log_q[j] = ids[j] < 0 ? 0
                                          : static_cast<float>(double(row(true_, r)[static_cast<std::size_t>(ids[j])]) -
                                                               lse_[size(r, 1)]);
            });
            const auto read = [&](const auto& column) { return opd::view(column.data(), w_.n, budget); };
            loss_of(opd::teacher::weighted{read(std::as_const(ids)), read(std::as_const(weight)),
                                           read(std::as_const(log_mu)), read(std::as_const(log_q)),
                                           read(std::as_const(exact))},
                    opd::mc{opd::reverse_kl{}}, gradient_);
            add({.cache = "threshold", .rank = budget, .numbers = budget, .with_ids = 2 * budget});
        }
    }

    outcome out;

private:
    opd::matrix_view<const float> head() const { return opd::view(w_.head.data(), w_.v, w_.d); }
    opd::matrix_view<const float> states() const { return opd::view(w_.states.data(), w_.n, w_.d); }
    std::span<float> row(floats& of, index_t r) const { return {of.data() + r * w_.v, size(1, w_.v)}; }
    template <class Function>
    void rows(Function&& f) {
        backend_.team().run(w_.n, [&](index_t r, int) { f(r); });
    }
    void logits_of(opd::matrix_view<const float> x, opd::matrix_view<const float> w, floats& to) {
        const opd::team_executor all{backend_.team()};
        opd::product(all,
                     opd::product_nt(x.rows, w.rows, x.cols, x.data, x.stride, w.data, w.stride, to.data(), w.rows));
    }
    template <class Teacher, class Estimator>
    double loss_of(const Teacher& teacher, const Estimator& estimator, floats& gradient) {
        return compression_study::loss_of(backend_, w_, teacher, estimator, gradient);
    }
    /// Fills in what cached_ and gradient_ say.
    void add(figures f) {
        std::vector<distances> all(size(w_.n, 1));
        std::vector<double> wrong(all.size());
        rows([&](index_t r) {
            all[size(r, 1)] = distances_of(row(true_, r), lse_[size(r, 1)], row(cached_, r));
            const auto g = row(gradient_, r), t = row(true_gradient_, r);
            for (std::size_t i = 0; i < g.size(); ++i)
                wrong[size(r, 1)] += (double(g[i]) - double(t[i])) * (double(g[i]) - double(t[i]));
        });
        double squares = 0;
        for (std::size_t r = 0; r < all.size(); ++r) {
            f.kl += all[r].kl / double(w_.n), f.kl_back += all[r].back / double(w_.n);
            f.mse += all[r].squares / double(w_.n);
            squares += wrong[r];
        }
        f.gradient = std::sqrt(squares / true_squares_);
        out.caches.push_back(f);
    }

    const world& w_;
    std::uint64_t seed_;
    opd::cpu_backend backend_;
    floats true_, true_gradient_, cached_, gradient_; // (N,V)
    std::vector<double> lse_;                         // (N)
    double true_squares_ = 0;
};

std::string number(double x) {
    if (std::isnan(x)) return "-";
    if (std::isinf(x)) return "inf";
    return fmt::format("{:.3g}", x);
}

} // namespace

outcome study(const world& w, int threads, std::uint64_t seed) {
    const auto head = opd::view(w.head.data(), w.v, w.d);
    // The eigenvectors take one thread each, so the two decompositions run side by side.
    const auto alone = [&](auto&& f) {
        return std::async(threads > 1 ? std::launch::async : std::launch::deferred, [f] {
            opd::thread_team one(1);
            return f(one);
        });
    };
    auto first = alone([&](opd::thread_team& team) { return opd::truncated_svd(team, head); });
    auto second = alone([&](opd::thread_team& team) { return opd::reweighted_svd(team, head, w.seen); });
    const opd::head_directions truncated = first.get(), reweighted = second.get();
    bench b(w, threads, seed);
    b.codes("truncated SVD", truncated);
    b.codes("importance SVD", opd::importance_svd(truncated, w.seen));
    b.codes("reweighted SVD", reweighted);
    b.top_k();
    b.threshold();
    return b.out;
}

std::string table(const world& w, const outcome& o) {
    std::string t =
        fmt::format("## {}\n\n{} rows of student rollouts; calibration on {} others. The teacher's entropy there: "
                    "median {:.2g} nats, "
                    "mean {:.2g}; mean probability of its best token {:.2g}; KL(student, teacher) {:.3g}.\n\n",
                    w.title, w.n, w.seen.rows(), o.median_entropy, o.mean_entropy, o.top_mass, o.student_kl);
    t += "| cache | r, k or B | numbers a row | with ids | KL(true, cached) | KL(cached, true) | logit MSE | gradient "
         "error |\n"
         "|---|---|---|---|---|---|---|---|\n";
    for (const figures& f : o.caches)
        t += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} |\n", f.cache, f.rank, f.numbers, f.with_ids,
                         number(f.kl), number(f.kl_back), number(f.mse), number(f.gradient));
    return t;
}

std::string tsv(const outcome& o) {
    std::string t = "cache\trank\tnumbers\twith_ids\tkl_true_cached\tkl_cached_true\tlogit_mse\tgradient_error\n";
    for (const figures& f : o.caches)
        t += fmt::format("{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\n", f.cache, f.rank, f.numbers, f.with_ids, f.kl, f.kl_back,
                         f.mse, f.gradient);
    return t;
}

std::string plot(const std::string& directory, const world& w, const outcome& o) {
    struct curve {
        const char* cache;
        const char* title;
        bool with_ids;
        const char* style;
    };
    const std::vector<curve> curves{{"truncated SVD", "truncated SVD", false, "lc 1 pt 6"},
                                    {"importance SVD", "importance SVD", false, "lc 2 pt 8"},
                                    {"reweighted SVD", "reweighted SVD", false, "lc 4 pt 7"},
                                    {"top k and tail", "top k and tail, with ids", true, "lc 7 pt 5"},
                                    {"top k and tail", "top k and tail, without", false, "lc 7 pt 4 dt 2"},
                                    {"threshold", "threshold, with ids", true, "lc 8 pt 2"}};
    std::string script =
        fmt::format("set terminal svg size 1100,460 background rgb 'white'\nset output '{}.svg'\n", w.name);
    const auto panel = [&](const char* title, double figures::*what) {
        std::string data, plots;
        for (std::size_t i = 0; i < curves.size(); ++i) {
            std::string points;
            for (const figures& f : o.caches)
                if (f.cache == curves[i].cache && std::isfinite(f.*what) &&
                    f.*what > 1e-6) // full rank is exact, and far below the axis
                    points += fmt::format("{} {}\n", curves[i].with_ids ? f.with_ids : f.numbers, f.*what);
            if (points.empty()) continue;
            const std::string name = fmt::format("${}_{}", title[0], i);
            data += fmt::format("{} << EOD\n{}EOD\n", name, points);
            plots += fmt::format("{}{} using 1:2 with linespoints lw 2 {} title '{}'", plots.empty() ? "" : ", ", name,
                                 curves[i].style, curves[i].title);
        }
        return std::pair{data, fmt::format("set title '{}'\nplot {}\n", title, plots)};
    };
    const auto kl = panel("KL(true, cached), nats", &figures::kl);
    const auto gradient = panel("gradient error, reverse KL of the student", &figures::gradient);
    script +=
        kl.first + gradient.first +
        fmt::format("set multiplot layout 1,2 title \"{}\"\nset logscale xy\nset format y '%g'\nset grid\nset key "
                    "below\nset xlabel 'numbers a row'\n",
                    w.title) +
        kl.second + gradient.second + "unset multiplot\n";
    const std::string file = w.name + ".gnuplot";
    trainer::write_file(directory + "/" + file, script);
    return examples::run_gnuplot(directory, file);
}

} // namespace compression_study
