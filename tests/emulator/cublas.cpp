// cuBLAS on the emulated driver: as much of it as hsdp calls. Products take their place on the stream, and are summed in f32 by a plain loop.
// It refuses settings with which cuBLAS would round more, or allocate memory, and it writes into its workspace as cuBLAS does.

#include "handles.hpp"

#include <cstdint>
#include <cstring>

extern "C" int cuCtxGetCurrent(void** found);

namespace {

enum Status : int { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

// Of what a thread has set, all but the math mode is undone by a new stream.
struct Handle {
    int math = 0;
    void* stream = nullptr;
    void* workspace = nullptr;
    std::size_t bytes = 0;
};

enum : int { F32 = 0, BF16 = 14, SUMS_IN_F32 = 68, SUMS_STAY_IN_F32 = 16 };

float of_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float read(const void* from, int dtype, std::int64_t at) {
    if (dtype == F32) return ((const float*)from)[at];
    return of_bits((std::uint32_t)((const std::uint16_t*)from)[at] << 16);
}

// To the nearest, ties to even.
void write(void* to, int dtype, std::int64_t at, float value) {
    if (dtype == F32) {
        ((float*)to)[at] = value;
        return;
    }
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bool is_nan = value != value;
    ((std::uint16_t*)to)[at] = (std::uint16_t)((is_nan ? bits | 0x400000u : bits + (bits >> 16 & 1u) + 0x7fffu) >> 16);
}

// The factors of some products that are stored by columns, or their transposes.
struct Factor {
    const void* values;
    std::int64_t stride;
    std::int64_t to_next;
    bool transposed;

    std::int64_t place(std::int64_t product, std::int64_t row, std::int64_t column) const {
        return product * to_next + (transposed ? column + row * stride : row + column * stride);
    }
};

}  // namespace

extern "C" {

int cublasCreate_v2(void** made) {
    void* context = nullptr;
    cuCtxGetCurrent(&context);
    if (!context) return NOT_INITIALIZED;
    *made = new Handle;
    return SUCCESS;
}

int cublasSetMathMode(void* handle, int mode) {
    ((Handle*)handle)->math = mode;
    return SUCCESS;
}

int cublasSetStream_v2(void* handle, void* stream) {
    *(Handle*)handle = {((Handle*)handle)->math, stream, nullptr, 0};
    return SUCCESS;
}

int cublasSetWorkspace_v2(void* handle, void* workspace, std::size_t bytes) {
    if ((std::uint64_t)workspace % 256 != 0) return INVALID_VALUE;
    ((Handle*)handle)->workspace = workspace;
    ((Handle*)handle)->bytes = bytes;
    return SUCCESS;
}

const char* cublasGetStatusName(int status) {
    return status == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_EMULATED";
}

int cublasGemmStridedBatchedEx_64(void* used, int first_op, int second_op, std::int64_t m, std::int64_t n,
                                  std::int64_t k, const float* take, const void* first, int first_dtype,
                                  std::int64_t first_stride, long long first_to_next, const void* second,
                                  int second_dtype, std::int64_t second_stride, long long second_to_next,
                                  const float* keep, void* target, int dtype, std::int64_t stride, long long to_next,
                                  std::int64_t count, int sums, int) {
    Handle& handle = *(Handle*)used;
    if (!handle.stream || handle.bytes == 0 || m <= 0 || n <= 0 || k < 0 || count <= 0) return INVALID_VALUE;
    if (first_to_next <= 0 || second_to_next <= 0 || to_next < stride * (n - 1) + m) return INVALID_VALUE;
    if (first_stride < (first_op ? k : m) || second_stride < (second_op ? n : k) || stride < m) return INVALID_VALUE;
    if (sums != SUMS_IN_F32 || handle.math != SUMS_STAY_IN_F32) return NOT_SUPPORTED;
    if (first_dtype != dtype || second_dtype != dtype || (dtype != F32 && dtype != BF16)) return NOT_SUPPORTED;
    Factor a{first, first_stride, first_to_next, first_op != 0};
    Factor b{second, second_stride, second_to_next, second_op != 0};
    put_on_stream(handle.stream, [=, alpha = *take, beta = *keep, workspace = handle.workspace, bytes = handle.bytes] {
        std::memset(workspace, 0xff, 4096);
        std::memset((char*)workspace + bytes - 4096, 0xff, 4096);
        for (std::int64_t product = 0; product < count; ++product) {
            for (std::int64_t column = 0; column < n; ++column) {
                for (std::int64_t row = 0; row < m; ++row) {
                    float sum = 0.0f;
                    for (std::int64_t at = 0; at < k; ++at) {
                        float one = read(a.values, dtype, a.place(product, row, at));
                        sum += one * read(b.values, dtype, b.place(product, at, column));
                    }
                    std::int64_t place = product * to_next + row + column * stride;
                    float kept = beta == 0.0f ? 0.0f : beta * read(target, dtype, place);
                    write(target, dtype, place, alpha * sum + kept);
                }
            }
        }
    });
    return SUCCESS;
}

}  // extern "C"
