// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd_verify and opd_follow.
#include "opd/spec/verify.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "spec.hpp"

namespace {

using namespace opd_c;
namespace spec = opd::spec;

/// What a call needs, kept from call to call by its thread.
struct workspace {
    std::vector<std::int32_t> tokens, parents;
    std::vector<index_t> first; // (S+1)
    std::vector<opd_verdict> verdicts;
    spec::verification rules;
};
/// A thread's workspace for as long as a call takes. A callback may call these functions itself: it then finds another.
class borrowed {
public:
    borrowed() : of_(std::move(own())) {}
    borrowed(const borrowed&) = delete;
    ~borrowed() { own() = std::move(of_); }
    workspace* operator->() { return &of_; }

private:
    static workspace& own() {
        thread_local workspace w;
        return w;
    }
    workspace of_;
};

/// A batch's drafts, of 32 bits.
struct forest {
    std::vector<std::int32_t>&tokens, &parents;
    std::vector<index_t>& first; // (S+1)
    bool batch = false;          // as the caller has it, if only of one

    forest(const opd_drafts* of, borrowed& w) : tokens(w->tokens), parents(w->parents), first(w->first) {
        const opd_drafts d = read("drafts", of);
        batch = d.offsets != nullptr;
        tokens.clear();
        if (d.tokens != nullptr) copy_tokens("drafts.tokens", d.tokens, tokens);
        const auto n = static_cast<index_t>(tokens.size());
        first.assign({0, n});
        if (batch) {
            const integers offsets("drafts.offsets", d.offsets);
            first.resize(static_cast<std::size_t>(check_offsets("drafts.offsets", offsets, n)) + 1);
            for (std::size_t s = 0; s < first.size(); ++s) first[s] = offsets[static_cast<index_t>(s)];
        }
        parents.resize(tokens.size());
        if (d.parents == nullptr) {
            for (index_t s = 0; s < sequences(); ++s)
                for (index_t i = from(s); i < from(s + 1); ++i)
                    parents[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i - from(s) - 1);
            return;
        }
        const integers given("drafts.parents", d.parents);
        if (given.size() != n)
            refuse("drafts.parents",
                   "has " + std::to_string(given.size()) + " entries for " + std::to_string(n) + " tokens");
        for (index_t s = 0; s < sequences(); ++s)
            for (index_t i = from(s); i < from(s + 1); ++i) {
                if (given[i] < -1 || given[i] >= i - from(s))
                    throw opd::invalid_input(
                        "drafts.parents",
                        "is " + std::to_string(given[i]) + "; a parent is an earlier node of its sequence, or -1", i);
                parents[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(given[i]);
            }
    }
    index_t from(index_t s) const { return first[static_cast<std::size_t>(s)]; }
    index_t sequences() const { return static_cast<index_t>(first.size()) - 1; }
    index_t rows() const { return static_cast<index_t>(tokens.size()) + sequences(); }
    index_t row(index_t s) const { return from(s) + s; } ///< of the laws
    spec::draft_tree tree(index_t s) const {
        const auto at = static_cast<std::size_t>(from(s)), n = static_cast<std::size_t>(from(s + 1) - from(s));
        return {std::span(parents).subspan(at, n), std::span(tokens).subspan(at, n)};
    }
};

/// What the caller sees of the C++ call's exception: which of its members, and where in the batch.
[[noreturn]] void of_sequence(const opd::invalid_input& e, const forest& f, index_t s) {
    if (e.argument == "tree") again(e, "drafts", e.row < 0 ? -1 : f.from(s) + e.row);
    if (e.argument == "p" || e.argument == "q") again(e, e.argument, e.row < 0 ? -1 : f.row(s) + e.row);
    throw e;
}

/// 16 bits that are read as double: what verification computes with.
template <class T>
struct widened {
    T stored;
    explicit operator double() const { return static_cast<double>(static_cast<float>(stored)); }
};
static_assert(sizeof(widened<opd::bfloat16>) == 2 && sizeof(widened<opd::half>) == 2);

/// body(matrix_view) of a law's numbers, whatever their type.
template <class Body>
void with_law(const char* name, const DLTensor* t, Body&& body) {
    need(name, t);
    const any_matrix m = matrix_of(name, *t);
    const auto as = [&]<class T>(std::type_identity<T>) {
        if (reinterpret_cast<std::uintptr_t>(m.data) % alignof(T) != 0)
            refuse(name, "is not aligned to its element type");
        body(opd::matrix_view<const T>(static_cast<const T*>(m.data), m.rows, m.cols, m.stride));
    };
    switch (type_of(*t)) {
    case dtype::float32:
        return as(std::type_identity<float>{});
    case dtype::float64:
        return as(std::type_identity<double>{});
    case dtype::bfloat16:
        return as(std::type_identity<widened<opd::bfloat16>>{});
    case dtype::half:
        return as(std::type_identity<widened<opd::half>>{});
    default:
        detail::refuse_type(name, *t, "float32, float64, bfloat16 or float16");
    }
}

/// Keyed coins, or the caller's: one type, so that rules are compiled once. What the caller's say is checked, as the
/// rules go on with it.
class either_coins {
public:
    explicit either_coins(const spec::keyed_coins& keyed) : keyed_(keyed) {}
    explicit either_coins(const opd_coins& called) : called_(&called), keyed_(0, 0, 0) {}
    bool accept(double p) {
        if (called_ == nullptr) return keyed_.accept(p);
        const int yes = called_->accept(called_->context, p);
        if (yes != 0 && yes != 1) refuse("coins.accept", "returned " + std::to_string(yes) + ", not 0 or 1");
        return yes == 1;
    }
    index_t draw(std::span<const double> w) {
        if (called_ == nullptr) return keyed_.draw(w);
        const std::int64_t i = called_->draw(called_->context, w.data(), static_cast<std::int64_t>(w.size()));
        if (i < 0 || i >= static_cast<std::int64_t>(w.size()) || !(w[static_cast<std::size_t>(i)] > 0))
            refuse("coins.draw", "returned " + std::to_string(i) + ", which has no weight");
        return i;
    }

private:
    const opd_coins* called_ = nullptr;
    spec::keyed_coins keyed_;
};

/// 32- or 64-bit integers of either sign, as bits of 64.
struct keys {
    any_vector of;
    bool wide = false, is_signed = false;
    keys() = default;
    keys(const char* name, const DLTensor* t, index_t wanted) {
        need(name, t);
        is_signed = t->dtype.code == kDLInt, wide = t->dtype.bits == 64;
        if (t->dtype.lanes != 1 || !(t->dtype.code == kDLInt || t->dtype.code == kDLUInt) ||
            !(t->dtype.bits == 32 || t->dtype.bits == 64))
            detail::refuse_type(name, *t, "an integer of 32 or 64 bits");
        of = vector_of(name, *t);
        if (of.size != wanted)
            refuse(name, "has " + std::to_string(of.size) + " entries for " + std::to_string(wanted) + " sequences");
    }
    std::uint64_t operator[](index_t i) const {
        const auto* const p = static_cast<const char*>(of.data) + i * (wide ? 8 : 4);
        std::uint64_t x = 0;
        std::memcpy(&x, p, wide ? 8 : 4);
        if (!wide && is_signed) x = static_cast<std::uint64_t>(std::int64_t{static_cast<std::int32_t>(x)});
        return x;
    }
};

opd_verdict of_cpp(const spec::verdict& v) { return {v.accepted, v.node, v.next, 0}; }

/// Rows [first, first + count).
template <class T>
opd::matrix_view<const T> rows_of(opd::matrix_view<const T> m, index_t first, index_t count) {
    return {m.data == nullptr ? nullptr : m.row(first), count, m.cols, m.stride};
}

/// What each sequence's coins are.
class coin_source {
public:
    coin_source(const opd_verify_call& call, const forest& f) : call_(call), batch_(f.batch) {
        const auto unused = [](const char* name, bool zero, const char* why) { need_zero(name, zero, why); };
        if (call.coins != nullptr) {
            called_ = read("coins", call.coins);
            if (called_.accept == nullptr) refuse("coins.accept", "is a null pointer");
            if (called_.draw == nullptr) refuse("coins.draw", "is a null pointer");
        }
        constexpr const char* no_key = "the caller's coins have no key";
        if (call.coins != nullptr) unused("seed", call.seed == 0, no_key);
        if (call.coins != nullptr || batch_) {
            const char* const why = batch_ ? "a batch has `samples` and `positions`" : no_key;
            unused("sample", call.sample == 0, why);
            unused("position", call.position == 0, why);
        }
        if (call.coins != nullptr || !batch_) {
            const char* const why = call.coins != nullptr ? no_key : "one sequence has `sample` and `position`";
            unused("samples", call.samples == nullptr, why);
            unused("positions", call.positions == nullptr, why);
            return;
        }
        samples_ = keys("samples", call.samples, f.sequences());
        positions_ = keys("positions", call.positions, f.sequences());
        for (index_t s = 0; s < f.sequences(); ++s)
            if (positions_[s] > std::numeric_limits<std::uint32_t>::max())
                throw opd::invalid_input("positions", "must lie in [0, 2^32)", s);
    }
    either_coins operator()(index_t s) const {
        if (call_.coins != nullptr) return either_coins(called_);
        if (!batch_) return either_coins(spec::keyed_coins(call_.seed, call_.sample, call_.position));
        return either_coins(spec::keyed_coins(call_.seed, samples_[s], static_cast<std::uint32_t>(positions_[s])));
    }

private:
    const opd_verify_call& call_;
    bool batch_;
    opd_coins called_ = {};
    keys samples_, positions_;
};

template <class P, class Judge>
void each_sequence(const coin_source& coins_of, const forest& f, opd::matrix_view<const P> p, borrowed& w,
                   Judge&& judge) {
    w->verdicts.clear();
    for (index_t s = 0; s < f.sequences(); ++s) {
        either_coins coins = coins_of(s);
        const spec::draft_tree tree = f.tree(s);
        try {
            w->verdicts.push_back(of_cpp(judge(w->rules, tree, rows_of(p, f.row(s), tree.size() + 1), s, coins)));
        } catch (const opd::invalid_input& e) {
            of_sequence(e, f, s);
        }
    }
}

void verify(const opd_verify_call& call, opd_verdict* to) {
    const drawn kind = named("drawn", call.drawn, proposals);
    const bool block = flag("block", call.block);
    if (block && kind != drawn::dense) refuse("block", "is of chains of `dense` drafts");
    if (kind == drawn::one_hot && call.q != nullptr) refuse("q", "is not read: `one_hot` drafts have no law");
    borrowed w;
    const forest f(call.drafts, w);
    const coin_source coins_of(call, f);
    with_law("p", call.p, [&]<class P>(opd::matrix_view<const P> p) {
        const auto check = [&](const char* name, const auto& m) {
            if (m.rows != f.rows() || m.cols != p.cols || m.cols < 1)
                refuse(name, "is (" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "), not (" +
                                 std::to_string(f.rows()) + ", " +
                                 (name[0] == 'p' ? std::string("V") : std::to_string(p.cols)) +
                                 "): a row for each node and each sequence's prefix");
        };
        check("p", p);
        if (kind == drawn::one_hot)
            return each_sequence(coins_of, f, p, w,
                                 [&](auto& memory, const auto& tree, const auto& own, index_t, auto& coins) {
                                     return memory.verify(tree, own, spec::one_hot{}, coins);
                                 });
        with_law("q", call.q, [&]<class Q>(opd::matrix_view<const Q> q) {
            check("q", q);
            each_sequence(coins_of, f, p, w,
                          [&](auto& memory, const auto& tree, const auto& own, index_t s, auto& coins) {
                              const auto theirs = rows_of(q, f.row(s), own.rows);
                              if (block) return memory.verify_block(tree, own, spec::dense<Q>{theirs}, coins);
                              if (kind == drawn::dense) return memory.verify(tree, own, spec::dense<Q>{theirs}, coins);
                              if (kind == drawn::iid_siblings)
                                  return memory.verify(tree, own, spec::iid_siblings<Q>{theirs}, coins);
                              return memory.verify(tree, own, spec::without_replacement<Q>{theirs}, coins);
                          });
        });
    });
    std::ranges::copy(w->verdicts, to);
}

void follow(const opd_follow_call& call, opd_verdict* to) {
    if ((call.own == nullptr) == (call.draw == nullptr))
        refuse("own", "and draw: the call needs one of them, and no more");
    if (call.draw == nullptr && call.context != nullptr) refuse("context", "is of draw, which is a null pointer");
    borrowed w;
    const forest f(call.drafts, w);
    std::vector<spec::draft_tree> trees;
    for (index_t s = 0; s < f.sequences(); ++s) trees.push_back(f.tree(s));
    spec::batch_follower batch;
    const auto keep = [&](std::span<const spec::verdict> found) {
        w->verdicts.clear();
        for (const spec::verdict& v : found) w->verdicts.push_back(of_cpp(v));
    };
    using due = spec::batch_follower::due;
    if (call.own != nullptr) {
        const integers own("own", call.own);
        if (own.size() != f.rows())
            refuse("own", "has " + std::to_string(own.size()) + " entries for " + std::to_string(f.rows()) +
                              " rows: one for each node and each sequence's prefix");
        keep(batch.follow(trees, [&](std::span<const due> rows, std::span<std::int32_t> tokens) {
            for (std::size_t i = 0; i < rows.size(); ++i) tokens[i] = own.token(f.row(rows[i].sequence) + rows[i].row);
        }));
    } else {
        std::vector<opd_due> rows;
        keep(batch.follow(trees, [&](std::span<const due> asked, std::span<std::int32_t> tokens) {
            rows.clear();
            for (const due& d : asked) rows.push_back({d.sequence, d.row});
            const int result =
                call.draw(call.context, rows.data(), static_cast<std::int64_t>(rows.size()), tokens.data());
            if (result != 0) refuse("draw", "returned " + std::to_string(result) + ", not 0");
        }));
    }
    std::ranges::copy(w->verdicts, to);
}

} // namespace

extern "C" {

int opd_verify(const opd_verify_call* call, opd_verdict* verdicts) {
    return guarded([&] {
        const opd_verify_call c = read("call", call);
        need("verdicts", verdicts);
        verify(c, verdicts);
    });
}

int opd_follow(const opd_follow_call* call, opd_verdict* verdicts) {
    return guarded([&] {
        const opd_follow_call c = read("call", call);
        need("verdicts", verdicts);
        follow(c, verdicts);
    });
}

} // extern "C"
