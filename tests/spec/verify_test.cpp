// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// What every rule of verification writes is distributed as what the target draws by itself: exactly, by going through
// all the ways that chance can go, drafting included. The wrong rules that the field has shipped are off by as much as
// is known of them.
#include <algorithm>
#include <cmath>
#include <doctest/doctest.h>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "opd/spec/verify.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::spec;
using opd::index_t;
using law = std::vector<double>;
using text = std::vector<std::int32_t>;

// Coins that go through all outcomes, one after the other.
class enumerating_coins {
public:
    double weight = 1; // of the present one

    bool accept(double p) {
        if (!(p >= 0 && p <= 1)) FAIL("a probability of " << p);
        if (p <= 0) return false;
        if (p >= 1) return true;
        return choose({p, 1 - p}) == 0;
    }
    index_t draw(std::span<const double> w) {
        law p;
        std::vector<index_t> which;
        const double sum = std::accumulate(w.begin(), w.end(), 0.0);
        if (!(sum > 0)) FAIL("nothing to draw from");
        for (std::size_t i = 0; i < w.size(); ++i) {
            if (!(w[i] >= 0)) FAIL("a weight of " << w[i]);
            if (w[i] > 0) p.push_back(w[i] / sum), which.push_back(static_cast<index_t>(i));
        }
        return which[choose(p)];
    }
    void begin() { at_ = 0, weight = 1; }
    // False: that was the last.
    bool next() {
        while (!path_.empty() && path_.back().first + 1 == path_.back().second) path_.pop_back();
        if (path_.empty()) return false;
        ++path_.back().first;
        return true;
    }

private:
    std::size_t choose(const law& p) {
        if (at_ == path_.size()) path_.push_back({0, p.size()});
        if (path_[at_].second != p.size()) FAIL("chance does not repeat itself");
        weight *= p[path_[at_].first];
        return path_[at_++].first;
    }
    std::vector<std::pair<std::size_t, std::size_t>> path_;
    std::size_t at_ = 0;
};

std::map<text, double> law_of(const std::function<text(enumerating_coins&)>& run) {
    std::map<text, double> r;
    enumerating_coins coins;
    do {
        coins.begin();
        const text t = run(coins);
        r[t] += coins.weight;
    } while (coins.next());
    return r;
}

double distance(const std::map<text, double>& a, const std::map<text, double>& b) {
    double sum = 0;
    for (const auto& [t, p] : a) sum += std::abs(p - (b.count(t) > 0 ? b.at(t) : 0));
    for (const auto& [t, p] : b) sum += a.count(t) > 0 ? 0 : p;
    return sum / 2;
}

// A model: a law after every prefix.
using model = std::function<law(const text&)>;

model fixed(law p) {
    return [p](const text&) { return p; };
}
// Laws with zeros among them, other ones after every prefix.
model random_model(std::uint64_t seed, int v) {
    return [seed, v](const text& prefix) {
        std::uint64_t state = seed * 1000003 + prefix.size();
        const auto random = [&state] { // splitmix64
            std::uint64_t z = state += 0x9e3779b97f4a7c15;
            z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
            z = (z ^ z >> 27) * 0x94d049bb133111eb;
            return z ^ z >> 31;
        };
        for (const std::int32_t t : prefix) state = random() + static_cast<std::uint64_t>(t);
        law p;
        for (int i = 0; i < v; ++i) p.push_back(random() % 5 == 0 ? 0 : 0.05 + static_cast<double>(random() % 1000));
        p[random() % p.size()] += 100;
        const double sum = std::accumulate(p.begin(), p.end(), 0.0);
        for (double& x : p) x /= sum;
        return p;
    };
}

struct drafted {
    std::vector<std::int32_t> parents;
    text tokens;
    std::vector<text> prefixes = {{}}; // after each row
    law p, q;                          // (n + 1, V)
    int v = 0;
    draft_tree tree() const { return {parents, tokens}; }
    opd::matrix_view<const double> rows(const law& x) const {
        return {x.data(), static_cast<index_t>(prefixes.size()), v, v};
    }
};

enum class how { iid, without, best };

// Drafts a tree of this shape.
drafted draft(const std::vector<std::int32_t>& parents, const model& target, const model& drafter, int v, how kind,
              enumerating_coins& coins) {
    drafted d;
    d.parents = parents, d.v = v;
    const auto add = [&](const text& prefix) {
        const law p = target(prefix), q = drafter(prefix);
        d.p.insert(d.p.end(), p.begin(), p.end()), d.q.insert(d.q.end(), q.begin(), q.end());
    };
    add({});
    for (std::size_t n = 0; n < parents.size(); ++n) {
        const text prefix = d.prefixes[static_cast<std::size_t>(parents[n] + 1)];
        law q = drafter(prefix);
        if (kind != how::iid)
            for (std::size_t m = 0; m < n; ++m)
                if (parents[m] == parents[n]) q[static_cast<std::size_t>(d.tokens[m])] = 0;
        std::int32_t token = 0;
        if (kind == how::best)
            token = static_cast<std::int32_t>(std::max_element(q.begin(), q.end()) - q.begin());
        else if (std::accumulate(q.begin(), q.end(), 0.0) > 0)
            token = static_cast<std::int32_t>(coins.draw(q));
        else
            token = d.tokens[n - 1]; // nothing is left to draw: no sibling is followed twice
        d.tokens.push_back(token);
        d.prefixes.push_back(prefix);
        d.prefixes.back().push_back(token);
        add(d.prefixes.back());
    }
    return d;
}

// What is written, and from there on what the target draws by itself.
text written(const drafted& d, const verdict& r, const model& target, std::size_t length, enumerating_coins& coins) {
    text t = d.prefixes.at(static_cast<std::size_t>(r.node + 1));
    if (t.size() != static_cast<std::size_t>(r.accepted)) FAIL("the way is not as long as it says");
    t.push_back(r.next);
    while (t.size() < length) t.push_back(static_cast<std::int32_t>(coins.draw(target(t))));
    return t;
}

std::map<text, double> plain(const model& target, std::size_t length) {
    return law_of([&](enumerating_coins& c) {
        text t;
        while (t.size() < length) t.push_back(static_cast<std::int32_t>(c.draw(target(t))));
        return t;
    });
}

const std::vector<std::pair<std::vector<std::int32_t>, std::size_t>> chains = {
    {{-1}, 1}, {{-1, 0}, 2}, {{-1, 0, 1}, 3}};
const std::vector<std::pair<std::vector<std::int32_t>, std::size_t>> trees = {
    {{-1, -1}, 1}, {{-1, -1, -1}, 1}, {{-1, -1, 0, 0}, 2}, {{-1, 0, -1, 2}, 2}, {{-1, 0, 0, 1}, 3}};

} // namespace

TEST_CASE("dense, one_hot and block verification of chains write what the target draws") {
    verification memory;
    for (std::uint32_t seed = 0; seed < 10; ++seed)
        for (const int v : {2, 3, 4})
            for (const auto& [shape, depth] : chains) {
                CAPTURE(seed);
                CAPTURE(v);
                CAPTURE(depth);
                const model target = random_model(seed, v), drafter = random_model(seed + 100, v);
                const auto expected = plain(target, depth + 1);
                const auto check = [&, &shape = shape, depth = depth](how kind, auto&& rule) {
                    const auto got = law_of([&](enumerating_coins& c) {
                        const drafted d = draft(shape, target, drafter, v, kind, c);
                        return written(d, rule(d, c), target, depth + 1, c);
                    });
                    CHECK(distance(got, expected) < 1e-12);
                };
                check(how::iid, [&](const drafted& d, auto& c) {
                    return memory.verify(d.tree(), d.rows(d.p), dense<double>{d.rows(d.q)}, c);
                });
                check(how::iid, [&](const drafted& d, auto& c) {
                    return memory.verify_block(d.tree(), d.rows(d.p), dense<double>{d.rows(d.q)}, c);
                });
                check(how::best,
                      [&](const drafted& d, auto& c) { return memory.verify(d.tree(), d.rows(d.p), one_hot{}, c); });
                check(how::best, [&](const drafted& d, auto& c) {
                    return follow(d.tree(), [&](index_t row) {
                        return c.draw(target(d.prefixes[static_cast<std::size_t>(row)]));
                    });
                });
            }
}

TEST_CASE("trees: siblings judged as they were drawn write what the target draws") {
    verification memory;
    for (std::uint32_t seed = 0; seed < 3; ++seed)
        for (const int v : {3, 4})
            for (const auto& [shape, depth] : trees) {
                CAPTURE(seed);
                CAPTURE(v);
                const model target = random_model(seed + 10, v), drafter = random_model(seed + 200, v);
                const auto expected = plain(target, depth + 1);
                const auto check = [&, &shape = shape, depth = depth](how kind, auto&& rule) {
                    const auto got = law_of([&](enumerating_coins& c) {
                        const drafted d = draft(shape, target, drafter, v, kind, c);
                        return written(d, rule(d, c), target, depth + 1, c);
                    });
                    CHECK(distance(got, expected) < 1e-12);
                };
                check(how::iid, [&](const drafted& d, auto& c) {
                    return memory.verify(d.tree(), d.rows(d.p), iid_siblings<double>{d.rows(d.q)}, c);
                });
                check(how::without, [&](const drafted& d, auto& c) {
                    return memory.verify(d.tree(), d.rows(d.p), without_replacement<double>{d.rows(d.q)}, c);
                });
                check(how::best,
                      [&](const drafted& d, auto& c) { return memory.verify(d.tree(), d.rows(d.p), one_hot{}, c); });
                check(how::iid, [&](const drafted& d, auto& c) {
                    return follow(d.tree(), [&](index_t row) {
                        return c.draw(target(d.prefixes[static_cast<std::size_t>(row)]));
                    });
                });
            }
}

TEST_CASE("a vocabulary of six: chains of three, trees of depth one to three") {
    verification memory;
    const model target = random_model(5, 6), drafter = random_model(6, 6);
    const auto check = [&](const std::vector<std::int32_t>& shape, std::size_t depth, how kind, auto&& rule) {
        const auto got = law_of([&](enumerating_coins& c) {
            const drafted d = draft(shape, target, drafter, 6, kind, c);
            return written(d, rule(d, c), target, depth + 1, c);
        });
        CHECK(distance(got, plain(target, depth + 1)) < 1e-12);
    };
    const auto own = [&](const drafted& d, auto& c) {
        return follow(d.tree(), [&](index_t row) { return c.draw(target(d.prefixes[static_cast<std::size_t>(row)])); });
    };
    const auto not_drawn = [&](const drafted& d, auto& c) {
        return memory.verify(d.tree(), d.rows(d.p), one_hot{}, c);
    };
    for (const auto& [shape, depth] : chains) {
        check(shape, depth, how::iid, [&](const drafted& d, auto& c) {
            return memory.verify(d.tree(), d.rows(d.p), dense<double>{d.rows(d.q)}, c);
        });
        check(shape, depth, how::iid, [&](const drafted& d, auto& c) {
            return memory.verify_block(d.tree(), d.rows(d.p), dense<double>{d.rows(d.q)}, c);
        });
        check(shape, depth, how::best, not_drawn);
        check(shape, depth, how::best, own);
    }
    const std::vector<std::pair<std::vector<std::int32_t>, std::size_t>> shapes = {
        {{-1, -1, -1}, 1}, {{-1, -1, 0}, 2}, {{-1, 0, 1, 0}, 3}};
    for (const auto& [shape, depth] : shapes) {
        check(shape, depth, how::iid, [&](const drafted& d, auto& c) {
            return memory.verify(d.tree(), d.rows(d.p), iid_siblings<double>{d.rows(d.q)}, c);
        });
        check(shape, depth, how::without, [&](const drafted& d, auto& c) {
            return memory.verify(d.tree(), d.rows(d.p), without_replacement<double>{d.rows(d.q)}, c);
        });
        check(shape, depth, how::best, not_drawn);
        check(shape, depth, how::best, own);
    }
}

TEST_CASE("negative controls: the wrong rules are off by what is known of them") {
    verification memory;
    const law p = {.5, .3, .2}, q = {.2, .3, .5};
    const auto first_token = [](const law& x) {
        std::map<text, double> r;
        for (std::size_t i = 0; i < x.size(); ++i) r[{static_cast<std::int32_t>(i)}] = x[i];
        return r;
    };
    const auto off = [&](const law& target, const law& drafter, const std::vector<std::int32_t>& shape, how kind,
                         auto&& rule) {
        const int v = static_cast<int>(target.size());
        return distance(law_of([&](enumerating_coins& c) {
                            const drafted d = draft(shape, fixed(target), fixed(drafter), v, kind, c);
                            text t = written(d, rule(d, c), fixed(target), 1, c);
                            t.resize(1);
                            return t;
                        }),
                        first_token(target));
    };
    // the drafter's favourite, judged as if it had been drawn
    CHECK(off(p, q, {-1}, how::best, [&](const drafted& d, auto& c) {
              return memory.verify(d.tree(), d.rows(d.p), dense<double>{d.rows(d.q)}, c);
          }) == doctest::Approx(0.3));
    // both siblings against p itself, and one residual at the end
    CHECK(off(p, q, {-1, -1}, how::iid, [&](const drafted& d, auto& c) {
              for (index_t n = 0; n < 2; ++n) {
                  const auto x = static_cast<std::size_t>(d.tokens[static_cast<std::size_t>(n)]);
                  if (c.accept(std::min(1.0, p[x] / q[x]))) return verdict{1, n, 0};
              }
              law left;
              for (std::size_t i = 0; i < p.size(); ++i) left.push_back(std::max(p[i] - q[i], 0.0));
              return verdict{0, -1, static_cast<std::int32_t>(c.draw(left))};
          }) == doctest::Approx(0.15));
    // siblings drawn in one way and judged in the other
    const law p4 = {.45, .25, .2, .1}, q4 = {.15, .2, .25, .4};
    CHECK(off(p4, q4, {-1, -1}, how::without, [&](const drafted& d, auto& c) {
              return memory.verify(d.tree(), d.rows(d.p), iid_siblings<double>{d.rows(d.q)}, c);
          }) == doctest::Approx(0.0310).epsilon(0.01));
    CHECK(off(p4, q4, {-1, -1}, how::iid, [&](const drafted& d, auto& c) {
              return memory.verify(d.tree(), d.rows(d.p), without_replacement<double>{d.rows(d.q)}, c);
          }) == doctest::Approx(0.019).epsilon(0.03));
    // the drafter's two favourites, judged as drawn without replacement
    CHECK(off(p, q, {-1, -1}, how::best, [&](const drafted& d, auto& c) {
              return memory.verify(d.tree(), d.rows(d.p), without_replacement<double>{d.rows(d.q)}, c);
          }) == doctest::Approx(0.3));
    // followed if the target draws it itself, or else by its coin
    CHECK(off(p, q, {-1}, how::best, [&](const drafted& d, auto& c) {
              const auto x = static_cast<std::size_t>(d.tokens[0]);
              const auto drawn = static_cast<std::int32_t>(c.draw(p));
              if (drawn == d.tokens[0] || c.accept(p[x])) return verdict{1, 0, 0};
              return verdict{0, -1, drawn};
          }) == doctest::Approx(0.16));
}

TEST_CASE(
    "how many are followed: 1 - TV of one drawn token, p of one that was not; a block never fewer than one by one") {
    verification memory;
    const auto mean = [&](const std::vector<std::int32_t>& shape, const model& target, const model& drafter, int v,
                          how kind, auto&& rule) {
        double sum = 0;
        law_of([&](enumerating_coins& c) {
            const drafted d = draft(shape, target, drafter, v, kind, c);
            const verdict r = rule(d, c);
            sum += c.weight * static_cast<double>(r.accepted);
            return text{};
        });
        return sum;
    };
    int more = 0;
    for (std::uint32_t seed = 0; seed < 6; ++seed) {
        const model target = random_model(seed, 4), drafter = random_model(seed + 50, 4);
        const auto one_by_one = [&](const drafted& d, auto& c) {
            return memory.verify(d.tree(), d.rows(d.p), dense<double>{d.rows(d.q)}, c);
        };
        const auto block = [&](const drafted& d, auto& c) {
            return memory.verify_block(d.tree(), d.rows(d.p), dense<double>{d.rows(d.q)}, c);
        };
        const law p = target({}), q = drafter({});
        double overlap = 0;
        for (std::size_t i = 0; i < p.size(); ++i) overlap += std::min(p[i], q[i]);
        CHECK(mean({-1}, target, drafter, 4, how::iid, one_by_one) == doctest::Approx(overlap));
        const auto best = static_cast<std::size_t>(std::max_element(q.begin(), q.end()) - q.begin());
        CHECK(mean({-1}, target, drafter, 4, how::best, [&](const drafted& d, auto& c) {
                  return memory.verify(d.tree(), d.rows(d.p), one_hot{}, c);
              }) == doctest::Approx(p[best]));
        for (const std::vector<std::int32_t>& shape : {std::vector<std::int32_t>{-1, 0}, {-1, 0, 1}}) {
            const double single = mean(shape, target, drafter, 4, how::iid, one_by_one);
            const double whole = mean(shape, target, drafter, 4, how::iid, block);
            CHECK(whole >= single - 1e-12);
            more += whole > single + 1e-6;
        }
    }
    CHECK(more > 0);
}

TEST_CASE("follow: with keyed noise the same tokens as without drafts, whatever was drafted") {
    constexpr int v = 5;
    constexpr std::size_t length = 60;
    const model target = random_model(3, v);
    const auto own = [&](const text& prefix) { // a function of the prefix: seed, sample, position
        const law p = target(prefix);
        std::vector<float> log_p;
        for (const double x : p) log_p.push_back(static_cast<float>(std::log(x)));
        const opd::noise_row noise(11, opd::noise_stream::rollout, 4, static_cast<std::uint32_t>(prefix.size()));
        return static_cast<std::int32_t>(opd::gumbel_max(noise, 0, log_p.data(), v));
    };
    text alone;
    while (alone.size() < length) alone.push_back(own(alone));
    std::mt19937 random(1);
    index_t followed = 0;
    for (int trial = 0; trial < 50; ++trial) {
        text t;
        while (t.size() < length) {
            drafted d; // tokens at random, and sometimes those that will come
            for (std::int32_t n = 0; n < 6; ++n) {
                d.parents.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(n + 1)) - 1);
                const text& prefix = d.prefixes[static_cast<std::size_t>(d.parents.back() + 1)];
                text whole = t;
                whole.insert(whole.end(), prefix.begin(), prefix.end());
                d.tokens.push_back(random() % 2 ? own(whole) : static_cast<std::int32_t>(random() % v));
                d.prefixes.push_back(prefix);
                d.prefixes.back().push_back(d.tokens.back());
            }
            const verdict r = follow(d.tree(), [&](index_t row) {
                text whole = t;
                const text& more = d.prefixes[static_cast<std::size_t>(row)];
                whole.insert(whole.end(), more.begin(), more.end());
                return own(whole);
            });
            const text& path = d.prefixes[static_cast<std::size_t>(r.node + 1)];
            t.insert(t.end(), path.begin(), path.end());
            t.push_back(r.next);
            followed += r.accepted;
        }
        t.resize(length);
        CHECK(t == alone);
    }
    CHECK(followed > 500);
}

TEST_CASE("a batch is followed as each of its sequences is, with one draw a round") {
    std::mt19937 random(2);
    const auto below = [&](std::size_t n) { return static_cast<std::int32_t>(random() % n); };
    batch_follower memory;
    index_t longest = 0;
    for (int trial = 0; trial < 300; ++trial) {
        struct drafts {
            std::vector<std::int32_t> parents, tokens, own; // own: of each row the token that the target draws
        };
        std::vector<drafts> all(static_cast<std::size_t>(below(6)));
        std::vector<draft_tree> trees;
        for (drafts& d : all) {
            const auto nodes = static_cast<std::size_t>(below(9));
            for (std::size_t n = 0; n < nodes; ++n) d.parents.push_back(below(n + 1) - 1), d.tokens.push_back(below(3));
            for (std::size_t row = 0; row <= nodes; ++row) d.own.push_back(below(3));
            trees.push_back({d.parents, d.tokens});
        }
        std::vector<verdict> expected;
        std::vector<std::vector<index_t>> rows(all.size()), asked(all.size());
        index_t rounds = 0, most = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            const drafts& d = all[i];
            verdict v; // by hand: to the first child that is the token, as long as there is one
            for (bool found = true; found;) {
                rows[i].push_back(v.node + 1);
                v.next = d.own[static_cast<std::size_t>(v.node + 1)];
                found = false;
                for (std::size_t n = 0; n < d.tokens.size() && !found; ++n)
                    if (d.parents[n] == v.node && d.tokens[n] == v.next)
                        found = true, v.node = static_cast<index_t>(n), ++v.accepted;
            }
            expected.push_back(v);
            CHECK(follow(trees[i], [&](index_t row) { return d.own[static_cast<std::size_t>(row)]; }).node == v.node);
            most = std::max(most, expected.back().accepted + 1);
        }
        const auto got =
            memory.follow(trees, [&](std::span<const batch_follower::due> due, std::span<std::int32_t> tokens) {
                ++rounds;
                REQUIRE(due.size() == tokens.size());
                REQUIRE(!due.empty());
                for (std::size_t i = 0; i < due.size(); ++i) {
                    if (i > 0) CHECK(due[i - 1].sequence < due[i].sequence);
                    const auto n = static_cast<std::size_t>(due[i].sequence);
                    asked[n].push_back(due[i].row);
                    tokens[i] = all[n].own[static_cast<std::size_t>(due[i].row)];
                }
            });
        CHECK(rounds == most);
        CHECK(asked == rows);
        REQUIRE(got.size() == all.size());
        for (std::size_t i = 0; i < got.size(); ++i) {
            CHECK(got[i].accepted == expected[i].accepted);
            CHECK(got[i].node == expected[i].node);
            CHECK(got[i].next == expected[i].next);
        }
        longest = std::max(longest, most);
    }
    CHECK(longest > 3);

    const std::vector<std::int32_t> chain{-1, 0}, ahead{1, -1}, two{0, 1};
    // a text that ends, and a draw that is none
    const draft_tree same[] = {{chain, two}, {chain, two}};
    std::vector<index_t> drawn(2);
    const auto text = [&](std::span<const batch_follower::due> due, std::span<std::int32_t> tokens) {
        for (std::size_t i = 0; i < due.size(); ++i) {
            if (due[i].sequence == 1 && due[i].row == 2) return false;
            tokens[i] = static_cast<std::int32_t>(due[i].row);
        }
        for (const auto& d : due) ++drawn[static_cast<std::size_t>(d.sequence)];
        return true;
    };
    const auto over = memory.follow(same, text, [](index_t sequence) { return sequence == 0; });
    CHECK(drawn == std::vector<index_t>{1, 2});
    CHECK(over[0].accepted == 1); // the last token was drafted, and nothing is drawn after it
    CHECK(over[0].next == 0);
    CHECK(over[1].accepted == 2); // the row behind it was not drawn from
    CHECK(over[1].next == 1);

    const draft_tree trees[] = {{chain, two}, {ahead, two}};
    const auto never = [](std::span<const batch_follower::due>, std::span<std::int32_t>) { FAIL("a draw"); };
    CHECK_THROWS_WITH_AS(memory.follow(trees, never), doctest::Contains("an earlier one"), opd::invalid_input);
    follower alone; // no drafts: whatever is drawn comes next
    CHECK(alone.row() == 0);
    CHECK(!alone.take(7));
    CHECK(alone.found().next == 7);
    CHECK(alone.found().node == -1);
}

TEST_CASE("keyed coins: the same again, and as likely as they say") {
    constexpr int n = 40000;
    const law w = {0, 3, 1, 0, 4};
    std::vector<int> drawn(w.size());
    int taken = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
        keyed_coins a(7, 9, i), b(7, 9, i);
        const bool accepted = a.accept(0.3);
        CHECK(accepted == b.accept(0.3));
        taken += accepted;
        const index_t x = a.draw(w);
        CHECK(x == b.draw(w));
        ++drawn[static_cast<std::size_t>(x)];
        CHECK(a.accept(1));
        CHECK_FALSE(a.accept(0));
    }
    const auto near = [](double count, double p) { return std::abs(count - n * p) < 5 * std::sqrt(n * p * (1 - p)); };
    CHECK(near(taken, 0.3));
    CHECK(drawn[0] + drawn[3] == 0);
    CHECK(near(drawn[1], 3.0 / 8));
    CHECK(near(drawn[2], 1.0 / 8));
}

TEST_CASE("what is no tree, and shapes that differ, are refused by name") {
    verification memory;
    keyed_coins coins(1, 2, 3);
    const std::vector<float> p(9, 1.0f / 3), q = p;
    const auto rows = [](const std::vector<float>& x, index_t n) {
        return opd::matrix_view<const float>(x.data(), n, 3, 3);
    };
    const auto refused = [](auto&& call, const char* argument, index_t row, const char* why) {
        try {
            call();
            FAIL("it was taken");
        } catch (const opd::invalid_input& e) {
            CHECK(e.argument == argument);
            CHECK(e.row == row);
            CHECK_MESSAGE(std::string(e.what()).find(why) != std::string::npos, e.what());
        }
    };
    const std::vector<std::int32_t> two = {0, 1}, chain = {-1, 0}, ahead = {0, -1}, siblings = {-1, -1},
                                    strange = {0, 3};
    const auto verify = [&](const draft_tree& t, index_t p_rows, index_t q_rows) {
        return
            [&, t, p_rows, q_rows] { memory.verify(t, rows(p, p_rows), iid_siblings<float>{rows(q, q_rows)}, coins); };
    };
    CHECK_NOTHROW(verify({chain, two}, 3, 3)());
    refused(verify({{chain.data(), 1}, two}, 3, 3), "tree", -1, "1 parents of 2 tokens");
    refused(verify({ahead, two}, 3, 3), "tree", 0, "an earlier one or -1, not 0");
    refused(verify({chain, strange}, 3, 3), "tree", 1, "token 3 of a vocabulary of 3");
    refused(verify({chain, two}, 2, 3), "p", -1, "must be (3, 3), not (2, 3)");
    refused(verify({chain, two}, 3, 2), "q", -1, "must be (3, 3), not (2, 3)");
    refused(
        [&] {
            memory.verify({siblings, two}, rows(p, 3), dense<float>{rows(q, 3)}, coins);
        },
        "tree", -1, "one a node");
    refused(
        [&] {
            memory.verify_block({siblings, two}, rows(p, 3), dense<float>{rows(q, 3)}, coins);
        },
        "tree", 1, "a block is a chain");
    refused([&] { follow({ahead, two}, [](index_t) { return 0; }); }, "tree", 0, "an earlier one");
    for (const float wrong : {-0.1f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        std::vector<float> bad = p;
        bad[4] = wrong; // of the row after the first node, which is followed: p = q
        refused(
            [&] {
                memory.verify({chain, two}, rows(bad, 3), iid_siblings<float>{rows(q, 3)}, coins);
            },
            "p", 1, "is no law");
        refused(
            [&] {
                memory.verify({chain, two}, rows(p, 3), iid_siblings<float>{rows(bad, 3)}, coins);
            },
            "q", 1, "is no law");
        refused(
            [&] {
                memory.verify_block({chain, two}, rows(p, 3), dense<float>{rows(bad, 3)}, coins);
            },
            "q", 1, "is no law");
    }
    const std::vector<float> none(9, 0.0f);
    refused([&] { memory.verify({chain, two}, rows(none, 3), one_hot{}, coins); }, "p", 0, "is no law");
    // nothing drafted: a token of the target's
    const verdict r = memory.verify(draft_tree{}, rows(p, 1), one_hot{}, coins);
    CHECK(r.accepted == 0);
    CHECK(r.node == -1);
    CHECK(r.next >= 0);
}

TEST_CASE("the call, as its page shows it") {
    const std::uint64_t seed = 1, sample = 42;
    const std::uint32_t position = 17;
    const std::vector<float> law(4 * 8, 0.125f);
    const opd::matrix_view<const float> p(law.data(), 4, 8, 8), q = p;
    const std::vector<std::int32_t> parents = {-1, 0, -1}, tokens = {4, 2, 7};

    opd::spec::verification memory; // one a thread
    opd::spec::keyed_coins coins(seed, sample, position);
    const auto r = memory.verify({parents, tokens}, p, opd::spec::iid_siblings<float>{q}, coins);
    // the tokens of the r.accepted nodes from the root to r.node, then r.next

    CHECK(r.accepted == 2); // p = q: nothing is refused
    CHECK(r.node == 1);
}
