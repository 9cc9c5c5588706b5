//! The loop beside the runtime. Of ranks on the host: the same passes over as many bytes, and
//! nothing else: the limit of the machine. The kernels are the runtime's own, one pass each, so the
//! difference is the runtime: plan, descriptors, blocks, waiting. `nccl` has that of ranks on a
//! device.

use std::sync::{Barrier, Mutex, PoisonError};

use hsdp::{Accumulation, Axis, DType, FullCopies, Mesh, Rank};
use hsdp_benches::steps::GRADIENT;
use hsdp_kernels::{Divisor, Fold, Scaling, Values, Wire, copy_past_caches, sum_contributions};
use hsdp_sharding::{Coordinate, balanced};

use crate::nccl::Meeting;
use crate::options::{Comm, Options};

/// Elements that are summed at a time, as in the runtime.
const BLOCK: usize = 8 << 10;

/// Parameters of the unit in use, and of the next one.
type Turns = [Vec<f32>; 2];

/// The loop of the ranks of this process.
pub(crate) enum Bare {
    OnTheHost(Shared),
    ByNccl(Meeting),
}

/// One rank's part of the loop.
pub(crate) trait OwnLoop {
    /// A step. Collective.
    fn step(&mut self) -> Result<(), String>;

    /// The rank's partials after a step.
    fn partials(&self) -> Result<Vec<f32>, String>;
}

impl Bare {
    /// The loop that does what these options ask of the runtime, if there is one.
    pub(crate) fn of(options: &Options) -> Result<Option<Self>, String> {
        if !Self::serves(options) {
            return Ok(None);
        }
        Ok(Some(match options.comm {
            Comm::Nccl => Self::ByNccl(Meeting::new()?),
            Comm::Local | Comm::Mpi => Self::OnTheHost(Shared::new(options)),
        }))
    }

    pub(crate) fn serves(options: &Options) -> bool {
        let is_f32 = options.param_dtype == DType::F32;
        let is_plain = is_f32 && options.mode == Accumulation::ReduceScatter;
        match options.comm {
            Comm::Local => is_plain,
            // On both axes, ranks that are threads would wait for each other: NCCL takes memory in
            // the first call of the second.
            Comm::Nccl => {
                let Options { mesh, .. } = options;
                let has_one_axis = mesh.replicate_size() == 1 || mesh.shard_size() == 1;
                is_plain && options.reduce_dtype == DType::F32 && has_one_axis
            }
            Comm::Mpi => false,
        }
    }

    /// The part of a rank. Collective.
    pub(crate) fn own<'a>(
        &'a self,
        options: &Options,
        rank: Rank,
    ) -> Result<Box<dyn OwnLoop + 'a>, String> {
        match self {
            Self::OnTheHost(shared) => Ok(Box::new(OnTheHost { shared, rank: rank.index() })),
            Self::ByNccl(meeting) => meeting.own(options, rank),
        }
    }
}

/// Checks the partials of a rank after a step.
pub(crate) fn check(own: &dyn OwnLoop, options: &Options) -> Result<(), String> {
    let expected = GRADIENT * options.microbatches as f32;
    let wrong = own.partials()?.into_iter().find(|element| *element != expected);
    wrong.map_or(Ok(()), |wrong| Err(format!("the bare loop has {wrong}, not {expected}")))
}

struct OnTheHost<'a> {
    shared: &'a Shared,
    rank: usize,
}

impl OwnLoop for OnTheHost<'_> {
    fn step(&mut self) -> Result<(), String> {
        self.shared.step(self.rank);
        Ok(())
    }

    fn partials(&self) -> Result<Vec<f32>, String> {
        let slices = self.shared.partials[self.rank].iter().flatten();
        let elements =
            |slice: &Mutex<Vec<f32>>| slice.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(slices.flat_map(elements).collect())
    }
}

/// Buffers of all ranks, as large as the runtime's, and of the same number.
pub(crate) struct Shared {
    mesh: Mesh,
    units: usize,
    microbatches: usize,
    wire: Wire,
    meeting: Barrier,
    /// By rank and unit.
    shards: Vec<Vec<Vec<f32>>>,
    gradients: Vec<Vec<Vec<f32>>>,
    full_copies: FullCopies,
    /// By copy, shard and the replica that writes it, where there is one copy.
    full: Vec<Vec<Vec<Mutex<Turns>>>>,
    /// By rank, unit, and replica that will all-reduce it.
    partials: Vec<Vec<Vec<Mutex<Vec<f32>>>>>,
}

impl Shared {
    fn new(options: &Options) -> Self {
        let mesh = options.mesh;
        let units = options.units as usize;
        let shard = options.numel() / mesh.shard_size();
        let whole = shard * mesh.shard_size();
        let by_rank_and_unit =
            |value: f32, len| vec![vec![vec![value; len]; units]; mesh.world_size()];
        let slices = || {
            let slice = |replica| {
                let len = balanced(shard, mesh.replicate_size(), replica).len();
                Mutex::new(vec![0.0; len])
            };
            (0..mesh.replicate_size()).map(slice).collect::<Vec<_>>()
        };
        let of_rank = |_| (0..units).map(|_| slices()).collect();
        Self {
            mesh,
            units,
            microbatches: options.microbatches as usize,
            wire: Wire::try_from(options.reduce_dtype).expect("the model has taken it"),
            meeting: Barrier::new(mesh.world_size()),
            shards: by_rank_and_unit(0.0, shard),
            gradients: by_rank_and_unit(GRADIENT, whole),
            full_copies: options.full_copies,
            full: full(options, shard),
            partials: (0..mesh.world_size()).map(of_rank).collect(),
        }
    }

    /// One rank's part of a step.
    fn step(&self, rank: usize) {
        for microbatch in 0..self.microbatches {
            (0..self.units).for_each(|unit| self.gather(rank, unit));
            for unit in (0..self.units).rev() {
                self.gather(rank, unit);
                self.reduce(rank, unit, microbatch);
            }
        }
        self.meeting.wait();
        (0..self.units).for_each(|unit| self.all_reduce(rank, unit));
    }

    fn row(&self, rank: usize) -> Vec<Rank> {
        self.mesh.group(Axis::Shard, Rank::new(rank))
    }

    /// Copies this rank's shard to every member of its row, or its part of the shard to where all
    /// read it.
    fn gather(&self, rank: usize, unit: usize) {
        let Coordinate { replicate_index, shard_index } = self.mesh.coordinate(Rank::new(rank));
        let shard = &self.shards[rank][unit];
        match self.full_copies {
            FullCopies::PerRank => {
                let copies = self.row(rank).into_iter().map(Rank::index);
                let targets: Vec<_> = copies.map(|copy| &self.full[copy][shard_index][0]).collect();
                copy(&targets, unit, shard);
            }
            FullCopies::PerProcess => {
                let part = balanced(shard.len(), self.mesh.replicate_size(), replicate_index);
                let target = &self.full[0][shard_index][replicate_index];
                copy(&[target], unit, &shard[part]);
            }
        }
    }

    /// Sums what the row has of this rank's shard, and adds the mean to its partial.
    fn reduce(&self, rank: usize, unit: usize, microbatch: usize) {
        let row = self.row(rank);
        let own = row.iter().position(|member| member.index() == rank).expect("in its own row");
        let mut at = own * self.shards[rank][unit].len();
        let scaling = Scaling { post: divisor(row.len()), ..Scaling::on(self.wire) };
        let fold = if microbatch == 0 { Fold::Replace } else { Fold::Add };
        for slice in &self.partials[rank][unit] {
            let mut slice = slice.lock().unwrap_or_else(PoisonError::into_inner);
            for partial in slice.chunks_mut(BLOCK) {
                let range = at..at + partial.len();
                let of = |member: &Rank| {
                    Values::F32(&self.gradients[member.index()][unit][range.clone()])
                };
                let contributions: Vec<_> = row.iter().map(of).collect();
                sum_contributions(partial, &contributions, scaling, fold);
                at = range.end;
            }
        }
    }

    /// Sums this rank's slice of its unit over the replicas, and gives all of them the mean.
    fn all_reduce(&self, rank: usize, unit: usize) {
        let column = self.mesh.group(Axis::Replicate, Rank::new(rank));
        let own = column.iter().position(|member| member.index() == rank).expect("in its column");
        let scaling = Scaling { post: divisor(column.len()), ..Scaling::on(self.wire) };
        let slice = |member: &Rank| {
            let slice = &self.partials[member.index()][unit][own];
            slice.lock().unwrap_or_else(PoisonError::into_inner)
        };
        let mut slices: Vec<_> = column.iter().map(slice).collect();
        for start in (0..slices[0].len()).step_by(BLOCK) {
            let range = start..slices[0].len().min(start + BLOCK);
            let mut sum = [0.0; BLOCK];
            let sum = &mut sum[..range.len()];
            let contributions: Vec<_> =
                slices.iter().map(|slice| Values::F32(&slice[range.clone()])).collect();
            sum_contributions(sum, &contributions, scaling, Fold::Replace);
            slices.iter_mut().for_each(|slice| slice[range.clone()].copy_from_slice(sum));
        }
    }
}

/// Reads each block once from memory, and writes it to all targets while it is in the cache.
fn copy(targets: &[&Mutex<Turns>], unit: usize, source: &[f32]) {
    for start in (0..source.len()).step_by(BLOCK) {
        let range = start..source.len().min(start + BLOCK);
        for target in targets {
            let mut target = target.lock().unwrap_or_else(PoisonError::into_inner);
            let target = &mut target[unit % 2][range.clone()];
            copy_past_caches(target, &source[range.clone()]);
        }
    }
}

fn full(options: &Options, shard: usize) -> Vec<Vec<Vec<Mutex<Turns>>>> {
    let (copies, writers) = match options.full_copies {
        FullCopies::PerRank => (options.mesh.world_size(), 1),
        FullCopies::PerProcess => (1, options.mesh.replicate_size()),
    };
    let part = |writer| {
        let zeros = || vec![0.0; balanced(shard, writers, writer).len()];
        Mutex::new([zeros(), zeros()])
    };
    let parts = |_| (0..writers).map(part).collect();
    (0..copies).map(|_| (0..options.mesh.shard_size()).map(parts).collect()).collect()
}

fn divisor(members: usize) -> Divisor {
    Divisor::new(members as f32).expect("a group has members")
}
