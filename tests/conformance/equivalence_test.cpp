// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// docs/equivalence: the losses of other systems against the expressions that the pages give for them. Their side is
// written from the published formula in plain loops over doubles, with its gradient in the logits by central
// differences that hold fixed what they detach; nothing of opd is in it. Each case ends by comparing its page's third
// column with the expressions that it ran, both ways.
//
// With OPD_EQUIVALENCE_OUT=path the last case writes inputs and results for scripts/crosscheck.py, which runs the
// systems themselves.
#include "support/drawn.hpp"
#include "support/policies.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iomanip>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "opd/opd.hpp"

using namespace opd;
using namespace opd::test;

namespace {

using vec = std::vector<double>;
constexpr double infinity = std::numeric_limits<double>::infinity();

// --- what was run ----------------------------------------------------------------------------------------------------

std::string page;                                       // of the case that runs
std::map<std::string, std::map<std::string, int>> runs; // page -> expression without spaces -> times

std::string squeezed(const std::string& text) {
    std::string out;
    for (const char c : text)
        if (c != ' ' && c != '\n') out += c;
    return out;
}
void mark(const std::string& text) { ++runs[page][squeezed(text)]; }

/// An expression and its text. Calling it counts it as run.
template <class E>
struct named {
    std::string text;
    E e;
    const E& operator()() const {
        mark(text);
        return e;
    }
};
template <class E>
named(std::string, E) -> named<E>;

#define EXPRESSION(...) (named{std::string(#__VA_ARGS__), __VA_ARGS__})
#define SETTING(...) (mark(#__VA_ARGS__), __VA_ARGS__)

// --- their side: plain numbers ---------------------------------------------------------------------------------------

vec log_softmax(const vec& z, double t = 1) {
    double top = -infinity, sum = 0;
    for (const double x : z) top = std::max(top, x / t);
    for (const double x : z) sum += std::exp(x / t - top);
    vec out;
    for (const double x : z) out.push_back(x / t - top - std::log(sum));
    return out;
}
double kl(const vec& log_a, const vec& log_b) {
    double s = 0;
    for (std::size_t v = 0; v < log_a.size(); ++v) s += std::exp(log_a[v]) * (log_a[v] - log_b[v]);
    return s;
}
/// b KL(T‖M) + (1-b) KL(S‖M), M = b T + (1-b) S; the ends are plain KLs.
double their_jsd(const vec& log_s, const vec& log_t, double b) {
    if (b == 0) return kl(log_t, log_s);
    if (b == 1) return kl(log_s, log_t);
    vec log_m;
    for (std::size_t v = 0; v < log_s.size(); ++v)
        log_m.push_back(std::log(b * std::exp(log_t[v]) + (1 - b) * std::exp(log_s[v])));
    return b * kl(log_t, log_m) + (1 - b) * kl(log_s, log_m);
}
double within(double x, double low, double high) { return std::min(std::max(x, low), high); }
/// PPO as a maximum of losses; the dual bound holds where A < 0.
double their_ppo(double r, double a, double low, double high, double dual = infinity) {
    const double loss = std::max(-r * a, -within(r, 1 - low, 1 + high) * a);
    return a < 0 ? std::min(loss, -dual * a) : loss;
}
double their_k1(double log_p, double log_q) { return log_p - log_q; }
double their_k2(double log_p, double log_q) { return (log_p - log_q) * (log_p - log_q) / 2; }
double their_k3(double log_p, double log_q) { return std::exp(log_q - log_p) - 1 - (log_q - log_p); }

/// dL/dz by four-point central differences.
vec slopes(const vec& z, const std::function<double(const vec&)>& loss) {
    const double h = 1e-4;
    vec out, moved = z;
    for (std::size_t i = 0; i < z.size(); ++i) {
        const auto at = [&](double by) {
            moved[i] = z[i] + by;
            return loss(moved);
        };
        out.push_back((at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h));
        moved[i] = z[i];
    }
    return out;
}

/// One prefix. log_p moves with the logits, `held` is what is detached of it.
struct place {
    vec log_p, held, log_q, log_mu, log_prox, outside;
    double ratio(std::size_t v) const { return std::exp(log_p[v] - log_mu[v]); }
    double held_ratio(std::size_t v) const { return std::exp(held[v] - log_mu[v]); }
    double a_theta(std::size_t v) const { return log_q[v] - held[v]; }
    double a_old(std::size_t v) const { return log_q[v] - log_mu[v]; }
};
place place_of(const vec& z, const vec& y, const vec& b, std::uint64_t seed) {
    place x{log_softmax(z), {}, log_softmax(y), log_softmax(b), {}, {}};
    vec between;
    for (std::size_t v = 0; v < z.size(); ++v) {
        between.push_back(0.4 * z[v] + 0.6 * b[v] + 0.3 * std::sin(double(v) + double(seed)));
        x.outside.push_back(0.8 * std::cos(3 * double(v) + double(seed)));
    }
    x.held = x.log_p, x.log_prox = log_softmax(between);
    return x;
}

bool close(double got, double want, double tolerance) {
    return std::abs(got - want) <= tolerance * std::max(1.0, std::abs(want));
}
double largest(const vec& x) {
    double m = 0;
    for (const double v : x) m = std::max(m, std::abs(v));
    return m;
}
bool close(const vec& got, const vec& want, double tolerance) {
    return got.size() == want.size() && distance(got, want) <= tolerance * std::max(1.0, largest(want));
}

// --- losses of drawn tokens, row by row ------------------------------------------------------------------------------

using token_loss = std::function<double(const place&, std::size_t)>;
struct how {
    bool stale = true;
    double age = 0;
    bool same_loss = true, same_gradient = true;
};
struct counts {
    int still = 0, moved = 0; ///< rows of one token by whether they have a gradient
};
constexpr index_t vocabulary_of_rows = 5;

/// Loss and gradient of one and of three draws, one of them twice, at every token of ten pairs of policies.
template <class E>
counts tokens(const named<E>& ours, const token_loss& theirs, how h = {}) {
    INFO(ours.text);
    counts out;
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        const policies w(vocabulary_of_rows, seed, h.stale);
        const place here = place_of(w.z, w.y, w.b, seed);
        for (std::int64_t id = 0; id < w.vocab; ++id)
            for (const auto& ids :
                 {std::vector<std::int64_t>{id}, std::vector<std::int64_t>{id, (id + 2) % w.vocab, id}}) {
                const auto loss = [&](const vec& z) {
                    place x = here;
                    x.log_p = log_softmax(z);
                    double s = 0;
                    for (const auto i : ids) s += theirs(x, std::size_t(i));
                    return s / double(ids.size());
                };
                const fill_in fill = [&](sampled_entry& x, entry_facts& facts) {
                    const auto v = std::size_t(x.id);
                    x.log_prox = here.log_prox[v], x.outside = here.outside[v], facts.age = h.age;
                };
                const drawn_mean got = drawn_row(w, law::stale, ids, ours(), fill);
                const vec want = slopes(w.z, loss);
                if (h.same_loss) CHECK(close(got.loss, loss(w.z), 1e-11));
                if (h.same_gradient) CHECK(close(got.dz, want, 1e-9));
                if (ids.size() == 1) ++(largest(want) < 1e-9 ? out.still : out.moved);
            }
    }
    return out;
}
template <class E>
void cut_tokens(const named<E>& ours, const token_loss& theirs, how h = {}) {
    const counts c = tokens(ours, theirs, h);
    CHECK(c.still > 0); // some are clipped, some are not
    CHECK(c.moved > 0);
}
/// The mean over mu of their gradient and of ours.
template <class E>
void in_the_mean(const named<E>& ours, const std::function<double(const place&)>& objective, bool stale) {
    INFO(ours.text);
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        const policies w(vocabulary_of_rows, seed, stale);
        const place here = place_of(w.z, w.y, w.b, seed);
        const vec want = slopes(w.z, [&](const vec& z) {
            place x = here;
            x.log_p = log_softmax(z);
            return objective(x);
        });
        CHECK(close(drawn_expectation(w, law::stale, 1, ours()).dz, want, 1e-9));
    }
}

// --- batches through a backend ---------------------------------------------------------------------------------------

struct batch {
    index_t rows, vocab;
    double t;
    std::uint64_t seed;
    vec z, y, b, dz;
    std::vector<std::int64_t> ids;        // (N,1) drawn
    vec log_mu, log_q, log_prox, outside; // (N,1) of the ids
    std::vector<std::int64_t> s_ids;      // (N,k) a support
    vec s_log_q, s_log_tail;
    index_t k = 0;

    explicit batch(std::uint64_t seed_, index_t rows_ = 5, index_t vocab_ = 6, double t_ = 1)
        : rows(rows_), vocab(vocab_), t(t_), seed(seed_), dz(std::size_t(rows_ * vocab_), 777.0) {
        numbers u(seed);
        for (index_t i = 0; i < rows * vocab; ++i) {
            z.push_back(1.5 * u.normal()), y.push_back(1.5 * u.normal());
            b.push_back(z.back() + 0.7 * u.normal());
        }
        for (index_t r = 0; r < rows; ++r) {
            ids.push_back(u.below(vocab));
            const place x = at(r, z);
            const auto v = std::size_t(ids.back());
            log_mu.push_back(x.log_mu[v]), log_q.push_back(x.log_q[v]);
            log_prox.push_back(x.log_prox[v]), outside.push_back(x.outside[v]);
        }
    }
    vec row(const vec& of, index_t r) const { return {of.begin() + r * vocab, of.begin() + (r + 1) * vocab}; }
    place at(index_t r, const vec& logits) const {
        place x = place_of(row(z, r), row(y, r), row(b, r), seed + std::uint64_t(r));
        x.log_p = log_softmax(row(logits, r), t), x.held = log_softmax(row(z, r), t);
        x.log_q = log_softmax(row(y, r), t);
        return x;
    }
    std::size_t id(index_t r) const { return std::size_t(ids[std::size_t(r)]); }
    vec log_p() const { // (N,1)
        vec out;
        for (index_t r = 0; r < rows; ++r) out.push_back(at(r, z).log_p[id(r)]);
        return out;
    }
    auto student() {
        return student::logits<double>{view(z.data(), rows, vocab), view(dz.data(), rows, vocab), float(t)};
    }
    auto teacher() const { return teacher::dense<double>{view(y.data(), rows, vocab), float(t)}; }
    /// `mu`: the column that is the behaviour policy's.
    auto drawn(const vec& mu) const {
        teacher::samples<std::int64_t, double> c{view(ids.data(), rows, index_t(1)), view(mu.data(), rows, index_t(1)),
                                                 view(log_q.data(), rows, index_t(1))};
        c.log_prox = view(log_prox.data(), rows, index_t(1)), c.advantage = view(outside.data(), rows, index_t(1));
        return c;
    }
    auto drawn() const { return drawn(log_mu); }
    /// The k best ids of the teacher, of the student, or of either; -1 fills up.
    enum class best_of { teacher, student, both };
    void choose(index_t of_each, best_of whose) {
        k = whose == best_of::both ? 2 * of_each : of_each;
        s_ids.clear(), s_log_q.clear(), s_log_tail.clear();
        for (index_t r = 0; r < rows; ++r) {
            const place x = at(r, z);
            std::vector<std::int64_t> chosen;
            const auto take = [&](const vec& by) {
                std::vector<std::int64_t> order(std::size_t(vocab), 0);
                std::iota(order.begin(), order.end(), 0);
                std::sort(order.begin(), order.end(),
                          [&](auto i, auto j) { return by[std::size_t(i)] > by[std::size_t(j)]; });
                for (index_t j = 0; j < of_each; ++j)
                    if (std::count(chosen.begin(), chosen.end(), order[std::size_t(j)]) == 0)
                        chosen.push_back(order[std::size_t(j)]);
            };
            if (whose != best_of::student) take(x.log_q);
            if (whose != best_of::teacher) take(x.log_p);
            double q = 0;
            for (const auto i : chosen) q += std::exp(x.log_q[std::size_t(i)]);
            for (index_t j = 0; j < k; ++j) {
                const bool used = j < index_t(chosen.size());
                s_ids.push_back(used ? chosen[std::size_t(j)] : -1);
                s_log_q.push_back(used ? x.log_q[std::size_t(s_ids.back())] : 0);
            }
            s_log_tail.push_back(std::log(1 - q));
        }
    }
    auto support() const {
        return teacher::support<std::int64_t, double>{view(s_ids.data(), rows, k), view(s_log_q.data(), rows, k),
                                                      s_log_tail};
    }
    /// log-probs of a row on its support
    vec on_support(index_t r, const vec& of) const {
        vec out;
        for (index_t j = 0; j < k; ++j)
            if (const auto i = s_ids[std::size_t(r * k + j)]; i >= 0) out.push_back(of[std::size_t(i)]);
        return out;
    }
};

/// Their loss of a batch from its rows, log p moving.
using batch_loss = std::function<double(const std::vector<place>&)>;
double mean(const std::vector<place>& rows, const std::function<double(const place&, index_t)>& loss) {
    double s = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) s += loss(rows[r], index_t(r));
    return s / double(rows.size());
}
double value_of(const batch& s, const vec& z, const batch_loss& theirs) {
    std::vector<place> rows;
    for (index_t r = 0; r < s.rows; ++r) rows.push_back(s.at(r, z));
    return theirs(rows);
}
/// `ours()` evaluates into s.dz and returns the loss.
void matches(batch& s, const batch_loss& theirs, const std::function<double()>& ours) {
    const double got = ours();
    CHECK(close(got, value_of(s, s.z, theirs), 1e-11));
    CHECK(close(s.dz, slopes(s.z, [&](const vec& z) { return value_of(s, z, theirs); }), 1e-9));
}

// --- pages -----------------------------------------------------------------------------------------------------------

namespace fs = std::filesystem;
const fs::path pages = fs::path(OPD_TEST_SOURCE_DIR) / "docs" / "equivalence";

std::vector<std::string> lines_of(const fs::path& file) {
    std::ifstream in(file);
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}
std::vector<std::string> cells(const std::string& line) {
    std::vector<std::string> out{""};
    for (std::size_t i = 1; i < line.size(); ++i)
        if (line[i] == '|')
            out.emplace_back();
        else
            out.back() += line[i];
    out.pop_back();
    return out;
}
std::vector<std::string> code_in(const std::string& cell) {
    std::vector<std::string> out;
    for (std::size_t begin = cell.find('`'); begin != std::string::npos;) {
        const std::size_t end = cell.find('`', begin + 1);
        out.push_back(squeezed(cell.substr(begin + 1, end - begin - 1)));
        begin = end == std::string::npos ? end : cell.find('`', end + 1);
    }
    return out;
}
/// The expressions of a page's third column are those that its case ran.
void check_page() {
    const fs::path file = pages / (page + ".md");
    REQUIRE(fs::exists(file));
    std::set<std::string> shown;
    int rows = 0;
    for (const std::string& line : lines_of(file)) {
        if (line.empty() || line[0] != '|' || line.rfind("|---", 0) == 0 || rows++ == 0) continue; // the head
        CAPTURE(line);
        const auto c = cells(line);
        REQUIRE(c.size() == 4);
        const auto code = code_in(c[2]);
        if (code.empty()) CHECK(squeezed(c[2]) == "none");
        for (const std::string& expression : code) {
            CHECK_MESSAGE(runs[page].count(expression) == 1, page, ".md shows what no check ran: ", expression);
            shown.insert(expression);
        }
    }
    CHECK(rows > 5);
    for (const auto& [expression, times] : runs[page])
        CHECK_MESSAGE(shown.count(expression) == 1, page, ".md does not show ", expression, ", run ", times, " times");
}

} // namespace

TEST_CASE("verl") {
    page = "verl";
    cpu_backend backend;
    // policy gradient: the loss at the current p, detached, is the negative advantage of PPO with a dual clip
    const auto clipped = EXPRESSION(mc{reverse_kl{}, ppo_clip{.dual = 3}});
    cut_tokens(clipped, [](const place& x, std::size_t v) {
        return their_ppo(x.ratio(v), -their_k1(x.held[v], x.log_q[v]), .2, .2, 3);
    });
    cut_tokens(EXPRESSION(mc{advantage::reward<k3>{}, ppo_clip{.dual = 3}}), [](const place& x, std::size_t v) {
        return their_ppo(x.ratio(v), -their_k3(x.held[v], x.log_q[v]), .2, .2, 3);
    });
    // the dual clip is seen: without it the numbers differ somewhere
    int apart = 0;
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        const policies w(vocabulary_of_rows, seed, true);
        for (std::int64_t v = 0; v < w.vocab; ++v)
            apart += distance(drawn_row(w, law::stale, {v}, clipped()).dz,
                              drawn_row(w, law::stale, {v}, mc{reverse_kl{}, ppo_clip{}}).dz) > 1e-3;
    }
    CHECK(apart > 0);
    // loss_max_clamp with the policy gradient: a clip of the advantage
    const double c = 0.5;
    cut_tokens(EXPRESSION(mc{shape::clipped{c}, ppo_clip{.dual = 3}}), [&](const place& x, std::size_t v) {
        return their_ppo(x.ratio(v), -within(their_k1(x.held[v], x.log_q[v]), -c, c), .2, .2, 3);
    });
    // no policy gradient: the forms themselves on rollout tokens, without a ratio
    const auto direct_k3 = EXPRESSION(mc{reverse_kl{}, differentiated<k3>{}, baseline::none{}});
    const auto direct_k2 = EXPRESSION(mc{reverse_kl{}, differentiated<k2>{}, baseline::none{}});
    const auto k3_of = [](const place& x, std::size_t v) { return their_k3(x.log_p[v], x.log_q[v]); };
    const auto k2_of = [](const place& x, std::size_t v) { return their_k2(x.log_p[v], x.log_q[v]); };
    tokens(direct_k3, k3_of);
    tokens(direct_k2, k2_of);
    in_the_mean(
        direct_k3, [](const place& x) { return kl(x.log_q, x.log_p); }, false);
    in_the_mean(
        direct_k2, [](const place& x) { return kl(x.log_p, x.log_q); }, false);
    // k3+: the value of k3, the gradient of k2
    const auto k3_plus = [](const place& x, std::size_t v) {
        return their_k3(x.held[v], x.log_q[v]) + their_k2(x.log_p[v], x.log_q[v]) - their_k2(x.held[v], x.log_q[v]);
    };
    tokens(direct_k2, k3_plus, {.same_loss = false});
    tokens(direct_k3, k3_plus, {.same_gradient = false});
    // k1 without the policy gradient is refused by both
    static_assert(traits_of<mc<reverse_kl, differentiated<k1>, baseline::none>>(law::on_policy).descends ==
                  descent::none);

    int negative = 0, positive = 0;
    for (const std::uint64_t seed : {1, 2, 3, 4}) {
        batch s(seed, 12);
        const index_t N = s.rows;
        { // loss_max_clamp without the policy gradient
            opd::env env;
            SETTING(env.loss_clamp = c);
            matches(
                s,
                [&](const auto& rows) {
                    return mean(rows, [&](const place& x, index_t r) { return within(k3_of(x, s.id(r)), -c, c); });
                },
                [&] {
                    const auto r = evaluate(backend, s.student(), teacher::on_policy{s.drawn()}, direct_k3(), env);
                    CHECK(r.diagnostics.clamped_rows > 0);
                    CHECK(r.diagnostics.clamped_rows < s.rows);
                    return r.loss;
                });
        }
        // forward_kl_topk: the sum over the teacher's best, then at least 0
        s.choose(2, batch::best_of::teacher);
        const auto topk = EXPRESSION(truncated_biased{forward_kl{}});
        const auto raw = [&](const place& x, index_t r) {
            return kl(s.on_support(r, x.log_q), s.on_support(r, x.log_p));
        };
        matches(
            s, [&](const auto& rows) { return mean(rows, raw); },
            [&] { return evaluate(backend, s.student(), s.support(), topk()).loss; });
        for (index_t r = 0; r < s.rows; ++r) // where negative, theirs is 0 and has no gradient
            ++(raw(s.at(r, s.z), r) < 0 ? negative : positive);
        // rollout correction: mu is the recomputed old policy, the rollout's is in a weight
        const std::vector<std::int64_t> offsets{0, 5, 12};
        const auto over_sequence = [&](index_t r, const vec& of) {
            double sum = 0;
            const std::size_t begin = r < 5 ? 0 : 5, end = r < 5 ? 5 : 12;
            for (std::size_t i = begin; i < end; ++i) sum += of[i];
            return std::pair{sum, sum / double(end - begin)};
        };
        vec log_c; // log pi_old/pi_rollout
        for (std::size_t r = 0; r < 12; ++r) log_c.push_back(s.log_prox[r] - s.log_mu[r]);
        const auto icepop = [](double w) { return w < 0.5 || w > 5 ? 0 : w; };
        for (const int mode : {0, 1, 2}) {
            vec weight;
            for (index_t r = 0; r < s.rows; ++r) {
                const double w = std::exp(log_c[std::size_t(r)]);
                weight.push_back(mode == 0   ? std::min(w, 2.0)
                                 : mode == 1 ? icepop(w)
                                             : std::min(std::exp(over_sequence(r, log_c).first), 2.0));
            }
            opd::env env;
            SETTING(env.frozen.weight = view(weight.data(), N, 1));
            matches(
                s,
                [&](const auto& rows) {
                    return mean(rows, [&](const place& x, index_t r) {
                        const auto v = s.id(r);
                        return weight[std::size_t(r)] * their_ppo(std::exp(x.log_p[v] - x.log_prox[v]),
                                                                  -their_k1(x.held[v], x.log_q[v]), .2, .2, 3);
                    });
                },
                [&] { return evaluate(backend, s.student(), s.drawn(s.log_prox), clipped(), env).loss; });
        }
        // rejection: seq_mean_k3 above a bound leaves the mask, and so the denominator
        vec k3s;
        for (const double l : log_c) k3s.push_back(std::exp(l) - 1 - l);
        const double bound = (over_sequence(0, k3s).second + over_sequence(5, k3s).second) / 2; // one goes
        std::vector<std::uint8_t> mask;
        for (index_t r = 0; r < s.rows; ++r) mask.push_back(over_sequence(r, k3s).second <= bound);
        const auto kept = std::count(mask.begin(), mask.end(), 1);
        CHECK((kept == 5 || kept == 7));
        {
            opd::env env;
            SETTING(env.mask = mask);
            matches(
                s,
                [&](const auto& rows) {
                    double sum = 0;
                    for (index_t r = 0; r < s.rows; ++r)
                        if (const auto v = s.id(r); mask[std::size_t(r)])
                            sum += their_ppo(rows[std::size_t(r)].ratio(v),
                                             -their_k1(rows[std::size_t(r)].held[v], rows[std::size_t(r)].log_q[v]), .2,
                                             .2, 3);
                    return sum / double(kept);
                },
                [&] {
                    std::fill(s.dz.begin(), s.dz.end(), 0.0);
                    return evaluate(backend, s.student(), s.drawn(), clipped(), env).loss;
                });
        }
        // reductions
        const auto token = [&](const std::vector<place>& rows, index_t r) {
            const auto v = s.id(r);
            const place& x = rows[std::size_t(r)];
            return their_ppo(x.ratio(v), -their_k1(x.held[v], x.log_q[v]), .2, .2, 3);
        };
        const auto sum_of = [&](const std::vector<place>& rows, index_t begin, index_t end) {
            double sum = 0;
            for (index_t r = begin; r < end; ++r) sum += token(rows, r);
            return sum;
        };
        const auto reduced = [&](reduce by, const batch_loss& theirs) {
            matches(s, theirs, [&] {
                return evaluate(backend, s.student(), s.drawn(), clipped(), {.reduction = by, .offsets = offsets}).loss;
            });
        };
        reduced(SETTING(reduce::token_mean), [&](const auto& rows) { return sum_of(rows, 0, 12) / 12; });
        reduced(SETTING(reduce::sum), [&](const auto& rows) { return sum_of(rows, 0, 12); });
        reduced(SETTING(reduce::sequence_sum_mean),
                [&](const auto& rows) { return (sum_of(rows, 0, 5) + sum_of(rows, 5, 12)) / 2; });
        reduced(SETTING(reduce::sequence_mean),
                [&](const auto& rows) { return (sum_of(rows, 0, 5) / 5 + sum_of(rows, 5, 12) / 7) / 2; });
        // GSPO: the sequence's ratio as value, each token's own gradient through it
        const double low = 0.05, high = 0.05;
        const auto sequence_ratio = EXPRESSION(mc{reverse_kl{}, gspo{.low = low, .high = high}});
        const std::vector<index_t> sequence{0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1};
        vec log_r;
        for (index_t r = 0; r < s.rows; ++r) log_r.push_back(s.at(r, s.z).held[s.id(r)] - s.log_mu[std::size_t(r)]);
        matches(
            s,
            [&](const auto& rows) {
                double sum = 0;
                for (index_t r = 0; r < s.rows; ++r) {
                    const place& x = rows[std::size_t(r)];
                    const auto v = s.id(r);
                    const double ratio = std::exp(over_sequence(r, log_r).second + x.log_p[v] - x.held[v]);
                    sum += their_ppo(ratio, -their_k1(x.held[v], x.log_q[v]), low, high) / (r < 5 ? 5 : 7);
                }
                return sum / 2;
            },
            [&] {
                const vec table = s.log_p();
                gspo_fit fit;
                fit.add(view(table.data(), s.rows, 1), s.drawn(), sequence);
                vec log_s(std::size_t(s.rows), 0.0);
                fit.log_ratios(sequence, log_s);
                opd::env env;
                env.reduction = reduce::sequence_mean, env.offsets = offsets;
                SETTING(env.frozen.sequence_log_ratio = log_s);
                return evaluate(backend, s.student(), s.drawn(), sequence_ratio(), env).loss;
            });
    }
    CHECK(negative > 0);
    CHECK(positive > 0);
    // CISPO, bounds on both sides
    tokens(EXPRESSION(mc{reverse_kl{}, cispo{.low = 0.2, .high = 0.2}}), [](const place& x, std::size_t v) {
        return within(x.held_ratio(v), 0.8, 1.2) * their_k1(x.held[v], x.log_q[v]) * x.log_p[v];
    });
    check_page();
}

namespace {

/// Generalised JSD with both weights b, on the vocabulary and at a temperature.
template <class E>
void dense(const named<E>& ours, double t, const std::function<double(const place&)>& theirs) {
    INFO(ours.text);
    cpu_backend backend;
    for (const std::uint64_t seed : {1, 2, 3}) {
        batch s(seed, 4, 7, t);
        matches(
            s, [&](const auto& rows) { return mean(rows, [&](const place& x, index_t) { return theirs(x); }); },
            [&] { return evaluate(backend, s.student(), s.teacher(), ours()).loss; });
    }
}
template <class E>
void on_support(const named<E>& ours, batch::best_of whose, bool tail,
                const std::function<double(const vec&, const vec&)>& theirs) {
    INFO(ours.text);
    cpu_backend backend;
    for (const std::uint64_t seed : {1, 2, 3}) {
        batch s(seed, 4, 9);
        s.choose(2, whose);
        const auto reduced = [&](index_t r, const vec& log_of) {
            vec x = s.on_support(r, log_of);
            double mass = 0;
            for (const double l : x) mass += std::exp(l);
            if (tail)
                x.push_back(std::log(-std::expm1(std::min(std::log(mass), -1e-7))));
            else
                for (double& l : x) l -= std::log(mass);
            return x;
        };
        matches(
            s,
            [&](const auto& rows) {
                return mean(
                    rows, [&](const place& x, index_t r) { return theirs(reduced(r, x.log_p), reduced(r, x.log_q)); });
            },
            [&] { return evaluate(backend, s.student(), s.support(), ours()).loss; });
    }
}
const auto policy_loss = [](double dual) {
    return [dual](const place& x, std::size_t v) { return their_ppo(x.ratio(v), x.outside[v], .2, .2, dual); };
};

} // namespace

TEST_CASE("trl") {
    page = "trl";
    cpu_backend backend;
    for (const double t : {1.0, 0.75}) {
        for (const double b : {0.1, 0.5, 0.9})
            dense(EXPRESSION(jsd{.w = b, .o = b}), t, [&](const place& x) { return their_jsd(x.log_p, x.log_q, b); });
        dense(EXPRESSION(forward_kl{}), t, [](const place& x) { return their_jsd(x.log_p, x.log_q, 0); });
        dense(EXPRESSION(reverse_kl{}), t, [](const place& x) { return their_jsd(x.log_p, x.log_q, 1); });
    }
    { // the pinned example of their tests: (.1, .9) against (.9, .1), both directions .8 ln 9
        const vec a{std::log(.1), std::log(.9)}, b{std::log(.9), std::log(.1)};
        CHECK(close(their_jsd(a, b, 0), 1.7577797, 1e-7));
    }
    // small b is near neither end: the jump
    CHECK(their_jsd(log_softmax({0, 1, 2}), log_softmax({2, 0, 1}), 1e-6) < 1e-5);
    for (const double b : {0.3, 0.5}) {
        const auto jsd_of = [&](const vec& log_s, const vec& log_t) { return their_jsd(log_s, log_t, b); };
        on_support(EXPRESSION(renormalised{jsd{.w = b, .o = b}}), batch::best_of::both, false, jsd_of);
        on_support(EXPRESSION(tail_bucket{jsd{.w = b, .o = b}}), batch::best_of::both, true, jsd_of);
    }
    on_support(EXPRESSION(tail_bucket{forward_kl{}}), batch::best_of::teacher, true,
               [](const vec& log_s, const vec& log_t) { return kl(log_t, log_s); });
    on_support(EXPRESSION(tail_bucket{reverse_kl{}}), batch::best_of::student, true,
               [](const vec& log_s, const vec& log_t) { return kl(log_s, log_t); });
    // IW-OPD: prefix weights of each sequence, A_old, no ratio
    const auto prefix_weights = [](const vec& a, double g) {
        double all = 0, before = 0;
        for (const double x : a) all += std::abs(x);
        vec w;
        for (const double x : a) {
            w.push_back(1 + g * (1 - before / std::max(all, 1e-8)));
            before += std::abs(x);
        }
        return w;
    };
    CHECK(close(prefix_weights({.2, -.3, .5}, .5), {1.5, 1.4, 1.25}, 1e-14));
    CHECK(close(prefix_weights({.4}, .5), {1.5}, 1e-14));
    const auto scored = EXPRESSION(accept_bias{mc{advantage::old{}, score_function{}}});
    for (const std::uint64_t seed : {1, 2, 3}) {
        batch s(seed, 7);
        vec weights;
        for (const auto& [begin, end] : {std::pair{0, 3}, std::pair{3, 7}}) {
            vec a;
            for (int r = begin; r < end; ++r) a.push_back(s.log_q[std::size_t(r)] - s.log_mu[std::size_t(r)]);
            for (const double w : prefix_weights(a, .5)) weights.push_back(w);
        }
        opd::env env;
        SETTING(env.weights = weights);
        matches(
            s,
            [&](const auto& rows) {
                return mean(rows, [&](const place& x, index_t r) {
                    const auto v = s.id(r);
                    return -x.log_p[v] * weights[std::size_t(r)] * x.a_old(v);
                });
            },
            [&] { return evaluate(backend, s.student(), s.drawn(), scored(), env).loss; });
    }
    // GRPO's policy loss with delta, and CISPO with its raw bound
    cut_tokens(EXPRESSION(mc{advantage::outside{}, ppo_clip{.dual = 3}}), [](const place& x, std::size_t v) {
        const double r = x.ratio(v), a = x.outside[v]; // delta: the unclipped ratio is at most 3
        return -std::min(std::min(r, 3.0) * a, within(r, .8, 1.2) * a);
    });
    for (const double epsilon_high : {5.0, 1.1, 0.2})
        tokens(EXPRESSION(mc{advantage::outside{}, truncated_is{.cap = epsilon_high}}),
               [&](const place& x, std::size_t v) {
                   return -std::min(x.held_ratio(v), epsilon_high) * x.outside[v] * x.log_p[v];
               });
    // r k3 with the gradient through r: the gradient of r k1 held, and the same mean
    const auto best = EXPRESSION(mc{reverse_kl{}});
    const auto corrected = [](const place& x, std::size_t v) { return x.ratio(v) * their_k3(x.log_p[v], x.log_q[v]); };
    tokens(best, corrected, {.same_loss = false});
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        const policies w(vocabulary_of_rows, seed, true);
        const place x = place_of(w.z, w.y, w.b, seed);
        double want = 0;
        for (std::size_t v = 0; v < w.z.size(); ++v) want += std::exp(x.log_mu[v]) * corrected(x, v);
        CHECK(close(drawn_expectation(w, law::stale, 1, best()).loss, want, 1e-11));
    }
    // correction for the sampler: a weight beside the policy loss
    const auto grpo = EXPRESSION(mc{advantage::outside{}, ppo_clip{}});
    for (const std::uint64_t seed : {1, 2, 3}) {
        batch s(seed, 9);
        const index_t N = s.rows;
        for (const bool sequence_mask : {false, true}) {
            double sum = 0;
            for (std::size_t r = 0; r < 9; ++r) sum += s.log_prox[r] - s.log_mu[r];
            const double of_sequence = std::exp(sum);
            vec weight;
            for (std::size_t r = 0; r < 9; ++r)
                weight.push_back(sequence_mask ? (of_sequence > 3 ? 0 : of_sequence)
                                               : std::min(std::exp(s.log_prox[r] - s.log_mu[r]), 3.0));
            opd::env env;
            SETTING(env.frozen.weight = view(weight.data(), N, 1));
            matches(
                s,
                [&](const auto& rows) {
                    return mean(rows, [&](const place& x, index_t r) {
                        const auto v = s.id(r);
                        return weight[std::size_t(r)] *
                               their_ppo(std::exp(x.log_p[v] - x.log_prox[v]), s.outside[std::size_t(r)], .2, .2);
                    });
                },
                [&] { return evaluate(backend, s.student(), s.drawn(s.log_prox), grpo(), env).loss; });
        }
    }
    check_page();
}

TEST_CASE("liger") {
    page = "liger";
    cpu_backend backend;
    for (const double b : {0.1, 0.5, 0.9})
        dense(EXPRESSION(jsd{.w = b, .o = b}), 1, [&](const place& x) { return their_jsd(x.log_p, x.log_q, b); });
    dense(EXPRESSION(forward_kl{}), 1, [](const place& x) { return kl(x.log_q, x.log_p); });
    dense(EXPRESSION(reverse_kl{}), 1, [](const place& x) { return kl(x.log_p, x.log_q); });
    const auto tvd = EXPRESSION(total_variation{});
    const auto their_tvd = [](const place& x) {
        double s = 0;
        for (std::size_t v = 0; v < x.log_p.size(); ++v) s += std::abs(std::exp(x.log_p[v]) - std::exp(x.log_q[v])) / 2;
        return s;
    };
    dense(tvd, 1, their_tvd);
    { // where p = q their slope is -1/2, ours 0
        const vec z{0, 1, -1}, y{0, -1, 1};
        vec dz(3, 0.0);
        evaluate(backend, student::logits<double>{view(z.data(), 1, 3), view(dz.data(), 1, 3)},
                 teacher::dense<double>{view(y.data(), 1, 3)}, tvd());
        const vec log_p = log_softmax(z);
        const auto pulled = [&](const vec& slope) {
            double sum = 0;
            for (std::size_t v = 0; v < 3; ++v) sum += std::exp(log_p[v]) * slope[v];
            vec g;
            for (std::size_t v = 0; v < 3; ++v) g.push_back(std::exp(log_p[v]) * (slope[v] - sum));
            return g;
        };
        CHECK(close(dz, pulled({0, .5, -.5}), 1e-12));
        CHECK(distance(dz, pulled({-.5, .5, -.5})) > 1e-2);
    }
    // a bare chunked call: half the cross-entropy of the labels beside half the JSD
    const auto half_jsd = EXPRESSION(jsd{});
    const auto labels_only = EXPRESSION(sampled_forward_kl{});
    for (const std::uint64_t seed : {1, 2, 3}) {
        batch s(seed);
        const vec half(std::size_t(s.rows), 0.5), certain(std::size_t(s.rows), 0.0);
        matches(
            s,
            [&](const auto& rows) {
                return mean(rows, [&](const place& x, index_t r) {
                    return -0.5 * x.log_p[s.id(r)] + 0.5 * their_jsd(x.log_p, x.log_q, .5);
                });
            },
            [&] {
                opd::env env;
                SETTING(env.weights = half);
                const double soft = evaluate(backend, s.student(), s.teacher(), half_jsd(), env).loss;
                SETTING(env.beta = 1);
                teacher::samples<std::int64_t, double> labels{
                    view(s.ids.data(), s.rows, 1), view(certain.data(), s.rows, 1), view(certain.data(), s.rows, 1)};
                return soft + evaluate(backend, s.student(), teacher::of_teacher{labels}, labels_only(), env).loss;
            });
        // ignored rows leave sum and count; with all of them ignored nothing is left
        const index_t n = s.rows;
        for (const bool all : {false, true}) {
            const std::vector<std::int32_t> labels{-100, all ? -100 : 3, -100, all ? -100 : 0, -100};
            opd::env env;
            SETTING(env.mask = row_mask<>::ignoring(view(labels.data(), n), -100));
            matches(
                s,
                [&](const auto& rows) {
                    double sum = 0, count = 0;
                    for (std::size_t r = 0; r < labels.size(); ++r)
                        if (labels[r] != -100) sum += their_jsd(rows[r].log_p, rows[r].log_q, .5), ++count;
                    return count > 0 ? sum / count : 0;
                },
                [&] {
                    std::fill(s.dz.begin(), s.dz.end(), 0.0);
                    return evaluate(backend, s.student(), s.teacher(), half_jsd(), env).loss;
                });
        }
        // a wider teacher: they give the student logits 0 there, opd takes the common ids
        opd::env env;
        SETTING(env.vocab = vocabulary::drop_and_renormalise);
        vec narrow;
        for (index_t r = 0; r < n; ++r) {
            const vec row = s.row(s.z, r);
            narrow.insert(narrow.end(), row.begin(), row.end() - 2);
        }
        const double got = evaluate(backend, student::logits<double>{view(narrow.data(), n, s.vocab - 2)}, s.teacher(),
                                    half_jsd(), env)
                               .loss;
        double common = 0, padded = 0;
        for (index_t r = 0; r < n; ++r) {
            vec z = s.row(s.z, r), y = s.row(s.y, r);
            z[std::size_t(s.vocab) - 1] = z[std::size_t(s.vocab) - 2] = 0;
            padded += their_jsd(log_softmax(z), log_softmax(y), .5) / double(n);
            z.resize(z.size() - 2), y.resize(y.size() - 2);
            common += their_jsd(log_softmax(z), log_softmax(y), .5) / double(n);
        }
        CHECK(close(got, common, 1e-11));
        CHECK(std::abs(common - padded) > 1e-3);
    }
    cut_tokens(EXPRESSION(mc{advantage::outside{}, ppo_clip{.dual = 3}}), policy_loss(3));
    for (const double epsilon_high : {5.0, 1.1, 0.2})
        tokens(EXPRESSION(mc{advantage::outside{}, truncated_is{.cap = epsilon_high}}),
               [&](const place& x, std::size_t v) {
                   return -std::min(x.held_ratio(v), epsilon_high) * x.outside[v] * x.log_p[v];
               });
    check_page();
}

TEST_CASE("async-opd") {
    page = "async-opd";
    cpu_backend backend;
    const auto forward = EXPRESSION(forward_kl{});
    const auto reverse = EXPRESSION(reverse_kl{});
    dense(forward, 1, [](const place& x) { return kl(x.log_q, x.log_p); });
    dense(reverse, 1, [](const place& x) { return kl(x.log_p, x.log_q); });
    for (const std::uint64_t seed : {1, 2, 3}) {
        batch s(seed, 12);
        { // "skewed_kl": a sum of both directions, by two calls
            const double a = 0.3;
            const vec weights_a(std::size_t(s.rows), a), weights_b(std::size_t(s.rows), 1 - a);
            matches(
                s,
                [&](const auto& rows) {
                    return mean(rows, [&](const place& x, index_t) {
                        return a * kl(x.log_q, x.log_p) + (1 - a) * kl(x.log_p, x.log_q);
                    });
                },
                [&] {
                    opd::env env;
                    env.weights = weights_a;
                    const double one = evaluate(backend, s.student(), s.teacher(), forward(), env).loss;
                    env.weights = weights_b;
                    SETTING(env.beta = 1);
                    return one + evaluate(backend, s.student(), s.teacher(), reverse(), env).loss;
                });
        }
        // sums over a support with the vocabulary's probabilities
        s.choose(2, batch::best_of::teacher);
        const auto teachers = EXPRESSION(truncated_biased{forward_kl{}});
        matches(
            s,
            [&](const auto& rows) {
                return mean(rows, [&](const place& x, index_t r) {
                    return kl(s.on_support(r, x.log_q), s.on_support(r, x.log_p));
                });
            },
            [&] { return evaluate(backend, s.student(), s.support(), teachers()).loss; });
        s.choose(2, batch::best_of::student);
        const auto students = EXPRESSION(truncated_biased{reverse_kl{}});
        matches(
            s,
            [&](const auto& rows) {
                return mean(rows, [&](const place& x, index_t r) {
                    return kl(s.on_support(r, x.log_p), s.on_support(r, x.log_q));
                });
            },
            [&] { return evaluate(backend, s.student(), s.support(), students()).loss; });
        // token_clip bounds each term from above alone, so that the sum can be negative
        double sum = 0;
        const place x = s.at(0, s.z);
        for (std::size_t v = 0; v < x.log_p.size(); ++v)
            sum += std::min(std::exp(x.log_p[v]) * (x.log_p[v] - x.log_q[v]), 0.01);
        CHECK(sum < 0);
        CHECK(kl(x.log_p, x.log_q) > 0);
        // token_level_kl at the rollout token: q log(q/p), without 1/mu
        const auto covered = EXPRESSION(sampled_forward_kl{});
        vec weights;
        for (const double l : s.log_mu) weights.push_back(std::exp(l));
        opd::env env;
        SETTING(env.weights = weights);
        matches(
            s,
            [&](const auto& rows) {
                return mean(rows, [&](const place& at, index_t r) {
                    const auto v = s.id(r);
                    return std::exp(at.log_q[v]) * (at.log_q[v] - at.log_p[v]);
                });
            },
            [&] { return evaluate(backend, s.student(), s.drawn(), covered(), env).loss; });
    }
    // rollout-time advantage, PPO clip .2
    cut_tokens(EXPRESSION(accept_bias{mc{advantage::old{}, ppo_clip{}}}),
               [](const place& x, std::size_t v) { return their_ppo(x.ratio(v), x.a_old(v), .2, .2); });
    // several draws, current advantage, no clip
    const auto best = EXPRESSION(mc{reverse_kl{}});
    tokens(best, [](const place& x, std::size_t v) { return -x.ratio(v) * x.a_theta(v); });
    in_the_mean(
        best, [](const place& x) { return kl(x.log_p, x.log_q); }, true);
    // decoupled: a weight above 5 is zero
    double cap = 1.5; // low enough that tokens are masked
    cut_tokens(EXPRESSION(accept_bias{mc{advantage::old{}, decoupled_ppo{.cap = cap, .over = over_cap::mask}}}),
               [&](const place& x, std::size_t v) {
                   const double w = std::exp(x.log_prox[v] - x.log_mu[v]);
                   return w <= cap ? w * their_ppo(std::exp(x.log_p[v] - x.log_prox[v]), x.a_old(v), .2, .2) : 0.0;
               });
    // M2PO: the largest observed value below the level against the level itself
    int bound = 0;
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        const batch s(seed, 16);
        const double tau = 0.04;
        const vec log_p = s.log_p();
        vec squares;
        for (std::size_t r = 0; r < 16; ++r) {
            const double d = log_p[r] - s.log_mu[r], a = s.log_q[r] - log_p[r];
            if ((a > 0 && d > 0) || (a < 0 && d < 0)) squares.push_back(d * d);
        }
        std::sort(squares.begin(), squares.end());
        const double budget = tau * double(squares.size());
        double before = 0, theirs = infinity;
        for (std::size_t i = 0; i < squares.size(); ++i) {
            before += squares[i];
            if (squares[i] * double(squares.size() - i - 1) + before >= budget) {
                theirs = i > 0 ? squares[i - 1] : 0;
                break;
            }
        }
        m2po_fit fit = EXPRESSION(m2po_fit{.tau = tau, .form = m2po::clip})();
        fit.add(view(log_p.data(), s.rows, 1), s.drawn());
        const double level = fit.freeze().level;
        CHECK(std::isfinite(level) == std::isfinite(theirs));
        if (!std::isfinite(level)) continue;
        ++bound;
        double filled = 0;
        for (const double v : squares) filled += std::min(v, level);
        CHECK(close(filled, budget, 1e-12)); // the budget is used up
        CHECK(theirs <= level);
        CHECK(std::count_if(squares.begin(), squares.end(), [&](double v) { return v > theirs && v < level; }) == 0);
    }
    CHECK(bound > 0);
    check_page();
}

TEST_CASE("areal") {
    page = "areal";
    cpu_backend backend;
    // pure distillation
    const auto best = EXPRESSION(mc{reverse_kl{}});
    for (const std::uint64_t seed : {1, 2, 3}) {
        batch s(seed, 9);
        const vec weights(std::size_t(s.rows), 0.005);
        opd::env env;
        SETTING(env.weights = weights);
        matches(
            s,
            [&](const auto& rows) {
                return mean(rows, [&](const place& x, index_t r) {
                    const auto v = s.id(r);
                    const double w = std::exp(x.log_prox[v] - x.log_mu[v]), u = std::exp(x.log_p[v] - x.log_prox[v]);
                    return -0.005 * w * u * (x.log_q[v] - x.held[v]);
                });
            },
            [&] { return evaluate(backend, s.student(), s.drawn(), best(), env).loss; });
    }
    // with a task reward: log p - log q itself, which descends nothing on the student's own tokens
    const auto state_only = EXPRESSION(mc{reverse_kl{}, differentiated<k1>{}, baseline::none{}});
    tokens(state_only, [](const place& x, std::size_t v) { return x.log_p[v] - x.log_q[v]; });
    in_the_mean(
        state_only, [](const place&) { return 0.0; }, false);
    static_assert(traits_of<mc<reverse_kl, differentiated<k1>, baseline::none>>(law::on_policy).descends ==
                  descent::none);
    // decoupled PPO: no cap, masked above it, clamped to it
    const auto decoupled = [](double cap, bool mask) {
        return [cap, mask](const place& x, std::size_t v) {
            double w = std::exp(x.log_prox[v] - x.log_mu[v]);
            if (w > cap) w = mask ? 0 : cap;
            return w * their_ppo(std::exp(x.log_p[v] - x.log_prox[v]), x.outside[v], .2, .2);
        };
    };
    const double cap = 1.5; // low enough that the tokens reach it
    const auto plain = EXPRESSION(mc{advantage::outside{}, decoupled_ppo{}});
    cut_tokens(plain, decoupled(infinity, false));
    cut_tokens(EXPRESSION(mc{advantage::outside{}, decoupled_ppo{.cap = cap, .over = over_cap::mask}}),
               decoupled(cap, true));
    cut_tokens(EXPRESSION(mc{advantage::outside{}, decoupled_ppo{.cap = cap}}), decoupled(cap, false));
    // A-3PO, by versions
    for (const double staleness : {0, 1, 2, 5})
        cut_tokens(EXPRESSION(mc{advantage::outside{}, a3po{}}),
                   [&](const place& x, std::size_t v) {
                       const double theta = 10, behaviour = theta - staleness, prox = theta - 1;
                       const double alpha =
                           theta == behaviour ? 0 : within((prox - behaviour) / (theta - behaviour), 0, 1);
                       const double log_prox = x.log_mu[v] + alpha * (x.held[v] - x.log_mu[v]);
                       return std::exp(log_prox - x.log_mu[v]) *
                              their_ppo(std::exp(x.log_p[v] - log_prox), x.outside[v], .2, .2);
                   },
                   {.age = staleness});
    // M2PO: every token, by its proximal ratio; the denominator stays
    int dropped = 0;
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        batch s(seed, 14);
        const index_t N = s.rows;
        const double tau = 0.04;
        std::vector<std::pair<double, std::size_t>> squares;
        for (std::size_t r = 0; r < 14; ++r) {
            const double d = s.log_mu[r] - s.log_prox[r];
            squares.emplace_back(d * d, r);
        }
        std::sort(squares.rbegin(), squares.rend());
        std::vector<std::uint8_t> want(14, 1);
        for (std::size_t gone = 0; gone + 1 < squares.size(); ++gone) {
            double rest = 0;
            for (std::size_t i = gone; i < squares.size(); ++i) rest += squares[i].first;
            if (rest / double(squares.size() - gone) < tau) break;
            want[squares[gone].second] = 0;
        }
        const vec log_p = s.log_p();
        m2po_fit fit = EXPRESSION(m2po_fit{.tau = tau, .form = m2po::all})();
        fit.add(view(log_p.data(), s.rows, 1), s.drawn());
        std::vector<std::uint8_t> keep(14, 7);
        dropped += int(fit.freeze().keep(view(log_p.data(), s.rows, 1), s.drawn(), {}, view(keep.data(), s.rows, 1)));
        CHECK(keep == want);
        opd::env env;
        SETTING(env.frozen.keep = view(keep.data(), N, 1));
        matches(
            s,
            [&](const auto& rows) {
                return mean(rows, [&](const place& x, index_t r) {
                    const auto i = std::size_t(r);
                    const double w = std::exp(s.log_prox[i] - s.log_mu[i]);
                    const double u = std::exp(x.log_p[s.id(r)] - s.log_prox[i]);
                    return want[i] ? w * their_ppo(u, s.outside[i], .2, .2) : 0.0;
                });
            },
            [&] { return evaluate(backend, s.student(), s.drawn(), plain(), env).loss; });
    }
    CHECK(dropped > 0);
    check_page();
}

TEST_CASE("tinker") {
    page = "tinker";
    cpu_backend backend;
    const auto importance = EXPRESSION(accept_bias{mc{advantage::old{}}});
    const auto plain = [](const place& x, std::size_t v) { return -x.ratio(v) * -(x.log_mu[v] - x.log_q[v]); };
    tokens(importance, plain);
    // what it descends on stale tokens, and on the student's own
    in_the_mean(
        importance, [](const place& x) { return kl(x.log_p, x.log_q) - kl(x.log_p, x.log_mu); }, true);
    in_the_mean(
        importance, [](const place& x) { return kl(x.log_p, x.log_q); }, false);
    for (const std::uint64_t seed : {1, 2, 3}) {
        batch s(seed, 9);
        const index_t N = s.rows;
        const double coef = 0.7, discount = 0.6;
        const vec weights(std::size_t(N), coef);
        const std::vector<std::uint8_t> mask{1, 1, 0, 1, 1, 1, 0, 1, 1};
        {
            opd::env env;
            env.reduction = SETTING(reduce::sum);
            SETTING(env.weights = weights);
            SETTING(env.mask = mask);
            matches(
                s,
                [&](const auto& rows) {
                    double sum = 0;
                    for (index_t r = 0; r < s.rows; ++r)
                        sum += coef * mask[std::size_t(r)] * plain(rows[std::size_t(r)], s.id(r));
                    return sum;
                },
                [&] {
                    std::fill(s.dz.begin(), s.dz.end(), 0.0);
                    return evaluate(backend, s.student(), s.drawn(), importance(), env).loss;
                });
        }
        // the discounted sum of what follows in the same answer
        const std::vector<std::int64_t> offsets{0, 4, 9};
        vec want;
        for (std::size_t r = 0; r < 9; ++r) {
            double sum = 0, factor = 1;
            for (std::size_t i = r; i < (r < 4 ? 4U : 9U); ++i, factor *= discount)
                sum += factor * (s.log_q[i] - s.log_mu[i]);
            want.push_back(sum);
        }
        matches(
            s,
            [&](const auto& rows) {
                double sum = 0;
                for (index_t r = 0; r < s.rows; ++r) sum -= rows[std::size_t(r)].ratio(s.id(r)) * want[std::size_t(r)];
                return sum;
            },
            [&] {
                vec advantage;
                for (std::size_t r = 0; r < 9; ++r) advantage.push_back(s.log_q[r] - s.log_mu[r]);
                SETTING(credit(view(advantage.data(), N, 1), offsets, discount));
                opd::env env{.reduction = reduce::sum};
                SETTING(env.frozen.advantage = view(advantage.data(), N, 1));
                return evaluate(backend, s.student(), s.drawn(), importance(), env).loss;
            });
    }
    check_page();
}

TEST_CASE("the index names every page") {
    const auto index = lines_of(pages / "index.md");
    int count = 0;
    for (const auto& entry : fs::directory_iterator(pages)) {
        const std::string name = entry.path().filename().string();
        if (name == "index.md") continue;
        ++count;
        CAPTURE(name);
        CHECK(std::count_if(index.begin(), index.end(), [&](const std::string& line) {
                  return line.find("](" + name + ")") != std::string::npos;
              }) == 1);
    }
    CHECK(count == 11);
}

TEST_CASE("numbers for the cross-check") {
    cpu_backend backend;
    batch s(11, 3, 5);
    std::ostringstream out;
    out << std::setprecision(17);
    const auto write = [&](const char* name, const vec& x) {
        out << '"' << name << "\": [";
        for (index_t r = 0; r < s.rows; ++r) {
            out << (r > 0 ? ", [" : "[");
            for (index_t v = 0; v < s.vocab; ++v) out << (v > 0 ? ", " : "") << x[std::size_t(r * s.vocab + v)];
            out << ']';
        }
        out << ']';
    };
    out << "{\n", write("student", s.z), out << ",\n", write("teacher", s.y), out << ",\n\"cases\": [";
    int cases = 0;
    const auto add = [&](double b, double t, const auto& ours) {
        s.t = t;
        double loss = 0;
        matches(
            s,
            [&](const auto& rows) {
                return mean(rows, [&](const place& x, index_t) { return their_jsd(x.log_p, x.log_q, b); });
            },
            [&] { return loss = evaluate(backend, s.student(), s.teacher(), ours).loss; });
        out << (cases++ > 0 ? ",\n" : "\n") << "{\"beta\": " << b << ", \"temperature\": " << t
            << ", \"loss\": " << loss << ", ";
        write("gradient", s.dz), out << '}';
    };
    for (const double t : {1.0, 2.0}) {
        add(0, t, forward_kl{}), add(1, t, reverse_kl{});
        for (const double b : {0.25, 0.5}) add(b, t, jsd{.w = b, .o = b});
    }
    out << "\n]\n}\n";
    CHECK(cases == 8);
    if (const char* to = std::getenv("OPD_EQUIVALENCE_OUT"); to != nullptr && *to != '\0') {
        std::ofstream file(to);
        file << out.str();
        file.close();
        CHECK_MESSAGE(file.good(), "cannot write ", to);
    }
}
