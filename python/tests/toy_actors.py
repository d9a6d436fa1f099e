# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stages that cost next to nothing and prove what was learnt: weights are a hash, each token is drawn from it, a score
is a hash of the tokens, and the next weights are a hash of those before and of each sequence of the batch. The learner
writes down what each weights were made of; check_line() follows that back from the last and computes it again."""

import logging
import os
import time

MASK = (1 << 64) - 1
FIRST = 1  # the hash of weights 0


def mix(a, b):
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def score_of(tokens):
    score = 7
    for token in tokens:
        score = mix(score, token)
    return score


class Rollout:
    """Draws one token of every running sequence a step; of sequence s there are 1 + s % longest."""

    def __init__(self, longest=7, quantum=0.0):
        self.longest, self.quantum = longest, quantum
        self.hash, self.version, self.running = FIRST, 0, {}

    def install(self, weights, version):
        self.hash, self.version = weights, version

    def start(self, ticket):
        self.running[ticket] = ([], [])

    def abort(self, ticket):
        del self.running[ticket]

    def drawn(self, ticket):
        return len(self.running[ticket][0])

    def step(self):
        time.sleep(self.quantum)
        finished = []
        for ticket, (tokens, versions) in list(self.running.items()):
            tokens.append(mix(mix(self.hash, ticket.sample), len(tokens)))
            versions.append(self.version)
            if len(tokens) == 1 + ticket.sample % self.longest:
                del self.running[ticket]
                n = len(versions)
                finished.append((ticket, tokens, (versions[0], versions[-1], sum(versions) / n, n)))
        return finished


class Teacher:
    def __init__(self, quantum=0.0):
        self.quantum = quantum

    def score(self, payloads):
        time.sleep(self.quantum)
        return [score_of(tokens) for tokens in payloads]


class Learner:
    """`folder`: where it writes one file for each weights; None: nowhere."""

    def __init__(self, folder=None, quantum=0.0):
        self.folder, self.quantum, self.hash = folder, quantum, FIRST

    def train(self, items, version):
        time.sleep(self.quantum)
        before, lines = self.hash, []
        for i in items:
            if i.score != score_of(i.payload):
                raise ValueError("a score is of another response")
            self.hash = mix(mix(self.hash, i.ticket.sample), i.score)
            lines.append(f"{i.ticket.sample} {i.start} {i.score}\n")
        if self.folder is not None:
            half = os.path.join(self.folder, f"{self.hash}.{os.getpid()}")
            with open(half, "w") as file:
                file.write(f"{before} {version}\n" + "".join(lines))
            os.replace(half, os.path.join(self.folder, str(self.hash)))

    def weights(self):
        return self.hash

    def state(self):
        return self.hash

    def load(self, state):
        self.hash = state


def prepare_ray():
    """Processes of a Ray that starts after this find the package and the tests."""
    logging.getLogger("opd.ray").setLevel(logging.CRITICAL)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    os.environ["RAY_worker_niceness"] = "0"  # its workers are nice by 15, else: on a busy machine they never start


def start_ray(ray, address=None):
    prepare_ray()
    more = {"address": address} if address else {"num_cpus": 4, "include_dashboard": False}
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **more)


def check_line(folder, last, batch, tau):
    """Steps, sequences and the largest lag along the line that ends in `last`."""
    seen, steps, largest, at, version = set(), 0, 0, last, None
    while at != FIRST:
        with open(os.path.join(folder, str(at))) as file:
            before, made = map(int, file.readline().split())
            consumed = [tuple(map(int, line.split())) for line in file]
        assert version in (None, made + 1), f"version {version} was made of version {made}"
        hash_ = before
        for sample, start, score in consumed:
            assert sample not in seen, f"sequence {sample} was learnt from twice"
            seen.add(sample)
            lag = made - 1 - start
            assert 0 <= lag <= tau, f"sequence {sample} was learnt from {lag} versions late"
            largest = max(largest, lag)
            hash_ = mix(mix(hash_, sample), score)
        assert hash_ == at, "weights are not what they were made of"
        assert consumed == sorted(consumed) and len(consumed) <= batch
        version, at, steps = made, before, steps + 1
    assert version in (None, 1)
    return steps, seen, largest
