// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How long a call takes on a GPU, beside a copy on the device of as many bytes as the call must move. Needs CUDA alone;
// built and run by scripts/gpu.sh:
//
//   bench_cuda out.json [rounds]
//
// Rows: dense reverse KL and JSD with their gradient, reverse KL's value alone, MC-64, top-64 with a sparse gradient;
// N = 64 and 4,096, V = 151,936, float and bfloat16. Each figure is the smallest and the median time of `rounds`
// rounds (21), in which call and copy alternate; `share` is the median of copy over call, so 1 is the memory's limit.
// Operands rotate over 512 MB, so no cache serves them.
//
// Losses from hidden states, N = 64, 256, 1,024, 4,096, D = 1,024 and 4,096 of the teacher: reverse KL, value alone
// and with the gradients of states and head, in float, TF32 and bfloat16. What bounds them is the matrix product:
// beside each call runs a product of 8,192 x 8,192 x 8,192 by cuBLAS in the same arithmetic, and `share` is the
// median of operations a second over those of that product. Counted are the operations that the call needs, 2NV(D_s +
// D_t), and 4NVD_s for the gradients.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "opd/backends/cuda.cuh"
#include "opd/backends/cuda_hidden.cuh"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/estimators/support.hpp"

namespace {

using namespace opd;

constexpr index_t vocab = 151936;
constexpr int entries = 64; // of a row's support or samples

void succeed(cudaError_t e, const char* what) {
    if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

/// Device memory, freed at the end.
class device_block {
public:
    explicit device_block(std::size_t bytes) : bytes_(bytes) { succeed(cudaMalloc(&data_, bytes), "cudaMalloc"); }
    device_block(const device_block&) = delete;
    device_block& operator=(const device_block&) = delete;
    ~device_block() { cudaFree(data_); }
    template <class T>
    T* as(std::size_t byte = 0) const {
        return reinterpret_cast<T*>(static_cast<char*>(data_) + byte);
    }
    std::size_t bytes() const { return bytes_; }

private:
    void* data_ = nullptr;
    std::size_t bytes_;
};

/// Standard normal times `spread`, from a counter: no random library is needed.
template <class T>
__global__ void fill_normal(T* out, std::size_t n, std::uint64_t seed, float spread) {
    for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n;
         i += std::size_t(gridDim.x) * blockDim.x) {
        std::uint64_t x = (i + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 31)) * 0x94d049bb133111ebull;
        const float u = (float(x >> 40) + 0.5f) / 16777216.f, v = float((x >> 8) & 0xffffff) / 16777216.f;
        out[i] = element<T>::store(spread * sqrtf(-2 * logf(u)) * cospif(2 * v));
    }
}
__global__ void fill_entries(std::int32_t* ids, float* logs, std::size_t n) {
    for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n;
         i += std::size_t(gridDim.x) * blockDim.x) {
        ids[i] = std::int32_t((i % entries) * (vocab / entries) +
                              (i * 2654435761u) % (vocab / entries)); // distinct in a row
        logs[i] = -6.f - float(i % 7);
    }
}

struct figure {
    std::string name, type;
    index_t rows;
    std::size_t bytes;
    double least, median, copy, share; // ms, ms, ms, ratio
};

class timer {
public:
    timer() {
        succeed(cudaEventCreate(&begin_), "cudaEventCreate"), succeed(cudaEventCreate(&end_), "cudaEventCreate");
    }
    ~timer() { cudaEventDestroy(begin_), cudaEventDestroy(end_); }
    double milliseconds(const std::function<void()>& what) {
        succeed(cudaEventRecord(begin_), "cudaEventRecord");
        what();
        succeed(cudaEventRecord(end_), "cudaEventRecord");
        succeed(cudaEventSynchronize(end_), "cudaEventSynchronize");
        float t = 0;
        succeed(cudaEventElapsedTime(&t, begin_, end_), "cudaEventElapsedTime");
        return double(t);
    }

private:
    cudaEvent_t begin_, end_;
};

double median(std::vector<double> x) {
    std::nth_element(x.begin(), x.begin() + std::ptrdiff_t(x.size() / 2), x.end());
    return x[x.size() / 2];
}

/// `call(i)` on the operands of round i, beside a copy that reads half of `bytes` and writes the other half.
figure measure(const std::string& name, const std::string& type, index_t rows, std::size_t bytes, int rounds,
               const std::function<void(int)>& call) {
    static timer clock;
    const device_block from(std::max<std::size_t>(bytes / 2, 1)), to(from.bytes());
    const auto copy = [&] {
        succeed(cudaMemcpyAsync(to.as<char>(), from.as<char>(), from.bytes(), cudaMemcpyDeviceToDevice),
                "cudaMemcpyAsync");
    };
    for (int i = 0; i < 3; ++i) call(i), copy();
    succeed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<double> mine, its, ratio;
    for (int i = 0; i < rounds; ++i) {
        mine.push_back(clock.milliseconds([&] { call(i); })), its.push_back(clock.milliseconds(copy));
        ratio.push_back(its.back() / mine.back());
    }
    const figure f{name,         type,        rows,         bytes, *std::min_element(mine.begin(), mine.end()),
                   median(mine), median(its), median(ratio)};
    std::printf("%-22s %-9s N %5lld  least %9.4f ms  median %9.4f ms  copy %9.4f ms  share %.2f\n", f.name.c_str(),
                f.type.c_str(), static_cast<long long>(rows), f.least, f.median, f.copy, f.share);
    std::fflush(stdout);
    return f;
}

/// Several sets of operands of a call, together larger than any cache.
template <class T>
struct operands {
    index_t rows;
    int sets;
    device_block z, y, dz;

    static int sets_for(index_t n) {
        return int(std::max<std::size_t>(1, (std::size_t{512} << 20) / (std::size_t(n * vocab) * sizeof(T))));
    }
    explicit operands(index_t n)
        : rows(n), sets(sets_for(n)), z(one() * std::size_t(sets)), y(one() * std::size_t(sets)),
          dz(one() * std::size_t(sets)) {
        fill_normal<<<1024, 256>>>(z.as<T>(), one() / sizeof(T) * std::size_t(sets), 1, 3);
        fill_normal<<<1024, 256>>>(y.as<T>(), one() / sizeof(T) * std::size_t(sets), 2, 3);
        succeed(cudaDeviceSynchronize(), "filling the operands");
    }
    std::size_t one() const { return std::size_t(rows * vocab) * sizeof(T); }
    std::size_t at(int i) const { return std::size_t(i % sets) * one(); }
    student::logits<T, T, space::device> student(int i) const {
        return {device_view(static_cast<const T*>(z.template as<T>(at(i))), rows, vocab),
                device_view(dz.template as<T>(at(i)), rows, vocab)};
    }
    teacher::dense<T, space::device> teacher(int i) const {
        return {device_view(static_cast<const T*>(y.template as<T>(at(i))), rows, vocab)};
    }
};

template <class T>
void all(const std::string& type, index_t rows, int rounds, std::vector<figure>& out) {
    const operands<T> o(rows);
    const std::size_t slots = std::size_t(rows) * entries;
    const device_block ids(slots * sizeof(std::int32_t)), logs(slots * sizeof(float)), sparse(slots * sizeof(T));
    fill_entries<<<256, 256>>>(ids.as<std::int32_t>(), logs.as<float>(), slots);
    succeed(cudaDeviceSynchronize(), "filling the entries");
    const auto id_view = device_view(static_cast<const std::int32_t*>(ids.as<std::int32_t>()), rows, entries);
    const auto log_view = device_view(static_cast<const float*>(logs.as<float>()), rows, entries);
    const teacher::samples samples{id_view, log_view, log_view};
    const teacher::support support{id_view, log_view};

    const device_block arena(std::size_t{64} << 20);
    cuda_backend be;
    be.arena = {arena.as<std::byte>(), arena.bytes()};
    const std::size_t row = std::size_t(vocab) * sizeof(T) * std::size_t(rows);
    const auto note = [&](const char* name, std::size_t bytes, const std::function<void(int)>& call) {
        out.push_back(measure(name, type, rows, bytes, rounds, call));
    };
    // the least a call can move: what a row reads again may still be in L2
    note("reverse KL", 3 * row, [&](int i) { evaluate(be, o.student(i), o.teacher(i), reverse_kl{}, device_env{}); });
    note("reverse KL, value", 2 * row, [&](int i) {
        const student::logits<T, T, space::device> z{o.student(i).z, {}};
        evaluate(be, z, o.teacher(i), reverse_kl{}, device_env{});
    });
    note("JSD", 3 * row, [&](int i) { evaluate(be, o.student(i), o.teacher(i), jsd{}, device_env{}); });
    note("MC-64", 2 * row, [&](int i) { evaluate(be, o.student(i), samples, mc{reverse_kl{}}, device_env{}); });
    note("top-64, sparse gradient", std::size_t(rows) * entries * (4 + 4 + 32 + sizeof(T)), [&](int i) {
        const auto z = o.student(i).z;
        evaluate(be, student::on_support<T, T, space::device>{z, device_view(sparse.as<T>(), rows, entries)}, support,
                 renormalised{reverse_kl{}}, device_env{});
    });
    succeed(cudaGetLastError(), "a call");
}

// --- losses from hidden states ---------------------------------------------------------------------------------------

struct product_figure {
    std::string name, type;
    index_t rows;
    std::size_t budget;
    double operations, least, median, peak, share; // 1, ms, ms, operations a second, ratio
};

void succeed(cublasStatus_t s, const char* what) {
    if (s != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(std::string(what) + ": " + cublasGetStatusString(s));
}

/// A square product by cuBLAS, in the arithmetic of the call beside it.
template <class T>
struct square_product {
    static constexpr index_t size = 8192;
    static constexpr double operations = 2.0 * size * size * size;
    device_block a, b, c;
    square_product()
        : a(std::size_t(size * size) * sizeof(T)), b(a.bytes()), c(std::size_t(size * size) * sizeof(float)) {
        fill_normal<<<1024, 256>>>(a.as<T>(), std::size_t(size * size), 1, 1);
        fill_normal<<<1024, 256>>>(b.as<T>(), std::size_t(size * size), 2, 1);
        succeed(cudaDeviceSynchronize(), "filling the product");
    }
    void operator()(const cuda_backend& be) const {
        const float one = 1, zero = 0;
        constexpr cudaDataType_t type = detail::cublas_type<T>::data;
        succeed(cublasGemmEx_64(be.cublas, CUBLAS_OP_T, CUBLAS_OP_N, size, size, size, &one, a.as<T>(), type, size,
                                b.as<T>(), type, size, &zero, c.as<float>(), CUDA_R_32F, size, be.compute_of<T>(),
                                CUBLAS_GEMM_DEFAULT),
                "cublasGemmEx");
    }
};

template <class T>
class hidden_bench {
public:
    static constexpr index_t d = 1024, d_teacher = 4096, most_rows = 4096;
    static constexpr std::size_t whole = std::size_t{4} << 30;

    explicit hidden_bench(cublasHandle_t handle)
        : x_(most_rows * d * sizeof(T)), w_(vocab * d * sizeof(T)), h_(most_rows * d_teacher * sizeof(T)),
          head_(vocab * d_teacher * sizeof(T)), dx_(most_rows * d * sizeof(float)), dw_(vocab * d * sizeof(float)) {
        be_.cublas = handle;
        fill(x_, 1, 1), fill(h_, 2, 1);
        fill(w_, 3, 3 / std::sqrt(float(d))), fill(head_, 4, 3 / std::sqrt(float(d_teacher))); // logits of deviation 3
        succeed(cudaDeviceSynchronize(), "filling hidden states and heads");
    }
    void run(const std::string& type, bool tf32, int rounds, std::vector<product_figure>& out) {
        be_.tf32 = tf32;
        for (const index_t n : {64, 256, 1024, 4096}) {
            const double logits = 2.0 * double(n) * double(vocab) * double(d + d_teacher);
            const double back = 4.0 * double(n) * double(vocab) * double(d);
            one("hidden, value", type, n, whole, logits, false, rounds, out);
            const std::size_t usual = student::hidden<T, float, space::device>{}.budget;
            one("hidden, dx and dW", type, n, usual, logits + back, true, rounds, out);
            if (n > 256) one("hidden, dx and dW", type, n, whole, logits + back, true, rounds, out); // else the same
        }
    }

private:
    void fill(const device_block& b, std::uint64_t seed, float spread) {
        fill_normal<<<1024, 256>>>(b.as<T>(), b.bytes() / sizeof(T), seed, spread);
    }
    void one(const char* name, const std::string& type, index_t n, std::size_t budget, double operations, bool gradient,
             int rounds, std::vector<product_figure>& out) {
        student::hidden<T, float, space::device> mine;
        mine.x = device_view(x_.as<T>(), n, d), mine.w = device_view(w_.as<T>(), vocab, d), mine.budget = budget;
        if (gradient) mine.dx = device_view(dx_.as<float>(), n, d), mine.dw = device_view(dw_.as<float>(), vocab, d);
        teacher::hidden<T, space::device> theirs;
        theirs.x = device_view(h_.as<T>(), n, d_teacher), theirs.w = device_view(head_.as<T>(), vocab, d_teacher);
        theirs.budget = budget;
        const device_block arena(workspace_bytes(be_, mine, theirs, reverse_kl{}));
        be_.arena = {arena.as<std::byte>(), arena.bytes()};
        const auto call = [&] { evaluate(be_, mine, theirs, reverse_kl{}); };
        const auto product = [&] { product_(be_); };
        for (int i = 0; i < 3; ++i) call(), product();
        succeed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        std::vector<double> mine_ms, peak, share;
        for (int i = 0; i < rounds; ++i) {
            mine_ms.push_back(clock_.milliseconds(call));
            peak.push_back(product_.operations / (1e-3 * clock_.milliseconds(product)));
            share.push_back(operations / (1e-3 * mine_ms.back()) / peak.back());
        }
        const product_figure f{name,
                               type,
                               n,
                               budget,
                               operations,
                               *std::min_element(mine_ms.begin(), mine_ms.end()),
                               median(mine_ms),
                               median(peak),
                               median(share)};
        std::printf("%-22s %-9s N %5lld  least %9.4f ms  median %9.4f ms  product %8.1f TFLOP/s  share %.2f  (budget "
                    "%zu MiB)\n",
                    f.name.c_str(), f.type.c_str(), static_cast<long long>(n), f.least, f.median, f.peak / 1e12,
                    f.share, budget >> 20);
        std::fflush(stdout);
        out.push_back(f);
    }

    cuda_backend be_;
    timer clock_;
    square_product<T> product_;
    device_block x_, w_, h_, head_, dx_, dw_;
};

void write_json(const std::string& path, const cudaDeviceProp& device, const std::vector<figure>& figures,
                const std::vector<product_figure>& hidden) {
    const std::string temporary = path + ".new";
    std::FILE* f = std::fopen(temporary.c_str(), "w");
    if (!f) throw std::runtime_error(temporary + " cannot be written");
    std::fprintf(f, "{\"device\":\"%s\",\"compute_capability\":\"%d.%d\",\"vocab\":%lld,\"figures\":[", device.name,
                 device.major, device.minor, static_cast<long long>(vocab));
    for (std::size_t i = 0; i < figures.size(); ++i) {
        const figure& x = figures[i];
        std::fprintf(
            f,
            "%s\n{\"name\":\"%s\",\"type\":\"%s\",\"rows\":%lld,\"bytes\":%zu,\"least_ms\":%.6g,\"median_ms\":%.6g,"
            "\"copy_ms\":%.6g,\"share\":%.4g}",
            i ? "," : "", x.name.c_str(), x.type.c_str(), static_cast<long long>(x.rows), x.bytes, x.least, x.median,
            x.copy, x.share);
    }
    std::fputs("\n],\"hidden\":[", f);
    for (std::size_t i = 0; i < hidden.size(); ++i) {
        const product_figure& x = hidden[i];
        std::fprintf(
            f,
            "%s\n{\"name\":\"%s\",\"type\":\"%s\",\"rows\":%lld,\"budget\":%zu,\"operations\":%.6g,\"least_ms\":%.6g,"
            "\"median_ms\":%.6g,\"product_per_second\":%.6g,\"share\":%.4g}",
            i ? "," : "", x.name.c_str(), x.type.c_str(), static_cast<long long>(x.rows), x.budget, x.operations,
            x.least, x.median, x.peak, x.share);
    }
    std::fputs("\n]}\n", f);
    if (std::fclose(f) != 0 || std::rename(temporary.c_str(), path.c_str()) != 0)
        throw std::runtime_error(path + " cannot be written");
}

} // namespace

int main(int argc, char** argv) try {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        std::puts("SKIPPED: no CUDA device");
        return 0;
    }
    if (argc < 2 || argc > 3) {
        std::fputs("usage: bench_cuda out.json [rounds]\n", stderr);
        return 2;
    }
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 21;
    if (rounds < 1) throw std::runtime_error("rounds must be 1 or more");
    cudaDeviceProp device;
    succeed(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    std::printf("%s, compute capability %d.%d, V = %lld\n", device.name, device.major, device.minor,
                static_cast<long long>(vocab));
    std::vector<figure> figures;
    for (const index_t rows : {64, 4096}) {
        std::size_t free = 0, total = 0;
        succeed(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
        const std::size_t wanted =
            9 * std::size_t(rows * vocab) * sizeof(float) + (std::size_t{2} << 30); // operands, copies
        if (free < wanted) {
            std::printf("N %lld needs %.0f GB of device memory: left out\n", static_cast<long long>(rows),
                        double(wanted) / 1e9);
            continue;
        }
        all<float>("float", rows, rounds, figures);
        all<bfloat16>("bfloat16", rows, rounds, figures);
    }
    std::vector<product_figure> hidden;
    std::size_t free = 0, total = 0;
    succeed(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    if (free < std::size_t{16} << 30) {
        std::puts("hidden states need 16 GB of device memory: left out");
    } else {
        cublasHandle_t handle;
        succeed(cublasCreate(&handle), "cublasCreate");
        hidden_bench<float>(handle).run("float", false, rounds, hidden);
        hidden_bench<float>(handle).run("TF32", true, rounds, hidden);
        hidden_bench<bfloat16>(handle).run("bfloat16", false, rounds, hidden);
        succeed(cublasDestroy(handle), "cublasDestroy");
    }
    write_json(argv[1], device, figures, hidden);
} catch (const std::exception& e) {
    std::fprintf(stderr, "bench_cuda: %s\n", e.what());
    return 1;
}
