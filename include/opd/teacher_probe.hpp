// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a served teacher really returns: a test before a run, from some hundred scored tokens.
//
//   const opd::teacher_report r = opd::probe_teacher({.log_q = replicas, .log_p = own, .offsets = offsets, …});
//   r.check();                                   // throws invalid_input with what is wrong, and the number behind it
//
//   noise        the same tokens scored R times: sigma_delta, the standard deviation of the difference of two scores,
//                = √(2·mean within-token variance), against the mean |log p - log q|, which is what is learnt from.
//                Bad: sigma_delta > most_noise · mean gap
//   mass         Σ exp over each list of ids: at most 1; over a complete one (all ids, or a tail) 1. Bad: logits, or
//                log-probs over a T and not normalised again; full lists then give T: mean Σ_v exp(T x_v) = 1
//   temperature  log q(a) - log q(b) against the reference's, over all pairs of a list: slope 1/T. Two models differ,
//                too: the slope of y on x and that of x on y, inverted, bound the true one, whoever's the scatter is.
//                Bad: 1 is outside. The reference should be the same model, raw: a teacher that is merely surer than
//                the student looks like T < 1. Unclear below a squared correlation of 0.9
//   shift        rank correlation of log q[t] with log p[t-1], log p[t], log p[t+1] within sequences. Bad: another than
//                lag 0 is the best by `errors` standard errors
//   ids          of the lists, beyond the student's vocabulary (152,064 against 151,936: padded heads)
//
// Each is good or bad, or says why it is neither: not asked (its inputs are left out), too few tokens or lists, unclear
// (the numbers decide nothing). Everything is double and on the host; O(R N + N log N + L k log k).
//
// The noise is that of a token's score. Theorem 3.13 of Lightning OPD (arXiv 2604.13010) bounds what a wrong teacher
// does to a gradient by sigma_Delta of whole sequences; as for theorem 3.5 that is √E[(Σ_t |Δ_t|)²].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/offline_drift.hpp"
#include "opd/view.hpp"

namespace opd {

/// What was asked and what came back. Whatever is left out is not looked at.
struct teacher_answers {
    matrix_view<const double> log_q = {}; ///< (R,N) log-probs of the same N tokens; each replica or repeat is a row
    vector_view<const double> log_p = {}; ///< (N) of the same tokens by the student, which is to learn from the gap
    row_offsets<> offsets = {};           ///< (S+1) sequences, beside which no token counts; left out: one
    row_mask<> mask = {};                 ///< (N) tokens that count

    matrix_view<const index_t> list_ids = {};     ///< (L,k) ids that were returned at L positions; -1: an unused slot
    matrix_view<const double> list_log_q = {};    ///< (L,k) their log-probs
    matrix_view<const double> list_log_p = {};    ///< (L,k) the reference's of the same ids, raw, T = 1
    vector_view<const double> list_log_tail = {}; ///< (L) log of the teacher's mass on all other ids
    index_t vocab = 0;                            ///< the student's; 0: unknown
};

/// How much of each fault is borne, and how few numbers are too few to tell.
struct probe_settings {
    double most_noise = 0.5;      ///< sigma_delta over mean gap. At 0.5 noise has at most 1/8 of the mean square of A
    index_t least_tokens = 200;   ///< fewer decide neither noise nor shift
    index_t least_lists = 32;     ///< fewer decide neither mass, temperature nor ids, unless one is bad
    double mass_tolerance = 0.01; ///< of a list's Σ exp: servers round log-probs
    double temperature_tolerance = 0.03; ///< of the slope 1/T
    double errors = 5;                   ///< standard errors that a fault must stand out by
};

/// What a test came to; `to_string` says it in a word.
enum class probed {
    not_asked, ///< inputs left out
    too_few,
    unclear, ///< enough numbers that decide nothing
    good,
    bad
};
inline const char* to_string(probed p) {
    constexpr const char* names[] = {"not asked", "too few", "unclear", "good", "bad"};
    return names[static_cast<int>(p)];
}

/// What probe_teacher found, with the numbers behind it.
struct teacher_report {
    probed noise = probed::not_asked, mass = probed::not_asked, temperature = probed::not_asked,
           shift = probed::not_asked, ids = probed::not_asked;

    index_t replicas = 0, tokens = 0;              ///< tokens that the mask keeps and whose numbers are all log-probs
    index_t bad_tokens = 0, first_bad_token = -1;  ///< NaN, ±inf, above 1e-3 or below -9000 in any column
    double sigma_delta = 0, sigma_delta_error = 0; ///< nats; error by sequences, where there are two, else by tokens
    double mean_gap = 0;                           ///< mean |log p - mean log q|
    double noise_limit = 0;                        ///< most_noise · mean_gap

    index_t lists = 0,
            bad_entries = 0; ///< lists with an id; entries NaN, +inf or below -9000: left out, as are repeats
    index_t repeats = 0;     ///< of an id in a list
    double mean_mass = 0, most_mass = 0;
    index_t heavy_lists = 0, first_heavy_list = -1; ///< with a mass above 1 + tolerance
    index_t complete_lists = 0;                     ///< all ids of the vocabulary, or a tail
    double complete_mass = 0;                       ///< mean over them
    double unnormalised_temperature = 0;            ///< T for which full lists of x/T sum to 1; 0: not asked, or none

    index_t compared_lists = 0; ///< two or more ids with both log-probs
    double estimated_temperature = 0, least_temperature = 0, most_temperature = 0; ///< 1/slope: middle and interval
    double slope_error = 0;                                                        ///< of y on x, by lists
    double list_correlation = 0;

    double correlation_before = 0, correlation_here = 0,
           correlation_after = 0; ///< log q[t] with log p[t-1], [t], [t+1]
    index_t shifted_by = 0;       ///< lag of the best: answer t is the score of token t + shifted_by

    index_t outside_ids = 0, first_outside_list = -1, largest_id = -1;
    double outside_mass = 0; ///< mean over lists of the mass on them

    /// visit(name, pointer to member) for every field.
    template <class Visit>
    static constexpr void fields(Visit&& visit) {
        using r = teacher_report;
        visit("noise", &r::noise), visit("mass", &r::mass), visit("temperature", &r::temperature);
        visit("shift", &r::shift), visit("ids", &r::ids);
        visit("replicas", &r::replicas), visit("tokens", &r::tokens), visit("bad_tokens", &r::bad_tokens);
        visit("first_bad_token", &r::first_bad_token), visit("sigma_delta", &r::sigma_delta);
        visit("sigma_delta_error", &r::sigma_delta_error), visit("mean_gap", &r::mean_gap);
        visit("noise_limit", &r::noise_limit);
        visit("lists", &r::lists), visit("bad_entries", &r::bad_entries), visit("repeats", &r::repeats);
        visit("mean_mass", &r::mean_mass), visit("most_mass", &r::most_mass), visit("heavy_lists", &r::heavy_lists);
        visit("first_heavy_list", &r::first_heavy_list), visit("complete_lists", &r::complete_lists);
        visit("complete_mass", &r::complete_mass), visit("unnormalised_temperature", &r::unnormalised_temperature);
        visit("compared_lists", &r::compared_lists), visit("estimated_temperature", &r::estimated_temperature);
        visit("least_temperature", &r::least_temperature), visit("most_temperature", &r::most_temperature);
        visit("slope_error", &r::slope_error), visit("list_correlation", &r::list_correlation);
        visit("correlation_before", &r::correlation_before), visit("correlation_here", &r::correlation_here);
        visit("correlation_after", &r::correlation_after), visit("shifted_by", &r::shifted_by);
        visit("outside_ids", &r::outside_ids), visit("first_outside_list", &r::first_outside_list);
        visit("largest_id", &r::largest_id), visit("outside_mass", &r::outside_mass);
    }

    /// Whether something is bad. What is unclear, too few or not asked is no refusal: look at it yourself.
    bool refused() const {
        for (const probed p : {noise, mass, temperature, shift, ids})
            if (p == probed::bad) return true;
        return false;
    }
    /// What is bad, a sentence each; empty: nothing.
    std::string reasons() const {
        std::string s;
        const auto say = [&s](probed p, const char* text, auto... numbers) {
            if (p != probed::bad) return;
            char line[320];
            std::snprintf(line, sizeof line, text, numbers...);
            s.append(s.empty() ? "" : "; ").append(line);
        };
        say(ids,
            "ids: %lld returned ids are negative or lie beyond the student's vocabulary, the largest is %lld "
            "(first: list %lld)",
            static_cast<long long>(outside_ids), static_cast<long long>(largest_id),
            static_cast<long long>(first_outside_list));
        if (heavy_lists > 0)
            say(mass,
                "mass: %lld of %lld lists of log-probs sum to more than 1, up to %.4g (first: list %lld): logits, or "
                "log-probs over a temperature and not normalised",
                static_cast<long long>(heavy_lists), static_cast<long long>(lists), most_mass,
                static_cast<long long>(first_heavy_list));
        else
            say(mass, "mass: complete lists sum to %.4g, not to 1: not normalised", complete_mass);
        if (unnormalised_temperature > 0) say(mass, "mass: they would sum to 1 times %.3g", unnormalised_temperature);
        say(shift,
            "shift: answers are off by one: log q[t] goes with log p[t%+lld] (rank correlation %.3f, in place %.3f)",
            static_cast<long long>(shifted_by), shifted_by < 0 ? correlation_before : correlation_after,
            correlation_here);
        say(temperature, "temperature: log-probs are those of T = %.3g (%.3g to %.3g), not 1", estimated_temperature,
            least_temperature, most_temperature);
        say(noise,
            "noise: two scores of a token differ by %.3g ± %.2g nats, the models by %.3g on average: at most %.3g "
            "can be learnt from",
            sigma_delta, sigma_delta_error, mean_gap, noise_limit);
        return s;
    }
    /// Throws invalid_input("teacher", reasons()) where something is bad.
    void check() const {
        if (refused()) throw invalid_input("teacher", reasons());
    }
};

/// One line, for a log.
inline std::string to_string(const teacher_report& r) {
    char line[400];
    std::snprintf(
        line, sizeof line,
        "%lld tokens, %lld replicas: noise %s (%.3g of %.3g nats), shift %s (%.2f %.2f %.2f); %lld lists: mass "
        "%s (%.4g), temperature %s (%.3g to %.3g), ids %s (largest %lld)",
        static_cast<long long>(r.tokens), static_cast<long long>(r.replicas), to_string(r.noise), r.sigma_delta,
        r.mean_gap, to_string(r.shift), r.correlation_before, r.correlation_here, r.correlation_after,
        static_cast<long long>(r.lists), to_string(r.mass), r.mean_mass, to_string(r.temperature), r.least_temperature,
        r.most_temperature, to_string(r.ids), static_cast<long long>(r.largest_id));
    std::string s = line;
    if (r.bad_tokens > 0) s.append("; ").append(std::to_string(r.bad_tokens)).append(" bad tokens, left out");
    return s;
}

namespace detail {
inline namespace OPD_ISA {

inline bool is_log_prob(double x) { return is_finite(x) && x <= 1e-3 && x >= -9000; }

/// Ranks from 0, equal numbers share the mean of theirs.
inline std::vector<double> ranks_of(const std::vector<double>& x) {
    std::vector<std::size_t> order(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return x[a] < x[b]; });
    std::vector<double> rank(x.size());
    for (std::size_t from = 0, to = 0; from < order.size(); from = to) {
        while (to < order.size() && x[order[to]] == x[order[from]]) ++to;
        for (std::size_t i = from; i < to; ++i) rank[order[i]] = 0.5 * double(from + to - 1);
    }
    return rank;
}

/// Pearson's correlation of what is added, in two passes.
struct paired {
    std::vector<std::pair<double, double>> of = {};
    double correlation() const {
        double a = 0, b = 0, aa = 0, bb = 0, ab = 0;
        for (const auto& [x, y] : of) a += x / double(of.size()), b += y / double(of.size());
        for (const auto& [x, y] : of) aa += (x - a) * (x - a), bb += (y - b) * (y - b), ab += (x - a) * (y - b);
        return aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 0;
    }
};

inline void check_answers(const teacher_answers& a) {
    const index_t n = a.log_q.cols, lists = a.list_ids.rows, k = a.list_ids.cols;
    check_matrix("log_q", a.log_q, a.log_q.rows, n);
    check_vector("log_p", a.log_p, n);
    check_vector("mask", a.mask, n);
    for (index_t s = 0; s + 1 < a.offsets.size; ++s)
        if (a.offsets[s] < 0 || a.offsets[s + 1] < a.offsets[s] || a.offsets[s + 1] > n)
            throw invalid_input("offsets",
                                "from " + std::to_string(a.offsets[s]) + " to " + std::to_string(a.offsets[s + 1]) +
                                    " of " + std::to_string(n) + " tokens",
                                s);
    check_matrix("list_ids", a.list_ids, lists, k);
    check_matrix("list_log_q", a.list_log_q, lists, k);
    if (!left_out(a.list_log_p)) check_matrix("list_log_p", a.list_log_p, lists, k);
    check_vector("list_log_tail", a.list_log_tail, lists);
    if (a.vocab < 0) throw invalid_input("vocab", "is negative");
}

inline void probe_tokens(const teacher_answers& a, const probe_settings& settings, teacher_report& r) {
    const index_t n = a.log_q.cols, replicas = a.log_q.rows;
    r.replicas = replicas;
    if (replicas == 0) return;
    const bool compared = !a.log_p.empty();
    const bool whole = a.offsets.size < 1;
    const index_t sequences = whole ? 1 : a.offsets.size - 1;
    const auto begin = [&](index_t s) { return whole ? 0 : a.offsets[s]; };
    const auto end = [&](index_t s) { return whole ? n : a.offsets[s + 1]; };
    std::vector<double> q, p;                       // of good tokens
    std::vector<index_t> place(std::size_t(n), -1); // token -> its place there
    for (index_t t = begin(0), last = sequences > 0 ? end(sequences - 1) : t; t < last; ++t) {
        if (!a.mask.kept(t)) continue;
        bool good = !compared || is_log_prob(a.log_p[t]);
        double mean = 0;
        for (index_t j = 0; j < replicas; ++j) good = good && is_log_prob(a.log_q(j, t)), mean += a.log_q(j, t);
        if (good)
            place[std::size_t(t)] = index_t(q.size()), q.push_back(mean / double(replicas)),
            p.push_back(compared ? a.log_p[t] : 0);
        else if (r.bad_tokens++ == 0)
            r.first_bad_token = t;
    }
    r.tokens = index_t(q.size());

    // by sequence: what scatters within tokens, and which pairs are neighbours
    const bool few = r.tokens < settings.least_tokens;
    clustered_mean by_sequence, by_token, gap;
    const std::vector<double> rank_q = ranks_of(q), rank_p = ranks_of(p);
    paired lag[3];
    for (index_t s = 0; s < sequences; ++s) {
        double squares = 0, tokens = 0;
        for (index_t t = begin(s); t < end(s); ++t) {
            const index_t at = place[std::size_t(t)];
            if (at < 0) continue;
            const double mean = q[std::size_t(at)];
            double square = 0; // of the difference of two replicas: twice their variance
            for (index_t j = 0; j < replicas && replicas > 1; ++j)
                square += 2 * (a.log_q(j, t) - mean) * (a.log_q(j, t) - mean) / double(replicas - 1);
            by_token.add(square), squares += square, ++tokens;
            gap.add(std::abs(p[std::size_t(at)] - mean));
            for (index_t l = -1; l <= 1; ++l)
                if (t + l >= begin(s) && t + l < end(s) && place[std::size_t(t + l)] >= 0)
                    lag[l + 1].of.emplace_back(rank_q[std::size_t(at)], rank_p[std::size_t(place[std::size_t(t + l)])]);
        }
        if (tokens > 0) by_sequence.add(squares, tokens);
    }
    if (replicas > 1 && by_token.count > 0) {
        r.sigma_delta = std::sqrt(by_token.mean());
        const double error = by_sequence.clusters > 1 ? by_sequence.error() : by_token.error();
        r.sigma_delta_error = r.sigma_delta > 0 ? error / (2 * r.sigma_delta) : 0;
    }
    if (!compared) return;
    r.mean_gap = gap.mean(), r.noise_limit = settings.most_noise * r.mean_gap;
    if (replicas > 1) r.noise = few ? probed::too_few : r.sigma_delta > r.noise_limit ? probed::bad : probed::good;

    r.correlation_before = lag[0].correlation(), r.correlation_here = lag[1].correlation();
    r.correlation_after = lag[2].correlation();
    const bool before = r.correlation_before > r.correlation_after;
    const double other = before ? r.correlation_before : r.correlation_after;
    const double pairs = double(std::min(lag[0].of.size(), lag[2].of.size()));
    const double margin = pairs > 0 ? settings.errors * std::sqrt(2 / pairs) : 0; // of two independent correlations
    r.shifted_by = other > r.correlation_here ? (before ? -1 : 1) : 0;
    r.shift = few || pairs < double(settings.least_tokens) / 2 ? probed::too_few
              : other - r.correlation_here > margin            ? probed::bad
              : r.correlation_here - other > margin / 2        ? probed::good
                                                               : probed::unclear;
}

/// T with mean Σ_v exp(T x_v) = 1 over full lists; 0 where there is none between 1/64 and 64.
inline double temperature_of(const std::vector<std::vector<double>>& lists) {
    const auto mass = [&](double t) {
        double sum = 0;
        for (const auto& list : lists)
            for (const double x : list) sum += std::exp(t * x) / double(lists.size());
        return sum;
    };
    double low = 1.0 / 64, high = 64;
    if (lists.empty() || !(mass(low) > 1) || !(mass(high) < 1)) return 0;
    for (int i = 0; i < 100; ++i) (mass(0.5 * (low + high)) > 1 ? low : high) = 0.5 * (low + high);
    return 0.5 * (low + high);
}

inline void probe_lists(const teacher_answers& a, const probe_settings& settings, teacher_report& r) {
    const index_t k = a.list_ids.cols;
    const bool compared = !left_out(a.list_log_p);
    clustered_mean mass, complete, outside;
    double xx = 0, yy = 0, xy = 0;
    struct sums {
        double xx, yy, xy;
    };
    std::vector<sums> of;
    std::vector<std::vector<double>> full; // some full lists, to find T from
    std::vector<std::pair<index_t, index_t>> sorted;
    for (index_t l = 0; l < a.list_ids.rows; ++l) {
        sorted.clear();
        for (index_t j = 0; j < k; ++j)
            if (a.list_ids(l, j) != -1) sorted.emplace_back(a.list_ids(l, j), j);
        if (sorted.empty()) continue;
        ++r.lists;
        std::sort(sorted.begin(), sorted.end());
        double sum = 0, beyond = 0;
        index_t used = 0;
        std::vector<double> list;
        std::vector<std::pair<double, double>> both;
        for (std::size_t i = 0; i < sorted.size(); ++i) {
            const auto [id, j] = sorted[i];
            if (i > 0 && id == sorted[i - 1].first) {
                ++r.repeats;
                continue;
            }
            const double q = a.list_log_q(l, j);
            r.largest_id = std::max(r.largest_id, id);
            const bool out = id < 0 || (a.vocab > 0 && id >= a.vocab);
            if (out && r.outside_ids++ == 0) r.first_outside_list = l;
            if (is_nan(q) || (is_inf(q) && !is_neg_inf(q)) || (q < -9000 && !is_neg_inf(q))) {
                ++r.bad_entries;
                continue;
            }
            const double here = is_neg_inf(q) ? 0 : std::exp(std::min(q, 700.0));
            sum += here, beyond += out ? here : 0, ++used, list.push_back(is_neg_inf(q) ? -9000 : q);
            if (compared && is_finite(q) && is_log_prob(a.list_log_p(l, j))) both.emplace_back(a.list_log_p(l, j), q);
        }
        const bool has_tail = !a.list_log_tail.empty();
        const double tail = has_tail ? a.list_log_tail[l] : 0;
        const bool tail_good = has_tail && !is_nan(tail) && !(is_inf(tail) && !is_neg_inf(tail));
        if (has_tail && !tail_good) ++r.bad_entries;
        if (tail_good) sum += is_neg_inf(tail) ? 0 : std::exp(std::min(tail, 700.0));
        const bool is_full = a.vocab > 0 && used >= a.vocab;
        mass.add(sum), outside.add(beyond), r.most_mass = std::max(r.most_mass, sum);
        if (sum > 1 + settings.mass_tolerance && r.heavy_lists++ == 0) r.first_heavy_list = l;
        if (tail_good || is_full) complete.add(sum);
        if (is_full && !has_tail && full.size() < 64) full.push_back(list);
        if (both.size() < 2) continue;
        double mx = 0, my = 0;
        for (const auto& [x, y] : both) mx += x / double(both.size()), my += y / double(both.size());
        sums s{0, 0, 0};
        for (const auto& [x, y] : both)
            s.xx += (x - mx) * (x - mx), s.yy += (y - my) * (y - my), s.xy += (x - mx) * (y - my);
        xx += s.xx, yy += s.yy, xy += s.xy, of.push_back(s);
    }
    if (r.lists == 0) return;
    const bool few = r.lists < settings.least_lists;
    r.mean_mass = mass.mean(), r.complete_lists = index_t(complete.count), r.complete_mass = complete.mean();
    r.outside_mass = outside.mean();
    const bool uneven = r.complete_lists > 0 && std::abs(r.complete_mass - 1) > settings.mass_tolerance;
    r.mass = r.heavy_lists > 0 || (uneven && !few) ? probed::bad : few ? probed::too_few : probed::good;
    if (r.mass == probed::bad) r.unnormalised_temperature = temperature_of(full);
    if (a.vocab > 0) r.ids = r.outside_ids > 0 ? probed::bad : few ? probed::too_few : probed::good;

    r.compared_lists = index_t(of.size());
    if (!compared) return;
    if (r.compared_lists < settings.least_lists) {
        r.temperature = probed::too_few;
        return;
    }
    r.temperature = probed::unclear;
    if (!(xy > 0)) return; // no slope that a temperature could have
    const double least = xy / xx, most = yy / xy;
    double off = 0, off_inverse = 0; // of the lists' residuals about either line
    for (const sums& s : of)
        off += (s.xy - least * s.xx) * (s.xy - least * s.xx),
            off_inverse += (s.xy - s.yy / most) * (s.xy - s.yy / most);
    const double error_least = std::sqrt(off) / xx, error_most = std::sqrt(off_inverse) / yy * most * most;
    r.list_correlation = xy / std::sqrt(xx * yy), r.slope_error = error_least;
    r.estimated_temperature = 1 / std::sqrt(least * most);
    r.least_temperature = 1 / most, r.most_temperature = 1 / least;
    if (r.list_correlation * r.list_correlation < 0.9) return;
    const double tolerance = settings.temperature_tolerance;
    if (least - settings.errors * error_least > 1 + tolerance || most + settings.errors * error_most < 1 - tolerance)
        r.temperature = probed::bad;
    else if (least > 1 - 2 * tolerance && most < 1 + 2 * tolerance)
        r.temperature = probed::good;
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// Looks at what a teacher returned. Throws invalid_input, as every call does, for shapes that do not fit and settings
/// out of range; what the teacher got wrong stands in the report, which throws when asked to.
inline teacher_report probe_teacher(const teacher_answers& answers, const probe_settings& settings = {}) {
    const auto check = [](const char* name, double x) {
        if (!detail::is_finite(x) || !(x > 0)) throw invalid_input(name, "must be positive and finite");
    };
    check("settings.most_noise", settings.most_noise), check("settings.mass_tolerance", settings.mass_tolerance);
    check("settings.temperature_tolerance", settings.temperature_tolerance);
    check("settings.errors", settings.errors), check("settings.least_tokens", double(settings.least_tokens));
    check("settings.least_lists", double(settings.least_lists));
    detail::check_answers(answers);
    teacher_report r;
    detail::probe_tokens(answers, settings, r);
    detail::probe_lists(answers, settings, r);
    return r;
}

} // namespace OPD_ISA

} // namespace opd
