// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the scheduler's process and a worker's process say to each other, and one end of a session between them. State
// machines without a clock, a thread or a socket: remote_driver.hpp and remote_worker.hpp drive them, a transport of
// yours carries the frames. A transport may lose, double, delay, reorder and damage them.
//
//   frame = head, body, checksum
//   worker to scheduler   hello   asks for session `number` of this process; body: slots. Said until it is answered
//                         bye     this session is over, the worker leaves
//   scheduler to worker   welcome session `number` is life `life` of the worker
//                         gone    that session is over, or is none of this scheduler's; begin another
//                         over    the run is finished: nobody is wanted any more
//   both                  data    `number` counts data frames from 1 in each direction of a session, 0: a heartbeat;
//                                 `heard` acknowledges all up to it; body: parts of messages
//   a part = 32 bits (twice its length, plus 1 if its message ends there), bytes
//
// A session is named by epoch (the life of the scheduler's process), stage, worker and life; data of another session
// counts for nothing. Within one, messages arrive once each and in their order: frames are sent again after `resend`
// seconds until they are acknowledged, what comes twice or too early is dropped. A message of any length up to a limit
// travels in parts, small ones travel together.
//
// Memory: a session holds at most `message` + `frame` bytes of what it receives, and `waiting` of what it sends; who
// does not take what is sent is given up. What a frame says of lengths is checked against its own before anything is
// allocated.
//
// Errors: invalid_input: `frame` where bytes are none, `message` where one is too long or its parts contradict the
// limits; an option by its name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "opd/error.hpp"
#include "opd/sched/archive.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// Times, in seconds, and limits of sessions. Give both ends the same.
struct remote_options {
    double beat = 1;     ///< seconds after which a side that has nothing to say says so
    double silence = 5;  ///< seconds without a word after which the other side counts as gone
    double resend = 0.5; ///< seconds without acknowledgement after which a frame is sent again: above a round trip
    std::uint32_t frame = 256 << 10;   ///< most bytes of a frame
    std::uint64_t message = 64 << 20;  ///< most bytes of a command or a reply
    std::uint64_t waiting = 256 << 20; ///< most bytes that a session has to send and were not acknowledged
    std::uint32_t window = 64;         ///< most frames under way in a session
    std::int32_t peers = 4096;         ///< most processes that the scheduler's keeps track of
    std::int32_t save_every = 1;       ///< steps from one snapshot to the next; 0: none is made

    void check() const {
        if (!(resend > 0 && resend < silence)) throw invalid_input("resend", "must be positive, and less than silence");
        if (!(beat > 0 && beat < silence && silence < forever))
            throw invalid_input("beat", "must be positive, and less than silence, which is finite");
        if (frame < 256 || frame > (1u << 30)) throw invalid_input("frame", "must lie in [256, 2^30]");
        if (message < 64) throw invalid_input("message", "must be at least 64");
        if (waiting < message) throw invalid_input("waiting", "must be at least message, or none could be sent");
        if (window < 1) throw invalid_input("window", "must be at least 1");
        if (peers < 1) throw invalid_input("peers", "must be at least 1");
        if (save_every < 0) throw invalid_input("save_every", "must be at least 0");
    }
};

/// Where a payload is, for stages that hand theirs on directly: the scheduler's process sees this name, and not the
/// bytes. A stage stores what it made, answers with the name, and the next one fetches it from there. What is named
/// outlives the process that made it (a file, an object store), or the sequence is drawn again: who cannot fetch it
/// throws lost_payloads (stages.hpp).
struct payload_ref {
    static constexpr std::size_t longest = 512; ///< bytes of a name
    std::string where = {};
    std::uint64_t bytes = 0, checksum = 0; ///< of what is there

    bool operator==(const payload_ref&) const = default;
    template <class A>
    void fields(A& a) {
        a(where, bytes, checksum);
        detail::needs(where.size() <= longest, "the name of a payload is too long");
    }
};

/// What a frame is, as the table above has it.
enum class remote_kind : std::uint8_t { hello, welcome, data, gone, bye, over };
constexpr remote_kind last_of(remote_kind) { return remote_kind::over; }

/// A frame but for its body.
struct remote_head {
    remote_kind what = remote_kind::data;
    sched::stage stage = sched::stage::rollout;
    std::int32_t worker = -1;
    incarnation_t life = 0;
    std::uint64_t epoch = 0;  ///< of the scheduler's process, higher each time that it starts
    std::uint64_t number = 0; ///< data: of the frame; else of the session, as its worker counts them
    std::uint64_t heard = 0;  ///< data: all frames up to this one have come
    template <class A>
    void fields(A& a) {
        a(what, stage, worker, life, epoch, number, heard);
    }
    bool operator==(const remote_head&) const = default;
};

/// A frame whose checksum and lengths were right. Its body dies with the bytes that it was read from.
struct remote_frame {
    remote_head head;
    std::string_view body; ///< within the bytes that it was read from
};

/// What a frame says beside messages' own text.
enum class remote_word : std::uint8_t {
    content,  ///< a command or a reply follows
    keep_from ///< a job follows: what lower jobs have published nobody needs
};
constexpr remote_word last_of(remote_word) { return remote_word::keep_from; }

namespace detail {
inline constexpr std::string_view remote_mark = "opdrem01"; // the digits count the formats
inline constexpr std::size_t remote_head_bytes = 8 + 1 + 1 + 4 + 4 + 8 + 8 + 8, remote_rest = remote_head_bytes + 8;
} // namespace detail

/// The bytes of a frame.
inline std::string frame_bytes(const remote_head& head, std::string_view body = {}) {
    archive_writer out;
    out.bytes.reserve(detail::remote_rest + body.size());
    out.bytes += detail::remote_mark;
    out(head);
    out.bytes += body;
    out(detail::checksum(out.bytes));
    return std::move(out.bytes);
}

/// Throws invalid_input `frame` where `bytes` are not what frame_bytes() returned, or too many.
inline remote_frame read_frame(std::string_view bytes, std::size_t most) {
    const auto refuse = [](const char* why) { throw invalid_input("frame", why); };
    if (bytes.size() > most) refuse("is longer than any may be");
    if (bytes.size() < detail::remote_rest) refuse("ends too early");
    if (bytes.substr(0, detail::remote_mark.size()) != detail::remote_mark)
        refuse("is none of this library, or of another version of it");
    std::uint64_t sum = 0;
    std::memcpy(&sum, bytes.data() + bytes.size() - sizeof sum, sizeof sum);
    if (sum != detail::checksum(bytes.substr(0, bytes.size() - sizeof sum))) refuse("is damaged: its checksum differs");
    remote_frame f;
    archive_reader in(bytes.substr(detail::remote_mark.size(), detail::remote_head_bytes - detail::remote_mark.size()));
    try {
        in(f.head);
    } catch (const invalid_input&) {
        refuse("is of no kind");
    }
    f.body = bytes.substr(detail::remote_head_bytes, bytes.size() - detail::remote_rest);
    return f;
}

/// One end of a session: numbers what it sends, sends it again until it is acknowledged, and puts together what comes.
class remote_link {
public:
    explicit remote_link(const remote_options& o) : o_(o) {}

    /// Appends a message to what is to be sent.
    void post(std::string_view message) {
        if (message.size() > o_.message)
            throw invalid_input("message", "has " + std::to_string(message.size()) +
                                               " bytes, more than options.message = " + std::to_string(o_.message));
        waiting_ += message.size();
        const std::size_t most = o_.frame - detail::remote_rest;
        do {
            if (open_.size() + 64 > most) close(); // no parts of a few bytes
            const std::size_t n = std::min(message.size(), most - open_.size() - sizeof(std::uint32_t));
            const auto size = static_cast<std::uint32_t>(n << 1 | (n == message.size()));
            open_.append(reinterpret_cast<const char*>(&size), sizeof size).append(message.substr(0, n));
            open_content_ += n;
            message.remove_prefix(n);
        } while (!message.empty());
    }
    /// Whether more waits than may: the other side does not take it.
    bool clogged() const { return waiting_ > o_.waiting; }
    /// Everything that was posted has been acknowledged.
    bool settled() const { return out_.empty() && open_.empty(); }
    /// When flush() must be called again.
    double due() const {
        if (!open_.empty() || (sent_ < out_.size() && sent_ < o_.window)) return -forever;
        double t = std::min(ack_at_, spoke_ + o_.beat);
        if (sent_ > 0) t = std::min(t, out_.front().sent + o_.resend);
        return t;
    }
    /// Sends what is due: send(number, heard, body).
    template <class Send>
    void flush(double now, Send&& send) {
        if (!open_.empty()) close();
        if (sent_ > 0 && out_.front().sent + o_.resend <= now) {
            resent_ += sent_;
            sent_ = 0;
        }
        const bool silent = sent_ >= out_.size() || sent_ >= o_.window;
        for (; sent_ < out_.size() && sent_ < o_.window; ++sent_) {
            out_[sent_].sent = now;
            highest_ = std::max(highest_, out_[sent_].number);
            send(out_[sent_].number, heard_, std::string_view(out_[sent_].body));
        }
        if (silent && ack_at_ > now && spoke_ + o_.beat > now) return;
        if (silent) send(std::uint64_t{0}, heard_, std::string_view{});
        spoke_ = now;
        ack_at_ = forever;
        unacknowledged_ = 0;
    }
    /// Takes a data frame: deliver(message) for each that is complete, until it says false. Throws invalid_input
    /// `message` where the other end does what none of this library does.
    template <class Deliver>
    void take(const remote_frame& f, double now, Deliver&& deliver) {
        if (f.head.heard > highest_) throw invalid_input("message", "a frame is acknowledged that was not sent");
        for (; !out_.empty() && out_.front().number <= f.head.heard; out_.pop_front()) {
            waiting_ -= out_.front().content;
            sent_ -= sent_ > 0;
        }
        if (f.head.number == 0) return;
        if (f.head.number != heard_ + 1) {
            ++(f.head.number <= heard_ ? repeated_ : early_);
            ack_at_ = now; // it does not know
            return;
        }
        heard_ = f.head.number;
        ack_at_ = ++unacknowledged_ * 4 > o_.window ? now : std::min(ack_at_, now + o_.resend / 4);
        for (std::string_view rest = f.body; !rest.empty();) {
            std::uint32_t size = 0;
            if (rest.size() < sizeof size) throw invalid_input("message", "a part ends too early");
            std::memcpy(&size, rest.data(), sizeof size);
            rest.remove_prefix(sizeof size);
            const bool last = size & 1;
            size >>= 1;
            if (size > rest.size()) throw invalid_input("message", "a part exceeds its frame");
            if (size > o_.message - partial_.size()) throw invalid_input("message", "is longer than any may be");
            const std::string_view part = rest.substr(0, size);
            rest.remove_prefix(size);
            if (!last) {
                partial_ += part;
                continue;
            }
            if (partial_.empty()) {
                if (!deliver(part)) return;
                continue;
            }
            const std::string whole = std::exchange(partial_, {}).append(part);
            if (!deliver(std::string_view(whole))) return;
        }
    }
    std::uint64_t repeated() const { return repeated_; } ///< frames that came again
    std::uint64_t early() const { return early_; }       ///< frames that came before one that was sent before
    std::uint64_t resent() const { return resent_; }     ///< frames sent again

private:
    struct frame {
        std::uint64_t number = 0;
        std::string body;
        std::uint64_t content = 0; // bytes of messages
        double sent = 0;
    };
    void close() { out_.push_back({next_++, std::exchange(open_, {}), std::exchange(open_content_, 0), 0}); }

    remote_options o_;
    // out
    std::string open_; // the frame that is being filled
    std::uint64_t open_content_ = 0;
    std::deque<frame> out_; // not acknowledged; the first sent_ of them are under way
    std::size_t sent_ = 0;
    std::uint64_t next_ = 1, highest_ = 0, resent_ = 0;
    std::uint64_t waiting_ = 0; // bytes of messages in open_ and out_
    double spoke_ = -forever;
    // in
    std::uint64_t heard_ = 0, repeated_ = 0, early_ = 0;
    std::uint64_t unacknowledged_ = 0;
    double ack_at_ = forever;
    std::string partial_;
};

} // namespace opd::sched
