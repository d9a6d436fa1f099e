// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the scheduler's process decided, and on what: the machine's snapshot that the process began with, then every
// event with its time, and the actions that it led to. replay() gives the events to a machine of its own, without
// processes, clocks or sockets, and compares action by action.
//
//   file = frames; a frame = length (u64), sealed bytes: first a snapshot, then (time, event, its tickets), actions
//
// What a killed process has not written yet ends in the middle of a frame, or is not there.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "opd/sched/scheduler.hpp"

namespace engine {

namespace sched = opd::sched;

class decision_record {
public:
    explicit decision_record(const std::filesystem::path& file) : path_(file) {
        std::filesystem::create_directories(file.parent_path());
        out_.open(file, std::ios::binary | std::ios::trunc);
    }
    /// A snapshot is safe: the first is where a replay begins, and what was written so far is kept.
    void saved(const std::string& snapshot) {
        if (!std::exchange(begun_, true)) frame(snapshot);
        if (!out_.flush()) throw std::runtime_error(path_.string() + ": cannot be written");
    }
    void took(const sched::event& e, double time, const sched::actions& led_to) {
        sched::archive_writer what;
        what(time, e, std::vector<sched::ticket>(e.tickets.begin(), e.tickets.end()));
        frame(what.bytes);
        frame(bytes_of(led_to));
    }
    static std::string bytes_of(const sched::actions& all) {
        sched::archive_writer out;
        out(all.items, all.tickets, static_cast<std::uint64_t>(all.consumed.size()));
        for (const sched::consumed_sequence& c : all.consumed) out(c.ticket, c.start, c.versions);
        return std::move(out.bytes);
    }

private:
    void frame(const std::string& bytes) {
        const std::string sealed = sched::seal(bytes);
        const std::uint64_t size = sealed.size();
        out_.write(reinterpret_cast<const char*>(&size), sizeof size);
        out_ << sealed;
    }
    std::filesystem::path path_;
    std::ofstream out_;
    bool begun_ = false;
};

struct replayed {
    std::int64_t events = 0, actions = 0;
};
/// Throws where the machine decides otherwise than the process did.
inline replayed replay(const std::filesystem::path& file, const sched::settings& how) {
    std::ifstream in(file, std::ios::binary);
    std::ostringstream all;
    all << in.rdbuf();
    const std::string text = std::move(all).str();
    std::string_view rest = text;
    const auto next = [&](std::string_view& into) {
        std::uint64_t size = 0;
        if (rest.size() < sizeof size) return false;
        std::memcpy(&size, rest.data(), sizeof size);
        if (rest.size() - sizeof size < size) return false;
        into = sched::unseal(rest.substr(sizeof size, size));
        rest.remove_prefix(sizeof size + size);
        return true;
    };
    replayed r;
    std::string_view first, asked, answered;
    if (!next(first)) return r; // it died before it asked for anything
    sched::scheduler machine = sched::scheduler::restore(how, std::string(first));
    sched::actions out;
    for (; next(asked) && next(answered); ++r.events) {
        double time = 0;
        sched::event e;
        std::vector<sched::ticket> tickets;
        sched::archive_reader of(asked);
        of(time, e, tickets);
        e.tickets = tickets;
        out.clear();
        machine.on(e, time, out);
        if (decision_record::bytes_of(out) != answered)
            throw std::runtime_error(file.string() + ": event " + std::to_string(r.events) +
                                     " leads to other actions in one process");
        r.actions += static_cast<std::int64_t>(out.items.size());
    }
    return r;
}

} // namespace engine
