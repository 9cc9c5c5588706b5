// The part of CUDA's C++ that a host compiler needs to run the kernels on a CPU, one thread after the other. So their results are
// tested without a GPU. Their speed, and races between threads that run at the same time, are not tested.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
// Blocks run one after the other on a thread of the host.
#define __shared__ static thread_local

struct Place {
    unsigned x = 0, y = 0, z = 0;
};

static thread_local Place gridDim, blockDim, blockIdx, threadIdx;

template <typename Vector>
static inline void store(Vector* to, Vector value) {
    *to = value;
}

static inline unsigned bits_of(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Conversions by the compiler, which are independent of the kernels' own.
static inline unsigned short nearest_f16(float value) {
    _Float16 nearest = (_Float16)value;
    unsigned short bits;
    std::memcpy(&bits, &nearest, sizeof bits);
    return bits;
}

static inline float exact_f16(unsigned short bits) {
    _Float16 value;
    std::memcpy(&value, &bits, sizeof value);
    return (float)value;
}

static inline void atomicMin(unsigned long long* least, unsigned long long value) {
    if (value < *least) *least = value;
}

namespace emulated {

// The threads of a block, each with its own stack. All run up to one `__syncthreads` before any goes on to the next.
class Block {
  public:
    static constexpr std::size_t STACK = 16 << 10;

    Block(void (*body)(void*), void* argument, unsigned threads) : body(body), argument(argument) {
        current() = this;
        for (unsigned number = 0; number < threads; ++number) {
            fibers.push_back(std::make_unique<Fiber>());
            Fiber& fiber = *fibers.back();
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = stack(number);
            fiber.context.uc_stack.ss_size = STACK;
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, enter, 0);
        }
    }

    void run() {
        for (bool goes_on = true; goes_on;) {
            goes_on = false;
            for (unsigned number = 0; number < fibers.size(); ++number) {
                if (fibers[number]->is_done) continue;
                threadIdx.x = number;
                swapcontext(&scheduler, &fibers[number]->context);
                goes_on = true;
            }
        }
    }

    // Lets the other threads run up to the same point.
    void meet() { swapcontext(&fibers[threadIdx.x]->context, &scheduler); }

    static Block*& current() {
        static thread_local Block* block = nullptr;
        return block;
    }

  private:
    struct Fiber {
        ucontext_t context;
        bool is_done = false;
    };

    // Later blocks reuse the stacks.
    static char* stack(unsigned number) {
        static thread_local std::vector<std::unique_ptr<char[]>> stacks;
        while (stacks.size() <= number) stacks.emplace_back(new char[STACK]);
        return stacks[number].get();
    }

    static void enter() {
        Block& block = *current();
        block.body(block.argument);
        block.fibers[threadIdx.x]->is_done = true;
    }

    void (*body)(void*);
    void* argument;
    ucontext_t scheduler;
    std::vector<std::unique_ptr<Fiber>> fibers;
};

// Returns a function that runs the kernel. The arguments are read at the launch, as in `cuLaunchKernel`. Threads that meet in
// `__syncthreads` have stacks of their own; other threads need none.
template <typename... Arguments>
std::function<void()> launch(void (*kernel)(Arguments...), bool meets, unsigned grid, unsigned block, void** arguments) {
    using Read = std::tuple<std::remove_const_t<Arguments>...>;
    auto read = [&]<std::size_t... Index>(std::index_sequence<Index...>) {
        return std::make_shared<Read>(*(std::remove_const_t<Arguments>*)arguments[Index]...);
    }(std::index_sequence_for<Arguments...>{});
    return [=] {
        auto call = [&] { std::apply(kernel, *read); };
        using Call = decltype(call);
        gridDim.x = grid;
        blockDim.x = block;
        for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
            if (meets) {
                Block([](void* call) { (*static_cast<Call*>(call))(); }, &call, block).run();
                continue;
            }
            for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) call();
        }
    };
}

}  // namespace emulated

static inline void __syncthreads() { emulated::Block::current()->meet(); }
