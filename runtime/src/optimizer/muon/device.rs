//! Muon on a device: directions, products and updates there, and the exchange with owners through the host.

use hsdp_kernels::Values;
use hsdp_kernels::cuda::{
    Cublas, CudaError, Device, DeviceBuffer, NewtonSchulzBuffers, PartOfMatrix,
};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{MatrixDType, NewtonSchulz};
use hsdp_sharding::{DType, WholeMatrix};

use super::options::MuonOptions;
use super::parts::{iterations, piece_of, step_of};
use crate::error::Error;
use crate::optimizer::groups::Groups;
use crate::optimizer::held::Held;
use crate::optimizer::run::DeviceRun;
use crate::optimizer::run::reborrow;
use crate::optimizer::updating::Updating;
use crate::optimizer::whole::{Exchange, OnOwner};
use crate::state::model_device::ModelDevice;

/// The buffers of a device that an update needs, which are kept from one to the next.
#[derive(Debug)]
pub(super) struct OnDevice {
    /// Of this rank's parts, in the order in which they are sent.
    directions: DeviceBuffer,
    products: Products,
}

/// The orthogonalization of the matrices that this rank owns.
#[derive(Debug)]
struct Products {
    cublas: Cublas,
    buffers: Vec<(MatrixDType, NewtonSchulzBuffers)>,
    /// One matrix, with room for the largest.
    matrix: DeviceBuffer,
}

impl OnDevice {
    /// # Errors
    /// [`CudaError::MissingLibrary`] without cuBLAS; [`CudaError::OutOfMemory`]; [`CudaError::Driver`].
    pub(super) fn new(
        device: &ModelDevice,
        groups: &Groups<MuonOptions>,
        exchange: &Exchange,
    ) -> Result<Self, CudaError> {
        let device = device.stream.device();
        let directions = of_update(device, exchange.sent_len(), "directions of muon")?;
        Ok(Self { directions, products: Products::new(device, groups, exchange)? })
    }
}

fn of_update(device: &Device, len: usize, what: &str) -> Result<DeviceBuffer, CudaError> {
    let _update = memory::scope(Category::Update);
    DeviceBuffer::new(device, DType::F32, len, what)
}

impl Products {
    fn new(
        device: &Device,
        groups: &Groups<MuonOptions>,
        exchange: &Exchange,
    ) -> Result<Self, CudaError> {
        let mut buffers = Vec::new();
        for dtype in [MatrixDType::F32, MatrixDType::BF16] {
            let owned = exchange.owned().filter(|it| iterations(groups, it).dtype == dtype);
            let sizes: Vec<_> = owned.map(|it| (it.rows, it.columns)).collect();
            if !sizes.is_empty() {
                let of_dtype = {
                    let _update = memory::scope(Category::Update);
                    NewtonSchulzBuffers::new(device, dtype, sizes)?
                };
                buffers.push((dtype, of_dtype));
            }
        }
        let largest = exchange.owned().map(WholeMatrix::numel).max().unwrap_or(0);
        let matrix = of_update(device, largest, "a matrix of muon")?;
        Ok(Self { cublas: Cublas::new(device)?, buffers, matrix })
    }

    /// Orthogonalizes a matrix, and waits for it.
    fn orthogonalize(
        &mut self,
        device: &ModelDevice,
        by: &NewtonSchulz,
        (values, sizes): (&mut [f32], (usize, usize)),
    ) -> Result<(), CudaError> {
        let Self { cublas, buffers, matrix } = self;
        let stream = &*device.stream;
        let mut buffers = buffers.iter_mut().filter(|(dtype, _)| *dtype == by.dtype);
        let (_, buffers) = buffers.next().expect("there are buffers for all owned matrices");
        matrix.write_part(stream, 0, Values::F32(values))?;
        stream.orthogonalize(by, (matrix, 0, sizes), buffers, cublas)?;
        matrix.read_back_into((stream, device.patience), 0, values)
    }
}

impl OnDevice {
    /// Orthogonalizes the directions of a step, on the owners' devices.
    pub(super) fn stage(
        &mut self,
        held: &mut Held,
        exchange: &Exchange,
        groups: &Groups<MuonOptions>,
        updating: &Updating<'_>,
    ) -> Result<(), Error> {
        let failed = |error| updating.site().device(error);
        self.direct(held, exchange, groups, updating).map_err(failed)?;
        let Self { directions, products } = self;
        let device = updating.context.device.as_ref().expect(THERE);
        let fill = |values: &mut [f32]| {
            directions.read_back_into((&*device.stream, device.patience), 0, values).map_err(failed)
        };
        let of = (updating.context, updating.gradients.step);
        let values = exchange.run(
            of,
            fill,
            |_| 0,
            |OnOwner { matrix, copies, .. }| {
                if !updating.updates(matrix.param) {
                    return Ok(());
                }
                let (by, sizes) = (iterations(groups, matrix), (matrix.rows, matrix.columns));
                products.orthogonalize(device, &by, (copies, sizes)).map_err(failed)
            },
        )?;
        directions.write(&device.stream, Values::F32(&values)).map_err(failed)
    }

    /// Computes the directions of all parts, and waits for nothing.
    fn direct(
        &mut self,
        Held { covered, states, .. }: &mut Held,
        exchange: &Exchange,
        groups: &Groups<MuonOptions>,
        updating: &Updating<'_>,
    ) -> Result<(), CudaError> {
        let stream = &*updating.context.device.as_ref().expect(THERE).stream;
        for (part, direction) in exchange.sent() {
            let state = covered.places.of_piece(part.unit, &piece_of(exchange, part)).start;
            let step = step_of(groups, exchange, (part, updating.clip()));
            let (len, shard) = (part.shard.len(), part.shard.start);
            let of_part = PartOfMatrix { len, shard, state, direction };
            let gradient = updating.gradient_on_device(part.unit);
            let momentum = states[0][part.unit.index()].there_mut();
            stream.muon_direction(&mut self.directions, gradient, (&of_part, &step), momentum)?;
        }
        Ok(())
    }

    /// Launches the updates of pieces of a unit, along the orthogonalized directions.
    pub(super) fn launch(
        &self,
        Held { covered, states, .. }: &mut Held,
        exchange: &Exchange,
        groups: &Groups<MuonOptions>,
        DeviceRun { unit, stream, mut update, pieces, clip }: DeviceRun<'_>,
    ) -> Result<(), CudaError> {
        for piece in pieces {
            let options = groups.of(unit, piece.param);
            let state = covered.places.of_piece(unit, &piece).start;
            for (part, range, place) in exchange.within(unit, &piece) {
                let step = options.of_step(exchange.matrix(part), clip);
                let (len, shard) = (range.len(), piece.shard_start + range.start);
                let (state, direction) = (state + range.start, place.start);
                let of_part = PartOfMatrix { len, shard, state, direction };
                let momentum = states[0][unit.index()].there_mut();
                let (update, by) = (reborrow(&mut update), (&of_part, &step));
                stream.muon(update, by, &self.directions, momentum)?;
            }
        }
        Ok(())
    }
}

/// The place of the model and of its state, in a panic that cannot be.
const THERE: &str = "the model is updated on a device";
