// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "contenders.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "opd/backends/cpu.hpp"
#include "opd/opd.hpp"

namespace variance_study {

namespace {

std::size_t size(index_t rows, index_t columns) { return static_cast<std::size_t>(rows * columns); }

template <class T>
auto read(const std::vector<T>& x, index_t rows, index_t columns) {
    return opd::view(x.data(), rows, columns);
}
template <class T>
auto write(std::vector<T>& x, index_t rows, index_t columns) {
    return opd::view(x.data(), rows, columns);
}

constexpr std::size_t lanes = 8; // of sums, which compilers do not reorder

double total(const double* part) {
    return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}
double dot(const reals& a, const reals& b) {
    double part[lanes] = {};
    std::size_t i = 0;
    for (; i + lanes <= a.size(); i += lanes)
        for (std::size_t j = 0; j < lanes; ++j) part[j] += a[i + j] * b[i + j];
    for (; i < a.size(); ++i) part[0] += a[i] * b[i];
    return total(part);
}

/// Gradient of KL(p‖q) or KL(q‖p) with respect to the logits of p, as a sum over the vocabulary.
reals dense_gradient(const reals& log_p, const reals& log_q, bool forward) {
    reals g(log_p.size());
    const double value = forward ? 0 : kl(log_p, log_q);
    for (std::size_t v = 0; v < g.size(); ++v) {
        const double p = std::exp(log_p[v]);
        g[v] = forward ? p - std::exp(log_q[v]) : p * (log_p[v] - log_q[v] - value);
    }
    return g;
}

/// Mean, variance and bias of `trials` gradients, one after the other. Their distances d from the truth are added up in
/// twelve groups: products of two groups' sums have the mean |bias|², and their own squares say how far that is known.
class moments {
public:
    moments(const reals& truth, index_t trials)
        : truth_(truth), trials_(trials), groups_(size(groups, std::ssize(truth))), before_(truth.size()),
          norm_(dot(truth, truth)) {}

    void add(const float* g) {
        double* const sum = groups_.data() + count_ * groups / trials_ * std::ssize(truth_);
        double squares[lanes] = {}, alongs[lanes] = {}, boths[lanes] = {};
        const auto one = [&](std::size_t v, std::size_t lane) {
            const double x = double(g[v]) - truth_[v];
            sum[v] += x;
            squares[lane] += x * x, alongs[lane] += x * truth_[v], boths[lane] += x * before_[v];
            before_[v] = x;
        };
        std::size_t v = 0;
        for (; v + lanes <= truth_.size(); v += lanes)
            for (std::size_t lane = 0; lane < lanes; ++lane) one(v + lane, lane);
        for (; v < truth_.size(); ++v) one(v, 0);
        const double square = total(squares), along = total(alongs) / norm_;
        squares_ += square;
        along_ += along, along_squares_ += along * along;
        if (++count_ % 2 == 0) { // the difference of two knows neither mean nor bias
            const double apart = (square + square_before_) / 2 - total(boths);
            apart_ += apart, apart_squares_ += apart * apart;
        }
        square_before_ = square;
    }
    figures result() const {
        const double n = double(count_);
        double within = 0, between = 0, between_squares = 0;
        for (index_t a = 0; a < groups; ++a)
            for (index_t b = 0; b <= a; ++b) {
                double part[lanes] = {};
                const double* const x = groups_.data() + a * std::ssize(truth_);
                const double* const y = groups_.data() + b * std::ssize(truth_);
                for (std::size_t v = 0; v < truth_.size(); ++v) part[v % lanes] += x[v] * y[v];
                const double product = total(part);
                if (a == b)
                    within += product;
                else
                    between += product, between_squares += product * product;
            }
        const double of_sum = within + 2 * between, pairs = n / 2, mean = apart_ / pairs;
        figures f;
        f.variance = std::max(0.0, squares_ - of_sum / n) / (n - 1) / norm_;
        f.variance_error = std::sqrt(std::max(0.0, apart_squares_ / pairs - mean * mean) / (pairs - 1)) / norm_;
        const double products = n * n * double(groups - 1) / double(groups) / 2; // of two trials of different groups
        f.bias2 = between / products / norm_, f.bias2_error = std::sqrt(between_squares) / products / norm_;
        f.along = 1 + along_ / n;
        f.along_error = std::sqrt(std::max(0.0, along_squares_ / n - along_ / n * along_ / n) / (n - 1));
        return f;
    }

private:
    static constexpr index_t groups = 12;

    const reals& truth_;
    index_t trials_, count_ = 0;
    reals groups_, before_; // (groups,V), (V)
    double norm_, squares_ = 0, square_before_ = 0, apart_ = 0, apart_squares_ = 0, along_ = 0, along_squares_ = 0;
};

/// What is known of one prefix, by one call of score each.
class prefix {
public:
    prefix(const policy& at, const floats& stale, const trial_settings& s, std::uint64_t number, int k)
        : s_(s), number_(number), k_(k), v_(std::ssize(at.z)), z_(rows_of(at.z)), mu_(rows_of(stale)),
          y_(rows_of(at.y)), dz_(size(block, v_)) {
        floats between = at.z;
        for (std::size_t v = 0; v < between.size(); ++v) between[v] = (at.z[v] + stale[v]) / 2;
        const reals log_p = log_softmax(at.z), log_q = log_softmax(at.y);
        log_q_ = scores_of(at.y), log_prox_ = scores_of(between), log_mu_ = scores_of(stale);
        entropies_.assign(size(block, 1), static_cast<float>(entropy_)); // mu's
        scores_of(at.z);
        lses_.assign(size(block, 1), lse_); // p's
        truth_[0] = dense_gradient(log_p, log_q, false);
        truth_[1] = dense_gradient(log_p, log_q, true);
        given_.assign(size(block, 1), static_cast<float>(-kl(log_p, log_q)));
        versions_.assign(size(block, 1), -k);
    }

    void measure(scored ids, const std::vector<contender>& all, std::vector<figures>& out) {
        if (std::none_of(all.begin(), all.end(), [&](const contender& c) { return c.ids == ids; })) return;
        if (ids >= scored::top_of_teacher) return supports(ids, all, out);
        std::vector<moments> sums;
        for (const contender& c : all)
            if (c.ids == ids) sums.emplace_back(truth_[c.forward], s_.trials);
        double distinct = 0;
        for (index_t first = 0; first < s_.trials; first += block) {
            draw(ids, first);
            for (index_t r = 0; r < block; ++r) {
                std::vector<std::int32_t> row(ids_.begin() + r * m_, ids_.begin() + (r + 1) * m_);
                std::sort(row.begin(), row.end());
                distinct += double(std::unique(row.begin(), row.end()) - row.begin()) - double(row.front() < 0);
            }
            auto sum = sums.begin();
            for (const contender& c : all) {
                if (c.ids != ids) continue;
                gradients(c);
                for (index_t r = 0; r < block; ++r) sum->add(dz_.data() + r * v_);
                ++sum;
            }
        }
        auto sum = sums.begin();
        for (std::size_t i = 0; i < all.size(); ++i) {
            if (all[i].ids != ids) continue;
            out[i] = (sum++)->result();
            out[i].distinct = distinct / double(s_.trials);
            if (all[i].linear) out[i].exact_bias2 = enumerated(all[i]);
        }
    }

private:
    static constexpr index_t block = 8;

    static floats rows_of(const floats& z) {
        floats all;
        for (index_t r = 0; r < block; ++r) all.insert(all.end(), z.begin(), z.end());
        return all;
    }
    floats scores_of(const floats& z) {
        const index_t v = std::ssize(z);
        std::vector<std::int32_t> every(z.size());
        std::iota(every.begin(), every.end(), 0);
        floats log_p(z.size());
        opd::score(be_, read(z, 1, v),
                   opd::scores<>{.ids = read(every, 1, v),
                                 .log_p = write(log_p, 1, v),
                                 .lse = opd::view(&lse_, 1),
                                 .entropy = opd::view(&entropy_, 1)});
        return log_p;
    }
    opd::student::logits<float> student() { return {read(z_, block, v_), write(dz_, block, v_)}; }
    opd::env environment() const {
        opd::env e;
        e.reduction = opd::reduce::sum;
        e.versions = opd::view(versions_.data(), block);
        e.given_lse = opd::view(lses_.data(), block);
        return e;
    }

    /// How many draws have `budget` distinct ids in the mean.
    index_t draws_of_distinct() const {
        index_t low = s_.budget, high = 16 * s_.budget;
        while (low < high) {
            const index_t m = (low + high + 1) / 2;
            double expected = 0;
            for (const float x : log_mu_)
                expected -= std::expm1(double(m) * std::log1p(-std::min(std::exp(double(x)), 1 - 1e-16)));
            (expected <= double(s_.budget) ? low : high) = expected <= double(s_.budget) ? m : m - 1;
        }
        return low;
    }
    template <class Design>
    void draw_by(const Design& d, const floats& z, index_t first) {
        m_ = d.columns();
        ids_.resize(size(block, m_)), exact_.resize(ids_.size());
        for (floats* x : {&at_mu_, &weight_, &at_q_, &at_prox_}) x->resize(ids_.size());
        std::vector<std::uint64_t> sample(size(block, 1));
        std::iota(sample.begin(), sample.end(), number_ << 20 | std::uint64_t(first));
        const std::vector<std::uint32_t> position(sample.size(), std::uint32_t(k_));
        opd::draw(be_, read(z, block, v_), d, {.seed = s_.seed, .sample = sample, .position = position},
                  opd::drawn<>{write(ids_, block, m_), write(at_mu_, block, m_), write(weight_, block, m_),
                               write(exact_, block, m_)});
        for (std::size_t j = 0; j < ids_.size(); ++j) {
            const auto id = std::size_t(std::max(ids_[j], 0));
            at_q_[j] = log_q_[id], at_prox_[j] = log_prox_[id];
        }
    }
    void draw(scored ids, index_t first) {
        const index_t b = s_.budget;
        switch (ids) {
        case scored::iid:
            return draw_by(opd::design::iid{b}, mu_, first);
        case scored::iid_distinct:
            return draw_by(opd::design::iid{draws_of_distinct()}, mu_, first);
        case scored::of_teacher:
            return draw_by(opd::design::iid{b}, y_, first);
        case scored::head_32:
            return draw_by(opd::design::head_tail{b / 2, b - b / 2}, mu_, first);
        case scored::head_56:
            return draw_by(opd::design::head_tail{b - b / 8, b / 8}, mu_, first);
        case scored::gumbel_top:
            return draw_by(opd::design::gumbel_top{b}, mu_, first);
        default:
            return draw_by(opd::design::threshold{b}, mu_, first);
        }
    }
    static bool is_iid(scored ids) { return ids == scored::iid || ids == scored::iid_distinct; }

    opd::teacher::samples<std::int32_t> samples() const {
        opd::teacher::samples<std::int32_t> t{read(ids_, block, m_), read(at_mu_, block, m_), read(at_q_, block, m_)};
        t.log_prox = read(at_prox_, block, m_);
        t.baseline = opd::view(given_.data(), block);
        t.mu_entropy = opd::view(entropies_.data(), block);
        return t;
    }
    void gradients(const contender& c) {
        if (c.ids == scored::of_teacher) {
            opd::evaluate(be_, student(), opd::teacher::of_teacher{samples()}, opd::sampled_forward_kl{},
                          environment());
        } else if (is_iid(c.ids)) {
            opd::evaluate(be_, student(), samples(), c.how, environment());
        } else {
            opd::teacher::weighted<std::int32_t> t{read(ids_, block, m_), read(weight_, block, m_),
                                                   read(at_mu_, block, m_), read(at_q_, block, m_),
                                                   read(exact_, block, m_)};
            t.log_prox = read(at_prox_, block, m_);
            t.baseline = opd::view(given_.data(), block);
            t.mu_entropy = opd::view(entropies_.data(), block);
            opd::evaluate(be_, student(), t, c.how, environment());
        }
    }
    double squared_error(const reals& truth) const { // of the first row, relative
        double sum = 0;
        for (std::size_t v = 0; v < truth.size(); ++v) {
            const double off = double(dz_[v]) - truth[v];
            sum += off * off;
        }
        return sum / dot(truth, truth);
    }
    /// The bias of one draw's estimator: all ids, with weights mu, are its mean.
    double enumerated(const contender& c) {
        std::vector<std::int32_t> every(log_mu_.size());
        std::iota(every.begin(), every.end(), 0);
        floats mu;
        for (const float x : log_mu_) mu.push_back(std::exp(x));
        opd::teacher::weighted<std::int32_t> t{read(every, 1, v_), read(mu, 1, v_), read(log_mu_, 1, v_),
                                               read(log_q_, 1, v_)};
        t.log_prox = read(log_prox_, 1, v_);
        t.baseline = opd::view(given_.data(), 1);
        t.mu_entropy = opd::view(entropies_.data(), 1);
        opd::env e;
        e.reduction = opd::reduce::sum;
        e.versions = opd::view(versions_.data(), 1);
        opd::evaluate(be_, opd::student::logits<float>{read(z_, 1, v_), write(dz_, 1, v_)}, t, c.how, e);
        return squared_error(truth_[c.forward]);
    }
    void supports(scored ids, const std::vector<contender>& all, std::vector<figures>& out) {
        const index_t b = s_.budget;
        const bool stale = ids == scored::top_of_stale;
        std::vector<std::int32_t> best(size(1, b));
        floats listed(best.size()), log_q(best.size()), tail(1);
        opd::top_k(be_, read(stale ? mu_ : y_, 1, v_), write(best, 1, b), write(listed, 1, b));
        opd::score(
            be_, read(y_, 1, v_),
            opd::scores<>{.ids = read(best, 1, b), .log_p = write(log_q, 1, b), .log_tail = opd::view(tail.data(), 1)});
        opd::teacher::support<std::int32_t> t{read(best, 1, b), read(log_q, 1, b)};
        t.log_tail = opd::view(std::as_const(tail).data(), 1);
        if (stale) t.log_mu = read(listed, 1, b), t.chosen_by = opd::teacher::chosen_by::stale_student;
        const opd::student::logits<float> student{read(z_, 1, v_), write(dz_, 1, v_)};
        const opd::env e{.reduction = opd::reduce::sum};
        for (std::size_t i = 0; i < all.size(); ++i) {
            const contender& c = all[i];
            if (c.ids != ids) continue;
            const opd::any_dense d{c.forward ? opd::choice::objective::forward_kl : opd::choice::objective::reverse_kl};
            using opd::choice::partial;
            if (c.support == on_support::tail_bucket)
                opd::evaluate(be_, student, t, opd::any_tail_bucket{d}, e);
            else if (c.support == on_support::renormalised)
                opd::evaluate(be_, student, t, opd::renormalised{d}, e);
            else
                opd::evaluate(be_, student, t,
                              opd::any_partial{c.support == on_support::generalised ? partial::generalised
                                               : c.support == on_support::truncated ? partial::truncated_biased
                                                                                    : partial::reweighted,
                                               d},
                              e);
            const reals& truth = truth_[c.forward];
            out[i].exact_bias2 = out[i].bias2 = squared_error(truth);
            out[i].along = dot(reals(dz_.begin(), dz_.begin() + v_), truth) / dot(truth, truth);
            out[i].distinct = double(b);
        }
    }

    const trial_settings& s_;
    std::uint64_t number_;
    int k_;
    index_t v_, m_ = 0;
    opd::cpu_backend be_{.threads = 1};
    floats z_, mu_, y_, dz_;                 // (block,V)
    floats log_q_, log_prox_, log_mu_;       // (V)
    reals truth_[2];                         // (V)
    double entropy_ = 0, lse_ = 0;           // of what was scored last
    floats given_, entropies_;               // (block) E_p[A], entropy of mu
    reals lses_;                             // (block) log-sum-exp of p
    std::vector<std::int32_t> versions_;     // (block)
    std::vector<std::int32_t> ids_;          // (block,m)
    std::vector<std::uint8_t> exact_;        // (block,m)
    floats at_mu_, weight_, at_q_, at_prox_; // (block,m)
};

} // namespace

std::vector<contender> contenders() {
    using opd::choice::baseline;
    using opd::choice::objective;
    using opd::choice::surrogate;
    std::vector<contender> all;
    const auto with = [](baseline b) {
        opd::any_sampled how;
        how.baseline.which = b;
        return how;
    };
    const auto by = [](opd::any_surrogate s) {
        opd::any_sampled how;
        how.surrogate = s, how.accept_bias = true;
        return how;
    };
    opd::any_sampled normalised, old, old_clipped, shaped, lightning, forward;
    normalised.weighting.self_normalised = true;
    old.of.which = objective::old, old.accept_bias = true;
    old_clipped = old, old_clipped.surrogate.which = surrogate::ppo_clip;
    shaped.of = {objective::clipped, 5};
    lightning = shaped, lightning.surrogate.which = surrogate::score_function, lightning.accept_bias = true;
    forward.of.which = objective::forward_kl;
    const auto add = [&](contender c) { all.push_back(std::move(c)); };

    // i.i.d. draws, unbiased
    add({.name = "mc", .says = "MC-64 with IS", .how = with(baseline::none), .linear = true});
    add({.name = "mc_leave_one_out", .says = "MC-64, leave-one-out", .how = with(baseline::leave_one_out)});
    add({.name = "mc_self_normalised",
         .says = "MC-64, self-normalised baseline",
         .how = with(baseline::self_normalised)});
    add({.name = "mc_minimum_variance",
         .says = "MC-64, minimum-variance baseline",
         .how = with(baseline::minimum_variance)});
    add({.name = "mc_value",
         .says = "MC-64, E_p[A] given",
         .how = with(baseline::given),
         .knows_value = true,
         .linear = true});
    add({.name = "mc_distinct",
         .says = "MC, 64 distinct ids",
         .ids = scored::iid_distinct,
         .how = with(baseline::none)});
    add({.name = "mc_distinct_leave_one_out",
         .says = "MC, 64 distinct ids, leave-one-out",
         .ids = scored::iid_distinct,
         .how = with(baseline::leave_one_out)});
    // without replacement, unbiased
    add({.name = "head_32_tail_32", .says = "head 32 + tail 32", .ids = scored::head_32});
    add({.name = "head_56_tail_8", .says = "head 56 + tail 8", .ids = scored::head_56});
    add({.name = "gumbel_top", .says = "Gumbel top-64", .ids = scored::gumbel_top});
    add({.name = "gumbel_top_value",
         .says = "Gumbel top-64, E_p[A] given",
         .ids = scored::gumbel_top,
         .how = with(baseline::given),
         .knows_value = true});
    add({.name = "threshold", .says = "threshold(64)", .ids = scored::threshold});
    add({.name = "threshold_no_baseline",
         .says = "threshold(64), no baseline",
         .ids = scored::threshold,
         .how = with(baseline::none)});
    add({.name = "threshold_value",
         .says = "threshold(64), E_p[A] given",
         .ids = scored::threshold,
         .how = with(baseline::given),
         .knows_value = true});
    // i.i.d. draws, biased
    const auto biased = [&](const char* name, const char* says, opd::any_sampled how, bool now) {
        how.baseline.which = baseline::none;
        add({.name = name, .says = says, .how = how, .unbiased = false, .unbiased_now = now, .linear = true});
    };
    add({.name = "mc_weights_normalised",
         .says = "MC-64, weights over their sum",
         .how = normalised,
         .unbiased = false,
         .consistent = true});
    add({.name = "gumbel_top_normalised",
         .says = "Gumbel top-64, weights over their sum",
         .ids = scored::gumbel_top,
         .how = normalised,
         .unbiased = false,
         .unbiased_now = false,
         .consistent = true});
    add({.name = "threshold_normalised",
         .says = "threshold(64), weights over their sum",
         .ids = scored::threshold,
         .how = normalised,
         .unbiased = false,
         .unbiased_now = false,
         .consistent = true});
    biased("mc_uncorrected", "MC-64 without IS", by({.which = surrogate::score_function}), true);
    biased("mc_old", "MC-64, A at rollout time, IS", old, true);
    biased("mc_old_ppo", "MC-64, A at rollout time, PPO clip .2", old_clipped, true);
    biased("mc_ppo", "MC-64, PPO clip .2", by({.which = surrogate::ppo_clip}), true);
    biased("mc_ppo_dual", "MC-64, PPO clip .2, dual 3", by({.which = surrogate::ppo_clip, .dual = 3}), true);
    biased("mc_truncated", "MC-64, ratio at most 2", by({.which = surrogate::truncated_is, .cap = 2}), true);
    biased("mc_cispo", "MC-64, CISPO .2", by({.which = surrogate::cispo}), true);
    biased("mc_decoupled", "MC-64, decoupled PPO .2", by({.which = surrogate::decoupled_ppo}), true);
    biased("mc_a3po", "MC-64, A-3PO .2", by({.which = surrogate::a3po}), true);
    biased("mc_estr", "MC-64, ESTR .05", by({.which = surrogate::unclipped_is, .estr_tau = 0.05, .estr_epsilon = 0.01}),
           true);
    biased("mc_clipped_5", "MC-64, A within 5", shaped, false);
    biased("lightning_5", "Lightning, A within 5", lightning, false);
    {
        opd::any_sampled how = by({.which = surrogate::truncated_is, .cap = 2});
        add({.name = "threshold_truncated",
             .says = "threshold(64), ratio at most 2",
             .ids = scored::threshold,
             .how = how,
             .unbiased = false});
    }
    // supports: nothing is drawn
    const auto support = [&](const char* name, const char* says, scored ids, on_support form, bool to_forward = false) {
        add({.name = name,
             .says = says,
             .ids = ids,
             .support = form,
             .unbiased = false,
             .unbiased_now = false,
             .forward = to_forward});
    };
    support("top_tail_bucket", "teacher's top 64 and tail", scored::top_of_teacher, on_support::tail_bucket);
    support("top_renormalised", "teacher's top 64, renormalised", scored::top_of_teacher, on_support::renormalised);
    support("top_generalised", "teacher's top 64, generalised KL", scored::top_of_teacher, on_support::generalised);
    support("top_truncated", "teacher's top 64, partial sum", scored::top_of_teacher, on_support::truncated);
    support("stale_tail_bucket", "mu's top 64 and tail", scored::top_of_stale, on_support::tail_bucket);
    support("stale_renormalised", "mu's top 64, renormalised", scored::top_of_stale, on_support::renormalised);
    support("stale_reweighted", "mu's top 64, reweighted", scored::top_of_stale, on_support::reweighted);
    // forward KL
    add({.name = "forward_mc", .says = "forward KL: MC-64 with IS", .how = forward, .forward = true, .linear = true});
    {
        opd::any_sampled how = forward;
        how.baseline.which = baseline::leave_one_out;
        add({.name = "forward_mc_leave_one_out",
             .says = "forward KL: MC-64, leave-one-out",
             .how = how,
             .forward = true});
    }
    add({.name = "forward_threshold",
         .says = "forward KL: threshold(64)",
         .ids = scored::threshold,
         .how = forward,
         .forward = true});
    add({.name = "forward_of_teacher",
         .says = "forward KL: 64 draws of the teacher's",
         .ids = scored::of_teacher,
         .forward = true});
    support("forward_top_tail_bucket", "forward KL: teacher's top 64 and tail", scored::top_of_teacher,
            on_support::tail_bucket, true);
    support("forward_top_renormalised", "forward KL: teacher's top 64, renormalised", scored::top_of_teacher,
            on_support::renormalised, true);
    return all;
}

std::vector<figures> measure(const std::vector<contender>& all, const policy& at, const floats& stale,
                             const trial_settings& s, std::uint64_t number, int k) {
    prefix here(at, stale, s, number, k);
    std::vector<figures> out(all.size());
    for (const scored ids : designs) here.measure(ids, all, out);
    return out;
}

} // namespace variance_study
