// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The readers of snapshots of the scheduler and of the staleness queue. Bytes as they come; and, since the checksum
// refuses nearly all of those, snapshots of running worlds with numbers changed and sealed again, so that the readers'
// own checks are reached. Either a snapshot is refused by invalid_input, or what it made keeps every invariant whatever
// happens to it next.
#include <deque>

#include "fuzz/damage.hpp"
#include "fuzz/player.hpp"
#include "opd/sched/staleness_queue.hpp"

namespace {

using namespace opd::fuzz;
namespace sched = opd::sched;
using opd::index_t;

void scheduler(choices& c) {
    const auto& all = moments();
    const moment& m = all[c.bytes(2) % all.size()];
    sched::settings how = m.how;
    if (c.once_in(4)) how.sequences = 2 * c.below(20), how.rollout_attempts = 1, how.teacher_batch = 1;
    std::string bytes = m.bytes;
    const bool damaged = c.once_in(16);
    if (damaged)
        damage(c, bytes);
    else
        nudge(c, bytes);
    std::optional<sched::scheduler> read;
    try {
        read = sched::scheduler::restore(how, sched::seal(bytes));
    } catch (const opd::invalid_input& e) {
        need(bytes != m.bytes, "a snapshot is refused");
        return need(e.argument == "snapshot", "a snapshot is refused by another name");
    }
    const std::string again = read->snapshot();
    need(sched::scheduler::restore(how, again).snapshot() == again, "a snapshot that was restored is another one");
    player p = m.then;
    p.replace(std::move(*read), c.below(2) != 0, c);
    for (int events = 0; events < 60 && p.step(c); ++events) {}
    p.s.for_each([&](const sched::outstanding_sequence& q) {
        need(p.s.start_of(q.ticket) == q.start, "a sequence has two starts");
    });
}

// --- the queue

using queue = sched::staleness_queue<std::string>;

/// A queue with its producers and its learner, one thread for all of them.
class queue_player {
public:
    explicit queue_player(const sched::queue_options& o) : options_(o), q_(std::make_unique<queue>(o)) {}
    queue_player(const sched::queue_options& o, std::string_view bytes)
        : options_(o), q_(std::make_unique<queue>(o, bytes, [](sched::archive_reader& from) {
              std::string x;
              from(x);
              return x;
          })) {}

    std::string snapshot() const {
        return q_->snapshot([](sched::archive_writer& to, const std::string& x) { to(x); });
    }
    template <class Choices>
    void step(Choices& c) {
        switch (c.below(8)) {
        case 0:
        case 1:
            if (sched::permit p = q_->try_acquire()) held_.push_back(std::move(p));
            break;
        case 2:
        case 3:
        case 4:
            if (!held_.empty()) {
                const auto at = held_.begin() + c.below(static_cast<std::int64_t>(held_.size()));
                if (q_->push(*at, std::string(1 + static_cast<std::size_t>(c.below(30)), 'x')) ==
                    sched::push_result::queued)
                    held_.erase(at);
                else if (update_ || q_->aborted() || !at->restart())
                    held_.erase(at);
            }
            break;
        case 5:
            if (!batch_ && !update_) batch_ = q_->try_pop();
            if (batch_)
                for (const std::string& x : *batch_) need(x.size() < 1000, "an item of another length");
            break;
        case 6:
            if (batch_) {
                if (c.once_in(8)) {
                    batch_.reset();
                } else {
                    update_.emplace(std::move(*batch_).trained());
                    batch_.reset();
                }
            } else if (update_) {
                for (auto& x : std::move(*update_).synchronised())
                    if (x.permit) held_.push_back(std::move(x.permit));
                update_.reset();
            }
            break;
        default:
            if (!held_.empty() && c.once_in(4)) held_.pop_back();
            if (c.once_in(32)) q_->close();
            if (c.once_in(32)) q_->abort();
        }
        const auto n = q_->counts();
        need(n.acquired == n.consumed + n.returned + n.dropped + n.discarded + n.outstanding, "a permit is lost");
    }
    const sched::queue_options& options() const { return options_; }

private:
    sched::queue_options options_;
    std::unique_ptr<queue> q_;
    std::deque<sched::permit> held_;
    std::optional<queue::batch> batch_;
    std::optional<queue::update> update_;
};

struct queue_moment {
    sched::queue_options how;
    std::string bytes;
};
const std::vector<queue_moment>& queue_moments() {
    static const std::vector<queue_moment> all = [] {
        std::vector<queue_moment> r;
        for (int p = 0; p <= static_cast<int>(last_of(sched::staleness_policy{})); ++p)
            for (std::uint64_t run = 0; run < 4; ++run) {
                sched::queue_options o{.batch = 2,
                                       .schedule = {.tau = 2,
                                                    .policy = static_cast<sched::staleness_policy>(p),
                                                    .negative_control = true}};
                queue_player q(o);
                random_choices c(run);
                for (int step = 0; step < 80; ++step) {
                    q.step(c);
                    if (step % 16 == 15) r.push_back({o, std::string(sched::unseal(q.snapshot()))});
                }
            }
        return r;
    }();
    return all;
}

void staleness_queue(choices& c) {
    const auto& all = queue_moments();
    const queue_moment& m = all[c.bytes(1) % all.size()];
    std::string bytes = m.bytes;
    if (c.once_in(8))
        damage(c, bytes);
    else
        nudge(c, bytes);
    std::optional<queue_player> q;
    try {
        q.emplace(m.how, sched::seal(bytes));
    } catch (const opd::invalid_input& e) {
        need(bytes != m.bytes, "a queue's snapshot is refused");
        return need(e.argument == "snapshot", "a queue's snapshot is refused by another name");
    }
    need(q->snapshot() == sched::seal(bytes), "a queue that was restored is another one");
    for (int steps = 0; steps < 60 && !c.done(); ++steps) {
        q->step(c);
        queue_player(m.how, q->snapshot()); // which checks the state
    }
}

/// As they are, and as what somebody sealed.
void any_bytes(choices& c) {
    const sched::settings how = moments()[c.bytes(2) % moments().size()].how;
    const sched::queue_options queue_how = queue_moments()[c.bytes(1) % queue_moments().size()].how;
    for (const std::string& bytes : {std::string(c.rest()), sched::seal(std::string(c.rest()))}) {
        try {
            sched::scheduler::restore(how, bytes);
        } catch (const opd::invalid_input&) {}
        try {
            queue_player(queue_how, bytes);
        } catch (const opd::invalid_input&) {}
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    switch (c.below(8)) {
    case 0:
        any_bytes(c);
        break;
    case 1:
    case 2:
        staleness_queue(c);
        break;
    default:
        scheduler(c);
    }
    return 0;
}
