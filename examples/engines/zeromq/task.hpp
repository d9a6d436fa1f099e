// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A task that costs next to nothing and proves what was learnt: weights are a hash. Each token is drawn from the
// weights' hash, a score is a hash of the tokens, and the next weights are a hash of the weights before and of every
// sequence of the batch. Who follows a line of weights back to the first knows what each was made of, and computes it
// again (kill_test.py does).
//
// A run's folder, on a file system that all processes see:
//   weights/<job>                 what a train call published, one file: the hash, what it was made of
//   payload/<sample>/r<attempt>, payload/<sample>/s<attempt>    a response, a score; the scheduler sees names
//   line/<job>                    what the weights were made of; stays
// Each is written under another name and renamed, so a process that dies leaves nothing half written. The learner
// removes payloads and weights once the scheduler says that nobody needs them. The trainer's stages
// (trainer_stages.hpp) keep the same folder.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "opd/sched/remote_link.hpp"
#include "opd/sched/stages.hpp"

namespace engine {

namespace sched = opd::sched;
using sched::payload_ref;
using rolled_ptr = std::shared_ptr<const payload_ref>;

/// One step of the hash (splitmix64).
inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    std::uint64_t x = a * 0x9E3779B97F4A7C15u + b + 0x632BE59BD9B4E019u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}
inline constexpr std::uint64_t first_weights = 1; ///< the hash of weights 0

class run_folder {
public:
    explicit run_folder(std::filesystem::path p) : root_(std::move(p)) {
        for (const char* part : {"weights", "line", "payload"}) std::filesystem::create_directories(root_ / part);
    }
    std::string read(const std::string& name) const {
        std::ifstream in(root_ / name);
        std::ostringstream text;
        if (!(text << in.rdbuf())) throw std::runtime_error((root_ / name).string() + ": cannot be read");
        return std::move(text).str();
    }
    void write(const std::string& name, const std::string& text) const {
        static std::atomic<std::uint64_t> count{std::random_device{}()};
        const std::filesystem::path to = root_ / name, half = to.string() + ".new" + std::to_string(++count);
        std::filesystem::create_directories(to.parent_path());
        {
            std::ofstream out(half);
            out << text;
            if (!out.flush()) throw std::runtime_error(half.string() + ": cannot be written");
        }
        std::filesystem::rename(half, to);
    }
    payload_ref put(const std::string& name, const std::string& text) const {
        write(name, text);
        return {name, text.size(), sched::detail::checksum(text)};
    }
    /// What the call's sequence `place` names, if it is what it was. The name came from another process: it must lie
    /// among the payloads. Throws lost_payloads where the file is gone.
    std::string get(const payload_ref& p, std::size_t place) const {
        const bool plain = p.where.rfind("payload/", 0) == 0 &&
                           p.where.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789/") == std::string::npos;
        if (!plain) throw std::runtime_error("'" + p.where + "' is no payload's name");
        if (!std::filesystem::exists(root_ / p.where)) throw sched::lost_payloads({place}, p.where + " is gone");
        std::string text = read(p.where);
        if (text.size() != p.bytes || sched::detail::checksum(text) != p.checksum)
            throw std::runtime_error(p.where + " is not what it was");
        return text;
    }
    std::uint64_t weights_hash(std::uint64_t job) const {
        if (job == 0) return first_weights;
        std::uint64_t hash = 0;
        std::string word;
        std::istringstream in(read("weights/" + std::to_string(job)));
        if (!(in >> word >> hash) || word != "hash") throw std::runtime_error("weights are damaged");
        return hash;
    }
    const std::filesystem::path& root() const { return root_; }

private:
    std::filesystem::path root_;
};

/// Draws one token of every running sequence a step.
class rollout_stage {
public:
    using rolled_type = payload_ref;
    rollout_stage(run_folder folder, double quantum) : folder_(std::move(folder)), quantum_(quantum) {}

    void start(const sched::ticket& t, rolled_ptr) { lanes_[t.lane] = {t, {}, {}}; }
    void abort(const sched::ticket& t) { lanes_.erase(t.lane); }
    void install(const sched::weights& w) {
        hash_ = folder_.weights_hash(w.job);
        version_ = w.version;
    }
    opd::index_t running() const { return static_cast<opd::index_t>(lanes_.size()); }
    std::int64_t drawn(const sched::ticket& t) const {
        const auto it = lanes_.find(t.lane);
        return it != lanes_.end() && it->second.what == t ? static_cast<std::int64_t>(it->second.tokens.size()) : 0;
    }
    void step(std::vector<sched::finished_rollout<payload_ref>>& out, std::stop_token) {
        if (quantum_ > 0) std::this_thread::sleep_for(std::chrono::duration<double>(quantum_));
        for (auto it = lanes_.begin(); it != lanes_.end();) {
            running_sequence& r = it->second;
            r.tokens.push_back(mix(mix(hash_, r.what.sample), r.tokens.size()));
            r.versions.push_back(version_);
            if (r.tokens.size() < 1 + r.what.sample % 7) {
                ++it;
                continue;
            }
            std::string text;
            sched::token_versions v{r.versions.front(), r.versions.back(), 0,
                                    static_cast<std::int64_t>(r.tokens.size())};
            for (std::size_t i = 0; i < r.tokens.size(); ++i) {
                text += std::to_string(r.versions[i]) + ' ' + std::to_string(r.tokens[i]) + '\n';
                v.mean += static_cast<double>(r.versions[i]) / static_cast<double>(r.tokens.size());
            }
            const std::string name = "payload/" + std::to_string(r.what.sample) + "/r" + std::to_string(r.what.attempt);
            out.push_back({r.what, v, std::make_shared<const payload_ref>(folder_.put(name, text))});
            it = lanes_.erase(it);
        }
    }

private:
    struct running_sequence {
        sched::ticket what;
        std::vector<std::uint64_t> tokens;
        std::vector<sched::version_t> versions;
    };
    run_folder folder_;
    double quantum_;
    std::uint64_t hash_ = 0;
    sched::version_t version_ = 0;
    std::map<std::int32_t, running_sequence> lanes_;
};

class teacher_stage {
public:
    using scored_type = payload_ref;
    teacher_stage(run_folder folder, double quantum) : folder_(std::move(folder)), quantum_(quantum) {}
    std::vector<std::shared_ptr<const payload_ref>> score(std::span<const rolled_ptr> rolled, std::stop_token) {
        if (quantum_ > 0) std::this_thread::sleep_for(std::chrono::duration<double>(quantum_));
        std::vector<std::shared_ptr<const payload_ref>> r;
        for (const rolled_ptr& p : rolled) {
            std::istringstream in(folder_.get(*p, r.size()));
            std::uint64_t score = 7, version = 0, token = 0;
            while (in >> version >> token) score = mix(score, token);
            std::string name = p->where; // …/r<attempt>
            name[name.rfind('/') + 1] = 's';
            r.push_back(std::make_shared<const payload_ref>(folder_.put(name, std::to_string(score) + '\n')));
        }
        return r;
    }

private:
    run_folder folder_;
    double quantum_;
};

/// What the learner writes of its weights, and removes once nobody needs it.
class published {
public:
    /// `keep_from`: see remote_worker. `kinds`: folders that have a file a job.
    published(run_folder folder, const std::atomic<std::uint64_t>& keep_from, std::vector<std::string> kinds)
        : folder_(std::move(folder)), keep_from_(keep_from), kinds_(std::move(kinds)) {
        for (const std::string& kind : kinds_) std::filesystem::create_directories(folder_.root() / kind);
    }
    const run_folder& folder() const { return folder_; }

    /// What the call's weights were made of, a line a fact: `hash` of them, `sequence SAMPLE START SCORE` of each.
    std::string line(const sched::train_call& call, std::uint64_t hash, const std::string& sequences) const {
        const sched::weights w = call.makes();
        std::string text = "hash " + std::to_string(hash) + "\nversion " + std::to_string(w.version) + "\nfrom " +
                           std::to_string(call.from.job) + '\n' + sequences;
        folder_.write("line/" + std::to_string(w.job), text);
        return text;
    }
    // Along the line of the weights that are kept, what they were made of is learnt from, whatever happens to the
    // scheduler. Weights beside the line were published by calls that nobody waited for: their sequences may still be
    // wanted.
    void forget() {
        const std::uint64_t keep_from = keep_from_;
        if (keep_from == forgotten_) return;
        for (std::uint64_t job = forgotten_ = keep_from; job != 0 && holds(job);) {
            std::istringstream in(folder_.read("line/" + std::to_string(job)));
            std::uint64_t from = 0, number = 0;
            std::string word;
            for (std::string line; std::getline(in, line);) {
                std::istringstream words(line);
                if (!(words >> word >> number)) continue;
                if (word == "from") from = number;
                if (word == "sequence")
                    std::filesystem::remove_all(folder_.root() / "payload" / std::to_string(number));
            }
            job = from;
        }
        for (const std::string& kind : kinds_)
            for (const auto& entry : std::filesystem::directory_iterator(folder_.root() / kind)) {
                const std::string name = entry.path().filename();
                if (name.find_first_not_of("0123456789") == std::string::npos && std::stoull(name) < keep_from)
                    std::filesystem::remove(entry.path());
            }
    }

private:
    bool holds(std::uint64_t job) const {
        return std::filesystem::exists(folder_.root() / "weights" / std::to_string(job));
    }

    run_folder folder_;
    const std::atomic<std::uint64_t>& keep_from_;
    std::vector<std::string> kinds_;
    std::uint64_t forgotten_ = 0;
};

class learner_stage {
public:
    learner_stage(run_folder folder, double quantum, const std::atomic<std::uint64_t>& keep_from)
        : files_(std::move(folder), keep_from, {"weights"}), quantum_(quantum) {}
    opd::index_t train(std::span<const sched::sequence_view<payload_ref, payload_ref>> batch,
                       const sched::train_call& call, std::stop_token) {
        files_.forget();
        if (quantum_ > 0) std::this_thread::sleep_for(std::chrono::duration<double>(quantum_));
        const run_folder& folder = files_.folder();
        std::uint64_t hash = folder.weights_hash(call.from.job);
        std::ostringstream made;
        for (std::size_t i = 0; i < batch.size(); ++i) {
            const auto& v = batch[i];
            std::istringstream response(folder.get(*v.rolled, i)), score(folder.get(*v.scored, i));
            std::uint64_t version = 0, token = 0, tokens = 7, scored = 0;
            while (response >> version >> token) tokens = mix(tokens, token);
            if (!(score >> scored) || scored != tokens) throw std::runtime_error("a score is of another response");
            hash = mix(mix(hash, v.ticket.sample), scored);
            made << "sequence " << v.ticket.sample << ' ' << v.start << ' ' << scored << '\n';
        }
        folder.write("weights/" + std::to_string(call.job), files_.line(call, hash, made.str()));
        return 1;
    }

private:
    published files_;
    double quantum_;
};

} // namespace engine
