// Copies of many parameters of different dtypes to and from one flat buffer, in one launch.

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

static_assert(sizeof(Param) == 32, "as in table.rs");

// Parameters in the order of their starts. Elements between them are padding.
struct Params {
    Param params[MOST_PARAMS];
    u64 count;
};

// flat[begin..end] = round(scale(gradients)), and zeros where no parameter lies. Elements are rounded once, to the wire. Notes the least
// index of `flat` whose element is not finite.
template <typename Wire>
__device__ __forceinline__ void pack(const Params& table, typename Wire::Stored* flat, u64 begin, u64 end, Scale scale,
                                     Note where) {
    u64 least_found = ~0ull;
    u64 param = first_entry(table.params, table.count, begin + thread_number() * WIDTH);
    for (u64 at = begin + thread_number() * WIDTH; at < end; at += thread_count() * WIDTH) {
        param = next_entry(table.params, table.count, param, at);
        u64 left = left_at(table.params, table.count, param, at);
        float values[WIDTH] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (left > 0) {
            const Param& found = table.params[param];
            read_any(values, found.address, found.dtype, at - found.start, left);
            for (u32 index = 0; index < WIDTH; ++index) {
                if (index < left) values[index] = scaled(values[index], scale);
            }
        }
        write<Wire>(flat + at, values, end - at);
        for (u32 index = 0; index < WIDTH; ++index) {
            if (!is_finite(Wire::widen(Wire::narrow(values[index])))) least_found = least(least_found, at + index);
        }
    }
    note(where, least_found);
}

// parameters = flat[begin..end], cast.
template <typename Wire>
__device__ __forceinline__ void unpack(const Params& table, const typename Wire::Stored* flat, u64 begin, u64 end) {
    u64 param = first_entry(table.params, table.count, begin + thread_number() * WIDTH);
    for (u64 at = begin + thread_number() * WIDTH; at < end; at += thread_count() * WIDTH) {
        param = next_entry(table.params, table.count, param, at);
        u64 left = left_at(table.params, table.count, param, at);
        if (left == 0) continue;
        const Param& found = table.params[param];
        float values[WIDTH];
        read<Wire>(values, flat + at, end - at);
        write_any(found.address, found.dtype, at - found.start, values, least(left, end - at));
    }
}

#define PACK(name, Wire)                                                                                             \
    extern "C" __global__ void pack_##name(const __grid_constant__ Params table, Wire::Stored* flat, u64 begin,      \
                                           u64 end, Scale scale, Note where) {                                       \
        pack<Wire>(table, flat, begin, end, scale, where);                                                           \
    }                                                                                                                \
    extern "C" __global__ void unpack_##name(const __grid_constant__ Params table, const Wire::Stored* flat,         \
                                             u64 begin, u64 end) {                                                   \
        unpack<Wire>(table, flat, begin, end);                                                                       \
    }

PACK(f32, Float32)
PACK(f16, Float16)
PACK(bf16, BFloat16)
