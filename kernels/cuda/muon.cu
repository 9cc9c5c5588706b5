// The Muon update of consecutive elements of a matrix: before and after the matrix is orthogonalized, and its division by its norm.

// The fields of `MuonFactors` in `muon.rs`, and the kind of momentum.
struct MuonFactors {
    float clip;
    float take;
    float keep;
    float rate;
    u32 nesterov;
    u32 unused;
};

__device__ __forceinline__ float towards(float from, float to, float take) { return from + take * (to - from); }

extern "C" __global__ void muon_direction(float* directions, const float* gradients, const float* momenta, u64 len,
                                          double divisor, MuonFactors factors) {
    for (u64 at = thread_number() * WIDTH; at < len; at += thread_count() * WIDTH) {
        float gradient[WIDTH], momentum[WIDTH];
        read<Float32>(gradient, gradients + at, len - at);
        read<Float32>(momentum, momenta + at, len - at);
        for (u32 index = 0; index < WIDTH; ++index) {
            float clipped = quotient(gradient[index], divisor) * factors.clip;
            float along = towards(momentum[index], clipped, factors.take);
            gradient[index] = factors.nesterov ? towards(along, clipped, factors.take) : along;
        }
        write<Float32>(directions + at, gradient, len - at);
    }
}

template <typename T>
__device__ __forceinline__ void muon(float* parameters, const float* gradients, const float* directions, float* momenta,
                                     typename T::Stored* rounded, u64 len, double divisor, MuonFactors factors) {
    for (u64 at = thread_number() * WIDTH; at < len; at += thread_count() * WIDTH) {
        float parameter[WIDTH], gradient[WIDTH], direction[WIDTH], momentum[WIDTH];
        read<Float32>(parameter, parameters + at, len - at);
        read<Float32>(gradient, gradients + at, len - at);
        read<Float32>(direction, directions + at, len - at);
        read<Float32>(momentum, momenta + at, len - at);
        for (u32 index = 0; index < WIDTH; ++index) {
            float clipped = quotient(gradient[index], divisor) * factors.clip;
            momentum[index] = towards(momentum[index], clipped, factors.take);
            parameter[index] = parameter[index] * factors.keep - factors.rate * direction[index];
        }
        write<Float32>(parameters + at, parameter, len - at);
        write<Float32>(momenta + at, momentum, len - at);
        Rounded<T>::write_to(rounded + at, parameter, len - at);
    }
}

// target = round(round(source) / round(max(norm, epsilon))), with the squared norm of the rounded source.
template <typename T>
__device__ __forceinline__ void normalize(typename T::Stored* target, const float* source, u64 len, const Seen* seen,
                                          double epsilon) {
    float norm = T::widen(T::narrow((float)fmax(sqrt(seen->squares), epsilon)));
    for (u64 at = thread_number() * WIDTH; at < len; at += thread_count() * WIDTH) {
        float values[WIDTH];
        read<Float32>(values, source + at, len - at);
        for (u32 index = 0; index < WIDTH; ++index) values[index] = T::widen(T::narrow(values[index])) / norm;
        write<T>(target + at, values, len - at);
    }
}

#define MUON(name, T)                                                                                                 \
    extern "C" __global__ void muon_##name(float* parameters, const float* gradients, const float* directions,       \
                                           float* momenta, T::Stored* rounded, u64 len, double divisor,              \
                                           MuonFactors factors) {                                                    \
        muon<T>(parameters, gradients, directions, momenta, rounded, len, divisor, factors);                         \
    }

#define NORMALIZE(name, T)                                                                                            \
    extern "C" __global__ void normalize_##name(T::Stored* target, const float* source, u64 len, const Seen* seen,   \
                                                double epsilon) {                                                    \
        normalize<T>(target, source, len, seen, epsilon);                                                            \
    }

MUON(alone, Nothing)
MUON(f16, Float16)
MUON(bf16, BFloat16)
NORMALIZE(f32, Float32)
NORMALIZE(bf16, BFloat16)
