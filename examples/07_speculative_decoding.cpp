// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Speculative decoding that changes nothing but the number of passes: a toy target (logits by the last two tokens),
// answers to one prompt, and drafts from what other answers said, from a smaller model, or both, as a tree. The
// target's own keyed tokens decide what is followed, so every answer is that of plain decoding, token for token, at
// temperature 0.8 and top-p 0.95.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

#include "opd/backends/cpu.hpp"
#include "opd/draw.hpp"
#include "opd/spec/draft_budget.hpp"
#include "opd/spec/draft_tree.hpp"
#include "opd/spec/prompt_groups.hpp"
#include "opd/spec/verify.hpp"

namespace {

using text = std::vector<std::int32_t>;
constexpr long V = 64, length = 200, answers = 12;
constexpr std::uint64_t seed = 3;
constexpr opd::filter filter{.temperature = 0.8f, .top_p = 0.95f};

/// Logits after a text, `off` away from the target's: of some words it is sure what follows, of others less.
std::vector<float> logits(std::span<const std::int32_t> t, double off) {
    const std::int32_t a = t[t.size() - 2], b = t[t.size() - 1];
    std::vector<float> z(V);
    for (std::int32_t v = 0; v < V; ++v)
        z[static_cast<std::size_t>(v)] =
            static_cast<float>(2 * std::sin(78.2 * b + 37.7 * v) + off * std::sin(5.1 * b + 91.7 * v));
    z[static_cast<std::size_t>((a + 2 * b + 1) % V)] += 6 + 2 * std::sin(static_cast<float>(b));
    return z;
}

/// The token that the target draws after a text: a function of its logits, the seed, the answer and the position.
std::int32_t own(std::span<const std::int32_t> t, std::uint64_t answer) {
    static opd::cpu_backend backend;
    const std::vector<float> z = logits(t, 0);
    const auto position = static_cast<std::uint32_t>(t.size());
    std::int32_t id = 0;
    float log_mu = 0;
    opd::draw(backend, opd::view(z.data(), 1, V), opd::design::gumbel{},
              {.seed = seed, .sample = opd::view(&answer, 1), .position = opd::view(&position, 1)},
              opd::drawn<>{.ids = opd::view(&id, 1, 1), .log_mu = opd::view(&log_mu, 1, 1)}, {.filter = filter});
    return id;
}

struct tally {
    long passes = 0, verified = 0, followed = 0;
};

/// An answer, written with drafts.
text write(const text& prompt, std::uint64_t answer, bool retrieve, bool model, opd::spec::prompt_groups& group,
           opd::spec::follow_rates& rates, tally& count) {
    const opd::spec::step_cost cost(
        {{1, 1.0}, {16, 1.1}, {64, 2.0}}); // of the target, by rows: the first 16 are nearly free
    opd::spec::draft_builder tree;
    opd::spec::draft_budget budget;
    text t = prompt;
    const auto written = group.begin(0, 0, t);
    std::vector<std::int32_t> chain(8);
    std::vector<opd::index_t> widest(2);
    const auto path = [&](opd::index_t node) { // the text up to a node of the tree
        text whole;
        for (; node >= 0; node = tree.parent(node)) whole.push_back(tree.token(node));
        whole.insert(whole.end(), t.rbegin(), t.rend());
        std::reverse(whole.begin(), whole.end());
        return whole;
    };
    while (t.size() < prompt.size() + length) {
        // drafts: what came after the same words in other answers, and a tree by the small model with the target's
        // noise
        const opd::spec::draft_law law{
            .filter = filter, .seed = seed, .sample = answer, .position = static_cast<std::uint32_t>(t.size())};
        tree.begin(rates);
        if (retrieve)
            if (const auto n = group.draft(written, chain, 2); n > 0)
                tree.graft(std::span(chain).first(static_cast<std::size_t>(n)), group.longest(written).length);
        for (std::int32_t depth = 0; model && depth < 4; ++depth) {
            widest[0] = -1;
            const auto n = depth == 0 ? 1 : tree.best_of_depth(depth, widest);
            for (opd::index_t i = 0; i < n; ++i) {
                const opd::index_t node = widest[static_cast<std::size_t>(i)];
                const std::vector<float> z = logits(path(node), 1.5);
                tree.grow(node, opd::vector_view<const float>(z.data(), V), law, 3);
            }
        }
        // as many as pay, the likeliest first
        const opd::spec::draft_candidate candidate{tree.gains(), 1.0};
        const opd::spec::draft_tree drafts = tree.select(budget.share({&candidate, 1}, cost)[0]);
        // one pass of the target over all of them; it draws its own token after each that is followed
        const opd::spec::verdict v = opd::spec::follow(drafts, [&](opd::index_t row) {
            return own(path(row == 0 ? -1 : tree.chosen()[static_cast<std::size_t>(row - 1)]), answer);
        });
        tree.learn(rates, v);
        const text before = t;
        t = path(v.node < 0 ? -1 : tree.chosen()[static_cast<std::size_t>(v.node)]);
        t.push_back(v.next);
        for (std::size_t i = before.size(); i < t.size(); ++i) group.append(written, t[i]);
        ++count.passes, count.verified += drafts.size(), count.followed += v.accepted;
    }
    t.resize(prompt.size() + length);
    return t;
}

} // namespace

int main() {
    const text prompt = {5, 9};
    std::vector<text> plain;
    for (std::uint64_t a = 0; a < answers; ++a) {
        text t = prompt;
        while (t.size() < prompt.size() + length) t.push_back(own(t, a));
        plain.push_back(t);
    }
    std::printf("%ld answers of %ld tokens\n", answers, length);
    std::printf("  drafts               passes  tokens a pass  verified a pass  of these followed\n");
    std::printf("  none              %9ld  %13.2f  %15.1f  %16s\n", answers * length, 1.0, 0.0, "-");
    bool same = true, faster = true;
    for (const int kind : {1, 2, 3}) {
        opd::spec::prompt_groups group;
        opd::spec::follow_rates rates;
        tally count;
        for (std::uint64_t a = 0; a < answers; ++a)
            same = write(prompt, a, (kind & 1) != 0, (kind & 2) != 0, group, rates, count) == plain[a] && same;
        const double passes = static_cast<double>(count.passes), tokens = answers * length;
        std::printf("  %-17s %9ld  %13.2f  %15.1f  %15.0f%%\n",
                    kind == 1   ? "other answers"
                    : kind == 2 ? "small model"
                                : "both",
                    count.passes, tokens / passes, static_cast<double>(count.verified) / passes,
                    100 * static_cast<double>(count.followed) / static_cast<double>(count.verified));
        faster = faster && tokens > 1.1 * passes;
    }
    std::printf(same ? "every answer is that of plain decoding\n" : "an answer differs from plain decoding\n");
    return same && faster ? 0 : 1;
}
