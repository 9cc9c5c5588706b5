//! A plan as tables.

use comfy_table::Table;
use hsdp_sharding::{
    Axis, ByteCount, Coordinate, Flow, MemoryPlan, Offload, Param, Phase, Plan, Rank, Traffic,
    Unit, UnitId, UnitLayout,
};
use hsdp_train::stderr::in_one_line;
use hsdp_train::stdout::table;

use super::Planned;

/// The tables of units, memory and traffic.
pub(super) fn text(planned: &Planned) -> String {
    let mut parts = vec![heading(planned), units(planned).to_string()];
    for place in &planned.memory {
        parts.push(memory(place).to_string());
    }
    let differing = match planned.plan.divides_state() {
        true => "`shard`, `optimizer` and `update`",
        false => "`optimizer` and `update`",
    };
    parts.push(format!(
        "memory is the same on every rank, except {differing}: these are of the rank with the most"
    ));
    parts.push(traffic(planned).to_string());
    parts.push(busiest(planned));
    parts.join("\n")
}

fn heading(planned: &Planned) -> String {
    let Planned { name, plan, world, .. } = planned;
    let mesh = plan.mesh();
    let options = plan.options();
    let spec = plan.spec();
    let parameters = spec.numel().get();
    let units = spec.units().len();
    let microbatches = world.microbatches;
    let name = in_one_line(name);
    format!(
        "{name}: {} parameters in {units} units on mesh {mesh}, {} ranks\n\
         parameters {}, gradients {}, accumulation {}, microbatches {microbatches}, prefetch {}, \
         optimizer {}, state over {}",
        grouped(parameters),
        mesh.world_size(),
        options.param_dtype,
        options.reduce_dtype,
        options.accumulation,
        options.prefetch,
        planned.optimizer.name(),
        options.state,
    )
}

fn units(planned: &Planned) -> Table {
    let plan = &planned.plan;
    let header = [
        "unit",
        "parameters",
        "frozen",
        "elements",
        "per shard",
        "padding",
        "dtype",
        "after forward",
    ];
    let rows = runs(planned).into_iter().map(|(first, last)| {
        let unit = &plan.spec()[first];
        let layout = plan.layout(first);
        let name = match first == last {
            true => unit.name.clone(),
            false => {
                format!("each of {} .. {}", unit.name, plan.spec()[last].name)
            }
        };
        let numel = unit.numel().get();
        let trained = unit.trainable_numel().get();
        [
            name,
            unit.params.len().to_string(),
            grouped(numel - trained),
            grouped(numel),
            grouped(layout.shard_len() as u64),
            grouped(layout.padding().get()),
            plan.compute_dtype(first).to_string(),
            unit.after_forward.to_string(),
        ]
    });
    let mut table = table(header, rows);
    let sum = |of: fn(&UnitLayout) -> u64| -> u64 {
        plan.layouts().iter().map(|layout| of(layout)).sum()
    };
    let spec = plan.spec();
    let trained: u64 = spec.units().iter().map(|unit| unit.trainable_numel().get()).sum();
    table.add_row([
        "total".to_owned(),
        spec.params().count().to_string(),
        grouped(spec.numel().get() - trained),
        grouped(spec.numel().get()),
        grouped(sum(|layout| layout.shard_len() as u64)),
        grouped(sum(|layout| layout.padding().get())),
        String::new(),
        String::new(),
    ]);
    table
}

/// The first and the last of each run of equal units, which share one line.
fn runs(planned: &Planned) -> Vec<(UnitId, UnitId)> {
    let plan = &planned.plan;
    let alike = |one: UnitId, other: UnitId| {
        let a = &plan.spec()[one];
        let b = &plan.spec()[other];
        let shapes = |unit: &Unit| {
            let of = |param: &Param| (param.shape.clone(), param.role, param.granularity);
            unit.params.iter().map(of).collect::<Vec<_>>()
        };
        let settings = |unit: &Unit| (unit.after_forward, unit.compute_dtype);
        settings(a) == settings(b) && shapes(a) == shapes(b)
    };
    let mut runs: Vec<(UnitId, UnitId)> = Vec::new();
    for unit in plan.spec().unit_ids() {
        match runs.last_mut() {
            Some((first, last)) if alike(*first, unit) => *last = unit,
            _ => runs.push((unit, unit)),
        }
    }
    runs
}

fn memory(place: &MemoryPlace) -> Table {
    let used = place.categories().filter(|it| it.bytes > ByteCount::ZERO);
    let rows = used.map(|it| [it.name.to_owned(), it.bytes.to_string(), it.when.to_owned()]);
    let header = [&*format!("peak memory of a rank, {}", place.name), "bytes", "held"];
    let mut table = table(header, rows);
    table.add_row([
        "total, an upper bound".to_owned(),
        place.peaks.total().to_string(),
        String::new(),
    ]);
    table
}

fn traffic(planned: &Planned) -> Table {
    let world = &planned.world;
    let cells = |[one, all]: [Flow; 2]| {
        [grouped(one.calls), one.bytes.to_string(), grouped(one.bytes.get()), all.bytes.to_string()]
    };
    let row = |name: &str, flows: [Flow; 2]| {
        let [calls, bytes, exact, all] = cells(flows);
        [name.to_owned(), calls, bytes, exact, all]
    };
    let rows = world.flows().into_iter().map(|(name, both)| row(name, both));
    let rank = format!("received in a step by rank {}", world.busiest);
    table([&*rank, "calls", "bytes", "exactly", "bytes of all ranks"], rows)
}

fn busiest(planned: &Planned) -> String {
    let rank = planned.world.busiest;
    let as_busy = planned.world.as_busy;
    let ranks = planned.plan.mesh().world_size();
    match as_busy == ranks {
        true => "every rank receives the same number of bytes".to_owned(),
        false => {
            format!("{as_busy} of {ranks} ranks receive the most bytes; the first is rank {rank}")
        }
    }
}

/// The number with separators: `124,439,808`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Peak memory of a rank in one place. Each category has the peak of the rank with the most.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryPlace {
    /// Name of the place: `host` or `device`.
    pub(super) name: &'static str,
    /// Peaks by category.
    pub(super) peaks: MemoryPlan,
    /// Peaks of `full`, in the forward and in the backward.
    pub(super) full: [ByteCount; 2],
}

/// A category with its peak.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldCategory {
    pub(super) name: &'static str,
    pub(super) bytes: ByteCount,
    /// Phase in which it is held.
    pub(super) when: &'static str,
}

const PHASES: [Phase; 2] = [Phase::Forward, Phase::Backward];

impl MemoryPlace {
    /// Returns the memory of a model on the host.
    pub(super) fn on_host(plan: &Plan) -> Vec<Self> {
        let full = PHASES.map(|phase| plan.full_in(phase));
        vec![Self { name: "host", peaks: plan.memory(), full }]
    }

    /// Returns the memory of a model on a device: that of the device, and that of the host if the
    /// model takes memory there for offloaded parts or an exchange.
    pub(super) fn on_device(plan: &Plan, offload: Offload) -> Vec<Self> {
        let full = PHASES.map(|phase| plan.full_in_on_device(phase));
        let peaks = plan.memory_on_device(offload);
        let mut places = vec![Self { name: "device", peaks, full }];
        let peaks = plan.memory_offloaded(offload);
        if offload != Offload::None || peaks.total() > ByteCount::ZERO {
            places.push(Self { name: "host", peaks, full: [ByteCount::ZERO; 2] });
        }
        places
    }

    /// Returns the categories in the order in which they are allocated, `full` once for each phase,
    /// and `update` and `buffers` if they take memory.
    pub(super) fn categories(&self) -> impl Iterator<Item = HeldCategory> + use<> {
        const ALWAYS: &str = "always";
        const FROM_BACKWARD: &str = "first backward to update";
        let [forward, backward] = self.full;
        let peaks = &self.peaks;
        let [update, buffers] = [peaks.update, peaks.buffers];
        let all = [
            ("shard", peaks.shard, ALWAYS),
            ("gather_input", peaks.gather_input, ALWAYS),
            ("optimizer", peaks.optimizer, ALWAYS),
            ("full", forward, "forward"),
            ("full", backward, "backward"),
            ("grad_full", peaks.grad_full, FROM_BACKWARD),
            ("partial", peaks.partial, FROM_BACKWARD),
            ("update", update, "update"),
            ("buffers", buffers, ALWAYS),
        ]
        .map(|(name, bytes, when)| HeldCategory { name, bytes, when });
        all.into_iter().filter(move |it| match it.name {
            "update" => update > ByteCount::ZERO,
            "buffers" => buffers > ByteCount::ZERO,
            _ => true,
        })
    }
}

/// Traffic of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepTraffic {
    /// Number of microbatches in a step.
    pub(super) microbatches: u64,
    /// First of the ranks that receive the most bytes.
    pub(super) busiest: Rank,
    /// Number of ranks that receive this many bytes, including the busiest.
    pub(super) as_busy: usize,
    /// Traffic that the busiest rank receives.
    pub(super) most: Traffic,
    /// Traffic that all ranks receive together.
    pub(super) total: Traffic,
}

impl StepTraffic {
    /// Computes the traffic of a plan. If replicas divide state, or the model has statistics, all
    /// of it may differ from rank to rank. Otherwise only the update differs in a shard group.
    pub(super) fn of(plan: &Plan, microbatches: u64) -> Self {
        let mesh = plan.mesh();
        let has_statistics = plan.spec().units().iter().any(|unit| !unit.statistics.is_empty());
        let all_differs = plan.divides_state() || has_statistics;
        let of_replica = |replicate_index| {
            let first = mesh.rank_at(Coordinate { replicate_index, shard_index: 0 });
            let of_first = plan.traffic(first, microbatches);
            mesh.members(Axis::Shard, first).map(move |rank| match all_differs {
                true => plan.traffic(rank, microbatches),
                false => Traffic { update: plan.update(rank).flow(), ..of_first },
            })
        };
        let all = (0..mesh.replicate_size()).flat_map(of_replica);
        let BusiestRanks { busiest, as_busy, most, total } = BusiestRanks::of(all);
        Self { microbatches, busiest: Rank::new(busiest), as_busy, most, total }
    }

    /// Returns the collectives by name, on the busiest rank and on all ranks together, and the
    /// total at the end. Flows that few plans have are present if a rank has them.
    pub(super) fn flows(&self) -> Vec<(&'static str, [Flow; 2])> {
        let pairs = self.most.flows().into_iter().zip(self.total.flows());
        let flows = pairs.map(|((name, most), (_, total))| (name, [most, total]));
        let all = [("total", [self.most.total(), self.total.total()])];
        let is_shown = |(name, [_, total]): &(&str, [Flow; 2])| {
            let is_rare = ["scatter_sums", "gather_slices", "statistics", "update"].contains(name);
            !is_rare || *total != Flow::NONE
        };
        flows.filter(is_shown).chain(all).collect()
    }
}

/// Traffic of some ranks.
#[derive(Debug, Default)]
struct BusiestRanks {
    /// Index of the first rank that receives the most bytes.
    busiest: usize,
    /// Number of ranks that receive this many bytes.
    as_busy: usize,
    most: Traffic,
    total: Traffic,
}

impl BusiestRanks {
    fn of(all: impl Iterator<Item = Traffic>) -> Self {
        let mut ranks = Self::default();
        for (index, traffic) in all.enumerate() {
            let [new, most] = [traffic, ranks.most].map(|traffic| traffic.total().bytes);
            if new > most {
                ranks.busiest = index;
                ranks.as_busy = 0;
            }
            if new > most || index == 0 {
                ranks.most = traffic;
            }
            ranks.as_busy += usize::from(new >= most);
            ranks.total = ranks.total + traffic;
        }
        ranks
    }
}
