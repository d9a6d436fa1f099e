// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd/c/rows.h against the C++ calls, bit for bit: draws by every design, kept sets, scores, penalties and passes
// over a batch, of every type, random shapes, rows apart, masks and filters; what lies between and beside the rows
// stays. Bad input is answered by name, and nothing is written.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "c/tensors.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/c/opd.h"
#include "opd/draw.hpp"
#include "opd/estimators/any.hpp"
#include "opd/estimators/draft_weights.hpp"
#include "opd/estimators/m2po.hpp"
#include "opd/estimators/sequences.hpp"
#include "opd/id_overlap.hpp"
#include "opd/penalties.hpp"
#include "opd/ratio_sketch.hpp"
#include "opd/score.hpp"

namespace {

using opd::index_t;

const bool own_kernels = (opd::test::choose_own_kernels(), true);

// Where there is a fused multiply-add, g++ makes one of whatever two operations it sees side by side, which depends
// on how it inlines; and passes over a batch are compiled without it, as the library is. What they round may then
// differ in a last bit.
#if defined(__FMA__)
constexpr bool fuses_passes = true;
#else
constexpr bool fuses_passes = false;
#endif
#if defined(__FMA__) && !defined(__clang__)
constexpr bool fuses_rows = true;
#else
constexpr bool fuses_rows = false;
#endif
/// Whether two numbers have the same bits, or may differ in their last ones.
template <class T>
bool same(const T& a, const T& b, bool fused) {
    if (std::memcmp(&a, &b, sizeof a) == 0) return true;
    if constexpr (std::is_floating_point_v<T>)
        return fused && std::abs(a - b) <= (sizeof a == 8 ? 1e-12 : 1e-6) * std::max<T>(1, std::abs(b));
    return false;
}
bool same_pass(double a, double b) { return same(a, b, fuses_passes); }

/// Numbers in rows that are further apart than they are long, and the descriptor of them.
template <class T>
struct table {
    index_t rows, cols, stride;
    std::vector<T> data;
    std::int64_t shape[2], strides[2];
    DLTensor tensor;

    table(index_t rows_, index_t cols_, index_t gap = 0)
        : rows(rows_), cols(cols_), stride(cols_ + gap), data(static_cast<std::size_t>(rows_ * (cols_ + gap)) + 1) {
        std::memset(static_cast<void*>(data.data()), 0x5a, data.size() * sizeof(T)); // what must stay
        describe();
    }
    table(const table& o) : rows(o.rows), cols(o.cols), stride(o.stride), data(o.data) { describe(); }
    table& operator=(const table&) = delete;
    void describe() {
        shape[0] = rows, shape[1] = cols, strides[0] = stride, strides[1] = 1;
        tensor = {data.data(), {kDLCPU, 0}, 2, opd::test::dl_type<T>(), shape, strides, 0};
    }
    T& operator()(index_t r, index_t c) { return data[static_cast<std::size_t>(r * stride + c)]; }
    opd::matrix_view<T> view() { return {data.data(), rows, cols, stride}; }
    opd::matrix_view<const T> cview() const { return {data.data(), rows, cols, stride}; }
    bool equals(const table& o, bool fused) const {
        return std::equal(data.begin(), data.end(), o.data.begin(), o.data.end(),
                          [&](const T& a, const T& b) { return same(a, b, fused); });
    }
    bool operator==(const table& o) const { return equals(o, fuses_rows); }
};
template <class T>
struct line : table<T> {
    explicit line(index_t n) : table<T>(1, n) { flat(); }
    explicit line(const std::vector<T>& of) : line(static_cast<index_t>(of.size())) {
        std::copy(of.begin(), of.end(), this->data.begin());
    }
    line(const line& o) : table<T>(o) { flat(); }
    void flat() { this->tensor.ndim = 1, this->shape[0] = this->cols, this->strides[0] = 1; }
    T& operator[](index_t i) { return this->data[static_cast<std::size_t>(i)]; }
    opd::vector_view<T> view() { return {this->data.data(), this->cols}; }
    opd::vector_view<const T> cview() const { return {this->data.data(), this->cols}; }
};

struct random_source {
    std::mt19937_64 engine;
    explicit random_source(std::uint64_t seed) : engine(seed) {}
    index_t below(index_t n) { return static_cast<index_t>(engine() % static_cast<std::uint64_t>(n)); }
    bool chance(int one_in) { return below(one_in) == 0; }
    double uniform() { return (static_cast<double>(engine() >> 11) + 0.5) * 0x1p-53; }
    double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
    template <class T>
    T among(std::initializer_list<T> of) {
        return of.begin()[below(static_cast<index_t>(of.size()))];
    }
};
template <class T>
T stored(double x) {
    return opd::element<T>::store(static_cast<opd::arithmetic_t<T>>(x));
}

/// Rows of logits with ties and masks, some of them bad.
template <class Z>
void fill_logits(table<Z>& z, random_source& random) {
    const double size = random.among({0.5, 3.0, 30.0});
    for (index_t r = 0; r < z.rows; ++r) {
        const bool masks = random.chance(3), ties = random.chance(4);
        for (index_t v = 0; v < z.cols; ++v) {
            double x = size * random.normal();
            if (ties) x = std::round(x);
            z(r, v) = stored<Z>(x);
            if (masks && random.chance(4))
                z(r, v) = stored<Z>(random.chance(2) ? -INFINITY : -double(opd::detail::largest_stored<Z>));
        }
        if (random.chance(12)) z(r, random.below(z.cols)) = stored<Z>(random.chance(2) ? NAN : INFINITY);
    }
}
index_t random_vocab(random_source& random) {
    switch (random.below(5)) {
    case 0:
        return 1 + random.below(4);
    case 1:
        return 1 + random.below(70);
    case 2:
        return random.among<index_t>({1023, 1024, 1025, 2048});
    default:
        return 1 + random.below(5000);
    }
}
/// Which rows count: by nothing, bytes, or targets with an ignored value.
struct random_mask {
    line<std::uint8_t> flags;
    line<std::int64_t> targets;
    int kind;
    random_mask(index_t n, random_source& random) : flags(n), targets(n), kind(int(random.below(3))) {
        for (index_t r = 0; r < n; ++r) flags[r] = !random.chance(4), targets[r] = random.chance(4) ? -100 : 7;
    }
    opd::row_mask<> view() const {
        if (kind == 0) return {};
        return kind == 1 ? opd::row_mask<>(flags.cview()) : opd::row_mask<>::ignoring(targets.cview(), -100);
    }
    template <class Call>
    void put(Call& c) {
        if (kind == 0) return;
        c.mask = kind == 1 ? &flags.tensor : &targets.tensor;
        c.ignore = kind == 2 ? -100 : 1; // which says nothing without has_ignore
        c.has_ignore = kind == 2;
    }
};
template <class Call>
Call made() {
    Call c{};
    c.struct_size = sizeof c;
    return c;
}
#define CHECK_OK(call)                                                                                                 \
    do {                                                                                                               \
        const int status_ = (call);                                                                                    \
        INFO(std::string(opd_last_error()));                                                                           \
        CHECK(status_ == OPD_OK);                                                                                      \
    } while (false)

void check_counts(const opd_result& c, const opd::result& cpp) {
    CHECK(std::memcmp(&c.diagnostics, &cpp.diagnostics, sizeof c.diagnostics) == 0);
}

struct engine {
    opd_engine* handle = nullptr;
    explicit engine(int threads, void* arena = nullptr, std::uint64_t bytes = 0) {
        auto o = made<opd_engine_options>();
        o.threads = threads, o.arena = arena, o.arena_bytes = bytes;
        REQUIRE(opd_engine_create(&o, &handle) == OPD_OK);
    }
    engine(const engine&) = delete;
    ~engine() { opd_engine_destroy(handle); }
};

opd::filter random_filter(random_source& random, index_t v) {
    opd::filter f;
    if (random.chance(2)) f.temperature = random.among({0.25F, 0.7F, 1.5F});
    if (random.chance(2)) return f;
    if (random.chance(2)) f.top_k = 1 + random.below(v + 1);
    if (random.chance(2)) f.top_p = random.among({0.3F, 0.9F, 0.99F});
    if (random.chance(3)) f.min_p = random.among({0.01F, 0.2F});
    return f;
}
template <class Call>
void put(Call& c, const opd::filter& f) {
    c.temperature = double(f.temperature), c.top_k = f.top_k, c.top_p = double(f.top_p), c.min_p = double(f.min_p);
}

// --- draws -----------------------------------------------------------------------------------------------------------

struct design_choice {
    const char* name;
    index_t m = 1, h = 0, first = 0;
    index_t columns() const { return h + m; }
    template <class Body>
    void visit(Body&& body) const {
        namespace d = opd::design;
        const std::string text = name;
        if (text == "greedy") body(d::greedy{});
        if (text == "gumbel") body(d::gumbel{});
        if (text == "iid") body(d::iid{m, first});
        if (text == "threshold") body(d::threshold{m});
        if (text == "head_tail") body(d::head_tail{h, m});
        if (text == "gumbel_top") body(d::gumbel_top{m});
    }
};
design_choice random_design(random_source& random) {
    const char* const name = random.among({"greedy", "gumbel", "iid", "threshold", "head_tail", "gumbel_top"});
    design_choice d{name};
    const std::string text = name;
    if (text != "greedy" && text != "gumbel") d.m = 1 + random.below(9);
    if (text == "head_tail") d.h = random.below(6);
    if (text == "iid") d.first = random.below(3);
    return d;
}

/// Everything that a draw writes.
template <class Id, class L, class W>
struct draw_outputs {
    table<Id> ids;
    table<L> log_mu;
    table<W> weight;
    table<std::uint8_t> exact;
    line<double> lse, log_kept, cut_logit, log_tail, kappa;
    line<std::int64_t> cut_id, kept;
    draw_outputs(index_t n, index_t columns, index_t gap)
        : ids(n, columns, gap), log_mu(n, columns, 2 * gap), weight(n, columns), exact(n, columns, gap), lse(n),
          log_kept(n), cut_logit(n), log_tail(n), kappa(n), cut_id(n), kept(n) {}
    bool operator==(const draw_outputs&) const = default;
};

template <class Z, class Id, class L, class W>
void check_draw(random_source& random, opd_engine* engine, opd::cpu_backend& be) {
    const index_t n = random.below(6), v = random_vocab(random), gap = random.among<index_t>({0, 3});
    table<Z> z(n, v, gap);
    fill_logits(z, random);
    const design_choice design = random_design(random);
    const std::string text = design.name;
    const bool has_tail = text == "threshold" || text == "head_tail", has_kappa = text == "gumbel_top",
               all = random.chance(2);
    random_mask mask(n, random);
    line<std::uint64_t> sample(n);
    line<std::uint32_t> position(n);
    for (index_t r = 0; r < n; ++r)
        sample[r] = random.engine(), position[r] = static_cast<std::uint32_t>(random.engine());
    const index_t numbers = has_kappa ? 2 * design.m + 1 : text == "threshold" ? 1 : design.m;
    const bool own = text != "greedy" && text != "gumbel" && random.chance(4);
    table<double> uniforms(n, numbers);
    for (index_t r = 0; r < n; ++r)
        for (index_t j = 0; j < numbers; ++j) uniforms(r, j) = random.uniform();
    const opd::filter filter = random_filter(random, v);
    draw_outputs<Id, L, W> c_out(n, design.columns(), gap);
    draw_outputs<Id, L, W> cpp_out = c_out;

    auto c = made<opd_draw_call>();
    c.engine = engine, c.z = &z.tensor, c.design = random.chance(2) && text == "gumbel" ? nullptr : design.name;
    if (random.chance(2)) c.m = design.m; // else by the columns of ids
    c.h = design.h, c.first = design.first, c.seed = 11;
    if (own)
        c.uniforms = &uniforms.tensor;
    else
        c.sample = &sample.tensor, c.position = &position.tensor;
    mask.put(c), put(c, filter);
    c.ids = &c_out.ids.tensor, c.log_mu = &c_out.log_mu.tensor;
    opd::draw_options<> options{.filter = filter, .mask = mask.view()};
    opd::drawn<Id, L, W> out{.ids = cpp_out.ids.view(), .log_mu = cpp_out.log_mu.view()};
    std::vector<opd::filter_cut> cut(static_cast<std::size_t>(n) + 1);
    if (all) {
        c.weight = &c_out.weight.tensor, c.exact = &c_out.exact.tensor;
        c.lse = &c_out.lse.tensor, c.log_kept = &c_out.log_kept.tensor;
        c.cut_logit = &c_out.cut_logit.tensor, c.cut_id = &c_out.cut_id.tensor, c.kept = &c_out.kept.tensor;
        out.weight = cpp_out.weight.view(), out.exact = cpp_out.exact.view();
        options.lse = cpp_out.lse.view(), options.log_kept = cpp_out.log_kept.view();
        options.cut = opd::view(cut.data(), n), options.kept = cpp_out.kept.view();
        if (has_tail) c.log_tail = &c_out.log_tail.tensor, options.log_tail = cpp_out.log_tail.view();
        if (has_kappa) c.kappa = &c_out.kappa.tensor, options.kappa = cpp_out.kappa.view();
    }
    const opd::draw_keys<> keys{.seed = 11,
                                .sample = own ? opd::vector_view<const std::uint64_t>{} : sample.cview(),
                                .position = own ? opd::vector_view<const std::uint32_t>{} : position.cview(),
                                .uniforms = own ? uniforms.cview() : opd::matrix_view<const double>{}};
    opd::result r;
    design.visit([&](const auto& d) { r = opd::draw(be, z.cview(), d, keys, out, options); });
    for (index_t i = 0; all && i < n; ++i)
        if (mask.view().kept(i))
            cpp_out.cut_logit[i] = cut[static_cast<std::size_t>(i)].z,
            cpp_out.cut_id[i] = cut[static_cast<std::size_t>(i)].id;

    INFO("design ", text, ", ", n, " rows of ", v, ", m ", design.m, ", h ", design.h);
    auto result = made<opd_result>();
    CHECK_OK(opd_draw(&c, &result));
    CHECK(c_out == cpp_out);
    check_counts(result, r);
}

TEST_CASE("a draw has the bits of the C++ call, of any design, type, filter and mask") {
    REQUIRE(own_kernels);
    const engine two(2);
    opd::cpu_backend be{.threads = 2};
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
        random_source random(seed);
        CAPTURE(seed);
        check_draw<float, std::int32_t, float, float>(random, two.handle, be);
        check_draw<float, std::int64_t, double, double>(random, nullptr, be);
        check_draw<opd::bfloat16, std::int32_t, float, float>(random, two.handle, be);
        check_draw<opd::half, std::int64_t, float, float>(random, two.handle, be);
        check_draw<double, std::int32_t, double, double>(random, nullptr, be);
    }
}

// --- kept sets -------------------------------------------------------------------------------------------------------

template <class Z, class Id, class Offset>
void check_kept(random_source& random, opd_engine* engine, opd::cpu_backend& be) {
    const index_t n = 1 + random.below(5), v = random_vocab(random);
    table<Z> z(n, v, random.among<index_t>({0, 5}));
    fill_logits(z, random);
    random_mask mask(n, random);
    const opd::filter filter = random_filter(random, v);
    table<Id> token(n, 1);
    table<float> log_mu(n, 1);
    std::vector<opd::filter_cut> cut(static_cast<std::size_t>(n));
    std::vector<index_t> kept(static_cast<std::size_t>(n), 0), begin(static_cast<std::size_t>(n) + 1, 0);
    opd::draw(be, z.cview(), opd::design::greedy{}, {}, opd::drawn<Id>{.ids = token.view(), .log_mu = log_mu.view()},
              {.filter = filter, .mask = mask.view(), .cut = cut, .kept = kept});
    std::partial_sum(kept.begin(), kept.end(), begin.begin() + 1);
    line<Id> cpp_ids(begin.back());
    const line<Id> untouched = cpp_ids;
    const opd::result r = opd::kept_ids(be, z.cview(), cut, begin, cpp_ids.view(), mask.view());

    for (const bool by_cut : {true, false}) {
        CAPTURE(by_cut);
        auto c = made<opd_kept_ids_call>();
        c.engine = engine, c.z = &z.tensor;
        mask.put(c);
        line<double> cut_logit(n);
        line<std::int64_t> cut_id(n), counts(kept);
        if (by_cut) {
            table<Id> ids(n, 1);
            table<float> mu(n, 1);
            auto draw = made<opd_draw_call>();
            draw.engine = engine, draw.z = &z.tensor, draw.design = "greedy", draw.ids = &ids.tensor,
            draw.log_mu = &mu.tensor;
            mask.put(draw), put(draw, filter);
            draw.cut_logit = &cut_logit.tensor, draw.cut_id = &cut_id.tensor, draw.kept = &counts.tensor;
            CHECK_OK(opd_draw(&draw, nullptr));
            c.cut_logit = &cut_logit.tensor, c.cut_id = &cut_id.tensor, c.kept = &counts.tensor;
        } else {
            put(c, filter);
        }
        line<Offset> offsets(n + 1);
        c.offsets = &offsets.tensor;
        std::int64_t total = -1;
        CHECK_OK(opd_kept_ids(&c, &total, nullptr));
        REQUIRE(total == begin.back());
        CHECK(std::equal(begin.begin(), begin.end(), offsets.data.begin()));
        line<Id> ids(total);
        c.ids = &ids.tensor;
        auto result = made<opd_result>();
        CHECK_OK(opd_kept_ids(&c, nullptr, &result));
        CHECK(ids == cpp_ids);
        check_counts(result, r);
        if (n > 0 && total > 0) { // other logits than those of the cut
            REQUIRE(begin.back() > 0);
            CHECK_FALSE(ids == untouched);
        }
    }
}
TEST_CASE("kept sets come in two calls, by a draw's cut or by a filter") {
    const engine two(2);
    opd::cpu_backend be{.threads = 2};
    for (std::uint64_t seed = 100; seed < 130; ++seed) {
        random_source random(seed);
        CAPTURE(seed);
        check_kept<float, std::int32_t, std::int64_t>(random, two.handle, be);
        check_kept<opd::bfloat16, std::int64_t, std::int32_t>(random, two.handle, be);
        check_kept<opd::half, std::int32_t, std::int32_t>(random, nullptr, be);
        check_kept<double, std::int64_t, std::int64_t>(random, two.handle, be);
    }
}

// --- scores ----------------------------------------------------------------------------------------------------------

template <class Id, class L>
struct score_outputs {
    table<L> log_p, top_log_p;
    table<Id> top_ids;
    line<L> log_tail, top_log_tail;
    line<double> lse, entropy;
    score_outputs(index_t rows, index_t n, index_t m, index_t k, index_t gap)
        : log_p(rows, m, rows == 1 ? 0 : gap), top_log_p(n, k, gap), top_ids(n, k), log_tail(n), top_log_tail(n),
          lse(n), entropy(n) {}
    bool operator==(const score_outputs&) const = default;
};

template <class Z, class Id, class L, class Offset>
void check_score(random_source& random, opd_engine* engine, opd::cpu_backend& be) {
    const index_t n = 2 + random.below(5), v = random_vocab(random), gap = random.among<index_t>({0, 2});
    table<Z> z(n, v, gap);
    fill_logits(z, random);
    random_mask mask(n, random);
    const bool ragged = random.chance(3);
    line<Offset> offsets(n + 1);
    offsets[0] = 0;
    for (index_t r = 0; r < n; ++r) offsets[r + 1] = static_cast<Offset>(index_t(offsets[r]) + random.below(8));
    const index_t m = ragged ? index_t(offsets[n]) : 1 + random.below(8), k = 1 + random.below(std::min<index_t>(v, 9));
    table<Id> ids(ragged ? 1 : n, m, ragged ? 0 : gap);
    for (index_t r = 0; r < ids.rows; ++r)
        for (index_t j = 0; j < m; ++j)
            ids(r, j) = static_cast<Id>(random.chance(6) ? -1 : random.chance(40) ? v + 3 : random.below(v));
    score_outputs<Id, L> c_out(ids.rows, n, m, k, gap);
    score_outputs<Id, L> cpp_out = c_out;
    const float temperature = random.among({1.F, 0.6F, 3.F});

    auto c = made<opd_score_call>();
    c.engine = engine, c.z = &z.tensor, c.temperature = double(temperature);
    mask.put(c);
    opd::scores<Id, L> what;
    if (!random.chance(4)) {
        c.ids = &ids.tensor, what.ids = ids.cview();
        if (ragged) c.offsets = &offsets.tensor, what.offsets = opd::row_offsets<>(offsets.cview());
        if (!random.chance(4)) c.log_p = &c_out.log_p.tensor, what.log_p = cpp_out.log_p.view();
        if (random.chance(2)) c.log_tail = &c_out.log_tail.tensor, what.log_tail = cpp_out.log_tail.view();
    }
    if (random.chance(2)) {
        c.top_ids = &c_out.top_ids.tensor, what.top_ids = cpp_out.top_ids.view();
        if (random.chance(2)) c.top_log_p = &c_out.top_log_p.tensor, what.top_log_p = cpp_out.top_log_p.view();
        if (random.chance(2))
            c.top_log_tail = &c_out.top_log_tail.tensor, what.top_log_tail = cpp_out.top_log_tail.view();
    }
    if (random.chance(2)) c.lse = &c_out.lse.tensor, what.lse = cpp_out.lse.view();
    if (random.chance(2)) c.entropy = &c_out.entropy.tensor, what.entropy = cpp_out.entropy.view();
    const opd::result r = opd::score(be, z.cview(), what, temperature, mask.view());
    INFO(n, " rows of ", v, ragged ? ", ragged" : "");
    auto result = made<opd_result>();
    CHECK_OK(opd_score(&c, &result));
    CHECK(c_out == cpp_out);
    check_counts(result, r);
}
TEST_CASE("scores have the bits of the C++ call, whatever parts are asked for") {
    const engine two(2);
    opd::cpu_backend be{.threads = 2};
    for (std::uint64_t seed = 200; seed < 280; ++seed) {
        random_source random(seed);
        CAPTURE(seed);
        check_score<float, std::int32_t, float, std::int64_t>(random, two.handle, be);
        check_score<float, std::int64_t, double, std::int32_t>(random, nullptr, be);
        check_score<opd::bfloat16, std::int64_t, float, std::int32_t>(random, two.handle, be);
        check_score<opd::half, std::int32_t, float, std::int32_t>(random, two.handle, be);
        check_score<double, std::int32_t, double, std::int64_t>(random, two.handle, be);
    }
}

/// Ascending sets of ids for each row, and tokens that most often lie in them.
template <class Id>
struct random_sets {
    std::vector<Id> ids;
    std::vector<std::int64_t> begin{0};
    random_sets(table<Id>& tokens, index_t v, random_source& random) {
        for (index_t r = 0; r < tokens.rows; ++r) {
            std::vector<Id> set;
            for (index_t id = 0; id < v; ++id)
                if (random.chance(3)) set.push_back(static_cast<Id>(id));
            if (set.empty()) set.push_back(0);
            for (index_t j = 0; j < tokens.cols; ++j)
                tokens(r, j) = random.chance(30) ? Id(random.below(v))
                                                 : set[static_cast<std::size_t>(random.below(index_t(set.size())))];
            ids.insert(ids.end(), set.begin(), set.end());
            begin.push_back(std::int64_t(ids.size()));
        }
    }
};

template <class Z, class Id, class L>
void check_kept_logp(random_source& random, opd_engine* engine, opd::cpu_backend& be) {
    const index_t n = 1 + random.below(4), v = 1 + random.below(300), m = 1 + random.below(4);
    table<Z> z(n, v, 1);
    fill_logits(z, random);
    table<Id> tokens(n, m);
    const random_sets<Id> sets(tokens, v, random);
    line<Id> kept(sets.ids);
    line<std::int64_t> begin(sets.begin);
    random_mask mask(n, random);
    table<L> c_log_p(n, m, 2);
    table<L> cpp_log_p = c_log_p;
    line<double> c_lse(n);
    line<double> cpp_lse = c_lse;
    const opd::teacher::on_kept_sets cache{
        opd::teacher::samples<Id, float>{.ids = tokens.cview(), .log_mu = {}, .log_q = {}}, kept.cview(),
        opd::row_offsets<>(begin.cview())};
    const opd::result r = opd::token_logp(be, z.cview(), cache, cpp_log_p.view(), 0.8F, mask.view(), cpp_lse.view());
    auto c = made<opd_score_call>();
    c.engine = engine, c.z = &z.tensor, c.temperature = 0.8;
    mask.put(c);
    c.ids = &tokens.tensor, c.log_p = &c_log_p.tensor, c.lse = &c_lse.tensor;
    c.kept_ids = &kept.tensor, c.kept_offsets = &begin.tensor;
    auto result = made<opd_result>();
    CHECK_OK(opd_score(&c, &result));
    CHECK(c_log_p == cpp_log_p);
    CHECK(c_lse == cpp_lse);
    check_counts(result, r);
}
TEST_CASE("log p on kept sets has the bits of the C++ call") {
    const engine two(2);
    opd::cpu_backend be{.threads = 2};
    for (std::uint64_t seed = 300; seed < 340; ++seed) {
        random_source random(seed);
        CAPTURE(seed);
        check_kept_logp<float, std::int32_t, float>(random, two.handle, be);
        check_kept_logp<opd::bfloat16, std::int64_t, double>(random, two.handle, be);
        check_kept_logp<opd::half, std::int32_t, double>(random, nullptr, be);
        check_kept_logp<double, std::int64_t, double>(random, two.handle, be);
    }
}

TEST_CASE("the thin forms are opd_score with one part of it") {
    random_source random(1);
    opd::cpu_backend be;
    table<float> z(3, 50);
    for (float& x : z.data) x = float(3 * random.normal());
    table<std::int32_t> ids(3, 4);
    for (std::int32_t& id : ids.data) id = std::int32_t(random.below(50));
    table<float> log_p(3, 4);
    table<float> cpp_log_p = log_p;
    CHECK_OK(opd_token_logp(nullptr, &z.tensor, 0.7, &ids.tensor, nullptr, nullptr, &log_p.tensor));
    opd::token_logp(be, z.cview(), ids.cview(), cpp_log_p.view(), 0.7F);
    CHECK(log_p == cpp_log_p);

    const random_sets<std::int32_t> sets(ids, 50, random);
    line<std::int32_t> kept(sets.ids);
    line<std::int64_t> begin(sets.begin);
    CHECK_OK(opd_token_logp(nullptr, &z.tensor, 0, &ids.tensor, &kept.tensor, &begin.tensor, &log_p.tensor));
    opd::token_logp(be, z.cview(),
                    opd::teacher::on_kept_sets{
                        opd::teacher::samples<std::int32_t, float>{.ids = ids.cview(), .log_mu = {}, .log_q = {}},
                        kept.cview(), opd::row_offsets<>(begin.cview())},
                    cpp_log_p.view());
    CHECK(log_p == cpp_log_p);

    table<std::int32_t> top(3, 4), cpp_top(3, 4);
    CHECK_OK(opd_top_k(nullptr, &z.tensor, 0, &top.tensor, &log_p.tensor));
    opd::top_k(be, z.cview(), cpp_top.view(), cpp_log_p.view());
    CHECK(top == cpp_top);
    CHECK(log_p == cpp_log_p);

    line<double> lse(3), cpp_lse(3);
    CHECK_OK(opd_log_sum_exp(nullptr, &z.tensor, 2, &lse.tensor));
    opd::log_sum_exp(be, z.cview(), cpp_lse.view(), 2.F);
    CHECK(lse == cpp_lse);
}

TEST_CASE("an arena of the bytes that were asked for is enough, half of it is refused") {
    random_source random(4);
    table<opd::half> z(4, 3000, 8);
    for (opd::half& x : z.data) x = stored<opd::half>(3 * random.normal());
    line<std::uint64_t> sample(std::vector<std::uint64_t>{1, 2, 3, 4});
    line<std::uint32_t> position(std::vector<std::uint32_t>{5, 6, 7, 8});
    table<std::int32_t> ids(4, 8), other_ids(4, 8);
    table<float> log_mu(4, 8), other_log_mu(4, 8);
    line<std::int32_t> offsets(5);
    line<std::int64_t> total_offsets(5);
    auto draw = made<opd_draw_call>();
    draw.z = &z.tensor, draw.design = "threshold", draw.sample = &sample.tensor, draw.position = &position.tensor;
    draw.ids = &ids.tensor, draw.log_mu = &log_mu.tensor, draw.top_p = 0.9;
    auto score = made<opd_score_call>();
    score.z = &z.tensor, score.top_ids = &ids.tensor, score.top_log_p = &log_mu.tensor;
    auto kept = made<opd_kept_ids_call>();
    kept.z = &z.tensor, kept.top_p = 0.5, kept.offsets = &offsets.tensor;
    std::int64_t total = 0;
    const auto holds = [&](auto& call, auto run, auto bytes_of) {
        std::uint64_t bytes = 0;
        opd_engine* const none = call.engine;
        std::vector<std::byte> none_needed(1);
        {
            const engine asks(2);
            call.engine = asks.handle;
            CHECK_OK(bytes_of(&call, &bytes));
        }
        std::vector<std::byte> memory(bytes);
        {
            const engine enough(2, memory.data(), bytes);
            call.engine = enough.handle;
            CHECK_OK(run(&call));
            CHECK_OK(run(&call)); // and again
        }
        {
            const engine short_of(2, memory.data(), bytes / 2);
            call.engine = short_of.handle;
            CHECK(run(&call) == OPD_INVALID_INPUT);
            CHECK(std::string(opd_last_error_argument()) == "workspace");
        }
        call.engine = none;
    };
    holds(
        draw, [](auto* c) { return opd_draw(c, nullptr); }, opd_draw_workspace_bytes);
    holds(
        score, [](auto* c) { return opd_score(c, nullptr); }, opd_score_workspace_bytes);
    holds(
        kept, [&](auto* c) { return opd_kept_ids(c, &total, nullptr); }, opd_kept_ids_workspace_bytes);
    line<std::int32_t> all(total);
    kept.ids = &all.tensor;
    holds(
        kept, [&](auto* c) { return opd_kept_ids(c, &total, nullptr); }, opd_kept_ids_workspace_bytes);
}

// --- penalties -------------------------------------------------------------------------------------------------------

template <class Z, class Out, class Id>
void check_penalties(random_source& random) {
    const index_t n = 1 + random.below(4), v = 1 + random.below(200);
    table<Z> z(n, v, 3);
    for (index_t r = 0; r < n; ++r)
        for (index_t i = 0; i < v; ++i) z(r, i) = stored<Z>(random.chance(9) ? -INFINITY : 5 * random.normal());
    random_mask mask(n, random);
    const auto lists = [&](std::vector<Id>& ids, std::vector<std::int32_t>& begin) {
        begin = {0};
        for (index_t r = 0; r < n; ++r) {
            for (index_t i = random.below(6); i > 0; --i)
                ids.push_back(static_cast<Id>(random.below(std::min<index_t>(v, 5))));
            begin.push_back(std::int32_t(ids.size()));
        }
    };
    std::vector<Id> prompt_ids, answer_ids;
    std::vector<std::int32_t> prompt_begin, answer_begin;
    lists(prompt_ids, prompt_begin), lists(answer_ids, answer_begin);
    line<Id> prompt(prompt_ids), answer(answer_ids);
    line<std::int32_t> prompt_offsets(prompt_begin), answer_offsets(answer_begin);
    const opd::penalties p{.repetition = 1.3F, .presence = 0.4F, .frequency = 0.2F};
    table<Out> out(n, v, 1), dz(n, v, 2);
    for (index_t r = 0; r < n; ++r)
        for (index_t i = 0; i < v; ++i) dz(r, i) = stored<Out>(random.normal());
    table<Out> cpp_out = out, cpp_dz = dz;
    for (index_t r = 0; r < n; ++r) {
        if (!mask.view().kept(r)) continue;
        opd::token_history history;
        for (std::int32_t i = prompt_begin[std::size_t(r)]; i < prompt_begin[std::size_t(r) + 1]; ++i) {
            const auto id = static_cast<std::int32_t>(prompt_ids[std::size_t(i)]);
            history.add_prompt(std::span(&id, 1));
        }
        for (std::int32_t i = answer_begin[std::size_t(r)]; i < answer_begin[std::size_t(r) + 1]; ++i)
            history.add(static_cast<std::int32_t>(answer_ids[std::size_t(i)]));
        const opd::vector_view<const Z> row(z.cview().row(r), v);
        opd::apply_penalties(row, history, p, opd::vector_view<Out>(cpp_out.view().row(r), v));
        opd::penalties_pullback(row, history, p, opd::vector_view<Out>(cpp_dz.view().row(r), v));
    }
    auto c = made<opd_penalise_call>();
    c.z = &z.tensor;
    mask.put(c);
    c.prompt_ids = &prompt.tensor, c.prompt_offsets = &prompt_offsets.tensor;
    c.answer_ids = &answer.tensor, c.answer_offsets = &answer_offsets.tensor;
    c.repetition = 1.3, c.presence = 0.4, c.frequency = 0.2;
    c.out = &out.tensor, c.dz = &dz.tensor;
    CHECK_OK(opd_penalise(&c));
    CHECK(out == cpp_out);
    CHECK(dz == cpp_dz);
    if constexpr (std::is_same_v<Z, Out>) { // in place
        c.out = &z.tensor, c.dz = nullptr;
        CHECK_OK(opd_penalise(&c));
        for (index_t r = 0; r < n; ++r)
            if (mask.view().kept(r)) CHECK(std::memcmp(&z(r, 0), &cpp_out(r, 0), std::size_t(v) * sizeof(Z)) == 0);
    }
}
TEST_CASE("penalties have the bits of the C++ calls, out of place and in place") {
    for (std::uint64_t seed = 400; seed < 430; ++seed) {
        random_source random(seed);
        CAPTURE(seed);
        check_penalties<float, float, std::int32_t>(random);
        check_penalties<double, double, std::int64_t>(random);
        check_penalties<double, float, std::int32_t>(random);
        check_penalties<opd::bfloat16, opd::bfloat16, std::int64_t>(random);
        check_penalties<opd::bfloat16, float, std::int64_t>(random);
        check_penalties<opd::half, opd::half, std::int32_t>(random);
    }
}

// --- passes over a batch ---------------------------------------------------------------------------------------------

/// A cache of drawn tokens with a table of log p, as the C and the C++ call have it.
template <class Id, class L>
struct token_batch {
    index_t n, m;
    table<Id> ids;
    table<L> log_mu, log_q, log_prox, log_ref, advantage, weight;
    table<double> log_p;
    line<L> log_norm, log_kept_q;
    std::vector<Id> set_ids;
    std::vector<std::int64_t> set_begin;
    line<Id> kept;
    line<std::int64_t> kept_offsets;
    random_mask mask;
    bool weighted, missing, on_sets, raw, prox;
    opd_teacher c = made<opd_teacher>();
    opd_tokens tokens = made<opd_tokens>();

    explicit token_batch(random_source& random)
        : n(1 + random.below(6)), m(1 + random.below(4)), ids(n, m, 1), log_mu(n, m), log_q(n, m, 2), log_prox(n, m),
          log_ref(n, m), advantage(n, random.chance(2) ? 1 : m), weight(n, m), log_p(n, m, 1), log_norm(n),
          log_kept_q(n), kept(0), kept_offsets(n + 1), mask(n, random), weighted(random.chance(2)),
          missing(random.chance(3)), on_sets(random.chance(3)), raw(random.chance(3)), prox(random.chance(2)) {
        const random_sets<Id> sets(ids, 40, random);
        set_ids = sets.ids, set_begin = sets.begin;
        for (index_t r = 0; r < n; ++r) {
            log_norm[r] = L(-0.3 * random.uniform()), log_kept_q[r] = L(-0.2 * random.uniform());
            for (index_t j = 0; j < m; ++j) {
                if (random.chance(12)) ids(r, j) = -1;
                log_mu(r, j) = L(random.chance(15) ? NAN : random.chance(20) ? -INFINITY : -5 * random.uniform());
                log_q(r, j) = L(random.chance(15) ? -INFINITY : -5 * random.uniform());
                log_prox(r, j) = L(-5 * random.uniform()), log_ref(r, j) = L(-5 * random.uniform());
                log_p(r, j) = random.chance(20) ? -INFINITY : random.chance(20) ? NAN : -5 * random.uniform();
                weight(r, j) = L(random.chance(15) ? NAN : random.uniform());
                if (j < advantage.cols) advantage(r, j) = L(random.normal());
            }
        }
        c.kind = weighted ? OPD_WEIGHTED : OPD_SAMPLES;
        c.ids = &ids.tensor, c.log_mu = &log_mu.tensor, c.log_q = &log_q.tensor;
        c.log_ref = &log_ref.tensor, c.advantage = &advantage.tensor;
        if (prox) c.log_prox = &log_prox.tensor;
        if (weighted) c.weight = &weight.tensor;
        c.missing_mu = missing;
        if (raw) c.raw_logprobs = 1, c.drawn_temperature = 0.5, c.log_norm = &log_norm.tensor;
        tokens.cache = &c, tokens.log_p = &log_p.tensor;
        mask.put(tokens);
        if (on_sets) {
            kept.data = set_ids, kept.data.push_back(0), kept.cols = index_t(set_ids.size());
            kept.describe(), kept.flat();
            std::copy(set_begin.begin(), set_begin.end(), kept_offsets.data.begin());
            c.kept_ids = &kept.tensor, c.kept_offsets = &kept_offsets.tensor, c.log_kept_q = &log_kept_q.tensor;
        }
    }
    token_batch(const token_batch&) = delete;

    template <class Body>
    void visit(Body&& body) const {
        const auto with = [&](auto cache) {
            cache.log_ref = log_ref.cview(), cache.advantage = advantage.cview();
            if (prox) cache.log_prox = log_prox.cview();
            if (raw) {
                cache.rollout.drawn_with.temperature = 0.5F, cache.rollout.mode = opd::logprob_mode::raw;
                cache.rollout.log_norm = log_norm.cview();
            }
            const auto sets = [&](const auto& of) {
                if (on_sets)
                    body(opd::teacher::on_kept_sets{of, kept.cview(), opd::row_offsets<>(kept_offsets.cview()),
                                                    log_kept_q.cview()});
                else
                    body(of);
            };
            if (missing)
                sets(opd::teacher::missing_mu{cache});
            else
                sets(cache);
        };
        if (weighted)
            with(opd::teacher::weighted{ids.cview(), weight.cview(), log_mu.cview(), log_q.cview()});
        else
            with(opd::teacher::samples{ids.cview(), log_mu.cview(), log_q.cview()});
    }
};

template <class Id, class L>
void check_passes(random_source& random) {
    token_batch<Id, L> batch(random);
    const char* const names[] = {"reverse_kl", "mixed", "with_outside", "extrapolated", "jsd", "total_variation"};
    const char* const of = names[random.below(6)];
    const opd::any_objective worth{*opd::choice::find(opd::choice::objectives, of), 0.3, 0.6};
    batch.tokens.of = of, batch.tokens.a = 0.3, batch.tokens.b = 0.6;
    CAPTURE(of);
    const index_t n = batch.n, m = batch.m;
    const opd::row_mask<> mask = batch.mask.view();

    table<double> advantage(n, m, 1);
    table<double> cpp_advantage = advantage;
    batch.visit(
        [&](const auto& cache) { opd::advantages(batch.log_p.cview(), cache, mask, cpp_advantage.view(), worth); });
    CHECK_OK(opd_advantages(&batch.tokens, &advantage.tensor));
    CHECK(advantage.equals(cpp_advantage, fuses_rows));

    for (const auto& [name, form] :
         {std::pair("drop", opd::m2po::drop), std::pair("clip", opd::m2po::clip), std::pair("all", opd::m2po::all)}) {
        CAPTURE(name);
        opd::m2po_fit fit{.tau = 0.5, .form = form};
        batch.visit([&](const auto& cache) { fit.add(batch.log_p.cview(), cache, mask, worth); });
        const opd::m2po_selection selection = fit.freeze();
        auto m2po = made<opd_m2po>();
        m2po.form = name, m2po.tau = 0.5;
        line<double> squares(n * m);
        std::int64_t count = -1;
        CHECK_OK(opd_m2po_squares(&m2po, &batch.tokens, &squares.tensor, &count));
        REQUIRE(count == std::int64_t(fit.squares.size()));
        CHECK(std::equal(fit.squares.begin(), fit.squares.end(), squares.data.begin(), same_pass));
        line<double> all(std::vector<double>(squares.data.begin(), squares.data.begin() + count));
        CHECK_OK(opd_m2po_freeze(&m2po, &all.tensor));
        CHECK(same_pass(m2po.level, selection.level));
        CHECK(same_pass(m2po.second_moment, selection.second_moment));
        if (form == opd::m2po::clip) {
            CHECK(same_pass(m2po.low, selection.clip().low));
            CHECK(same_pass(m2po.high, selection.clip().high));
        }
        table<std::uint8_t> keep(n, m, 1);
        table<std::uint8_t> cpp_keep = keep;
        index_t gone = -1;
        batch.visit([&](const auto& cache) {
            gone = selection.keep(batch.log_p.cview(), cache, mask, cpp_keep.view(), worth);
        });
        std::int64_t dropped = -2;
        CHECK_OK(opd_m2po_keep(&m2po, &batch.tokens, &keep.tensor, &dropped));
        CHECK(keep == cpp_keep);
        CHECK(dropped == gone);
    }

    std::vector<index_t> sequence(std::size_t(n), 0);
    for (index_t& s : sequence) s = random.below(3);
    opd::gspo_fit fit;
    batch.visit([&](const auto& cache) { fit.add(batch.log_p.cview(), cache, sequence, mask, worth); });
    batch.visit([&](const auto& cache) { fit.add(batch.log_p.cview(), cache, sequence, mask, worth); });
    line<std::int64_t> of_row(sequence);
    table<double> sums(3, 3);
    std::fill(sums.data.begin(), sums.data.end(), 0);
    CHECK_OK(opd_gspo_add(&batch.tokens, &of_row.tensor, &sums.tensor));
    CHECK_OK(opd_gspo_add(&batch.tokens, &of_row.tensor, &sums.tensor));
    line<double> ratio(n), cpp_ratio(n);
    table<double> mean(n, m), cpp_mean(n, m);
    fit.log_ratios(sequence, cpp_ratio.view()), fit.mean_advantages(sequence, cpp_mean.view());
    CHECK_OK(opd_gspo_fill(&sums.tensor, &of_row.tensor, &ratio.tensor, &mean.tensor));
    CHECK(ratio.equals(cpp_ratio, fuses_passes));
    CHECK(mean.equals(cpp_mean, fuses_passes));
}
TEST_CASE("passes over drawn tokens have the bits of the C++ passes, of any cache") {
    for (std::uint64_t seed = 500; seed < 580; ++seed) {
        random_source random(seed);
        CAPTURE(seed);
        check_passes<std::int32_t, float>(random);
        check_passes<std::int64_t, double>(random);
        check_passes<std::int64_t, float>(random);
    }
}

TEST_CASE("credit, groups, whitening and prefixes are those of the C++ passes") {
    for (std::uint64_t seed = 600; seed < 640; ++seed) {
        random_source random(seed);
        CAPTURE(seed);
        const index_t n = 6, m = 1 + random.below(3);
        table<double> a(n, m, 2);
        for (index_t r = 0; r < n; ++r)
            for (index_t j = 0; j < m; ++j) a(r, j) = random.normal();
        line<std::uint8_t> mask(n);
        for (index_t r = 0; r < n; ++r) mask[r] = !random.chance(3);
        line<std::int32_t> offsets(std::vector<std::int32_t>{0, std::int32_t(random.below(4)), 6});
        table<double> credited = a, cpp_credited = a;
        CHECK_OK(opd_credit(&credited.tensor, &offsets.tensor, 0.9, &mask.tensor));
        opd::credit(cpp_credited.view(), opd::row_offsets<>(offsets.cview()), 0.9, opd::row_mask<>(mask.cview()));
        CHECK(credited.equals(cpp_credited, fuses_passes));

        line<double> reward(6);
        for (index_t r = 0; r < 6; ++r) reward[r] = random.normal();
        line<double> cpp_reward = reward;
        const double epsilon = random.among({0.0, 1e-6});
        CHECK_OK(opd_group_relative(&reward.tensor, 3, epsilon));
        opd::group_relative(std::span(cpp_reward.data.data(), 6), 3, epsilon);
        CHECK(reward.equals(cpp_reward, fuses_passes));

        table<float> b(n, m);
        for (float& x : b.data) x = float(random.normal());
        opd::whitening_fit fit, other;
        fit.add(a.cview(), opd::row_mask<>(mask.cview())), other.add(b.cview()), fit.merge(other);
        auto white = made<opd_whitening>(), second = made<opd_whitening>();
        CHECK_OK(opd_whitening_add(&white, &a.tensor, &mask.tensor));
        CHECK_OK(opd_whitening_add(&second, &b.tensor, nullptr));
        CHECK_OK(opd_whitening_merge(&white, &second));
        CHECK(same_pass(white.count, fit.count));
        CHECK(same_pass(white.mean, fit.mean));
        CHECK(same_pass(white.squares, fit.squares));
        table<float> out(n, m, 1);
        table<float> cpp_out = out;
        CHECK_OK(opd_whitening_apply(&white, &a.tensor, &out.tensor));
        fit.apply(a.cview(), cpp_out.view());
        CHECK(out.equals(cpp_out, fuses_passes));
        table<double> cpp_a = a;
        CHECK_OK(opd_whitening_apply(&white, &a.tensor, &a.tensor));
        fit.apply(cpp_a.cview(), cpp_a.view());
        CHECK(a.equals(cpp_a, fuses_passes));

        line<double> log_p(n);
        line<float> log_mu(n);
        for (index_t r = 0; r < n; ++r) log_p[r] = -random.uniform(), log_mu[r] = float(-random.uniform());
        opd::prefix_staleness sums, more;
        sums.add(log_p.cview(), log_mu.cview(), opd::row_offsets<>(offsets.cview()), opd::row_mask<>(mask.cview()));
        more.add(log_mu.cview(), log_p.cview(), opd::row_offsets<>(offsets.cview())), sums.merge(more);
        auto stale = made<opd_prefix_staleness>(), more_stale = made<opd_prefix_staleness>();
        CHECK_OK(opd_prefix_staleness_add(&stale, &log_p.tensor, &log_mu.tensor, &offsets.tensor, &mask.tensor));
        CHECK_OK(opd_prefix_staleness_add(&more_stale, &log_mu.tensor, &log_p.tensor, &offsets.tensor, nullptr));
        CHECK_OK(opd_prefix_staleness_merge(&stale, &more_stale));
        CHECK(same_pass(stale.rows, sums.rows));
        CHECK(same_pass(stale.sum, sums.sum));
        CHECK(same_pass(stale.least, sums.least));
        CHECK(same_pass(stale.most, sums.most));
        CHECK(same_pass(stale.log_ratio, sums.log_ratio()));
        CHECK(same_pass(stale.effective_share, sums.effective_share()));
    }
}

TEST_CASE("weights of drafts, quantiles of ratios, overlaps and repeats are those of the C++ calls") {
    line<std::int32_t> offsets(std::vector<std::int32_t>{0, 3, 3, 5});
    const std::vector<index_t> drafts{0, 3, 3, 5};
    line<float> losses(std::vector<float>{0.1F, 0.5F, 2, 0.3F, 0});
    line<float> weights(5), cpp_weights(5);
    CHECK_OK(opd_draft_weights("decaying", 4, &offsets.tensor, nullptr, &weights.tensor));
    opd::fill_draft_weights(opd::decaying{4}, std::span<const index_t>(drafts), std::span(cpp_weights.data.data(), 5));
    CHECK(weights.equals(cpp_weights, fuses_passes));
    CHECK_OK(opd_draft_weights("accepted_length", 0.5, &offsets.tensor, &losses.tensor, &weights.tensor));
    opd::fill_draft_weights(opd::accepted_length{0.5}, std::span<const index_t>(drafts),
                            std::span<const float>(losses.data.data(), 5), std::span(cpp_weights.data.data(), 5));
    CHECK(weights.equals(cpp_weights, fuses_passes));

    line<std::int64_t> counts(OPD_RATIO_BINS);
    std::fill(counts.data.begin(), counts.data.end(), 0);
    counts[150] = 3, counts[90] = 7;
    double ratio = 0;
    CHECK_OK(opd_ratio_quantile(&counts.tensor, 0.9, &ratio));
    CHECK(same_pass(ratio,
                    opd::ratio_sketch::quantile(std::span<const index_t>(counts.data.data(), OPD_RATIO_BINS), 0.9)));

    random_source random(9);
    for (int i = 0; i < 50; ++i) {
        const index_t n = 4, k = 1 + random.below(6);
        table<std::int32_t> mine(n, k, 1);
        table<std::int64_t> others(n, k + 1);
        for (index_t r = 0; r < n; ++r)
            for (index_t j = 0; j <= k; ++j) {
                others(r, j) = random.below(8);
                if (j < k) mine(r, j) = std::int32_t(random.below(9)) - 1;
            }
        line<std::int32_t> lists(std::vector<std::int32_t>{1, -1, 3, 4, 4, 6});
        line<std::int64_t> begin(std::vector<std::int64_t>{0, 2, 2, 5, 6});
        line<std::uint8_t> mask(std::vector<std::uint8_t>{1, 0, 1, 1});
        line<double> share(n), cpp_share = share;
        auto overlap = made<opd_overlap>();
        CHECK_OK(opd_id_overlap(&mine.tensor, nullptr, &others.tensor, nullptr, &share.tensor, &mask.tensor, &overlap));
        opd::id_overlaps o =
            opd::id_overlap(mine.cview(), others.cview(), cpp_share.view(), opd::row_mask<>(mask.cview()));
        CHECK(share == cpp_share);
        CHECK(overlap.rows == o.rows);
        CHECK(overlap.bad_rows == o.bad_rows);
        CHECK(overlap.first_bad_row == o.first_bad_row);
        CHECK(overlap.sum == o.sum);
        CHECK(overlap.mean == o.mean());
        CHECK_OK(opd_id_overlap(&lists.tensor, &begin.tensor, &mine.tensor, nullptr, &share.tensor, nullptr, nullptr));
        opd::teacher::ragged_support<std::int32_t> ragged;
        ragged.ids = lists.cview(), ragged.offsets = opd::row_offsets<>(begin.cview());
        opd::id_overlap(ragged, mine.cview(), cpp_share.view());
        CHECK(share == cpp_share);

        table<std::int32_t> cpp_mine = mine;
        std::int64_t dropped = -1;
        CHECK_OK(opd_drop_repeats(&mine.tensor, nullptr, &dropped));
        CHECK(dropped == opd::drop_repeats(cpp_mine.view()));
        CHECK(mine == cpp_mine);
        line<std::int32_t> cpp_lists = lists;
        CHECK_OK(opd_drop_repeats(&lists.tensor, &begin.tensor, &dropped));
        CHECK(dropped == opd::drop_repeats(cpp_lists.view(), opd::row_offsets<>(begin.cview())));
        CHECK(lists == cpp_lists);
    }
}

// --- bad input -------------------------------------------------------------------------------------------------------

/// A call, what is wrong with it, and the argument that it is refused by.
struct refusal {
    const char* argument;
    std::function<int()> call;
};
void check_refusals(const std::vector<refusal>& all, const std::function<bool()>& untouched) {
    for (const refusal& r : all) {
        CAPTURE(r.argument);
        const int status = r.call();
        const std::string text = opd_last_error();
        CAPTURE(text);
        CHECK((status == OPD_INVALID_INPUT || status == OPD_UNSUPPORTED));
        if (status == OPD_INVALID_INPUT) CHECK(std::string(opd_last_error_argument()) == r.argument);
        CHECK(text.find(r.argument) != std::string::npos);
        CHECK(untouched());
    }
}
/// run(call) of a copy that `damage` has changed.
template <class Call, class Run>
auto damaged(const Call& call, Run run) {
    return [call, run](std::function<void(Call&)> damage) {
        return std::function<int()>([=] {
            Call c = call;
            damage(c);
            return run(c);
        });
    };
}

TEST_CASE("a draw that makes no sense is answered by name, and nothing is written") {
    const index_t n = 3, v = 20;
    table<float> z(n, v);
    std::fill(z.data.begin(), z.data.end(), 0.5F);
    line<std::uint64_t> sample(std::vector<std::uint64_t>{1, 2, 3}), few(std::vector<std::uint64_t>{1});
    line<std::uint32_t> position(std::vector<std::uint32_t>{1, 2, 3});
    table<double> uniforms(n, 4), bad_uniforms(n, 4);
    std::fill(uniforms.data.begin(), uniforms.data.end(), 0.5);
    std::fill(bad_uniforms.data.begin(), bad_uniforms.data.end(), 1.0);
    draw_outputs<std::int32_t, float, float> out(n, 4, 0);
    const draw_outputs<std::int32_t, float, float> before = out;
    table<std::int32_t> narrow(n, 3), integers(n, v);
    line<std::int16_t> odd(n);
    table<float> device = z, gaps = z, complex = z;
    device.tensor.device.device_type = kDLCUDA;
    gaps.strides[1] = 2;
    complex.tensor.dtype.lanes = 2;
    auto c = made<opd_draw_call>();
    c.z = &z.tensor, c.design = "iid", c.sample = &sample.tensor, c.position = &position.tensor;
    c.ids = &out.ids.tensor, c.log_mu = &out.log_mu.tensor, c.weight = &out.weight.tensor, c.exact = &out.exact.tensor;
    c.lse = &out.lse.tensor;
    auto tiny = made<opd_result>();
    tiny.struct_size = 3;
    const auto of = damaged(c, [](const opd_draw_call& d) { return opd_draw(&d, nullptr); });
    using D = opd_draw_call&;
    const std::vector<refusal> all{
        {"draw", [] { return opd_draw(nullptr, nullptr); }},
        {"draw.struct_size", of([](D d) { d.struct_size = 2; })},
        {"result.struct_size", [&] { return opd_draw(&c, &tiny); }},
        {"draw.reserved", of([](D d) { d.reserved = 1; })},
        {"draw.has_ignore", of([](D d) { d.has_ignore = 1; })},
        {"draw.engine", of([&](D d) { d.engine = reinterpret_cast<opd_engine*>(&z); })},
        {"draw.z", of([](D d) { d.z = nullptr; })},
        {"draw.z", of([&](D d) { d.z = &integers.tensor; })},
        {"draw.z", of([&](D d) { d.z = &device.tensor; })},
        {"draw.z", of([&](D d) { d.z = &gaps.tensor; })},
        {"draw.z", of([&](D d) { d.z = &complex.tensor; })},
        {"draw.z", of([&](D d) { d.z = &sample.tensor; })},
        {"draw.design", of([](D d) { d.design = "best"; })},
        {"draw.m", of([](D d) { d.m = -1; })},
        {"draw.m", of([](D d) { d.design = "threshold", d.m = -1; })},
        {"draw.m", of([](D d) { d.design = "greedy", d.m = 4; })},
        {"draw.ids", of([](D d) { d.m = 5; })},
        {"draw.h", of([](D d) { d.h = 1; })},
        {"draw.h", of([](D d) { d.design = "head_tail", d.h = -1, d.m = 5; })},
        {"draw.first", of([](D d) { d.first = -1; })},
        {"draw.first", of([](D d) { d.design = "threshold", d.first = 1; })},
        {"draw.sample", of([](D d) { d.sample = nullptr; })},
        {"draw.sample", of([&](D d) { d.sample = &position.tensor; })},
        {"draw.sample", of([&](D d) { d.sample = &few.tensor; })},
        {"draw.position", of([](D d) { d.position = nullptr; })},
        {"draw.position", of([&](D d) { d.position = &sample.tensor; })},
        {"draw.uniforms", of([&](D d) { d.uniforms = &bad_uniforms.tensor; })},
        {"draw.uniforms", of([&](D d) { d.uniforms = &z.tensor; })},
        {"draw.uniforms", of([&](D d) { d.design = "threshold", d.uniforms = &uniforms.tensor; })},
        {"draw.mask", of([&](D d) { d.mask = &few.tensor; })},
        {"draw.mask", of([&](D d) { d.mask = &z.tensor; })},
        {"draw.temperature", of([](D d) { d.temperature = -1; })},
        {"draw.top_k", of([](D d) { d.top_k = -1; })},
        {"draw.top_p", of([](D d) { d.top_p = 1.5; })},
        {"draw.min_p", of([](D d) { d.min_p = NAN; })},
        {"draw.ids", of([](D d) { d.ids = nullptr; })},
        {"draw.ids", of([&](D d) { d.ids = &narrow.tensor, d.m = 4; })},
        {"draw.ids", of([&](D d) { d.ids = &z.tensor; })},
        {"draw.log_mu", of([](D d) { d.log_mu = nullptr; })},
        {"draw.log_mu", of([&](D d) { d.log_mu = &narrow.tensor; })},
        {"draw.log_mu", of([&](D d) { d.log_mu = &z.tensor; })},
        {"draw.weight", of([&](D d) { d.weight = &narrow.tensor; })},
        {"draw.log_mu", of([](D d) { d.weight = d.log_mu; })},
        {"draw.exact", of([&](D d) { d.exact = &narrow.tensor; })},
        {"draw.lse", of([&](D d) { d.lse = &sample.tensor; })},
        {"draw.cut_id", of([&](D d) { d.cut_logit = &out.cut_logit.tensor; })},
        {"draw.cut_logit", of([&](D d) { d.cut_id = &out.cut_id.tensor; })},
        {"draw.kept", of([&](D d) { d.kept = &odd.tensor; })},
        {"draw.log_tail", of([&](D d) { d.log_tail = &out.log_tail.tensor; })},
        {"draw.kappa", of([&](D d) { d.kappa = &out.kappa.tensor; })},
    };
    check_refusals(all, [&] { return out == before; });
    std::uint64_t bytes = 0;
    CHECK(opd_draw_workspace_bytes(&c, nullptr) == OPD_INVALID_INPUT);
    CHECK_OK(opd_draw_workspace_bytes(&c, &bytes));
    CHECK(out == before);
    CHECK_OK(opd_draw(&c, nullptr)); // what was damaged above is sound
    CHECK_FALSE(out == before);
}

TEST_CASE("scores, kept sets and penalties that make no sense are answered by name, and nothing is written") {
    const index_t n = 3, v = 20;
    table<float> z(n, v);
    for (index_t i = 0; i < n * v; ++i) z.data[std::size_t(i)] = float(i % 7);
    table<std::int32_t> ids(n, 2), wide(n, v + 1);
    std::fill(ids.data.begin(), ids.data.end(), 1);
    line<std::int32_t> falling(std::vector<std::int32_t>{0, 2, 1, 3}), good(std::vector<std::int32_t>{0, 2, 4, 6}),
        listed(std::vector<std::int32_t>{0, 1, 0, 1, 0, 1}), beyond(std::vector<std::int32_t>{0, 1, 0, 20, 0, 1});
    line<float> short_line(2), flat(6);
    line<std::int64_t> few(2);
    score_outputs<std::int32_t, float> out(n, n, 2, 3, 0);
    const score_outputs<std::int32_t, float> before = out;
    auto c = made<opd_score_call>();
    c.z = &z.tensor, c.ids = &ids.tensor, c.log_p = &out.log_p.tensor, c.log_tail = &out.log_tail.tensor;
    c.top_ids = &out.top_ids.tensor, c.top_log_p = &out.top_log_p.tensor, c.top_log_tail = &out.top_log_tail.tensor;
    c.lse = &out.lse.tensor, c.entropy = &out.entropy.tensor;
    const auto of = damaged(c, [](const opd_score_call& s) { return opd_score(&s, nullptr); });
    using S = opd_score_call&;
    check_refusals(
        {
            {"score", [] { return opd_score(nullptr, nullptr); }},
            {"score.z", of([](S s) { s.z = nullptr; })},
            {"score.temperature", of([](S s) { s.temperature = 1e9; })},
            {"score.mask", of([&](S s) { s.mask = &few.tensor; })},
            {"score.ids", of([](S s) { s.ids = nullptr; })},
            {"score.ids", of([&](S s) { s.ids = &z.tensor; })},
            {"score.log_p", of([&](S s) { s.log_p = &z.tensor; })},
            {"score.log_p", of([&](S s) { s.log_p = &out.top_log_p.tensor, s.top_log_p = nullptr; })},
            {"score.log_tail", of([&](S s) { s.log_tail = &short_line.tensor; })},
            {"score.top_ids", of([&](S s) { s.top_ids = &wide.tensor, s.top_log_p = nullptr; })},
            {"score.top_ids", of([&](S s) { s.top_ids = nullptr; })},
            {"score.top_log_tail", of([&](S s) { s.top_log_tail = &few.tensor; })},
            {"score.lse", of([&](S s) { s.lse = &short_line.tensor; })},
            {"score.lse", of([&](S s) { s.lse = s.entropy; })},
            {"score.entropy", of([&](S s) { s.entropy = &few.tensor; })},
            {"score.offsets",
             of([&](S s) { s.ids = &listed.tensor, s.log_p = &flat.tensor, s.offsets = &falling.tensor; })},
            {"score.offsets",
             of([&](S s) { s.ids = &listed.tensor, s.log_p = &flat.tensor, s.offsets = &few.tensor; })},
            {"score.kept_ids", of([&](S s) {
                 s.log_tail = s.top_ids = s.top_log_p = s.top_log_tail = s.entropy = nullptr,
                 s.kept_offsets = &good.tensor;
             })},
            {"score.kept_offsets", of([&](S s) {
                 s.log_tail = s.top_ids = s.top_log_p = s.top_log_tail = s.entropy = nullptr,
                 s.kept_ids = &listed.tensor;
             })},
            {"score.kept_offsets", of([&](S s) {
                 s.log_tail = s.top_ids = s.top_log_p = s.top_log_tail = s.entropy = nullptr,
                 s.kept_ids = &listed.tensor, s.kept_offsets = &falling.tensor;
             })},
            {"score.log_tail", of([&](S s) { s.kept_ids = &listed.tensor, s.kept_offsets = &good.tensor; })},
            {"score.ids",
             [&] { return opd_token_logp(nullptr, &z.tensor, 1, nullptr, nullptr, nullptr, &out.log_p.tensor); }},
            {"score.log_p",
             [&] { return opd_token_logp(nullptr, &z.tensor, 1, &ids.tensor, nullptr, nullptr, nullptr); }},
            {"score.top_ids", [&] { return opd_top_k(nullptr, &z.tensor, 1, nullptr, nullptr); }},
            {"score.lse", [&] { return opd_log_sum_exp(nullptr, &z.tensor, 1, nullptr); }},
        },
        [&] { return out == before; });
    CHECK_OK(opd_score(&c, nullptr));
    CHECK_FALSE(out == before);

    line<std::int32_t> offsets(4);
    const line<std::int32_t> offsets_before = offsets;
    line<std::int64_t> cut_id(std::vector<std::int64_t>{0, 0, 0}), counts(std::vector<std::int64_t>{1, -1, 1});
    line<double> cut_logit(std::vector<double>{0, 0, 0});
    std::int64_t total = 77;
    auto k = made<opd_kept_ids_call>();
    k.z = &z.tensor, k.offsets = &offsets.tensor, k.top_p = 0.5;
    const auto kept = damaged(k, [&](const opd_kept_ids_call& s) { return opd_kept_ids(&s, &total, nullptr); });
    using K = opd_kept_ids_call&;
    check_refusals(
        {
            {"kept", [&] { return opd_kept_ids(nullptr, &total, nullptr); }},
            {"total", [&] { return opd_kept_ids(&k, nullptr, nullptr); }},
            {"kept.z", kept([](K s) { s.z = nullptr; })},
            {"kept.offsets", kept([](K s) { s.offsets = nullptr; })},
            {"kept.offsets", kept([&](K s) { s.offsets = &few.tensor; })},
            {"kept.top_p", kept([](K s) { s.top_p = 2; })},
            {"kept.mask", kept([&](K s) { s.mask = &few.tensor; })},
            {"kept.cut_id", kept([&](K s) { s.cut_logit = &cut_logit.tensor; })},
            {"kept.cut_logit", kept([&](K s) { s.cut_id = &cut_id.tensor; })},
            {"kept.cut_logit", kept([&](K s) { s.cut_logit = &cut_logit.tensor, s.cut_id = &cut_id.tensor; })},
            {"kept.kept", kept([&](K s) { s.top_p = 0, s.cut_logit = &cut_logit.tensor, s.cut_id = &cut_id.tensor; })},
            {"kept.kept", kept([&](K s) {
                 s.top_p = 0, s.cut_logit = &cut_logit.tensor, s.cut_id = &cut_id.tensor, s.kept = &counts.tensor;
             })},
            {"kept.kept", kept([&](K s) { s.kept = &counts.tensor; })},
            {"kept.offsets", kept([&](K s) { s.ids = &listed.tensor, s.offsets = &falling.tensor; })},
            {"kept.ids", kept([&](K s) { s.ids = &z.tensor, s.offsets = &good.tensor; })},
        },
        [&] { return offsets == offsets_before && total == 77 && listed[3] == 1; });

    table<float> penalised(n, v), dz(n, v);
    const table<float> penalised_before = penalised, dz_before = dz;
    table<double> other(n, v);
    auto p = made<opd_penalise_call>();
    p.z = &z.tensor, p.out = &penalised.tensor, p.dz = &dz.tensor, p.repetition = 1.5;
    p.answer_ids = &listed.tensor, p.answer_offsets = &good.tensor;
    const auto penalise = damaged(p, [](const opd_penalise_call& s) { return opd_penalise(&s); });
    using P = opd_penalise_call&;
    check_refusals(
        {
            {"penalise", [] { return opd_penalise(nullptr); }},
            {"penalise.z", penalise([](P s) { s.z = nullptr; })},
            {"penalise.z", penalise([&](P s) { s.z = &wide.tensor; })},
            {"penalise.out", penalise([](P s) { s.out = s.dz = nullptr; })},
            {"penalise.out", penalise([&](P s) { s.out = &ids.tensor; })},
            {"penalise.out", penalise([&](P s) { s.out = &other.tensor; })},
            {"penalise.out", penalise([&](P s) { s.out = s.z; })},
            {"penalise.dz", penalise([&](P s) { s.dz = &other.tensor; })},
            {"penalise.dz", penalise([&](P s) { s.dz = s.z; })},
            {"penalise.dz", penalise([&](P s) { s.dz = s.out; })},
            {"penalise.repetition", penalise([](P s) { s.repetition = -1; })},
            {"penalise.presence", penalise([](P s) { s.presence = NAN; })},
            {"penalise.frequency", penalise([](P s) { s.frequency = INFINITY; })},
            {"penalise.answer_ids", penalise([](P s) { s.answer_ids = nullptr; })},
            {"penalise.answer_ids", penalise([&](P s) { s.answer_ids = &beyond.tensor; })},
            {"penalise.answer_ids", penalise([&](P s) { s.answer_ids = &flat.tensor; })},
            {"penalise.answer_offsets", penalise([](P s) { s.answer_offsets = nullptr; })},
            {"penalise.answer_offsets", penalise([&](P s) { s.answer_offsets = &falling.tensor; })},
            {"penalise.prompt_offsets",
             penalise([&](P s) { s.prompt_ids = &listed.tensor, s.prompt_offsets = &few.tensor; })},
            {"penalise.mask", penalise([&](P s) { s.mask = &few.tensor; })},
        },
        [&] { return penalised == penalised_before && dz == dz_before; });
    auto b = p;
    b.answer_ids = &beyond.tensor;
    CHECK(opd_penalise(&b) == OPD_INVALID_INPUT);
    CHECK(opd_last_error_row() == 1);
}

TEST_CASE("passes that make no sense are answered by name, and nothing is written") {
    random_source random(3);
    token_batch<std::int32_t, float> batch(random);
    batch.tokens.mask = nullptr, batch.tokens.has_ignore = 0, batch.tokens.ignore = 0;
    const index_t n = batch.n, m = batch.m;
    table<double> out(n, m), wrong(n + 1, m), sums(2, 3), two(2, 2);
    const table<double> before = out, sums_before = sums;
    line<double> squares(n * m), none(0), line_out(n), bad_squares(std::vector<double>{1, -1});
    const line<double> squares_before = squares;
    table<std::uint8_t> keep(n, m);
    const table<std::uint8_t> keep_before = keep;
    line<std::int64_t> sequence(n), far(n);
    for (index_t r = 0; r < n; ++r) sequence[r] = 0, far[r] = r == n - 1 ? 2 : 0;
    line<std::int32_t> offsets(std::vector<std::int32_t>{0, 1, std::int32_t(n) + 1});
    line<float> narrow(3);
    line<float> narrow_before = narrow;
    std::int64_t count = 5;
    auto m2po = made<opd_m2po>();
    using T = opd_tokens&;
    const auto of = damaged(batch.tokens, [&](const opd_tokens& t) { return opd_advantages(&t, &out.tensor); });
    opd_teacher dense = batch.c, no_mu = batch.c, no_q = batch.c, no_ids = batch.c, no_outside = batch.c,
                mixed = batch.c, shape = batch.c;
    dense.kind = OPD_DENSE, no_mu.log_mu = nullptr, no_q.log_q = nullptr, no_ids.ids = nullptr,
    no_outside.advantage = nullptr;
    mixed.log_q = &out.tensor, shape.log_ref = &narrow.tensor;
    const auto form = [&](const char* name, double tau, double level) {
        auto of_form = made<opd_m2po>();
        of_form.form = name, of_form.tau = tau, of_form.level = level;
        return of_form;
    };
    auto bad_form = form("some", 0, 0), bad_tau = form("drop", -1, 0), bad_level = form("drop", 0, NAN);
    auto white = made<opd_whitening>(), bad_white = white;
    bad_white.epsilon = -1;
    auto bad_sums = white;
    bad_sums.count = NAN;
    auto stale = made<opd_prefix_staleness>();
    double ratio = 7;
    line<std::int64_t> counts(4);
    const std::vector<refusal> all{
        {"tokens", [&] { return opd_advantages(nullptr, &out.tensor); }},
        {"tokens.cache", of([](T t) { t.cache = nullptr; })},
        {"cache.kind", of([&](T t) { t.cache = &dense; })},
        {"cache.log_mu", of([&](T t) { t.cache = &no_mu; })},
        {"cache.log_q", of([&](T t) { t.cache = &no_q; })},
        {"cache.log_q", of([&](T t) { t.cache = &mixed; })},
        {"cache.ids", of([&](T t) { t.cache = &no_ids; })},
        {"cache.log_ref", of([&](T t) { t.cache = &shape; })},
        {"cache.advantage", of([&](T t) { t.cache = &no_outside, t.of = "outside"; })},
        {"tokens.log_p", of([](T t) { t.log_p = nullptr; })},
        {"cache.ids", of([&](T t) { t.log_p = &wrong.tensor; })},
        {"tokens.of", of([](T t) { t.of = "worth"; })},
        {"tokens.mask", of([&](T t) { t.mask = &counts.tensor; })},
        {"advantage", [&] { return opd_advantages(&batch.tokens, &wrong.tensor); }},
        {"advantage", [&] { return opd_advantages(&batch.tokens, nullptr); }},
        {"m2po.form", [&] { return opd_m2po_squares(&bad_form, &batch.tokens, &squares.tensor, &count); }},
        {"squares", [&] { return opd_m2po_squares(&m2po, &batch.tokens, nullptr, &count); }},
        {"count", [&] { return opd_m2po_squares(&m2po, &batch.tokens, &squares.tensor, nullptr); }},
        {"m2po.tau", [&] { return opd_m2po_freeze(&bad_tau, &squares.tensor); }},
        {"squares", [&] { return opd_m2po_freeze(&m2po, &bad_squares.tensor); }},
        {"m2po.level", [&] { return opd_m2po_keep(&bad_level, &batch.tokens, &keep.tensor, nullptr); }},
        {"keep", [&] { return opd_m2po_keep(&m2po, &batch.tokens, &out.tensor, nullptr); }},
        {"sequence", [&] { return opd_gspo_add(&batch.tokens, &far.tensor, &sums.tensor); }},
        {"sequence", [&] { return opd_gspo_add(&batch.tokens, &counts.tensor, &sums.tensor); }},
        {"sums", [&] { return opd_gspo_add(&batch.tokens, &sequence.tensor, &two.tensor); }},
        {"log_ratio", [&] { return opd_gspo_fill(&sums.tensor, &sequence.tensor, nullptr, nullptr); }},
        {"advantage", [&] { return opd_gspo_fill(&sums.tensor, &sequence.tensor, &line_out.tensor, &sums.tensor); }},
        {"gamma_lambda", [&] { return opd_credit(&out.tensor, &offsets.tensor, 2, nullptr); }},
        {"offsets", [&] { return opd_credit(&out.tensor, &offsets.tensor, 1, nullptr); }},
        {"offsets", [&] { return opd_credit(&out.tensor, nullptr, 1, nullptr); }},
        {"group", [&] { return opd_group_relative(&squares.tensor, n * m + 1, 0); }},
        {"epsilon", [&] { return opd_group_relative(&squares.tensor, 1, -1); }},
        {"whitening.epsilon", [&] { return opd_whitening_add(&bad_white, &batch.log_p.tensor, nullptr); }},
        {"whitening", [&] { return opd_whitening_apply(&bad_sums, &batch.log_ref.tensor, &out.tensor); }},
        {"out", [&] { return opd_whitening_apply(&white, &batch.log_ref.tensor, &wrong.tensor); }},
        {"log_p",
         [&] {
             return opd_prefix_staleness_add(&stale, &sequence.tensor, &line_out.tensor, &offsets.tensor, nullptr);
         }},
        {"offsets",
         [&] {
             return opd_prefix_staleness_add(&stale, &line_out.tensor, &line_out.tensor, &offsets.tensor, nullptr);
         }},
        {"by", [&] { return opd_draft_weights("falling", 1, &offsets.tensor, nullptr, &narrow.tensor); }},
        {"decaying.gamma", [&] { return opd_draft_weights("decaying", 0, &offsets.tensor, nullptr, &narrow.tensor); }},
        {"losses", [&] { return opd_draft_weights("accepted_length", 0.5, &offsets.tensor, nullptr, &narrow.tensor); }},
        {"counts", [&] { return opd_ratio_quantile(&sequence.tensor, 0.5, &ratio); }},
        {"ids",
         [&] { return opd_id_overlap(&out.tensor, nullptr, &batch.ids.tensor, nullptr, nullptr, nullptr, nullptr); }},
        {"others",
         [&] { return opd_id_overlap(&batch.ids.tensor, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr); }},
        {"share",
         [&] {
             return opd_id_overlap(&batch.ids.tensor, nullptr, &batch.ids.tensor, nullptr, &bad_squares.tensor, nullptr,
                                   nullptr);
         }},
        {"ids", [&] { return opd_drop_repeats(&out.tensor, nullptr, nullptr); }},
    };
    REQUIRE(n != 4);
    REQUIRE(n != 2);
    check_refusals(all, [&] {
        return out == before && sums == sums_before && squares == squares_before && keep == keep_before && count == 5 &&
               ratio == 7 && narrow == narrow_before && white.count == 0 && stale.rows == 0;
    });
}

} // namespace
