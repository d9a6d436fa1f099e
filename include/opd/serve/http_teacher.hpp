// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A teacher behind one or more HTTP servers: sequences in, log-probs out, each sequence scored or with the reason why
// it is not.
//
//   serve::http_teacher teacher({.urls = {"http://10.0.0.7:8000", "http://10.0.0.8:8000"}, .what = {.top_k = 20}});
//   std::vector<serve::outcome> r = teacher.score(sequences, stop);      // as many as sequences, in their order
//
//   a request    `batch` sequences; at most `concurrency` under way, over all replicas and all callers
//   a replica    the one with the fewest requests under way, in turn; after `quarantine_after` failures in a row it is
//                left alone for quarantine_seconds, twice as long each time, then tried with one failure to spare. When
//                all are, the one whose time ends first is asked
//   a failure    no connection, silence, status 408, 425, 429 or 5xx, an answer that is none: tried again, the
//                sequences it is about alone, after backoff · 2^(tries-1), at most most_backoff, times a factor of
//                [1/2, 1) by the seed; not before Retry-After. Any other status is final, for a sequence alone: a
//                request of several is asked again one by one
//   a deadline   total_seconds from a sequence's first try, waits included. What is under way then is broken off
//   a stop       breaks off what is under way; the outcomes that are there stay
//
// score() returns when every sequence has an outcome, and throws for its arguments alone. Any number of threads may
// call it. It has threads of its own while it runs, which block SIGPIPE; a connection in the making is broken off after
// connect_seconds at the latest.
//
// What it needs, and why there is no TLS: http_post.hpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/rng.hpp"
#include "opd/serve/dialects.hpp"
#include "opd/serve/http_post.hpp"

namespace opd::serve {

/// Replicas and limits. Seconds are of the steady clock; `urls` has no default.
struct http_settings {
    std::vector<std::string> urls; ///< replicas: http://host[:port][/prefix]
    serve::dialect dialect = serve::dialect::vllm;
    wanted what = {};         ///< which log-probs are asked for
    std::string api_key = {}; ///< sent as Authorization: Bearer; empty: not sent
    int concurrency = 8;      ///< requests under way, over all replicas
    index_t batch = 4;        ///< sequences a request, where the server takes several
    double connect_seconds = 5;
    double read_seconds = 120;  ///< of silence
    double total_seconds = 600; ///< of a sequence
    int tries = 8;              ///< of a sequence
    double backoff_seconds = 0.5, most_backoff_seconds = 30;
    int quarantine_after = 3;       ///< failures in a row
    double quarantine_seconds = 10; ///< then twice as long each time
    std::size_t most_answer_bytes = std::size_t{64} << 20;
    bool whole = true; ///< a sequence with a token that was not scored, other than token 0, is a bad answer
    std::uint64_t seed = 1;
};

/// What became of a sequence. `why` and `text` are of its last failure, also where it was scored after that.
struct outcome {
    std::optional<serve::scores> scores = {};
    failure why = failure::none;
    std::string text = {};
    std::string url = {}; ///< of the last try
    int tries = 0;
    double seconds = 0; ///< from the first try on

    explicit operator bool() const { return scores.has_value(); }
};

/// Since the teacher was made.
struct http_metrics {
    std::int64_t requests = 0;             ///< under way or over
    std::int64_t failures[8] = {};         ///< requests, by `failure`; [0]: those that scored all that they asked for
    std::int64_t retries = 0;              ///< of sequences
    std::int64_t scored = 0, given_up = 0; ///< sequences
    std::int64_t tokens = 0;               ///< scored
    std::int64_t sent_bytes = 0, received_bytes = 0;
    std::int64_t quarantines = 0;
    double busy_seconds = 0; ///< of requests, summed
};

namespace detail {

/// Seconds until try number tries + 1 of a sequence.
inline double backoff_of(const http_settings& s, int tries, std::uint64_t sequence) {
    const double most = std::min(s.most_backoff_seconds, s.backoff_seconds * std::ldexp(1.0, std::min(tries - 1, 60)));
    const philox_block bits =
        philox4x32({static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(sequence >> 32),
                    static_cast<std::uint32_t>(tries), 0},
                   static_cast<std::uint32_t>(s.seed), static_cast<std::uint32_t>(s.seed >> 32));
    return most * (0.5 + 0.5 * uniform_of_bits(bits.word[0]));
}

inline http_settings checked(http_settings s) {
    if (s.urls.empty()) throw invalid_input("urls", "are none");
    for (const std::string& url : s.urls) parsed_url(url);
    check_wanted(s.dialect, s.what);
    if (s.concurrency < 1 || s.concurrency > 4096) throw invalid_input("concurrency", "must lie in [1, 4096]");
    if (s.batch < 1) throw invalid_input("batch", "must be at least 1");
    if (s.tries < 1) throw invalid_input("tries", "must be at least 1");
    if (s.quarantine_after < 1) throw invalid_input("quarantine_after", "must be at least 1");
    if (s.most_answer_bytes < 1) throw invalid_input("most_answer_bytes", "must be at least 1");
    for (const auto& [name, seconds] : {std::pair{"connect_seconds", s.connect_seconds},
                                        {"read_seconds", s.read_seconds},
                                        {"total_seconds", s.total_seconds},
                                        {"backoff_seconds", s.backoff_seconds},
                                        {"most_backoff_seconds", s.most_backoff_seconds},
                                        {"quarantine_seconds", s.quarantine_seconds}})
        check_seconds(name, seconds);
    if (s.api_key.find_first_of("\r\n") != std::string::npos) throw invalid_input("api_key", "has a line break");
    if (const index_t most = most_per_request(s.dialect, s.what); most > 0) s.batch = std::min(s.batch, most);
    return s;
}

} // namespace detail

/// Any number of replicas of one teacher. Any thread may call it.
class http_teacher {
public:
    explicit http_teacher(http_settings settings) : settings_(detail::checked(std::move(settings))) {
        for (const std::string& url : settings_.urls) replicas_.push_back({url, detail::parsed_url(url)});
    }
    http_teacher(const http_teacher&) = delete;
    http_teacher& operator=(const http_teacher&) = delete;

    const http_settings& settings() const { return settings_; }
    http_metrics metrics() const {
        const std::lock_guard lock(mutex_);
        return metrics_;
    }

    /// Throws invalid_input for a sequence that no request could have, before anything is sent.
    std::vector<outcome> score(std::span<const sequence> sequences, std::stop_token stop = {}) {
        for (std::size_t i = 0; i < sequences.size(); ++i)
            detail::check_sequence(sequences[i], settings_.what, static_cast<index_t>(i));
        call c{sequences, std::vector<outcome>(sequences.size()), std::vector<time>(sequences.size())};
        std::vector<std::size_t> group;
        const auto add = [&] {
            if (!group.empty()) c.due.emplace(time::min(), std::exchange(group, {}));
        };
        for (std::size_t i = 0; i < sequences.size(); ++i) {
            if (detail::first_scored(sequences[i]) >= static_cast<index_t>(sequences[i].tokens.size())) {
                c.outcomes[i].scores = nothing_of(sequences[i]); // no server is needed to say so
                continue;
            }
            ++c.open;
            group.push_back(i);
            if (static_cast<index_t>(group.size()) == settings_.batch) add();
        }
        add();
        if (c.open > 0) run(c, stop);
        return std::move(c.outcomes);
    }

private:
    using clock = detail::http_clock;
    using time = detail::http_time;

    struct replica {
        std::string url;
        detail::base_url at;
        int under_way = 0, failed_in_row = 0, quarantines_in_row = 0;
        time quarantined_until = time::min();
    };
    /// A request under way.
    struct flight {
        std::shared_ptr<httplib::Client> client;
        time limit;                                      // total deadline of its first sequence
        std::atomic<failure> broken_off = failure::none; // timed_out or cancelled
    };
    /// A call of score(); guarded by mutex_.
    struct call {
        std::span<const sequence> sequences;
        std::vector<outcome> outcomes;
        std::vector<time> first_try;
        std::multimap<time, std::vector<std::size_t>> due = {};
        std::vector<std::shared_ptr<flight>> flights = {};
        std::size_t open = 0; // sequences without an outcome
        int threads = 0;      // that run
        bool stopped = false;
    };
    struct reply : detail::http_reply {
        std::vector<answer> answers = {}; // where why is none
    };

    static time after(time t, double seconds) { return detail::after(t, seconds); }
    static double seconds_between(time a, time b) { return detail::seconds_between(a, b); }
    scores nothing_of(const sequence& s) const {
        detail::answer_reader at{settings_.dialect};
        detail::score_sheet sheet(s, settings_.what, at);
        for (index_t t = 0; t < s.scored(); ++t) sheet.nothing();
        return sheet.take();
    }

    /// On the caller's thread: starts workers, and breaks off what takes too long.
    void run(call& c, const std::stop_token& stop) {
        const auto threads = std::min<std::size_t>(c.due.size(), static_cast<std::size_t>(settings_.concurrency));
        std::vector<std::jthread> workers;
        {
            const std::stop_callback on_stop(stop, [&] {
                {
                    const std::lock_guard lock(mutex_);
                    c.stopped = true;
                }
                changed_.notify_all();
            });
            std::unique_lock lock(mutex_); // workers begin when all are there
            for (std::size_t i = 0; i < threads; ++i) {
                try {
                    workers.emplace_back([this, &c] { work(c); });
                } catch (const std::system_error&) { // no more threads to be had: fewer will do
                    if (i == 0) throw;
                    break;
                }
                ++c.threads;
            }
            while (c.threads > 0) {
                const time now = clock::now();
                time next = time::max();
                std::vector<std::shared_ptr<httplib::Client>> to_stop;
                for (const auto& f : c.flights) {
                    const failure why = c.stopped ? failure::cancelled : failure::timed_out;
                    if (!c.stopped && f->limit > now) {
                        next = std::min(next, f->limit);
                        continue;
                    }
                    failure none = failure::none;
                    f->broken_off.compare_exchange_strong(none, why);
                    to_stop.push_back(f->client);
                    next = std::min(next, after(now, 0.02)); // again, if it was about to connect
                }
                if (!to_stop.empty()) {
                    lock.unlock(); // stop() waits for a connection in the making
                    for (const auto& client : to_stop) client->stop();
                    lock.lock();
                    if (c.threads == 0) break;
                }
                if (next == time::max())
                    changed_.wait(lock);
                else
                    changed_.wait_until(lock, next);
            }
        }
        workers.clear();
        const std::lock_guard lock(mutex_);
        for (outcome& o : c.outcomes)
            if (!o.scores && o.why == failure::none)
                o.why = failure::cancelled, o.text = "cancelled before it was sent";
        for (const auto& [when, group] : c.due)
            for (const std::size_t i : group) {
                if (c.outcomes[i].why != failure::cancelled)
                    c.outcomes[i].text.insert(0, "cancelled; before that: "), c.outcomes[i].why = failure::cancelled;
                ++metrics_.given_up;
            }
    }

    /// One thread of a call.
    void work(call& c) {
        detail::block_sigpipe();
        std::map<std::size_t, std::shared_ptr<httplib::Client>> clients;
        std::unique_lock lock(mutex_);
        while (c.open > 0 && !c.stopped) {
            const time now = clock::now();
            if (c.due.empty() || under_way_ >= settings_.concurrency) {
                changed_.wait(lock);
                continue;
            }
            const auto first = c.due.begin();
            if (first->first > now) {
                const time when = first->first; // the entry may be another's by then
                changed_.wait_until(lock, when);
                continue;
            }
            const std::vector<std::size_t> group = std::move(first->second);
            c.due.erase(first);
            const std::size_t r = pick(now);
            const auto f = std::make_shared<flight>();
            f->limit = time::max();
            for (const std::size_t i : group) {
                if (c.outcomes[i].tries++ == 0) c.first_try[i] = now;
                c.outcomes[i].url = replicas_[r].url;
                f->limit = std::min(f->limit, after(c.first_try[i], settings_.total_seconds));
            }
            ++under_way_, ++replicas_[r].under_way, ++metrics_.requests;
            auto& client = clients[r];
            if (!client) client = detail::new_client(replicas_[r].at);
            f->client = client;
            c.flights.push_back(f);
            lock.unlock();
            changed_.notify_all(); // there is a limit to watch
            reply answer = ask(c, group, *f, replicas_[r].at);
            lock.lock();
            c.flights.erase(std::find(c.flights.begin(), c.flights.end(), f));
            --under_way_, --replicas_[r].under_way;
            if (answer.why != failure::none) client.reset(); // a new connection next time
            settle(c, group, r, std::move(answer), now);
            changed_.notify_all();
        }
        --c.threads;
        lock.unlock();
        changed_.notify_all();
    }

    std::size_t pick(time now) {
        const std::size_t n = replicas_.size();
        std::size_t best = n;
        for (std::size_t i = 0; i < n; ++i) {
            const std::size_t r = (next_ + i) % n;
            if (replicas_[r].quarantined_until <= now &&
                (best == n || replicas_[r].under_way < replicas_[best].under_way))
                best = r;
        }
        if (best == n) // all are: the first to come back
            best = static_cast<std::size_t>(std::min_element(replicas_.begin(), replicas_.end(),
                                                             [](const replica& a, const replica& b) {
                                                                 return a.quarantined_until < b.quarantined_until;
                                                             }) -
                                            replicas_.begin());
        next_ = (best + 1) % n;
        return best;
    }

    /// Without the lock.
    reply ask(const call& c, const std::vector<std::size_t>& group, flight& f, const detail::base_url& at) const {
        std::vector<sequence> some;
        for (const std::size_t i : group) some.push_back(c.sequences[i]);
        const request q = request_of(settings_.dialect, some, settings_.what);
        std::string body;
        reply r;
        static_cast<detail::http_reply&>(r) = detail::exchange(
            *f.client, at,
            {.path = q.path,
             .body = q.body,
             .api_key = settings_.api_key,
             .connect_seconds = std::clamp(seconds_between(clock::now(), f.limit), 0.001, settings_.connect_seconds),
             .read_seconds = settings_.read_seconds,
             .most_bytes = settings_.most_answer_bytes},
            f.broken_off, [&](const char* p, std::size_t n) {
                body.append(p, n);
                return true;
            });
        if (r.why == failure::none) try {
                r.answers = decode(settings_.dialect, body, some, settings_.what);
            } catch (const std::exception& e) { // serve::bad_answer, or no memory
                r.why = failure::bad_answer, r.text = e.what();
            }
        return r;
    }

    /// What becomes of a request's sequences and its replica. With the lock.
    void settle(call& c, const std::vector<std::size_t>& group, std::size_t r, reply got, time begin) {
        const time now = clock::now();
        metrics_.busy_seconds += seconds_between(begin, now);
        metrics_.sent_bytes += static_cast<std::int64_t>(got.sent);
        metrics_.received_bytes += static_cast<std::int64_t>(got.received);
        std::vector<std::size_t> again;
        double wait = got.retry_after;
        failure worst = got.why;
        for (std::size_t j = 0; j < group.size(); ++j) {
            const std::size_t i = group[j];
            outcome& o = c.outcomes[i];
            o.seconds = seconds_between(c.first_try[i], now);
            const std::string before = o.text; // of the try before
            if (got.why == failure::none && !wrong_with(got.answers[j], c.sequences[i], o.text)) {
                o.scores = std::move(got.answers[j].scores);
                metrics_.tokens += static_cast<std::int64_t>(o.scores->log_q.size()) - o.scores->missing();
                ++metrics_.scored, --c.open;
                continue;
            }
            o.why = got.why == failure::none ? failure::bad_answer : got.why;
            if (got.why != failure::none) o.text = got.text;
            worst = o.why;
            if (o.why == failure::refused && group.size() > 1) { // one of them: which?
                --o.tries;
                c.due.emplace(now, std::vector<std::size_t>{i});
                continue;
            }
            const double pause = std::max(got.retry_after, detail::backoff_of(settings_, o.tries, i));
            const bool late = after(now, pause) >= after(c.first_try[i], settings_.total_seconds);
            if (o.why == failure::refused || o.why == failure::cancelled || o.tries >= settings_.tries || late) {
                const bool other = o.tries > 1 && before != o.text;
                if (o.tries > 1 || late) o.text.append(late ? "; no time is left" : "").append(tried(o.tries));
                if (other) o.text.append("; the try before: ").append(before);
                ++metrics_.given_up, --c.open;
                continue;
            }
            ++metrics_.retries;
            again.push_back(i), wait = std::max(wait, pause);
        }
        if (!again.empty()) c.due.emplace(after(now, wait), std::move(again));
        ++metrics_.failures[static_cast<int>(worst)];
        judge(replicas_[r], got.why != failure::none ? got.why : worst, now);
    }
    static std::string tried(int tries) { return "; given up after " + std::to_string(tries) + " tries"; }
    bool wrong_with(const answer& a, const sequence& s, std::string& text) const {
        if (a.wrong) text = a.wrong->what();
        if (a.wrong || !settings_.whole) return a.wrong.has_value();
        for (std::size_t t = static_cast<std::size_t>(s.from == 0 ? 1 : 0); t < a.scores.scored.size(); ++t)
            if (a.scores.scored[t] == 0) {
                text = "token " + std::to_string(s.from + static_cast<index_t>(t)) + " was not scored";
                return true;
            }
        return false;
    }
    void judge(replica& r, failure why, time now) {
        if (why == failure::none || why == failure::refused) { // it answers
            r.failed_in_row = r.quarantines_in_row = 0;
            r.quarantined_until = time::min();
        } else if (why != failure::overloaded && why != failure::cancelled &&
                   ++r.failed_in_row >= settings_.quarantine_after) {
            r.quarantined_until =
                after(now, settings_.quarantine_seconds * std::ldexp(1.0, std::min(r.quarantines_in_row, 5)));
            r.failed_in_row = settings_.quarantine_after - 1; // one failure more sends it back
            ++r.quarantines_in_row, ++metrics_.quarantines;
        }
    }

    const http_settings settings_;
    mutable std::mutex mutex_; // of all that follows, and of calls under way
    std::condition_variable changed_;
    std::vector<replica> replicas_;
    std::size_t next_ = 0;
    int under_way_ = 0;
    http_metrics metrics_;
};

} // namespace opd::serve
