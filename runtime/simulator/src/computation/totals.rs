//! The computation of a whole microbatch.

use hsdp_sharding::Role;

use super::shapes::Product;
use super::{Attention, Batch, Computation, Processor};
use crate::WorkCost;

impl Computation {
    /// Sums the costs of a microbatch: all of its kernels, and all launches of the host.
    #[must_use]
    pub(crate) fn of_microbatch(&self, batch: &Batch, on: &Processor) -> WorkCost {
        let costs = self.forwards(batch, on).into_iter().chain(self.backwards(batch, on));
        let sum = |sum: WorkCost, cost: WorkCost| WorkCost {
            host: sum.host + cost.host,
            device: sum.device + cost.device,
        };
        costs.chain([self.loss(batch, on)]).fold(WorkCost::default(), sum)
    }

    /// The floating-point operations of the forward and the backward of a microbatch, without what is computed again: for each token two by
    /// element of a product's matrix, two for the gradient of its inputs, and two for that of a matrix that is trained; and those of attention.
    #[must_use]
    pub fn flops(&self, batch: &Batch) -> f64 {
        let products = self.products();
        let attentions = self.units.iter().filter_map(|unit| unit.attention.as_ref());
        let of_products = products.map(|it| of_product(it, batch));
        let of_attentions = attentions.map(|it| of_attention(it, batch));
        // An empty sum is -0.
        of_products.chain(of_attentions).fold(0.0, |sum, it| sum + it)
    }
}

fn of_product(product: &Product, batch: &Batch) -> f64 {
    let times = if product.role == Role::Trainable { 3.0 } else { 2.0 };
    2.0 * times * product.elements() * batch.tokens()
}

/// Returns the operations of two products over all scores, and of four for their gradients.
fn of_attention(attention: &Attention, batch: &Batch) -> f64 {
    6.0 * 2.0 * batch.scores(attention) * attention.size as f64
}
