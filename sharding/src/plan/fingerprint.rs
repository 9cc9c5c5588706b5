//! The fingerprint: one hash over everything that must agree between ranks.
//!
//! The encoding is canonical: numbers are 8 bytes in little-endian order; texts and lists begin
//! with their length, so different inputs have different bytes. The encoding begins with a version,
//! which must go up when the encoding changes.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::{Accumulation, FullCopies, PlanOptions, StateOver};
use crate::{
    AfterForward, BufferRule, DType, Granularity, Matrices, Mesh, ModelSpec, Param, Region, Role,
    Statistics, Unit, UnitId, UnitLayout,
};

const VERSION: &str = "hsdp plan 2";

pub(super) fn of(
    spec: &ModelSpec,
    mesh: Mesh,
    options: &PlanOptions,
    layouts: &[Arc<UnitLayout>],
) -> u64 {
    let mut encoder = Encoder(Xxh3::new());
    encoder.text(VERSION);
    encoder.size(mesh.replicate_size());
    encoder.size(mesh.shard_size());
    encoder.options(options);
    encoder.list(spec.units().iter(), Encoder::unit);
    encoder.list(spec.ties(), |encoder, (alias, target)| {
        encoder.text(alias);
        encoder.text(target);
    });
    encoder.list(layouts.iter(), |encoder, layout| encoder.layout(layout));
    // Statistics, blocks of state, buffers, settings and state over the world came later. A model
    // without them has the fingerprint that it had before. No list begins with these numbers.
    if spec.units().iter().any(|unit| !unit.statistics.is_empty()) {
        encoder.number(u64::MAX - 1);
        encoder.list(spec.units().iter(), |encoder, unit| {
            encoder.list(unit.statistics.iter(), Encoder::statistics);
        });
    }
    let block = |param: &Param| match param.role {
        Role::Trainable => param.state.block(),
        Role::Frozen => None,
    };
    if spec.params().any(|(_, param)| block(param).is_some()) {
        encoder.number(u64::MAX - 2);
        encoder.list(spec.units().iter(), |encoder, unit| {
            encoder.list(unit.params.iter(), |encoder, param| {
                encoder.size(block(param).unwrap_or(0));
            });
        });
    }
    if spec.buffers().next().is_some() {
        encoder.number(u64::MAX);
        encoder.list(spec.units().iter(), |encoder, unit| {
            encoder.list(unit.buffers.iter(), Encoder::buffer);
        });
    }
    if spec.settings().len() > 0 {
        encoder.list(spec.settings(), |encoder, (name, value)| {
            encoder.text(name);
            encoder.text(value);
        });
    }
    if options.state == StateOver::World {
        encoder.number(u64::MAX - 3);
    }
    encoder.0.digest()
}

/// A hash of an order of units.
pub(super) fn of_order(order: &[UnitId]) -> u64 {
    let mut encoder = Encoder(Xxh3::new());
    encoder.list(order.iter(), |encoder, unit| encoder.size(unit.index()));
    encoder.0.digest()
}

struct Encoder(Xxh3);

impl Encoder {
    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    fn size(&mut self, size: usize) {
        self.number(size as u64);
    }

    fn text(&mut self, text: &str) {
        self.size(text.len());
        self.0.update(text.as_bytes());
    }

    fn list<T>(&mut self, items: impl ExactSizeIterator<Item = T>, encode: impl Fn(&mut Self, T)) {
        self.size(items.len());
        items.for_each(|item| encode(self, item));
    }

    fn options(&mut self, options: &PlanOptions) {
        self.text(options.param_dtype.name());
        self.text(options.reduce_dtype.name());
        self.number(match options.accumulation {
            Accumulation::ReduceScatter => 0,
            Accumulation::Every => 1,
            Accumulation::Local => 2,
        });
        self.size(options.prefetch);
        self.number(match options.full_copies {
            FullCopies::PerRank => 0,
            FullCopies::PerProcess => 1,
        });
        // Plans of version 2 had the f32 of optimizer state of an element here.
        self.size(2);
    }

    fn unit(&mut self, unit: &Unit) {
        self.text(&unit.name);
        let after_forward = match unit.after_forward {
            AfterForward::Reshard => 0,
            AfterForward::Keep => 1,
            AfterForward::Discard => 2,
        };
        // Compute dtypes of units came later. A unit without one has the number that it had before.
        let compute = match unit.compute_dtype {
            None => 0,
            Some(DType::F32) => 3,
            Some(DType::BF16) => 6,
            // The only other dtype that a valid unit declares is f16.
            Some(_) => 9,
        };
        self.number(after_forward + compute);
        self.list(unit.params.iter(), Self::param);
    }

    fn param(&mut self, param: &Param) {
        self.text(&param.name);
        self.list(param.shape.iter(), |encoder, &dim| encoder.size(dim));
        // A valid parameter that is stored in the compute dtype is frozen, and of 16 bits.
        let kind = match (param.role, param.stored) {
            (Role::Trainable, _) => 0,
            (Role::Frozen, None) => 1,
            (Role::Frozen, Some(DType::F16)) => 2,
            (Role::Frozen, Some(_)) => 3,
        };
        // Blocks and views came later. A parameter without them has the number that it had before.
        let blocks = if let Granularity::Blocks(_) = param.granularity { 4 } else { 0 };
        let view = if param.view.is_some() { 8 } else { 0 };
        self.number(kind + blocks + view);
        // Granularity "element" is 0 rows, which no valid parameter asks for.
        self.size(match param.granularity {
            Granularity::Element => 0,
            Granularity::Rows(rows) => rows,
            Granularity::Blocks(elements) => elements,
        });
        if let Some(Matrices { count, rows, columns }) = param.view {
            [count, rows, columns].into_iter().for_each(|size| self.size(size));
        }
    }

    fn statistics(&mut self, statistics: &Statistics) {
        self.text(&statistics.name);
        self.size(statistics.channels);
    }

    fn buffer(&mut self, buffer: &Param) {
        self.text(&buffer.name);
        self.list(buffer.shape.iter(), |encoder, &dim| encoder.size(dim));
        self.number(match buffer.buffer {
            Some(BufferRule::Averaged) => 1,
            Some(BufferRule::Equal) | None => 0,
        });
    }

    /// The layout follows from the other inputs, but only within one version of the planner.
    fn layout(&mut self, layout: &UnitLayout) {
        self.region(layout.trainable());
        self.region(layout.frozen());
        self.list(layout.params().iter(), |encoder, slot| encoder.size(slot.start));
    }

    fn region(&mut self, region: Region) {
        self.size(region.start);
        self.size(region.len);
        self.size(region.shard_len);
    }
}
