// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "cell.hpp"

#include <fmt/format.h>

namespace staleness_study {

std::vector<contender> contenders(int budget) {
    const auto mc = [](int m, arguments more = {}) {
        arguments a = {"--estimator=mc", fmt::format("--m={}", m), "--baseline=none"};
        a.insert(a.end(), more.begin(), more.end());
        return a;
    };
    const auto of = [](const char* option, int n) { return fmt::format("--{}={}", option, n); };
    const std::string b = fmt::format("{}", budget), half = fmt::format("{}", budget / 2);
    const arguments fresh = {"--surrogate=score_function", "--accept-bias"}, old = {"--shape=old", "--accept-bias"},
                    clip = {"--surrogate=ppo_clip"};
    const auto both = [](arguments x, const arguments& y) {
        x.insert(x.end(), y.begin(), y.end());
        return x;
    };
    std::vector<contender> r = {
        {"hidden", "reverse KL, hidden states", "divergences", {"--teacher-cache=hidden"}},
        {"dense", "reverse KL, logits", "divergences", {}, twist::none, false, 1},
        {"hidden_forward",
         "forward KL, hidden states",
         "divergences",
         {"--estimator=forward_kl", "--teacher-cache=hidden"}},
        {"teacher_forward",
         "forward KL, teacher's top " + b,
         "divergences",
         {"--estimator=threshold", of("budget", budget), "--shape=forward_kl", "--baseline=none"},
         twist::teacher_forward},

        {"mc1", "A_theta, no clip (MC-1)", "surrogates", mc(1)},
        {"mc1_theta_clip", "A_theta, clip .2", "surrogates", mc(1, clip)},
        {"mc1_old", "A_old, no clip", "surrogates", mc(1, old)},
        {"mc1_old_clip", "A_old, clip .2 (PPO)", "surrogates", mc(1, both(old, clip))},
        {"mc1_decoupled", "A_theta, decoupled PPO", "surrogates",
         mc(1, {"--surrogate=decoupled_ppo", "--ratio-cap=0"})},
        {"mc1_m2po", "A_theta, M2PO .04", "surrogates", mc(1, {"--m2po=0.04"})},
        {"mc1_estr", "A_theta, ESTR .05", "surrogates", mc(1), twist::estr},
        {"mc1_old_decoupled", "A_old, decoupled PPO", "surrogates",
         mc(1, both(old, {"--surrogate=decoupled_ppo", "--ratio-cap=0"})), twist::none, true},
        {"mc1_old_m2po", "A_old, M2PO .04", "surrogates", mc(1, both(old, {"--m2po=0.04"})), twist::none, true},

        {"mc1_no_is", "MC-1, no IS", "drawn", mc(1, fresh)},
        {"mc4", "MC-4", "drawn", mc(4)},
        {"mc4_no_is", "MC-4, no IS", "drawn", mc(4, fresh), twist::none, true},
        {"threshold4", "threshold(4)", "drawn", {"--estimator=threshold", "--budget=4"}},
    };
    const std::vector<contender> wide = {
        {"mc" + b, "MC-" + b, "drawn", mc(budget)},
        {"mc" + b + "_no_is", "MC-" + b + ", no IS", "drawn", mc(budget, fresh)},
        {"threshold" + b, "threshold(" + b + ")", "drawn", {"--estimator=threshold", of("budget", budget)}},
        {"head_tail" + b,
         "head " + half + " + tail " + half,
         "drawn",
         {"--estimator=threshold", of("budget", budget)},
         twist::head_tail},

        {"student_topk" + b,
         "student's top " + b + ", stale",
         "supports",
         {"--estimator=topk", "--topk-from=student", of("k", budget)}},
        {"student_topk" + b + "_rw", "the same + RW", "supports", {"--estimator=topk_rw", of("k", budget)}},
        {"teacher_tail" + b,
         "teacher's top " + b + " and tail",
         "supports",
         {"--estimator=tail_bucket", of("k", budget)}},
        {"mc" + b + "_top_p", "MC-" + b + ", top-p .9, kept sets", "supports", mc(budget, {"--rollout-top-p=0.9"})},
        {"mc" + b + "_top_p_no_sets", "MC-" + b + ", top-p .9, sets ignored", "supports",
         mc(budget, {"--rollout-top-p=0.9"}), twist::no_sets},

        {"constant", "A = -1, MC-" + b, "controls", mc(budget, old), twist::constant},
        {"constant_no_is", "A = -1, MC-" + b + ", no IS", "controls", mc(budget, both(old, fresh)), twist::constant},
    };
    r.insert(r.end(), wide.begin(), wide.end());
    if (budget != 64) {
        r.push_back({"mc64", "MC-64", "drawn", mc(64), twist::none, true});
        r.push_back(
            {"threshold64", "threshold(64)", "drawn", {"--estimator=threshold", "--budget=64"}, twist::none, true});
    }
    return r;
}

} // namespace staleness_study
