//! The all-gather of a unit: shards become whole parameters, side by side in one buffer.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_sharding::UnitLayout;

use super::outcome::{Issued, OnDevice, Part, all_or_none, links};
use crate::execute::Buffers;
use crate::execute::{Meter, Outputs, Work};
use crate::nccl::{Link, Transfer};
use crate::pattern::Pattern;
use crate::{Error, Op};

/// What a member brings.
pub(super) struct GatherContribution {
    pub(super) layout: Arc<UnitLayout>,
    pub(super) shard: Arc<DeviceBuffer>,
    pub(super) full: DeviceBuffer,
    pub(super) part: Part,
}

impl Buffers for GatherContribution {
    type Output = Issued<DeviceBuffer>;

    fn imagined(self, _pattern: &Pattern<'_>) -> Self::Output {
        Issued(Ok(self.full))
    }
}

impl OnDevice for GatherContribution {
    const FUNCTION: u8 = 9;

    fn part(&mut self) -> &mut Part {
        &mut self.part
    }

    fn layout(&self) -> Option<&UnitLayout> {
        Some(&self.layout)
    }
}

/// Every member's shard, copied into every member's buffer.
pub(super) struct Gather {
    layout: Arc<UnitLayout>,
    shards: Vec<Arc<DeviceBuffer>>,
    fulls: Vec<DeviceBuffer>,
    parts: Vec<Part>,
    links: Vec<Link>,
}

impl Gather {
    /// # Errors
    /// If the members do not have the same layout.
    pub(super) fn new(members: Vec<GatherContribution>) -> Result<Self, String> {
        let layout = Arc::clone(&members[0].layout);
        let mut work = Self {
            layout,
            shards: Vec::new(),
            fulls: Vec::new(),
            parts: Vec::new(),
            links: Vec::new(),
        };
        for GatherContribution { layout, shard, full, part } in members {
            if layout != work.layout {
                return Err("ranks have different layouts of one unit".to_owned());
            }
            work.shards.push(shard);
            work.fulls.push(full);
            work.parts.push(part);
        }
        work.links = links(&work.parts)?;
        Ok(work)
    }

    fn issue(&mut self) -> Result<(), Error> {
        if !self.links.is_empty() {
            return self.issue_by_nccl();
        }
        for (full, part) in self.fulls.iter_mut().zip(&self.parts) {
            for (index, shard) in self.shards.iter().enumerate() {
                place(&self.layout, (index, shard), full, part)
                    .map_err(|error| part.failed(Op::AllGather, error))?;
            }
        }
        Ok(())
    }

    /// Both regions, each from where it lies in the shards to where it lies in the whole.
    fn issue_by_nccl(&mut self) -> Result<(), Error> {
        let mut from = 0;
        for region in [self.layout.trainable(), self.layout.frozen()] {
            let own = from..from + region.shard_len;
            from = own.end;
            if region.len > 0 {
                let transfer = |(shard, full)| Transfer {
                    from: Some((shard, own.clone())),
                    to: (full, region.range()),
                };
                let shards = self.shards.iter().map(|shard| &**shard);
                let transfers = shards.zip(&mut self.fulls).map(transfer).collect();
                Link::carry(&self.links, Op::AllGather, transfers)?;
            }
        }
        Ok(())
    }
}

/// Copies both regions of a shard to where they lie in the whole.
fn place(
    layout: &UnitLayout,
    (index, shard): (usize, &DeviceBuffer),
    full: &mut DeviceBuffer,
    part: &Part,
) -> Result<(), CudaError> {
    let mut from = 0;
    for region in [layout.trainable(), layout.frozen()] {
        let (to, len) = (region.start + index * region.shard_len, region.shard_len);
        if len > 0 {
            full.copy(&part.stream, to..to + len, (shard, from..from + len))?;
        }
        from += len;
    }
    Ok(())
}

impl Work for Gather {
    type Output = Issued<DeviceBuffer>;

    fn blocks(&self) -> usize {
        0
    }

    /// To issue is little work, wherever it is done.
    fn bytes(&self) -> usize {
        0
    }

    fn run(&self, _block: usize, _meter: &Meter<'_>) {}

    fn finish(mut self) -> Outputs<Issued<DeviceBuffer>> {
        let issued = self.issue();
        all_or_none(self.fulls, issued).collect()
    }
}
