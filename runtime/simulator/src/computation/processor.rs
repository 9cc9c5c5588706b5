//! The processor of a rank: its card, or its part of a host.

use hsdp_sharding::DType;

use crate::host::Placement;
use crate::machine::{Kind, Machine};
use crate::{Error, Time, WorkCost};

/// The speed of a rank's card, or of its part of a host's cores and memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Processor {
    placement: Placement,
    /// Speeds in flop/s for each dtype of training: of products with aligned strides, and of
    /// others.
    speeds: [(DType, [f64; 2]); 3],
    /// The flops of a product that reaches half of its speed.
    half: f64,
    /// B/s.
    bandwidth: f64,
    /// Seconds of a kernel beyond its flops or bytes.
    kernel: f64,
    /// Seconds of the host for a launch.
    launch: f64,
}

/// Products of matrices of equal sizes, in one kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Products {
    /// Products in the kernel.
    pub(super) count: f64,
    /// `m`, `n` and `k`: each product is of an `m` x `k` with a `k` x `n` matrix.
    pub(super) sizes: [usize; 3],
    /// Elements from the beginning of a row to that of the next, for each matrix in memory: both
    /// inputs and the result. SIMULATOR.md, "Computation", lists them. Two of the three are always
    /// equal.
    pub(super) strides: [usize; 2],
}

/// Divisor of the bytes of each stride in a product that has its full speed.
const ALIGNMENT: usize = 16;

impl Processor {
    /// Returns the processor of one of `ranks` ranks that compute on a machine at the same time, in
    /// `dtype` unless a unit of the model declares another. Each has its own card; those on a host
    /// share its cores and the bandwidth of its memory.
    ///
    /// # Errors
    /// [`Error::Computation`] if no training computes in `dtype`.
    pub fn new(machine: &Machine, dtype: DType, ranks: usize) -> Result<Self, Error> {
        let Machine { memory, compute, .. } = machine;
        if !dtype.is_of_training() {
            let problem = format!("no training computes in {dtype}: expected f32, bf16 or f16");
            return Err(Error::Computation { problem });
        }
        let (placement, cores, sharing) = match machine.kind {
            Kind::Device(_) => (Placement::Device, 1.0, 1.0),
            Kind::Host(_) => {
                (Placement::Host, (machine.ranks.value() / ranks as f64).min(1.0), ranks as f64)
            }
        };
        let efficiency = compute.efficiency.value();
        // A fit to aligned steps may leave the number behind that of aligned products.
        let efficiencies = [efficiency, compute.unaligned.value().min(efficiency)];
        let speeds = [DType::F32, DType::BF16, DType::F16].map(|dtype| {
            let peak = compute.peak(dtype).map_or(0.0, |peak| peak.value());
            (dtype, efficiencies.map(|part| peak * part * cores))
        });
        Ok(Self {
            placement,
            speeds,
            half: compute.half.value(),
            bandwidth: memory.bandwidth.value() * memory.efficiency.value() / sharing,
            kernel: compute.kernel.value(),
            launch: compute.launch.value() / cores,
        })
    }

    /// Returns the seconds of a kernel of products.
    pub(super) fn product(&self, products: &Products, dtype: DType) -> f64 {
        let Products { count, sizes, strides } = *products;
        let size = dtype.size_bytes();
        let is_aligned =
            strides.into_iter().all(|it| it.saturating_mul(size).is_multiple_of(ALIGNMENT));
        let speed = self.speeds(dtype)[usize::from(!is_aligned)];
        let [m, n, k] = sizes.map(|dim| dim as f64);
        let elements = count * (m * n + m * k + n * k);
        let computing = 2.0f64.mul_add(count * m * n * k, self.half) / speed;
        computing.max(elements * size as f64 / self.bandwidth) + self.kernel
    }

    /// Returns the flop/s of products in `dtype` with aligned strides, and of others.
    ///
    /// # Panics
    /// If no training computes in `dtype`.
    fn speeds(&self, dtype: DType) -> [f64; 2] {
        let (_, speeds) = self.speeds.iter().find(|(of, _)| *of == dtype).unwrap_or_else(|| {
            panic!("no training computes in {dtype}: expected f32, bf16 or f16")
        });
        *speeds
    }

    /// Returns the seconds of a kernel that computes `flops` operations over `bytes` bytes,
    /// whatever its shape.
    pub(super) fn fused(&self, flops: f64, bytes: f64, dtype: DType) -> f64 {
        ((flops + self.half) / self.speeds(dtype)[0]).max(bytes / self.bandwidth) + self.kernel
    }

    /// Seconds of `kernels` kernels that read and write so many bytes of memory in all.
    pub(super) fn passes(&self, kernels: f64, bytes: f64) -> f64 {
        kernels.mul_add(self.kernel, bytes / self.bandwidth)
    }

    /// The cost of one kernel that reads and writes so many bytes, such as the addition of gradients.
    #[must_use]
    pub fn pass(&self, bytes: u64) -> WorkCost {
        self.cost(1.0, self.passes(1.0, bytes as f64))
    }

    /// The cost of so many kernels, which take so many seconds.
    pub(super) fn cost(&self, kernels: f64, seconds: f64) -> WorkCost {
        let launches = kernels * self.launch;
        match self.placement {
            Placement::Device => WorkCost { host: time(launches), device: time(seconds) },
            Placement::Host => WorkCost { host: time(launches + seconds), device: Time::ZERO },
        }
    }
}

/// The time, or the longest one. No number of a machine makes it negative or undefined.
fn time(seconds: f64) -> Time {
    Time::from_seconds(seconds).unwrap_or(Time::MAX)
}
