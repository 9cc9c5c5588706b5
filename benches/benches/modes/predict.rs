//! The simulator's times of the same steps: the memory's bandwidth is fitted to steps over memory,
//! and steps over slow links are predicted.

use std::sync::Arc;
use std::time::Duration;

use hsdp::testing::SlowChannel;
use hsdp::{Channel, Flow, Op};
use hsdp_sharding::{Offload, Plan, Rank};
use hsdp_simulator::{
    Batch, Computation, Costs, Errors, Hints, Machine, Measurements, Members, Microbatches,
    OperationCost, Recompute, StepOperation, Time, Work, WorkCost, Workload, fit, simulate,
};
use hsdp_train::{Failure, print};

use crate::measure::Row;
use crate::options::{Links, Options};

/// Prints the predictions.
pub(crate) fn show(options: &Options, rows: &[Row]) -> Result<(), Failure> {
    let machine = Machine::bundled("two-core-cpu").map_err(Failure::work)?;
    let steps = rows.iter().map(|row| Ok((Step::of(options, row)?, time(row.memory)?)));
    let steps = steps.collect::<Result<Vec<_>, Failure>>()?;
    let predict = |machine: &Machine, step: &Step| step.predict(machine, &[]);
    let measured = Measurements { table: "benches/modes, over memory", rows: &steps };
    let fitted = fit(&machine, &["memory.bandwidth"], &measured, predict).map_err(Failure::work)?;
    print(format_args!("\nfitted to steps over memory: memory.bandwidth = {}", fitted.numbers[0]))?;
    print(
        "\n| microbatches | mode | slow links, measured | predicted | error |\n|---|---|---|---|---|",
    )?;
    let links = options.slow(Links::Slow);
    let mut pairs = Vec::new();
    for (row, (step, _)) in rows.iter().zip(&steps) {
        let predicted = step.predict(&fitted.machine, &links).map_err(Failure::work)?;
        let measured = time(row.slow)?;
        let error = 100.0 * (predicted.seconds() / measured.seconds() - 1.0);
        let Row { mode, microbatches, .. } = row;
        print(format_args!(
            "| {microbatches} | {mode} | {measured} | {predicted} | {error:+.1} % |"
        ))?;
        pairs.push((predicted, measured));
    }
    let errors = Errors::of(pairs);
    let [mean, worst] = [errors.mean(), errors.worst()].map(|error| 100.0 * error);
    print(format_args!("{} steps, mean error {mean:.2} %, worst {worst:.2} %", rows.len()))?;
    Ok(())
}

fn time(duration: Duration) -> Result<Time, Failure> {
    let time = Time::from_seconds(duration.as_secs_f64());
    time.ok_or_else(|| Failure::Work("a step took too long".to_owned()))
}

/// A step of the bench.
struct Step {
    workload: Workload,
    received: Received,
}

/// The bytes that a rank receives in each kind of operation.
type Received = [(Channel, Op, f64); 5];

impl Step {
    fn of(options: &Options, row: &Row) -> Result<Self, Failure> {
        let spec = options.size().spec();
        let computation =
            Computation::of(&spec, &Hints { lookup: &|_| false, attention: &|_| None });
        let choices = row.mode.plan_options();
        let plan = Plan::new(spec, options.mesh, choices).map_err(Failure::work)?;
        let traffic = plan.traffic(Rank::new(0), 1);
        let of_call = |flow: Flow| flow.bytes.get() as f64 / flow.calls.max(1) as f64;
        let received = [
            (Channel::Gather, Op::AllGather, of_call(traffic.all_gather)),
            (Channel::Reduce, Op::ReduceScatter, of_call(traffic.reduce_scatter)),
            (Channel::AllReduce, Op::AllReduce, of_call(traffic.all_reduce)),
            (Channel::AllReduce, Op::ReduceScatter, of_call(traffic.scatter_sums)),
            (Channel::AllReduce, Op::AllGather, of_call(traffic.gather_slices)),
        ];
        let dtype = plan.options().param_dtype;
        let batch = Batch { sequences: 1, context: 1, dtype, recompute: Recompute::Nothing };
        let workload = Workload {
            plan: Arc::new(plan),
            computation: Arc::new(computation.map_err(Failure::work)?),
            batch,
            microbatches: Microbatches::Given(row.microbatches.into()),
            offload: Offload::None,
        };
        Ok(Self { workload, received })
    }

    fn predict(
        &self,
        machine: &Machine,
        links: &[SlowChannel],
    ) -> Result<Time, hsdp_simulator::Error> {
        let costs = self.workload.costs(machine)?;
        let linked = Linked { costs, links, received: self.received };
        Ok(simulate(&self.workload.order(machine), &linked)?.step)
    }
}

/// The costs of a step whose gradients exist already, and whose channels have slow links.
struct Linked<'a, C> {
    costs: C,
    links: &'a [SlowChannel],
    received: Received,
}

impl<C: Costs> Costs for Linked<'_, C> {
    fn shape(&self, members: Members, first: Rank) -> usize {
        self.costs.shape(members, first)
    }

    fn operation(&self, operation: &StepOperation, shape: usize) -> OperationCost {
        let cost = self.costs.operation(operation, shape);
        let is_same = |(channel, op, _): &&(Channel, Op, f64)| {
            (*channel, *op) == (operation.channel, operation.op)
        };
        let Some((_, _, received)) = self.received.iter().find(is_same) else { return cost };
        let Some(link) = self.links.iter().find(|link| link.channel == operation.channel) else {
            return cost;
        };
        let carried = link.bytes_per_second.map_or(0.0, |rate| received / rate.get() as f64);
        let seconds = link.latency.as_secs_f64() + carried;
        let link = cost.link + Time::from_seconds(seconds).unwrap_or(Time::MAX);
        OperationCost { link, ..cost }
    }

    fn work(&self, work: Work) -> WorkCost {
        match work {
            Work::Forward(_) | Work::Backward(_) | Work::Loss => WorkCost::default(),
            Work::Accumulate(_)
            | Work::Fold(_)
            | Work::Norm
            | Work::Update
            | Work::UpdateSlice(_) => self.costs.work(work),
        }
    }
}
