// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Data sets beside what the disk gives: rows of a support of 64 ids, as given (int32, float: 520 bytes a token) and
// packed (17 bits, half: 268), written and read whole, in a folder of the file system that is asked about. In the same
// run, in turns, as many bytes as the set's files have, through write() and read() in blocks of 1 MiB, as
// `dd bs=1M conv=fsync` does: that is `plain`. A set syncs every shard, and the index and the folder after it: so
// `synced` is plain in files of 64 MiB, each of them synced.
//
//   bench_data [folder] [MiB] [turns] [--form=given|packed]     prints a table; --benchmark_out=FILE too
//   bench_data [folder] --tokens=N [--form=…] [--disk=MiB]      one set of N tokens, read while it is written; see
//                                                               below
//
//   write     rollout_writer: checks, packs, checksums, syncs and names every shard of 64 MiB
//   cold      a set that the page cache does not have (POSIX_FADV_DONTNEED), in the order it lies in; every checksum
//             compared
//   warm      one that it has; every checksum compared
//   floats    the same, with half read as float
//   shuffled  warm, single sequences in a random order
//   verify    warm, checksums alone: what a reader that copies nothing could reach
//
// Bytes are those of the files: `MB/s` and both ratios are on the disk's side, of medians and of the best turn.
// `delivered` are the numbers that the caller gave or got, an id as int32. `cpu`: processor seconds a GB of files, of
// all threads, the least of the turns, ours and plain's; it says more than time where others use the machine.
//
// Then the resident memory, with sets of one, two and four times the size: most_mapped = 2, so that it cannot be the
// page cache's.
//
// --tokens: one writer, one set, one index. Whenever half of `--disk` (3,072) was written, a reader opens what the
// index names, reads what is new, compares tokens and some ids with what was written, and gives the shards' blocks back
// to the disk (FALLOC_FL_PUNCH_HOLE: their length stays, and so the set's index). At last the finished set is opened.
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
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "harness.hpp"
#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"

namespace {

using namespace opd;
namespace fs = std::filesystem;
constexpr index_t k = 64, rows = 1024, vocab = 100000;
constexpr std::size_t block = std::size_t{1} << 20;
constexpr double given_bytes = k * 8 + 8, packed_bytes_of_token = k * 17.0 / 8 + k * 2 + 2 + 17.0 / 8;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double megabytes_of(const std::string& folder) {
    double bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder)) bytes += double(fs::file_size(entry.path()));
    return bytes / 1e6;
}
double cpu_now() {
    timespec t{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}
/// MiB of a line of /proc/self/status: "RssAnon:", "RssFile:", "VmRSS:".
double memory_of(const std::string& name) {
    std::ifstream in("/proc/self/status");
    for (std::string line; std::getline(in, line);)
        if (line.starts_with(name)) return std::atof(line.c_str() + name.size()) / 1024;
    return 0;
}
double resident_mib() { return memory_of("VmRSS:"); }
void drop(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY);
    if (fd < 0 || ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) std::abort();
    ::close(fd);
}
void drop_all(const std::string& folder) {
    for (const auto& entry : fs::directory_iterator(folder)) drop(entry.path().string());
}
struct spent {
    double wall = 0, cpu = 0;
};
template <class F>
spent spent_by(F&& f) {
    const double begin = now(), cpu = cpu_now();
    f();
    return {now() - begin, cpu_now() - cpu};
}

// --- plain -----------------------------------------------------------------------------------------------------------

std::vector<char> some_bytes(block, 'x');

void write_plain(const std::string& path, double megabytes) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    for (double left = megabytes * 1e6; left > 0; left -= double(block))
        if (::write(fd, some_bytes.data(), block) != ssize_t(block)) std::abort();
    if (::fsync(fd) != 0) std::abort();
    ::close(fd);
}
void write_synced(const std::string& path, double megabytes) {
    int part = 0;
    for (double left = megabytes; left > 0; left -= 67.1)
        write_plain(path + std::to_string(part++), std::min(left, 67.1));
}
void read_plain(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY);
    while (::read(fd, some_bytes.data(), block) > 0) {}
    ::close(fd);
}

// --- sets ------------------------------------------------------------------------------------------------------------

data::writer_settings settings_of(bool packed) {
    return {.vocab = vocab, .id_bits = packed ? 17 : 0, .log_probs = packed ? data::dtype::f16 : data::dtype::f32};
}
void write_set(const std::string& folder, index_t sequences, bool packed) {
    static std::vector<std::int32_t> tokens(rows), ids(rows * k);
    static std::vector<float> log_q(rows * k), tail(rows, -3);
    for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = std::int32_t(i * 7919 % vocab), log_q[i] = -float(i % 1000) / 100;
    data::rollout_writer out(folder, settings_of(packed));
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

struct measured {
    std::vector<double> wall, cpu;
    void add(const spent& s) { wall.push_back(s.wall), cpu.push_back(s.cpu); }
    double best() const { return *std::min_element(wall.begin(), wall.end()); }
    double least_cpu() const { return *std::min_element(cpu.begin(), cpu.end()); }
};

void table(const std::string& root, double mib, int turns, bool packed, bench::results& out) {
    const auto sequences =
        std::max<index_t>(1, index_t(mib * (1 << 20) / (packed ? packed_bytes_of_token : given_bytes) / double(rows)));
    const std::string set = root + "/set", plain = root + "/plain";
    std::map<std::string, measured> times;
    double size = 0, kept = 0;
    const auto timed = [&](const char* what, auto&& f) { times[what].add(spent_by(f)); };
    const auto read = [&](data::shuffle how) {
        kept += packed ? read_set<half>(set, how, 1) : read_set<float>(set, how, 1);
    };
    const auto anew = [&] {
        fs::remove_all(root);
        fs::create_directories(root);
    };
    for (int turn = 0; turn < turns; ++turn) {
        anew();
        timed("write", [&] { write_set(set, sequences, packed); });
        size = megabytes_of(set);
        anew();
        timed("plain write", [&] { write_plain(plain, size); });
        anew();
        timed("synced", [&] { write_synced(plain, size); });
        anew();
        write_set(set, sequences, packed);
        drop_all(set);
        timed("cold", [&] { read(data::shuffle::stored); });
        write_plain(plain, size);
        drop(plain);
        timed("plain cold", [&] { read_plain(plain); });
        for (int again = 0; again < 2; ++again) {
            timed("warm", [&] { read(data::shuffle::stored); });
            timed("plain warm", [&] { read_plain(plain); });
            if (packed) timed("floats", [&] { kept += read_set<float>(set, data::shuffle::stored, 1); });
            timed("shuffled", [&] { read(data::shuffle::sequences); });
            timed("verify", [&] { data::rollout_set(set).verify(); });
        }
    }
    for (const char* what : {"plain floats", "plain shuffled", "plain verify"}) times[what] = times["plain warm"];
    const double tokens = double(sequences * rows), delivered = tokens * (packed ? k * 6 + 6 : given_bytes) / 1e6;
    std::printf("%s: %.0f MB in files, %.0f MB delivered, %.0f tokens, %.1f bytes a token\n",
                packed ? "packed" : "as given", size, delivered, tokens, size * 1e6 / tokens);
    std::printf("              MB/s  delivered     plain     ratio      best   cpu s/GB     plain\n");
    for (const char* what : {"write", "cold", "warm", "floats", "shuffled", "verify"}) {
        if (times.find(what) == times.end()) continue;
        const measured &ours = times[what], &theirs = times[std::string("plain ") + what];
        const double time = median(ours.wall), their_time = median(theirs.wall);
        out.add(std::string(what) + (packed ? ", packed" : ", as given"), time);
        std::printf("  %-9s %7.0f  %9.0f  %8.0f  %8.2f  %8.2f  %9.3f  %8.3f\n", what, size / time, delivered / time,
                    size / their_time, their_time / time, theirs.best() / ours.best(), ours.least_cpu() * 1e3 / size,
                    theirs.least_cpu() * 1e3 / size);
    }
    const measured &ours = times["write"], &synced = times["synced"];
    std::printf("  write, beside synced      %8.0f  %8.2f  %8.2f  %9s  %8.3f\n", size / median(synced.wall),
                median(synced.wall) / median(ours.wall), synced.best() / ours.best(), "",
                synced.least_cpu() * 1e3 / size);
    if (kept == 0.5) std::puts("");
}

void memory(const std::string& root, double mib) {
    std::printf("resident memory, reading with 2 shards of 64 MiB mapped\n");
    for (const int times : {1, 2, 4}) {
        fs::remove_all(root);
        const index_t sequences = index_t(mib * (1 << 20) / given_bytes / double(rows)) * times / 2;
        write_set(root + "/set", sequences, false);
        const double after_writing = resident_mib();
        read_set<float>(root + "/set", data::shuffle::sequences, 1, 2);
        std::printf("  %10lld tokens   %5.0f MiB after writing   %5.0f MiB after reading\n",
                    static_cast<long long>(sequences * rows), after_writing, resident_mib());
    }
}

// --- one large set, read while it is written -------------------------------------------------------------------------

double disk_mib(const std::string& folder) {
    double bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder)) {
        struct stat s {};
        if (::stat(entry.path().c_str(), &s) == 0) bytes += 512.0 * double(s.st_blocks);
    }
    return bytes / (1 << 20);
}
std::int32_t token_of(index_t sequence, index_t i) { return std::int32_t((sequence * 31 + i * 7) % vocab); }
std::int32_t id_of(index_t sequence, index_t i) { return std::int32_t((sequence * 65 + i * 7919) % vocab); }

/// Sequences [first, end) as the writer made them, or the program ends.
template <class L>
void compare(const data::rollout_set& set, index_t first, index_t end) {
    for (index_t s = first; s < end; ++s) {
        data::rollouts one = set.read(s, 1);
        const auto c = one.cache<teacher::support<std::int32_t, L>>();
        const auto tokens = one.tokens();
        bool same = one.rows() == rows && tokens.size == rows && one.samples()[0] == s && c.log_tail[rows - 1] == L(-3);
        for (index_t i = 0; same && i < rows; ++i) same = tokens[i] == token_of(s, i);
        for (index_t j = 0; same && j < k; ++j)
            same = c.ids(0, j) == id_of(s, j) && c.ids(rows - 1, j) == j && c.log_q(1, j) == L(-float(j % 100) / 8);
        if (same) continue;
        std::fprintf(stderr, "sequence %lld is not what was written\n", static_cast<long long>(s));
        std::exit(1);
    }
}

void simulate(const std::string& root, index_t all_tokens, bool packed, double most_disk) {
    fs::create_directories(root);
    const std::string folder = root + "/set";
    const auto sequences = (all_tokens + rows - 1) / rows, every = std::max<index_t>(1, sequences / 10);
    std::vector<std::int32_t> tokens(rows), ids(rows * k);
    std::vector<float> log_q(rows * k), tail(rows, -3);
    for (index_t i = 0; i < rows * k; ++i) {
        ids[std::size_t(i)] = std::int32_t(i < (rows - 1) * k ? i * 7919 % vocab : i % k);
        log_q[std::size_t(i)] = -float(i % k % 100) / 8;
    }
    data::rollout_writer out(folder, settings_of(packed));
    index_t read = 0, shards = 0, reported = 0;
    double disk = 0, anonymous = 0, mapped = 0, bytes = 0, writing = 0, reading = 0;
    std::size_t since = 0;
    const auto look = [&] {
        anonymous = std::max(anonymous, memory_of("RssAnon:")), mapped = std::max(mapped, memory_of("RssFile:"));
    };
    std::printf("%s: %lld tokens of K = %lld in one set\n", packed ? "packed" : "as given",
                static_cast<long long>(sequences * rows), static_cast<long long>(k));
    std::printf("      tokens  shards   files GB  disk now  anonymous MiB  mapped MiB   write s  read s\n");
    const auto catch_up = [&](bool last) {
        const double begin = now();
        disk = std::max(disk, disk_mib(folder));
        const data::rollout_set set(folder, {.unfinished = !last, .most_mapped = 2});
        const index_t end = set.sequences();
        packed ? compare<half>(set, read, end) : compare<float>(set, read, end);
        look();
        for (; shards < index_t(set.shards().size()); ++shards) {
            const data::shard_line& line = set.shards()[std::size_t(shards)];
            bytes += double(line.file.bytes);
            const int fd = ::open((folder + "/" + line.file.name).c_str(), O_WRONLY);
            if (fd < 0 || ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, off_t(line.file.bytes)) != 0) {
                std::perror("the file system cannot punch holes");
                std::exit(1);
            }
            ::close(fd);
        }
        read = end;
        reading += now() - begin;
    };
    for (index_t s = 0; s < sequences; ++s) {
        const double begin = now();
        for (index_t i = 0; i < rows; ++i) tokens[std::size_t(i)] = token_of(s, i);
        for (index_t j = 0; j < k; ++j) ids[std::size_t(j)] = id_of(s, j);
        out.add({.tokens = tokens, .rows = rows, .sample = s},
                teacher::support{view(std::as_const(ids).data(), rows, k), view(std::as_const(log_q).data(), rows, k),
                                 view(std::as_const(tail).data(), rows)});
        writing += now() - begin;
        since += std::size_t(rows * index_t(packed ? packed_bytes_of_token : given_bytes));
        if (double(since) > most_disk * (1 << 20) / 2) catch_up(false), since = 0;
        if ((s + 1) / every == reported) continue;
        reported = (s + 1) / every;
        look();
        std::printf("%12lld  %6lld  %9.2f  %8.0f  %13.0f  %10.0f  %8.1f  %6.1f\n",
                    static_cast<long long>((s + 1) * rows), static_cast<long long>(shards), bytes / 1e9,
                    disk_mib(folder), anonymous, mapped, writing, reading);
        std::fflush(stdout);
        anonymous = mapped = 0; // the most between two lines
    }
    const double begin = now();
    out.finish();
    writing += now() - begin;
    catch_up(true);
    std::printf(
        "finished: %lld sequences read and compared, %lld shards, %.2f GB in files, never more than %.0f MiB of disk,\n"
        "%.0f MB/s written, %.0f MB/s read\n",
        static_cast<long long>(read), static_cast<long long>(shards), bytes / 1e9, disk, bytes / 1e6 / writing,
        bytes / 1e6 / reading);
}

} // namespace

int main(int argc, char** argv) {
    bench::results out(argc, argv);
    std::vector<std::string> given; // but what scripts/bench.sh says to Google Benchmark
    std::map<std::string, std::string> options;
    for (int i = 1; i < argc; ++i) {
        const std::string a = argv[i];
        if (a[0] != '-')
            given.push_back(a);
        else if (const auto equals = a.find('='); equals != std::string::npos)
            options[a.substr(0, equals)] = a.substr(equals + 1);
    }
    const std::string root = (given.size() > 0 ? given[0] : ".") + "/bench_data_files";
    const double mib = given.size() > 1 ? std::atof(given[1].c_str()) : 512;
    const int turns = given.size() > 2 ? std::atoi(given[2].c_str()) : 5;
    for (const bool packed : {false, true}) {
        if (options.count("--form") != 0 && options["--form"] != (packed ? "packed" : "given")) continue;
        fs::remove_all(root);
        if (options.count("--tokens") != 0)
            simulate(root, index_t(std::atof(options["--tokens"].c_str())), packed,
                     options.count("--disk") != 0 ? std::atof(options["--disk"].c_str()) : 3072);
        else
            table(root, mib, turns, packed, out);
    }
    if (options.count("--tokens") == 0) memory(root, mib);
    fs::remove_all(root);
    out.write();
}
