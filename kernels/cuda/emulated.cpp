// The kernels by name, for a host compiler. See emulated.hpp.
#include "emulated.hpp"

#include "number.cuh"
#include "pack.cu"
#include "sum.cu"
#include "inspect.cu"
#include "update.cu"
#include "muon.cu"

// Returns a function that runs the kernel of this name, or an empty function if there is no such kernel. Without arguments the result
// only shows whether the kernel exists. The threads of kernels whose name begins with `inspect` meet in `__syncthreads`.
std::function<void()> emulate(const char* name, unsigned grid, unsigned block, void** arguments) {
#define KERNEL(kernel)                                                                        \
    if (std::strcmp(name, #kernel) == 0) {                                                    \
        bool meets = std::strncmp(name, "inspect", 7) == 0;                                   \
        if (!arguments) return [] {};                                                         \
        return emulated::launch(kernel, meets, grid, block, arguments);                       \
    }
#define OF_EACH_WIRE(kernel) KERNEL(kernel##_f32) KERNEL(kernel##_f16) KERNEL(kernel##_bf16)
#define OF_EACH_CAST(kernel) KERNEL(kernel##_alone) KERNEL(kernel##_f16) KERNEL(kernel##_bf16)
    OF_EACH_WIRE(pack)
    OF_EACH_WIRE(sum)
    OF_EACH_WIRE(narrow)
    KERNEL(widen)
    KERNEL(inspect_f32)
    KERNEL(inspect_bf16)
    KERNEL(inspect_blocks)
    OF_EACH_CAST(adamw)
    OF_EACH_CAST(sgd)
    OF_EACH_CAST(lion)
    OF_EACH_CAST(muon)
    KERNEL(muon_direction)
    KERNEL(normalize_f32)
    KERNEL(normalize_bf16)
    return {};
}
