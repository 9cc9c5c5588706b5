//! A plan as tables.

use comfy_table::Table;
use hsdp_sharding::{ByteCount, Flow, Param, Unit, UnitId, UnitLayout};
use hsdp_train::stderr::in_one_line;
use hsdp_train::stdout::table;

use super::Planned;
use super::memory::Place;

/// The tables of units, memory and traffic.
pub(super) fn text(planned: &Planned) -> String {
    let mut parts = vec![heading(planned), units(planned).to_string()];
    for place in &planned.memory.places {
        parts.push(memory(place).to_string());
    }
    parts.push("memory is the same on every rank, except `optimizer` and `update`: these are of the rank with the most".to_owned());
    parts.push(traffic(planned).to_string());
    parts.push(busiest(planned));
    parts.join("\n")
}

fn heading(planned: &Planned) -> String {
    let Planned { name, plan, world, .. } = planned;
    let (mesh, options, spec) = (plan.mesh(), plan.options(), plan.spec());
    let (parameters, units) = (spec.numel().get(), spec.units().len());
    let microbatches = world.microbatches;
    let name = in_one_line(name);
    format!(
        "{name}: {} parameters in {units} units on mesh {mesh}, {} ranks\n\
         parameters {}, gradients {}, accumulation {}, microbatches {microbatches}, prefetch {}, optimizer {}",
        grouped(parameters),
        mesh.world_size(),
        options.param_dtype,
        options.reduce_dtype,
        options.accumulation,
        options.prefetch,
        planned.optimizer.name(),
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
        let (unit, layout) = (&plan.spec()[first], plan.layout(first));
        let name = match first == last {
            true => unit.name.clone(),
            false => {
                format!("each of {} .. {}", unit.name, plan.spec()[last].name)
            }
        };
        let (numel, trained) = (unit.numel().get(), unit.trainable_numel().get());
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
        let (a, b) = (&plan.spec()[one], &plan.spec()[other]);
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

fn memory(place: &Place) -> Table {
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
    let (rank, as_busy) = (planned.world.busiest, planned.world.as_busy);
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
