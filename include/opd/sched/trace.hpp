// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Records what ran when, and writes it in Chrome's trace event format, which chrome://tracing and ui.perfetto.dev show.
//
//   spans      ph "X"   work of a worker: process = stage, thread = worker; the sync gate and waits: process
//                       "scheduler"; the life of a sequence: process "sequences", thread = slot of its permit
//   counters   ph "C"   queue depths
//   instants   ph "i"   faults, syncs, whatever happens at a moment
//   metadata   ph "M"   names of processes and threads
//
// Times are seconds that the caller hands in, from any clock; the file has microseconds with three decimals. Nothing
// here locks: the caller serialises. Spans on one thread should nest or follow each other, or the viewers draw them
// badly; lanes of one worker that overlap belong on threads of their own (`lane_track`).
//
// Source: "Trace Event Format" (Chromium), JSON object format.
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

namespace detail {

/// Bytes of the UTF-8 character at the start of `text`, 0 if it is none (overlong forms and surrogates are none).
inline std::size_t utf8_length(std::string_view text) {
    const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const unsigned first = byte(0), second = byte(1);
    const std::size_t length = first < 0x80u   ? 1
                               : first < 0xc2u ? 0
                               : first < 0xe0u ? 2
                               : first < 0xf0u ? 3
                               : first < 0xf5u ? 4
                                               : 0;
    for (std::size_t i = 1; i < length; ++i)
        if ((byte(i) & 0xc0u) != 0x80u) return 0;
    if ((first == 0xe0u && second < 0xa0u) || (first == 0xedu && second > 0x9fu)) return 0;
    if ((first == 0xf0u && second < 0x90u) || (first == 0xf4u && second > 0x8fu)) return 0;
    return length;
}

/// Appends a JSON string with its quotes. A byte that is not UTF-8 becomes U+FFFD: the text is valid whatever comes in.
inline void append_json(std::string& out, std::string_view text) {
    constexpr char digits[] = "0123456789abcdef";
    out += '"';
    while (!text.empty()) {
        const std::size_t length = utf8_length(text);
        const char c = text.front();
        if (length == 0)
            out += "\xef\xbf\xbd";
        else if (c == '"' || c == '\\')
            (out += '\\') += c;
        else if (const auto code = static_cast<unsigned char>(c); code < 0x20u)
            ((out += "\\u00") += digits[code >> 4]) += digits[code & 15u];
        else
            out += text.substr(0, length);
        text.remove_prefix(length == 0 ? 1 : length);
    }
    out += '"';
}
/// Appends a number; `decimals` >= 0 rounds to that many places, otherwise the text reads back as the same double.
/// What is not a number is null.
inline void append_json(std::string& out, double x, int decimals = -1) {
    char text[400]; // the largest double has 309 digits before the point
    const auto end = decimals < 0 ? std::to_chars(text, text + sizeof text, x)
                                  : std::to_chars(text, text + sizeof text, x, std::chars_format::fixed, decimals);
    out += opd::detail::is_finite(x) ? std::string_view(text, std::size_t(end.ptr - text)) : "null";
}
template <std::integral Int>
void append_json(std::string& out, Int x) {
    if constexpr (std::same_as<Int, bool>)
        out += x ? "true" : "false";
    else
        out += std::to_string(x);
}

} // namespace detail

/// Where an event is drawn: a group of rows and a row in it.
struct track {
    std::int32_t process = 0;
    std::int64_t thread = 0;
    auto operator<=>(const track&) const = default;
};

/// The groups, top to bottom.
inline constexpr std::int32_t scheduler_process = 1;
/// The process whose threads are the slots of permits.
inline constexpr std::int32_t sequences_process = 5;
/// The process whose threads are the workers of a stage.
constexpr std::int32_t process_of(stage s) { return 2 + static_cast<std::int32_t>(s); }

/// A worker's row of the timeline, in the group of its stage.
constexpr track worker_track(stage s, std::int32_t worker) { return {process_of(s), worker}; }
/// For workers with several lanes at once: `lanes` rows each.
constexpr track lane_track(stage s, std::int32_t worker, std::int32_t lane, std::int32_t lanes) {
    return {process_of(s), std::int64_t{worker} * lanes + lane};
}
/// The row of a permit's slot: the sequences that have it follow each other.
constexpr track sequence_track(const ticket& t) { return {sequences_process, t.slot}; }
/// Where the sync gate's spans go.
inline constexpr track gate_track{scheduler_process, 0};
/// Where waits of the learner for the staleness policy go.
inline constexpr track wait_track{scheduler_process, 1};

/// Names of what a timeline shows apart.
inline constexpr const char* gate_name = "sync gate";
/// Of spans in which the staleness policy kept the learner from a batch.
inline constexpr const char* hold_name = "held back";
/// Of instants at which a worker failed.
inline constexpr const char* fault_name = "fault";
inline constexpr const char* spare_name = "spare"; // a span of spare work

/// One argument of an event: a name, and a number, a truth or a text.
struct trace_arg {
    std::string_view name;
    std::variant<std::int64_t, double, bool, std::string_view> value;

    template <class T>
    trace_arg(std::string_view name_, const T& x) : name(name_) {
        if constexpr (std::same_as<T, bool>)
            value = x;
        else if constexpr (std::integral<T>)
            value = static_cast<std::int64_t>(x);
        else if constexpr (std::floating_point<T>)
            value = static_cast<double>(x);
        else
            value = std::string_view(x);
    }
};
/// They are read during the call alone.
using trace_args = std::initializer_list<trace_arg>;

/// A span, a point of a counter, or an instant. Times are seconds.
struct trace_event {
    enum class kind : char { span = 'X', counter = 'C', instant = 'i' };
    kind what = kind::span;
    track where;
    double begin = 0, duration = 0; // seconds
    std::string name, args;         // args: a JSON object, or empty
    double value = 0;               // of a counter: its first number
};

/// What is kept of the spans, and likewise of the counters and instants together: the first so many and the last so
/// many.
struct trace_options {
    std::size_t first = std::numeric_limits<std::size_t>::max();
    std::size_t last = 0;
};

/// A recording in memory. It keeps all by default; trace_options bounds it, and left_out() counts what is beyond.
class trace {
public:
    explicit trace(const trace_options& options = {}) : spans_(options), marks_(options) {}

    void span(track where, std::string_view name, double begin, double end, trace_args args = {}) {
        check(begin, "begin");
        check(end, "end");
        if (end < begin) throw invalid_input("end", "a span that ends before it begins");
        spans_.add({trace_event::kind::span, where, begin, end - begin, std::string(name), text(args), 0});
    }
    void span(stage s, std::int32_t worker, std::string_view name, double begin, double end, trace_args args = {}) {
        span(worker_track(s, worker), name, begin, end, args);
    }
    /// The time between closing and opening, in which nothing starts.
    void gate(double begin, double end, version_t version) {
        span(gate_track, gate_name, begin, end, {{"version", version}});
    }
    /// The time for which the staleness policy kept the learner from a batch that was at hand.
    void hold(double begin, double end) { span(wait_track, hold_name, begin, end); }

    /// The values are drawn as one stacked graph; each argument is a number.
    void counter(std::string_view name, double t, trace_args values) {
        check(t, "t");
        double first = 0;
        bool any = false;
        for (const trace_arg& a : values) {
            const auto* whole = std::get_if<std::int64_t>(&a.value);
            const auto* real = std::get_if<double>(&a.value);
            if (!whole && !(real && opd::detail::is_finite(*real)))
                throw invalid_input("values", "a counter's values are finite numbers");
            if (!std::exchange(any, true)) first = whole ? static_cast<double>(*whole) : *real;
        }
        if (!any) throw invalid_input("values", "a counter without values");
        marks_.add({trace_event::kind::counter, {scheduler_process, 0}, t, 0, std::string(name), text(values), first});
    }
    void instant(track where, std::string_view name, double t, trace_args args = {}) {
        check(t, "t");
        marks_.add({trace_event::kind::instant, where, t, 0, std::string(name), text(args), 0});
    }
    void fault(stage s, std::int32_t worker, double t, std::string_view reason) {
        instant(worker_track(s, worker), fault_name, t, {{"reason", reason}});
    }

    /// Calls f(const trace_event&) for what is kept, in the order of recording.
    template <class F>
    void each_span(F&& f) const {
        spans_.each(f);
    }
    template <class F>
    void each_mark(F&& f) const {
        marks_.each(f);
    }
    std::size_t spans() const { return spans_.size(); }
    std::size_t marks() const { return marks_.size(); }
    /// What the bounds left out.
    std::uint64_t left_out() const { return spans_.left_out + marks_.left_out; }

    /// The whole trace as JSON, in pieces: sink(std::string_view) takes each.
    template <class Sink>
    void write_to(Sink&& sink) const {
        std::string out = "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"events_left_out\":";
        detail::append_json(out, left_out());
        out += "},\"traceEvents\":[";
        bool comma = false;
        std::map<track, bool> tracks;
        const auto note = [&](const trace_event& e) { tracks[e.where] = true; };
        each_span(note);
        each_mark(note);
        std::int32_t process = std::numeric_limits<std::int32_t>::min();
        for (const auto& entry : tracks) {
            const track& where = entry.first;
            if (where.process != process) {
                process = where.process;
                metadata(out, comma, "process_name", where, {"name", process_name(process)});
                metadata(out, comma, "process_sort_index", where, {"sort_index", process});
            }
            metadata(out, comma, "thread_name", where, {"name", thread_name(where)});
            metadata(out, comma, "thread_sort_index", where, {"sort_index", where.thread});
        }
        const auto event = [&](const trace_event& e) {
            append(out, comma, e);
            if (out.size() > 1 << 16) {
                sink(std::string_view(out));
                out.clear();
            }
        };
        each_span(event);
        each_mark(event);
        out += "\n]}\n";
        sink(std::string_view(out));
    }
    std::string json() const {
        std::string out;
        write_to([&](std::string_view piece) { out.append(piece); });
        return out;
    }
    /// To `path`, complete or not at all: written to `path`.part, then renamed.
    void write(const std::string& path) const {
        const std::string part = path + ".part";
        try {
            std::ofstream file(part, std::ios::binary | std::ios::trunc);
            if (!file) throw error("opd: cannot write " + part);
            write_to(
                [&](std::string_view piece) { file.write(piece.data(), static_cast<std::streamsize>(piece.size())); });
            file.close();
            if (!file) throw error("opd: cannot write all of " + part);
            std::error_code code;
            std::filesystem::rename(part, path, code);
            if (code) throw error("opd: cannot rename " + part + ": " + code.message());
        } catch (...) {
            std::error_code ignored;
            std::filesystem::remove(part, ignored);
            throw;
        }
    }

private:
    struct bounded {
        std::size_t first, last;
        std::uint64_t left_out = 0;
        std::vector<trace_event> head;
        std::deque<trace_event> tail;

        explicit bounded(const trace_options& options) : first(options.first), last(options.last) {}
        void add(trace_event&& e) {
            if (head.size() < first) {
                head.push_back(std::move(e));
                return;
            }
            if (last > 0) tail.push_back(std::move(e));
            if (last == 0) {
                ++left_out;
            } else if (tail.size() > last) {
                tail.pop_front();
                ++left_out;
            }
        }
        std::size_t size() const { return head.size() + tail.size(); }
        template <class F>
        void each(F&& f) const {
            for (const trace_event& e : head) f(e);
            for (const trace_event& e : tail) f(e);
        }
    };

    static void check(double t, const char* argument) {
        if (!opd::detail::is_finite(t)) throw invalid_input(argument, "a time is finite");
    }
    static std::string text(trace_args args) {
        std::string out;
        for (const trace_arg& a : args) {
            out += out.empty() ? '{' : ',';
            detail::append_json(out, a.name);
            out += ':';
            std::visit([&](const auto& x) { detail::append_json(out, x); }, a.value);
        }
        return out.empty() ? out : out + '}';
    }
    static std::string process_name(std::int32_t process) {
        if (process == scheduler_process) return "scheduler";
        if (process == sequences_process) return "sequences";
        for (int s = 0; s < stage_count; ++s)
            if (process == process_of(static_cast<stage>(s))) return name_of(static_cast<stage>(s));
        return "process " + std::to_string(process);
    }
    static std::string thread_name(track where) {
        if (where == gate_track) return gate_name;
        if (where == wait_track) return hold_name;
        return (where.process == sequences_process ? "slot " : "worker ") + std::to_string(where.thread);
    }

    static void start(std::string& out, bool& comma) { out += std::exchange(comma, true) ? ",\n" : "\n"; }
    static void place(std::string& out, track where) {
        out += ",\"pid\":";
        detail::append_json(out, where.process);
        out += ",\"tid\":";
        detail::append_json(out, where.thread);
    }
    static void metadata(std::string& out, bool& comma, const char* kind, track where, const trace_arg& what) {
        start(out, comma);
        out += "{\"ph\":\"M\",\"name\":\"";
        out += kind;
        out += '"';
        place(out, where);
        out += ",\"args\":" + text({what}) + '}';
    }
    static void append(std::string& out, bool& comma, const trace_event& e) {
        start(out, comma);
        out += "{\"ph\":\"";
        out += static_cast<char>(e.what);
        out += "\",\"name\":";
        detail::append_json(out, e.name);
        place(out, e.where);
        out += ",\"ts\":";
        detail::append_json(out, e.begin * 1e6, 3);
        if (e.what == trace_event::kind::span) {
            out += ",\"dur\":";
            detail::append_json(out, e.duration * 1e6, 3);
        } else if (e.what == trace_event::kind::instant) {
            out += ",\"s\":\"t\"";
        }
        if (!e.args.empty()) {
            out += ",\"args\":";
            out += e.args;
        }
        out += '}';
    }

    bounded spans_, marks_;
};

} // namespace opd::sched
