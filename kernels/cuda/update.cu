// Updates of parameters: division, clipping, update, and the cast for the next gather, in one pass.

// The largest number of pieces of one launch. The reason is that of MOST_PARAMS.
#define MOST_PIECES 120

// Consecutive elements of one parameter in this rank's shard, the first element of their state, and their own factors of an AdamW
// step: a parameter may have had fewer updates than others.
struct Piece {
    u64 start;
    u64 len;
    u64 state;
    float rate;
    float second_root;
};

static_assert(sizeof(Piece) == 32, "as in launch.rs");

// Pieces in the order of their starts. Elements between them are not changed.
struct Pieces {
    Piece pieces[MOST_PIECES];
    u64 count;
};

// The fields of `AdamWFactors` in `adamw.rs`, except those of a piece.
struct AdamWFactors {
    float clip;
    float keep_parameter;
    float keep_first;
    float take_first;
    float keep_second;
    float take_second;
    float epsilon;
    u32 unused;
};

// The fields of `SgdFactors` in `sgd.rs`, and the kind of momentum.
struct SgdFactors {
    float clip;
    float decay;
    float momentum;
    float rate;
    u32 nesterov;
    u32 unused;
};

// The fields of `LionFactors` in `lion.rs`.
struct LionFactors {
    float clip;
    float keep_parameter;
    float keep_direction;
    float take_direction;
    float keep_momentum;
    float take_momentum;
    float rate;
    u32 unused;
};

// The quotient, computed in f64 and rounded to f32 once.
__device__ __forceinline__ float quotient(float gradient, double divisor) { return (float)((double)gradient / divisor); }

// Calls `update` for each vector of elements of a piece, with its first index, the first index of its state, the number of elements, and
// the piece.
template <typename Update>
__device__ __forceinline__ void each_vector(const Pieces& table, Update update) {
    const Piece& last = table.pieces[table.count - 1];
    u64 begin = table.pieces[0].start, end = last.start + last.len;
    u64 piece = first_entry(table.pieces, table.count, begin + thread_number() * WIDTH);
    for (u64 at = begin + thread_number() * WIDTH; at < end; at += thread_count() * WIDTH) {
        piece = next_entry(table.pieces, table.count, piece, at);
        u64 left = left_at(table.pieces, table.count, piece, at);
        const Piece& own = table.pieces[piece];
        if (left > 0) update(at, own.state + (at - own.start), left, own);
    }
}

// The type for updates without a cast.
struct Nothing {
    typedef float Stored;
};

template <typename T>
struct Rounded {
    static __device__ __forceinline__ void write_to(typename T::Stored* to, const float (&values)[WIDTH], u64 count) {
        write<T>(to, values, count);
    }
};

template <>
struct Rounded<Nothing> {
    static __device__ __forceinline__ void write_to(float*, const float (&)[WIDTH], u64) {}
};

template <typename T>
__device__ __forceinline__ void adamw(const Pieces& table, float* parameters, const float* gradients, float* first_moments,
                                      float* second_moments, typename T::Stored* rounded, double divisor,
                                      AdamWFactors factors) {
    each_vector(table, [&](u64 at, u64 state, u64 count, const Piece& piece) {
        float parameter[WIDTH], gradient[WIDTH], first[WIDTH], second[WIDTH];
        read<Float32>(parameter, parameters + at, count);
        read<Float32>(gradient, gradients + at, count);
        read<Float32>(first, first_moments + state, count);
        read<Float32>(second, second_moments + state, count);
        for (u32 index = 0; index < WIDTH; ++index) {
            float clipped = quotient(gradient[index], divisor) * factors.clip;
            first[index] = factors.keep_first * first[index] + factors.take_first * clipped;
            second[index] = factors.keep_second * second[index] + factors.take_second * clipped * clipped;
            float scale = sqrtf(second[index]) / piece.second_root + factors.epsilon;
            parameter[index] = parameter[index] * factors.keep_parameter - piece.rate * first[index] / scale;
        }
        write<Float32>(parameters + at, parameter, count);
        write<Float32>(first_moments + state, first, count);
        write<Float32>(second_moments + state, second, count);
        Rounded<T>::write_to(rounded + at, parameter, count);
    });
}

// There is no velocity if `velocities` is null.
template <typename T>
__device__ __forceinline__ void sgd(const Pieces& table, float* parameters, const float* gradients, float* velocities,
                                    typename T::Stored* rounded, double divisor, SgdFactors factors) {
    each_vector(table, [&](u64 at, u64 state, u64 count, const Piece&) {
        float parameter[WIDTH], gradient[WIDTH], velocity[WIDTH];
        read<Float32>(parameter, parameters + at, count);
        read<Float32>(gradient, gradients + at, count);
        if (velocities) read<Float32>(velocity, velocities + state, count);
        for (u32 index = 0; index < WIDTH; ++index) {
            float decayed = quotient(gradient[index], divisor) * factors.clip + factors.decay * parameter[index];
            float direction = decayed;
            if (velocities) {
                velocity[index] = factors.momentum * velocity[index] + decayed;
                direction = factors.nesterov ? decayed + factors.momentum * velocity[index] : velocity[index];
            }
            parameter[index] = parameter[index] - factors.rate * direction;
        }
        write<Float32>(parameters + at, parameter, count);
        if (velocities) write<Float32>(velocities + state, velocity, count);
        Rounded<T>::write_to(rounded + at, parameter, count);
    });
}

template <typename T>
__device__ __forceinline__ void lion(const Pieces& table, float* parameters, const float* gradients, float* momenta,
                                     typename T::Stored* rounded, double divisor, LionFactors factors) {
    each_vector(table, [&](u64 at, u64 state, u64 count, const Piece&) {
        float parameter[WIDTH], gradient[WIDTH], momentum[WIDTH];
        read<Float32>(parameter, parameters + at, count);
        read<Float32>(gradient, gradients + at, count);
        read<Float32>(momentum, momenta + state, count);
        for (u32 index = 0; index < WIDTH; ++index) {
            float clipped = quotient(gradient[index], divisor) * factors.clip;
            float direction = factors.keep_direction * momentum[index] + factors.take_direction * clipped;
            float sign = (direction > 0.0f ? 1.0f : 0.0f) - (direction < 0.0f ? 1.0f : 0.0f);
            parameter[index] = parameter[index] * factors.keep_parameter - factors.rate * sign;
            momentum[index] = factors.keep_momentum * momentum[index] + factors.take_momentum * clipped;
        }
        write<Float32>(parameters + at, parameter, count);
        write<Float32>(momenta + state, momentum, count);
        Rounded<T>::write_to(rounded + at, parameter, count);
    });
}

#define UPDATE(name, T)                                                                                              \
    extern "C" __global__ void adamw_##name(const __grid_constant__ Pieces table, float* parameters,                 \
                                            const float* gradients, float* first_moments, float* second_moments,     \
                                            T::Stored* rounded, double divisor, AdamWFactors factors) {              \
        adamw<T>(table, parameters, gradients, first_moments, second_moments, rounded, divisor, factors);            \
    }                                                                                                                \
    extern "C" __global__ void sgd_##name(const __grid_constant__ Pieces table, float* parameters,                   \
                                          const float* gradients, float* velocities, T::Stored* rounded,             \
                                          double divisor, SgdFactors factors) {                                      \
        sgd<T>(table, parameters, gradients, velocities, rounded, divisor, factors);                                 \
    }                                                                                                                \
    extern "C" __global__ void lion_##name(const __grid_constant__ Pieces table, float* parameters,                  \
                                           const float* gradients, float* momenta, T::Stored* rounded,               \
                                           double divisor, LionFactors factors) {                                    \
        lion<T>(table, parameters, gradients, momenta, rounded, divisor, factors);                                   \
    }

UPDATE(alone, Nothing)
UPDATE(f16, Float16)
UPDATE(bf16, BFloat16)
