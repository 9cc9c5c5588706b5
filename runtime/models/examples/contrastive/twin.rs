//! The same training by one process with the whole batch, in plain candle.

use candle_core::{D, Result, Tensor};
use candle_nn::ops;

use super::data::{Pairs, partners};
use super::model::{Parameters, TEMPERATURE};
use super::options::Options;
use super::sgd::Sgd;

/// The state of that process.
#[derive(Debug)]
pub(crate) struct Twin {
    pub(crate) parameters: Parameters,
    sgd: Sgd,
}

impl Twin {
    pub(crate) fn new(options: &Options) -> Result<Self> {
        Ok(Self { parameters: Parameters::new(options)?, sgd: Sgd::default() })
    }

    /// Makes one update, and returns the loss before it.
    pub(crate) fn step(&mut self, options: &Options, step: usize) -> Result<Tensor> {
        let [a, b, c, d] = self.parameters.0.each_ref().map(|parameter| parameter.as_tensor());
        let Pairs { views: [one, other] } = Pairs::whole(options, step)?;
        let [one, other] = [tower(&one, [a, b])?, tower(&other, [c, d])?];
        let places = partners(0, options.batch)?;
        let both = (contrast(&one, &other, &places)? + contrast(&other, &one, &places)?)?;
        let loss = (both * (1.0 / (2.0 * options.batch as f64)))?;
        let gradients = loss.backward()?;
        let of = |parameter: &Tensor| {
            gradients.get(parameter).map_or_else(|| parameter.zeros_like(), |g| Ok(g.clone()))
        };
        let gradients = [of(a)?, of(b)?, of(c)?, of(d)?];
        self.sgd.step(&self.parameters, gradients)?;
        Ok(loss.detach())
    }
}

fn tower(view: &Tensor, [hidden, embed]: [&Tensor; 2]) -> Result<Tensor> {
    let y = view.matmul(hidden)?.gelu()?.matmul(embed)?;
    y.broadcast_div(&y.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)
}

fn contrast(mine: &Tensor, others: &Tensor, places: &Tensor) -> Result<Tensor> {
    let logits = (mine.matmul(&others.t()?)? * (1.0 / TEMPERATURE))?;
    ops::log_softmax(&logits, 1)?.gather(places, 1)?.sum_all()?.neg()
}
