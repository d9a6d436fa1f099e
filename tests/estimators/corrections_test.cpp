// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Corrections for training-inference mismatch (docs/estimators/corrections.md). The world is a tree of all sequences of
// three tokens of a vocabulary of four, each prefix with its own p, p_old, mu and advantages, so that every expectation
// is a finite sum. Each preset is compared with its source's formula, written here from that source in plain loops over
// doubles: loss, c, what is rejected, token by token (1e-12), and the mean over all draws with its gradient through
// `evaluate` (1e-10).
#include "support/drawn.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/any.hpp>
#include <opd/estimators/correction_fit.hpp>
#include <opd/estimators/correction_presets.hpp>
#include <opd/evaluate.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using vec = std::vector<double>;
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr index_t V = 4, T = 3, prefixes = 1 + V + V * V, S = V * V * V, N = S * T;

/// All sequences: rows s·T + t. A prefix is a node of the tree, the root 0.
struct tree {
    std::vector<vec> log_p, log_old, log_mu, advantage;     // (prefixes)(V)
    vec z, column_p, column_old, column_mu, column_a, draw; // (N,V), (N); draw: mu of the sequence
    std::vector<std::int32_t> ids;
    std::vector<index_t> sequence, node;

    /// `apart`: how far p_old is from mu, in nats, and p from p_old, there at most 0.4.
    tree(std::uint64_t seed, double apart) {
        numbers u(seed);
        std::vector<vec> logits;
        for (index_t n = 0; n < prefixes; ++n) {
            vec zp, zo, zm, a;
            for (index_t v = 0; v < V; ++v) {
                zm.push_back(1.2 * u.normal()), zo.push_back(zm.back() + apart * u.normal());
                zp.push_back(zo.back() + std::min(0.4, apart) * u.normal()), a.push_back(1.5 * u.normal());
            }
            logits.push_back(zp), advantage.push_back(a);
            const auto log_softmax = [](const vec& x) {
                double lse = 0;
                vec out;
                naive_backend::log_softmax(x.data(), V, 1, nullptr, &lse, out);
                return out;
            };
            log_p.push_back(log_softmax(zp)), log_old.push_back(log_softmax(zo)), log_mu.push_back(log_softmax(zm));
        }
        for_each_tuple(V, T, [&](const std::vector<std::int64_t>& tuple) {
            double log_draw = 0;
            for (index_t t = 0, at = 0; t < T; ++t) {
                const auto id = std::size_t(tuple[std::size_t(t)]), n = std::size_t(at);
                z.insert(z.end(), logits[n].begin(), logits[n].end());
                ids.push_back(std::int32_t(id)), node.push_back(at), sequence.push_back(index_t(draw.size()) / T);
                column_p.push_back(log_p[n][id]), column_old.push_back(log_old[n][id]);
                column_mu.push_back(log_mu[n][id]), column_a.push_back(advantage[n][id]), draw.push_back(0);
                log_draw += log_mu[n][id];
                at = at * V + 1 + index_t(id);
            }
            for (std::size_t i = draw.size() - T; i < draw.size(); ++i) draw[i] = std::exp(log_draw);
        });
    }
    auto cache() const {
        const auto of = [](const auto& x) { return view(x.data(), N, index_t(1)); };
        teacher::samples<std::int32_t, double> c{of(ids), of(column_mu), of(column_mu)};
        c.log_prox = of(column_old), c.advantage = of(column_a);
        return c;
    }
    auto table() const { return view(column_p.data(), N, index_t(1)); }
    /// Mean over mu of the gradient at each prefix (prefixes,V), from a gradient (N,V) of the weighted rows.
    vec by_prefix(const vec& rows) const {
        vec out(std::size_t(prefixes * V), 0.0);
        for (index_t r = 0; r < N; ++r)
            for (index_t v = 0; v < V; ++v)
                out[std::size_t(node[std::size_t(r)] * V + v)] += rows[std::size_t(r * V + v)];
        return out;
    }
};

// --- their side: one sequence in, loss, c and mask out ---------------------------------------------------------------

struct seq {
    vec p, old, mu, a; // log-probs of the tokens, advantages
    double corr(std::size_t t) const { return old[t] - mu[t]; }
    double now(std::size_t t) const { return p[t] - mu[t]; }
};
struct answer {
    vec loss, c;
    std::vector<bool> mask; // what counts in the denominator
    explicit answer(std::size_t n) : loss(n), c(n), mask(n, true) {}
    void drop() {
        for (std::size_t t = 0; t < loss.size(); ++t) loss[t] = c[t] = 0, mask[t] = false;
    }
    void scale(std::size_t t, double w) { loss[t] *= w, c[t] *= w; }
};
using theirs = std::function<answer(const seq&)>;

double sum(const vec& x) {
    double s = 0;
    for (const double v : x) s += v;
    return s;
}
vec each(const seq& s, const std::function<double(std::size_t)>& f) {
    vec out;
    for (std::size_t t = 0; t < s.p.size(); ++t) out.push_back(f(t));
    return out;
}
/// max(-r A, -clip(r) A), the same 0.2 on either side, of p over a denominator.
answer ppo(const seq& s, const vec& over_which) {
    answer out(s.p.size());
    for (std::size_t t = 0; t < s.p.size(); ++t) {
        const double r = std::exp(s.p[t] - over_which[t]), one = -r * s.a[t],
                     two = -std::min(std::max(r, 0.8), 1.2) * s.a[t];
        out.loss[t] = std::max(one, two), out.c[t] = one >= two ? one : 0;
    }
    return out;
}

/// VeXact eq. 4, 6, 8-11: `k`: 0 none, 1, 3; of r_rollout or of r_corr; TIS or not.
theirs vexact(int k, bool of_ppo_ratio, bool tis_too, bool train) {
    return [=](const seq& s) {
        answer out = ppo(s, train ? s.old : s.mu);
        double total = 0;
        for (std::size_t t = 0; t < s.p.size(); ++t) {
            const double q = std::exp(of_ppo_ratio ? s.now(t) : s.corr(t));
            total += k == 1 ? -std::log(q) : k == 3 ? (q - 1) - std::log(q) : 0;
            if (tis_too) out.scale(t, std::min(std::exp(s.corr(t)), 2.0));
        }
        if (total > 0.001) {
            out.drop();
            out.mask.assign(s.p.size(), true);
        }
        return out;
    };
}
/// verl: rollout_is {"", token, sequence} with an upper threshold or a band; rollout_rs {"", seq_sum_k1, seq_mean_k1,
/// seq_mean_k3} with "lo_hi" of k1 compared as log lo <= -log r <= log hi, or an upper bound of k3; bypass with PPO or
/// REINFORCE: then the ratio is of now.
theirs verl(const std::string& is, double low, double high, const std::string& rs, double rs_low, double rs_high,
            bool bypass = false, bool reinforce = false) {
    return [=](const seq& s) {
        const vec log_r = each(s, [&](std::size_t t) { return bypass ? s.now(t) : s.corr(t); });
        answer out = ppo(s, bypass ? s.mu : s.old);
        if (reinforce)
            for (std::size_t t = 0; t < s.p.size(); ++t) out.loss[t] = -s.a[t] * s.p[t], out.c[t] = -s.a[t];
        for (std::size_t t = 0; t < s.p.size() && !is.empty(); ++t) {
            double w = std::exp(is == "token" ? log_r[t] : sum(log_r));
            w = low > 0 ? (w >= low && w <= high ? w : 0) : std::min(w, high);
            out.scale(t, w);
        }
        const double n = double(s.p.size());
        bool kept = true;
        if (rs == "seq_sum_k1" || rs == "seq_mean_k1") {
            const double k1 = -sum(log_r) / (rs == "seq_sum_k1" ? 1 : n);
            kept = std::log(rs_low) <= k1 && k1 <= std::log(rs_high);
        } else if (rs == "seq_mean_k3") {
            kept = sum(each(s, [&](std::size_t t) { return std::exp(log_r[t]) - 1 - log_r[t]; })) / n <= rs_high;
        }
        if (!kept) out.drop();
        return out;
    };
}
/// TRL: vllm_importance_sampling_mode, clip_max; a sequence's ratio is exp of the sum.
theirs trl(bool sequence, bool mask) {
    return [=](const seq& s) {
        answer out = ppo(s, s.old);
        const vec d = each(s, [&](std::size_t t) { return s.corr(t); });
        for (std::size_t t = 0; t < s.p.size(); ++t) {
            const double r = std::exp(sequence ? sum(d) : d[t]);
            out.scale(t, mask ? (r > 3 ? 0 : r) : std::min(r, 3.0));
        }
        return out;
    };
}
/// slime's mis.py: level and mode of the weight, level and bounds of rejection, veto.
theirs slime(const std::string& level, const std::string& mode, double low, double high, const std::string& rs = "",
             double rs_low = 0, double rs_high = 0, double veto_below = 0) {
    return [=](const seq& s) {
        answer out = ppo(s, s.old);
        const vec d = each(s, [&](std::size_t t) { return s.corr(t); });
        const auto at = [&](const std::string& l, std::size_t t) {
            return std::exp(l == "token" ? d[t] : l == "sequence" ? sum(d) : sum(d) / double(d.size()));
        };
        for (std::size_t t = 0; t < s.p.size(); ++t) {
            bool kept = true;
            if (!level.empty()) {
                double w = at(level, t);
                if (mode == "truncate") w = std::min(w, high);
                if (mode == "clip") w = std::min(std::max(w, low), high);
                if (mode == "icepop") w = w >= low && w <= high ? w : 0;
                if (mode == "mask") kept = w >= low && w <= high;
                out.scale(t, w);
            }
            if (!rs.empty()) kept = kept && at(rs, t) >= rs_low && at(rs, t) <= rs_high;
            for (const double x : d) kept = kept && !(x < std::log(veto_below));
            if (!kept) out.scale(t, 0), out.mask[t] = false;
        }
        return out;
    };
}
/// NeMo-RL: truncated_importance_sampling_type with [min, ratio]; seq-mask-tis leaves the token's weight untruncated.
theirs nemo(const std::string& type, double low, double high) {
    return [=](const seq& s) {
        answer out = ppo(s, s.old);
        const vec d = each(s, [&](std::size_t t) { return s.corr(t); });
        const double geomean = std::exp(sum(d) / double(d.size()));
        for (std::size_t t = 0; t < s.p.size(); ++t) {
            double w = std::exp(d[t]);
            if (type == "tis") w = std::min(std::max(w, low), high);
            if (type == "icepop") w = w >= low && w <= high ? w : 0;
            if (type == "seq-mask-tis") w = geomean >= low && geomean <= high ? w : 0;
            out.scale(t, w);
        }
        return out;
    };
}
/// ms-swift: rollout_importance_sampling_mode, threshold 2; a sequence's ratio is the geometric mean, and its mask
/// multiplies the tokens' own ratios.
theirs swift(bool sequence, bool mask) {
    return [=](const seq& s) {
        answer out = ppo(s, s.old);
        const vec d = each(s, [&](std::size_t t) { return s.corr(t); });
        const double whole = std::exp(sum(d) / double(d.size()));
        for (std::size_t t = 0; t < s.p.size(); ++t) {
            const double r = std::exp(d[t]), by = sequence ? whole : r;
            out.scale(t, mask ? (by <= 2 ? r : 0) : std::min(by, 2.0));
        }
        return out;
    };
}
/// AReaL: the weight p_prox/mu, and what becomes of it above the cap.
theirs areal(double cap, bool mask) {
    return [=](const seq& s) {
        answer out = ppo(s, s.old);
        for (std::size_t t = 0; t < s.p.size(); ++t) {
            const double w = std::exp(s.corr(t));
            out.scale(t, w <= cap ? w : mask ? 0 : cap);
        }
        return out;
    };
}
answer prime_rl(const seq& s) {
    answer out(s.p.size());
    for (std::size_t t = 0; t < s.p.size(); ++t) {
        const double apart = std::exp(s.p[t]) - std::exp(s.mu[t]), r = std::exp(s.now(t));
        const bool dropped = s.a[t] > 0 ? apart > 0.2 : apart < -0.2;
        out.loss[t] = (dropped ? 0 : -s.a[t] * r) + 1e-3 * s.now(t) * s.now(t);
        out.c[t] = (dropped ? 0 : -s.a[t] * r) + 2e-3 * s.now(t);
    }
    return out;
}
/// Its loss before: sg(ratio A) log p has the gradient of -ratio A; the value here is the latter's.
answer prime_rl_masks(const seq& s) {
    answer out(s.p.size());
    const double geomean = std::exp(sum(each(s, [&](std::size_t t) { return s.now(t); })) / double(s.p.size()));
    for (std::size_t t = 0; t < s.p.size(); ++t) {
        const double r = std::exp(s.now(t));
        const bool masked = r < 0.125 || r > 8 || geomean < 0.1 || geomean > 10;
        out.loss[t] = out.c[t] = masked ? 0 : -s.a[t] * r;
    }
    return out;
}

const std::map<std::string, theirs>& formulas() {
    static const std::map<std::string, theirs> all = {
        {"bypass", vexact(0, false, false, false)},
        {"recompute", vexact(0, false, false, true)},
        {"tis", vexact(0, false, true, true)},
        {"srs-k3-corr", vexact(3, false, false, false)},
        {"srs-k3-ppo", vexact(3, true, false, false)},
        {"tis-srs-k3-corr", vexact(3, false, true, true)},
        {"tis-srs-k1-corr", vexact(1, false, true, true)},
        {"decoupled_token_is", verl("token", 0, 2, "", 0, 0)},
        {"decoupled_seq_is", verl("sequence", 0, 2, "", 0, 0)},
        {"decoupled_token_icepop", verl("token", 0.5, 5, "", 0, 0)},
        {"decoupled_seq_is_rs", verl("sequence", 0, 2, "seq_sum_k1", 0.5, 2)},
        {"decoupled_geo_rs", verl("", 0, 0, "seq_mean_k1", 0.999, 1.001)},
        {"decoupled_geo_rs_seq_tis", verl("sequence", 0, 2, "seq_mean_k1", 0.999, 1.001)},
        {"decoupled_geo_rs_token_tis", verl("token", 0, 2, "seq_mean_k1", 0.999, 1.001)},
        {"decoupled_k3_rs", verl("", 0, 0, "seq_mean_k3", 0, 0.01)},
        {"decoupled_k3_rs_seq_tis", verl("sequence", 0, 2, "seq_mean_k3", 0, 0.01)},
        {"decoupled_k3_rs_token_tis", verl("token", 0, 2, "seq_mean_k3", 0, 0.01)},
        {"bypass_ppo_clip", verl("", 0, 0, "", 0, 0, true)},
        {"bypass_ppo_clip_geo_rs", verl("", 0, 0, "seq_mean_k1", 0.999, 1.001, true)},
        {"bypass_ppo_clip_k3_rs", verl("", 0, 0, "seq_mean_k3", 0, 0.01, true)},
        {"bypass_pg_is", verl("sequence", 0, 2, "", 0, 0, true, true)},
        {"bypass_pg_token_icepop", verl("token", 0.5, 5, "", 0, 0, true, true)},
        {"bypass_pg_geo_rs", verl("", 0, 0, "seq_mean_k1", 0.999, 1.001, true, true)},
        {"bypass_pg_geo_rs_seq_tis", verl("sequence", 0, 2, "seq_mean_k1", 0.999, 1.001, true, true)},
        {"bypass_pg_geo_rs_token_tis", verl("token", 0, 2, "seq_mean_k1", 0.999, 1.001, true, true)},
        {"disabled", verl("", 0, 0, "", 0, 0)},
        {"trl-token-truncate", trl(false, false)},
        {"trl-token-mask", trl(false, true)},
        {"trl-sequence-truncate", trl(true, false)},
        {"trl-sequence-mask", trl(true, true)},
        {"slime-tis", slime("token", "truncate", 0, 2)},
        {"slime-icepop", slime("token", "icepop", 0.5, 2)},
        {"slime-mis-clip", slime("token", "clip", 0.5, 2)},
        {"slime-mis-mask", slime("token", "mask", 0.5, 2)},
        {"slime-mis", slime("token", "truncate", 0.5, 2, "", 0, 0, 1e-4)},
        {"slime-seq-is-rs", slime("sequence", "truncate", 0.5, 2, "sequence", 0.5, 2, 1e-4)},
        {"slime-geo-rs", slime("", "", 0, 0, "geometric", 0.9999, 1.0001, 1e-4)},
        {"areal", areal(infinity, false)},
        {"areal-mask", areal(5, true)},
        {"areal-clamp", areal(5, false)},
        {"nemo-is", nemo("", 0, 0)},
        {"nemo-tis", nemo("tis", 0, 2)},
        {"nemo-icepop", nemo("icepop", 0.5, 5)},
        {"nemo-seq-mask-tis", nemo("seq-mask-tis", 0.999, 1.002)},
        {"swift-token-truncate", swift(false, false)},
        {"swift-token-mask", swift(false, true)},
        {"swift-sequence-truncate", swift(true, false)},
        {"swift-sequence-mask", swift(true, true)},
        {"prime-rl", prime_rl},
        {"prime-rl-masks", prime_rl_masks},
    };
    return all;
}

// --- our side --------------------------------------------------------------------------------------------------------

any_surrogate of_preset(const correction_preset& p) {
    any_surrogate s;
    s.which = p.loss == correction_loss::ppo_clip         ? choice::surrogate::ppo_clip
              : p.loss == correction_loss::score_function ? choice::surrogate::score_function
                                                          : choice::surrogate::unclipped_is;
    s.correct = p.which, s.correct.passed = true;
    return s;
}
any_sampled estimator(const any_surrogate& s) {
    any_sampled e;
    e.of.which = choice::objective::outside, e.surrogate = s, e.baseline.which = choice::baseline::none;
    e.accept_bias = true;
    return e;
}
struct frozen {
    std::vector<std::uint8_t> keep = std::vector<std::uint8_t>(std::size_t(N), 9);
    vec weight = vec(std::size_t(N), 9.0);
    correction_selection chosen;
};
/// One fit over whole batch, added in parts: the rows below `cut`, then the others, of another rank.
frozen pass(const tree& w, const correction& c, index_t cut = 0) {
    frozen out;
    std::vector<std::uint8_t> first(std::size_t(N), 0), rest(std::size_t(N), 0);
    for (index_t r = 0; r < N; ++r) (r % 5 < cut ? first : rest)[std::size_t(r)] = 1;
    correction_fit here{c}, there{c};
    here.add(w.table(), w.cache(), w.sequence, rest);
    there.add(w.table(), w.cache(), w.sequence, first);
    here.merge(there);
    out.chosen = here.freeze();
    out.chosen.apply(w.table(), w.cache(), w.sequence, {}, view(out.keep.data(), N, 1), view(out.weight.data(), N, 1));
    return out;
}
struct step {
    double loss;
    vec dz;
};
step evaluated(const tree& w, const any_surrogate& s, const frozen* f, int threads = 1) {
    step out{0, vec(std::size_t(N * V), 777.0)};
    env e{.reduction = reduce::sum, .weights = w.draw};
    if (f != nullptr) e.frozen.keep = view(f->keep.data(), N, 1), e.frozen.weight = view(f->weight.data(), N, 1);
    cpu_backend backend{.threads = threads};
    const student::logits<double> z{view(w.z.data(), N, V), view(out.dz.data(), N, V)};
    out.loss = evaluate(backend, z, w.cache(), estimator(s), e).loss;
    return out;
}
token_in token_of(const tree& w, std::size_t r) {
    return {.log_p = w.column_p[r],
            .log_mu = w.column_mu[r],
            .log_prox = w.column_old[r],
            .log_ref = 0,
            .log_q = 0,
            .log_ratio = w.column_p[r] - w.column_mu[r],
            .advantage = w.column_a[r],
            .age = 0};
}
bool near(double got, double want, double tolerance) {
    return std::abs(got - want) <= tolerance * std::max(1.0, std::abs(want));
}
std::uint64_t bits(double x) {
    std::uint64_t b;
    std::memcpy(&b, &x, sizeof b);
    return b;
}

} // namespace

TEST_CASE("every preset is its source's formula, token by token and in the mean over all draws") {
    std::size_t count = 0;
    for (const correction_preset& p : correction_presets) {
        const std::string name(p.text);
        CAPTURE(name);
        REQUIRE(formulas().count(name) == 1);
        ++count;
        int whole = 0, cut = 0; // tokens with a gradient, and those that lost something
        for (const double apart : {0.002, 0.05, 0.9})
            for (std::uint64_t seed = 1; seed <= 2; ++seed) {
                CAPTURE(apart);
                CAPTURE(seed);
                const tree w(seed, apart);
                const any_surrogate ours = of_preset(p);
                const frozen f = pass(w, p.which);
                double want_loss = 0;
                vec want_dz(std::size_t(N * V), 0.0);
                index_t masked = 0;
                for (index_t s = 0; s < S; ++s) {
                    seq one;
                    for (index_t t = 0; t < T; ++t) {
                        const auto r = std::size_t(s * T + t);
                        one.p.push_back(w.column_p[r]), one.old.push_back(w.column_old[r]);
                        one.mu.push_back(w.column_mu[r]), one.a.push_back(w.column_a[r]);
                    }
                    const answer want = formulas().at(name)(one);
                    for (index_t t = 0; t < T; ++t) {
                        const auto r = std::size_t(s * T + t), i = std::size_t(t);
                        const token_out got = ours(token_of(w, r));
                        const double weight = f.keep[r] ? f.weight[r] : 0;
                        CHECK(near(weight * got.loss, want.loss[i], 1e-12));
                        CHECK(near(weight * got.c, want.c[i], 1e-12));
                        if (p.which.shrinks) CHECK(bool(f.keep[r]) == want.mask[i]);
                        masked += !want.mask[i];
                        want.c[i] == 0 ? ++cut : ++whole;
                        want_loss += w.draw[r] * want.loss[i];
                        for (index_t v = 0; v < V; ++v)
                            want_dz[r * V + std::size_t(v)] =
                                w.draw[r] * want.c[i] *
                                (double(v == w.ids[r]) - std::exp(w.log_p[std::size_t(w.node[r])][std::size_t(v)]));
                    }
                }
                if (p.which.shrinks) CHECK(f.chosen.kept_tokens == N - masked);
                const step got = evaluated(w, ours, p.which.needs_pass() ? &f : nullptr);
                CHECK(near(got.loss, want_loss, 1e-10));
                CHECK(distance(w.by_prefix(got.dz), w.by_prefix(want_dz)) <= 1e-10);
            }
        CHECK(whole > 0);
        if (p.loss == correction_loss::ppo_clip || p.which.rejects()) CHECK(cut > 0);
    }
    CHECK(count == formulas().size());
}

TEST_CASE("what a correction descends is what its traits say, by enumeration") {
    // unclipped and with no bound that binds, so that the mean is exact where the measure is right
    const tree w(7, 0.6);
    const auto gradient = [&](correction c, choice::surrogate of) {
        any_surrogate s;
        s.which = of, s.correct = c, s.correct.passed = true;
        const frozen f = pass(w, c);
        return w.by_prefix(evaluated(w, s, c.needs_pass() ? &f : nullptr).dz);
    };
    // Σ over prefixes that mu visits, or p: -Σ_v p A ∇log p at each
    const auto wanted = [&](bool own_prefixes) {
        vec out(std::size_t(prefixes * V), 0.0), reach(std::size_t(prefixes), 0.0);
        reach[0] = 1;
        for (index_t n = 0; n < prefixes; ++n) {
            const auto i = std::size_t(n);
            double mean = 0;
            for (std::size_t v = 0; v < V; ++v) mean += std::exp(w.log_p[i][v]) * w.advantage[i][v];
            for (std::size_t v = 0; v < V; ++v) {
                const double p = std::exp(w.log_p[i][v]);
                out[i * V + v] = -reach[i] * p * (w.advantage[i][v] - mean);
                if (const std::size_t child = i * V + 1 + v; child < std::size_t(prefixes))
                    reach[child] = reach[i] * (own_prefixes ? p : std::exp(w.log_mu[i][v]));
            }
        }
        return out;
    };
    const correction_weight corr{.at = correction_level::token},
        now{.at = correction_level::token, .of = ratio_of::rollout},
        whole{.at = correction_level::sum, .of = ratio_of::rollout};
    const auto bypassed = [](correction_weight x) { return correction{.active = true, .weight = x}; };
    const auto recomputed = [](correction_weight x) {
        return correction{.active = true, .old = old_policy::recompute, .weight = x};
    };
    struct line {
        correction c;
        choice::surrogate of;
        bool right, own;
    };
    using choice::surrogate;
    const line lines[] = {
        {bypassed({}), surrogate::unclipped_is, true, false},
        {recomputed({}), surrogate::unclipped_is, false, false},
        {recomputed(corr), surrogate::unclipped_is, true, false},
        {bypassed(corr), surrogate::unclipped_is, false, false},
        {recomputed(now), surrogate::unclipped_is, false, false},
        {bypassed(now), surrogate::unclipped_is, false, false},
        {bypassed(now), surrogate::score_function, true, false},
        {bypassed(whole), surrogate::score_function, true, true},
        {bypassed({}), surrogate::score_function, false, false},
        {bypassed(corr), surrogate::score_function, false, false},
    };
    for (const line& l : lines) {
        const std::string what = says(l.c);
        CAPTURE(what);
        any_surrogate s;
        s.which = l.of, s.correct = l.c;
        CHECK((s.traits_under(law::stale).descends != descent::other) == l.right);
        const double off = distance(gradient(l.c, l.of), wanted(l.own));
        if (l.right)
            CHECK(off <= 1e-10);
        else
            CHECK(off > 1e-3);
    }
    // and of the static wrappers
    static_assert(traits_of<bypass<>>().descends == descent::divergence);
    static_assert(traits_of<recompute<>>().descends == descent::other);
    static_assert(traits_of<recompute<>>(law::on_policy).descends == descent::divergence);
    static_assert(traits_of<tis<>>().descends == descent::divergence &&
                  traits_of<mis<>>().descends == descent::divergence);
    static_assert(traits_of<tis<bypass<>>>().descends == descent::other);
    static_assert(traits_of<tis<tis<>>>().descends == descent::other);
    static_assert(traits_of<banded<k3>>().descends == descent::other);
    static_assert(traits_of<banded<k3, bypass<>>>().descends == descent::divergence);
    static_assert(traits_of<tis<banded<k3>>>().descends == descent::divergence);
    static_assert(traits_of<within_tv<>>().descends == descent::divergence);
    static_assert(traits_of<anchored<>>().descends == descent::other);
}

TEST_CASE("the wrappers are the rules, and TIS is decoupled PPO, bit for bit") {
    for (const double apart : {0.05, 0.9, 40.0}) {
        const tree w(11, apart);
        const correction band{.active = true,
                              .old = old_policy::recompute,
                              .reject = {{.at = correction_level::token, .by = statistic::k3, .high = 0.01}}};
        for (std::size_t r = 0; r < std::size_t(N); ++r) {
            const token_in x = token_of(w, r);
            const auto same = [](const token_out& a, const token_out& b) {
                CHECK(bits(a.loss) == bits(b.loss));
                CHECK(bits(a.c) == bits(b.c));
                CHECK(a.flags == b.flags);
            };
            same(tis{2, 0, recompute{ppo_clip{}}}(x), decoupled_ppo{.cap = 2}(x));
            same(mis{0, 5, recompute{ppo_clip{}}}(x).c == 0 ? token_out{0, 0} : mis{0, 5, recompute{ppo_clip{}}}(x),
                 mis{0, 5, recompute{ppo_clip{}}}(x).c == 0 ? token_out{0, 0}
                                                            : decoupled_ppo{.cap = 5, .over = over_cap::mask}(x));
            same(bypass{ppo_clip{}}(x), ppo_clip{}(x));
            const auto rule = [&](const char* name) {
                return of_preset({name, "", correction_loss::ppo_clip, *choice::find(correction_presets, name)})(x);
            };
            same(tis{2, 0, recompute{ppo_clip{}}}(x), rule("tis"));
            same(mis{0.5, 5, recompute{ppo_clip{}}}(x), rule("nemo-icepop"));
            same(tis{2, 0.5, recompute{ppo_clip{}}}(x), rule("slime-mis-clip"));
            same(recompute{ppo_clip{}}(x), rule("recompute"));
            same(banded<k3>{0, 0.01}(x), corrected{band, ppo_clip{}}(x));
            same(anchored{1e-3, within_tv{0.2, 0.2, unclipped_is{}}}(x),
                 corrected{*choice::find(correction_presets, "prime-rl"), unclipped_is{}}(x));
        }
    }
}

TEST_CASE("no cut into micro-batches, ranks or threads changes a bit") {
    const tree w(5, 0.3);
    for (const correction_preset& p : correction_presets) {
        const std::string name(p.text);
        CAPTURE(name);
        const frozen whole = pass(w, p.which, 0);
        for (index_t cut = 1; cut < 5; ++cut) { // rows of one sequence on two ranks
            const frozen parts = pass(w, p.which, cut);
            CHECK(parts.keep == whole.keep);
            for (std::size_t r = 0; r < std::size_t(N); ++r) CHECK(bits(parts.weight[r]) == bits(whole.weight[r]));
            CHECK(parts.chosen.kept_tokens == whole.chosen.kept_tokens);
            CHECK(parts.chosen.rejected_sequences == whole.chosen.rejected_sequences);
        }
        const frozen* f = p.which.needs_pass() ? &whole : nullptr;
        const step one = evaluated(w, of_preset(p), f), three = evaluated(w, of_preset(p), f, 3);
        CHECK(bits(one.loss) == bits(three.loss));
        CHECK(std::memcmp(one.dz.data(), three.dz.data(), one.dz.size() * sizeof(double)) == 0);
    }
    // a whole batch against its halves: apply of a part
    const correction c = *choice::find(correction_presets, "tis-srs-k3-corr");
    const frozen all = pass(w, c);
    const index_t half = N / 2;
    teacher::samples<std::int32_t, double> part = w.cache();
    const auto rows = [&](const auto& x) { return view(x.data() + half, N - half, index_t(1)); };
    part.ids = rows(w.ids), part.log_mu = part.log_q = rows(w.column_mu), part.log_prox = rows(w.column_old);
    part.advantage = rows(w.column_a);
    std::vector<std::uint8_t> keep(std::size_t(N - half));
    vec weight(keep.size());
    all.chosen.apply(rows(w.column_p), part, std::span(w.sequence).subspan(std::size_t(half)), {},
                     view(keep.data(), N - half, 1), view(weight.data(), N - half, 1));
    CHECK(std::equal(keep.begin(), keep.end(), all.keep.begin() + half));
}

TEST_CASE("each statistic of a sequence against its formula, whatever the order of its tokens") {
    using enum correction_level;
    numbers u(20250601);
    for (int round = 0; round < 300; ++round) {
        const std::size_t n = 1 + std::size_t(u.below(24));
        std::vector<correction_fit::entry> tokens;
        for (std::size_t i = 0; i < n; ++i)
            tokens.push_back({0, -1 + 0.5 * u.normal(), -1 + 0.5 * u.normal(), -1 + 0.5 * u.normal()});
        std::vector<correction_fit::entry> turned(tokens.rbegin(), tokens.rend());
        std::rotate(turned.begin(), turned.begin() + std::ptrdiff_t(n / 3), turned.end());
        const auto verdict = [](const correction& c, const std::vector<correction_fit::entry>& of) {
            correction_fit fit{c};
            fit.tokens = of;
            return fit.freeze().of.at(0);
        };
        for (const ratio_of of : {ratio_of::corr, ratio_of::rollout, ratio_of::train}) {
            CAPTURE(int(of));
            std::vector<long double> log_r;
            for (const auto& t : tokens)
                log_r.push_back(of == ratio_of::corr      ? (long double)t.log_prox - t.log_mu
                                : of == ratio_of::rollout ? (long double)t.log_p - t.log_mu
                                                          : (long double)t.log_p - t.log_prox);
            for (const statistic by : {statistic::ratio, statistic::k1, statistic::k2, statistic::k3})
                for (const correction_level at : {sum, mean, greatest, least}) {
                    CAPTURE(int(by));
                    CAPTURE(int(at));
                    long double total = 0, most = -1e9L, fewest = 1e9L;
                    for (const long double l : log_r) {
                        const long double x = by == statistic::ratio ? l
                                              : by == statistic::k1  ? -l
                                              : by == statistic::k2  ? l * l / 2
                                                                     : std::expm1(l) - l;
                        total += x, most = std::max(most, x), fewest = std::min(fewest, x);
                    }
                    long double k = at == sum        ? total
                                    : at == mean     ? total / (long double)(n)
                                    : at == greatest ? most
                                                     : fewest;
                    if (by == statistic::ratio) k = std::exp(k);
                    const double near_by = 1e-9 * (1 + std::abs(double(k)));
                    correction c{.active = true};
                    const auto kept = [&](double low, double high) {
                        c.reject[1] = {.at = at, .by = by, .of = of, .low = low, .high = high};
                        const auto v = verdict(c, tokens);
                        CHECK(v.kept_tokens == (v.keep ? index_t(n) : 0));
                        CHECK(verdict(c, turned).keep == v.keep);
                        return v.keep;
                    };
                    CHECK(kept(double(k) - near_by, double(k) + near_by));
                    CHECK(!kept(double(k) + near_by, 1e9));
                    CHECK(!kept(-1e9, double(k) - near_by));
                    if (by != statistic::ratio || at == greatest || at == least) continue;
                    c.reject[1] = {};
                    c.weight = {.at = at, .of = of};
                    const double w = verdict(c, tokens).weight;
                    CHECK(near(w, double(k), 1e-12));
                    CHECK(bits(verdict(c, turned).weight) == bits(w));
                    c.weight.low = double(k) + near_by;
                    CHECK(verdict(c, tokens).weight == c.weight.low);
                    c.weight.outside = beyond::zero;
                    CHECK(verdict(c, tokens).weight == 0);
                }
        }
    }
}

TEST_CASE("a surrogate under recompute sees p_old in mu's place") {
    const auto read = [](const token_in& x) { return token_out{x.log_mu, x.log_ratio, 0}; };
    const token_in x{.log_p = -1,
                     .log_mu = -3,
                     .log_prox = -1.5,
                     .log_ref = 0,
                     .log_q = 0,
                     .log_ratio = 2,
                     .advantage = 0,
                     .age = 0};
    const token_out seen = recompute{read}(x);
    CHECK(seen.loss == -1.5);
    CHECK(seen.c == 0.5);
}

TEST_CASE("what does not fit is refused, by name") {
    const tree w(3, 0.2);
    const correction srs = *choice::find(correction_presets, "srs-k3-corr");
    CHECK_THROWS_WITH_AS((corrected{srs, ppo_clip{}}.validate()), doctest::Contains("correction_fit"), invalid_input);
    CHECK_THROWS_WITH_AS((corrected{*choice::find(correction_presets, "recompute"), ppo_clip{}}.validate()),
                         doctest::Contains("accept_bias"), invalid_input);
    CHECK_NOTHROW((corrected{*choice::find(correction_presets, "recompute"), ppo_clip{}, true}.validate()));
    CHECK_NOTHROW((corrected{*choice::find(correction_presets, "tis"), ppo_clip{}}.validate()));
    CHECK_THROWS_WITH_AS((tis{0.5, 2, recompute{ppo_clip{}}}.validate()), doctest::Contains("tis"), invalid_input);
    CHECK_THROWS_WITH_AS((mis{-1, 2, recompute{ppo_clip{}}}.validate()), doctest::Contains("mis"), invalid_input);
    CHECK_THROWS_AS((anchored{-1, unclipped_is{}}.validate()), invalid_input);
    correction none = srs;
    none.weight = {.at = correction_level::least};
    CHECK_THROWS_WITH_AS(correction_fit{none}.freeze(), doctest::Contains("weight"), invalid_input);

    correction_fit fit{srs};
    std::vector<index_t> bad = w.sequence;
    bad[3] = -1;
    CHECK_THROWS_WITH_AS(fit.add(w.table(), w.cache(), bad), doctest::Contains("row 3"), invalid_input);
    bad.pop_back();
    CHECK_THROWS_WITH_AS(fit.add(w.table(), w.cache(), bad), doctest::Contains("sequence"), invalid_input);
    CHECK(fit.tokens.empty());
    frozen out;
    CHECK_THROWS_WITH_AS(fit.freeze().apply(w.table(), w.cache(), w.sequence, {}, view(out.keep.data(), N, 1),
                                            view(out.weight.data(), N, 1)),
                         doctest::Contains("not added"), invalid_input);
    CHECK(out.keep[0] == 9);
    // two draws a row are no sequence
    const teacher::samples<std::int32_t, double> two{view(w.ids.data(), N / 2, 2), view(w.column_mu.data(), N / 2, 2),
                                                     view(w.column_mu.data(), N / 2, 2)};
    const std::vector<index_t> own(std::size_t(N / 2), 0);
    CHECK_THROWS_WITH_AS(fit.add(view(w.column_p.data(), N / 2, 2), two, own), doctest::Contains("draws a row"),
                         invalid_input);
    // a call whose cache lacks log_prox
    auto without = w.cache();
    without.log_prox = {};
    vec dz(std::size_t(N * V), 777.0);
    cpu_backend backend;
    any_surrogate s = of_preset({"", "", correction_loss::ppo_clip, *choice::find(correction_presets, "tis")});
    CHECK_THROWS_AS(evaluate(backend, student::logits<double>{view(w.z.data(), N, V), view(dz.data(), N, V)}, without,
                             estimator(s), env{}),
                    invalid_input);
    CHECK(dz[0] == 777);
}

TEST_CASE("a preset prints what it is") {
    const auto text = [](const char* name) { return says(*choice::find(correction_presets, name)); };
    CHECK(text("srs-k3-corr") == "1[sum K3(r_corr) <= 0.001] S(r_rollout)");
    CHECK(text("srs-k3-ppo") == "1[sum K3(r_rollout) <= 0.001] S(r_rollout)");
    CHECK(text("tis-srs-k1-corr") == "1[sum K1(r_corr) <= 0.001] min(r_corr, 2) S(r_train)");
    CHECK(text("nemo-seq-mask-tis") == "1[0.999 <= geomean r_corr <= 1.002] r_corr S(r_train)");
    CHECK(text("trl-sequence-mask") == "prod r_corr 1[prod r_corr <= 3] S(r_train)");
    CHECK(text("slime-mis") == "1[0.0001 <= min r_corr] min(r_corr, 2) S(r_train), over what is kept");
    CHECK(text("prime-rl") == "1[A > 0: p - mu <= 0.2, else mu - p <= 0.2] S(r_rollout) + 0.001 log^2 r_rollout");
    for (const correction_preset& p : correction_presets) {
        int same = 0;
        for (const correction_preset& o : correction_presets) same += o.text == p.text;
        CHECK(same == 1);
    }
    CHECK(!choice::find(correction_presets, "no such"));
}

TEST_CASE("the pages name the presets of their system, and no other") {
    const std::map<std::string, std::vector<std::string>> pages = {
        {"vexact", {"bypass", "recompute", "tis", "srs-", "tis-srs-"}},
        {"nemo-rl", {"nemo-"}},
        {"slime", {"slime-"}},
        {"ms-swift", {"swift-"}},
        {"prime-rl", {"prime-rl"}}};
    for (const auto& [page, starts] : pages) {
        CAPTURE(page);
        std::set<std::string> named, shipped;
        std::string path = OPD_TEST_SOURCE_DIR;
        path.append("/docs/equivalence/").append(page).append(".md"); // g++ 12 warns of + here
        std::ifstream in(path);
        for (std::string line; std::getline(in, line);) {
            if (line.rfind("| ", 0) != 0 || line.rfind("| theirs", 0) == 0) continue;
            std::vector<std::string> cells;
            std::istringstream cut(line);
            for (std::string cell; std::getline(cut, cell, '|');) cells.push_back(cell);
            REQUIRE(cells.size() == 5);
            const std::size_t begin = cells[3].find('`'), end = cells[3].rfind('`');
            REQUIRE(begin != end);
            named.insert(cells[3].substr(begin + 1, end - begin - 1));
        }
        for (const correction_preset& p : correction_presets)
            for (const std::string& start : starts)
                if (start.back() == '-' || page == "prime-rl" ? p.text.rfind(start, 0) == 0 : p.text == start)
                    shipped.insert(std::string(p.text));
        CHECK(named == shipped);
        for (const std::string& name : named) CHECK(formulas().count(name) == 1); // compared above
    }
}

TEST_CASE("as docs/estimators/corrections.md has it") {
    const tree w(4, 0.1);
    vec dz(std::size_t(N * V)), weight(std::size_t(N), 0.0);
    std::vector<std::uint8_t> keep(std::size_t(N), 0);
    const vec& log_old = w.column_old;
    const auto table = w.table();
    const auto& sequence = w.sequence;
    cpu_backend backend;
    const student::logits<double> student{view(w.z.data(), N, V), view(dz.data(), N, V)};
    auto drawn = w.cache();
    drawn.log_q = view(w.column_p.data(), N, index_t(1));

    const opd::tis by_tis{2, 0, opd::recompute{opd::ppo_clip{}}}; // VeXact eq. 6
    const opd::mis icepop{0.5, 5, opd::recompute{opd::ppo_clip{}}};
    const opd::banded<opd::k3, opd::ppo_clip> rejected{0, 0.01}; // tokens, by K3 of r_corr

    drawn.log_prox = view(log_old.data(), N, 1); // the trainer's own, beside log_mu
    auto a = opd::evaluate(backend, student, drawn, opd::mc{.surrogate = by_tis});

    opd::correction rules = *opd::choice::find(opd::correction_presets, "tis-srs-k3-corr");
    opd::correction_fit fit{rules};
    fit.add(table, drawn, sequence); // once a micro-batch; fit.merge(other) over ranks
    const opd::correction_selection chosen = fit.freeze();
    chosen.apply(table, drawn, sequence, {}, view(keep.data(), N, 1), view(weight.data(), N, 1)); // once a micro-batch
    opd::env env;
    env.frozen.keep = view(keep.data(), N, 1), env.frozen.weight = view(weight.data(), N, 1);
    rules.passed = true;
    auto d = opd::evaluate(backend, student, drawn, opd::mc{.surrogate = opd::corrected{rules, opd::ppo_clip{}}}, env);

    for (const result& r : {a, d}) CHECK(r.diagnostics.bad_rows == 0);
    const token_in x = token_of(w, 0);
    CHECK(icepop(x).c == by_tis(x).c); // no bound binds here
    CHECK(rejected(x).c == (k3::value(x.log_prox - x.log_mu) <= 0.01 ? ppo_clip{}(x).c : 0));
    CHECK(d.diagnostics.dropped == chosen.rejected_tokens);
}
