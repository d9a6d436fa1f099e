// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan, sanitize
//
// Speculation through the C interface: each function decides as the C++ call does, bit for bit, over random inputs;
// verification writes the target's law, exactly, by going through all outcomes of chance; bad input is refused by name
// and writes nothing; handles that are gone are refused; threads may share a handle.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <doctest/doctest.h>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "opd/c/spec.h"
#include "opd/sched/archive.hpp"
#include "opd/spec.hpp"

namespace {

namespace spec = opd::spec;
using opd::index_t;
using text = std::vector<std::int32_t>;

// A tensor of the host's, with its own shape.
struct tensor {
    std::vector<std::int64_t> shape, strides;
    DLTensor t = {};
    template <class T>
    tensor(T* data, std::vector<std::int64_t> shape_, std::vector<std::int64_t> strides_ = {})
        : shape(std::move(shape_)), strides(std::move(strides_)) {
        using U = std::remove_const_t<T>;
        t.data = const_cast<U*>(data);
        t.device = {kDLCPU, 0};
        t.ndim = static_cast<int>(shape.size());
        t.dtype.bits = 8 * sizeof(T), t.dtype.lanes = 1;
        t.dtype.code = std::is_same_v<U, opd::bfloat16>                              ? kDLBfloat
                       : std::is_same_v<U, opd::half> || std::is_floating_point_v<U> ? kDLFloat
                       : std::is_signed_v<U>                                         ? kDLInt
                                                                                     : kDLUInt;
        t.shape = shape.data();
        t.strides = strides.empty() ? nullptr : strides.data();
    }
    tensor(const tensor&) = delete;
    operator const DLTensor*() const { return &t; }
};
template <class T>
tensor vector_of(std::vector<T>& v) {
    return tensor(v.data(), {static_cast<std::int64_t>(v.size())});
}

template <class Struct>
Struct sized() {
    Struct s = {};
    s.struct_size = sizeof s;
    return s;
}

// What a call that must hold said, if it did not.
void must(int status) {
    if (status != OPD_OK) FAIL(opd_last_error());
}

// A handle that a test made.
template <class Handle, void (*destroy)(Handle*)>
struct owned {
    Handle* h = nullptr;
    owned() = default;
    owned(const owned&) = delete;
    ~owned() { destroy(h); }
    operator Handle*() const { return h; }
};
using tuner = owned<opd_tuner, opd_tuner_destroy>;
using elastic = owned<opd_elastic_switch, opd_elastic_switch_destroy>;
using selector = owned<opd_drafter_selector, opd_drafter_selector_destroy>;
using rates_handle = owned<opd_follow_rates, opd_follow_rates_destroy>;
using tree_handle = owned<opd_draft_tree, opd_draft_tree_destroy>;
using ngrams = owned<opd_ngram_table, opd_ngram_table_destroy>;
using automaton = owned<opd_suffix_automaton, opd_suffix_automaton_destroy>;
using groups = owned<opd_prompt_groups, opd_prompt_groups_destroy>;

template <class Handle>
std::vector<char> bytes_of(int (*snapshot)(Handle*, void*, size_t, size_t*), Handle* h) {
    std::size_t n = 0;
    must(snapshot(h, nullptr, 0, &n));
    std::vector<char> bytes(n);
    must(snapshot(h, bytes.data(), bytes.size(), &n));
    CHECK(n == bytes.size());
    return bytes;
}

bool same(const opd_verdict& a, const spec::verdict& b) {
    return a.accepted == b.accepted && a.node == b.node && a.next == b.next && a.reserved == 0;
}
bool same(const opd_strategy& a, const spec::strategy& b) {
    return a.depth == b.depth && a.top_k == b.top_k && a.verify == b.verify;
}

// --- verification ----------------------------------------------------------------------------------------------------

template <class T>
struct stored { // (rows, v) of T in rows that are further apart than they are long
    index_t rows, v, stride;
    std::vector<T> x;
    stored(index_t rows_, index_t v_, index_t gap, std::mt19937& random)
        : rows(rows_), v(v_), stride(v_ + gap), x(static_cast<std::size_t>(rows_ * (v_ + gap)), T(-7.f)) {
        for (index_t r = 0; r < rows; ++r)
            for (index_t i = 0; i < v; ++i)
                x[static_cast<std::size_t>(r * stride + i)] =
                    T(i == 0 || random() % 4 != 0 ? static_cast<float>(random() % 1000 + 1) / 1000 : 0.f);
    }
    tensor dl() const { return tensor(x.data(), {rows, v}, {stride, 1}); }
    // the same numbers as double, which all four hold exactly
    std::vector<double> wide(index_t first, index_t count) const {
        std::vector<double> to;
        for (index_t r = first; r < first + count; ++r)
            for (index_t i = 0; i < v; ++i) {
                if constexpr (sizeof(T) == 2)
                    to.push_back(static_cast<float>(x[static_cast<std::size_t>(r * stride + i)]));
                else
                    to.push_back(x[static_cast<std::size_t>(r * stride + i)]);
            }
        return to;
    }
};

struct batch {
    text tokens, parents;
    std::vector<std::int64_t> wide_tokens, wide_parents, offsets = {0};
    std::vector<std::int64_t> samples;
    std::vector<std::uint32_t> positions;
    index_t sequences() const { return static_cast<index_t>(offsets.size()) - 1; }
    index_t rows() const { return static_cast<index_t>(tokens.size()) + sequences(); }
    index_t row(index_t s) const { return offsets[static_cast<std::size_t>(s)] + s; }
    spec::draft_tree tree(index_t s) const {
        const auto a = static_cast<std::size_t>(offsets[static_cast<std::size_t>(s)]),
                   b = static_cast<std::size_t>(offsets[static_cast<std::size_t>(s) + 1]);
        return {std::span(parents).subspan(a, b - a), std::span(tokens).subspan(a, b - a)};
    }
};
batch random_batch(index_t v, bool chain, std::mt19937& random) {
    batch b;
    const auto sequences = random() % 5;
    for (std::size_t s = 0; s < sequences; ++s) {
        const auto n = static_cast<std::int32_t>(random() % 6);
        for (std::int32_t i = 0; i < n; ++i) {
            b.parents.push_back(chain ? i - 1
                                      : static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(i + 1)) - 1);
            b.tokens.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(v)));
        }
        b.offsets.push_back(static_cast<std::int64_t>(b.tokens.size()));
        b.samples.push_back(static_cast<std::int64_t>(random()) * (random() % 2 ? 1 : -1));
        b.positions.push_back(random());
    }
    b.wide_tokens.assign(b.tokens.begin(), b.tokens.end());
    b.wide_parents.assign(b.parents.begin(), b.parents.end());
    return b;
}

const char* const rules[] = {"one_hot", "dense", "block", "iid_siblings", "without_replacement"};

template <class Coins>
spec::verdict of_cpp(int rule, const spec::draft_tree& tree, opd::matrix_view<const double> p,
                     opd::matrix_view<const double> q, Coins& coins) {
    static spec::verification memory;
    switch (rule) {
    case 0:
        return memory.verify(tree, p, spec::one_hot{}, coins);
    case 1:
        return memory.verify(tree, p, spec::dense<double>{q}, coins);
    case 2:
        return memory.verify_block(tree, p, spec::dense<double>{q}, coins);
    case 3:
        return memory.verify(tree, p, spec::iid_siblings<double>{q}, coins);
    default:
        return memory.verify(tree, p, spec::without_replacement<double>{q}, coins);
    }
}
void set_rule(opd_verify_call& call, int rule) {
    call.drawn = rule == 2 ? "dense" : rules[rule];
    call.block = rule == 2;
}

template <class P, class Q>
index_t compare_verify(std::uint32_t seed) {
    std::mt19937 random(seed);
    index_t followed = 0;
    for (int trial = 0; trial < 40; ++trial)
        for (int rule = 0; rule < 5; ++rule) {
            CAPTURE(std::string(rules[rule]));
            CAPTURE(trial);
            const auto v = static_cast<index_t>(2 + random() % 6);
            batch b = random_batch(v, rule == 1 || rule == 2, random);
            const stored<P> p(b.rows(), v, static_cast<index_t>(random() % 3), random);
            const stored<Q> q(b.rows(), v, static_cast<index_t>(random() % 3), random);
            const tensor tokens = vector_of(b.tokens), parents = vector_of(b.parents), offsets = vector_of(b.offsets),
                         wide_tokens = vector_of(b.wide_tokens), wide_parents = vector_of(b.wide_parents),
                         samples = vector_of(b.samples), positions = vector_of(b.positions);
            const tensor dl_p = p.dl(), dl_q = q.dl();
            auto drafts = sized<opd_drafts>();
            const bool wide = random() % 2;
            drafts.tokens = wide ? wide_tokens : tokens;
            drafts.parents = wide ? wide_parents : parents;
            if ((rule == 1 || rule == 2) && random() % 2) drafts.parents = nullptr;
            drafts.offsets = offsets;
            auto call = sized<opd_verify_call>();
            set_rule(call, rule);
            call.drafts = &drafts, call.p = dl_p, call.seed = random();
            if (rule != 0) call.q = dl_q;
            call.samples = samples, call.positions = positions;
            std::vector<opd_verdict> got(static_cast<std::size_t>(b.sequences()) + 1, opd_verdict{-9, -9, -9, -9});
            must(opd_verify(&call, got.data()));
            CHECK(got.back().next == -9);
            for (index_t s = 0; s < b.sequences(); ++s) {
                const index_t n = b.tree(s).size() + 1;
                const auto own = p.wide(b.row(s), n), theirs = q.wide(b.row(s), n);
                const auto at = static_cast<std::size_t>(s);
                spec::keyed_coins coins(call.seed, static_cast<std::uint64_t>(b.samples[at]), b.positions[at]);
                const spec::verdict want =
                    of_cpp(rule, b.tree(s), opd::view(own.data(), n, v), opd::view(theirs.data(), n, v), coins);
                CHECK(same(got[at], want));
                followed += want.accepted;

                // the sequence alone
                auto alone = sized<opd_drafts>();
                text t(b.tree(s).tokens.begin(), b.tree(s).tokens.end()),
                    up(b.tree(s).parents.begin(), b.tree(s).parents.end());
                const tensor own_tokens = vector_of(t), own_parents = vector_of(up);
                alone.tokens = own_tokens, alone.parents = own_parents;
                const tensor own_p(p.x.data() + b.row(s) * p.stride, {n, v}, {p.stride, 1});
                const tensor own_q(q.x.data() + b.row(s) * q.stride, {n, v}, {q.stride, 1});
                auto single = call;
                single.drafts = &alone, single.samples = nullptr, single.positions = nullptr;
                single.sample = static_cast<std::uint64_t>(b.samples[at]), single.position = b.positions[at];
                single.p = own_p;
                if (rule != 0) single.q = own_q;
                opd_verdict one = {};
                must(opd_verify(&single, &one));
                CHECK(same(one, want));
            }
        }
    return followed;
}

// Coins that go through all outcomes, one after the other.
class enumerating_coins {
public:
    double weight = 1; // of the present one

    bool accept(double p) {
        if (p <= 0) return false;
        if (p >= 1) return true;
        return choose({p, 1 - p}) == 0;
    }
    index_t draw(std::span<const double> w) {
        std::vector<double> p;
        std::vector<index_t> which;
        const double sum = std::accumulate(w.begin(), w.end(), 0.0);
        for (std::size_t i = 0; i < w.size(); ++i)
            if (w[i] > 0) p.push_back(w[i] / sum), which.push_back(static_cast<index_t>(i));
        return which[choose(p)];
    }
    void begin() { at_ = 0, weight = 1; }
    bool next() {
        while (!path_.empty() && path_.back().first + 1 == path_.back().second) path_.pop_back();
        if (path_.empty()) return false;
        ++path_.back().first;
        return true;
    }

private:
    std::size_t choose(const std::vector<double>& p) {
        if (at_ == path_.size()) path_.push_back({0, p.size()});
        if (path_[at_].second != p.size()) FAIL("chance does not repeat itself");
        weight *= p[path_[at_].first];
        return path_[at_++].first;
    }
    std::vector<std::pair<std::size_t, std::size_t>> path_;
    std::size_t at_ = 0;
};
int accept_of(void* coins, double p) { return static_cast<enumerating_coins*>(coins)->accept(p); }
std::int64_t draw_of(void* coins, const double* w, std::int64_t n) {
    return static_cast<enumerating_coins*>(coins)->draw({w, static_cast<std::size_t>(n)});
}

using law = std::map<text, double>;
law law_of(const std::function<text(enumerating_coins&)>& run) {
    law r;
    enumerating_coins coins;
    do {
        coins.begin();
        const text t = run(coins);
        r[t] += coins.weight;
    } while (coins.next());
    return r;
}
double distance(const law& a, const law& b) {
    double sum = 0;
    for (const auto& [t, p] : a) sum += std::abs(p - (b.count(t) > 0 ? b.at(t) : 0));
    for (const auto& [t, p] : b) sum += a.count(t) > 0 ? 0 : p;
    return sum / 2;
}
// A law after every prefix, with zeros among it.
std::vector<double> model(std::uint32_t seed, int v, const text& prefix) {
    std::seed_seq key{seed, static_cast<std::uint32_t>(prefix.size()),
                      static_cast<std::uint32_t>(std::accumulate(prefix.begin(), prefix.end(), 1,
                                                                 [](int a, std::int32_t t) { return a * 7 + t; }))};
    std::mt19937 random(key);
    std::vector<double> p;
    for (int i = 0; i < v; ++i) p.push_back(random() % 5 == 0 ? 0 : 0.05 + static_cast<double>(random() % 1000));
    p[random() % p.size()] += 100;
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
    return p;
}

// Drafts a tree of this shape in a rule's way, has it verified, and goes on from there as the target does.
text drafted_and_verified(int rule, text parents, std::uint32_t seed, int v, std::size_t length,
                          enumerating_coins& coins) {
    const auto target = [&](const text& t) { return model(seed, v, t); };
    const auto drafter = [&](const text& t) { return model(seed + 100, v, t); };
    text tokens;
    std::vector<text> prefixes = {{}};
    std::vector<double> p = target({}), q = drafter({});
    for (std::size_t n = 0; n < parents.size(); ++n) {
        text prefix = prefixes[static_cast<std::size_t>(parents[n] + 1)];
        std::vector<double> w = drafter(prefix);
        if (rule == 0 || rule == 4)
            for (std::size_t m = 0; m < n; ++m)
                if (parents[m] == parents[n]) w[static_cast<std::size_t>(tokens[m])] = 0;
        if (rule == 0)
            tokens.push_back(static_cast<std::int32_t>(std::max_element(w.begin(), w.end()) - w.begin()));
        else if (std::accumulate(w.begin(), w.end(), 0.0) > 0)
            tokens.push_back(static_cast<std::int32_t>(coins.draw(w)));
        else
            tokens.push_back(tokens.back()); // nothing is left to draw: no sibling is followed twice
        prefix.push_back(tokens.back());
        const auto more_p = target(prefix), more_q = drafter(prefix);
        p.insert(p.end(), more_p.begin(), more_p.end()), q.insert(q.end(), more_q.begin(), more_q.end());
        prefixes.push_back(prefix);
    }
    const auto rows = static_cast<std::int64_t>(prefixes.size());
    const tensor dl_tokens = vector_of(tokens), dl_parents = vector_of(parents), dl_p(p.data(), {rows, v}),
                 dl_q(q.data(), {rows, v});
    auto drafts = sized<opd_drafts>();
    drafts.tokens = dl_tokens, drafts.parents = dl_parents;
    auto c = sized<opd_coins>();
    c.context = &coins, c.accept = accept_of, c.draw = draw_of;
    auto call = sized<opd_verify_call>();
    set_rule(call, rule);
    call.drafts = &drafts, call.p = dl_p, call.coins = &c;
    if (rule != 0) call.q = dl_q;
    opd_verdict r = {};
    must(opd_verify(&call, &r));
    text t = prefixes.at(static_cast<std::size_t>(r.node + 1));
    CHECK(t.size() == static_cast<std::size_t>(r.accepted));
    t.push_back(r.next);
    while (t.size() < length) t.push_back(static_cast<std::int32_t>(coins.draw(target(t))));
    return t;
}

} // namespace

TEST_CASE("verify decides as the C++ call does: every rule, type of law, integer and batch") {
    index_t followed = 0;
    followed += compare_verify<float, float>(1) + compare_verify<float, double>(2);
    followed += compare_verify<float, opd::bfloat16>(3) + compare_verify<float, opd::half>(4);
    followed += compare_verify<double, float>(5) + compare_verify<double, double>(6);
    followed += compare_verify<double, opd::bfloat16>(7) + compare_verify<double, opd::half>(8);
    followed += compare_verify<opd::bfloat16, float>(9) + compare_verify<opd::bfloat16, double>(10);
    followed += compare_verify<opd::bfloat16, opd::bfloat16>(11) + compare_verify<opd::bfloat16, opd::half>(12);
    followed += compare_verify<opd::half, float>(13) + compare_verify<opd::half, double>(14);
    followed += compare_verify<opd::half, opd::bfloat16>(15) + compare_verify<opd::half, opd::half>(16);
    CHECK(followed > 1000); // else nothing was decided
}

TEST_CASE("samples and positions are integers of 32 or 64 bits, of either sign") {
    std::vector<double> p(8, 0.125);
    const tensor dl_p(p.data(), {1, 8});
    std::vector<std::int64_t> offsets = {0, 0};
    const tensor dl_offsets = vector_of(offsets);
    auto drafts = sized<opd_drafts>();
    drafts.offsets = dl_offsets;
    const auto check = [&]<class S, class P>(S sample, P position) {
        std::vector<S> samples = {sample};
        std::vector<P> positions = {position};
        const tensor dl_samples = vector_of(samples), dl_positions = vector_of(positions);
        auto call = sized<opd_verify_call>();
        call.drawn = "one_hot", call.drafts = &drafts, call.p = dl_p;
        call.samples = dl_samples, call.positions = dl_positions;
        for (call.seed = 0; call.seed < 20; ++call.seed) {
            opd_verdict v = {};
            must(opd_verify(&call, &v));
            spec::keyed_coins coins(call.seed, static_cast<std::uint64_t>(sample),
                                    static_cast<std::uint32_t>(position));
            CHECK(v.next == coins.draw(p));
        }
    };
    check(std::int32_t{-5}, std::int64_t{7});
    check(std::int64_t{-5}, std::int32_t{7});
    check(std::uint32_t{4000000000u}, std::uint32_t{4000000000u});
    check(std::uint64_t{0xfedcba9876543210u}, std::uint64_t{4000000000u});
}

TEST_CASE("what is written has the target's law, exactly") {
    const std::vector<std::pair<text, std::size_t>> chains = {{{}, 0}, {{-1}, 1}, {{-1, 0}, 2}, {{-1, 0, 1}, 3}},
                                                    trees = {{{-1, -1}, 1}, {{-1, -1, 0, 0}, 2}, {{-1, 0, 0, 1}, 3}};
    for (std::uint32_t seed = 0; seed < 4; ++seed)
        for (const int v : {2, 3})
            for (int rule = 0; rule < 5; ++rule) {
                CAPTURE(seed);
                CAPTURE(v);
                CAPTURE(std::string(rules[rule]));
                auto shapes = chains;
                if (rule != 1 && rule != 2) shapes.insert(shapes.end(), trees.begin(), trees.end());
                for (const auto& [parents, depth] : shapes) {
                    CAPTURE(parents.size());
                    const std::size_t length = depth + 1;
                    const law plain = law_of([&](enumerating_coins& c) {
                        text t;
                        while (t.size() < length) t.push_back(static_cast<std::int32_t>(c.draw(model(seed, v, t))));
                        return t;
                    });
                    const law got = law_of([&, &parents = parents](enumerating_coins& c) {
                        return drafted_and_verified(rule, parents, seed, v, length, c);
                    });
                    CHECK(distance(got, plain) < 1e-12);
                }
            }
}

TEST_CASE("negative control: a favourite that is judged as drawn is off by 0.3") {
    std::vector<double> p = {.5, .3, .2, 1, 0, 0}, q = {.2, .3, .5, 1, 0, 0};
    text token = {2};
    const tensor dl_p(p.data(), {2, 3}), dl_q(q.data(), {2, 3}), tokens = vector_of(token);
    auto drafts = sized<opd_drafts>();
    drafts.tokens = tokens;
    const law got = law_of([&](enumerating_coins& coins) {
        auto c = sized<opd_coins>();
        c.context = &coins, c.accept = accept_of, c.draw = draw_of;
        auto call = sized<opd_verify_call>();
        call.drawn = "dense", call.drafts = &drafts, call.p = dl_p, call.q = dl_q, call.coins = &c;
        opd_verdict r = {};
        must(opd_verify(&call, &r));
        return text{r.accepted > 0 ? token[0] : r.next};
    });
    CHECK(distance(got, {{{0}, .5}, {{1}, .3}, {{2}, .2}}) == doctest::Approx(0.3));
}

TEST_CASE("follow: the tokens that were drawn for all rows, a callback a round, and the C++ call agree") {
    std::mt19937 random(5);
    index_t followed = 0;
    for (int trial = 0; trial < 300; ++trial) {
        batch b = random_batch(3, false, random);
        std::vector<std::int64_t> own(static_cast<std::size_t>(b.rows()));
        for (std::int64_t& t : own) t = static_cast<std::int64_t>(random() % 3);
        const tensor tokens = vector_of(b.tokens), parents = vector_of(b.parents), offsets = vector_of(b.offsets),
                     dl_own = vector_of(own);
        auto drafts = sized<opd_drafts>();
        drafts.tokens = tokens, drafts.parents = parents, drafts.offsets = offsets;
        auto call = sized<opd_follow_call>();
        call.drafts = &drafts, call.own = dl_own;
        std::vector<opd_verdict> got(static_cast<std::size_t>(b.sequences()) + 1), called = got;
        must(opd_follow(&call, got.data()));

        struct context_type {
            batch* b;
            std::vector<std::int64_t>* own;
            std::vector<std::vector<std::pair<index_t, index_t>>> rounds;
        } context = {&b, &own, {}};
        auto asked = sized<opd_follow_call>();
        asked.drafts = &drafts, asked.context = &context;
        asked.draw = [](void* of, const opd_due* due, std::int64_t n, std::int32_t* to) {
            auto& c = *static_cast<context_type*>(of);
            c.rounds.emplace_back();
            for (std::int64_t i = 0; i < n; ++i) {
                c.rounds.back().push_back({due[i].sequence, due[i].row});
                to[i] = static_cast<std::int32_t>(
                    (*c.own)[static_cast<std::size_t>(c.b->row(due[i].sequence) + due[i].row)]);
            }
            return 0;
        };
        must(opd_follow(&asked, called.data()));

        std::vector<spec::draft_tree> trees;
        for (index_t s = 0; s < b.sequences(); ++s) trees.push_back(b.tree(s));
        std::vector<std::vector<std::pair<index_t, index_t>>> rounds;
        spec::batch_follower together;
        const auto want =
            together.follow(trees, [&](std::span<const spec::batch_follower::due> due, std::span<std::int32_t> to) {
                rounds.emplace_back();
                for (std::size_t i = 0; i < due.size(); ++i) {
                    rounds.back().push_back({due[i].sequence, due[i].row});
                    to[i] =
                        static_cast<std::int32_t>(own[static_cast<std::size_t>(b.row(due[i].sequence) + due[i].row)]);
                }
            });
        CHECK(context.rounds == rounds);
        for (index_t s = 0; s < b.sequences(); ++s) {
            const auto at = static_cast<std::size_t>(s);
            CHECK(same(got[at], want[at]));
            CHECK(same(called[at], want[at]));
            const spec::verdict alone =
                spec::follow(trees[at], [&](index_t row) { return own[static_cast<std::size_t>(b.row(s) + row)]; });
            CHECK(same(got[at], alone));
            followed += alone.accepted;
        }
    }
    CHECK(followed > 100);
}

TEST_CASE("a callback may verify itself") {
    std::vector<double> p = {.5, .5};
    const tensor dl_p(p.data(), {1, 2});
    static auto drafts = sized<opd_drafts>();
    static auto inner = sized<opd_verify_call>();
    inner.drawn = "one_hot", inner.drafts = &drafts, inner.p = dl_p, inner.seed = 3;
    auto coins = sized<opd_coins>();
    coins.accept = [](void*, double) { return 1; };
    coins.draw = [](void*, const double* w, std::int64_t) -> std::int64_t {
        opd_verdict v = {};
        must(opd_verify(&inner, &v));
        CHECK(w[0] == 0.25); // the outer call's, still
        return 1;
    };
    std::vector<double> outer_p = {1, 3};
    const tensor dl_outer(outer_p.data(), {1, 2});
    auto outer = inner;
    outer.p = dl_outer, outer.seed = 0, outer.coins = &coins;
    opd_verdict v = {};
    must(opd_verify(&outer, &v));
    CHECK(v.next == 1);
}

// --- trees -----------------------------------------------------------------------------------------------------------

namespace {

template <class Z>
std::vector<Z> random_logits(index_t v, std::mt19937& random) {
    std::vector<Z> z;
    for (index_t i = 0; i < v; ++i) z.push_back(Z(static_cast<float>(random() % 4001) / 500 - 4));
    return z;
}

// One random tree, through both interfaces; what was selected is followed at random and learnt.
template <class Z>
void compare_tree(opd_draft_tree* tree, opd_follow_rates* rates, spec::draft_builder& b, spec::follow_rates& r,
                  std::mt19937& random) {
    must(opd_draft_tree_begin(tree, rates));
    b.begin(r);
    auto law = sized<opd_draft_law>();
    spec::draft_law of;
    law.greedy = random() % 3 == 0, of.greedy = law.greedy != 0;
    if (!of.greedy) {
        of.seed = law.seed = random(), of.sample = law.sample = random(), of.position = law.position = random();
        if (random() % 2) law.temperature = of.filter.temperature = 0.7f;
        if (random() % 2) law.top_k = of.filter.top_k = 5;
        if (random() % 2) law.top_p = of.filter.top_p = 0.8f;
        if (random() % 2) law.min_p = of.filter.min_p = 0.05f;
    }
    for (int step = 0; step < 6; ++step) {
        std::int64_t n = -1;
        if (random() % 3 == 0) {
            text chain;
            for (auto i = random() % 5; i > 0; --i) chain.push_back(static_cast<std::int32_t>(random() % 12));
            std::vector<std::int64_t> wide(chain.begin(), chain.end());
            const tensor narrow = vector_of(chain), dl_wide = vector_of(wide);
            const auto matched = static_cast<std::int32_t>(1 + random() % 20);
            must(opd_draft_tree_graft(tree, random() % 2 ? narrow : dl_wide, matched, &n));
            CHECK(n == b.graft(chain, matched));
        } else {
            const auto v = static_cast<index_t>(3 + random() % 10);
            std::vector<Z> z = random_logits<Z>(v, random);
            const tensor dl = vector_of(z);
            const auto parent = static_cast<index_t>(random() % static_cast<std::uint32_t>(b.size() + 1)) - 1;
            const auto top_k = static_cast<index_t>(1 + random() % 5);
            must(opd_draft_tree_grow(tree, parent, dl, &law, top_k, &n));
            CHECK(n == b.grow(parent, opd::view(std::as_const(z).data(), v), of, top_k));
        }
    }
    std::int64_t size = -1;
    must(opd_draft_tree_size(tree, &size));
    REQUIRE(size == b.size());
    for (index_t n = 0; n < size; ++n) {
        opd_draft_node node = {};
        must(opd_draft_tree_node(tree, n, &node));
        CHECK(node.parent == b.parent(n));
        CHECK(node.token == b.token(n));
        CHECK(node.depth == b.depth(n));
        CHECK(node.reach == b.reach(n));
    }
    std::vector<double> gains(static_cast<std::size_t>(size));
    must(opd_draft_tree_gains(tree, gains.data(), size));
    CHECK(std::ranges::equal(gains, b.gains()));
    std::vector<std::int64_t> best(3);
    std::vector<index_t> want(3);
    std::int64_t count = -1;
    must(opd_draft_tree_best_of_depth(tree, 1, best.data(), 3, &count));
    REQUIRE(count == b.best_of_depth(1, want));
    CHECK(std::equal(best.begin(), best.begin() + count, want.begin()));

    const auto verify = static_cast<index_t>(random() % 9);
    text tokens(9, -7), nodes(9, -7);
    std::vector<std::int64_t> parents(9, -7);
    const tensor dl_tokens = vector_of(tokens), dl_parents = vector_of(parents), dl_nodes = vector_of(nodes);
    must(opd_draft_tree_select(tree, verify, dl_tokens, dl_parents, dl_nodes, &count));
    const spec::draft_tree chosen = b.select(verify);
    REQUIRE(count == chosen.size());
    for (std::size_t i = 0; i < 9; ++i) {
        const bool there = i < static_cast<std::size_t>(count);
        CHECK(tokens[i] == (there ? chosen.tokens[i] : -7));
        CHECK(parents[i] == (there ? chosen.parents[i] : -7));
        CHECK(nodes[i] == (there ? b.chosen()[i] : -7));
    }
    const spec::verdict v = spec::follow(chosen, [&](index_t row) {
        const auto child = std::ranges::find(chosen.parents, static_cast<std::int32_t>(row - 1));
        if (child != chosen.parents.end() && random() % 4 != 0)
            return chosen.tokens[static_cast<std::size_t>(child - chosen.parents.begin())];
        return static_cast<std::int32_t>(random() % 12);
    });
    const opd_verdict as_c = {v.accepted, v.node, v.next, 0};
    must(opd_draft_tree_learn(tree, rates, &as_c));
    b.learn(r, v);
}

} // namespace

TEST_CASE("trees and rates: the same nodes, reaches, choices and rates as the C++ builder, across a snapshot") {
    std::mt19937 random(11);
    auto options = sized<opd_follow_rates_options>();
    options.memory = 30, options.prior_weight = 2;
    rates_handle rates, others;
    must(opd_follow_rates_create(&options, &rates.h));
    must(opd_follow_rates_create(&options, &others.h));
    tree_handle tree;
    must(opd_draft_tree_create(&tree.h));
    spec::follow_rates r({30, 2});
    spec::draft_builder b;
    for (int trial = 0; trial < 60; ++trial) {
        compare_tree<float>(tree, rates, b, r, random);
        compare_tree<double>(tree, rates, b, r, random);
        compare_tree<opd::bfloat16>(tree, rates, b, r, random);
        compare_tree<opd::half>(tree, rates, b, r, random);
        if (trial == 30) { // the handle that goes on is one that was restored
            const auto bytes = bytes_of(opd_follow_rates_snapshot, rates.h);
            must(opd_follow_rates_restore(others, bytes.data(), bytes.size()));
            std::swap(rates.h, others.h);
        }
    }
    double most = 0;
    for (std::int32_t depth = 1; depth < 14; ++depth)
        for (std::int32_t rank = 0; rank < 9; ++rank)
            for (const double gap : {0.0, 0.3, 0.7, 1.5, 3.0, 9.0, std::numeric_limits<double>::infinity()}) {
                std::int32_t cell = -1;
                double rate = 0, tried = 0;
                must(opd_follow_rates_by_rank(depth, rank, gap, &cell));
                CHECK(cell == spec::follow_rates::by_rank(depth, rank, gap));
                must(opd_follow_rates_of(rates, cell, &rate, &tried));
                CHECK(rate == r.rate(cell));
                CHECK(tried == r.tried(cell));
                most = std::max(most, tried);
                must(opd_follow_rates_any_gap(depth, rank, &cell));
                CHECK(cell == spec::follow_rates::any_gap(depth, rank));
                must(opd_follow_rates_of(rates, cell, &rate, nullptr));
                CHECK(rate == r.rate(cell));
                must(opd_follow_rates_by_match(depth, rank + 1, &cell));
                CHECK(cell == spec::follow_rates::by_match(depth, rank + 1));
                must(opd_follow_rates_of(rates, cell, &rate, nullptr));
                CHECK(rate == r.rate(cell));
            }
    CHECK(most > 5); // trials were counted
    must(opd_follow_rates_learn(rates, 3, 1));
    r.learn(3, true);
    double rate = 0;
    must(opd_follow_rates_of(rates, 3, &rate, nullptr));
    CHECK(rate == r.rate(3));
}

TEST_CASE("an imagined tree has the gains of the C++ one") {
    rates_handle rates;
    tree_handle tree;
    must(opd_follow_rates_create(nullptr, &rates.h));
    must(opd_draft_tree_create(&tree.h));
    must(opd_draft_tree_begin(tree, rates));
    must(opd_draft_tree_imagine(tree, 4, 3));
    spec::follow_rates r;
    spec::draft_builder b;
    b.begin(r);
    b.imagine(4, 3);
    std::vector<double> gains(static_cast<std::size_t>(b.size()));
    must(opd_draft_tree_gains(tree, gains.data(), b.size()));
    CHECK(std::ranges::equal(gains, b.gains()));
    CHECK(gains.size() > 20);
}

TEST_CASE("a tree outlives its rates' handle; of more children than a row has ids it gets those of the row") {
    tree_handle tree;
    must(opd_draft_tree_create(&tree.h));
    rates_handle rates;
    must(opd_follow_rates_create(nullptr, &rates.h));
    must(opd_draft_tree_begin(tree, rates));
    opd_follow_rates_destroy(rates.h);
    std::vector<float> z = {1, 2, 3};
    const tensor dl = vector_of(z);
    std::int64_t n = 0;
    must(opd_draft_tree_grow(tree, -1, dl, nullptr, std::numeric_limits<std::int64_t>::max(), &n));
    CHECK(n == 3);
    CHECK(opd_draft_tree_begin(tree, rates) == OPD_INVALID_INPUT);
    CHECK(std::string(opd_last_error_argument()) == "rates");
}

TEST_CASE("budgets: the same shares and value as the C++ call") {
    std::mt19937 random(3);
    index_t shared = 0;
    for (int trial = 0; trial < 300; ++trial) {
        std::vector<std::int64_t> offsets = {0};
        std::vector<double> gains, remaining;
        const auto sequences = random() % 6;
        for (std::size_t s = 0; s < sequences; ++s) {
            double g = 1;
            for (auto n = random() % 5; n > 0; --n)
                gains.push_back(g *= 0.3 + static_cast<double>(random() % 700) / 1000);
            offsets.push_back(static_cast<std::int64_t>(gains.size()));
            remaining.push_back(1 + static_cast<double>(random() % 1000));
        }
        const bool long_tail = random() % 2, alike = random() % 2;
        std::vector<opd_cost_point> points = {{1, 1.0}, {4, 1.1 + static_cast<double>(random() % 5) / 10}, {32, 4.0}};
        auto budget = sized<opd_draft_budget>();
        const tensor dl_gains = vector_of(gains), dl_offsets = vector_of(offsets), dl_remaining = vector_of(remaining);
        budget.gains = dl_gains, budget.offsets = dl_offsets;
        if (long_tail) budget.remaining = dl_remaining;
        budget.cost = points.data(), budget.cost_count = 3;
        budget.all_alike = alike;
        if (!alike && trial % 2) budget.tail = 0.5;
        budget.most_rows = random() % 2 ? 0 : 7;
        budget.draft_seconds = 0.01, budget.seconds_per_node = 0.002;
        text shares(sequences, -7);
        const tensor dl_shares = vector_of(shares);
        double value = 0;
        must(opd_draft_budget_share(&budget, dl_shares, &value));

        std::vector<spec::draft_candidate> c;
        for (std::size_t s = 0; s < sequences; ++s)
            c.push_back({std::span(std::as_const(gains))
                             .subspan(static_cast<std::size_t>(offsets[s]),
                                      static_cast<std::size_t>(offsets[s + 1] - offsets[s])),
                         long_tail ? remaining[s] : 1});
        const spec::step_cost cost({{1, 1.0}, {4, points[1].seconds}, {32, 4.0}});
        spec::draft_budget b;
        const auto want = b.share(c, cost,
                                  {.tail = alike       ? 0.0
                                           : trial % 2 ? 0.5
                                                       : 1.0,
                                   .most_rows = budget.most_rows,
                                   .draft_seconds = 0.01,
                                   .seconds_per_node = 0.002});
        CHECK(std::ranges::equal(shares, want));
        CHECK(value == b.value());
        shared += std::accumulate(want.begin(), want.end(), index_t{0});
        double seconds = 0;
        const auto rows = static_cast<std::int64_t>(random() % 80);
        must(opd_step_seconds(points.data(), 3, rows, &seconds));
        CHECK(seconds == cost.seconds(rows));
    }
    CHECK(shared > 100);
}

// --- drafters --------------------------------------------------------------------------------------------------------

TEST_CASE("n-gram tables draft what the C++ table drafts, across a snapshot") {
    std::mt19937 random(21);
    auto options = sized<opd_ngram_options>();
    options.bytes = 20000, options.shortest = 1, options.longest = 4;
    ngrams table, other;
    must(opd_ngram_table_create(&options, &table.h));
    must(opd_ngram_table_create(&options, &other.h));
    spec::ngram_table t({20000, 1, 4});
    std::int64_t keys = 0;
    std::uint64_t bytes = 0;
    must(opd_ngram_table_capacity(table, &keys, &bytes));
    CHECK(keys == t.capacity());
    CHECK(bytes == t.bytes());
    index_t drafted = 0;
    for (int trial = 0; trial < 400; ++trial) {
        text words;
        for (auto n = random() % 12; n > 0; --n) words.push_back(static_cast<std::int32_t>(random() % 6));
        std::vector<std::int64_t> wide(words.begin(), words.end());
        const tensor narrow = vector_of(words), dl_wide = vector_of(wide);
        const auto first = random() % (words.size() + 1);
        must(opd_ngram_table_learn(table, trial % 2 ? narrow : dl_wide, static_cast<std::int64_t>(first)));
        t.learn_text(words, first);
        text out(random() % 6, -7), want(out.size(), -7);
        const tensor dl_out = vector_of(out);
        const auto least = static_cast<std::int32_t>(random() % 3);
        std::int64_t count = -1;
        std::int32_t matched = -1;
        must(opd_ngram_table_draft(table, trial % 2 ? dl_wide : narrow, least, dl_out, &count, &matched));
        const auto d = t.draft(words, want, std::max(least, 1));
        CHECK(count == d.count);
        CHECK(matched == d.matched);
        std::fill(want.begin() + d.count, want.end(), -7);
        CHECK(out == want);
        drafted += count;
        if (trial == 200) {
            const auto state = bytes_of(opd_ngram_table_snapshot, table.h);
            must(opd_ngram_table_restore(other, state.data(), state.size()));
            std::swap(table.h, other.h);
        }
    }
    CHECK(drafted > 100);
    must(opd_ngram_table_clear(table));
    text some = {1, 2, 3}, out(2);
    const tensor dl_some = vector_of(some), dl_out = vector_of(out);
    std::int64_t count = -1;
    must(opd_ngram_table_draft(table, dl_some, 0, dl_out, &count, nullptr));
    CHECK(count == 0);
}

TEST_CASE("automata draft what the C++ automaton drafts, across a snapshot and until they are full") {
    std::mt19937 random(22);
    auto options = sized<opd_memory_options>();
    options.most_tokens = 1500;
    automaton a, other;
    must(opd_suffix_automaton_create(&options, &a.h));
    must(opd_suffix_automaton_create(&options, &other.h));
    spec::suffix_automaton s(1500);
    index_t drafted = 0, refused = 0;
    for (int trial = 0; trial < 1500; ++trial) {
        if (s.texts() == 0 || random() % 20 == 0) {
            std::int32_t number = -1;
            must(opd_suffix_automaton_begin(a, &number));
            CHECK(number == s.begin());
        }
        const auto which = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(s.texts()));
        text words;
        for (auto n = random() % 4; n > 0; --n) words.push_back(static_cast<std::int32_t>(random() % 3));
        const tensor dl = vector_of(words);
        std::int32_t learnt = -1;
        must(opd_suffix_automaton_append(a, which, dl, &learnt));
        CHECK((learnt == 1) == s.append(which, words));
        refused += learnt == 0;
        opd_match m = {};
        must(opd_suffix_automaton_longest(a, which, &m));
        const auto longest = s.longest(which);
        CHECK(m.length == longest.length);
        CHECK(m.text == longest.text);
        CHECK(m.position == longest.position);
        std::vector<std::int64_t> out(4, -7);
        text want(4, -7);
        const tensor dl_out = vector_of(out);
        std::int64_t count = -1;
        const auto least = static_cast<std::int32_t>(random() % 4);
        must(opd_suffix_automaton_draft(a, which, least, dl_out, &count));
        CHECK(count == s.draft(which, want, std::max(least, 1)));
        std::fill(want.begin() + count, want.end(), -7);
        CHECK(std::ranges::equal(out, want));
        drafted += count;
        if (trial % 300 == 250) {
            must(opd_suffix_automaton_end(a, which));
            s.close(which);
            const auto state = bytes_of(opd_suffix_automaton_snapshot, a.h);
            must(opd_suffix_automaton_restore(other, state.data(), state.size()));
            std::swap(a.h, other.h);
            must(opd_suffix_automaton_forget(a, 2));
            s.forget(2);
        }
        std::int64_t tokens = -1;
        std::int32_t texts = -1;
        std::uint64_t bytes = 0;
        must(opd_suffix_automaton_holds(a, &tokens, &texts, &bytes));
        CHECK(tokens == s.tokens());
        CHECK(texts == s.texts());
        CHECK(bytes > 0);
    }
    CHECK(drafted > 1000);
    CHECK(refused > 10);
}

TEST_CASE("prompt groups draft what the C++ groups draft, across epochs, a snapshot and want of room") {
    std::mt19937 random(23);
    auto options = sized<opd_memory_options>();
    options.most_tokens = 400;
    groups g, other;
    must(opd_prompt_groups_create(&options, &g.h));
    must(opd_prompt_groups_create(&options, &other.h));
    spec::prompt_groups s(400);
    std::vector<std::pair<opd_text_id, spec::prompt_groups::text_id>> answers;
    index_t drafted = 0, refused = 0;
    for (int trial = 0; trial < 1500; ++trial) {
        text words;
        for (auto n = random() % 5; n > 0; --n) words.push_back(static_cast<std::int32_t>(random() % 3));
        const tensor dl = vector_of(words);
        if (answers.empty() || random() % 12 == 0) {
            const std::uint64_t prompt = random() % 5;
            opd_text_id id = {};
            must(opd_prompt_groups_begin(g, prompt, trial / 300, words.empty() ? nullptr : &dl.t, &id));
            answers.push_back({id, s.begin(prompt, trial / 300, words)});
            CHECK(id.prompt == answers.back().second.prompt);
            CHECK(id.number == answers.back().second.number);
        }
        const auto& [id, of] = answers[random() % answers.size()];
        std::int32_t learnt = -1;
        must(opd_prompt_groups_append(g, &id, dl, &learnt));
        bool all = true;
        for (const std::int32_t t : words) all = s.append(of, t);
        CHECK((learnt == 1) == all);
        refused += learnt == 0;
        opd_match m = {};
        must(opd_prompt_groups_longest(g, &id, &m));
        CHECK(m.length == s.longest(of).length);
        CHECK(m.position == s.longest(of).position);
        text out(4, -7), want(4, -7);
        const tensor dl_out = vector_of(out);
        std::int64_t count = -1;
        must(opd_prompt_groups_draft(g, &id, 0, dl_out, &count));
        CHECK(count == s.draft(of, want));
        std::fill(want.begin() + count, want.end(), -7);
        CHECK(out == want);
        drafted += count;
        if (random() % 5 == 0) {
            must(opd_prompt_groups_end(g, &id));
            s.end(of);
        }
        if (trial % 300 == 299) {
            const auto state = bytes_of(opd_prompt_groups_snapshot, g.h);
            must(opd_prompt_groups_restore(other, state.data(), state.size()));
            std::swap(g.h, other.h);
        }
        std::int64_t now = -1, tokens = -1;
        must(opd_prompt_groups_holds(g, &now, &tokens, nullptr));
        CHECK(now == s.groups());
        CHECK(tokens == s.tokens());
    }
    CHECK(drafted > 1000);
    CHECK(refused > 10);
}

// --- tuners ----------------------------------------------------------------------------------------------------------

namespace {

const char* const tuner_names[] = {"beg_mab", "published_beg_mab", "ucb1", "fixed_table", "cost_profile"};

// The same tuner of each name twice: as the C interface makes it, and as C++ does.
struct tuner_setting {
    std::vector<opd_strategy> arms = {{8, 4, 48}, {4, 4, 48}, {8, 2, 20}, {3, 4, 20}, {4, 2, 8}, {2, 1, 8}};
    std::vector<std::int64_t> thresholds = {2, 4, 9};
    std::vector<opd_table_line> lines = {{2, {8, 4, 48}}, {5, {3, 2, 8}}};
    std::vector<opd_cost_point> target = {{1, 1.0}, {64, 1.3}, {512, 6.0}}, drafter = {{1, 0.05}, {8, 0.06}};
    opd_tuner_options options = sized<opd_tuner_options>();

    explicit tuner_setting(int which) {
        options.tuner = tuner_names[which];
        if (which != 3) options.arms = arms.data(), options.arm_count = 6;
        if (which < 3) {
            options.thresholds = thresholds.data(), options.threshold_count = 3;
            options.window = 12, options.tries = which == 1 ? 0 : 2;
            if (which < 2) options.epsilon = 0.2;
            if (which == 2) options.bonus = 0.5;
            if (which != 1) options.most_tokens = 500, options.reward = OPD_TOKENS_PER_SECOND;
        }
        if (which == 3) options.lines = lines.data(), options.line_count = 2;
        if (which == 4) {
            options.target = target.data(), options.target_count = 3;
            options.drafter = drafter.data(), options.drafter_count = 2;
            options.memory = 50, options.doubt = 0.1, options.most_tokens = 500;
        }
    }
    spec::any_tuner cpp(int which) const {
        spec::tuner_options o;
        o.arms.clear();
        for (const opd_strategy& s : arms) o.arms.push_back({s.depth, s.top_k, s.verify});
        o.thresholds.assign(thresholds.begin(), thresholds.end());
        o.window = 12, o.tries = 2, o.epsilon = 0.2, o.bonus = 0.5, o.most_tokens = 500;
        o.reward = spec::reward_kind::tokens_per_second;
        switch (which) {
        case 0:
            return spec::any_tuner(spec::beg_mab(o));
        case 1:
            o.tries = 1;
            return spec::any_tuner(spec::published_beg_mab(o));
        case 2:
            return spec::any_tuner(spec::ucb1(o));
        case 3:
            return spec::any_tuner(spec::fixed_table({{2, {8, 4, 48}}, {5, {3, 2, 8}}}));
        default:
            return spec::any_tuner(spec::cost_profile(
                {.arms = o.arms,
                 .target = spec::step_cost({{1, 1.0}, {64, 1.3}, {512, 6.0}}),
                 .drafter = spec::step_cost(std::vector<spec::step_cost::point>{{1, 0.05}, {8, 0.06}}),
                 .most_tokens = 500,
                 .memory = 50,
                 .doubt = 0.1}));
        }
    }
};

} // namespace

TEST_CASE("tuners choose as the C++ ones do, across a snapshot, with keyed numbers and with the caller's") {
    for (int which = 0; which < 5; ++which)
        for (const bool keyed : {true, false}) {
            CAPTURE(std::string(tuner_names[which]));
            const tuner_setting setting(which);
            tuner t, other;
            must(opd_tuner_create(&setting.options, &t.h));
            must(opd_tuner_create(&setting.options, &other.h));
            spec::any_tuner s = setting.cpp(which);
            std::mt19937 random(31), mine(7), theirs(7);
            const auto of = [](std::mt19937& r) { return (r() + 0.5) * 0x1p-32; };
            static std::mt19937* asked = nullptr;
            asked = &mine;
            std::map<std::string, int> chosen;
            for (std::uint64_t step = 0; step < 1500; ++step) {
                const auto batch = static_cast<index_t>(1 + random() % 12);
                const double accepted = static_cast<double>(random() % 400) / 100,
                             seconds = 0.5 + static_cast<double>(random() % 100) / 100;
                auto u = sized<opd_uniforms>();
                if (keyed)
                    u.seed = 9, u.step = step;
                else
                    u.draw = [](void*) { return (static_cast<double>((*asked)()) + 0.5) * 0x1p-32; };
                spec::keyed_uniforms k(9, step);
                const auto number = [&] { return keyed ? k() : of(theirs); };
                opd_strategy c = {-1, -1, -1};
                must(opd_tuner_choose(t, batch, &u, &c));
                const spec::strategy want = s.choose(batch, number);
                CHECK(same(c, want));
                ++chosen[std::to_string(c.depth) + "_" + std::to_string(c.top_k) + "_" + std::to_string(c.verify)];
                must(opd_tuner_heard(t, &c, batch, accepted, seconds, &u));
                s.heard(want, batch, accepted, seconds, number);
                if (which == 4) {
                    double rate = 0, kept = 0, time = 0;
                    must(opd_tuner_predict(t, &c, batch, &rate, &kept, &time));
                    const auto& p = std::get<spec::cost_profile>(s.get());
                    CHECK(rate == p.tokens_per_second(want, batch));
                    CHECK(kept == p.accepted(want));
                    CHECK(time == p.seconds(want, batch));
                }
                if (step == 700) {
                    const auto state = bytes_of(opd_tuner_snapshot, t.h);
                    must(opd_tuner_restore(other, state.data(), state.size()));
                    std::swap(t.h, other.h);
                }
            }
            CHECK(chosen.size() > 2);
        }
}

TEST_CASE("what a tuner is made of by default is what C++ makes it of") {
    const auto agree = [](const char* name, spec::any_tuner s, int no_exploration) {
        CAPTURE(name);
        auto options = sized<opd_tuner_options>();
        options.tuner = name, options.no_exploration = no_exploration;
        tuner t;
        must(opd_tuner_create(name == nullptr ? nullptr : &options, &t.h));
        std::mt19937 random(1);
        for (std::uint64_t step = 0; step < 3000; ++step) {
            const auto batch = static_cast<index_t>(1 + random() % 30);
            auto u = sized<opd_uniforms>();
            u.seed = 4, u.step = step;
            spec::keyed_uniforms k(4, step);
            opd_strategy c = {};
            must(opd_tuner_choose(t, batch, &u, &c));
            const spec::strategy want = s.choose(batch, k);
            CHECK(same(c, want));
            const double accepted = static_cast<double>(random() % 40) / 10;
            must(opd_tuner_heard(t, &c, batch, accepted, 1 + 0.01 * c.verify, &u));
            s.heard(want, batch, accepted, 1 + 0.01 * c.verify, k);
        }
    };
    agree(nullptr, spec::any_tuner(spec::beg_mab()), 0);
    agree("published_beg_mab", spec::any_tuner(spec::published_beg_mab()), 0);
    agree("ucb1", spec::any_tuner(spec::ucb1()), 0);
    agree("cost_profile", spec::any_tuner(spec::cost_profile({})), 0);
    spec::tuner_options still;
    still.epsilon = still.bonus = 0;
    agree("beg_mab", spec::any_tuner(spec::beg_mab(still)), 1);
    agree("ucb1", spec::any_tuner(spec::ucb1(still)), 1);
}

TEST_CASE("the switch, the selector and merged steps are those of C++, across snapshots") {
    std::mt19937 random(41);
    auto of_switch = sized<opd_elastic_options>();
    of_switch.on_at = 5, of_switch.off_at = 8, of_switch.checks = 3;
    elastic e, e2;
    must(opd_elastic_switch_create(&of_switch, &e.h));
    must(opd_elastic_switch_create(&of_switch, &e2.h));
    spec::elastic_switch s({.on_at = 5, .off_at = 8, .checks = 3});
    auto of_selector = sized<opd_drafter_selector_options>();
    of_selector.drafters = 4, of_selector.memory = 20, of_selector.tries = 2, of_selector.again = 30;
    selector d, d2;
    must(opd_drafter_selector_create(&of_selector, &d.h));
    must(opd_drafter_selector_create(&of_selector, &d2.h));
    spec::drafter_selector c({.drafters = 4, .memory = 20, .tries = 2, .again = 30});
    index_t running = 10, on = 0;
    for (int step = 0; step < 2000; ++step) {
        running = std::clamp<index_t>(running + static_cast<index_t>(random() % 5) - 2, 0, 12);
        std::int32_t now = -1;
        must(opd_elastic_switch_check(e, running, &now));
        CHECK((now == 1) == s.check(running));
        on += now;
        if (random() % 50 == 0) {
            const auto which = static_cast<index_t>(1 + random() % 3);
            const bool exists = random() % 3 != 0;
            must(opd_drafter_selector_set_exists(d, which, exists));
            c.exists(which, exists);
            must(opd_drafter_selector_exists(d, which, &now));
            CHECK((now == 1) == std::as_const(c).exists(which));
        }
        const auto batch = static_cast<index_t>(1 + random() % 40);
        std::int64_t which = -1;
        must(opd_drafter_selector_choose(d, batch, &which));
        CHECK(which == c.choose(batch));
        const double accepted = static_cast<double>(random() % 100) / 30;
        must(opd_drafter_selector_heard(d, which, batch, accepted, 0.5));
        c.heard(which, batch, accepted, 0.5);
        double rate = -1;
        must(opd_drafter_selector_predicted(d, which, batch, &rate));
        CHECK(rate == c.predicted(which, batch));
        if (step % 700 == 350) {
            const auto a = bytes_of(opd_elastic_switch_snapshot, e.h);
            must(opd_elastic_switch_restore(e2, a.data(), a.size()));
            std::swap(e.h, e2.h);
            const auto b = bytes_of(opd_drafter_selector_snapshot, d.h);
            must(opd_drafter_selector_restore(d2, b.data(), b.size()));
            std::swap(d.h, d2.h);
        }
        std::vector<opd_step_observation> ranks;
        std::vector<spec::step_observation> all;
        for (auto n = 1 + random() % 4; n > 0; --n) {
            ranks.push_back({static_cast<std::int64_t>(random() % 9), static_cast<double>(random() % 50) / 10,
                             static_cast<double>(1 + random() % 9)});
            all.push_back({ranks.back().batch, ranks.back().accepted, ranks.back().seconds});
        }
        opd_step_observation merged = {};
        must(opd_step_merged(ranks.data(), static_cast<std::int64_t>(ranks.size()), &merged));
        const spec::step_observation want = spec::merged(all);
        CHECK(merged.batch == want.batch);
        CHECK(merged.accepted == want.accepted);
        CHECK(merged.seconds == want.seconds);
    }
    CHECK(on > 100);
    CHECK(on < 1900);
}

// --- what is refused -------------------------------------------------------------------------------------------------

namespace {

// The call failed, of this argument and row, and said so.
void refused(int status, const std::string& argument, const std::string& part, std::int64_t row = -1) {
    CAPTURE(argument);
    CAPTURE(part);
    CAPTURE(std::string(opd_last_error()));
    CHECK(status == OPD_INVALID_INPUT);
    CHECK(opd_last_error_argument() == argument);
    CHECK(std::string(opd_last_error()).find(part) != std::string::npos);
    CHECK(opd_last_error_row() == row);
}

} // namespace

TEST_CASE("bad input to verify is named, and nothing is written") {
    text tokens = {1, 2, 0};
    std::vector<std::int64_t> parents = {-1, 0, 0}, offsets = {0, 2, 3}, samples = {1, 2}, positions = {3, 4};
    std::vector<float> p(5 * 3, 0.25f), q = p;
    const tensor dl_tokens = vector_of(tokens), dl_parents = vector_of(parents), dl_offsets = vector_of(offsets),
                 dl_samples = vector_of(samples), dl_positions = vector_of(positions), dl_p(p.data(), {4, 3}),
                 dl_q(q.data(), {4, 3}), p_of_two(p.data(), {5, 3}), q_of_two(q.data(), {5, 3});
    auto drafts = sized<opd_drafts>();
    drafts.tokens = dl_tokens, drafts.parents = dl_parents;
    auto call = sized<opd_verify_call>();
    call.drawn = "iid_siblings", call.drafts = &drafts, call.p = dl_p, call.q = dl_q;
    auto coins = sized<opd_coins>();
    coins.accept = [](void*, double) { return 0; };
    coins.draw = [](void*, const double*, std::int64_t) { return std::int64_t{0}; };

    std::vector<opd_verdict> got(3, opd_verdict{-9, -9, -9, -9});
    must(opd_verify(&call, got.data()));
    const auto bad = [&](auto&& change, const char* argument, const char* part, std::int64_t row = -1) {
        auto c = call;
        auto d = drafts;
        auto k = coins;
        c.drafts = &d;
        change(c, d, k);
        std::vector<opd_verdict> out(3, opd_verdict{-9, -9, -9, -9});
        refused(opd_verify(&c, out.data()), argument, part, row);
        for (const opd_verdict& v : out) CHECK((v.accepted == -9 && v.node == -9 && v.next == -9));
    };
    refused(opd_verify(nullptr, got.data()), "call", "null pointer");
    refused(opd_verify(&call, nullptr), "verdicts", "null pointer");
    bad([](auto& c, auto&, auto&) { c.struct_size = 3; }, "call.struct_size", "sizeof");
    bad([](auto& c, auto&, auto&) { c.drawn = nullptr; }, "drawn",
        "null pointer; it is one of one_hot, dense, iid_siblings, without_replacement");
    bad([](auto& c, auto&, auto&) { c.drawn = "iid"; }, "drawn", "is 'iid'; it is one of one_hot, dense");
    bad([](auto& c, auto&, auto&) { c.drawn = "one_hot"; }, "q", "is not read");
    bad([](auto& c, auto&, auto&) { c.drawn = "dense"; }, "drafts", "dense drafts are one a node", 0);
    bad([](auto& c, auto&, auto&) { c.block = 1; }, "block", "chains of `dense`");
    bad([](auto& c, auto&, auto&) { c.drawn = "dense", c.block = 1; }, "drafts", "a block is a chain", 2);
    bad([](auto& c, auto&, auto&) { c.block = 2; }, "block", "is 2");
    bad([](auto& c, auto&, auto&) { c.drafts = nullptr; }, "drafts", "null pointer");
    bad([](auto&, auto& d, auto&) { d.struct_size = 1; }, "drafts.struct_size", "is 1");
    bad([](auto& c, auto&, auto&) { c.p = nullptr; }, "p", "null pointer");
    bad([](auto& c, auto&, auto&) { c.q = nullptr; }, "q", "null pointer");
    bad([&](auto& c, auto&, auto&) { c.p = p_of_two; }, "p", "is (5, 3), not (4, V)");
    bad([&](auto& c, auto&, auto&) { c.q = q_of_two; }, "q", "is (5, 3), not (4, 3)");
    bad([&](auto& c, auto&, auto&) { c.p = dl_tokens; }, "p", "a matrix has at least 2");
    const tensor integers(tokens.data(), {1, 3}), apart(p.data(), {4, 2}, {3, 2}),
        nothing(static_cast<float*>(nullptr), {4, 3});
    bad([&](auto& c, auto&, auto&) { c.p = integers; }, "p", "is of int32, not float32, float64, bfloat16 or float16");
    bad([&](auto& c, auto&, auto&) { c.p = apart; }, "p", "stride of 2");
    bad([&](auto& c, auto&, auto&) { c.q = nothing; }, "q", "null pointer");
    bad([&](auto&, auto& d, auto&) { d.tokens = dl_p; }, "drafts.tokens", "is of float32, not int32 or int64");
    bad([&](auto&, auto& d, auto&) { d.tokens = nullptr; }, "drafts.parents", "has 3 entries for 0 tokens");
    text up = {-1, 1, 0}, down = {-2, 0, 0}, outside = {1, 3, 0};
    std::vector<std::int64_t> wide = {1, 2, std::int64_t{1} << 40}, few = {1};
    const tensor dl_up = vector_of(up), dl_down = vector_of(down), dl_outside = vector_of(outside),
                 dl_wide = vector_of(wide), dl_few = vector_of(few);
    bad([&](auto&, auto& d, auto&) { d.parents = dl_up; }, "drafts.parents", "an earlier node", 1);
    bad([&](auto&, auto& d, auto&) { d.parents = dl_down; }, "drafts.parents", "is -2", 0);
    bad([&](auto&, auto& d, auto&) { d.parents = dl_few; }, "drafts.parents", "has 1 entries for 3 tokens");
    bad([&](auto&, auto& d, auto&) { d.tokens = dl_outside; }, "drafts", "token 3 of a vocabulary of 3", 1);
    bad([&](auto&, auto& d, auto&) { d.tokens = dl_wide; }, "drafts.tokens", "does not fit in 32 bits", 2);
    bad([&](auto& c, auto&, auto&) { c.samples = dl_samples; }, "samples", "one sequence has `sample`");
    bad([&](auto& c, auto&, auto&) { c.positions = dl_positions; }, "positions", "one sequence has `sample`");
    // coins of the caller's
    bad([&](auto& c, auto&, auto& k) { k.accept = nullptr, c.coins = &k; }, "coins.accept", "null pointer");
    bad([&](auto& c, auto&, auto& k) { k.draw = nullptr, c.coins = &k; }, "coins.draw", "null pointer");
    bad([&](auto& c, auto&, auto& k) { c.seed = 1, c.coins = &k; }, "seed", "have no key");
    bad([&](auto& c, auto&, auto& k) { c.sample = 1, c.coins = &k; }, "sample", "have no key");
    bad([&](auto& c, auto&, auto& k) { c.position = 1, c.coins = &k; }, "position", "have no key");
    bad([](auto& c, auto&, auto& k) { k.accept = [](void*, double) { return 2; }, c.coins = &k; }, "coins.accept",
        "returned 2");
    bad([](auto& c, auto&, auto& k) { k.draw = [](void*, const double*, std::int64_t n) { return n; }, c.coins = &k; },
        "coins.draw", "returned 3, which has no weight");
    // a batch: rows and nodes are counted over all of it
    std::vector<std::int64_t> late = {1, 2, 3}, falls = {0, 3, 2}, ends = {0, 2, 2}, none;
    const tensor dl_late = vector_of(late), dl_falls = vector_of(falls), dl_ends = vector_of(ends),
                 dl_none = vector_of(none);
    parents = {-1, 0, -1};
    const auto two = [&](auto& c, auto& d) {
        d.offsets = dl_offsets, c.p = p_of_two, c.q = q_of_two, c.samples = dl_samples, c.positions = dl_positions;
    };
    bad([&](auto& c, auto& d, auto&) { two(c, d), d.offsets = dl_late; }, "drafts.offsets", "begins with 1", 0);
    bad([&](auto& c, auto& d, auto&) { two(c, d), d.offsets = dl_falls; }, "drafts.offsets", "falls", 2);
    bad([&](auto& c, auto& d, auto&) { two(c, d), d.offsets = dl_ends; }, "drafts.offsets", "not with 3", 2);
    bad([&](auto& c, auto& d, auto&) { two(c, d), d.offsets = dl_none; }, "drafts.offsets", "is empty");
    bad([&](auto& c, auto& d, auto&) { two(c, d), c.samples = nullptr; }, "samples", "null pointer");
    bad([&](auto& c, auto& d, auto&) { two(c, d), c.positions = dl_few; }, "positions", "has 1 entries for 2");
    bad([&](auto& c, auto& d, auto&) { two(c, d), c.samples = dl_p; }, "samples", "an integer of 32 or 64 bits");
    bad([&](auto& c, auto& d, auto&) { two(c, d), c.sample = 1; }, "sample", "a batch has `samples`");
    positions[1] = -1;
    bad([&](auto& c, auto& d, auto&) { two(c, d); }, "positions", "must lie in [0, 2^32)", 1);
    positions[1] = 4;
    p[9] = -1; // row 3: the prefix's of the second sequence
    bad([&](auto& c, auto& d, auto&) { two(c, d); }, "p", "is no law", 3);
    p[9] = 0.25f, q[10] = std::numeric_limits<float>::quiet_NaN();
    bad([&](auto& c, auto& d, auto&) { two(c, d); }, "q", "is no law", 3);
    q[10] = 0.25f, tokens[2] = 7;
    bad([&](auto& c, auto& d, auto&) { two(c, d); }, "drafts", "token 7 of a vocabulary of 3", 2);

    // what a newer header may have, and another device
    struct larger {
        opd_verify_call call;
        int more;
    } later = {call, 1};
    later.call.struct_size = sizeof later;
    CHECK(opd_verify(&later.call, got.data()) == OPD_UNSUPPORTED);
    tensor device(p.data(), {4, 3});
    device.t.device.device_type = kDLCUDA;
    auto on_device = call;
    tokens[2] = 0, parents = {-1, 0, 0};
    on_device.p = device;
    CHECK(opd_verify(&on_device, got.data()) == OPD_UNSUPPORTED);
    CHECK(std::string(opd_last_error()).find("p: lies on a device") != std::string::npos);
}

TEST_CASE("bad input to follow is named, and nothing is written") {
    text tokens = {1, 2};
    std::vector<std::int64_t> own = {1, 2, std::int64_t{1} << 33}, few = {1};
    const tensor dl_tokens = vector_of(tokens), dl_own = vector_of(own), dl_few = vector_of(few);
    auto drafts = sized<opd_drafts>();
    drafts.tokens = dl_tokens;
    auto call = sized<opd_follow_call>();
    call.drafts = &drafts;
    opd_verdict v = {-9, -9, -9, -9};
    refused(opd_follow(nullptr, &v), "call", "null pointer");
    refused(opd_follow(&call, &v), "own", "one of them");
    call.own = dl_few;
    refused(opd_follow(&call, nullptr), "verdicts", "null pointer");
    refused(opd_follow(&call, &v), "own", "has 1 entries for 3 rows");
    call.own = dl_own;
    refused(opd_follow(&call, &v), "own", "does not fit in 32 bits", 2);
    call.context = &v;
    refused(opd_follow(&call, &v), "context", "is of draw");
    call.draw = [](void*, const opd_due*, std::int64_t, std::int32_t*) { return 5; };
    refused(opd_follow(&call, &v), "own", "no more");
    call.own = nullptr;
    refused(opd_follow(&call, &v), "draw", "returned 5");
    CHECK((v.accepted == -9 && v.node == -9 && v.next == -9));
}

TEST_CASE("bad input to trees, rates and budgets is named") {
    auto rate_options = sized<opd_follow_rates_options>();
    rates_handle rates;
    refused(opd_follow_rates_create(nullptr, nullptr), "out", "null pointer");
    rate_options.memory = 0.5;
    refused(opd_follow_rates_create(&rate_options, &rates.h), "options.memory", "at least 1");
    rate_options.memory = 0, rate_options.prior_weight = -1;
    refused(opd_follow_rates_create(&rate_options, &rates.h), "options.prior_weight", "positive");
    CHECK(rates.h == nullptr);
    must(opd_follow_rates_create(nullptr, &rates.h));
    std::int32_t cell = -9;
    refused(opd_follow_rates_by_rank(0, 0, 0, &cell), "depth", "is 0");
    refused(opd_follow_rates_by_rank(1, -1, 0, &cell), "rank", "is -1");
    refused(opd_follow_rates_by_rank(1, 0, std::nan(""), &cell), "gap", "at least 0");
    refused(opd_follow_rates_by_match(1, 0, &cell), "matched", "is 0");
    refused(opd_follow_rates_any_gap(1, 0, nullptr), "cell", "null pointer");
    CHECK(cell == -9);
    double rate = -9;
    refused(opd_follow_rates_of(rates, -1, &rate, nullptr), "cell", "there is no cell -1");
    refused(opd_follow_rates_learn(rates, 1 << 20, 1), "cell", "there is no cell");
    refused(opd_follow_rates_learn(rates, 0, 2), "followed", "is 2");
    CHECK(rate == -9);

    tree_handle tree;
    refused(opd_draft_tree_create(nullptr), "out", "null pointer");
    must(opd_draft_tree_create(&tree.h));
    std::int64_t n = -9;
    refused(opd_draft_tree_size(tree, &n), "tree", "has not begun");
    refused(opd_draft_tree_begin(tree, nullptr), "rates", "null pointer");
    refused(opd_draft_tree_begin(nullptr, rates), "tree", "null pointer");
    const opd_verdict v = {0, 3, 1, 0};
    refused(opd_draft_tree_learn(tree, rates, &v), "tree", "has not begun");
    must(opd_draft_tree_begin(tree, rates));
    std::vector<float> z = {1, 2, 3};
    text chain = {1, 2};
    const tensor dl_z = vector_of(z), dl_chain = vector_of(chain), apart(z.data(), {2}, {2});
    auto law = sized<opd_draft_law>();
    const auto grow = [&](auto&& change) {
        auto l = law;
        change(l);
        return opd_draft_tree_grow(tree, -1, dl_z, &l, 2, &n);
    };
    refused(grow([](auto& l) { l.greedy = 3; }), "law.greedy", "is 3");
    refused(grow([](auto& l) { l.greedy = 1, l.seed = 3; }), "law.seed", "neither filter nor noise");
    refused(grow([](auto& l) { l.greedy = 1, l.top_p = 0.5f; }), "law.top_p", "neither filter nor noise");
    refused(grow([](auto& l) { l.temperature = -1; }), "law.temperature", "between");
    refused(grow([](auto& l) { l.top_p = 2; }), "law.top_p", "(0, 1]");
    refused(grow([](auto& l) { l.min_p = 2; }), "law.min_p", "[0, 1]");
    refused(grow([](auto& l) { l.top_k = -1; }), "law.top_k", "0, for all ids");
    refused(grow([](auto& l) { l.reserved = 1; }), "law.reserved", "no meaning");
    refused(opd_draft_tree_grow(tree, -1, dl_z, nullptr, 0, &n), "top_k", "at least 1");
    refused(opd_draft_tree_grow(tree, 0, dl_z, nullptr, 2, &n), "parent", "there is no node 0");
    refused(opd_draft_tree_grow(tree, -2, dl_z, nullptr, 2, &n), "parent", "there is no node -2");
    refused(opd_draft_tree_grow(tree, -1, nullptr, nullptr, 2, &n), "z", "null pointer");
    refused(opd_draft_tree_grow(tree, -1, dl_chain, nullptr, 2, &n), "z", "is of int32");
    refused(opd_draft_tree_grow(tree, -1, apart, nullptr, 2, &n), "z", "contiguous");
    refused(opd_draft_tree_graft(tree, dl_z, 2, &n), "chain", "is of float32");
    refused(opd_draft_tree_graft(tree, dl_chain, 0, &n), "matched", "at least 1");
    refused(opd_draft_tree_imagine(tree, -1, 2), "depth", "is -1");
    refused(opd_draft_tree_imagine(tree, 2, 0), "top_k", "at least 1");
    refused(opd_draft_tree_imagine(tree, 1000000000, 1000000000), "top_k", "2^22 nodes");
    CHECK(n == -9);
    must(opd_draft_tree_size(tree, &n));
    CHECK(n == 0); // none of it left a node
    must(opd_draft_tree_grow(tree, -1, dl_z, nullptr, 3, nullptr));
    n = -9;
    opd_draft_node node = {-9, -9, -9, -9};
    refused(opd_draft_tree_node(tree, 3, &node), "node", "there is no node 3");
    refused(opd_draft_tree_node(tree, 0, nullptr), "out", "null pointer");
    refused(opd_draft_tree_size(tree, nullptr), "size", "null pointer");
    std::int64_t numbers[3] = {};
    refused(opd_draft_tree_best_of_depth(tree, 1, nullptr, 3, &n), "nodes", "null pointer");
    refused(opd_draft_tree_best_of_depth(tree, 1, numbers, -1, &n), "most", "is -1");
    double gains[3] = {};
    refused(opd_draft_tree_gains(tree, gains, 2), "size", "is 2; the tree has 3");
    refused(opd_draft_tree_gains(tree, nullptr, 3), "gains", "null pointer");
    refused(opd_draft_tree_select(tree, -1, nullptr, nullptr, nullptr, &n), "verify", "at least 0");
    refused(opd_draft_tree_select(tree, 3, dl_chain, nullptr, nullptr, &n), "tokens", "room for 2 of 3");
    refused(opd_draft_tree_select(tree, 2, nullptr, dl_z, nullptr, &n), "parents", "is of float32");
    must(opd_draft_tree_select(tree, 2, nullptr, nullptr, nullptr, nullptr));
    refused(opd_draft_tree_learn(tree, rates, &v), "verdict", "not of the tree");
    refused(opd_draft_tree_learn(tree, rates, nullptr), "verdict", "null pointer");
    CHECK((n == -9 && node.depth == -9 && chain == text{1, 2}));

    std::vector<double> all = {0.9, 0.5, 0.7}, left = {3, 4};
    std::vector<std::int64_t> offsets = {0, 2, 3};
    text shares = {-9, -9}, three = {0, 0, 0};
    const tensor dl_gains = vector_of(all), dl_left = vector_of(left), dl_offsets = vector_of(offsets),
                 dl_shares = vector_of(shares), dl_three = vector_of(three);
    const opd_cost_point points[] = {{1, 1.0}, {4, 1.5}}, falling[] = {{4, 1.0}, {1, 2.0}};
    auto budget = sized<opd_draft_budget>();
    budget.gains = dl_gains, budget.offsets = dl_offsets, budget.remaining = dl_left;
    budget.cost = points, budget.cost_count = 2;
    const auto share = [&](auto&& change) {
        auto b = budget;
        change(b);
        return opd_draft_budget_share(&b, dl_shares, &rate);
    };
    refused(opd_draft_budget_share(nullptr, dl_shares, &rate), "budget", "null pointer");
    refused(opd_draft_budget_share(&budget, dl_three, &rate), "shares", "has 3 entries for 2");
    refused(opd_draft_budget_share(&budget, nullptr, &rate), "shares", "null pointer");
    refused(share([&](auto& b) { b.gains = dl_z; }), "budget.gains", "is of float32, not float64");
    refused(share([&](auto& b) { b.gains = nullptr; }), "budget.offsets", "ends with 3, not with 0", 2);
    refused(share([&](auto& b) { b.offsets = nullptr; }), "budget.offsets", "null pointer");
    refused(share([&](auto& b) { b.remaining = dl_gains; }), "budget.remaining", "has 3 entries for 2");
    refused(share([&](auto& b) { b.cost = nullptr; }), "budget.cost", "null pointer");
    refused(share([&](auto& b) { b.cost = nullptr, b.cost_count = 0; }), "budget.cost", "there is none");
    refused(share([&](auto& b) { b.cost_count = -1; }), "budget.cost_count", "is -1");
    refused(share([&](auto& b) { b.cost = falling; }), "budget.cost", "rise", 1);
    refused(share([&](auto& b) { b.most_rows = -1; }), "budget.most_rows", "at least 0");
    refused(share([&](auto& b) { b.tail = -1; }), "budget.tail", "at least 0");
    refused(share([&](auto& b) { b.tail = 2, b.all_alike = 1; }), "budget.tail", "all sequences are alike");
    refused(share([&](auto& b) { b.draft_seconds = std::nan(""); }), "budget.draft_seconds", "finite");
    refused(share([&](auto& b) { b.seconds_per_node = -1; }), "budget.seconds_per_node", "at least 0");
    refused(share([&](auto& b) { b.reserved = 1; }), "budget.reserved", "no meaning");
    all[2] = 1.5;
    refused(share([](auto&) {}), "budget.gains", "in [0, 1]", 1);
    all[2] = 0.7, left[0] = 0;
    refused(share([](auto&) {}), "budget.remaining", "positive", 0);
    CHECK((shares == text{-9, -9} && rate == -9));
    refused(opd_step_seconds(points, 2, -1, &rate), "rows", "is -1");
    refused(opd_step_seconds(falling, 2, 1, &rate), "points", "rise", 1);
    refused(opd_step_seconds(nullptr, 2, 1, &rate), "points", "null pointer");
}

TEST_CASE("bad input to drafters is named") {
    auto of_table = sized<opd_ngram_options>();
    ngrams table;
    of_table.bytes = 8;
    refused(opd_ngram_table_create(&of_table, &table.h), "options.bytes", "must be at least");
    of_table.bytes = 0, of_table.longest = 17;
    refused(opd_ngram_table_create(&of_table, &table.h), "options.longest", "[1, 16]");
    of_table.longest = 3, of_table.shortest = 4;
    refused(opd_ngram_table_create(&of_table, &table.h), "options.shortest", "[1, longest]");
    auto of_memory = sized<opd_memory_options>();
    of_memory.most_tokens = -1;
    automaton a;
    groups g;
    refused(opd_suffix_automaton_create(&of_memory, &a.h), "options.most_tokens", "[1, 2^29]");
    refused(opd_prompt_groups_create(&of_memory, &g.h), "options.most_tokens", "[1, 2^29]");
    CHECK((table.h == nullptr && a.h == nullptr && g.h == nullptr));
    must(opd_ngram_table_create(nullptr, &table.h));
    must(opd_suffix_automaton_create(nullptr, &a.h));
    must(opd_prompt_groups_create(nullptr, &g.h));
    text words = {1, 2, 1, 2}, out = {-9, -9};
    std::vector<float> z = {1};
    const tensor dl = vector_of(words), dl_out = vector_of(out), dl_z = vector_of(z);
    std::int64_t count = -9;
    refused(opd_ngram_table_learn(table, dl_z, 0), "text", "is of float32");
    refused(opd_ngram_table_learn(table, dl, 5), "first", "is 5; it must lie in [0, 4]");
    must(opd_ngram_table_learn(table, dl, 0));
    refused(opd_ngram_table_draft(table, dl, -1, dl_out, &count, nullptr), "least", "is -1");
    refused(opd_ngram_table_draft(table, nullptr, 0, dl_out, &count, nullptr), "before", "null pointer");
    refused(opd_ngram_table_draft(table, dl, 0, dl_z, &count, nullptr), "out", "is of float32");
    refused(opd_ngram_table_draft(table, dl, 0, dl_out, nullptr, nullptr), "count", "null pointer");
    std::int32_t t = -9;
    refused(opd_suffix_automaton_begin(a, nullptr), "text", "null pointer");
    refused(opd_suffix_automaton_append(a, 0, dl, nullptr), "text", "there is no text 0");
    must(opd_suffix_automaton_begin(a, &t));
    must(opd_suffix_automaton_append(a, t, dl, nullptr));
    text empty;
    const tensor dl_empty = vector_of(empty);
    refused(opd_suffix_automaton_append(a, 1, dl_empty, nullptr), "text", "there is no text 1");
    refused(opd_suffix_automaton_append(a, t, dl_z, nullptr), "tokens", "is of float32");
    refused(opd_suffix_automaton_draft(a, 2, 0, dl_out, &count), "text", "there is no text 2");
    refused(opd_suffix_automaton_draft(a, t, -1, dl_out, &count), "least", "is -1");
    refused(opd_suffix_automaton_end(a, 2), "text", "there is no text 2");
    refused(opd_suffix_automaton_longest(a, 0, nullptr), "match", "null pointer");
    refused(opd_suffix_automaton_forget(a, 2), "count", "[0, 1]");
    opd_text_id id = {};
    refused(opd_prompt_groups_begin(g, 1, 0, dl, nullptr), "text", "null pointer");
    refused(opd_prompt_groups_begin(g, 1, 0, dl_z, &id), "tokens", "is of float32");
    must(opd_prompt_groups_begin(g, 1, 0, dl, &id));
    refused(opd_prompt_groups_append(g, nullptr, dl, nullptr), "text", "null pointer");
    refused(opd_prompt_groups_draft(g, &id, 0, nullptr, &count), "out", "null pointer");
    CHECK((count == -9 && out == text{-9, -9}));
}

TEST_CASE("bad input to tuners, the switch and the selector is named") {
    tuner t;
    const auto make = [&](const char* name, auto&& change) {
        auto o = sized<opd_tuner_options>();
        o.tuner = name;
        change(o);
        return opd_tuner_create(&o, &t.h);
    };
    const opd_strategy arms[] = {{4, 2, 8}, {4, 2, 8}}, huge[] = {{4, 2, 8}, {4, 2, 2000000000}}, flat[] = {{4, 0, 8}};
    const std::int64_t falling[] = {1, 9, 5, 20};
    const opd_table_line lines[] = {{5, {1, 1, 1}}, {5, {1, 1, 1}}}, negative[] = {{5, {1, 1, -1}}};
    const opd_cost_point bad_points[] = {{1, 0.0}};
    refused(make("beg", [](auto&) {}), "options.tuner", "is 'beg'; it is one of beg_mab, published_beg_mab, ucb1");
    const auto bandit = [&](auto&& change) { return make("beg_mab", change); };
    refused(bandit([&](auto& o) { o.arms = arms, o.arm_count = 2; }), "options.arms", "is there twice", 1);
    refused(bandit([&](auto& o) { o.arms = huge, o.arm_count = 2; }), "options.arms", "at most 2^30", 1);
    refused(bandit([&](auto& o) { o.arms = flat, o.arm_count = 1; }), "options.arms", "at least 1", 0);
    refused(bandit([&](auto& o) { o.arms = arms; }), "options.arm_count", "is 0");
    refused(bandit([&](auto& o) { o.arm_count = 2; }), "options.arms", "null pointer");
    refused(bandit([&](auto& o) { o.thresholds = falling, o.threshold_count = 4; }), "options.thresholds", "rise", 2);
    refused(bandit([&](auto& o) { o.thresholds = falling, o.threshold_count = 3; }), "options.thresholds",
            "of tokens to verify, 4, not 3");
    refused(bandit([](auto& o) { o.epsilon = 2; }), "options.epsilon", "[0, 1]");
    refused(bandit([](auto& o) { o.epsilon = 0.5, o.no_exploration = 1; }), "options.epsilon", "no_exploration");
    refused(bandit([](auto& o) { o.no_exploration = 2; }), "options.no_exploration", "is 2");
    refused(bandit([](auto& o) { o.window = -1; }), "options.window", "is -1");
    refused(bandit([](auto& o) { o.tries = 301; }), "options.tries", "[1, window]");
    refused(bandit([](auto& o) { o.most_tokens = -1; }), "options.most_tokens", "at least 0");
    refused(bandit([](auto& o) { o.reward = 2; }), "options.reward", "is 2");
    refused(make("ucb1", [](auto& o) { o.bonus = -1; }), "options.bonus", "at least 0");
    refused(make("fixed_table", [&](auto& o) { o.lines = lines, o.line_count = 2; }), "options.lines", "rise", 1);
    refused(make("fixed_table", [&](auto& o) { o.lines = negative, o.line_count = 1; }), "options.lines", "at least 0",
            0);
    refused(make("cost_profile", [&](auto& o) { o.target = bad_points, o.target_count = 1; }), "options.target",
            "positive", 0);
    refused(make("cost_profile", [&](auto& o) { o.drafter = bad_points, o.drafter_count = 1; }), "options.drafter",
            "positive", 0);
    refused(make("cost_profile", [](auto& o) { o.memory = 0.5; }), "options.memory", "at least 1");
    refused(make("cost_profile", [](auto& o) { o.doubt = -1; }), "options.doubt", "positive");
    // what a tuner does not have
    refused(bandit([](auto& o) { o.bonus = 1; }), "options.bonus", "beg_mab has no such option");
    refused(bandit([&](auto& o) { o.lines = lines, o.line_count = 2; }), "options.lines", "beg_mab has no such");
    refused(bandit([](auto& o) { o.memory = 9; }), "options.memory", "beg_mab has no such");
    refused(bandit([](auto& o) { o.doubt = 9; }), "options.doubt", "beg_mab has no such");
    refused(bandit([](auto& o) { o.target_count = 1; }), "options.target", "beg_mab has no such");
    refused(bandit([](auto& o) { o.drafter_count = 1; }), "options.drafter", "beg_mab has no such");
    refused(make("ucb1", [](auto& o) { o.epsilon = 0.1; }), "options.epsilon", "ucb1 has no such");
    refused(make("published_beg_mab", [](auto& o) { o.reward = 1; }), "options.reward", "published_beg_mab has no");
    refused(make("published_beg_mab", [](auto& o) { o.most_tokens = 1; }), "options.most_tokens", "has no such");
    refused(make("fixed_table", [&](auto& o) { o.arms = flat, o.arm_count = 1; }), "options.arms",
            "fixed_table has no");
    refused(make("fixed_table", [&](auto& o) { o.threshold_count = 1; }), "options.thresholds", "fixed_table has no");
    refused(make("cost_profile", [](auto& o) { o.window = 3; }), "options.window", "cost_profile has no such");
    refused(make("cost_profile", [](auto& o) { o.tries = 3; }), "options.tries", "cost_profile has no such");
    refused(make("cost_profile", [](auto& o) { o.no_exploration = 1; }), "options.no_exploration", "has no such");
    refused(opd_tuner_create(nullptr, nullptr), "out", "null pointer");
    CHECK(t.h == nullptr);

    must(opd_tuner_create(nullptr, &t.h));
    auto u = sized<opd_uniforms>();
    opd_strategy s = {-9, -9, -9};
    refused(opd_tuner_choose(t, 0, &u, &s), "batch", "is 0");
    refused(opd_tuner_choose(t, std::int64_t{1} << 31, &u, &s), "batch", "must lie in [1, 2147483647]");
    refused(opd_tuner_choose(t, 1, &u, nullptr), "chosen", "null pointer");
    refused(opd_tuner_choose(t, 1, nullptr, &s), "uniforms", "beg_mab draws numbers");
    const auto draw = [&](auto&& change) {
        auto x = u;
        change(x);
        return opd_tuner_choose(t, 1, &x, &s);
    };
    refused(draw([](auto& x) { x.asked = 70000; }), "uniforms.asked", "at most 65536");
    refused(draw([](auto& x) { x.reserved = 1; }), "uniforms.reserved", "no meaning");
    refused(draw([&](auto& x) { x.context = &x; }), "uniforms.context", "is of draw");
    refused(draw([](auto& x) { x.draw = [](void*) { return 0.5; }, x.seed = 1; }), "uniforms.seed", "no key");
    for (const double number : {0.0, 1.0, -1.0}) {
        static double given;
        given = number;
        refused(draw([](auto& x) { x.draw = [](void*) { return given; }; }), "uniforms.draw", "(0, 1)");
    }
    refused(draw([](auto& x) { x.draw = [](void*) { return std::nan(""); }; }), "uniforms.draw", "(0, 1)");
    const opd_strategy arm = {8, 4, 48};
    refused(opd_tuner_heard(t, &arm, 0, 1, 1, &u), "batch", "is 0");
    refused(opd_tuner_heard(t, &arm, 1, -1, 1, &u), "accepted", "at least 0");
    refused(opd_tuner_heard(t, &arm, 1, 1, 0, &u), "seconds", "positive");
    refused(opd_tuner_heard(t, nullptr, 1, 1, 1, &u), "strategy", "null pointer");
    CHECK(opd_tuner_predict(t, &arm, 1, nullptr, nullptr, nullptr) == OPD_UNSUPPORTED);
    CHECK(std::string(opd_last_error()).find("of cost_profile, not of beg_mab") != std::string::npos);
    CHECK((s.depth == -9 && s.top_k == -9 && s.verify == -9 && u.asked == 0));
    tuner published;
    auto o = sized<opd_tuner_options>();
    o.tuner = "published_beg_mab";
    must(opd_tuner_create(&o, &published.h));
    refused(opd_tuner_heard(published, &arm, 1, 1, 1, nullptr), "uniforms", "published_beg_mab draws numbers");
    tuner profile;
    o.tuner = "cost_profile";
    must(opd_tuner_create(&o, &profile.h));
    const opd_strategy deep = {4, 2, 2000000000};
    refused(opd_tuner_predict(profile, &deep, 1, nullptr, nullptr, nullptr), "strategy.verify", "is 2000000000");
    must(opd_tuner_choose(profile, 1, nullptr, &s)); // it draws none

    elastic e;
    auto of_switch = sized<opd_elastic_options>();
    of_switch.on_at = 50;
    refused(opd_elastic_switch_create(&of_switch, &e.h), "options.off_at", "at least on_at");
    of_switch.on_at = 0, of_switch.checks = -1;
    refused(opd_elastic_switch_create(&of_switch, &e.h), "options.checks", "at least 1");
    must(opd_elastic_switch_create(nullptr, &e.h));
    std::int32_t on = -9;
    refused(opd_elastic_switch_check(e, -1, &on), "running", "is -1");
    refused(opd_elastic_switch_check(e, 1, nullptr), "on", "null pointer");
    selector d;
    auto of_selector = sized<opd_drafter_selector_options>();
    of_selector.drafters = std::int64_t{1} << 40;
    refused(opd_drafter_selector_create(&of_selector, &d.h), "options.drafters", "must lie in [0, 1048576]");
    of_selector.drafters = 0, of_selector.memory = -1;
    refused(opd_drafter_selector_create(&of_selector, &d.h), "options.memory", "at least 1");
    of_selector.memory = 0, of_selector.tries = -1;
    refused(opd_drafter_selector_create(&of_selector, &d.h), "options.tries", "at least 1");
    of_selector.tries = 0, of_selector.again = -1;
    refused(opd_drafter_selector_create(&of_selector, &d.h), "options.again", "at least 1");
    must(opd_drafter_selector_create(nullptr, &d.h));
    std::int64_t which = -9;
    double rate = -9;
    refused(opd_drafter_selector_set_exists(d, 2, 1), "drafter", "there is no drafter 2");
    refused(opd_drafter_selector_set_exists(d, 1, 2), "now", "is 2");
    refused(opd_drafter_selector_exists(d, -1, &on), "drafter", "there is no drafter -1");
    refused(opd_drafter_selector_choose(d, 0, &which), "batch", "at least 1");
    refused(opd_drafter_selector_heard(d, 0, 1, -1, 1), "accepted", "at least 0");
    refused(opd_drafter_selector_heard(d, 5, 1, 1, 1), "drafter", "there is no drafter 5");
    refused(opd_drafter_selector_predicted(d, 0, 0, &rate), "batch", "at least 1");
    must(opd_drafter_selector_set_exists(d, 0, 0));
    refused(opd_drafter_selector_choose(d, 1, &which), "drafters", "none exists");
    CHECK((on == -9 && which == -9 && rate == -9));
    const opd_step_observation ranks[] = {{1, 1, 1}, {-1, 1, 1}};
    opd_step_observation merged = {-9, -9, -9};
    refused(opd_step_merged(ranks, 2, &merged), "ranks.batch", "at least 0", 1);
    refused(opd_step_merged(nullptr, 0, &merged), "ranks", "there is none");
    refused(opd_step_merged(ranks, 2, nullptr), "merged", "null pointer");
    CHECK(merged.batch == -9);
}

TEST_CASE("snapshots that are damaged, cut, of another kind or of other options change nothing") {
    const tuner_setting setting(0);
    tuner t;
    must(opd_tuner_create(&setting.options, &t.h));
    const auto hear = [&](opd_tuner* which) {
        for (int step = 0; step < 20; ++step)
            must(opd_tuner_heard(which, &setting.arms[static_cast<std::size_t>(step % 6)], 5, step % 4, 1, nullptr));
    };
    hear(t);
    const auto state = bytes_of(opd_tuner_snapshot, t.h);
    std::size_t length = 0;
    std::vector<char> room(state.size(), 'x');
    refused(opd_tuner_snapshot(t, room.data(), state.size() - 1, &length), "size", "the snapshot has");
    refused(opd_tuner_snapshot(t, room.data(), room.size(), nullptr), "length", "null pointer");
    CHECK((length == 0 && std::ranges::count(room, 'x') == static_cast<std::ptrdiff_t>(room.size())));
    const auto unchanged = [&] { return bytes_of(opd_tuner_snapshot, t.h) == state; };

    refused(opd_tuner_restore(t, nullptr, 4), "bytes", "null pointer");
    for (std::size_t n = 0; n < state.size(); n += 7)
        refused(opd_tuner_restore(t, state.data(), n), "snapshot", n < 16 ? "ends too early" : "damaged");
    for (std::size_t i = 8; i < state.size(); i += 5) {
        auto damaged = state;
        damaged[i] = static_cast<char>(damaged[i] ^ 4);
        refused(opd_tuner_restore(t, damaged.data(), damaged.size()), "snapshot", "damaged");
    }
    CHECK(unchanged());
    // sealed, and still not of this tuner
    const auto sealed = [](auto&&... values) {
        opd::sched::archive_writer to;
        to(values...);
        return opd::sched::seal(std::move(to.bytes));
    };
    const std::string longer = [&] {
        opd::sched::archive_writer to;
        to.bytes = opd::sched::unseal({state.data(), state.size()});
        to(1);
        return opd::sched::seal(std::move(to.bytes));
    }();
    refused(opd_tuner_restore(t, longer.data(), longer.size()), "snapshot", "longer than its state");
    const std::string nothing = sealed(std::string("tuner beg_mab"));
    refused(opd_tuner_restore(t, nothing.data(), nothing.size()), "snapshot", "ends too early");
    CHECK(unchanged());
    for (int which = 1; which < 5; ++which) {
        const tuner_setting others(which);
        tuner other;
        must(opd_tuner_create(&others.options, &other.h));
        refused(opd_tuner_restore(other, state.data(), state.size()), "snapshot",
                (std::string("is not of tuner ") + tuner_names[which]).c_str());
    }
    tuner_setting fewer(0);
    fewer.arms[5].depth = 1;
    tuner other;
    must(opd_tuner_create(&fewer.options, &other.h));
    refused(opd_tuner_restore(other, state.data(), state.size()), "snapshot", "is of other arms");
    tuner_setting narrow(0);
    narrow.options.window = 2;
    tuner third;
    must(opd_tuner_create(&narrow.options, &third.h));
    refused(opd_tuner_restore(third, state.data(), state.size()), "snapshot", "is of another window");

    elastic e;
    selector d;
    rates_handle r;
    ngrams table;
    automaton a;
    groups g;
    must(opd_elastic_switch_create(nullptr, &e.h));
    must(opd_drafter_selector_create(nullptr, &d.h));
    must(opd_follow_rates_create(nullptr, &r.h));
    auto small = sized<opd_ngram_options>();
    small.bytes = 1000;
    must(opd_ngram_table_create(&small, &table.h));
    must(opd_suffix_automaton_create(nullptr, &a.h));
    must(opd_prompt_groups_create(nullptr, &g.h));
    refused(opd_elastic_switch_restore(e, state.data(), state.size()), "snapshot", "is not of elastic_switch");
    refused(opd_drafter_selector_restore(d, state.data(), state.size()), "snapshot", "is not of drafter_selector");
    refused(opd_follow_rates_restore(r, state.data(), state.size()), "snapshot", "is not of follow_rates");
    refused(opd_ngram_table_restore(table, state.data(), state.size()), "snapshot", "is not of ngram_table");
    refused(opd_suffix_automaton_restore(a, state.data(), state.size()), "snapshot", "is not of suffix_automaton");
    refused(opd_prompt_groups_restore(g, state.data(), state.size()), "snapshot", "is not of prompt_groups");
    auto limit = sized<opd_memory_options>();
    limit.most_tokens = 9;
    automaton smaller;
    groups fewer_tokens;
    must(opd_suffix_automaton_create(&limit, &smaller.h));
    must(opd_prompt_groups_create(&limit, &fewer_tokens.h));
    auto bytes = bytes_of(opd_suffix_automaton_snapshot, a.h);
    refused(opd_suffix_automaton_restore(smaller, bytes.data(), bytes.size()), "snapshot", "of at most 9 tokens");
    bytes = bytes_of(opd_prompt_groups_snapshot, g.h);
    refused(opd_prompt_groups_restore(fewer_tokens, bytes.data(), bytes.size()), "snapshot", "of at most 9 tokens");
    small.bytes = 2000;
    ngrams larger;
    must(opd_ngram_table_create(&small, &larger.h));
    bytes = bytes_of(opd_ngram_table_snapshot, table.h);
    refused(opd_ngram_table_restore(larger, bytes.data(), bytes.size()), "snapshot", "is of another table");
}

// --- handles and threads ---------------------------------------------------------------------------------------------

namespace {

// `use` is refused of a null pointer, of a handle that was destroyed, and of what never was one.
template <class Handle, class Make, class Use>
void only_while_it_lives(const char* name, Make&& make, void (*destroy)(Handle*), Use&& use) {
    destroy(nullptr);
    refused(use(static_cast<Handle*>(nullptr)), name, "null pointer");
    Handle* h = nullptr;
    must(make(&h));
    must(use(h));
    destroy(h);
    refused(use(h), name, "is not a live handle");
    destroy(h); // again: nothing
    alignas(16) char never[64] = {};
    refused(use(reinterpret_cast<Handle*>(never)), name, "is not a live handle");
}

} // namespace

TEST_CASE("a handle is refused before it is made and after it is gone") {
    auto u = sized<opd_uniforms>();
    opd_strategy s = {};
    only_while_it_lives<opd_tuner>(
        "tuner", [](opd_tuner** h) { return opd_tuner_create(nullptr, h); }, opd_tuner_destroy,
        [&](opd_tuner* h) { return opd_tuner_choose(h, 1, &u, &s); });
    std::int32_t flag = 0;
    only_while_it_lives<opd_elastic_switch>(
        "elastic", [](opd_elastic_switch** h) { return opd_elastic_switch_create(nullptr, h); },
        opd_elastic_switch_destroy, [&](opd_elastic_switch* h) { return opd_elastic_switch_check(h, 1, &flag); });
    only_while_it_lives<opd_drafter_selector>(
        "selector", [](opd_drafter_selector** h) { return opd_drafter_selector_create(nullptr, h); },
        opd_drafter_selector_destroy,
        [](opd_drafter_selector* h) { return opd_drafter_selector_heard(h, 0, 1, 1, 1); });
    only_while_it_lives<opd_follow_rates>(
        "rates", [](opd_follow_rates** h) { return opd_follow_rates_create(nullptr, h); }, opd_follow_rates_destroy,
        [](opd_follow_rates* h) { return opd_follow_rates_learn(h, 1, 1); });
    rates_handle rates;
    must(opd_follow_rates_create(nullptr, &rates.h));
    only_while_it_lives<opd_draft_tree>("tree", opd_draft_tree_create, opd_draft_tree_destroy,
                                        [&](opd_draft_tree* h) { return opd_draft_tree_begin(h, rates); });
    only_while_it_lives<opd_ngram_table>(
        "table", [](opd_ngram_table** h) { return opd_ngram_table_create(nullptr, h); }, opd_ngram_table_destroy,
        opd_ngram_table_clear);
    only_while_it_lives<opd_suffix_automaton>(
        "automaton", [](opd_suffix_automaton** h) { return opd_suffix_automaton_create(nullptr, h); },
        opd_suffix_automaton_destroy, [&](opd_suffix_automaton* h) { return opd_suffix_automaton_begin(h, &flag); });
    opd_text_id id = {};
    only_while_it_lives<opd_prompt_groups>(
        "groups", [](opd_prompt_groups** h) { return opd_prompt_groups_create(nullptr, h); }, opd_prompt_groups_destroy,
        [&](opd_prompt_groups* h) { return opd_prompt_groups_begin(h, 1, 1, nullptr, &id); });
}

TEST_CASE("threads share a tuner: every step is heard, whoever heard it") {
    auto options = sized<opd_tuner_options>();
    options.tuner = "cost_profile", options.memory = 1e9;
    tuner t;
    must(opd_tuner_create(&options, &t.h));
    const opd_strategy arm = {8, 4, 48};
    std::atomic<int> failed = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
            for (int step = 0; step < 500; ++step) {
                opd_strategy s = {};
                failed += opd_tuner_choose(t, 1 + step % 9, nullptr, &s) != OPD_OK;
                failed += opd_tuner_heard(t, &arm, 1, 4, 1, nullptr) != OPD_OK;
                failed += opd_tuner_choose(t, 0, nullptr, &s) != OPD_INVALID_INPUT;
                failed += std::string(opd_last_error_argument()) != "batch"; // of this thread
            }
        });
    for (std::thread& x : threads) x.join();
    CHECK(failed == 0);
    double accepted = 0;
    must(opd_tuner_predict(t, &arm, 1, nullptr, &accepted, nullptr));
    // 2000 steps of 4 beside a doubt of 0.05 steps of 8; counts fade by 1e-9 a step
    CHECK(accepted == doctest::Approx((2000 * 4 + 0.05 * 8) / 2000.05).epsilon(1e-5));
}

TEST_CASE("threads share rates by trees of their own, and a handle may go while it is used") {
    rates_handle rates;
    must(opd_follow_rates_create(nullptr, &rates.h));
    std::vector<float> z = {1, 3, 2, 0.5f};
    const tensor dl = vector_of(z);
    std::atomic<int> failed = 0, refusals = 0;
    opd_suffix_automaton* a = nullptr;
    must(opd_suffix_automaton_create(nullptr, &a));
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
        threads.emplace_back([&] {
            tree_handle tree;
            failed += opd_draft_tree_create(&tree.h) != OPD_OK;
            for (int step = 0; step < 200; ++step) {
                failed += opd_draft_tree_begin(tree, rates) != OPD_OK;
                failed += opd_draft_tree_grow(tree, -1, dl, nullptr, 2, nullptr) != OPD_OK;
                failed += opd_draft_tree_select(tree, 2, nullptr, nullptr, nullptr, nullptr) != OPD_OK;
                const opd_verdict v = {1, 0, 1, 0};
                failed += opd_draft_tree_learn(tree, rates, &v) != OPD_OK;
                std::int32_t number = -1;
                const int status = opd_suffix_automaton_begin(a, &number);
                failed += status != OPD_OK && status != OPD_INVALID_INPUT;
            }
            std::int32_t number = -1; // until it is gone
            while (opd_suffix_automaton_begin(a, &number) == OPD_OK) std::this_thread::yield();
            refusals += std::string(opd_last_error_argument()) == "automaton";
        });
    opd_suffix_automaton_destroy(a);
    for (std::thread& x : threads) x.join();
    CHECK(failed == 0);
    CHECK(refusals == 3);
    std::int32_t cell = 0;
    must(opd_follow_rates_any_gap(1, 0, &cell));
    double tried = 0;
    must(opd_follow_rates_of(rates, cell, nullptr, &tried));
    CHECK(tried == doctest::Approx(200 * (1 - std::pow(1 - 1 / 200.0, 600)))); // 600 trials that fade
}

TEST_CASE("a caller of an older header: what its struct lacks is 0") {
    auto options = sized<opd_tuner_options>();
    options.struct_size = offsetof(opd_tuner_options, arms); // the name alone
    options.tuner = "ucb1";
    options.window = -5; // beyond what the caller has
    tuner t;
    must(opd_tuner_create(&options, &t.h));
    opd_strategy s = {};
    must(opd_tuner_choose(t, 1, nullptr, &s));
    CHECK(same(s, spec::strategy{8, 4, 48}));
}
