// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The corrections that trainers ship, by name: data of correction_rules.hpp, with the surrogate that each is of. A
// line prints what it is (`says`), and a page of docs/equivalence each system's formulas.
//
//   const correction_preset p = *choice::find(correction_presets, "srs-k3-corr");
//   p.by, p.loss, says(p.by)
//
// Bounds are in the statistic's own unit, ratios or nats, and inside the band. verl writes a k1 pair "lo_hi" that
// keeps r within [1/hi, 1/lo]; here stands what it keeps. Where a trainer leaves a bound to its user the line has that
// trainer's example.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include "opd/estimators/correction_rules.hpp"

namespace opd {

/// One trainer's correction: what `choice::find` returns for its name, and who ships it.
struct correction_preset {
    std::string_view text;   ///< name
    std::string_view source; ///< who ships it, under which setting
    correction_loss loss = correction_loss::ppo_clip;
    correction which = {}; ///< by; `choice::find` returns it
};

namespace detail::parts {

constexpr correction bypassed(rejection a = {}, rejection b = {}) { return {.active = true, .reject = {a, b}}; }
constexpr correction recomputed(correction_weight w = {}, rejection a = {}, rejection b = {}, bool shrinks = false) {
    return {.active = true, .old = old_policy::recompute, .weight = w, .reject = {a, b}, .shrinks = shrinks};
}
constexpr correction shrinking(correction c) {
    c.shrinks = true;
    return c;
}
constexpr correction_weight truncated(correction_level at, double cap, ratio_of of = ratio_of::corr) {
    return {.at = at, .of = of, .high = cap};
}
constexpr correction_weight within(correction_level at, double low, double high, beyond outside,
                                   ratio_of of = ratio_of::corr) {
    return {.at = at, .of = of, .low = low, .high = high, .outside = outside};
}
constexpr rejection most(correction_level at, statistic by, double high, ratio_of of = ratio_of::corr) {
    return {.at = at, .by = by, .of = of, .high = high};
}
constexpr rejection ratio_in(correction_level at, double low, double high, ratio_of of = ratio_of::corr) {
    return {.at = at, .of = of, .low = low, .high = high};
}
constexpr rejection veto(double least) { return {.at = correction_level::least, .low = least}; }
/// verl's bypass with REINFORCE: -A log p times the ratio of now.
constexpr correction reinforced(correction_weight w, rejection a = {}) {
    return {.active = true, .weight = w, .reject = {a}, .shrinks = true};
}
constexpr correction dppo(double low, double high, double tau) {
    correction c{.active = true};
    c.tv_low = low, c.tv_high = high, c.anchor = tau;
    return c;
}

inline constexpr auto token = correction_level::token, seq = correction_level::sum, geo = correction_level::mean;
inline constexpr double geo_low = 1 / 1.001, geo_high = 1 / 0.999;
inline constexpr auto now = ratio_of::rollout;
inline constexpr auto plain = correction_loss::score_function;

// clang-format off
inline constexpr correction_preset presets[] = {
    {"bypass", "VeXact eq. 4; no correction", {}, bypassed()},
    {"recompute", "VeXact eq. 4; no correction", {}, recomputed()},
    // VeXact appendix A.4: tau_tok 2, tau_seq 0.001 nats over the sum
    {"tis", "VeXact eq. 6", {}, recomputed(truncated(token, 2))},
    {"srs-k3-corr", "VeXact eq. 8", {}, bypassed(most(seq, statistic::k3, 0.001))},
    {"srs-k3-ppo", "VeXact eq. 9", {}, bypassed(most(seq, statistic::k3, 0.001, now))},
    {"tis-srs-k3-corr", "VeXact eq. 10", {}, recomputed(truncated(token, 2), most(seq, statistic::k3, 0.001))},
    {"tis-srs-k1-corr", "VeXact eq. 11", {}, recomputed(truncated(token, 2), most(seq, statistic::k1, 0.001))},
    // verl, RolloutCorrectionConfig
    {"decoupled_token_is", "verl", {}, recomputed(truncated(token, 2))},
    {"decoupled_seq_is", "verl", {}, recomputed(truncated(seq, 2))},
    {"decoupled_token_icepop", "verl", {}, recomputed(within(token, 0.5, 5, beyond::zero))},
    {"decoupled_seq_is_rs", "verl", {}, recomputed(truncated(seq, 2), ratio_in(seq, 0.5, 2), {}, true)},
    {"decoupled_geo_rs", "verl", {}, recomputed({}, ratio_in(geo, geo_low, geo_high), {}, true)},
    {"decoupled_geo_rs_seq_tis", "verl", {}, recomputed(truncated(seq, 2), ratio_in(geo, geo_low, geo_high), {}, true)},
    {"decoupled_geo_rs_token_tis", "verl", {},
     recomputed(truncated(token, 2), ratio_in(geo, geo_low, geo_high), {}, true)},
    {"decoupled_k3_rs", "verl", {}, recomputed({}, most(geo, statistic::k3, 0.01), {}, true)},
    {"decoupled_k3_rs_seq_tis", "verl", {}, recomputed(truncated(seq, 2), most(geo, statistic::k3, 0.01), {}, true)},
    {"decoupled_k3_rs_token_tis", "verl", {},
     recomputed(truncated(token, 2), most(geo, statistic::k3, 0.01), {}, true)},
    {"bypass_ppo_clip", "verl", {}, bypassed()},
    {"bypass_ppo_clip_geo_rs", "verl", {}, shrinking(bypassed(ratio_in(geo, geo_low, geo_high, now)))},
    {"bypass_ppo_clip_k3_rs", "verl", {}, shrinking(bypassed(most(geo, statistic::k3, 0.01, now)))},
    {"bypass_pg_is", "verl", plain, reinforced(truncated(seq, 2, now))},
    {"bypass_pg_token_icepop", "verl", plain, reinforced(within(token, 0.5, 5, beyond::zero, now))},
    {"bypass_pg_geo_rs", "verl", plain, reinforced({}, ratio_in(geo, geo_low, geo_high, now))},
    {"bypass_pg_geo_rs_seq_tis", "verl", plain,
     reinforced(truncated(seq, 2, now), ratio_in(geo, geo_low, geo_high, now))},
    {"bypass_pg_geo_rs_token_tis", "verl", plain,
     reinforced(truncated(token, 2, now), ratio_in(geo, geo_low, geo_high, now))},
    {"disabled", "verl: figures alone", {}, recomputed()},
    // TRL, vllm_importance_sampling_mode with clip_max 3 and no clip_min, its defaults
    {"trl-token-truncate", "TRL", {}, recomputed(truncated(token, 3))},
    {"trl-token-mask", "TRL", {}, recomputed(within(token, 0, 3, beyond::zero))},
    {"trl-sequence-truncate", "TRL", {}, recomputed(truncated(seq, 3))},
    {"trl-sequence-mask", "TRL, its default", {}, recomputed(within(seq, 0, 3, beyond::zero))},
    // slime: --use-tis, and the mismatch helper (mis.py)
    {"slime-tis", "slime --use-tis, tis_clip 2", {}, recomputed(truncated(token, 2))},
    {"slime-icepop", "slime icepop_function, [0.5, 2]", {}, recomputed(within(token, 0.5, 2, beyond::zero))},
    {"slime-mis-clip", "slime mis.py, token clip [0.5, 2]", {}, recomputed(within(token, 0.5, 2, beyond::clamp))},
    {"slime-mis-mask", "slime mis.py, token mask [0.5, 2]", {},
     recomputed(truncated(token, no_bound), ratio_in(token, 0.5, 2), {}, true)},
    {"slime-mis", "slime mis.yaml: token truncate 2, veto 1e-4", {},
     recomputed(truncated(token, 2), veto(1e-4), {}, true)},
    {"slime-seq-is-rs", "slime 5_seq_is_rs.yaml", {},
     recomputed(truncated(seq, 2), ratio_in(seq, 0.5, 2), veto(1e-4), true)},
    {"slime-geo-rs", "slime 6_geo_rs.yaml", {}, recomputed({}, ratio_in(geo, 0.9999, 1.0001), veto(1e-4), true)},
    // AReaL, behav_imp_weight_cap 5
    {"areal", "AReaL, no cap", {}, recomputed(truncated(token, no_bound))},
    {"areal-mask", "AReaL, cap 5, mask", {}, recomputed(within(token, 0, 5, beyond::zero))},
    {"areal-clamp", "AReaL, cap 5, clamp", {}, recomputed(truncated(token, 5))},
    // NeMo-RL, truncated_importance_sampling_type
    {"nemo-is", "NeMo-RL, no truncation", {}, recomputed(truncated(token, no_bound))},
    {"nemo-tis", "NeMo-RL, tis, 2", {}, recomputed(truncated(token, 2))},
    {"nemo-icepop", "NeMo-RL, icepop, [0.5, 5]", {}, recomputed(within(token, 0.5, 5, beyond::zero))},
    {"nemo-seq-mask-tis", "NeMo-RL, seq-mask-tis, [0.999, 1.002]", {},
     recomputed(truncated(token, no_bound), ratio_in(geo, 0.999, 1.002))},
    // ms-swift, rollout_importance_sampling_mode, threshold 2: its sequence ratio is the geometric mean
    {"swift-token-truncate", "ms-swift", {}, recomputed(truncated(token, 2))},
    {"swift-token-mask", "ms-swift", {}, recomputed(within(token, 0, 2, beyond::zero))},
    {"swift-sequence-truncate", "ms-swift", {}, recomputed(truncated(geo, 2))},
    {"swift-sequence-mask", "ms-swift", {}, recomputed(truncated(token, no_bound), ratio_in(geo, 0, 2))},
    // prime-rl, its default loss (DPPO + KL), and the token and geometric masks of the one before
    {"prime-rl", "prime-rl, dppo_mask 0.2, kl_tau 1e-3", correction_loss::unclipped_is, dppo(0.2, 0.2, 1e-3)},
    {"prime-rl-masks", "prime-rl until 2026-03: token [0.125, 8], geometric [0.1, 10]", correction_loss::unclipped_is,
     bypassed(ratio_in(token, 0.125, 8, now), ratio_in(geo, 0.1, 10, now))},
};
// clang-format on

} // namespace detail::parts

/// All presets.
inline constexpr const auto& correction_presets = detail::parts::presets;

namespace detail::parts {

inline std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", x);
    return text;
}
inline std::string name_of(ratio_of r) {
    return r == ratio_of::corr ? "r_corr" : r == ratio_of::rollout ? "r_rollout" : "r_train";
}
inline std::string statistic_text(correction_level at, statistic by, ratio_of of) {
    const std::string k = by == statistic::k1 ? "K1" : by == statistic::k2 ? "K2" : "K3", r = name_of(of);
    const std::string one = by == statistic::ratio ? r : k + "(" + r + ")";
    switch (at) {
    case correction_level::sum:
        return (by == statistic::ratio ? "prod " : "sum ") + one;
    case correction_level::mean:
        return (by == statistic::ratio ? "geomean " : "mean ") + one;
    case correction_level::greatest:
        return "max " + one;
    case correction_level::least:
        return "min " + one;
    default:
        return one;
    }
}
inline std::string band_text(const std::string& what, double low, double high, double none) {
    std::string out = low > none ? number(low) + " <= " + what : what;
    return high < no_bound ? out + " <= " + number(high) : out;
}

} // namespace detail::parts

/// One line: what a correction makes of its surrogate S. E.g. srs-k3-corr: "1[sum K3(r_corr) <= 0.001] S(r_rollout)".
inline std::string says(const correction& c) {
    using namespace detail::parts;
    using detail::no_bound;
    std::string out;
    for (const rejection& r : c.reject)
        if (r.at != correction_level::none)
            out += "1[" + band_text(statistic_text(r.at, r.by, r.of), r.low, r.high, -no_bound) + "] ";
    if (c.limits_tv()) out += "1[A > 0: p - mu <= " + number(c.tv_high) + ", else mu - p <= " + number(c.tv_low) + "] ";
    const correction_weight& w = c.weight;
    if (w.at != correction_level::none) {
        const std::string r = statistic_text(w.at, statistic::ratio, w.of);
        if (w.outside == beyond::zero)
            out += r + " 1[" + band_text(r, w.low, w.high, 0) + "] ";
        else if (w.low > 0)
            out += "clamp(" + r + ", " + number(w.low) + ", " + number(w.high) + ") ";
        else
            out += w.high < no_bound ? "min(" + r + ", " + number(w.high) + ") " : r + " ";
    }
    out += c.active && c.old == old_policy::recompute ? "S(r_train)" : "S(r_rollout)";
    if (c.anchor > 0) out += " + " + number(c.anchor) + " log^2 r_rollout";
    return c.shrinks && c.rejects() ? out + ", over what is kept" : out;
}

} // namespace opd
