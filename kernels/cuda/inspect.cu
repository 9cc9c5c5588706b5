// The squared norm of a buffer, and its first element that is not finite, in one pass.

// The largest number of blocks, and the number of threads of a block, on any device. So the assignment of elements to threads, and the
// order of additions, are the same on all devices. Blocks without elements are not launched, which does not change the sums.
#define INSPECT_BLOCKS 512
#define INSPECT_THREADS 256

// The result of an inspection of elements.
struct Seen {
    double squares;
    // The least index of an element that is not finite; the greatest u64 if all elements are finite.
    u64 first;
};

__device__ __forceinline__ Seen both(Seen one, Seen other) {
    Seen together = {one.squares + other.squares, least(one.first, other.first)};
    return together;
}

// Combines the results of the second half of the threads with those of the first half, and so on, until one result is left. Returns it.
template <u32 COUNT>
__device__ __forceinline__ Seen in_pairs(Seen mine, Seen* shared) {
    u32 own = threadIdx.x;
    shared[own] = mine;
    __syncthreads();
    for (u32 width = COUNT / 2; width > 0; width /= 2) {
        if (own < width) shared[own] = both(shared[own], shared[own + width]);
        __syncthreads();
    }
    return shared[0];
}

// Takes elements, which are rounded to T, into what a thread has seen, from left to right.
template <typename T>
__device__ __forceinline__ void see(Seen& mine, const float (&elements)[WIDTH], u64 at) {
    for (u32 index = 0; index < WIDTH; ++index) {
        float rounded = T::widen(T::narrow(elements[index]));
        mine.squares += (double)rounded * (double)rounded;
        if (!is_finite(rounded)) mine.first = least(mine.first, at + index);
    }
}

// Writes one `Seen` per block. A thread takes its vectors from left to right, and reads DEPTH of them at once: zeros beyond the end.
template <typename T>
__device__ __forceinline__ void inspect(const float* values, u64 len, Seen* seen, Seen* shared) {
    Seen mine = {0.0, ~0ull};
    const u64 stride = thread_count() * WIDTH;
    for (u64 at = thread_number() * WIDTH; at < len; at += DEPTH * stride) {
        float elements[DEPTH][WIDTH];
#pragma unroll
        for (u32 vector = 0; vector < DEPTH; ++vector) {
            u64 own = at + vector * stride;
            read<Float32>(elements[vector], values + own, own < len ? len - own : 0);
        }
#pragma unroll
        for (u32 vector = 0; vector < DEPTH; ++vector) see<T>(mine, elements[vector], at + vector * stride);
    }
    Seen all = in_pairs<INSPECT_THREADS>(mine, shared);
    if (threadIdx.x == 0) seen[blockIdx.x] = all;
}

#define INSPECT(name, T)                                                                                             \
    extern "C" __global__ void inspect_##name(const float* values, u64 len, Seen* seen) {                            \
        __shared__ Seen shared[INSPECT_THREADS];                                                                     \
        inspect<T>(values, len, seen, shared);                                                                       \
    }

INSPECT(f32, Float32)
INSPECT(bf16, BFloat16)

// Combines the results of `count` blocks. It runs as one block with INSPECT_BLOCKS threads.
extern "C" __global__ void inspect_blocks(const Seen* seen, u64 count, Seen* all) {
    __shared__ Seen shared[INSPECT_BLOCKS];
    Seen nothing = {0.0, ~0ull};
    Seen together = in_pairs<INSPECT_BLOCKS>(threadIdx.x < count ? seen[threadIdx.x] : nothing, shared);
    if (threadIdx.x == 0) *all = together;
}
