//! The communication of a step, compared with the case format and the plan.

use hsdp::{Accumulation, Axis, Plan, Rank};
use hsdp_comm::{Channel, LedgerSnapshot, Op};
use hsdp_sharding::Flow;

use super::ReduceCase;

/// Compares the counts of `rank` in the one step of `case` with the format's calls and the plan's
/// bytes.
///
/// # Errors
/// The first count that differs.
pub(super) fn check(
    case: &ReduceCase,
    plan: &Plan,
    rank: Rank,
    ledger: &LedgerSnapshot,
) -> Result<(), String> {
    against_plan(plan, rank, 1, case.microbatches as u64, ledger)?;
    let calls = [
        (
            Op::ReduceScatter,
            ledger.op(Channel::Reduce, Op::ReduceScatter).calls,
            reduce_scatters(case),
        ),
        (Op::AllReduce, ledger.op(Channel::AllReduce, Op::AllReduce).calls, all_reduces(case)),
    ];
    for (op, measured, expected) in calls {
        if measured != expected {
            return Err(format!("{op}: {measured} calls, the case format says {expected}"));
        }
    }
    Ok(())
}

/// Compares the counts of `rank` in some steps of some microbatches each with the plan.
///
/// # Errors
/// The first count that differs.
pub(super) fn against_plan(
    plan: &Plan,
    rank: Rank,
    steps: u64,
    microbatches: u64,
    ledger: &LedgerSnapshot,
) -> Result<(), String> {
    let traffic = plan.traffic(rank, microbatches);
    let flows = [
        (Channel::Gather, Op::AllGather, traffic.all_gather),
        (Channel::Reduce, Op::ReduceScatter, traffic.reduce_scatter),
        (Channel::AllReduce, Op::AllReduce, traffic.all_reduce),
    ];
    for (channel, op, planned) in flows {
        let measured = ledger.op(channel, op);
        let planned = planned * steps;
        if measured != planned {
            return Err(format!("{op}: {}, planned {}", told(measured), told(planned)));
        }
        if ledger.channel(channel) != measured {
            return Err(format!("channel {channel} carried something other than {op}"));
        }
    }
    Ok(())
}

fn told(flow: Flow) -> String {
    format!("{} calls and {} bytes", flow.calls, flow.bytes.get())
}

/// One for every unit with a trainable parameter, in each microbatch; once in mode `local`.
fn reduce_scatters(case: &ReduceCase) -> u64 {
    let times = if case.accumulation == Accumulation::Local { 1 } else { case.microbatches as u64 };
    calls_over(case, Axis::Shard, times)
}

/// One for every unit with a trainable parameter, at the end; in each microbatch in mode `every`.
fn all_reduces(case: &ReduceCase) -> u64 {
    let times = if case.accumulation == Accumulation::Every { case.microbatches as u64 } else { 1 };
    calls_over(case, Axis::Replicate, times)
}

/// None on an axis of size 1.
fn calls_over(case: &ReduceCase, axis: Axis, times: u64) -> u64 {
    let reduced = case.units.iter().filter(|params| params.iter().any(|param| param.trainable));
    let on_axis = u64::from(case.mesh.axis_size(axis) > 1);
    reduced.count() as u64 * on_axis * times
}
