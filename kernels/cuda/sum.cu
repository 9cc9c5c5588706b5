// Sums of the contributions of members, in their order and in f32, which are taken into a target.

// The largest number of members of one launch. The reason is that of MOST_PARAMS.
#define MOST_MEMBERS 480

// By slot, the address of a member's elements, which have been divided and rounded to the wire.
struct Members {
    u64 addresses[MOST_MEMBERS];
    u64 count;
};

// The variants of `Fold` in `accumulate.rs`.
enum : u32 { REPLACE = 0, ADD = 1 };

// target[at..] = scale(sum) or target[at..] += scale(sum), for a vector. Returns the index of its first element that is not finite, or ~0.
template <typename Wire>
__device__ __forceinline__ u64 sum_vector(const Members& members, float* target, u64 at, u64 len, Scale scale, u32 fold) {
    float sums[WIDTH], values[WIDTH];
    read<Wire>(sums, (const typename Wire::Stored*)members.addresses[0] + at, len - at);
    for (u64 member = 1; member < members.count; ++member) {
        read<Wire>(values, (const typename Wire::Stored*)members.addresses[member] + at, len - at);
        for (u32 index = 0; index < WIDTH; ++index) sums[index] += values[index];
    }
    for (u32 index = 0; index < WIDTH; ++index) sums[index] = scaled(sums[index], scale);
    if (fold == ADD) {
        read<Float32>(values, target + at, len - at);
        for (u32 index = 0; index < WIDTH; ++index) sums[index] = values[index] + sums[index];
    }
    write<Float32>(target + at, sums, len - at);
    for (u32 index = 0; index < WIDTH; ++index) {
        if (at + index < len && !is_finite(sums[index])) return at + index;
    }
    return ~0ull;
}

// Reads the vectors of a thread in a tile, and adds them to sums, or replaces the sums by them.
template <typename T, bool ADDS>
__device__ __forceinline__ void read_tile(float (&sums)[DEPTH][WIDTH], const typename T::Stored* from) {
    const u32 row = row_of_block();
    Elements<T> read[DEPTH];
#pragma unroll
    for (u32 vector = 0; vector < DEPTH; ++vector) {
        read[vector].vector = *(const typename T::Vector*)(from + vector * row);
    }
#pragma unroll
    for (u32 vector = 0; vector < DEPTH; ++vector) {
        for (u32 index = 0; index < WIDTH; ++index) {
            float value = T::widen_number(read[vector].each[index]);
            sums[vector][index] = ADDS ? sums[vector][index] + value : value;
        }
    }
}

// As `sum_vector`, for the vectors of a thread in a tile, as far as all elements of a vector are finite. If a contribution is not finite, neither
// is its sum. Returns the bits of the vectors that are left.
template <typename Wire>
__device__ __forceinline__ u32 sum_tile(const Members& members, float* target, u64 at, Scale scale, u32 fold) {
    typedef typename Wire::Stored Stored;
    const u32 row = row_of_block();
    float sums[DEPTH][WIDTH];
    read_tile<Wire, false>(sums, (const Stored*)members.addresses[0] + at);
    // Unrolled, it would read a vector only when the one before is added.
#pragma unroll 1
    for (u64 member = 1; member < members.count; ++member) {
        read_tile<Wire, true>(sums, (const Stored*)members.addresses[member] + at);
    }
#pragma unroll
    for (u32 vector = 0; vector < DEPTH; ++vector) scale_numbers(sums[vector], scale);
    if (fold == ADD) read_tile<Float32, true>(sums, target + at);
    u32 rest = 0;
#pragma unroll
    for (u32 vector = 0; vector < DEPTH; ++vector) {
        if (are_finite<Float32>(sums[vector])) write_finite<Float32>(target + at + vector * row, sums[vector]);
        else rest |= 1u << vector;
    }
    return rest;
}

// Whether all vectors that begin at a multiple of WIDTH are aligned.
template <typename Wire>
__device__ __forceinline__ bool are_aligned(const Members& members, const float* target) {
    bool are_aligned = is_aligned<Float32>(target);
    for (u64 member = 0; member < members.count; ++member) {
        are_aligned &= is_aligned<Wire>((const typename Wire::Stored*)members.addresses[member]);
    }
    return are_aligned;
}

// target = scale(sum) or target += scale(sum). Notes the least index of the target whose element is not finite.
template <typename Wire>
__device__ __forceinline__ void sum(const Members& members, float* target, u64 len, Scale scale, u32 fold, Note where) {
    u64 least_found = ~0ull;
    const bool is_quick = are_aligned<Wire>(members, target);
    auto quick = [&](u64, u64 at) { return is_quick ? sum_tile<Wire>(members, target, at, scale, fold) : ALL_VECTORS; };
    each_tile(0, len, quick, [&](u64 at) {
        least_found = least(least_found, sum_vector<Wire>(members, target, at, len, scale, fold));
    });
    note(where, least_found);
}

// target = round(scale(source)).
template <typename Wire>
__device__ __forceinline__ void narrow(typename Wire::Stored* target, const float* source, u64 len, Scale scale) {
    for (u64 at = thread_number() * WIDTH; at < len; at += thread_count() * WIDTH) {
        float values[WIDTH];
        read<Float32>(values, source + at, len - at);
        for (u32 index = 0; index < WIDTH; ++index) values[index] = scaled(values[index], scale);
        write<Wire>(target + at, values, len - at);
    }
}

// target = source, in f32.
extern "C" __global__ void widen(float* target, const BFloat16::Stored* source, u64 len) {
    for (u64 at = thread_number() * WIDTH; at < len; at += thread_count() * WIDTH) {
        float values[WIDTH];
        read<BFloat16>(values, source + at, len - at);
        write<Float32>(target + at, values, len - at);
    }
}

#define SUM(name, Wire)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) sum_##name(const __grid_constant__ Members members, float* target, u64 len,           \
                                          Scale scale, u32 fold, Note where) {                                       \
        sum<Wire>(members, target, len, scale, fold, where);                                                         \
    }                                                                                                                \
    extern "C" __global__ void narrow_##name(Wire::Stored* target, const float* source, u64 len, Scale scale) {      \
        narrow<Wire>(target, source, len, scale);                                                                    \
    }

SUM(f32, Float32)
SUM(f16, Float16)
SUM(bf16, BFloat16)
