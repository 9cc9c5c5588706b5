// Copies of many gradients of different dtypes into one flat buffer, in one launch.

// The largest number of parameters of one launch. Their table is an argument, and all arguments together may take 4 KiB.
#define MOST_PARAMS 120

// A parameter and its place in the flat buffer, in elements. Starts are multiples of WIDTH.
struct Param {
    u64 address;
    u64 start;
    u64 len;
    u32 dtype;
    u32 unused;
};

static_assert(sizeof(Param) == 32, "as in launch.rs");

// Parameters in the order of their starts. Elements between them are padding.
struct Params {
    Param params[MOST_PARAMS];
    u64 count;
};

// The parameters at the elements that a thread visits, in ascending order.
struct Cursor {
    const Params& table;
    u64 param;

    __device__ __forceinline__ Cursor(const Params& table, u64 begin) : table(table) {
        param = first_entry(table.params, table.count, begin + (u64)blockIdx.x * row_of_block());
    }

    // The number of elements of its parameter from `at` on, or 0 for padding.
    __device__ __forceinline__ u64 move_to(u64 at) {
        param = next_entry(table.params, table.count, param, at);
        return left_at(table.params, table.count, param, at);
    }

    __device__ __forceinline__ const Param& own() const { return table.params[param]; }
};

// to = round(scale(from)), for DEPTH vectors of this thread, as far as all elements of a vector are finite. Returns the bits of the vectors that
// are left.
template <typename From, typename To>
__device__ __forceinline__ u32 cast_tile(typename To::Stored* to, const typename From::Stored* from, Scale scale) {
    if (!is_aligned<From>(from) || !is_aligned<To>(to)) return ALL_VECTORS;
    const u32 row = row_of_block();
    Elements<From> read[DEPTH];
    u32 rest = 0;
#pragma unroll
    for (u32 vector = 0; vector < DEPTH; ++vector) {
        read[vector].vector = *(const typename From::Vector*)(from + vector * row);
    }
#pragma unroll
    for (u32 vector = 0; vector < DEPTH; ++vector) {
        float values[WIDTH];
        for (u32 index = 0; index < WIDTH; ++index) values[index] = From::widen_number(read[vector].each[index]);
        scale_numbers(values, scale);
        if (are_finite<To>(values)) write_finite<To>(to + vector * row, values);
        else rest |= 1u << vector;
    }
    return rest;
}

// flat[at..at + WIDTH] = round(scale(gradient)), of which `left` elements lie in a parameter, and zeros for the rest. Returns the index of the first
// that is not finite, or ~0.
template <typename Wire>
__device__ __forceinline__ u64 pack_vector(typename Wire::Stored* flat, const Param& param, u64 at, u64 left, u64 end,
                                           Scale scale) {
    float values[WIDTH] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (left > 0) read_any(values, param.address, param.dtype, at - param.start, left);
    for (u32 index = 0; index < WIDTH; ++index) {
        if (index < left) values[index] = scaled(values[index], scale);
    }
    write<Wire>(flat + at, values, end - at);
    for (u32 index = 0; index < WIDTH; ++index) {
        if (!is_finite(Wire::widen(Wire::narrow(values[index])))) return at + index;
    }
    return ~0ull;
}

// flat[begin..end] = round(scale(gradients)), and zeros where no parameter lies. Elements are rounded once, to the wire. Notes the least
// index of `flat` whose element is not finite.
template <typename Wire>
__device__ __forceinline__ void pack(const Params& table, typename Wire::Stored* flat, u64 begin, u64 end, Scale scale,
                                     Note where) {
    u64 least_found = ~0ull;
    Cursor cursor(table, begin);
    auto quick = [&](u64 first, u64 at) {
        if (cursor.move_to(first) < DEPTH * row_of_block()) return ALL_VECTORS;
        const Param& param = cursor.own();
        u64 address = param.address, offset = at - param.start;
        if (param.dtype == F32) return cast_tile<Float32, Wire>(flat + at, (const float*)address + offset, scale);
        if (param.dtype == F16) return cast_tile<Float16, Wire>(flat + at, (const u16*)address + offset, scale);
        return cast_tile<BFloat16, Wire>(flat + at, (const u16*)address + offset, scale);
    };
    each_tile(begin, end, quick, [&](u64 at) {
        u64 left = cursor.move_to(at);
        least_found = least(least_found, pack_vector<Wire>(flat, cursor.own(), at, left, end, scale));
    });
    note(where, least_found);
}

#define PACK(name, Wire)                                                                                             \
    extern "C" __global__ void pack_##name(const __grid_constant__ Params table, Wire::Stored* flat, u64 begin,      \
                                           u64 end, Scale scale, Note where) {                                       \
        pack<Wire>(table, flat, begin, end, scale, where);                                                           \
    }

PACK(f32, Float32)
PACK(f16, Float16)
PACK(bf16, BFloat16)
