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

// target = scale(sum) or target += scale(sum). Notes the least index of the target whose element is not finite.
template <typename Wire>
__device__ __forceinline__ void sum(const Members& members, float* target, u64 len, Scale scale, u32 fold, Note where) {
    u64 least_found = ~0ull;
    for (u64 at = thread_number() * WIDTH; at < len; at += thread_count() * WIDTH) {
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
            if (at + index < len && !is_finite(sums[index])) least_found = least(least_found, at + index);
        }
    }
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

#define SUM(name, Wire)                                                                                              \
    extern "C" __global__ void sum_##name(const __grid_constant__ Members members, float* target, u64 len,           \
                                          Scale scale, u32 fold, Note where) {                                       \
        sum<Wire>(members, target, len, scale, fold, where);                                                         \
    }                                                                                                                \
    extern "C" __global__ void narrow_##name(Wire::Stored* target, const float* source, u64 len, Scale scale) {      \
        narrow<Wire>(target, source, len, scale);                                                                    \
    }

SUM(f32, Float32)
SUM(f16, Float16)
SUM(bf16, BFloat16)
