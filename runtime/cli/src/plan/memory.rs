//! The memory of a rank in a step, by place, category and phase.

use hsdp_sharding::{ByteCount, MemoryPlan, Offload, Phase, Plan};

/// Peak memory of a rank. Each category has the peak of the rank with the most.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    /// Memory in the place of the model, and in the host if a device's model takes memory there for
    /// offloaded parts or an exchange.
    pub(super) places: Vec<Place>,
}

/// Peaks in one place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Name of the place: `host` or `device`.
    pub(super) name: &'static str,
    /// Peaks by category.
    pub(super) peaks: MemoryPlan,
    /// Peaks of `full`, in the forward and in the backward.
    pub(super) full: [ByteCount; 2],
}

/// A category with its peak.
#[derive(Clone, Copy, Debug)]
pub(super) struct Category {
    pub(super) name: &'static str,
    pub(super) bytes: ByteCount,
    /// Phase in which it is held.
    pub(super) when: &'static str,
}

const PHASES: [Phase; 2] = [Phase::Forward, Phase::Backward];

impl Memory {
    pub(super) fn on_host(plan: &Plan) -> Self {
        let full = PHASES.map(|phase| plan.full_in(phase));
        Self { places: vec![Place { name: "host", peaks: plan.memory(), full }] }
    }

    pub(super) fn on_device(plan: &Plan, offload: Offload) -> Self {
        let full = PHASES.map(|phase| plan.full_in_on_device(phase));
        let peaks = plan.memory_on_device(offload);
        let mut places = vec![Place { name: "device", peaks, full }];
        let peaks = plan.memory_offloaded(offload);
        if offload != Offload::None || peaks.total() > ByteCount::ZERO {
            places.push(Place { name: "host", peaks, full: [ByteCount::ZERO; 2] });
        }
        Self { places }
    }
}

impl Place {
    /// Returns the categories in the order in which they are allocated, `full` once for each phase,
    /// and `update` if it takes memory.
    pub(super) fn categories(&self) -> impl Iterator<Item = Category> + use<> {
        const ALWAYS: &str = "always";
        const FROM_BACKWARD: &str = "first backward to update";
        let [forward, backward] = self.full;
        let peaks = &self.peaks;
        let update = peaks.update;
        let all = [
            ("shard", peaks.shard, ALWAYS),
            ("gather_input", peaks.gather_input, ALWAYS),
            ("optimizer", peaks.optimizer, ALWAYS),
            ("full", forward, "forward"),
            ("full", backward, "backward"),
            ("grad_full", peaks.grad_full, FROM_BACKWARD),
            ("partial", peaks.partial, FROM_BACKWARD),
            ("update", update, "update"),
        ]
        .map(|(name, bytes, when)| Category { name, bytes, when });
        all.into_iter().filter(move |it| it.name != "update" || update > ByteCount::ZERO)
    }
}
