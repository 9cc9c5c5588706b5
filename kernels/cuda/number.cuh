// The dtypes, the conversions between them, and reads and writes of vectors.
//
// Conversions give the same bits as `round.rs`, NaN included. The instructions of the device do not keep a NaN's payload, so NaN is
// converted separately. All files of this folder are compiled as one, in the order of `libraries.rs`, without contraction (a * b + c
// rounds twice) and with denormals. So each kernel has a twin in Rust with the same bits.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The numbers of `number` in `launch.rs`.
enum : u32 { F32 = 0, F16 = 1, BF16 = 2 };

// The number of elements that a thread reads or writes at once: 16 bytes of f32, or 8 bytes of a 16-bit dtype, next to those of the
// neighboring threads.
#define WIDTH 4

// Four and two words that one access reads or writes.
struct alignas(16) Quad { u32 words[4]; };
struct alignas(8) Pair { u32 words[2]; };

#ifdef __CUDACC_RTC__
// Written as assembly, since the compiler would split the store where it does not know the origin of the address.
__device__ __forceinline__ void store(Quad* to, Quad value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.words[0]), "r"(value.words[1]),
                 "r"(value.words[2]), "r"(value.words[3])
                 : "memory");
}

__device__ __forceinline__ void store(Pair* to, Pair value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(value.words[0]), "r"(value.words[1]) : "memory");
}

__device__ __forceinline__ u32 bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ u16 nearest_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float exact_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#endif

__device__ __forceinline__ bool is_nan(float value) { return (bits_of(value) & 0x7fffffffu) > 0x7f800000u; }

__device__ __forceinline__ bool is_finite(float value) { return (bits_of(value) & 0x7fffffffu) < 0x7f800000u; }

// The f16 nearest to a number, ties to even. A NaN keeps its sign and the upper bits of its payload, and is quiet.
__device__ __forceinline__ u16 to_f16(float value) {
    u32 bits = bits_of(value);
    u16 quiet = (u16)((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x1ffu));
    return is_nan(value) ? quiet : nearest_f16(value);
}

__device__ __forceinline__ float from_f16(u16 bits) {
    u32 quiet = (bits & 0x8000u) << 16 | 0x7fc00000u | (bits & 0x1ffu) << 13;
    return (bits & 0x7fffu) > 0x7c00u ? float_of(quiet) : exact_f16(bits);
}

__device__ __forceinline__ u16 to_bf16(float value) {
    u32 bits = bits_of(value);
    u32 carried = bits + (bits >> 16 & 1u) + 0x7fffu;
    return (u16)((is_nan(value) ? bits | 0x400000u : carried) >> 16);
}

__device__ __forceinline__ float from_bf16(u16 bits) {
    u32 wide = (u32)bits << 16;
    return float_of((wide & 0x7fffffffu) > 0x7f800000u ? wide | 0x400000u : wide);
}

// The dtypes as types: how an element is stored, how it converts to and from f32, and how it does so if it is not NaN, which takes a third of the
// instructions. OVERFLOWS are the bits of the least f32 that is infinite once it is narrowed.
struct Float32 {
    typedef float Stored;
    typedef Quad Vector;
    enum : u32 { OVERFLOWS = 0x7f800000u };
    static __device__ __forceinline__ float widen(Stored value) { return value; }
    static __device__ __forceinline__ Stored narrow(float value) { return value; }
    static __device__ __forceinline__ float widen_number(Stored value) { return value; }
    static __device__ __forceinline__ Stored narrow_number(float value) { return value; }
};

struct Float16 {
    typedef u16 Stored;
    typedef Pair Vector;
    enum : u32 { OVERFLOWS = 0x477ff000u };
    static __device__ __forceinline__ float widen(Stored value) { return from_f16(value); }
    static __device__ __forceinline__ Stored narrow(float value) { return to_f16(value); }
    static __device__ __forceinline__ float widen_number(Stored value) { return exact_f16(value); }
    static __device__ __forceinline__ Stored narrow_number(float value) { return nearest_f16(value); }
};

struct BFloat16 {
    typedef u16 Stored;
    typedef Pair Vector;
    enum : u32 { OVERFLOWS = 0x7f7f8000u };
    static __device__ __forceinline__ float widen(Stored value) { return from_bf16(value); }
    static __device__ __forceinline__ Stored narrow(float value) { return to_bf16(value); }
    static __device__ __forceinline__ float widen_number(Stored value) { return float_of((u32)value << 16); }
    static __device__ __forceinline__ Stored narrow_number(float value) {
        u32 bits = bits_of(value);
        return (u16)((bits + (bits >> 16 & 1u) + 0x7fffu) >> 16);
    }
};

// The ways to divide, as `Scale` in `divisor.rs`. With NONE a number keeps its bits. Multiplied by 1, a NaN would not keep them.
enum : u32 { NONE = 0, MULTIPLY = 1, DIVIDE = 2 };

struct Scale {
    float value;
    u32 how;
};

// A NaN keeps its payload and becomes quiet. The device's own arithmetic would give another NaN.
__device__ __forceinline__ float scaled(float number, Scale scale) {
    if (scale.how == NONE) return number;
    if (is_nan(number)) return float_of(bits_of(number) | 0x400000u);
    return scale.how == DIVIDE ? number / scale.value : number * scale.value;
}

// The same for numbers that are not NaN. The value of NONE is 1.
__device__ __forceinline__ void scale_numbers(float (&numbers)[WIDTH], Scale scale) {
    if (scale.how == DIVIDE) {
        for (u32 index = 0; index < WIDTH; ++index) numbers[index] = numbers[index] / scale.value;
    } else {
        for (u32 index = 0; index < WIDTH; ++index) numbers[index] = numbers[index] * scale.value;
    }
}

// The number of this thread among all threads of the launch, and the number of threads. A loop that begins at the first and strides
// by the second covers every element once.
__device__ __forceinline__ u64 thread_number() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 thread_count() { return (u64)gridDim.x * blockDim.x; }

// The threads of a block, as in launch.rs, where their number is not fixed: with more, they would have fewer registers.
#define THREADS 256

// The vectors that a thread reads before it uses the first of them. With one, the memory would idle between a read and the next.
#define DEPTH 4

// One bit for each of DEPTH vectors.
#define ALL_VECTORS ((1u << DEPTH) - 1)

// The elements from a vector of a thread to its next in a tile.
__device__ __forceinline__ u32 row_of_block() { return blockDim.x * WIDTH; }

// Calls `quick` or `each` for all vectors of a launch. A block takes tiles of DEPTH rows, and a row is a vector of each thread. `quick` gets a whole
// tile: its first element, and the thread's. It returns the bits of the vectors that it leaves to `each`. If there are no more vectors than threads, a
// tile is one row, so that no thread has two.
template <typename Quick, typename Each>
__device__ __forceinline__ void each_tile(u64 begin, u64 end, Quick quick, Each each) {
    const u32 rows = thread_count() * WIDTH < end - begin ? DEPTH : 1;
    const u32 row = row_of_block(), tile = rows * row;
    for (u64 first = begin + (u64)blockIdx.x * tile; first < end; first += (u64)gridDim.x * tile) {
        u64 at = first + threadIdx.x * WIDTH;
        u32 rest = rows == DEPTH && first + tile <= end ? quick(first, at) : (1u << rows) - 1;
        for (; rest != 0 && at < end; rest >>= 1, at += row) {
            if (rest & 1) each(at);
        }
    }
}

__device__ __forceinline__ u64 least(u64 one, u64 other) { return one < other ? one : other; }

// The address of a note, which keeps the least number that is noted there; with address 0 nothing is noted. A minimum does not depend
// on the order of threads, as a sum would. Numbers are indices plus `base`, which grows from round to round, so earlier rounds are less.
struct Note {
    u64* least;
    u64 base;
};

// Notes the index that a thread has found; ~0 stands for none.
__device__ __forceinline__ void note(Note where, u64 found) {
    if (where.least && found != ~0ull) atomicMin(where.least, where.base + found);
}

// A vector as a whole and as its elements.
template <typename T>
union Elements {
    typename T::Vector vector;
    typename T::Stored each[WIDTH];
};

template <typename T>
__device__ __forceinline__ bool is_aligned(const typename T::Stored* at) {
    return ((u64)at & (sizeof(typename T::Vector) - 1)) == 0;
}

// Reads `WIDTH` elements in one access where they are aligned, or up to `count` of them one by one; zeros for the rest.
template <typename T>
__device__ __forceinline__ void read(float (&values)[WIDTH], const typename T::Stored* from, u64 count) {
    if (count >= WIDTH && is_aligned<T>(from)) {
        Elements<T> elements;
        elements.vector = *(const typename T::Vector*)from;
        for (u32 index = 0; index < WIDTH; ++index) values[index] = T::widen(elements.each[index]);
    } else {
        for (u32 index = 0; index < WIDTH; ++index) values[index] = index < count ? T::widen(from[index]) : 0.0f;
    }
}

// Writes `WIDTH` elements in one access where they are aligned, or up to `count` of them one by one.
template <typename T>
__device__ __forceinline__ void write(typename T::Stored* to, const float (&values)[WIDTH], u64 count) {
    Elements<T> elements;
    for (u32 index = 0; index < WIDTH; ++index) elements.each[index] = T::narrow(values[index]);
    if (count >= WIDTH && is_aligned<T>(to)) {
        store((typename T::Vector*)to, elements.vector);
    } else {
        for (u32 index = 0; index < WIDTH; ++index) {
            if (index < count) to[index] = elements.each[index];
        }
    }
}

// Whether all numbers are finite once they are narrowed to T.
template <typename T>
__device__ __forceinline__ bool are_finite(const float (&values)[WIDTH]) {
    u32 greatest = 0;
    for (u32 index = 0; index < WIDTH; ++index) {
        u32 magnitude = bits_of(values[index]) & 0x7fffffffu;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    return greatest < T::OVERFLOWS;
}

// Writes WIDTH elements, which are finite, to an aligned address.
template <typename T>
__device__ __forceinline__ void write_finite(typename T::Stored* to, const float (&values)[WIDTH]) {
    Elements<T> elements;
    for (u32 index = 0; index < WIDTH; ++index) elements.each[index] = T::narrow_number(values[index]);
    store((typename T::Vector*)to, elements.vector);
}

// Reads elements whose dtype is known at run time.
__device__ __forceinline__ void read_any(float (&values)[WIDTH], u64 from, u32 dtype, u64 offset, u64 count) {
    if (dtype == F32) read<Float32>(values, (const float*)from + offset, count);
    else if (dtype == F16) read<Float16>(values, (const u16*)from + offset, count);
    else read<BFloat16>(values, (const u16*)from + offset, count);
}

// The index of the last of `count` entries that starts at `at` or before, or 0.
template <typename Entry>
__device__ __forceinline__ u64 first_entry(const Entry* entries, u64 count, u64 at) {
    u64 low = 0, high = count;
    while (low + 1 < high) {
        u64 middle = (low + high) / 2;
        if (entries[middle].start <= at) low = middle;
        else high = middle;
    }
    return low;
}

// The same for a thread that visits elements in ascending order, and was at `entry` before. It looks at one entry if that is still the one; but a
// thread may as well jump over dozens.
template <typename Entry>
__device__ __forceinline__ u64 next_entry(const Entry* entries, u64 count, u64 entry, u64 at) {
    if (entry + 1 >= count || entries[entry + 1].start > at) return entry;
    return entry + 1 + first_entry(entries + entry + 1, count - entry - 1, at);
}

// The number of elements from `at` on that belong to the entry.
template <typename Entry>
__device__ __forceinline__ u64 left_at(const Entry* entries, u64 count, u64 entry, u64 at) {
    if (entry >= count) return 0;
    u64 start = entries[entry].start, len = entries[entry].len;
    return at >= start && at - start < len ? len - (at - start) : 0;
}
