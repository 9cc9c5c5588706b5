//! The op that ties the last collective into a loss.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use crate::zeros;

/// Op that returns its first parent, a loss. The second parent is the last collective of a tape. So
/// this collective and all earlier ones take part in the backward, even if the loss does not depend
/// on them.
pub(super) struct Tie;

impl CustomOp2 for Tie {
    fn name(&self) -> &'static str {
        "tie"
    }

    fn cpu_fwd(
        &self,
        loss: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let at = layout.start_offset();
        let loss = match loss {
            CpuStorage::F64(values) => CpuStorage::F64(vec![values[at]]),
            CpuStorage::F32(values) => CpuStorage::F32(vec![values[at]]),
            CpuStorage::F16(values) => CpuStorage::F16(vec![values[at]]),
            CpuStorage::BF16(values) => CpuStorage::BF16(vec![values[at]]),
            _ => bail!("a loss must be f64, f32, f16 or bf16"),
        };
        Ok((loss, layout.shape().clone()))
    }

    fn bwd(
        &self,
        loss: &Tensor,
        last: &Tensor,
        _tied: &Tensor,
        cotangent: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((loss.track_op().then(|| cotangent.clone()), zeros::for_parent(last)?))
    }
}
