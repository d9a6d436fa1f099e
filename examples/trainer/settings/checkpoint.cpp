// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "settings/checkpoint.hpp"

#include <bit>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "opd/data/checksum.hpp"
#include "opd/data/files.hpp"
#include "settings/config.hpp"
#include "settings/files.hpp"

namespace trainer {

namespace {

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

constexpr std::string_view magic = "OPDTRAIN";
constexpr std::uint32_t format_version = 4;

// One list of sections serves both directions.
template <class State, class Visitor>
void visit_sections(State& s, Visitor&& v) {
    v("stage", s.stage);
    v("step", s.step);
    v("next_sample", s.next_sample);
    v("teacher.weights", s.teacher_weights);
    v("teacher.m", s.teacher_optimizer.m);
    v("teacher.v", s.teacher_optimizer.v);
    v("teacher.step", s.teacher_optimizer.step);
    v("student.weights", s.student_weights);
    v("student.m", s.student_optimizer.m);
    v("student.v", s.student_optimizer.v);
    v("student.step", s.student_optimizer.step);
    v("rate.step", s.rate.step);
    v("rate.rate", s.rate.rate);
    v("kl.sum", s.kl.sum);
    v("kl.last_mean", s.kl.last_mean);
    v("kl.count", s.kl.count);
    v("kl.blocks", s.kl.blocks);
    v("kl.rises", s.kl.rises);
    v("tokens", s.tokens);
    v("evaluations", s.evaluations);
    v("in_flight", s.in_flight);
}

template <class T>
std::span<const char> bytes_of(const T& x) {
    if constexpr (std::is_trivially_copyable_v<T>)
        return {reinterpret_cast<const char*>(&x), sizeof x};
    else
        return {reinterpret_cast<const char*>(x.data()), x.size() * sizeof *x.data()};
}

struct writer {
    const piece_sink& out;
    opd::data::running_fingerprint sum = {};
    void raw(std::span<const char> bytes) {
        sum.add(std::as_bytes(bytes));
        out({bytes.data(), bytes.size()});
    }
    template <class T>
    void operator()(std::string_view name, const T& x) {
        const auto bytes = bytes_of(x);
        raw(bytes_of(static_cast<std::uint32_t>(name.size())));
        raw(std::span(name.data(), name.size()));
        raw(bytes_of(static_cast<std::uint64_t>(bytes.size())));
        raw(bytes);
    }
};

struct reader {
    const std::string& path;
    std::string_view in;

    [[noreturn]] void damaged(const std::string& why) const {
        throw failure(exit_input, fmt::format("{}: damaged checkpoint ({})", path, why));
    }
    std::string_view take(std::uint64_t size) {
        if (size > in.size()) damaged("it ends too early");
        const auto r = in.substr(0, size);
        in.remove_prefix(size);
        return r;
    }
    template <class T>
    T number() {
        T x;
        std::memcpy(&x, take(sizeof x).data(), sizeof x);
        return x;
    }
    template <class T>
    void operator()(std::string_view name, T& x) {
        const std::string_view found = take(number<std::uint32_t>());
        if (found != name) damaged(fmt::format("section '{}' where '{}' belongs", found, name));
        const std::string_view bytes = take(number<std::uint64_t>());
        if constexpr (std::is_trivially_copyable_v<T>) {
            if (bytes.size() != sizeof x) damaged(fmt::format("section '{}' has {} bytes", name, bytes.size()));
            std::memcpy(&x, bytes.data(), sizeof x);
        } else {
            if (bytes.size() % sizeof *x.data() != 0) damaged(fmt::format("section '{}'", name));
            x.resize(bytes.size() / sizeof *x.data());
            if (!bytes.empty()) std::memcpy(x.data(), bytes.data(), bytes.size());
        }
    }
};

} // namespace

const char* name_of(stage s) {
    switch (s) {
    case stage::teacher:
        return "teacher";
    case stage::student:
        return "student";
    case stage::distill:
        return "distill";
    case stage::finished:
        return "finished";
    }
    return "unknown";
}

bool kl_watch::add(double kl) {
    sum += kl;
    if (++count < block) return false;
    const double mean = sum / block;
    rises = blocks > 0 && mean > last_mean ? rises + 1 : 0;
    last_mean = mean;
    ++blocks;
    sum = 0;
    count = 0;
    return rises == limit; // once per rise, however long
}

// Piece by piece: of a large model its bytes are not in memory twice.
static void write_checkpoint(const run_state& state, const std::string& settings, const piece_sink& out) {
    writer w{out};
    w.raw(std::span(magic.data(), magic.size()));
    w.raw(bytes_of(format_version));
    w("settings", settings);
    w("fingerprint", hash128(settings));
    visit_sections(state, w);
    if (!state.drafter.empty()) w("drafter", state.drafter);
    w.raw(bytes_of(w.sum.text()));
}

std::string checkpoint_bytes(const run_state& state, const std::string& settings) {
    std::string r;
    write_checkpoint(state, settings, [&r](std::string_view piece) { r += piece; });
    return r;
}

run_state checkpoint_of(std::string_view file, const std::string& path, std::string& settings) {
    reader r{path, file};
    if (file.size() < magic.size() + 36 || r.take(magic.size()) != magic)
        throw failure(exit_input, fmt::format("{}: not a checkpoint of opd-train", path));
    const std::string_view sum = file.substr(file.size() - 32);
    if (const auto version = r.number<std::uint32_t>(); version != format_version)
        throw failure(exit_input,
                      fmt::format("{}: checkpoint format {}, this program reads {}", path, version, format_version));
    if (hash128(file.substr(0, file.size() - 32)) != sum) r.damaged("its checksum does not fit");
    r.in.remove_suffix(32);
    run_state state;
    std::string fingerprint_text;
    r("settings", settings);
    r("fingerprint", fingerprint_text);
    if (fingerprint_text != hash128(settings)) r.damaged("its fingerprint does not fit its settings");
    visit_sections(state, r);
    if (!r.in.empty()) r("drafter", state.drafter);
    if (!r.in.empty()) r.damaged("it is too long");
    if (state.stage > stage::finished || state.step < 0) r.damaged("there is no such stage and step");
    if (!(state.rate.rate >= 0 && state.rate.rate <= std::numeric_limits<double>::max())) r.damaged("its rate is none");
    if (!nlohmann::json::accept(state.evaluations)) r.damaged("its evaluations are no JSON");
    return state;
}

void save_checkpoint(const std::string& path, const run_state& state, const std::string& settings) {
    write_pieces(path, [&](const piece_sink& out) { write_checkpoint(state, settings, out); });
}

run_state load_checkpoint(const std::string& path, std::string& settings) {
    const opd::data::detail::mapped_file file = [&] {
        try {
            return opd::data::detail::mapped_file(path);
        } catch (const opd::invalid_input& e) {
            throw failure(exit_input, e.what());
        }
    }();
    return checkpoint_of(file.text(), path, settings);
}

} // namespace trainer
