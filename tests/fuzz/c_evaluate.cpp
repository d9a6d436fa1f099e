// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd_evaluate with structs of a caller who knows little: any kind, type, shape, step, name, number and null pointer.
// It answers with a result, and where that is an error other than bad or infinite rows, every output is as it was. Each
// tensor has memory of its own, as much as its shape and steps reach, so that a read or write beyond is seen.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "fuzz/input.hpp"
#include "opd/c/opd.h"

namespace {

using namespace opd::fuzz;

struct tensor {
    DLTensor t = {};
    std::vector<std::int64_t> shape, strides;
    std::vector<unsigned char> memory;
    std::vector<unsigned char> before;
};

struct caller {
    choices& c;
    numbers u;
    std::vector<std::unique_ptr<tensor>> all;
    std::int64_t rows, vocab, slots, width;

    explicit caller(choices& from)
        : c(from), u(from.bytes(2)), rows(from.of<std::int64_t>({2, 1, 3, 0, 40})),
          vocab(from.of<std::int64_t>({5, 1, 17, 40, 1030, 0})), slots(from.of<std::int64_t>({2, 1, 5, 0})),
          width(from.of<std::int64_t>({3, 1, 8, 0})) {}

    static constexpr std::int64_t largest = 400000; ///< numbers of a tensor; a kept set's ids are rows times vocabulary

    enum class what { logits, log_p, ids, flags, offsets, doubles, floats, count };
    /// Mostly what a member wants; null where it may be left out, and once in a while where it may not.
    const DLTensor* of(what kind, std::vector<std::int64_t> shape, bool optional) {
        if (c.once_in(optional ? 2 : 20)) return nullptr;
        auto made = std::make_unique<tensor>();
        tensor& x = *made;
        if (c.once_in(16)) shape = {c.of<std::int64_t>({0, 1, -1, std::int64_t{1} << 62, 7}), vocab};
        if (c.once_in(16)) shape.insert(shape.begin(), c.of<std::int64_t>({1, 2, 0}));
        if (c.once_in(16) && !shape.empty()) shape.pop_back();
        x.shape = shape;
        const std::int64_t n = static_cast<std::int64_t>(shape.size());
        x.t.ndim = static_cast<std::int32_t>(n), x.t.shape = x.shape.data(), x.t.device = {kDLCPU, 0};
        static constexpr DLDataType types[] = {{kDLFloat, 32, 1}, {kDLFloat, 64, 1},   {kDLBfloat, 16, 1},
                                               {kDLFloat, 16, 1}, {kDLInt, 32, 1},     {kDLInt, 64, 1},
                                               {kDLUInt, 8, 1},   {kDLBool, 8, 1},     {kDLInt, 8, 1},
                                               {kDLFloat, 8, 1},  {kDLComplex, 64, 1}, {kDLFloat, 32, 4}};
        std::size_t type = kind == what::ids || kind == what::offsets ? 4 + std::size_t(c.below(2))
                           : kind == what::flags                      ? 6 + std::size_t(c.below(2))
                           : kind == what::doubles                    ? 1
                           : kind == what::floats                     ? 0
                                                                      : common_type;
        if (kind == what::log_p && type > 1) type = 0;
        if (c.once_in(20)) type = std::size_t(c.below(12));
        x.t.dtype = types[type];
        std::int64_t step = 1;
        x.strides.resize(shape.size());
        for (std::int64_t i = n - 1; i >= 0; --i) {
            x.strides[std::size_t(i)] = step;
            const std::int64_t size = std::clamp<std::int64_t>(shape[std::size_t(i)], 1, largest);
            step = std::min<std::int64_t>(step * size, 1 << 20) + (i == n - 1 && c.once_in(4) ? 3 : 0);
        }
        const bool even = c.once_in(2);
        if (!even && c.once_in(16) && n > 0)
            x.strides[std::size_t(c.below(n))] = c.of<std::int64_t>({0, -1, 2, std::int64_t{1} << 61});
        x.t.strides = even ? nullptr : x.strides.data();
        // as far as its shape and steps reach
        std::int64_t last = 1;
        bool sane = true;
        for (std::int64_t i = 0, flat = 1; i < n; ++i) {
            const std::int64_t size = shape[std::size_t(i)];
            sane &= size >= 0 && size <= largest;
            if (!sane) break;
            flat *= std::max<std::int64_t>(size, 1);
            const std::int64_t of_dim = size > 1 ? x.strides[std::size_t(i)] : 0; // one index has no next
            sane &= flat <= largest && of_dim >= 0 && of_dim <= (1 << 21);
            if (even)
                last = flat;
            else if (sane)
                last += std::max<std::int64_t>(size - 1, 0) * of_dim;
        }
        const std::size_t bytes =
            sane ? std::size_t(last) * std::max<std::size_t>(1, x.t.dtype.bits / 8U) * x.t.dtype.lanes : 16;
        x.memory.resize(bytes + 16);
        fill(kind, x, types[type]);
        x.t.byte_offset = c.once_in(20) ? std::uint64_t(c.below(3)) : 0;
        x.t.data = c.once_in(40) ? nullptr : static_cast<void*>(x.memory.data());
        if (c.once_in(40)) x.t.device.device_type = kDLCUDA;
        x.before = x.memory;
        all.push_back(std::move(made));
        return &all.back()->t;
    }
    void fill(what kind, tensor& x, DLDataType type) {
        const auto put = [&]<class T>(T, auto&& make) {
            for (std::size_t i = 0; i + sizeof(T) <= x.memory.size(); i += sizeof(T)) {
                const T v = static_cast<T>(make());
                std::memcpy(x.memory.data() + i, &v, sizeof v);
            }
        };
        if (kind == what::ids || kind == what::offsets || kind == what::flags) {
            std::int64_t next = 0;
            const auto make = [&] {
                if (u.below(64) == 0) return u.below(3) - 1;
                return kind == what::offsets ? next++
                       : kind == what::flags ? u.below(2)
                                             : u.below(std::max<std::int64_t>(vocab, 1));
            };
            if (type.bits == 32) return put(std::int32_t{}, make);
            if (type.bits == 64) return put(std::int64_t{}, make);
            return put(std::uint8_t{}, make);
        }
        const auto make = [&] {
            if (u.below(200) == 0) return std::numeric_limits<double>::quiet_NaN();
            if (u.below(100) == 0) return -std::numeric_limits<double>::infinity();
            return kind == what::log_p ? -std::abs(u.normal()) - .1 : 3 * u.normal();
        };
        if (type.bits == 32) return put(float{}, make);
        if (type.bits == 64) return put(double{}, make);
        for (unsigned char& b : x.memory) b = static_cast<unsigned char>(u.below(256));
    }
    std::size_t common_type = 0;
    double number(std::initializer_list<double> usual) {
        return c.once_in(16) ? c.of({std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                                     -1.0, 1e300})
                             : c.of(usual);
    }
    std::int32_t kind_of(std::int32_t n) {
        return c.once_in(30) ? c.of({-1, 99, 1 << 30}) : static_cast<std::int32_t>(c.below(n));
    }
    /// A size that is wrong, once in a while; none that reaches beyond the struct and is not refused for it.
    std::size_t size_of(std::size_t size) {
        return c.once_in(40) ? c.of<std::size_t>({0, 3, 16, size - 8, 1 << 20}) : size;
    }
    const char* name(const char* table) {
        if (c.once_in(2)) return nullptr;
        if (c.once_in(20)) return c.of({"", "nothing", "reverse_kl "});
        int n = 0;
        while (opd_name(table, n) != nullptr) ++n;
        return opd_name(table, static_cast<int>(c.below(n)));
    }
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    caller k(c);
    using w = caller::what;
    k.common_type = std::size_t(c.below(4));
    const std::int64_t n = k.rows, v = k.vocab, m = k.slots, d = k.width;
    opd_student s = {};
    s.struct_size = k.size_of(sizeof s), s.kind = k.kind_of(3), s.keep_padding = c.once_in(2);
    s.z = k.of(w::logits, {n, v}, s.kind == OPD_HIDDEN);
    opd_teacher t = {};
    t.struct_size = k.size_of(sizeof t), t.kind = k.kind_of(6), t.law = k.kind_of(3);
    const bool ragged = t.kind == OPD_RAGGED_SUPPORT;
    const std::vector<std::int64_t> of_slots =
        ragged ? std::vector<std::int64_t>{n * m} : std::vector<std::int64_t>{n, m};
    const DLTensor* dz = s.kind == OPD_ON_SUPPORT ? k.of(w::logits, of_slots, true) : k.of(w::logits, {n, v}, true);
    s.dz = c.once_in(10) ? s.z : dz;
    s.padding = c.once_in(8) ? c.of<std::int64_t>({-1, std::int64_t{1} << 60}) : 0;
    s.temperature = k.number({0, 1, .5, 100});
    const DLTensor *dx = nullptr, *dw = nullptr, *db = nullptr;
    if (s.kind == OPD_HIDDEN) {
        s.x = k.of(w::logits, {n, d}, false), s.w = k.of(w::logits, {v, d}, false), s.bias = k.of(w::logits, {v}, true);
        dx = s.dx = k.of(w::floats, {n, d}, true), dw = s.dw = k.of(w::floats, {v, d}, true),
        db = s.db = k.of(w::floats, {v}, true);
        s.soft_cap = k.number({0, 5}), s.beta_head = k.number({0, 1}),
        s.budget_bytes = c.of<std::uint64_t>({0, 4000, 1 << 16});
    }
    t.temperature = k.number({0, 1, 2});
    if (t.kind == OPD_DENSE) t.y = k.of(w::logits, {n, c.once_in(8) ? v + 2 : v}, false);
    if (t.kind == OPD_TEACHER_HIDDEN)
        t.x = k.of(w::logits, {n, d}, false), t.w = k.of(w::logits, {v, d}, false), t.bias = k.of(w::logits, {v}, true);
    t.widest = c.of<std::int64_t>({0, 1, -1, std::int64_t{1} << 40});
    t.lumped = c.once_in(8), t.common = c.once_in(8) ? c.of<std::int64_t>({1, -1, 99999}) : 0,
    t.chosen_by = k.kind_of(3);
    if (t.kind >= OPD_SUPPORT && t.kind <= OPD_WEIGHTED) {
        t.ids = k.of(w::ids, of_slots, false), t.log_q = k.of(w::log_p, of_slots, false);
        t.log_mu = k.of(w::log_p, of_slots, t.kind <= OPD_RAGGED_SUPPORT), t.log_tail = k.of(w::log_p, {n}, true);
        t.offsets = k.of(w::offsets, {n + 1}, !ragged);
        if (t.kind >= OPD_SAMPLES) {
            t.weight = k.of(w::log_p, {n, m}, t.kind == OPD_SAMPLES), t.exact = k.of(w::flags, {n, m}, true);
            t.log_prox = k.of(w::log_p, {n, m}, true), t.log_ref = k.of(w::log_p, {n, m}, true);
            t.advantage = k.of(w::log_p, {n, c.once_in(2) ? 1 : m}, true), t.baseline = k.of(w::log_p, {n}, true);
            t.mu_entropy = k.of(w::log_p, {n}, true), t.log_tail_mu = k.of(w::doubles, {n}, true);
            t.missing_mu = c.once_in(4), t.raw_logprobs = c.once_in(4), t.log_norm = k.of(w::log_p, {n}, true);
            t.drawn_temperature = k.number({0, .7}), t.drawn_top_p = k.number({0, .9}),
            t.drawn_min_p = k.number({0, .1});
            t.drawn_top_k = c.of<std::int64_t>({0, 3, -1});
            if (c.once_in(3)) {
                t.kept_ids = k.of(w::ids, {n * v}, false), t.kept_offsets = k.of(w::offsets, {n + 1}, false);
                t.log_kept_q = k.of(w::log_p, {n}, true);
            }
        }
    }
    opd_estimator e = {};
    e.struct_size = k.size_of(sizeof e), e.estimator = k.name("estimator");
    e.of = k.name(c.once_in(2) ? "divergence" : "objective"), e.a = k.number({.3, .5, 1, 2}),
    e.b = k.number({.3, .5, 1});
    e.surrogate = k.name("surrogate"), e.low = k.number({0, .2}), e.high = k.number({0, .3}), e.dual = k.number({0, 3});
    e.cap = k.number({0, 2}), e.mask_over_cap = c.once_in(2), e.self_normalised = c.once_in(3);
    e.estr_tau = k.number({0, 1}), e.estr_epsilon = k.number({0, .1}), e.baseline = k.name("baseline");
    e.accept_bias = c.once_in(2), e.selector = k.name("selector"), e.selector_a = k.number({0, .5, 2}),
    e.selector_b = k.number({0, .5});
    opd_env env = {};
    env.struct_size = k.size_of(sizeof env), env.reduction = k.kind_of(5), env.has_ignore = c.once_in(4),
    env.ignore = c.of<std::int64_t>({0, 1, -100});
    env.mask = k.of(c.once_in(2) ? w::flags : w::ids, {n}, true), env.weights = k.of(w::floats, {n}, true);
    env.offsets = k.of(w::offsets, {n + 1}, true), env.versions = k.of(w::ids, {n}, true), env.version = 3;
    env.on_infinite = k.kind_of(3), env.floor_at = k.number({0, -20}), env.normaliser = k.number({0, 7}),
    env.beta = k.number({0, 1, .5});
    env.beta_loss = k.number({0, 1});
    const DLTensor *losses = env.losses = k.of(w::floats, {n}, true), *lse = env.lse = k.of(w::doubles, {n}, true);
    env.totals = k.of(w::doubles, {std::int64_t(OPD_TOTALS)}, true);
    env.given_lse = k.of(w::doubles, {n}, true), env.frozen_keep = k.of(w::flags, {n, m}, true),
    env.frozen_weight = k.of(w::doubles, {n, m}, true);
    env.frozen_sequence_log_ratio = k.of(w::doubles, {n}, true), env.frozen_advantage = k.of(w::doubles, {n, m}, true);
    env.raise_bad = c.once_in(4), env.on_overflow = k.kind_of(2), env.bad_share = k.number({0, .5}),
    env.loss_clamp = k.number({0, 3});
    env.check_contents = c.once_in(6), env.determinism = k.kind_of(3), env.drop_and_renormalise = c.once_in(6),
    env.measure_entropy = c.once_in(4);
    opd_result r = {};
    r.struct_size = k.size_of(sizeof r);
    const opd_call call = {k.size_of(sizeof call),       nullptr,
                           c.once_in(60) ? nullptr : &s, c.once_in(60) ? nullptr : &t,
                           c.once_in(8) ? nullptr : &e,  c.once_in(4) ? nullptr : &env};
    std::uint64_t bytes = 0;
    opd_workspace_bytes(&call, &bytes);
    const auto unchanged = [&](const DLTensor* of) {
        if (of == nullptr) return true;
        for (const auto& x : k.all)
            if (&x->t == of) return x->memory == x->before;
        return true;
    };
    for (const DLTensor* of : {s.dz, dx, dw, db, losses, lse, env.totals})
        need(unchanged(of), "opd_workspace_bytes writes nothing");
    const int status = opd_evaluate(&call, c.once_in(8) ? nullptr : &r);
    need(status >= OPD_OK && status < OPD_INTERNAL, "an internal error");
    need(status == OPD_OK || opd_last_error()[0] != '\0', "an error has a sentence");
    if (status == OPD_INVALID_INPUT || status == OPD_UNSUPPORTED)
        for (const DLTensor* of : {s.dz, dx, dw, db, losses, lse, env.totals})
            need(unchanged(of), "a refused call writes nothing");
    for (const auto& x : k.all) {
        const bool out = &x->t == s.dz || &x->t == dx || &x->t == dw || &x->t == db || &x->t == losses ||
                         &x->t == lse || &x->t == env.totals;
        need(out || x->memory == x->before, "an input was written");
    }
    return 0;
}
