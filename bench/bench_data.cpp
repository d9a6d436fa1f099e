// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Data sets beside what the disk gives: rows of a support of 64 ids, as given (int32, float: 516 bytes a token) and
// packed (17 bits, half: 266), written and read whole, in a folder of the file system that is asked about. In the same
// run, in turns, the same bytes through write() and read() in blocks of 1 MiB, as `dd bs=1M conv=fsync` does: that is
// `plain`. A set syncs every shard, and the index and the folder after it: so `synced` is plain in files of 64 MiB,
// each of them synced.
//
//   bench_data [folder] [MiB] [turns]                     prints a table, and no JSON
//
//   write     rollout_writer: checks, packs, checksums, syncs and names every shard of 64 MiB
//   cold      a set that the page cache does not have (POSIX_FADV_DONTNEED), in the order it lies in; every checksum compared
//   warm      one that it has; every checksum compared
//   shuffled  warm, single sequences in a random order
//
// MB/s of medians, and the ratio to plain. Then the resident memory, with sets of one, two and four times the size:
// most_mapped = 2, so that it cannot be the page cache's.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"

namespace {

using namespace opd;
namespace fs = std::filesystem;
constexpr index_t k = 64, rows = 1024, vocab = 100000;
constexpr std::size_t block = std::size_t{1} << 20;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double megabytes_of(const std::string& folder) {
    double bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder)) bytes += double(fs::file_size(entry.path()));
    return bytes / 1e6;
}
double resident_mib() {
    std::ifstream in("/proc/self/statm");
    double all = 0, resident = 0;
    in >> all >> resident;
    return resident * double(::sysconf(_SC_PAGESIZE)) / double(1 << 20);
}
void drop(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY);
    if (fd < 0 || ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) std::abort();
    ::close(fd);
}
void drop_all(const std::string& folder) {
    for (const auto& entry : fs::directory_iterator(folder)) drop(entry.path().string());
}
template <class F>
double seconds(F&& f) {
    const double begin = now();
    f();
    return now() - begin;
}

// --- plain ----------------------------------------------------------------------------------------------------------------

std::vector<char> some_bytes(block, 'x');

void write_plain(const std::string& path, double megabytes) {
    ::unlink(path.c_str());
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    for (double left = megabytes * 1e6; left > 0; left -= double(block))
        if (::write(fd, some_bytes.data(), block) != ssize_t(block)) std::abort();
    if (::fsync(fd) != 0) std::abort();
    ::close(fd);
}
void write_synced(const std::string& path, double megabytes) {
    for (double left = megabytes; left > 0; left -= 67.1) write_plain(path, std::min(left, 67.1));
}
void read_plain(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY);
    while (::read(fd, some_bytes.data(), block) > 0) {}
    ::close(fd);
}

// --- sets -----------------------------------------------------------------------------------------------------------------

void write_set(const std::string& folder, index_t sequences, bool packed) {
    static std::vector<std::int32_t> tokens(rows), ids(rows * k);
    static std::vector<float> log_q(rows * k), tail(rows, -3);
    for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = std::int32_t(i * 7919 % vocab), log_q[i] = -float(i % 1000) / 100;
    fs::remove_all(folder);
    data::rollout_writer out(
        folder,
        {.vocab = vocab, .id_bits = packed ? 17 : 0, .log_probs = packed ? data::dtype::f16 : data::dtype::f32});
    for (index_t s = 0; s < sequences; ++s)
        out.add({.tokens = tokens, .rows = rows, .sample = s},
                teacher::support{view(std::as_const(ids).data(), rows, k), view(std::as_const(log_q).data(), rows, k),
                                 view(std::as_const(tail).data(), rows)});
    out.finish();
}
template <class L>
double read_set(const std::string& folder, data::shuffle how, index_t at_once, std::size_t most_mapped = 16) {
    const data::rollout_set set(folder, {.most_mapped = most_mapped});
    data::rollout_reader reader(set, {.shuffle = how, .seed = 1});
    double sum = 0;
    while (data::rollouts some = reader.next(at_once)) {
        const auto c = some.cache<teacher::support<std::int32_t, L>>();
        sum += double(float(c.log_q(0, 0))) + double(c.ids(0, 0)) + double(float(c.log_tail[0])) +
               double(some.tokens()[0]);
    }
    return sum;
}

double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

} // namespace

int main(int argc, char** argv) {
    std::vector<std::string> given; // but what scripts/bench.sh says to Google Benchmark
    for (int i = 1; i < argc; ++i)
        if (argv[i][0] != '-') given.emplace_back(argv[i]);
    const std::string root = (given.size() > 0 ? given[0] : ".") + "/bench_data_files";
    const double mib = given.size() > 1 ? std::atof(given[1].c_str()) : 512;
    const int turns = given.size() > 2 ? std::atoi(given[2].c_str()) : 5;
    fs::create_directories(root);
    for (const bool packed : {false, true}) {
        const double bytes_a_token = packed ? 266.0 + 17.0 / 8 : 520;
        const auto sequences = std::max<index_t>(1, index_t(mib * (1 << 20) / bytes_a_token / double(rows)));
        const std::string set = root + "/set", plain = root + "/plain";
        std::map<std::string, std::vector<double>> times;
        double size = 0, kept = 0;
        const auto read = [&](data::shuffle how, index_t at_once) {
            kept += packed ? read_set<half>(set, how, at_once) : read_set<float>(set, how, at_once);
        };
        for (int turn = 0; turn < turns; ++turn) {
            times["write"].push_back(seconds([&] { write_set(set, sequences, packed); }));
            size = megabytes_of(set);
            times["plain write"].push_back(seconds([&] { write_plain(plain, size); }));
            times["synced"].push_back(seconds([&] { write_synced(plain, size); }));
            drop_all(set);
            times["cold"].push_back(seconds([&] { read(data::shuffle::stored, 1); }));
            write_plain(plain, size);
            drop(plain);
            times["plain cold"].push_back(seconds([&] { read_plain(plain); }));
            times["warm"].push_back(seconds([&] { read(data::shuffle::stored, 1); }));
            times["plain warm"].push_back(seconds([&] { read_plain(plain); }));
            times["shuffled"].push_back(seconds([&] { read(data::shuffle::sequences, 1); }));
        }
        times["plain shuffled"] = times["plain warm"];
        std::printf("%s: %.0f MB, %lld tokens, %.1f bytes a token\n", packed ? "packed" : "as given", size,
                    static_cast<long long>(sequences * rows), size * 1e6 / double(sequences * rows));
        for (const char* what : {"write", "cold", "warm", "shuffled"}) {
            const double ours = median(times[what]), theirs = median(times[std::string("plain ") + what]);
            std::printf("  %-9s %7.0f MB/s   plain %7.0f MB/s   ratio %.2f\n", what, size / ours, size / theirs,
                        theirs / ours);
        }
        std::printf("  write     synced %7.0f MB/s   ratio %.2f\n", size / median(times["synced"]),
                    median(times["synced"]) / median(times["write"]));
        if (kept == 0.5) std::puts("");
    }
    std::printf("resident memory, reading with 2 shards of 64 MiB mapped\n");
    for (const int times : {1, 2, 4}) {
        const index_t sequences = index_t(mib * (1 << 20) / 520.0 / double(rows)) * times / 2;
        write_set(root + "/set", sequences, false);
        const double after_writing = resident_mib();
        read_set<float>(root + "/set", data::shuffle::sequences, 1, 2);
        std::printf("  %10lld tokens   %5.0f MiB after writing   %5.0f MiB after reading\n",
                    static_cast<long long>(sequences * rows), after_writing, resident_mib());
    }
    fs::remove_all(root);
}
