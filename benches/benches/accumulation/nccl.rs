//! The same collectives over as many elements by NCCL alone, for ranks that share a device: no
//! plan, no descriptors, and no comparison of calls. Gradients are not packed. The reduced shard is
//! added to the partial by the runtime's own kernel, as every step has to.

use std::error::Error;

use hsdp::Rank;
use hsdp_benches::steps::GRADIENT;
use hsdp_comm::Op;
use hsdp_comm::nccl::{Communicator, Patience, Transfer, UniqueId};
use hsdp_kernels::cuda::{Device, DeviceBuffer, Stream};
use hsdp_kernels::{Divisor, Fold, Values};
use hsdp_sharding::{Coordinate, DType};

use crate::bare::OwnLoop;
use crate::options::Options;
use crate::ranks::ON_A_DEVICE;

/// The ranks of this process, before they have met.
pub(crate) struct Meeting(UniqueId);

impl Meeting {
    pub(crate) fn new() -> Result<Self, String> {
        UniqueId::new().map(Self).map_err(|error| error.to_string())
    }

    /// A rank's loop. Collective.
    pub(crate) fn own(&self, options: &Options, rank: Rank) -> Result<Box<dyn OwnLoop>, String> {
        let own = ByNccl::new(options, self.0, rank).map_err(|error| error.to_string())?;
        Ok(Box::new(own))
    }
}

/// A rank's part of the loop.
struct ByNccl {
    microbatches: usize,
    post: Divisor,
    stream: Stream,
    row: Communicator,
    column: Communicator,
    units: Vec<Unit>,
    /// The gathered units, by turns.
    full: [DeviceBuffer; 2],
    scattered: DeviceBuffer,
    /// The row and the column are split from it.
    _all: Communicator,
}

struct Unit {
    shard: DeviceBuffer,
    gradient: DeviceBuffer,
    partial: DeviceBuffer,
}

impl ByNccl {
    fn new(options: &Options, id: UniqueId, rank: Rank) -> Result<Self, Box<dyn Error>> {
        let mesh = options.mesh;
        let device = Device::new(0)?;
        let stream = device.stream()?;
        let patience = Patience::until(ON_A_DEVICE, || false);
        let size = mesh.world_size();
        let mut all = Communicator::join(&device, id, rank.index(), size, patience)?;
        let Coordinate { replicate_index, shard_index } = mesh.coordinate(rank);
        let row = all.split(replicate_index, shard_index)?;
        let column = all.split(shard_index, replicate_index)?;
        let shard = options.numel() / mesh.shard_size();
        let whole = shard * mesh.shard_size();
        let of = |value, len| filled(&stream, value, len);
        let unit = |_| -> Result<_, Box<dyn Error>> {
            let gradient = of(GRADIENT, whole)?;
            let partial = of(0.0, shard)?;
            Ok(Unit { shard: of(0.0, shard)?, gradient, partial })
        };
        Ok(Self {
            microbatches: options.microbatches as usize,
            post: Divisor::new(mesh.world_size() as f32).expect("there are ranks"),
            units: (0..options.units).map(unit).collect::<Result<_, _>>()?,
            full: [of(0.0, whole)?, of(0.0, whole)?],
            scattered: of(0.0, shard)?,
            stream,
            row,
            column,
            _all: all,
        })
    }

    fn gather(&mut self, unit: usize) -> Result<(), Box<dyn Error>> {
        let transfer = Transfer::whole(Some(&self.units[unit].shard), &mut self.full[unit % 2]);
        Ok(self.row.issue(Op::AllGather, &self.stream, transfer)?)
    }

    fn reduce(&mut self, unit: usize, fold: Fold) -> Result<(), Box<dyn Error>> {
        let Unit { gradient, partial, .. } = &mut self.units[unit];
        let transfer = Transfer::whole(Some(gradient), &mut self.scattered);
        self.row.issue(Op::ReduceScatter, &self.stream, transfer)?;
        let all = 0..self.scattered.len();
        Ok(self.stream.sum(partial, &[&self.scattered], all, self.post, fold, None)?)
    }

    fn try_step(&mut self) -> Result<(), Box<dyn Error>> {
        for microbatch in 0..self.microbatches {
            let fold = if microbatch == 0 { Fold::Replace } else { Fold::Add };
            (0..self.units.len()).try_for_each(|unit| self.gather(unit))?;
            for unit in (0..self.units.len()).rev() {
                self.gather(unit)?;
                self.reduce(unit, fold)?;
            }
        }
        for Unit { partial, .. } in &mut self.units {
            let transfer = Transfer::whole(None, partial);
            self.column.issue(Op::AllReduce, &self.stream, transfer)?;
        }
        Ok(self.stream.moment()?.wait("a step", ON_A_DEVICE)?)
    }
}

impl OwnLoop for ByNccl {
    fn step(&mut self) -> Result<(), String> {
        self.try_step().map_err(|error| error.to_string())
    }

    fn partials(&self) -> Result<Vec<f32>, String> {
        let read = |unit: &Unit| unit.partial.read_back(&self.stream, ON_A_DEVICE);
        let all: Result<Vec<_>, _> = self.units.iter().map(read).collect();
        let all = all.map_err(|error| error.to_string())?;
        Ok(all.iter().flat_map(|partial| partial.values().to_f32()).collect())
    }
}

fn filled(stream: &Stream, value: f32, len: usize) -> Result<DeviceBuffer, Box<dyn Error>> {
    let mut buffer = DeviceBuffer::new(stream.device(), DType::F32, len, "the bare loop")?;
    buffer.write(stream, Values::F32(&vec![value; len]))?;
    Ok(buffer)
}
