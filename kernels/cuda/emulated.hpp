// The part of CUDA's C++ that a host compiler needs to run the kernels on a CPU, one thread after the other. So their results are
// tested without a GPU. Their speed, and races between threads that run at the same time, are not tested.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <csetjmp>
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
//
// `setcontext` enters a new stack, and `_longjmp` changes to one that a thread has left: `swapcontext` would make system calls for
// the signal mask each time.
class Block {
  public:
    // Runs `body` by each thread. Later blocks of this thread of the host reuse the stacks.
    static void run(void (*body)(void*), void* argument, unsigned threads) {
        static thread_local Block block;
        block.body = body;
        block.argument = argument;
        while (block.fibers.size() < threads) block.fibers.push_back(std::make_unique<Fiber>());
        for (unsigned number = 0; number < threads; ++number) block.fibers[number]->state = Fiber::New;
        current() = &block;
        for (bool goes_on = true; goes_on;) {
            goes_on = false;
            for (unsigned number = 0; number < threads; ++number) {
                if (block.fibers[number]->state == Fiber::Done) continue;
                threadIdx.x = number;
                block.resume(*block.fibers[number]);
                goes_on = true;
            }
        }
    }

    // Lets the other threads run up to the same point.
    void meet() {
        if (_setjmp(fibers[threadIdx.x]->met) == 0) _longjmp(scheduler, 1);
    }

    static Block*& current() {
        static thread_local Block* block = nullptr;
        return block;
    }

  private:
    static constexpr std::size_t STACK = 16 << 10;

    struct Fiber {
        enum { New, Met, Done } state = New;
        std::jmp_buf met;
        std::unique_ptr<char[]> stack{new char[STACK]};
    };

    // Runs a thread up to its next `__syncthreads`, or to its end.
    void resume(Fiber& fiber) {
        if (_setjmp(scheduler) != 0) return;
        if (fiber.state == Fiber::Met) _longjmp(fiber.met, 1);
        fiber.state = Fiber::Met;
        ucontext_t entry;
        getcontext(&entry);
        entry.uc_stack.ss_sp = fiber.stack.get();
        entry.uc_stack.ss_size = STACK;
        makecontext(&entry, enter, 0);
        setcontext(&entry);
    }

    static void enter() {
        Block& block = *current();
        block.body(block.argument);
        block.fibers[threadIdx.x]->state = Fiber::Done;
        _longjmp(block.scheduler, 1);
    }

    void (*body)(void*);
    void* argument;
    std::jmp_buf scheduler;
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
                Block::run([](void* call) { (*static_cast<Call*>(call))(); }, &call, block);
                continue;
            }
            for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) call();
        }
    };
}

}  // namespace emulated

static inline void __syncthreads() { emulated::Block::current()->meet(); }
