//! Which public types may go to other threads, and be shared between them. Checked by the compiler.
//!
//! A row names the traits that a type has; it has none of the others. That a public type has a row
//! is checked by a test, against the front pages of the crates.

#[macro_use]
mod probe;

use std::fmt::Debug;
use std::marker::PhantomData;

use hsdp::dist::{Applied, Carrier, CarrierCall};
use hsdp_tests::support::sources;

use self::probe::{Absent as _, Probe, lists};

table!(SHARDING {
    hsdp_sharding::Accumulation: Send Sync Unpin,
    hsdp_sharding::AfterForward: Send Sync Unpin,
    hsdp_sharding::Axis: Send Sync Unpin,
    hsdp_sharding::BufferId: Send Sync Unpin,
    hsdp_sharding::BufferProblem: Send Sync Unpin,
    hsdp_sharding::BufferRule: Send Sync Unpin,
    hsdp_sharding::ByteCount: Send Sync Unpin,
    hsdp_sharding::Coordinate: Send Sync Unpin,
    hsdp_sharding::DType: Send Sync Unpin,
    hsdp_sharding::ElemCount: Send Sync Unpin,
    hsdp_sharding::Error: Send Sync Unpin,
    hsdp_sharding::Flow: Send Sync Unpin,
    hsdp_sharding::FullCopies: Send Sync Unpin,
    hsdp_sharding::StateOver: Send Sync Unpin,
    hsdp_sharding::Offload: Send Sync Unpin,
    hsdp_sharding::Gather: Send Sync Unpin,
    hsdp_sharding::Granularity: Send Sync Unpin,
    hsdp_sharding::Matrices: Send Sync Unpin,
    hsdp_sharding::MemoryPlan: Send Sync Unpin,
    hsdp_sharding::Mesh: Send Sync Unpin,
    hsdp_sharding::ModelSpec: Send Sync Unpin,
    hsdp_sharding::Param: Send Sync Unpin,
    hsdp_sharding::Owners: Send Sync Unpin,
    hsdp_sharding::ParamId: Send Sync Unpin,
    hsdp_sharding::Part: Send Sync Unpin,
    hsdp_sharding::ParamSlot: Send Sync Unpin,
    hsdp_sharding::Phase: Send Sync Unpin,
    hsdp_sharding::Piece: Send Sync Unpin,
    hsdp_sharding::Pieces<'static>: Send Sync Unpin,
    hsdp_sharding::Plan: Send Sync Unpin,
    hsdp_sharding::PlanOptions: Send Sync Unpin,
    hsdp_sharding::Rank: Send Sync Unpin,
    hsdp_sharding::Region: Send Sync Unpin,
    hsdp_sharding::Role: Send Sync Unpin,
    hsdp_sharding::State: Send Sync Unpin,
    hsdp_sharding::Statistics: Send Sync Unpin,
    hsdp_sharding::StorageProblem: Send Sync Unpin,
    hsdp_sharding::TieProblem: Send Sync Unpin,
    hsdp_sharding::Traffic: Send Sync Unpin,
    hsdp_sharding::Unit: Send Sync Unpin,
    hsdp_sharding::UnitId: Send Sync Unpin,
    hsdp_sharding::UpdatePlan: Send Sync Unpin,
    hsdp_sharding::WholeMatrix: Send Sync Unpin,
    hsdp_sharding::Wholes: Send Sync Unpin,
    hsdp_sharding::UnitLayout: Send Sync Unpin,
});

table!(KERNELS {
    hsdp_kernels::AdamWStep: Send Sync Unpin,
    hsdp_kernels::DisjointBuffer: Send Sync Unpin,
    hsdp_kernels::DisjointVec<f32>: Send Sync Unpin,
    // The parts that a shared vector hands out are exclusive: elements that may be sent need not be
    // shareable,
    hsdp_kernels::DisjointVec<std::cell::Cell<u8>>: Send Sync Unpin,
    // and elements that may not be sent keep it on its thread.
    hsdp_kernels::DisjointVec<std::rc::Rc<u8>>: Unpin,
    hsdp_kernels::Divisor: Send Sync Unpin,
    hsdp_kernels::Error: Send Sync Unpin,
    hsdp_kernels::Fold: Send Sync Unpin,
    hsdp_kernels::FreshPart<'static, f32>: Send Sync Unpin,
    hsdp_kernels::FreshVec<f32>: Send Sync Unpin,
    hsdp_kernels::EightBit<'static>: Send Sync Unpin,
    hsdp_kernels::FusedUpdate<'static>: Send Sync Unpin,
    dyn hsdp_kernels::GradientValues: Send Sync,
    hsdp_kernels::HostBuffer: Send Sync Unpin,
    hsdp_kernels::LionStep: Send Sync Unpin,
    hsdp_kernels::MuonStep: Send Sync Unpin,
    hsdp_kernels::NewtonSchulz: Send Sync Unpin,
    hsdp_kernels::Matrix<'static>: Send Sync Unpin,
    hsdp_kernels::MatrixDType: Send Sync Unpin,
    hsdp_kernels::MomentumKind: Send Sync Unpin,
    hsdp_kernels::ReduceOp: Send Sync Unpin,
    hsdp_kernels::Scaling: Send Sync Unpin,
    hsdp_kernels::SgdStep: Send Sync Unpin,
    hsdp_kernels::SharedBuffer: Send Sync Unpin,
    hsdp_kernels::Threads: Send Sync Unpin,
    hsdp_kernels::Values<'static>: Send Sync Unpin,
    hsdp_kernels::ValuesMut<'static>: Send Sync Unpin,
    hsdp_kernels::Wire: Send Sync Unpin,
});

table!(MEMORY {
    hsdp_kernels::memory::Allocations: Send Sync Unpin,
    hsdp_kernels::memory::Category: Send Sync Unpin,
    hsdp_kernels::memory::CountingAllocator: Send Sync Unpin,
    // It restores what its thread counted before.
    hsdp_kernels::memory::Scope: Unpin,
    hsdp_kernels::memory::Usage: Send Sync Unpin,
});

table!(COMM {
    hsdp_comm::AbortReason: Send Sync Unpin,
    hsdp_comm::Accumulator: Send Sync Unpin,
    hsdp_comm::Between: Send Sync Unpin,
    hsdp_comm::CallError: Send Sync Unpin,
    hsdp_comm::Channel: Send Sync Unpin,
    hsdp_comm::Contribution: Send Sync Unpin,
    hsdp_comm::Counts: Send Sync Unpin,
    hsdp_comm::Descriptor: Send Sync Unpin,
    hsdp_comm::DeviceAccumulator: Send Sync Unpin,
    hsdp_comm::DeviceReduced: Send Sync Unpin,
    hsdp_comm::Error: Send Sync Unpin,
    hsdp_comm::Explanation: Send Sync Unpin,
    hsdp_comm::Fault: Send Sync Unpin,
    hsdp_comm::FaultKind: Send Sync Unpin,
    hsdp_comm::FaultPlace: Send Sync Unpin,
    hsdp_comm::Finding: Send Sync Unpin,
    hsdp_comm::FlightEntry: Send Sync Unpin,
    hsdp_comm::FlightError: Send Sync Unpin,
    hsdp_comm::FlightGroup: Send Sync Unpin,
    hsdp_comm::FlightRecord: Send Sync Unpin,
    hsdp_comm::FlightState: Send Sync Unpin,
    hsdp_comm::Group: Send Sync Unpin,
    hsdp_comm::GroupId: Send Sync Unpin,
    hsdp_comm::LastIssued: Send Sync Unpin,
    hsdp_comm::Lateness: Send Sync Unpin,
    hsdp_comm::Launched: Send Sync Unpin,
    hsdp_comm::Launcher: Send Sync Unpin,
    hsdp_comm::LedgerSnapshot: Send Sync Unpin,
    hsdp_comm::Lent<f32>: Send Sync Unpin,
    hsdp_comm::MemberFinding: Send Sync Unpin,
    hsdp_comm::Messages: Send Sync Unpin,
    hsdp_comm::Mismatch: Send Sync Unpin,
    hsdp_comm::MismatchRow: Send Sync Unpin,
    hsdp_comm::Mistake: Send Sync Unpin,
    hsdp_comm::ModelLabel: Send Sync Unpin,
    hsdp_comm::ModelName: Send Sync Unpin,
    hsdp_comm::NonFiniteAt: Send Sync Unpin,
    hsdp_comm::OftenLast: Send Sync Unpin,
    hsdp_comm::Op: Send Sync Unpin,
    hsdp_comm::Part: Send Sync Unpin,
    hsdp_comm::PartKind: Send Sync Unpin,
    hsdp_comm::Pending<Vec<f32>>: Send Sync Unpin,
    hsdp_comm::PendingParts<hsdp_kernels::HostBuffer>: Send Sync Unpin,
    hsdp_comm::Ungathered<hsdp_kernels::HostBuffer>: Send Sync Unpin,
    // An output that may not be shared may still be sent, and one that may not be sent stays.
    hsdp_comm::Pending<std::cell::Cell<u8>>: Send Unpin,
    hsdp_comm::Pending<std::rc::Rc<u8>>: Unpin,
    hsdp_comm::Presence: Send Sync Unpin,
    hsdp_comm::RankFailure: Send Sync Unpin,
    hsdp_comm::Reduced: Send Sync Unpin,
    hsdp_comm::Reduction: Send Sync Unpin,
    hsdp_comm::Rendezvous: Send Sync Unpin,
    hsdp_comm::Scaling: Send Sync Unpin,
    hsdp_comm::SetupError: Send Sync Unpin,
    hsdp_comm::SlowChannel: Send Sync Unpin,
    hsdp_comm::Stage: Send Sync Unpin,
    hsdp_comm::StepFailure: Send Sync Unpin,
    hsdp_comm::Tag: Send Sync Unpin,
    hsdp_comm::Wanted: Send Sync Unpin,
    hsdp_comm::Workers: Send Sync Unpin,
    hsdp_comm::World: Send Sync Unpin,
    hsdp_comm::WorldEnd: Send Sync Unpin,
    hsdp_comm::WorldError: Send Sync Unpin,
    hsdp_comm::WorldOptions: Send Sync Unpin,
});

table!(RUNTIME {
    hsdp::Adafactor: Send Sync Unpin,
    hsdp::AdafactorOptions: Send Sync Unpin,
    hsdp::AdamW: Send Sync Unpin,
    hsdp::DataError: Send Sync Unpin,
    hsdp::Ema: Send Sync Unpin,
    hsdp::AdamWOptions: Send Sync Unpin,
    hsdp::Allowed: Send Sync Unpin,
    hsdp::ClippedGradient<'static>: Send Sync Unpin,
    hsdp::DeviceRun<'static>: Send Sync Unpin,
    hsdp::DynamicScale: Send Sync Unpin,
    hsdp::Evaluation<'static>: Send Sync Unpin,
    hsdp::EndOfRun: Send Sync Unpin,
    hsdp::Error: Send Sync Unpin,
    hsdp::Event: Send Sync Unpin,
    hsdp::Full: Send Sync Unpin,
    hsdp::GradientError: Send Sync Unpin,
    hsdp::Gradients: Send Sync Unpin,
    hsdp::Grouped<hsdp::SgdOptions>: Send Sync Unpin,
    hsdp::Setting<'static>: Unpin,
    hsdp::ByParameter<f64>: Send Sync Unpin,
    hsdp::Histogram: Send Sync Unpin,
    hsdp::Histograms: Send Sync Unpin,
    hsdp::Norm: Send Sync Unpin,
    hsdp::Norms: Send Sync Unpin,
    hsdp::MeasuredUpdate: Send Sync Unpin,
    hsdp::LearningRate: Send Sync Unpin,
    hsdp::LossScaling: Send Sync Unpin,
    hsdp::Lion: Send Sync Unpin,
    hsdp::LionOptions: Send Sync Unpin,
    hsdp::LossSum: Send Sync Unpin,
    hsdp::ModelId: Send Sync Unpin,
    hsdp::ModelOptions: Send Sync Unpin,
    hsdp::Input: Send Sync Unpin,
    hsdp::NextStep<'static>: Send Sync Unpin,
    hsdp::Muon: Send Sync Unpin,
    hsdp::MuonOptions: Send Sync Unpin,
    hsdp::NonFinite: Send Sync Unpin,
    hsdp::NonFiniteGradient: Send Sync Unpin,
    hsdp::Origin: Send Sync Unpin,
    hsdp::Objective: Send Sync Unpin,
    hsdp::Pass<'static>: Send Sync Unpin,
    // An autograd's operations hold it, and run on any thread that the autograd chooses.
    hsdp::PassHandle: Send Sync Unpin,
    hsdp::Placement: Send Sync Unpin,
    hsdp::Precision: Send Sync Unpin,
    hsdp::Seed: Send Sync Unpin,
    hsdp::RateScale: Send Sync Unpin,
    hsdp::Run<'static>: Send Sync Unpin,
    hsdp::RunState<'static>: Send Sync Unpin,
    hsdp::RuleExchange<'static, hsdp::SgdOptions>: Unpin,
    hsdp::Sgd: Send Sync Unpin,
    hsdp::SgdOptions: Send Sync Unpin,
    hsdp::Selected<'static>: Unpin,
    hsdp::ShardedModel: Send Sync Unpin,
    hsdp::Step<'static>: Send Sync Unpin,
    hsdp::StepOptions: Send Sync Unpin,
    hsdp::Samples: Send Sync Unpin,
    hsdp::Shutdown: Send Sync Unpin,
    hsdp::Supply: Send Sync Unpin,
    hsdp::Uneven: Send Sync Unpin,
    hsdp::UnitGradients: Send Sync Unpin,
    hsdp::UnitOrder: Send Sync Unpin,
    hsdp::Unused: Send Sync Unpin,
    hsdp::Update: Send Sync Unpin,
    hsdp::Updating<'static>: Send Sync Unpin,
    hsdp::Verdict: Send Sync Unpin,
    hsdp::Whole<'static>: Send Sync Unpin,
    hsdp::WholeParameters: Send Sync Unpin,
    hsdp::divide::DividePlan: Send Sync Unpin,
    hsdp::divide::Divides: Send Sync Unpin,
    hsdp::divide::Parties: Send Sync Unpin,
});

table!(CHECKPOINTS {
    hsdp::checkpoint::BufferState: Send Sync Unpin,
    hsdp::checkpoint::CheckpointOptions: Send Sync Unpin,
    hsdp::checkpoint::Checkpoints: Send Sync Unpin,
    hsdp::checkpoint::Content: Send Sync Unpin,
    hsdp::checkpoint::Expected: Send Sync Unpin,
    hsdp::checkpoint::Import<'static>: Send Sync Unpin,
    hsdp::checkpoint::Imported: Send Sync Unpin,
    hsdp::checkpoint::OtherOptions: Send Sync Unpin,
    hsdp::checkpoint::OtherParameters: Send Sync Unpin,
    hsdp::checkpoint::Problem: Send Sync Unpin,
    hsdp::checkpoint::Resumed: Send Sync Unpin,
    hsdp::checkpoint::Saved: Send Sync Unpin,
    hsdp::checkpoint::SavedState<'static>: Send Sync Unpin,
    hsdp::checkpoint::Spread: Send Sync Unpin,
    hsdp::checkpoint::StateTensor: Send Sync Unpin,
});

table!(CHECKPOINT {
    hsdp_checkpoint::Chunk: Send Sync Unpin,
    hsdp_checkpoint::Committed: Send Sync Unpin,
    hsdp_checkpoint::Disk: Send Sync Unpin,
    hsdp_checkpoint::Draft<'static>: Send Sync Unpin,
    hsdp_checkpoint::DraftPlace: Send Sync Unpin,
    hsdp_checkpoint::Elements<'static>: Send Sync Unpin,
    hsdp_checkpoint::Error: Send Sync Unpin,
    hsdp_checkpoint::Exported: Send Sync Unpin,
    hsdp_checkpoint::Fallback: Send Sync Unpin,
    hsdp_checkpoint::FileEntry: Send Sync Unpin,
    hsdp_checkpoint::Folder: Send Sync Unpin,
    hsdp_checkpoint::Generation: Send Sync Unpin,
    hsdp_checkpoint::Hash: Send Sync Unpin,
    hsdp_checkpoint::Head: Send Sync Unpin,
    hsdp_checkpoint::Lease: Send Sync Unpin,
    hsdp_checkpoint::LinkedDisk: Send Sync Unpin,
    hsdp_checkpoint::LossScaleHead: Send Sync Unpin,
    hsdp_checkpoint::Manifest: Send Sync Unpin,
    hsdp_checkpoint::MeshShape: Send Sync Unpin,
    hsdp_checkpoint::OptimizerHead: Send Sync Unpin,
    hsdp_checkpoint::Slice<'static>: Send Sync Unpin,
    hsdp_checkpoint::Store: Send Sync Unpin,
    hsdp_checkpoint::TensorEntry: Send Sync Unpin,
    hsdp_checkpoint::TrainingHead: Send Sync Unpin,
    hsdp_checkpoint::Weights: Send Sync Unpin,
    hsdp_checkpoint::Writer: Send Sync Unpin,
});

table!(SIMULATOR {
    hsdp_simulator::Action: Send Sync Unpin,
    hsdp_simulator::AfterForwards: Send Sync Unpin,
    hsdp_simulator::AllReduceRow: Send Sync Unpin,
    hsdp_simulator::AttentionScores: Send Sync Unpin,
    hsdp_simulator::AttentionShape: Send Sync Unpin,
    hsdp_simulator::Batch: Send Sync Unpin,
    hsdp_simulator::CallMismatch: Send Sync Unpin,
    hsdp_simulator::Candidate: Send Sync Unpin,
    hsdp_simulator::CollectiveCost: Send Sync Unpin,
    hsdp_simulator::CollectiveKind: Send Sync Unpin,
    hsdp_simulator::CommunicatorId: Send Sync Unpin,
    hsdp_simulator::Computation: Send Sync Unpin,
    hsdp_simulator::Deadlock: Send Sync Unpin,
    hsdp_simulator::Error: Send Sync Unpin,
    hsdp_simulator::Errors: Send Sync Unpin,
    hsdp_simulator::Fit: Send Sync Unpin,
    hsdp_simulator::Fitted: Send Sync Unpin,
    hsdp_simulator::Found: Send Sync Unpin,
    hsdp_simulator::GptShape: Send Sync Unpin,
    hsdp_simulator::Hints<'static>: Unpin,
    hsdp_simulator::Issue<'static>: Send Sync Unpin,
    hsdp_simulator::Lane: Send Sync Unpin,
    hsdp_simulator::Level: Send Sync Unpin,
    hsdp_simulator::ListedCall: Send Sync Unpin,
    hsdp_simulator::Machine: Send Sync Unpin,
    hsdp_simulator::Measurements<'static, hsdp_simulator::StepRow>: Send Sync Unpin,
    hsdp_simulator::Members: Send Sync Unpin,
    hsdp_simulator::Microbatches: Send Sync Unpin,
    hsdp_simulator::ModelPlacement: Send Sync Unpin,
    hsdp_simulator::OperationCost: Send Sync Unpin,
    hsdp_simulator::Order: Send Sync Unpin,
    hsdp_simulator::Placed: Send Sync Unpin,
    hsdp_simulator::Placing<'static>: Send Sync Unpin,
    hsdp_simulator::PlanChoice: Send Sync Unpin,
    hsdp_simulator::Prediction: Send Sync Unpin,
    hsdp_simulator::Processor: Send Sync Unpin,
    hsdp_simulator::RankTiming: Send Sync Unpin,
    hsdp_simulator::Recompute: Send Sync Unpin,
    hsdp_simulator::Reference: Send Sync Unpin,
    hsdp_simulator::ScheduleVerdict: Send Sync Unpin,
    hsdp_simulator::Schedules: Send Sync Unpin,
    hsdp_simulator::Search: Send Sync Unpin,
    hsdp_simulator::Shape: Send Sync Unpin,
    hsdp_simulator::Shapes: Send Sync Unpin,
    hsdp_simulator::Share: Send Sync Unpin,
    hsdp_simulator::Shares: Send Sync Unpin,
    hsdp_simulator::Space<'static>: Send Sync Unpin,
    hsdp_simulator::Span: Send Sync Unpin,
    hsdp_simulator::StatedError: Send Sync Unpin,
    hsdp_simulator::StepBlock: Send Sync Unpin,
    hsdp_simulator::StepMemory: Send Sync Unpin,
    hsdp_simulator::StepOperation: Send Sync Unpin,
    hsdp_simulator::StepRow: Send Sync Unpin,
    hsdp_simulator::Time: Send Sync Unpin,
    hsdp_simulator::Timing: Send Sync Unpin,
    hsdp_simulator::Traces<'static>: Unpin,
    hsdp_simulator::Unfit: Send Sync Unpin,
    hsdp_simulator::What: Send Sync Unpin,
    hsdp_simulator::Work: Send Sync Unpin,
    hsdp_simulator::WorkCost: Send Sync Unpin,
    hsdp_simulator::Workload: Send Sync Unpin,
});

table!(COLLECTIVE {
    hsdp::collective::Backward<f32>: Send Sync Unpin,
    hsdp::collective::Collective: Send Sync Unpin,
    hsdp::collective::Copies: Send Sync Unpin,
    hsdp::collective::Reducer: Send Sync Unpin,
});

/// An autograd whose tensors may go where a `T` may.
#[derive(Debug)]
struct Autograd<T>(PhantomData<T>);

impl<T: Clone + Debug> Carrier for Autograd<T> {
    type Tensor = T;
    type Error = hsdp::Error;
    type Gradients = ();

    fn apply(call: &CarrierCall<'_, T>) -> Result<Applied<T>, hsdp::Error> {
        Ok(Applied { output: Some(call.input.clone()), link: None })
    }

    fn alias(tensor: &T) -> Result<T, hsdp::Error> {
        Ok(tensor.clone())
    }

    fn backward(_: &T, _: Option<&T>) -> Result<(), hsdp::Error> {
        Ok(())
    }

    fn gradient((): &(), _: &T) -> Option<T> {
        None
    }
}

type Carried = Autograd<Vec<f32>>;
type Confined = Autograd<std::rc::Rc<u8>>;

/// They go where those go that an autograd leaves.
const OF_AN_AUTOGRAD: [&str; 1] = ["hsdp::dist::TapeGradients"];

table!(DIST {
    hsdp::dist::Applied<Vec<f32>>: Send Sync Unpin,
    hsdp::dist::Avg: Send Sync Unpin,
    hsdp::dist::Axes: Send Sync Unpin,
    hsdp::dist::CarrierCall<'static, Vec<f32>>: Send Sync Unpin,
    hsdp::dist::Dist<Carried, hsdp::dist::Replicate, hsdp::dist::Partial>: Send Sync Unpin,
    // Whether a value may go to another thread is for its tensor to say,
    hsdp::dist::Dist<Confined, hsdp::dist::Replicate, hsdp::dist::Partial>: Unpin,
    hsdp::dist::Invariant: Send Sync Unpin,
    hsdp::dist::Max: Send Sync Unpin,
    hsdp::dist::Min: Send Sync Unpin,
    hsdp::dist::OnBoth: Send Sync Unpin,
    hsdp::dist::OnReplicate: Send Sync Unpin,
    hsdp::dist::OnShard: Send Sync Unpin,
    hsdp::dist::Partial: Send Sync Unpin,
    hsdp::dist::PreMultiplied: Send Sync Unpin,
    hsdp::dist::Product: Send Sync Unpin,
    hsdp::dist::Recording: Send Sync Unpin,
    hsdp::dist::Replicate: Send Sync Unpin,
    hsdp::dist::Sum: Send Sync Unpin,
    hsdp::dist::Tape<Carried>: Send Sync Unpin,
    // and a tape keeps the last of what it recorded.
    hsdp::dist::Tape<Confined>: Unpin,
    hsdp::dist::Varying: Send Sync Unpin,
});

table!(CANDLE {
    hsdp_candle::BatchStatistics: Send Sync Unpin,
    hsdp_candle::DeclarationError: Send Sync Unpin,
    hsdp_candle::Error: Send Sync Unpin,
    hsdp_candle::ForwardMode: Send Sync Unpin,
    hsdp_candle::Gradient: Send Sync Unpin,
    hsdp_candle::layer::LayerArgument: Send Sync Unpin,
    hsdp_candle::LostGradients: Send Sync Unpin,
    // Its parameters may be read by several threads. Its backward consumes it.
    hsdp_candle::Pass<'static>: Send Sync Unpin,
    hsdp_candle::Plain: Send Sync Unpin,
    hsdp_candle::Recorded: Send Sync Unpin,
    hsdp_candle::RepeatableForward: Send Sync Unpin,
    hsdp_candle::VariableGradient: Send Sync Unpin,
});

table!(GPT {
    hsdp_models::gpt::Draw: Send Sync Unpin,
    hsdp_models::gpt::Gpt: Send Sync Unpin,
    hsdp_models::gpt::GptConfig: Send Sync Unpin,
    hsdp_models::gpt::GptConfigError: Send Sync Unpin,
    hsdp_models::gpt::GptMemory: Send Sync Unpin,
});

/// Traits, and closures that are borrowed: what stands behind them says for itself.
const TRAITS: [&str; 30] = [
    "Adds",
    "Along",
    "Carrier",
    "Checkpointed",
    "Copied",
    "Costs",
    "CountedOnce",
    "Differentiable",
    "DistState",
    "Element",
    "FileSource",
    "Files",
    "Forward",
    "Free",
    "Joins",
    "Loss",
    "MeshAxis",
    "Multiplies",
    "Optimizer",
    "Rule",
    "Own",
    "Parameters",
    "ReadFiles",
    "Real",
    "Reduces",
    "Sink",
    "Sliced",
    "UnitInputs",
    "Units",
    "UnitsExt",
];

#[test]
fn every_public_type_has_a_row() {
    every_export_has_a_row("sharding/src/lib.rs", SHARDING);
    every_export_has_a_row("kernels/src/lib.rs", KERNELS);
    every_export_has_a_row("kernels/src/memory.rs", MEMORY);
    every_export_has_a_row("comm/src/lib.rs", COMM);
    every_export_has_a_row("runtime/src/lib.rs", RUNTIME);
    every_export_has_a_row("runtime/src/checkpoint.rs", CHECKPOINTS);
    every_export_has_a_row("runtime/checkpoint/src/lib.rs", CHECKPOINT);
    every_export_has_a_row("runtime/simulator/src/lib.rs", SIMULATOR);
    every_export_has_a_row("runtime/src/autograd/collective.rs", COLLECTIVE);
    every_export_has_a_row("runtime/src/autograd/dist.rs", &[DIST, &OF_AN_AUTOGRAD].concat());
    every_export_has_a_row("runtime/candle/src/lib.rs", CANDLE);
    every_export_has_a_row("runtime/models/src/gpt.rs", GPT);
}

#[test]
fn exports_are_read_as_they_are_meant() {
    let page = "pub use a::{One, two};\npub use self::b::THREE;\npub use four::Five;\nuse six::Seven;\npub use hsdp_a::Nine;\npub struct Ten(u8);\n";
    assert_eq!(exports(page), ["One", "Five", "Ten"]);
}

fn every_export_has_a_row(path: &str, rows: &[&str]) {
    let pages = sources::rust();
    let page = pages.iter().find(|source| source.path == path).expect("a front page");
    let exports = exports(&page.text);
    assert!(!exports.is_empty(), "{path} exports nothing");
    for export in exports.iter().filter(|export| !TRAITS.contains(&export.as_str())) {
        let named = rows.iter().any(|row| names(row, export));
        assert!(named, "{path} exports {export}: give it a row, and decide where it may go");
    }
}

/// Whether a row is of this type, whatever its parameters.
fn names(row: &str, export: &str) -> bool {
    let plain = row.split('<').next().unwrap_or(row);
    plain.rsplit([':', ' ']).next() == Some(export)
}

/// The types and traits that a crate's front page exports of its own, and the types that it
/// defines.
fn exports(page: &str) -> Vec<String> {
    let statements = page.split(';').map(str::trim_start);
    let lines = statements.filter_map(|statement| statement.rsplit("\n\n").next());
    let own = lines.filter_map(|line| line.trim_start().strip_prefix("pub use "));
    let own = own.filter(|path| !path.starts_with("hsdp_"));
    let words = own.flat_map(|path| path.split(|c: char| !c.is_alphanumeric()));
    let definition = |line: &'_ str| {
        let rest = ["pub struct ", "pub enum "].iter().find_map(|it| line.strip_prefix(it))?;
        rest.split(|c: char| !c.is_alphanumeric()).next().map(str::to_owned)
    };
    let defined = page.lines().filter_map(definition);
    words.filter(|word| is_type(word)).map(str::to_owned).chain(defined).collect()
}

/// Types are in camel case: a capital first, and some letter that is none.
fn is_type(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().any(|c| c.is_ascii_lowercase())
}
