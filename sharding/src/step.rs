//! The order of a step: a state machine that decides which operations a rank issues, and when.
//!
//! The machine of a rank lives as long as its model. Its host feeds it with what the program does
//! (inputs), and carries out what it says (outputs), one by one. It does nothing itself: it holds
//! no buffer and no value, starts no thread, and reads no clock. So one machine drives the runtime,
//! which executes the outputs, and the simulator, which gives each of them a time.
//!
//! | input | the program | what follows, besides gathers ahead |
//! |---|---|---|
//! | [`begin`](StepMachine::begin) | begins a step, or ends its run | exchanges of headers |
//! | [`begin_microbatch`](StepMachine::begin_microbatch) | begins a microbatch | an exchange, if the number of microbatches was not given |
//! | [`need`](StepMachine::need) | needs a unit's parameters | its gather, and the unit |
//! | [`statistics`](StepMachine::statistics) | has the statistics of a batch, in a unit's forward or backward | their sums over all ranks |
//! | [`loss`](StepMachine::loss) | has the loss | the rest of the forward's gathers |
//! | [`offer`](StepMachine::offer) | has a unit's gradients | reductions whose turn has come |
//! | [`end_microbatch`](StepMachine::end_microbatch) | ends the microbatch, or a batch of an evaluation | all gathers and reductions that are left |
//! | [`finish`](StepMachine::finish) | ends the step | microbatches of other ranks, all-reduces, the statement |
//! | [`updated`](StepMachine::updated) | has updated its slice of a unit | the gather of the slices, if replicas divide state |
//! | [`await_slices`](StepMachine::await_slices) | needs whole shards outside of a step | these gathers, where they are due, and their ends |
//! | [`evaluate`](StepMachine::evaluate), [`begin_batch`](StepMachine::begin_batch), [`end_evaluation`](StepMachine::end_evaluation) | evaluates, for its own sake or for the backward of another model | exchanges, gathers |
//! | [`abort`](StepMachine::abort) | drops the step | nothing |
//!
//! After an input, the host takes outputs from [`poll`](StepMachine::poll) until there is none, and
//! then feeds the next input. Two outputs make the machine wait: after [`Output::Await`] and
//! [`Output::Follow`] nothing comes until [`done`](StepMachine::done), and after
//! [`Output::Exchange`] until [`conclude`](StepMachine::conclude) with what the ranks have said.
//!
//! Where replicas [divide optimizer state](crate::StateOver::World), the gathers of updated slices
//! outlast the step, and a step that is aborted. A gather of the shard group waits for that of its
//! unit's slices, and one that is issued ahead is not issued before it: `watching` names it. In
//! [one sequence](Sequences::One) slices are gathered in the forward, each before its unit.
//!
//! An all-reduce may begin while the backward goes on, as soon as the reduce-scatter before it is
//! complete. [`watching`](StepMachine::watching) names that reduce-scatter: its completion, and no
//! other one, is an input that the program does not cause. Where all operations of a rank are
//! [one sequence](Sequences::One), there is none.
//!
//! # Text
//!
//! An output is displayed as a word, such as in `g0 (g0) u0 r0`:
//!
//! | word | output |
//! |---|---|
//! | `g1`, `g1'` | the gather of unit 1 for the forward is issued; for the backward |
//! | `u1`, `u1'` | the gathered unit is handed out |
//! | `d1`, `d1'` | the gathered unit is not used, and dropped |
//! | `s1.0`, `s1.0'` | statistics 0 of unit 1 are issued in the forward; in the backward |
//! | `l1` | the unit's gradients are accumulated unsharded |
//! | `r1` | its reduce-scatter is issued |
//! | `a1` | its all-reduce is issued |
//! | `c1` | the reduce-scatter of its sums over the replicas is issued, if these divide state |
//! | `h1` | the gather of its updated slices over the replicas is issued |
//! | `f1` | its all-reduced sums of a microbatch are added to its partial |
//! | `(g1)` | the rank waits for an operation |
//! | `<headers>` | the ranks exchange records |

mod dry_run;
mod evaluation;
mod exchange;
mod gathers;
mod inputs;
mod machine;
mod order;
mod output;
mod reductions;
mod rules;
mod slices;
mod statistics;
#[cfg(test)]
mod tests;
mod training;

pub use self::dry_run::DryRun;
pub use self::exchange::{Batches, Conclusion, Exchange, Headers, NextUnit, UnitUse};
pub use self::inputs::{Begin, Intent, Refused};
pub use self::machine::StepMachine;
pub use self::output::{Call, Kind, Members, Operation, Output, Source, Target};
pub use self::rules::{
    EvaluationKind, Input, LossScale, MicrobatchWeights, ReductionTime, Rules, Sequences, Supply,
    Uneven, UnitOrder,
};
